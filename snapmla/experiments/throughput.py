"""Decode throughput of a node for both cache formats (Fig 1): from the memory and roofline model, and measured in vLLM.

    python -m snapmla.experiments.throughput engine.gpu=H20 contexts=[65536]
    python -m snapmla.experiments.throughput measure.python=/opt/vllm/bin/python measure.pools_gb=[null]

Measured, on Hopper GPUs with vLLM (`snapmla.bench.engine`): a layout where there are as many GPUs, else one of its ranks, its
step, and the node's tokens/s as if all ranks took as long and sent each other nothing. step_kernels.csv then has the kernels of
a rank's step.

Modelled: a step of a decode batch is the attention of all layers plus everything else:

    attention = attention layers · decode roofline at the share of the data sheet that kernels reach
    the rest  = max(weights read / bandwidth, 2 · active parameters · tokens / FP8 peak)
                + attention layers · a constant

The batch is the largest that the cache of each data-parallel group holds; all groups step together, since
each layer's experts see the tokens of all of them. Every assumption is a key of conf/throughput.yaml.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING

from snapmla.bench import engine
from snapmla.bench.machine import hopper_gpu
from snapmla.experiments._app import BaseConfig, Run, application, check_names
from snapmla.memory import DoesNotFit, MemoryBudget, cache_bytes_per_token, largest_batch
from snapmla.models import MLAModel, ParallelLayout, get_model
from snapmla.roofline import GPU, decode_roofline, get_gpu

COLUMNS = (
    "variant", "model", "layout", "context", "bytes_per_token", "memory_gb", "batch", "step_ms",
    "attention_ms", "tokens_per_s", "source", "status", "reason", "gpu", "scope", "pool_gb", "spread", "engine", "routing",
)  # fmt: skip

KERNEL_COLUMNS = (
    "variant", "model", "layout", "context", "batch", "routing", "kernel", "calls", "ms", "source", "status", "reason", "gpu",
    "scope", "engine",
)  # fmt: skip


@dataclass
class Share:
    """Shares of the data sheet: of the memory bandwidth, and of the (effective) tensor-core peak."""

    memory: float = MISSING
    compute: float = MISSING


@dataclass
class AttentionShare:
    bf16: Share = field(default_factory=Share)
    snapmla: Share = field(default_factory=Share)


@dataclass
class EngineConfig:
    """The config group ``engine``: a GPU and the part of its memory that a serving engine uses."""

    gpu: str = MISSING
    gpu_memory_utilization: float = MISSING
    overhead_gib: float = MISSING

    def budget(self) -> MemoryBudget:
        return MemoryBudget(get_gpu(self.gpu).memory_gib, self.gpu_memory_utilization, self.overhead_gib)


@dataclass
class MeasureConfig:
    enabled: str = MISSING
    scope: str = MISSING
    python: str | None = None
    models: list[str] = MISSING
    layouts: list[str] = MISSING
    variants: list[str] = MISSING
    pools_gb: list[float | None] = MISSING
    routings: list[str] = MISSING
    warmup: int = MISSING
    steps: int = MISSING
    repetitions: int = MISSING
    compilation_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class ThroughputConfig(BaseConfig):
    """Keys of conf/throughput.yaml, where each has its value and the reason for it."""

    models: list[str] = MISSING
    layouts: list[str] = MISSING
    contexts: list[int] = MISSING
    variants: list[str] = MISSING
    engine: EngineConfig = field(default_factory=EngineConfig)
    attention_share: AttentionShare = field(default_factory=AttentionShare)
    weight_share: float = MISSING
    gemm_share: float = MISSING
    other_us: float = MISSING
    communication_us: float = MISSING
    measure: MeasureConfig = field(default_factory=MeasureConfig)


@dataclass(frozen=True)
class Step:
    """One decoding step of the whole node, in milliseconds."""

    attention_ms: float
    weights_ms: float
    gemm_ms: float
    other_ms: float

    @property
    def step_ms(self) -> float:
        # Linear layers at decode batches wait for their weights; the tensor cores work meanwhile.
        return self.attention_ms + max(self.weights_ms, self.gemm_ms) + self.other_ms


def model_step(
    cfg: ThroughputConfig,
    gpu: GPU,
    model: MLAModel,
    layout: ParallelLayout,
    batch: int,
    context: int,
    variant: str,
) -> Step:
    """Time of a step in which each data-parallel group decodes ``batch`` sequences of ``context`` tokens."""
    share: Share = getattr(cfg.attention_share, variant)
    reached = replace(
        gpu, bandwidth_tbs=gpu.bandwidth_tbs * share.memory, bf16_tflops=gpu.bf16_tflops * share.compute
    )
    attention = decode_roofline(reached, model.heads_per_gpu(layout), 1, batch, context, variant)
    tokens = batch * layout.dp
    weights_s = model.decode_read_bytes(layout, tokens) / (gpu.bandwidth_tbs * 1e12 * cfg.weight_share)
    gemm_s = 2 * model.active_parameters * tokens / layout.gpus / (gpu.fp8_tflops * 1e12 * cfg.gemm_share)
    return Step(
        attention_ms=model.attention_layers * attention.time_us * 1e-3,
        weights_ms=weights_s * 1e3,
        gemm_ms=gemm_s * 1e3,
        other_ms=model.attention_layers * (cfg.other_us + cfg.communication_us) * 1e-3,
    )


def table(cfg: ThroughputConfig) -> list[dict]:
    """The rows of throughput.csv: one per model, layout, context and variant.

    ``bytes_per_token`` are those of one layer's cache, ``memory_gb`` is the cache on each GPU (1e9 bytes),
    ``batch`` the sequences of one data-parallel group, ``tokens_per_s`` the output of all groups.
    A point whose weights or cache do not fit is "not run".
    """
    gpu, budget = get_gpu(cfg.engine.gpu), cfg.engine.budget()
    points = itertools.product(
        map(get_model, cfg.models), map(ParallelLayout.parse, cfg.layouts), cfg.contexts, cfg.variants
    )
    rows = []
    for model, layout, context, variant in points:
        row = dict.fromkeys(COLUMNS)
        row |= {"variant": variant, "model": model.name, "layout": str(layout), "context": context}
        row["source"] = "modelled"
        try:
            pool = budget.cache_bytes(model, layout, variant)
            batch = largest_batch(pool, model, context, variant)
        except DoesNotFit as error:
            row |= {"status": "not run", "reason": f"On the {gpu.name}, {error}"}
        else:
            step = model_step(cfg, gpu, model, layout, batch, context, variant)
            row |= {
                "bytes_per_token": cache_bytes_per_token(variant),
                "memory_gb": pool / 1e9,
                "batch": batch,
                "step_ms": step.step_ms,
                "attention_ms": step.attention_ms,
                "tokens_per_s": batch * layout.dp / step.step_ms * 1e3,
                "status": "ok",
            }
        rows.append(row)
    return rows


def speedups(rows: list[dict]) -> dict[str, float]:
    """Tokens/s of snapmla over bf16, by "model/layout/context", where both fit."""
    speed = {
        (row["variant"], row["model"], row["layout"], row["context"]): row["tokens_per_s"] for row in rows
    }
    return {
        "/".join(map(str, point)): ours / bf16
        for (variant, *point), ours in speed.items()
        if variant == "snapmla" and ours and (bf16 := speed.get(("bf16", *point)))
    }


def engine_run(
    cfg: ThroughputConfig, model: MLAModel, layout: ParallelLayout, variant: str, routing: str, node: bool, folder: str
) -> engine.EngineRun:
    """One engine's points; `folder` is to hold the model's config.json. The first routing is measured in all pools, the others
    in the whole one."""
    measure, (backend, dtype) = cfg.measure, engine.BACKENDS[variant]
    token_bytes = model.attention_layers * engine.BYTES[variant]
    try:
        kv_tokens = cfg.engine.budget().cache_bytes(model, layout, engine.CACHES[variant]) / token_bytes
    except DoesNotFit as error:
        raise ValueError(f"measure.models and measure.layouts must fit the {cfg.engine.gpu}: {error}") from None
    run = engine.EngineRun(
        model=folder,
        backend=backend,
        kv_cache_dtype=dtype,
        contexts=cfg.contexts,
        pools_bytes=[gb and gb * 1e9 for gb in measure.pools_gb if gb is None or routing == measure.routings[0]],
        routing=routing,
        token_bytes=token_bytes,
        warmup=measure.warmup,
        steps=measure.steps,
        repetitions=measure.repetitions,
        batches=[],
        gpu_memory_utilization=cfg.engine.gpu_memory_utilization,
        compilation_config=measure.compilation_config,
        tensor_parallel_size=layout.tp if node else 1,
        data_parallel_size=layout.dp if node else 1,
    )
    return replace(run, batches=engine.batches_of(run, kv_tokens))


def measured_rows(cfg: ThroughputConfig, progress: Callable[[str], None], logs: Path) -> tuple[list[dict], list[dict]]:
    """The rows that vLLM gives, one per model, layout, variant, pool and context; or one per model, layout and variant that says
    why not. Then the rows of step_kernels.csv. With measure.enabled=dry none of either: the processes that would run are told.

    logs: folder for what vLLM prints.
    """
    measure, gpu = cfg.measure, hopper_gpu()
    check_names("measure.enabled", [measure.enabled], ("auto", "dry", "no"))
    check_names("measure.scope", [measure.scope], ("auto", "node", "rank"))
    check_names("measure.variants", measure.variants, engine.BACKENDS)
    check_names("measure.routings", measure.routings, engine.ROUTINGS)
    if measure.enabled == "no":
        return [], []
    dry, python = measure.enabled == "dry", measure.python or sys.executable
    reason = None if dry else engine.why_not(python, gpu)
    rows, kernels = [], []
    for name, layout_name, variant, routing in itertools.product(
        measure.models, measure.layouts, measure.variants, measure.routings
    ):
        model, layout = get_model(name), ParallelLayout.parse(layout_name)
        node = measure.scope == "node" or (measure.scope == "auto" and torch.cuda.device_count() >= layout.gpus)
        config = engine.rank_config(model, ParallelLayout(1, 1) if node else layout, routing)
        if dry:
            planned = engine.engine_plan(engine_run(cfg, model, layout, variant, routing, node, "FOLDER"), python)
            progress(f"{name}, {layout_name}, {variant}, {routing}: {json.dumps(planned | {'config.json': config})}")
            continue
        row = dict.fromkeys(COLUMNS)
        row |= {"variant": variant, "model": name, "layout": layout_name, "source": "measured", "gpu": gpu}
        row |= {"bytes_per_token": engine.BYTES[variant], "scope": "node" if node else "rank", "routing": routing}
        if reason:
            rows.append(row | {"status": "not run", "reason": reason})
            continue
        progress(f"{name}, {layout_name}, {variant}, {routing}, {row['scope']}: starting vLLM")
        with tempfile.TemporaryDirectory() as folder:
            engine.write_model(Path(folder), config)
            run = engine_run(cfg, model, layout, variant, routing, node, folder)
            try:
                log = "-".join((name, layout_name.replace("/", ""), variant, routing))
                answers = engine.measure(run, python, progress, logs / f"{log}.log")
            except RuntimeError as failure:
                progress(str(failure))
                rows.append(row | {"status": "not run", "reason": str(failure)})
                continue
        own = _rows_of(row, answers, run.token_bytes, layout.dp)
        rows += own
        for at, point in zip(own, answers[1:], strict=True):
            of_point = {name: at.get(name) for name in KERNEL_COLUMNS}
            kernels += [of_point | kernel for kernel in point.get("kernels", ())]
    return rows, kernels


def _rows_of(row: dict, answers: list[dict], token_bytes: int, dp: int) -> list[dict]:
    """A row of each point that an engine has answered."""
    (started, *points), rows = answers, []
    whole = started["kv_tokens"] * token_bytes
    for point in points:
        pool, batch, context = point["pool_bytes"], point["batch"], point["context"]
        found = row | {
            "context": context,
            "pool_gb": pool and pool / 1e9,
            "memory_gb": min(whole, pool or whole) / 1e9,
            "engine": f"vLLM {started['vllm']}",
            "batch": batch,
        }
        if batch:
            found |= {"step_ms": point["step_ms"], "spread": point["spread"], "status": "ok"}
            found["attention_ms"] = engine.attention_ms(point.get("kernels", ()))
            found["tokens_per_s"] = batch * dp / point["step_ms"] * 1e3
        else:
            found |= {"status": "not run", "reason": f"The pool must hold a sequence of {context} tokens."}
        rows.append(found)
    return rows


@application("throughput", ThroughputConfig)
def main(cfg: ThroughputConfig, run: Run) -> None:
    rows = table(cfg)
    measured, kernels = measured_rows(cfg, run.progress, run.out / "logs")
    run.write_table("throughput.csv", rows + measured)
    nothing = {"source": "measured", "status": "not run", "reason": "No process of its own was measured in the whole pool."}
    run.write_table("step_kernels.csv", kernels or [dict.fromkeys(KERNEL_COLUMNS) | nothing])
    fitting = sum(row["status"] == "ok" for row in rows)
    run.progress(f"{fitting} of {len(rows)} modelled points fit the {cfg.engine.gpu}")
    for reason in sorted({row["reason"] for row in measured if row["reason"]}):
        run.progress(f"not measured: {reason}")
    whole = [row for row in measured if row["tokens_per_s"] and not row["pool_gb"]]
    for routing in cfg.measure.routings:
        if gains := speedups([row for row in whole if row["routing"] == routing]):
            run.log({f"measured_speedup/{routing}/{point}": gain for point, gain in gains.items()})
            shown = ", ".join(f"{point} {gain:.2f}" for point, gain in gains.items())
            run.progress(f"measured speed-up over BF16, routing {routing}: {shown}")
    if gains := speedups(rows):
        run.log({f"modelled_speedup/{point}": gain for point, gain in gains.items()})
        best = max(gains, key=gains.__getitem__)
        run.progress(f"modelled speed-up over BF16: {min(gains.values()):.2f} to {gains[best]:.2f} ({best})")


if __name__ == "__main__":
    main()
