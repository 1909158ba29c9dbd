"""Decode throughput in vLLM: what to run, in processes of its own, and what they answer.

Dummy weights, a cache of random tokens, and either of two scopes:

    node  all GPUs of a layout, by vLLM's own tensor, data and expert parallelism, one process for each data-parallel group
    rank  one GPU for one of a layout's: its share of the heads and of the experts, at full depth. Under balanced routing
          every rank does the same work, so the node's throughput is the rank's times the data-parallel groups, without what
          ranks send each other (all-to-all, all-reduce), which is not measured

The engine runs in `snapmla.bench.vllm_decode`, by a Python that has vLLM; nothing here imports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from snapmla.bench.machine import NO_GPU
from snapmla.layout import QK_HEAD_DIM
from snapmla.memory import CACHE_BYTES_PER_TOKEN, sequences_in, tokens_in
from snapmla.models import MLAModel, ParallelLayout

BACKENDS = {"bf16": ("FLASHMLA", "auto"), "fp8": ("FLASHMLA", "fp8"), "snapmla": ("CUSTOM", "auto")}
"""vLLM's attention backend and kv_cache_dtype of each variant; `fp8` is FlashMLA's, one scale a tensor, RoPE part in FP8."""

CACHES = {"bf16": "bf16", "fp8": "bf16", "snapmla": "snapmla"}
"""Of which cache format the memory is that a prefill takes."""

BYTES = CACHE_BYTES_PER_TOKEN | {"fp8": QK_HEAD_DIM}
"""Bytes of a cached token in one layer."""

ROUTINGS = {"uniform": {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}, "weights": {}}
"""vLLM's environment of each routing: every token to random experts, or as dummy weights send them, all to the same few."""

ATTENTION_KERNELS = re.compile(r"snapmla|flash_fwd_splitkv_mla|flash_fwd_mla|get_mla_metadata|concat_and_cache_mla|flash_mla")
"""Names of the kernels that are a backend's: decode, its schedule and its combination, writes to the cache, quantization."""

PACKAGE = str(Path(__file__).resolve().parents[2])
"""Where the processes find this package, if their Python has it not."""

WAIT_S = 1800
"""For one process."""


@dataclass(frozen=True)
class EngineRun:
    """What `vllm_decode` reads: one engine and the points that it measures.

    Attributes:
        model: folder with a config.json.
        backend, kv_cache_dtype: vLLM's.
        contexts: cached tokens of each sequence.
        pools_bytes: cache pools, of which the batches follow; None: all that the engine has.
        routing: of tokens to experts, a name in ROUTINGS.
        token_bytes: of a cached token in all layers.
        warmup, steps: tokens of each sequence before the window that is timed, and in it.
        repetitions: of each point.
        batches: that may come about, the largest bounds them.
        tensor_parallel_size, data_parallel_size: 1 and 1 for one rank; experts are spread over all GPUs.
    """

    model: str
    backend: str
    kv_cache_dtype: str
    contexts: list[int]
    pools_bytes: list[float | None]
    routing: str
    token_bytes: int
    warmup: int
    steps: int
    repetitions: int
    batches: list[int]
    gpu_memory_utilization: float
    compilation_config: dict
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1


def rank_config(model: MLAModel, layout: ParallelLayout, routing: str) -> dict:
    """config.json of one GPU's share of a model in a layout, for vLLM; in DP1/TP1 of the whole model.

    Heads, dense MLPs and vocabulary are divided by tp, experts by all GPUs; each token picks so many of the rank's experts
    as the node's tokens do under balanced routing. A shared expert is whole, though tp would divide it. LongCat-Flash's zero
    experts, which do nothing, are left out in uniform routing, with the picks that go to them: vLLM's simulator knows none.

    Raises ValueError for a model of another architecture than DeepSeek-V3's or LongCat-Flash's, or a layout that does not
    divide it.
    """
    zero_experts, picks = model.zero_experts, model.experts_per_token
    if routing == "uniform":
        zero_experts, picks = 0, picks * model.routed_experts // (model.routed_experts + zero_experts)
    whole = model.routed_experts, zero_experts, picks * layout.dp
    if any(x % layout.gpus for x in whole):
        raise ValueError(f"layout must divide the experts of {model.name} and their picks, got {layout}.")
    experts, zero_experts, picks = (x // layout.gpus for x in whole)
    heads = model.heads_per_gpu(layout)
    common = {
        "torch_dtype": "bfloat16",
        "hidden_size": model.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "vocab_size": model.vocab_size // layout.tp,
        "n_routed_experts": experts,
        "hidden_act": "silu",
        "max_position_embeddings": 163840,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    }
    dense = model.dense_intermediate_size // layout.tp
    if model.q_lora_rank and model.attention_per_layer == 1 and model.shared_experts:
        return common | {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "num_hidden_layers": model.layers,
            "intermediate_size": dense,
            "moe_intermediate_size": model.moe_intermediate_size,
            "n_shared_experts": model.shared_experts,
            "num_experts_per_tok": picks,
            "first_k_dense_replace": model.first_dense_layers,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": model.yarn_factor,
                "mscale": model.yarn_mscale_all_dim,
                "mscale_all_dim": model.yarn_mscale_all_dim,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        }
    if model.attention_per_layer == 2 and model.zero_experts:
        return common | {
            "architectures": ["LongcatFlashForCausalLM"],
            "model_type": "longcat_flash",
            "num_layers": model.layers,
            "ffn_hidden_size": dense,
            "expert_ffn_hidden_size": model.moe_intermediate_size,
            "zero_expert_num": zero_experts,
            "zero_expert_type": "identity",
            "moe_topk": picks,
            "routed_scaling_factor": 6.0,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "router_bias": False,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000000.0,
        }
    raise ValueError(f"model must be of DeepSeek-V3's or LongCat-Flash's architecture, got {model.name}.")


def environment(run: EngineRun | None = None, group: int = 0, port: int = 0) -> dict[str, str]:
    """A process's environment: nothing is fetched, nothing reported. `group`: of the run's data-parallel ones; no run: one GPU."""
    routing = ROUTINGS[run.routing] if run else {}
    tp, dp = (run.tensor_parallel_size, run.data_parallel_size) if run else (1, 1)
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # DeepGEMM's warm-up takes longer than the measurement.
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    paths = [PACKAGE, *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"PYTHONPATH": os.pathsep.join(paths)}
    if tp == dp == 1:
        fixed["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in the process itself
    if dp > 1:
        fixed |= {
            "VLLM_DP_RANK": str(group),
            "VLLM_DP_RANK_LOCAL": str(group),
            "VLLM_DP_SIZE": str(dp),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }
    return settings | os.environ | fixed | routing


def command(python: str) -> list[str]:
    """Of one process, which reads its `EngineRun` as JSON from its standard input."""
    return [python, "-m", "snapmla.bench.vllm_decode"]


MARK = "snapmla-bench: "
"""Before each answer, among what vLLM prints."""


def answer(**values: object) -> None:
    """Told by a process, on a line of its own: a progress bar before it may lie on one that has not ended."""
    print(f"\n{MARK}{json.dumps(values)}", flush=True)


FAILURE = re.compile(r"^(\(.*?\) )?[\w.]*(Error|Exception|Interrupt)\b")
"""The line that ends a traceback; vLLM's own processes begin theirs with a name in parentheses."""


def start(command: list[str], environment: dict[str, str], given: dict) -> subprocess.Popen:
    """A process that reads `given` as JSON from its standard input."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as reads:  # a pipe can fill, and break
        json.dump(given, reads)
        reads.seek(0)
        variables = environment | {"PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            command, env=variables, stdin=reads, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )


def end(process: subprocess.Popen) -> None:
    """Kills it, and what it has started, which would hold its output open."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for other in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            other.kill()
    process.kill()


def answers_of(process: subprocess.Popen, report: Callable[[str], None], log: Path) -> list[dict]:
    """What a process answers, each told to `report` as it comes; all that it prints goes to `log`. Raises RuntimeError with the
    line that says why where it fails or answers nothing."""
    log.parent.mkdir(parents=True, exist_ok=True)
    answers, printed, late = [], [], threading.Timer(WAIT_S, end, [process])
    late.start()
    try:
        with process, log.open("w", encoding="utf-8", buffering=1) as kept:
            for line in filter(None, map(str.rstrip, process.stdout)):
                print(line, file=kept)
                if line.startswith(MARK):
                    answers.append(json.loads(line[len(MARK) :]))
                    report(", ".join(f"{name} {value}" for name, value in answers[-1].items() if not isinstance(value, list)))
                else:
                    printed.append(line)
    finally:
        late.cancel()
    if process.returncode or not answers:
        said = next(filter(FAILURE.match, reversed(printed)), printed[-1] if printed else "nothing")
        raise RuntimeError(f"vLLM ended with {process.returncode}: {said}")
    return answers


def engine_plan(run: EngineRun, python: str) -> dict:
    """What `measure` would start: the command, what it reads, and each process's own variables."""
    variables = [environment(run, group) for group in range(run.data_parallel_size)]
    own = [{name: value for name, value in of.items() if name.startswith("VLLM_")} for of in variables]
    return {"command": command(python), "reads": asdict(run), "environments": own}


def measure(run: EngineRun, python: str, report: Callable[[str], None], log: Path) -> list[dict]:
    """What the processes answer, as dictionaries: the engine first (kv_tokens, vllm, start_s), then its points (`points_of`,
    and step_ms and spread unless the batch is 0; kernels in the whole pool, where the engine is one process
    with the program). Of several groups the slowest step and the smallest batch. Each answer is told to `report` as it comes; all
    that a process prints goes to `log`, of several groups to a file each, with the group behind its name.

    Raises RuntimeError with the line that says why where a process fails; the others are then ended.
    """
    groups = range(run.data_parallel_size)
    port = _free_port() if len(groups) > 1 else 0
    processes = [start(command(python), environment(run, group, port), asdict(run)) for group in groups]

    def ended(group: int) -> list[dict]:
        alone = len(groups) == 1
        name, file = ("", log) if alone else (f"group {group}: ", log.with_name(f"{log.stem}-{group}{log.suffix}"))
        try:
            return answers_of(processes[group], lambda told: report(name + told), file)
        except RuntimeError:
            for other in processes:
                end(other)
            raise

    with ThreadPoolExecutor(len(groups)) as threads:
        # In the order in which they end: a failure is told, not those that it has ended.
        waiting = [threads.submit(ended, group) for group in groups]
        of_groups = [done.result() for done in as_completed(waiting)]
    return [_slowest(of_point) for of_point in zip(*of_groups, strict=True)]


def attention_ms(kernels: Sequence[Mapping]) -> float | None:
    """Of a step, of the kernels (kernel, ms) that a profile has found; None without any."""
    return sum(found["ms"] for found in kernels if ATTENTION_KERNELS.search(found["kernel"])) if kernels else None


def _slowest(of_groups: Sequence[dict]) -> dict:
    """One point of all data-parallel groups, which step together."""
    worst = {"kv_tokens": min, "batch": min, "step_ms": max, "spread": max, "start_s": max}
    return {
        name: worst[name](answer[name] for answer in of_groups if name in answer) if name in worst else value
        for name, value in of_groups[0].items()
    }


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def why_not(python: str, gpu: str | None) -> str | None:
    """Why nothing can be measured, in one sentence; or None."""
    if gpu is None:
        return NO_GPU
    asked = "import vllm, snapmla.integrations.vllm as p; p.check_version(vllm.__version__)"
    done = subprocess.run([python, "-c", asked], env=environment(), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"vLLM cannot be used: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}"


def write_model(folder: Path, config: Mapping[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


SPARE_TOKENS = 4
"""Tokens of each sequence after the window that is timed, so that none ends in it."""


def points_of(run: EngineRun, kv_tokens: int) -> list[dict]:
    """Pool, context and batch of every point. A pool larger than the engine's is the engine's."""
    points = []
    for pool in run.pools_bytes:
        tokens = kv_tokens if pool is None else min(kv_tokens, tokens_in(pool, run.token_bytes))
        for context in run.contexts:
            batch = sequences_in(tokens, context + run.warmup + run.steps + SPARE_TOKENS)
            points.append({"pool_bytes": pool, "context": context, "batch": batch})
    return points


def batches_of(run: EngineRun, kv_tokens: float) -> list[int]:
    """Of every point, if the engine holds about so many tokens (within a twentieth)."""
    few, many = (points_of(run, int(kv_tokens * share)) for share in (0.95, 1.05))
    ranges = [range(low["batch"], high["batch"] + 1) for low, high in zip(few, many, strict=True)]
    return sorted(set().union(*ranges) - {0})


def graph_batches(batches: Sequence[int]) -> list[int]:
    """For vLLM's cudagraph_capture_sizes: a graph for each batch, which vLLM would pad to the next multiple of 8. One row of
    padding where 4 divides a batch: vLLM's block-scaled linear kernels then take 3 ms longer in a step of DeepSeek-V3.1."""
    return sorted({batch + (batch % 4 == 0) for batch in batches})
