"""Throughput measured in vLLM: what the process is told, what it times, what becomes of its answers. The engine and its
Python are played by stand-ins.
"""

from __future__ import annotations

import json
import re
import stat
import sys
import types
from pathlib import Path

import pytest
from test_perf_experiments import compose

from snapmla.bench import engine, vllm_decode
from snapmla.experiments import throughput
from snapmla.memory import sequences_in
from snapmla.models import DEEPSEEK_V2_LITE, DEEPSEEK_V3_1, LONGCAT_FLASH_THINKING, MLAModel, ParallelLayout

GPU = "NVIDIA H200"


def test_batches_take_whole_pages():
    assert sequences_in(760_000, 131072 + 76) == 5 and sequences_in(425_342, 131072 + 76) == 3
    assert sequences_in(640, 256 + 64) == 2 and sequences_in(639, 256 + 64) == 1
    assert sequences_in(640, 256 + 65) == 1 and sequences_in(383, 256 + 65) == 0


def test_pools_are_no_larger_than_the_engines():
    run = run_of(contexts=[64, 1000], pools_bytes=[None, 1e6, 1e9], token_bytes=500)
    assert [tuple(point.values()) for point in engine.points_of(run, kv_tokens=6400)] == [
        (None, 64, 50), (None, 1000, 6), (1e6, 64, 15), (1e6, 1000, 1), (1e9, 64, 50), (1e9, 1000, 6),
    ]  # fmt: skip


def test_graphs_have_the_batches_that_may_come_about():
    run = run_of(contexts=[64, 1000], pools_bytes=[None, 1e6], token_bytes=500)
    assert engine.batches_of(run, 6400) == [1, 5, 6, 15, *range(47, 53)]
    assert engine.batches_of(run_of(contexts=[1000], pools_bytes=[10.0]), 6400) == []
    assert engine.graph_batches([1, 4, 5, 12, 51]) == [1, 5, 13, 51]


class TestRank:
    @pytest.mark.parametrize(
        ("layout", "heads", "picks", "dense"), [("DP8/TP1", 128, 8, 18432), ("DP4/TP2", 64, 4, 9216), ("DP1/TP8", 16, 1, 2304)]
    )
    def test_a_rank_has_its_share(self, layout: str, heads: int, picks: int, dense: int):
        """Each of eight GPUs computes 8 dp picks of the node's tokens over 32 of 256 experts."""
        config = engine.rank_config(DEEPSEEK_V3_1, ParallelLayout.parse(layout), "weights")
        assert config == engine.rank_config(DEEPSEEK_V3_1, ParallelLayout.parse(layout), "uniform")
        assert (config["num_attention_heads"], config["num_experts_per_tok"]) == (heads, picks)
        assert (config["n_routed_experts"], config["intermediate_size"]) == (32, dense)
        assert config["num_hidden_layers"] == 61 and config["kv_lora_rank"] == 512

    @pytest.mark.parametrize(
        ("model", "layout", "message"),
        [
            (LONGCAT_FLASH_THINKING, "DP1/TP8", "must divide the experts of LongCat-Flash-Thinking and their picks"),
            (DEEPSEEK_V2_LITE, "DP8/TP1", "architecture, got DeepSeek-V2-Lite"),
            (DEEPSEEK_V3_1, "DP3/TP1", "must divide the experts of DeepSeek-V3.1 and their picks, got DP3/TP1"),
            (DEEPSEEK_V3_1, "DP1/TP16", "must divide the experts"),
        ],
    )
    def test_others_are_refused(self, model, layout: str, message: str):
        with pytest.raises(ValueError, match=message):
            engine.rank_config(model, ParallelLayout.parse(layout), "weights")

    @pytest.mark.parametrize(("layout", "picks"), [("DP1/TP8", 1), ("DP4/TP2", 4), ("DP8/TP1", 8), ("DP1/TP1", 8)])
    def test_uniform_tokens_meet_the_experts_that_work(self, layout: str, picks: int):
        """Of LongCat-Flash's 12 picks a token, 8 go to its 512 experts, 4 to the 256 that do nothing."""
        parsed = ParallelLayout.parse(layout)
        config = engine.rank_config(LONGCAT_FLASH_THINKING, parsed, "uniform")
        assert (config["moe_topk"], config["n_routed_experts"], config["zero_expert_num"]) == (picks, 512 // parsed.gpus, 0)

    @pytest.mark.parametrize("model", [DEEPSEEK_V3_1, LONGCAT_FLASH_THINKING], ids=lambda model: model.name)
    @pytest.mark.parametrize("layout", [ParallelLayout(1, 1), ParallelLayout(8, 1)], ids=str)
    def test_weights_are_the_memory_models(self, model: MLAModel, layout: ParallelLayout, tmp_path: Path):
        """Transformers' own count of the parameters that the config.json asks for."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        engine.write_model(tmp_path, engine.rank_config(model, layout, "weights"))
        config = AutoConfig.from_pretrained(tmp_path)
        del config.quantization_config
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config)
        modelled = model.shared_parameters + model._embedding + model.routed_expert_parameters / layout.gpus
        # Transformers gives zero experts, which have no weights, a gate and an up projection.
        unused = 2 * model.hidden_size * model.moe_intermediate_size * model.layers * model.zero_experts / layout.gpus
        assert sum(p.numel() for p in built.parameters()) == pytest.approx(modelled + unused, rel=2e-3)


def run_of(**changes: object) -> engine.EngineRun:
    values = {
        "model": "folder", "backend": "CUSTOM", "kv_cache_dtype": "auto", "contexts": [128], "pools_bytes": [None], "routing": "weights",
        "token_bytes": 1000, "warmup": 2, "steps": 4, "repetitions": 2, "batches": [8],
        "gpu_memory_utilization": 0.9, "compilation_config": {"mode": 0},
    }  # fmt: skip
    return engine.EngineRun(**values | changes)


def program(folder: Path, text: str) -> str:
    """A stand-in for a Python, which is started like one."""
    path, script = folder / "python", folder / "stand_in.py"
    script.write_text(text)
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')  # a "#!" takes no path with a space
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


class TestProcess:
    def test_answers_are_told_from_what_vllm_prints(self, tmp_path: Path):
        python = program(
            tmp_path,
            "import json, os, sys\n"
            "run = json.load(sys.stdin)\n"
            "assert sys.argv[1:] == ['-m', 'snapmla.bench.vllm_decode'] and os.environ['HF_HUB_OFFLINE'] == '1'\n"
            "print('INFO {\"kv_tokens\": 0}')\n"
            f"print({engine.MARK!r} + json.dumps({{'kv_tokens': run['steps']}}))\n"
            f"print({engine.MARK!r} + json.dumps({{'context': run['contexts'][0]}}))\n",
        )
        said: list[str] = []
        answers = engine.measure(run_of(), python, said.append, tmp_path / "vllm.log")
        assert answers == [{"kv_tokens": 4}, {"context": 128}] and said == ["kv_tokens 4", "context 128"]
        assert 'INFO {"kv_tokens": 0}' in (tmp_path / "vllm.log").read_text().splitlines()

    def test_groups_step_together(self, tmp_path: Path):
        """Three processes, each told its rank; the slowest step and the smallest batch count."""
        python = program(
            tmp_path,
            "import json, os, sys\n"
            "run, rank = json.load(sys.stdin), int(os.environ['VLLM_DP_RANK'])\n"
            "assert run['data_parallel_size'] == int(os.environ['VLLM_DP_SIZE']) == 3\n"
            "assert int(os.environ['VLLM_DP_MASTER_PORT']) and 'VLLM_ENABLE_V1_MULTIPROCESSING' not in os.environ\n"
            f"print({engine.MARK!r} + json.dumps({{'kv_tokens': 9 - rank, 'vllm': 'x'}}))\n"
            f"print({engine.MARK!r} + json.dumps({{'context': 5, 'batch': 4 + rank, 'step_ms': 1.0 + rank, 'spread': 0.1}}))\n"
            f"print({engine.MARK!r} + json.dumps({{'context': 6, 'batch': 0}}))\n",
        )
        said: list[str] = []
        answers = engine.measure(run_of(data_parallel_size=3), python, said.append, tmp_path / "vllm.log")
        assert {path.name for path in tmp_path.glob("*.log")} == {"vllm-0.log", "vllm-1.log", "vllm-2.log"}
        assert len(said) == 9 and {"group 0: kv_tokens 9, vllm x", "group 2: context 6, batch 0"} <= set(said)
        assert answers == [
            {"kv_tokens": 7, "vllm": "x"}, {"context": 5, "batch": 4, "step_ms": 3.0, "spread": 0.1}, {"context": 6, "batch": 0},
        ]  # fmt: skip

    def test_one_groups_failure_ends_the_others(self, tmp_path: Path):
        python = program(
            tmp_path,
            "import os, sys, time\n"
            "time.sleep(0 if os.environ['VLLM_DP_RANK'] == '1' else 600)\n"
            "sys.exit('no memory on rank 1')\n",
        )
        with pytest.raises(RuntimeError, match="vLLM ended with 1: no memory on rank 1"):
            engine.measure(run_of(data_parallel_size=2), python, print, tmp_path / "vllm.log")

    def test_answers_are_told_as_they_come(self, tmp_path: Path):
        """The process goes on when the first has been heard."""
        heard = tmp_path / "heard"
        python = program(
            tmp_path,
            "import pathlib, time\n"
            f"print({engine.MARK!r} + '{{\"kv_tokens\": 1}}')\n"
            f"while not pathlib.Path({str(heard)!r}).exists(): time.sleep(0.01)\n",
        )
        assert engine.measure(run_of(), python, lambda told: heard.write_text(told), tmp_path / "vllm.log") == [{"kv_tokens": 1}]
        assert heard.read_text() == "kv_tokens 1"

    def test_a_process_that_takes_too_long_is_ended_with_those_it_has_started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(engine, "WAIT_S", 2)
        python = program(tmp_path, "import subprocess\nprint('begun')\nsubprocess.run(['sleep', '600'])\n")
        with pytest.raises(RuntimeError, match="vLLM ended with -9: begun"):
            engine.measure(run_of(), python, print, tmp_path / "vllm.log")

    @pytest.mark.parametrize(
        ("printed", "said"),
        [
            ("Traceback\n  File\ntorch.OutOfMemoryError: 3 GiB\nwarning: leaked", "torch.OutOfMemoryError: 3 GiB"),
            ("ValueError: first\n(EngineCore_DP0 pid=7) RuntimeError: second\nbye", "(EngineCore_DP0 pid=7) RuntimeError: second"),
            ("an Error among words\nkilled\n\n", "killed"),
        ],
    )
    def test_a_failure_is_told_by_the_line_that_says_why(self, tmp_path: Path, printed: str, said: str):
        python = program(tmp_path, f"import sys\nprint({printed!r}, file=sys.stderr)\nsys.exit(3)\n")
        with pytest.raises(RuntimeError, match=f"^vLLM ended with 3: {re.escape(said)}$"):
            engine.measure(run_of(), python, print, tmp_path / "vllm.log")

    def test_reasons(self, tmp_path: Path):
        python = program(tmp_path, "import sys\nsys.exit('ModuleNotFoundError: no vllm')\n")
        assert engine.why_not(python, GPU) == "vLLM cannot be used: ModuleNotFoundError: no vllm"
        assert "no Hopper GPU" in engine.why_not(python, None)
        assert engine.why_not(program(tmp_path, ""), GPU) is None


class FakeEngine:
    """Every step gives each sequence a token and takes 2 ms of a fake clock, the first one 100."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.tokens, self.limit = 0.0, {}, 0
        monkeypatch.setattr(vllm_decode.time, "perf_counter", lambda: self.now)

    def add_request(self, request_id: str, prompt: list[int], params: types.SimpleNamespace) -> None:
        assert len(prompt) == 128 and params.temperature == 0.0
        self.tokens[request_id], self.limit = 0, params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return any(n < self.limit for n in self.tokens.values())

    def step(self) -> list[types.SimpleNamespace]:
        self.now += 2e-3 if any(self.tokens.values()) else 0.1
        self.tokens = {name: n + 1 for name, n in self.tokens.items()}
        return [
            types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=[0] * n)])
            for name, n in self.tokens.items()
        ]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The few names of vLLM that the timing uses."""
    module, inputs = types.ModuleType("vllm"), types.ModuleType("vllm.inputs")
    module.__version__ = "0.25.1"
    module.SamplingParams = lambda **settings: types.SimpleNamespace(**settings)
    inputs.TokensPrompt = lambda prompt_token_ids: prompt_token_ids
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)
    return module


POINT = {"context": 128, "batch": 3}


def test_a_window_leaves_out_the_start(vllm, monkeypatch: pytest.MonkeyPatch):
    fake = FakeEngine(monkeypatch)
    seconds = vllm_decode.window(fake, "a", POINT, warmup=2, steps=5)
    assert seconds == pytest.approx(2e-3) and not fake.has_unfinished_requests()


def test_the_program_measures_each_batch_once(vllm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    fake = FakeEngine(monkeypatch)
    config = types.SimpleNamespace(cache_config=types.SimpleNamespace(num_gpu_blocks=10, block_size=64))
    fake.vllm_config, given = config, {}
    monkeypatch.setattr(vllm_decode, "start", lambda run: types.SimpleNamespace(llm_engine=fake))
    run = run_of(pools_bytes=[None, 1e9, 1.0], batches=[1, 2])
    stdin = types.SimpleNamespace(read=lambda: json.dumps(run.__dict__))
    monkeypatch.setattr(sys, "stdin", stdin)
    windows = []
    monkeypatch.setattr(vllm_decode, "window", lambda engine, *arguments: windows.append(arguments) or 0.003 * len(windows))
    kernel = {"kernel": "k", "calls": 1.0, "ms": 0.5}
    monkeypatch.setattr(vllm_decode, "kernels", lambda engine, name, *point: [kernel | {"kernel": name}])
    vllm_decode.main()
    started, *points = [json.loads(line[len(engine.MARK) :]) for line in capsys.readouterr().out.split("\n") if line]
    assert started["kv_tokens"] == 640 and started["vllm"] == "0.25.1" and not given
    assert [name for name, *_ in windows] == ["128-2-0", "128-2-1"]  # 3 would fit, 2 may run
    assert [p["batch"] for p in points] == [2, 2, 0]
    assert points[0]["step_ms"] == pytest.approx(4.5) and points[0]["spread"] == pytest.approx(1.0) and "step_ms" not in points[2]
    assert points[0]["kernels"][0]["kernel"] == "128-2-profiled" and "kernels" not in points[1]


def test_a_kernel_that_waits_takes_no_time():
    ran = [(0.0, 5.0, "decode"), (1.0, 7.0, "combine"), (9.0, 10.0, "decode"), (9.5, 9.8, "combine"), (10.0, 12.0, "gemm")]
    assert vllm_decode.own_time(reversed(ran)) == {"decode": (2, 6.0), "combine": (2, 2.0), "gemm": (1, 2.0)}


def test_the_profiler_sees_the_window_only(vllm, monkeypatch: pytest.MonkeyPatch):
    fake, seen = FakeEngine(monkeypatch), []
    profiler = types.SimpleNamespace(start=lambda: seen.append(fake.now), stop=lambda: seen.append(fake.now))
    vllm_decode.window(fake, "a", POINT, 2, 5, profiler)
    assert seen == pytest.approx([0.102, 0.112])


def answers(run: engine.EngineRun) -> list[dict]:
    """Of a pool of 300,000 tokens: 30 ms a step and 1 ms for each sequence."""
    points = engine.points_of(run, 300_000)
    timed = [p | ({"step_ms": 30.0 + p["batch"], "spread": 0.01} if p["batch"] else {}) for p in points]
    names = "void snapmla::sm90::decode_kernel<1>", "void snapmla::sm90::append", "nvjet_gemm"
    for point in timed:
        if point["pool_bytes"] is None:
            point["kernels"] = [{"kernel": name, "calls": 61.0, "ms": 1.0 + i} for i, name in enumerate(names)]
    return [{"kv_tokens": 300_000, "vllm": "0.25.1", "start_s": 9.0}, *timed]


class TestRows:
    @pytest.fixture(autouse=True)
    def _machine(self, monkeypatch: pytest.MonkeyPatch):
        self.runs: list[engine.EngineRun] = []
        self.logs: list[Path] = []
        monkeypatch.setattr(throughput, "hopper_gpu", lambda: GPU)
        monkeypatch.setattr(engine, "why_not", lambda python, gpu: None)
        monkeypatch.setattr(engine, "measure", self.measure)

    def measure(self, run: engine.EngineRun, python: str, report: object, log: Path) -> list[dict]:
        self.runs.append(run)
        self.logs.append(log)
        return answers(run)

    def test_one_row_for_each_point(self):
        cfg = compose("throughput", "contexts=[16384,131072]", "measure.pools_gb=[null,1]")
        rows, kernels = throughput.measured_rows(cfg, lambda message: None, Path())
        assert len(kernels) == 3 * 2 * 2 * 3 and all(tuple(row) == throughput.KERNEL_COLUMNS for row in kernels)
        assert {(row["context"], row["batch"], row["status"]) for row in kernels if row["variant"] == "snapmla"} == {
            (16384, 18, "ok"), (131072, 2, "ok"),
        }  # fmt: skip
        assert {row["attention_ms"] for row in rows} == {3.0, None}
        assert len(rows) == 3 * 3 * 2 and all(tuple(row) == throughput.COLUMNS for row in rows)
        assert {(row["routing"], row["pool_gb"]) for row in rows} == {("uniform", None), ("uniform", 1.0), ("weights", None)}
        by = {(row["variant"], row["pool_gb"], row["context"]): row for row in rows if row["routing"] == "uniform"}
        whole = by["snapmla", None, 16384]
        assert whole["batch"] == 18 and whole["step_ms"] == 48.0
        assert whole["tokens_per_s"] == pytest.approx(18 * 8 / 0.048) and whole["bytes_per_token"] == 644
        assert whole["memory_gb"] == pytest.approx(300_000 * 61 * 644 / 1e9) and whole["engine"] == "vLLM 0.25.1"
        assert by["bf16", 1.0, 16384]["memory_gb"] == 1.0
        small = by["bf16", 1.0, 131072]
        assert small["status"] == "not run" and small["reason"] == "The pool must hold a sequence of 131072 tokens."
        assert {row["source"] for row in rows} == {"measured"} and {row["gpu"] for row in rows} == {GPU}
        assert [(run.backend, run.kv_cache_dtype, run.token_bytes) for run in self.runs[::2]] == [
            ("FLASHMLA", "auto", 61 * 1152), ("FLASHMLA", "fp8", 61 * 576), ("CUSTOM", "auto", 61 * 644),
        ]  # fmt: skip

    def test_an_engine_that_fails_leaves_the_others_theirs(self, monkeypatch: pytest.MonkeyPatch):
        measure = engine.measure

        def fails(run: engine.EngineRun, *rest: object) -> list[dict]:
            if run.kv_cache_dtype == "fp8":
                raise RuntimeError("vLLM ended with 1: no memory")
            return measure(run, *rest)

        monkeypatch.setattr(engine, "measure", fails)
        cfg = compose("throughput", "contexts=[16384]", "measure.pools_gb=[null]", "measure.routings=[uniform]")
        rows, kernels = throughput.measured_rows(cfg, lambda message: None, Path())
        assert [(row["variant"], row["status"], row["reason"]) for row in rows] == [
            ("bf16", "ok", None), ("fp8", "not run", "vLLM ended with 1: no memory"), ("snapmla", "ok", None),
        ]  # fmt: skip
        assert {row["variant"] for row in kernels} == {"bf16", "snapmla"}
        assert self.logs == [Path(f"DeepSeek-V3.1-DP8TP1-{variant}-uniform.log") for variant in ("bf16", "snapmla")]

    def test_bounds_leave_room_for_the_batch(self):
        """Recorded: 25 sequences of 16k in BF16, 51 in FlashMLA's FP8, 46 of ours in as large a pool."""
        throughput.measured_rows(compose("throughput"), lambda message: None, Path())
        for run, recorded in zip(self.runs[::2], ({24, 25, 26}, {50, 51, 52}, {46, 50, 51, 52}), strict=True):
            assert recorded <= set(run.batches) and len(run.batches) < 32

    @pytest.mark.parametrize(("gpus", "scope", "expected"), [(8, "auto", "node"), (7, "auto", "rank"), (8, "rank", "rank")])
    def test_a_node_is_measured_where_there_is_one(self, monkeypatch: pytest.MonkeyPatch, gpus: int, scope: str, expected: str):
        configs: list[dict] = []
        monkeypatch.setattr(throughput.torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(engine, "write_model", lambda folder, config: configs.append(config))
        cfg = compose("throughput", "measure.layouts=[DP4/TP2]", f"measure.scope={scope}", "measure.variants=[snapmla]", "measure.routings=[uniform]")
        rows, _ = throughput.measured_rows(cfg, lambda message: None, Path())
        assert {row["scope"] for row in rows} == {expected}
        (run,), (config,) = self.runs, configs
        sizes = run.tensor_parallel_size, run.data_parallel_size, config["num_attention_heads"], config["n_routed_experts"]
        assert sizes == ((2, 4, 128, 256) if expected == "node" else (1, 1, 64, 32))
        assert rows[0]["tokens_per_s"] == pytest.approx(rows[0]["batch"] * 4 / rows[0]["step_ms"] * 1e3)

    def test_a_dry_run_says_what_would_run(self):
        said: list[str] = []
        cfg = compose("throughput", "measure.enabled=dry", "measure.scope=node", "measure.layouts=[DP1/TP8,DP4/TP2,DP8/TP1]")
        assert throughput.measured_rows(cfg, said.append, Path()) == ([], []) and not self.runs and len(said) == 18
        plans = [json.loads(line[line.index("{") :]) for line in said]
        simulated = [env.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY") for plan in plans for env in plan["environments"][:1]]
        assert simulated == ["uniform_random", None] * 9
        plans = plans[::2]
        assert [len(plan["environments"]) for plan in plans] == [1, 1, 1, 4, 4, 4, 8, 8, 8]
        assert [env["VLLM_DP_RANK"] for env in plans[-1]["environments"]] == list("01234567")
        assert plans[0]["reads"]["tensor_parallel_size"] == 8 and plans[0]["config.json"]["n_routed_experts"] == 256

    def test_a_machine_without_vllm_says_so(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(engine, "why_not", lambda python, gpu: "FAKE reason.")
        rows, _ = throughput.measured_rows(compose("throughput"), lambda message: None, Path())
        assert [(row["variant"], row["status"], row["reason"]) for row in rows] == [
            (variant, "not run", "FAKE reason.") for variant in ("bf16", "fp8", "snapmla") for _ in range(2)
        ]
        assert throughput.measured_rows(compose("throughput", "measure.enabled=no"), lambda message: None, Path()) == ([], [])

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("measure.enabled=yes", "measure.enabled must be among auto, dry, no, got 'yes'"),
            ("measure.scope=gpu", "measure.scope must be among auto, node, rank, got 'gpu'"),
            ("measure.variants=[bf16,int8]", "measure.variants must be among bf16, fp8, snapmla, got 'int8'"),
            ("measure.routings=[even]", "measure.routings must be among uniform, weights, got 'even'"),
            ("measure.layouts=[DP1/TP1]", "measure.models and measure.layouts must fit the H200"),
        ],
    )
    def test_bad_values_are_named(self, override: str, message: str):
        with pytest.raises(ValueError, match=message):
            throughput.measured_rows(compose("throughput", override), lambda message: None, Path())
