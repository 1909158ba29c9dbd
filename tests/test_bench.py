"""The kernel benchmark's harness: with a clock of its own on the CPU, with the real one on a Hopper GPU."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pandas
import pytest
import torch
from omegaconf import OmegaConf

from snapmla import record
from snapmla.bench import machine
from snapmla.bench.inputs import Pool, check_random
from snapmla.bench.timing import CudaClock, calls_in_a_window, measure, measure_together
from snapmla.bench.variants import NO_GPU, Variant, Workload, check, decode_calls, step_calls, why_not
from snapmla.experiments import kernel_bench

CONF = Path(__file__).parents[1] / "conf" / "variant"
VARIANTS = {
    name: Variant(**fields)
    for path in sorted(CONF.glob("*.yaml"))
    for name, fields in OmegaConf.load(path).items()
}


class FakeClock:
    """Its time passes only in calls (`work`) and flushes; it remembers what happened in which order."""

    def __init__(self) -> None:
        self.now, self.events = 0.0, []

    def work(self, microseconds: float):
        def call() -> None:
            self.events.append("call")
            self.now += microseconds

        return call

    def capture(self, calls):
        def run() -> None:
            for call in calls:
                call()

        return run

    def flush(self) -> None:
        self.events.append("flush")
        self.now += 1000.0

    def window_us(self, run) -> float:
        self.events.append("start")
        before = self.now
        run()
        self.events.append("end")
        return self.now - before


def test_flushes_lie_outside_the_windows():
    clock = FakeClock()
    timing = measure(clock, [clock.work(10.0)] * 3, seconds=0)
    assert timing.time_us == 10.0 and timing.spread == 0 and timing.windows == 9
    window = ["flush", "start", *["call"] * 3, "end"]
    assert clock.events == window * 10  # the first one warms up


def test_the_median_and_the_spread_are_of_the_windows():
    clock = FakeClock()
    times = iter([1000.0, *range(1, 101)])  # the first window is not counted

    def call() -> None:
        clock.now += next(times)

    timing = measure(clock, [call], seconds=0.1)
    assert timing.windows == 100 and timing.time_us == 50.5
    assert timing.spread == pytest.approx((90.9 - 10.1) / 50.5)


def test_variants_take_turns():
    """Both meet the same machine, however it changes."""
    clock, slower = FakeClock(), 0.0

    def call(base):
        def run():
            nonlocal slower
            slower += 1.0
            clock.now += base + slower

        return run

    both = measure_together(clock, {"a": [call(100.0)], "b": [call(200.0)]}, seconds=0)
    assert both["b"].time_us - both["a"].time_us == pytest.approx(101.0) and both["a"].windows == 9


def test_rests_lie_outside_the_windows(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr("time.sleep", lambda seconds: clock.events.append(seconds))
    assert measure(clock, [clock.work(10.0)], seconds=0, rest=0.05).time_us == 10.0
    window = ["flush", "start", "call", "end"]
    assert clock.events == window + [0.05, *window] * 9


@pytest.mark.parametrize(("seconds", "windows"), [(0.0, 9), (0.01, 10), (1.0, 200)])
def test_the_number_of_windows_follows_the_time(seconds, windows):
    clock = FakeClock()
    assert measure(clock, [clock.work(1000.0)], seconds=seconds).windows == windows


def test_a_window_reads_more_than_the_cache_holds():
    assert calls_in_a_window(10, 50) == 20 and calls_in_a_window(1000, 50) == 1
    assert calls_in_a_window(1, 10**9) == 32  # at most; the flush makes the first calls cold


@pytest.mark.parametrize(
    "constant", [torch.zeros(64, 32), torch.randn(64, 1).expand(64, 32), torch.randn(32).expand(64, 32)]
)
def test_constant_inputs_are_refused(constant):
    check_random(torch.randn(64, 32))
    with pytest.raises(ValueError, match="inputs must be random, got constant rows or columns"):
        check_random(constant)


def test_pages_are_random_and_used_evenly():
    pool = Pool(100, device="cpu")
    table = pool.block_table(3, 70 * 64, 0)  # 210 pages of 100
    assert table.shape == (3, 70) and table.dtype == torch.int32
    assert set(torch.bincount(table.flatten(), minlength=100).tolist()) == {2, 3}
    assert not torch.equal(table, pool.block_table(3, 70 * 64, 1))


def test_formats_hold_the_same_tokens():
    pool = Pool(3, device="cpu")
    bf16, ours, fp8 = (pool.format(name) for name in ("bf16", "snapmla", "fp8"))
    rows = bf16.view(-1, 576).float()
    back = ours.fetch(torch.arange(3 * 64)).float()
    assert (back - rows).norm() < 0.04 * rows.norm()
    assert (fp8.view(-1, 576).float() - rows).norm() < 0.04 * rows.norm()
    spread = ours.scale.flatten()
    assert spread.max() > 1.5 * spread.min()  # tokens differ in size


def test_a_step_appends_its_tokens_and_decodes_over_them():
    """On the CPU, where a call is the emulation."""
    pool, workload = Pool(8, device="cpu"), Workload(2, 2, 3, 100)
    table = pool.block_table(3, 100, seed=0)
    cache = pool.format("snapmla")
    cache.content.view(torch.uint8).fill_(0)
    step = step_calls(pool, workload, [table])[0]
    out, lse = step()
    written = cache.content.view(torch.uint8).flatten(0, 1).any(-1).nonzero().flatten()
    last = table[:, 1].long() * 64
    assert sorted(written.tolist()) == sorted([*(last + 34).tolist(), *(last + 35).tolist()])
    decoded, decoded_lse = decode_calls(VARIANTS["snapmla"], pool, workload, [table])[0]()
    assert torch.equal(out, decoded) and torch.equal(lse, decoded_lse)


def test_a_line_of_nvidia_smi():
    sample = machine.parse("1755, 3201, 612.34, 700.00, 0x0000000000000004\n")
    assert sample["clocks.sm"] == 1755 and sample["clocks_event_reasons.active"] == 4
    assert machine.parse("[N/A], 3201, 612.34, 700.00, 0x4") is None and machine.parse("") is None
    monitor = machine.Monitor()
    monitor.samples = [(1.0, sample), (2.0, sample | {"clocks.sm": 1500.0}), (9.0, sample)]
    row = monitor.between(0.5, 2.5)
    assert row == {"sm_mhz": 1627.5, "power_w": 612.34, "power_limit_w": 700.0, "throttle": "power cap"}
    assert set(monitor.between(3.0, 4.0).values()) == {None}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_cannot_run_says_why(name):
    variant = VARIANTS[name]
    check({name: variant})
    assert why_not(variant, None) == NO_GPU
    reason = why_not(variant, "NVIDIA H200", Workload(16, 2, 32, 1024))
    assert reason is None if name == "snapmla" else reason is None or reason.endswith(".")


def test_unknown_kernels_and_caches_are_refused():
    with pytest.raises(ValueError, match="variant.x.kernel must be among snapmla, .*, got 'flash'"):
        check({"x": Variant("flash", "bf16")})
    with pytest.raises(ValueError, match="variant.x.cache must be bf16 or fp8 for flashmla, got 'snapmla'"):
        check({"x": Variant("flashmla", "snapmla")})


def test_least_times():
    """64 heads at 64k, batch 32, at an H200's measured ceilings: bound by memory, 0.302 ms."""
    workload = Workload(64, 1, 32, 65536)
    ours = VARIANTS["snapmla"]
    flops, moved, us = kernel_bench.least_time(ours, workload, 4.47, 805, 1490)
    assert flops == 2176 * 64 * 32 * 65536 and moved == pytest.approx(32 * 65536 * 644, rel=0.01)
    assert us == pytest.approx(302, rel=0.01)
    us = kernel_bench.least_time(ours, Workload(128, 1, 32, 65536), 4.47, 805, 1490)[2]
    assert us == pytest.approx(584e9 / 1417e12 * 1e6, rel=0.02)  # bound by the mix of rates
    theirs = {name: kernel_bench.least_time(v, workload, 4.47, 805, 1490) for name, v in VARIANTS.items()}
    assert theirs["flashmla_bf16"] == theirs["flashinfer_bf16"] == theirs["torch_sdpa"]
    assert theirs["flashmla_bf16"][1] > 1.7 * moved and theirs["flashmla_fp8"][1] < 0.91 * moved
    assert theirs["flashinfer_fp8kv"][2] == pytest.approx(flops / 805e6)  # computes in BF16


def measured_results(folder, gpu="NVIDIA H200", status="ok"):
    for name in record.TABLES.values():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"variant": "snapmla", "time_us": 1.5, "source": "measured", "status": status, "gpu": gpu}]
        pandas.DataFrame(rows).to_csv(path, index=False)
        (path.parent / "run.json").write_text(f'{{"experiment": "{path.parent.name}", "provenance": {{}}}}')
    return folder


def test_recording_keeps_the_tables_and_their_digests(tmp_path, capsys):
    source, recorded = measured_results(tmp_path / "results"), tmp_path / "recorded"
    assert record.main(["--results", str(source), "--recorded", str(recorded)]) == 0
    folder = recorded / "h200"
    assert capsys.readouterr().out.strip() == str(folder)
    runs = {record.run_file(name) for name in record.TABLES}
    assert {path.name for path in folder.iterdir()} == {*record.TABLES, *runs, "manifest.json"}
    assert set(pandas.read_csv(folder / "kernel_bench.csv")["source"]) == {"recorded"}
    assert json.loads((folder / "drift.json").read_text())["experiment"] == "drift"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["rows"] == dict.fromkeys(record.TABLES, 1)
    assert set(manifest["sha256"]) == {*record.TABLES, *runs}


def test_recording_anew_replaces_what_was_measured_and_keeps_the_rest(tmp_path):
    """A second run that measured quality only, and drift on a CPU."""
    recorded = tmp_path / "recorded"
    record.record([measured_results(tmp_path / "first")], recorded)
    second = measured_results(tmp_path / "second")
    for name, file in record.TABLES.items():
        if name == "quality.csv":
            pandas.read_csv(second / file).assign(time_us=2.5).to_csv(second / file, index=False)
        elif name == "drift.csv":
            pandas.read_csv(second / file).assign(time_us=3.5, gpu=None).to_csv(second / file, index=False)
        else:
            (second / file).unlink()
    folder = record.record([second], recorded)
    times = {name: pandas.read_csv(folder / name)["time_us"].item() for name in record.TABLES}
    assert times == dict.fromkeys(record.TABLES, 1.5) | {"quality.csv": 2.5}
    digest = hashlib.sha256((folder / "quality.csv").read_bytes()).hexdigest()
    assert json.loads((folder / "manifest.json").read_text())["sha256"]["quality.csv"] == digest


def test_rows_of_several_runs_make_one_table(tmp_path):
    """The second of them measured fidelity only."""
    first, second = (measured_results(tmp_path / name) for name in ("32k", "64k"))
    for name, file in record.TABLES.items():
        if name != "fidelity.csv":
            (second / file).unlink()
    (second / "fidelity" / "run.json").write_text('{"experiment": "the second"}')
    folder = record.record([first, second], tmp_path / "recorded")
    rows = {name: len(pandas.read_csv(folder / name)) for name in record.TABLES}
    assert rows == dict.fromkeys(record.TABLES, 1) | {"fidelity.csv": 2}
    run = json.loads((folder / "fidelity.json").read_text())
    assert run["experiment"] == "fidelity" and run["more_runs"] == [{"experiment": "the second"}]
    assert "more_runs" not in json.loads((folder / "quality.json").read_text())


def test_points_are_added_to_recorded_ones(tmp_path):
    """A second run measured one layout anew and another for the first time; a third point failed, and stays what it was."""

    def results_of(name, rows):
        path = tmp_path / name / "throughput" / "throughput.csv"
        path.parent.mkdir(parents=True)
        common = {"variant": "snapmla", "model": "m", "scope": "rank", "routing": "uniform", "context": 64, "pool_gb": None}
        told = [common | {"source": "measured", "status": "ok", "gpu": "NVIDIA H200"} | row for row in rows]
        pandas.DataFrame(told).to_csv(path, index=False)
        path.with_name("run.json").write_text(json.dumps({"experiment": name}))
        return tmp_path / name

    first = results_of("first", [{"layout": "a", "step_ms": 1}, {"layout": "b", "step_ms": 2}, {"layout": "b", "step_ms": 3, "pool_gb": 9.0}])
    second = results_of(
        "second",
        [{"layout": "b", "step_ms": 4}, {"layout": "c", "step_ms": 5}, {"layout": "a", "step_ms": None, "status": "not run"}],
    )
    more = ["--recorded", str(tmp_path / "recorded"), "--add"]
    for source in (first, second):
        assert record.main(["--results", str(source), *more]) == 0
    table = pandas.read_csv(tmp_path / "recorded" / "h200" / "throughput.csv")
    steps = {(row.layout, row.pool_gb == 9): row.step_ms for row in table.itertuples()}
    assert steps == {("a", False): 1, ("b", True): 3, ("b", False): 4, ("c", False): 5} and len(table) == 4
    run = json.loads((tmp_path / "recorded" / "h200" / "throughput.json").read_text())
    assert run == {"experiment": "first", "more_runs": [{"experiment": "second"}]}
    folder = record.record([second], tmp_path / "recorded")
    assert len(pandas.read_csv(folder / "throughput.csv")) == 3 and "more_runs" not in json.loads((folder / "throughput.json").read_text())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "not run"}, "must hold rows measured on a Hopper GPU, got none"),
        ({"gpu": "NVIDIA H20"}, "must come from one GPU"),
    ],
)
def test_nothing_that_was_not_measured_is_recorded(tmp_path, change, message):
    source = measured_results(tmp_path / "results", **change)
    if "gpu" in change:
        table = source / "accumulation" / "kernels.csv"
        pandas.read_csv(table).assign(gpu="NVIDIA H100").to_csv(table, index=False)
    with pytest.raises(ValueError, match=message):
        record.record([source], tmp_path / "recorded")
    assert not (tmp_path / "recorded").exists()


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA GH200 480GB", "gh200-480gb")],
)
def test_recorded_folders_are_named_for_the_gpu(gpu, name):
    assert record.folder_name(gpu) == name


@pytest.mark.gpu
class TestOnAGpu:
    """The same harness for real."""

    def time(
        self, workload: Workload, pool: Pool, clock: CudaClock, variant: Variant = VARIANTS["snapmla"]
    ) -> float:
        tables = [pool.block_table(workload.batch, workload.context, seed) for seed in range(4)]
        return measure(clock, decode_calls(variant, pool, workload, tables), seconds=0.05).time_us

    def test_a_call_that_does_nothing_takes_under_10_us(self):
        nothing = torch.zeros(1, device="cuda")
        assert measure(CudaClock(), [lambda: nothing.add_(1)], seconds=0.05).time_us < 10

    def test_the_clock_is_right(self):
        """A kernel that waits a given number of cycles, alone and four times in a window."""
        clock = CudaClock()
        one, four = (measure(clock, [lambda: torch.cuda._sleep(2_000_000)] * n, seconds=0.05) for n in (1, 4))
        assert 900 < one.time_us < 2500 and four.time_us == pytest.approx(one.time_us, rel=0.1)

    def test_time_grows_with_the_length_and_the_batch(self):
        pool, clock = Pool(16384), CudaClock()
        short = self.time(Workload(64, 1, 8, 32768), pool, clock)
        assert 1.6 < self.time(Workload(64, 1, 8, 65536), pool, clock) / short < 2.2
        assert 1.6 < self.time(Workload(64, 1, 16, 32768), pool, clock) / short < 2.2

    def test_every_variant_that_is_there_is_timed(self):
        pool, clock, workload = Pool(2048), CudaClock(), Workload(16, 1, 4, 2048)
        for variant in VARIANTS.values():
            if why_not(variant, "here", workload) is None:
                assert self.time(workload, pool, clock, variant) > 5
        tables = [pool.block_table(4, 2048, 0)]
        step = measure(clock, step_calls(pool, workload, tables), seconds=0.02)
        assert step.time_us > self.time(workload, pool, clock)
