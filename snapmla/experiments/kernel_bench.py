"""Time of the decode kernel over the shapes of Figs 5 and 6, and the roofline of the same shapes.

    python -m snapmla.experiments.kernel_bench fig6.contexts=[65536] fig6.heads=[64,128]

kernel_bench.csv has one row per variant and shape. This version has no timing yet: every row
has the status "not run" and a reason. roofline.csv (``modelled``) needs no GPU and is complete everywhere.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass, field

import torch
from omegaconf import MISSING

from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.experiments.throughput import EngineConfig
from snapmla.memory import CACHE_BYTES_PER_TOKEN, DoesNotFit, largest_batch
from snapmla.models import ParallelLayout, get_model
from snapmla.roofline import decode_roofline, get_gpu, peak_tflops

VARIANTS = ("snapmla", "flashmla_bf16", "flashmla_fp8")
COLUMNS = (
    "variant", "model", "layout", "heads", "s_q", "batch", "context", "time_us", "tflops", "gbps", "ideal_us",
    "share_of_ideal", "source", "status", "reason", "gpu",
)  # fmt: skip


@dataclass
class Fig5Config:
    models: list[str] = MISSING
    layouts: list[str] = MISSING
    s_q: int = MISSING
    contexts: list[int] = MISSING
    batch_format: str = MISSING


@dataclass
class Fig6Config:
    batch: int = MISSING
    heads: list[int] = MISSING
    s_q: list[int] = MISSING
    contexts: list[int] = MISSING


@dataclass
class KernelBenchConfig(BaseConfig):
    """Keys of conf/kernel_bench.yaml, where each has its value and the reason for it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    variants: list[str] = MISSING
    fig5: Fig5Config = field(default_factory=Fig5Config)
    fig6: Fig6Config = field(default_factory=Fig6Config)
    roofline_gpus: list[str] = MISSING


@dataclass(frozen=True)
class Shape:
    """One decode call of one layer on one GPU; ``model`` and ``layout`` name its workload (Fig 5)."""

    heads: int
    s_q: int
    batch: int | None
    """None: the workload does not fit the memory, and ``unfit`` says why."""
    context: int
    model: str | None = None
    layout: str | None = None
    unfit: str | None = None


def fig5_shapes(cfg: Fig5Config, engine: EngineConfig) -> list[Shape]:
    """Per-GPU shapes of each model and layout, with the largest batch that ``engine`` holds."""
    budget = engine.budget()
    shapes = []
    for name, layout_name, context in itertools.product(cfg.models, cfg.layouts, cfg.contexts):
        model, layout = get_model(name), ParallelLayout.parse(layout_name)
        batch, unfit = None, None
        try:
            batch = largest_batch(budget.cache_bytes(model, layout), model, context, cfg.batch_format)
        except DoesNotFit as error:
            unfit = f"On the {engine.gpu}, {error}"
        shapes.append(
            Shape(model.heads_per_gpu(layout), cfg.s_q, batch, context, model.name, str(layout), unfit)
        )
    return shapes


def fig6_shapes(cfg: Fig6Config) -> list[Shape]:
    """The grid of heads, s_q and contexts at one batch size."""
    return [
        Shape(heads, s_q, cfg.batch, context)
        for heads, s_q, context in itertools.product(cfg.heads, cfg.s_q, cfg.contexts)
    ]


def hopper_gpu() -> str | None:
    """Name of the current CUDA device if it is a Hopper GPU (compute capability 9.0)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    return torch.cuda.get_device_name()


def why_not_run(variant: str, gpu: str | None) -> str:
    """Why ``variant`` is not timed on ``gpu`` (None: no Hopper GPU); ValueError for an unknown variant."""
    if variant not in VARIANTS:
        raise ValueError(f"variants must be among {', '.join(VARIANTS)}, got {variant!r}.")
    if gpu is None:
        return "This machine has no Hopper GPU (compute capability 9.0)."
    return f"This version has no timing of {variant} yet."


def bench_table(cfg: KernelBenchConfig, shapes: list[Shape], gpu: str | None) -> list[dict]:
    """The rows of kernel_bench.csv: every variant at every shape."""
    rows = []
    for variant, shape in itertools.product(cfg.variants, shapes):
        reason = why_not_run(variant, gpu)
        row = {key: value for key, value in asdict(shape).items() if key in COLUMNS}
        row |= {"variant": variant, "source": "measured", "status": "not run", "gpu": gpu}
        rows.append(dict.fromkeys(COLUMNS) | row | {"reason": shape.unfit or reason})
    return rows


def roofline_table(cfg: KernelBenchConfig, shapes: list[Shape]) -> list[dict]:
    """The rows of roofline.csv: every distinct shape on every configured GPU, in both formats."""
    distinct = dict.fromkeys((s.heads, s.s_q, s.batch, s.context) for s in shapes if s.batch is not None)
    rows = []
    for name, shape, cache_format in itertools.product(cfg.roofline_gpus, distinct, CACHE_BYTES_PER_TOKEN):
        gpu = get_gpu(name)
        least = decode_roofline(gpu, *shape, cache_format)
        rows.append(
            {
                "gpu": gpu.name,
                **dict(zip(("heads", "s_q", "batch", "context"), shape, strict=True)),
                "format": cache_format,
                "time_us": least.time_us,
                "tflops": least.tflops,
                "bound": least.bound,
                "effective_peak_tflops": peak_tflops(gpu, cache_format),
                "source": "modelled",
            }
        )
    return rows


@application("kernel_bench", KernelBenchConfig)
def main(cfg: KernelBenchConfig, run: Run) -> None:
    shapes = fig5_shapes(cfg.fig5, cfg.engine) + fig6_shapes(cfg.fig6)
    bench = bench_table(cfg, shapes, hopper_gpu())
    run.write_table("kernel_bench.csv", bench)
    run.write_table("roofline.csv", roofline_table(cfg, shapes))
    for reason, count in Counter(row["reason"] for row in bench).items():
        run.progress(f"{count} of {len(bench)} measurements not run: {reason}")


if __name__ == "__main__":
    main()
