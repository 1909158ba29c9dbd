"""Times decode steps in vLLM's offline engine; a program of its own, for a Python that has vLLM. One process is one
data-parallel group, told by the environment (`engine.environment`).

    python -m snapmla.bench.vllm_decode < run.json       # an `engine.EngineRun`

Prefill is skipped: `RandomDecodeBench` hands each request a cached prompt. A window begins when every sequence has made its
warm-up tokens and ends when every one has made `steps` more; scheduling, sampling and the host's work are in it. One more
window of each point in the whole pool runs under torch's profiler and says where a step goes; none of its times is a step's.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Iterable

from snapmla.bench.engine import SPARE_TOKENS, EngineRun, answer, graph_batches, points_of

PROFILED_STEPS = 8


def start(run: EngineRun):
    """The engine."""
    from vllm import LLM

    generated, graphs = run.warmup + run.steps + SPARE_TOKENS, graph_batches(run.batches)
    return LLM(
        model=run.model,
        skip_tokenizer_init=True,
        load_format="dummy",
        attention_backend=run.backend,
        kv_cache_dtype=run.kv_cache_dtype,
        max_model_len=max(run.contexts) + generated + 1,
        max_num_seqs=max(graphs),
        max_num_batched_tokens=max(2048, *graphs),
        gpu_memory_utilization=run.gpu_memory_utilization,
        enable_prefix_caching=False,
        tensor_parallel_size=run.tensor_parallel_size,
        enable_expert_parallel=run.tensor_parallel_size * run.data_parallel_size > 1,
        kv_transfer_config={
            "kv_connector": "RandomDecodeBench",
            "kv_connector_module_path": "snapmla.integrations.vllm.decode_bench",
            "kv_role": "kv_both",
        },
        compilation_config={"cudagraph_capture_sizes": graphs} | run.compilation_config,
    )


def window(engine, name: str, point: dict, warmup: int, steps: int, profiler=None) -> float:
    """Seconds a step of a point (`points_of`). profiler: torch's, which sees the window."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    context, batch = point["context"], point["batch"]
    params = SamplingParams(
        max_tokens=warmup + steps + SPARE_TOKENS, ignore_eos=True, temperature=0.0, detokenize=False
    )
    for i in range(batch):
        prompt = [(7 * i + j) % 9000 + 3 for j in range(context)]
        engine.add_request(f"{name}-{i}", TokensPrompt(prompt_token_ids=prompt), params)
    made: dict[str, int] = {}
    began = ended = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            made[output.request_id] = len(output.outputs[0].token_ids)
        now, least = time.perf_counter(), min(made.values()) if len(made) == batch else 0
        if began is None and least >= warmup:
            began = now, sum(made.values())
            if profiler:
                profiler.start()
        if ended is None and least >= warmup + steps:
            ended = now, sum(made.values())
            if profiler:
                profiler.stop()
    seconds, tokens = ended[0] - began[0], ended[1] - began[1]
    return seconds * batch / tokens


def kernels(engine, name: str, point: dict, warmup: int) -> list[dict]:
    """What the GPU does in a step, longest first: kernel, calls and milliseconds of each name."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CUDA])
    window(engine, name, point, warmup, PROFILED_STEPS, profiler)
    ran = [(e.time_range.start, e.time_range.end, e.name) for e in profiler.events() if e.device_type == DeviceType.CUDA]
    return [
        {"kernel": kernel, "calls": calls / PROFILED_STEPS, "ms": time / PROFILED_STEPS * 1e-3}
        for kernel, (calls, time) in sorted(own_time(ran).items(), key=lambda found: -found[1][1])
    ]


def own_time(ran: Iterable[tuple[float, float, str]]) -> dict[str, tuple[int, float]]:
    """Calls and time of each name, of (begin, end, name). Where kernels overlap, the time is the one's that began first: one
    that waits for another, as programmatic dependent launch has it, does nothing yet."""
    found: dict[str, tuple[int, float]] = {}
    busy_until = -math.inf
    for begin, end, name in sorted(ran):
        calls, time = found.get(name, (0, 0.0))
        found[name] = calls + 1, time + max(0.0, end - max(begin, busy_until))
        busy_until = max(busy_until, end)
    return found


def main() -> None:
    run = EngineRun(**json.load(sys.stdin))
    begin = time.perf_counter()
    llm = start(run)
    cache = llm.llm_engine.vllm_config.cache_config
    kv_tokens = cache.num_gpu_blocks * cache.block_size
    from vllm import __version__

    answer(kv_tokens=kv_tokens, vllm=__version__, start_s=round(time.perf_counter() - begin, 1))
    found: dict[tuple[int, int], dict] = {}
    for point in points_of(run, kv_tokens):
        point["batch"] = min(point["batch"], max(run.batches))
        key = point["context"], point["batch"]
        name = "-".join(map(str, key))
        if point["batch"] and key not in found:  # pools may hold as many
            times = [window(llm.llm_engine, f"{name}-{i}", point, run.warmup, run.steps) for i in range(run.repetitions)]
            found[key] = {"step_ms": statistics.median(times) * 1e3, "spread": max(times) / min(times) - 1}
        measured = found.get(key, {})
        if measured and point["pool_bytes"] is None:
            measured = measured | {"kernels": kernels(llm.llm_engine, f"{name}-profiled", point, run.warmup)}
        answer(**point | measured)


if __name__ == "__main__":
    main()
