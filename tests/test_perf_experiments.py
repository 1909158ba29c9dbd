"""The throughput model and the kernel benchmark's tables, with configurations composed from conf/."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import hydra
import pandas
import pytest
from omegaconf import OmegaConf

from snapmla import results
from snapmla.bench.inputs import Pool
from snapmla.bench.machine import Monitor
from snapmla.experiments import kernel_bench, throughput
from snapmla.models import DEEPSEEK_V3_1, ParallelLayout
from snapmla.roofline import GPUS, get_gpu


def compose(experiment: str, *overrides: str):
    """The configuration that ``main`` of the experiment gets."""
    with hydra.initialize_config_dir(str(results.conf_dir()), version_base="1.3"):
        return OmegaConf.to_object(hydra.compose(f"{experiment}_application", list(overrides)))


@pytest.mark.parametrize(
    ("variant", "context", "batch", "step_ms"),
    [
        ("bf16", 16384, 25, 44.4), ("bf16", 65536, 6, 38.7), ("bf16", 131072, 3, 34.1),
        ("snapmla", 32768, 25, 46.3), ("snapmla", 65536, 12, 44.3), ("snapmla", 131072, 6, 40.9),
    ],
)  # fmt: skip
def test_model_agrees_with_recorded_steps(variant: str, context: int, batch: int, step_ms: float):
    """vLLM 0.25.1 on one H200: one rank of DP8/TP1 (32 of 256 experts, tokens spread over them), recorded.

    ``other_us`` and the shares of attention are fitted to these; weights and routing are not.
    """
    rank = replace(DEEPSEEK_V3_1, routed_experts=32)
    point = ParallelLayout(1, 1), batch, context, variant
    step = throughput.model_step(compose("throughput"), get_gpu("H200"), rank, *point)
    assert step.step_ms == pytest.approx(step_ms, rel=0.07)


def test_throughput_rows():
    cfg = compose("throughput")
    rows = throughput.table(cfg)
    assert len(rows) == 2 * 3 * 4 * 2
    assert {row["source"] for row in rows} == {"modelled"}
    for row in rows:
        assert tuple(row) == throughput.COLUMNS
        assert row["status"] == "ok" and row["reason"] is None
        dp = ParallelLayout.parse(row["layout"]).dp
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * dp / row["step_ms"] * 1e3)
        assert row["bytes_per_token"] == {"bf16": 1152, "snapmla": 644}[row["variant"]]
        assert 0 < row["attention_ms"] < row["step_ms"]
    batch = {(r["variant"], r["model"], r["layout"], r["context"]): r["batch"] for r in rows}
    # Recorded: 425,342 BF16 tokens, hence 3 sequences of 128k; the same pool holds 5 at 644 bytes, a prefill's 3 GiB one more.
    assert batch["bf16", "DeepSeek-V3.1", "DP8/TP1", 131072] == 3
    assert batch["snapmla", "DeepSeek-V3.1", "DP8/TP1", 131072] == 6


@pytest.mark.parametrize(
    ("variant", "batch", "context", "recorded_ms"),
    [("bf16", 25, 16384, 13.1), ("bf16", 3, 131072, 12.3), ("snapmla", 51, 16384, 16.6), ("snapmla", 6, 131072, 14.7)],
)
def test_attention_is_at_the_stated_share_of_the_roofline(variant: str, batch: int, context: int, recorded_ms: float):
    """128 heads, compute bound: attention in vLLM's steps, recorded on an H200."""
    point = ParallelLayout(8, 1), batch, context, variant
    step = throughput.model_step(compose("throughput"), get_gpu("H200"), DEEPSEEK_V3_1, *point)
    assert step.attention_ms == pytest.approx(recorded_ms, rel=0.05)


def test_communication_and_linear_layers_enter_the_step():
    args = (get_gpu("H200"), DEEPSEEK_V3_1, ParallelLayout(8, 1))
    plain = throughput.model_step(compose("throughput"), *args, 8, 16384, "snapmla")
    talking = throughput.model_step(compose("throughput", "communication_us=100"), *args, 8, 16384, "snapmla")
    assert talking.step_ms - plain.step_ms == pytest.approx(6.1)
    assert plain.gemm_ms < plain.weights_ms  # small batches wait for weights
    big = throughput.model_step(compose("throughput"), *args, 4096, 64, "snapmla")
    assert big.gemm_ms > big.weights_ms
    assert big.step_ms == pytest.approx(big.attention_ms + big.gemm_ms + big.other_ms)


def test_layouts_that_do_not_fit_are_not_run():
    rows = throughput.table(compose("throughput", "engine.gpu=H100", "contexts=[16384]"))
    by_layout = {(r["model"], r["layout"], r["variant"]): r for r in rows}
    unfit = by_layout["DeepSeek-V3.1", "DP8/TP1", "snapmla"]
    assert unfit["status"] == "not run"
    assert unfit["reason"].startswith("On the H100, the weights of DeepSeek-V3.1 in DP8/TP1 must fit")
    assert all(
        unfit[key] is None
        for key in ("bytes_per_token", "memory_gb", "batch", "step_ms", "attention_ms", "tokens_per_s")
    )


def test_speedups_pair_what_both_ran():
    cfg = compose("throughput", "contexts=[131072]", "models=[DeepSeek-V3.1]", "layouts=[DP8/TP1]")
    rows = throughput.table(cfg)
    speed = {row["variant"]: row["tokens_per_s"] for row in rows}
    assert throughput.speedups(rows) == {"DeepSeek-V3.1/DP8/TP1/131072": speed["snapmla"] / speed["bf16"]}
    rows[0]["tokens_per_s"] = None
    assert throughput.speedups(rows) == {}


def test_fig5_shapes_are_the_workloads():
    cfg = compose("kernel_bench", "fig5.contexts=[131072]")
    shapes = kernel_bench.fig5_shapes(cfg.fig5, cfg.engine)
    assert [(s.layout, s.heads) for s in shapes] == [
        ("DP1/TP8", 16), ("DP4/TP2", 64), ("DP8/TP1", 128), ("DP1/TP8", 8), ("DP4/TP2", 32), ("DP8/TP1", 64),
    ]  # fmt: skip
    throughput_rows = throughput.table(compose("throughput", "contexts=[131072]", "variants=[bf16]"))
    assert [s.batch for s in shapes] == [row["batch"] for row in throughput_rows]


def test_fig6_grid():
    cfg = compose("kernel_bench")
    shapes = kernel_bench.fig6_shapes(cfg.fig6)
    assert {(s.heads, s.s_q) for s in shapes} == {(h, q) for h in (16, 32, 64, 128) for q in (1, 2)}
    assert {s.batch for s in shapes} == {32} and {s.model for s in shapes} == {None}
    assert (min(s.context for s in shapes), max(s.context for s in shapes)) == (1024, 131072)


@pytest.mark.parametrize("gpu", [None, "NVIDIA H200"])
def test_nothing_is_shown_as_measured_without_a_timing(gpu):
    cfg = compose("kernel_bench")
    shapes = kernel_bench.fig6_shapes(cfg.fig6)
    rows = list(kernel_bench.bench_table(cfg.variant, shapes, gpu))
    assert len(rows) == len(cfg.variant) * len(shapes)
    numbers = ("time_us", "tflops", "gbps", "ideal_us", "share_of_ideal")
    for row in rows:
        assert tuple(row) == kernel_bench.COLUMNS
        assert row["status"] == "not run" and all(row[key] is None for key in numbers)
        assert gpu is not None or "no Hopper GPU" in row["reason"]


def test_a_workload_that_does_not_fit_has_a_row_and_no_roofline():
    cfg = compose("kernel_bench", "engine.gpu=H100", "fig5.models=[DeepSeek-V3.1]", "fig5.layouts=[DP8/TP1]")
    shapes = kernel_bench.fig5_shapes(cfg.fig5, cfg.engine)
    rows = list(kernel_bench.bench_table(cfg.variant, shapes, None))
    assert all(row["batch"] is None and "must fit" in row["reason"] for row in rows)
    assert kernel_bench.roofline_table(cfg, shapes) == []


class CountingClock:
    """Each window takes 10 µs; nothing is called."""

    def capture(self, calls):
        return lambda: None

    def flush(self):
        pass

    def window_us(self, run):
        return 10.0


@pytest.fixture
def bench(monkeypatch) -> kernel_bench.Bench:
    """With a clock that needs no GPU, and every variant there but one."""
    monkeypatch.setattr(kernel_bench, "decode_calls", lambda variant, pool, w, tables: tables)
    monkeypatch.setattr(kernel_bench, "step_calls", lambda pool, w, tables: tables)
    monkeypatch.setattr(
        kernel_bench, "why_not", lambda v, gpu, w=None: "Not there." if v.kernel == "torch_sdpa" else None
    )
    ceilings = {"read_tbs": 4.0, "bf16_tflops": 700.0, "fp8_tflops": 1400.0}
    made_by = {"shared_gpu": False, "driver": "1", "cuda": "13.0", "commit": "abc", "library": "def"}
    pool, monitor = Pool(64, device="cpu"), Monitor()
    return kernel_bench.Bench("NVIDIA H200", CountingClock(), pool, monitor, ceilings, 10**8, 0.01, made_by)


def test_measured_rows_have_every_column(bench):
    """The whole path from shapes to rows."""
    shape = kernel_bench.Shape(64, 1, 32, 4096)
    rows = {
        r["variant"]: r
        for r in kernel_bench.bench_table(
            compose("kernel_bench", "variant=[snapmla,flashmla_fp8,torch_sdpa]").variant,
            [shape],
            "NVIDIA H200",
            bench,
        )
    }
    ours, fp8, floor = rows["snapmla"], rows["flashmla_fp8"], rows["torch_sdpa"]
    assert tuple(ours) == tuple(fp8) == tuple(floor) == kernel_bench.COLUMNS
    assert floor["status"] == "not run" and floor["reason"] == "Not there." and floor["time_us"] is None
    calls = ours["calls"]
    assert calls == -(-4 * 10**8 // ours["bytes"]) and ours["time_us"] == ours["step_us"] == 10.0 / calls
    assert ours["status"] == "ok" and ours["reason"] is None and fp8["step_us"] is None
    assert ours["flops"] == 2176 * 64 * 32 * 4096 and ours["bytes"] > fp8["bytes"]
    assert ours["share_of_measured"] == pytest.approx(ours["ideal_measured_us"] / ours["time_us"])
    assert ours["ideal_us"] < ours["ideal_measured_us"] and ours["commit"] == "abc"


def test_what_a_peer_refuses_is_a_reason_and_not_a_fault(bench, monkeypatch):
    def calls(variant, pool, workload, tables):
        if variant.kernel == refuses:
            raise RuntimeError("no such tile\nat line 1")
        return tables

    monkeypatch.setattr(kernel_bench, "decode_calls", calls)
    variants = compose("kernel_bench", "variant=[snapmla,flashinfer_bf16]").variant
    shapes = [kernel_bench.Shape(64, 1, 32, 4096)]
    refuses = "flashinfer"
    ours, peer = kernel_bench.bench_table(variants, shapes, "NVIDIA H200", bench)
    assert ours["status"] == "ok" and peer["status"] == "not run"
    assert peer["reason"] == "The kernel refused the call: no such tile" and peer["time_us"] is None
    refuses = "snapmla"
    with pytest.raises(RuntimeError, match="no such tile"):
        list(kernel_bench.bench_table(variants, shapes, "NVIDIA H200", bench))


def test_unknown_variant():
    done = subprocess.run(
        [sys.executable, "-m", "snapmla.experiments.kernel_bench", "variant.snapmla.kernel=flash"],
        env={**os.environ, "WANDB_MODE": "disabled"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode and "variant.snapmla.kernel must be among snapmla, flashmla, " in done.stderr


def test_kernel_bench_writes_its_files(tmp_path):
    """As a command; tests/test_experiment_app.py covers what applications have in common."""
    settings = [f"results_dir={tmp_path}", "tracking.mode=disabled"]
    settings += ["fig5.contexts=[16384]", "fig6.contexts=[16384]"]
    command = [sys.executable, "-m", "snapmla.experiments.kernel_bench", *settings]
    subprocess.run(command, cwd=results.REPOSITORY, check=True, timeout=240)
    bench = pandas.read_csv(tmp_path / "kernel_bench" / "kernel_bench.csv")
    assert tuple(bench.columns) == kernel_bench.COLUMNS
    assert set(bench["status"]) == {"not run"}
    roofline = pandas.read_csv(tmp_path / "kernel_bench" / "roofline.csv")
    assert list(roofline.columns) == [
        "gpu", "heads", "s_q", "batch", "context", "format", "time_us", "tflops", "bound",
        "effective_peak_tflops", "source",
    ]  # fmt: skip
    assert set(roofline["source"]) == {"modelled"}
    assert set(roofline["gpu"]) == set(GPUS)
    keys = ["heads", "s_q", "batch", "context"]
    assert not roofline.duplicated(["gpu", "format", *keys]).any()
    planned = bench[keys].drop_duplicates().merge(roofline[keys].drop_duplicates(), on=keys)
    assert len(planned) == len(bench[keys].drop_duplicates())  # every planned shape has its roofline


def test_values_that_are_not_known():
    with pytest.raises(ValueError, match="gpu must be one of H20, .*got 'A100'"):
        throughput.table(compose("throughput", "engine.gpu=A100"))
    with pytest.raises(ValueError, match="cache_format must be one of bf16, snapmla, got 'fp8'"):
        throughput.table(compose("throughput", "variants=[fp8]"))


def test_the_longest_contexts_are_tracked() -> None:
    common = {"variant": "snapmla", "heads": 64, "s_q": 1, "model": None, "status": "ok"}
    rows = [
        common | {"context": 4096, "tflops": 2.0}, common | {"context": 1024, "tflops": 1.0},
        common | {"context": 8192, "tflops": None, "status": "not run"}, common | {"context": 8192, "tflops": 9.0, "s_q": 2},
        common | {"context": 8192, "tflops": 9.0, "model": "DeepSeek-V3.1"},
    ]  # fmt: skip
    assert kernel_bench.longest(rows) == {"tflops/snapmla/64": 2.0}
