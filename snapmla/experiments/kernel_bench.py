"""Time of the decode kernel and its peers over the shapes of Figs 5 and 6, and the roofline of the same shapes.

    python -m snapmla.experiments.kernel_bench variant=[snapmla,flashmla_bf16] fig6.contexts=[65536]

kernel_bench.csv has one row per variant and shape, latency.csv the same for small batches and short contexts, and
ceilings.csv what the GPU reaches on plain work: measured where there is a Hopper GPU, elsewhere every row has the status
"not run" and a reason. roofline.csv (``modelled``) needs no GPU and is complete everywhere. `make record` keeps a GPU's
measurements in results/recorded/.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
from omegaconf import MISSING

from snapmla import native, provenance
from snapmla.bench.ceilings import CEILINGS, measure_ceilings
from snapmla.bench.inputs import Pool
from snapmla.bench.machine import Monitor, hopper_gpu, other_processes
from snapmla.bench.timing import Clock, CudaClock, Timing, calls_in_a_window, measure_together
from snapmla.bench.variants import NO_GPU, Variant, Workload, check, decode_calls, step_calls, why_not
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.experiments.throughput import EngineConfig
from snapmla.layout import QK_HEAD_DIM
from snapmla.memory import CACHE_BYTES_PER_TOKEN, DoesNotFit, largest_batch
from snapmla.models import ParallelLayout, get_model
from snapmla.roofline import (
    GPUS,
    decode_bytes,
    decode_flops,
    decode_roofline,
    effective_peak,
    get_gpu,
    peak_tflops,
    traffic,
)

COLUMNS = (
    "variant", "model", "layout", "heads", "s_q", "batch", "context", "time_us", "tflops", "gbps", "ideal_us",
    "share_of_ideal", "source", "status", "reason", "gpu",
    "step_us", "spread", "windows", "calls", "flops", "bytes", "ideal_measured_us", "share_of_measured",
    "sm_mhz", "power_w", "power_limit_w", "throttle", "shared_gpu", "driver", "cuda", "commit", "library",
)  # fmt: skip


SUBJECT, STEP = "snapmla", "step"
"""This package's variant; and what is timed beside it: everything that a step's first layer pays, the column step_us."""


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
class GridConfig:
    """Every combination of these; variants that are not selected are left out."""

    variants: list[str] = MISSING
    heads: list[int] = MISSING
    batches: list[int] = MISSING
    contexts: list[int] = MISSING


@dataclass
class TimingConfig:
    seconds: float = MISSING
    pool_pages: int = MISSING
    shared_gpu: bool = MISSING


@dataclass
class KernelBenchConfig(BaseConfig):
    """Keys of conf/kernel_bench.yaml, where each has its value and the reason for it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    variant: dict[str, Variant] = field(default_factory=dict)
    fig5: Fig5Config = field(default_factory=Fig5Config)
    fig6: Fig6Config = field(default_factory=Fig6Config)
    latency: GridConfig = field(default_factory=GridConfig)
    crossover: GridConfig = field(default_factory=GridConfig)
    timing: TimingConfig = field(default_factory=TimingConfig)
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
            batch = largest_batch(budget.cache_bytes(model, layout, cfg.batch_format), model, context, cfg.batch_format)
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


def grid_shapes(grid: GridConfig) -> list[Shape]:
    return [Shape(h, 1, b, n) for h, b, n in itertools.product(grid.heads, grid.batches, grid.contexts)]


def least_time(
    variant: Variant, w: Workload, read_tbs: float, bf16: float, fp8: float
) -> tuple[int, int, float]:
    """Operations, bytes and least µs of a variant's call at these rates (TB/s, TFLOPS)."""
    flops = decode_flops(w.heads, w.s_q, w.batch, w.context)
    peak = {"bf16": bf16, "fp8": fp8, "mixed": effective_peak(bf16, fp8)}[variant.arithmetic]
    if variant.cache == "fp8":  # e4m3 throughout; the queries as wide as what they are multiplied as
        q_bytes = QK_HEAD_DIM * (1 if variant.arithmetic == "fp8" else 2)
        moved = traffic(w.heads, w.s_q, w.batch, w.context, token_bytes=QK_HEAD_DIM, q_bytes=q_bytes)
    else:
        moved = decode_bytes(w.heads, w.s_q, w.batch, w.context, variant.cache)
    return flops, moved, max(moved / read_tbs, flops / peak) * 1e-6


@dataclass
class Bench:
    """A measuring run on one GPU."""

    gpu: str
    clock: Clock
    pool: Pool
    monitor: Monitor
    ceilings: dict[str, float]
    l2_bytes: int
    seconds: float
    made_by: dict
    """The columns shared_gpu, driver, cuda, commit and library."""

    def rows(self, variants: dict[str, Variant], w: Workload) -> dict[str, dict]:
        """The measured columns of variants at one shape, timed in turns; "reason" where one has no room."""
        tables, calls, rows = self.tables(w), {}, {}
        for name, variant in variants.items():
            try:
                calls[name] = decode_calls(variant, self.pool, w, tables)
            except torch.OutOfMemoryError:
                rows[name] = {"reason": "The call does not fit the memory beside the pool of pages."}
            except (
                RuntimeError,
                ValueError,
                OSError,
            ) as error:  # OSError: no compiler for a kernel made at the first call
                if name == SUBJECT:
                    raise
                rows[name] = {"reason": f"The kernel refused the call: {str(error).splitlines()[0]}"}
        if SUBJECT in calls:
            calls[STEP] = step_calls(self.pool, w, tables)
        began = time.monotonic()
        timings = measure_together(self.clock, calls, seconds=self.seconds)
        machine = self.monitor.between(began, time.monotonic())
        for name in calls.keys() - {STEP}:
            step = {"step_us": timings[STEP].time_us} if name == SUBJECT else {}
            rows[name] = self._columns(variants[name], w, timings[name], len(tables)) | machine | step
        return rows

    def _columns(self, variant: Variant, w: Workload, timing: Timing, calls: int) -> dict:
        c = self.ceilings
        flops, moved, measured = least_time(variant, w, c["read_tbs"], c["bf16_tflops"], c["fp8_tflops"])
        sheet = next((g for g in GPUS.values() if g.name in self.gpu.split()), None)
        ideal = sheet and least_time(variant, w, sheet.bandwidth_tbs, sheet.bf16_tflops, sheet.fp8_tflops)[2]
        us = timing.time_us
        return {
            "time_us": us, "tflops": flops / us * 1e-6, "gbps": moved / us * 1e-3,
            "ideal_us": ideal, "share_of_ideal": ideal and ideal / us,
            "ideal_measured_us": measured, "share_of_measured": measured / us,
            "spread": timing.spread, "windows": timing.windows, "calls": calls,
            "flops": flops, "bytes": moved, "status": "ok", **self.made_by,
        }  # fmt: skip

    def tables(self, w: Workload) -> list[torch.Tensor]:
        """Block tables of one window: together they read more than L2 holds."""
        least = decode_bytes(w.heads, w.s_q, w.batch, w.context, "snapmla")
        count = calls_in_a_window(least, self.l2_bytes)
        return [self.pool.block_table(w.batch, w.context, seed) for seed in range(count)]


def bench_table(
    variants: dict[str, Variant], shapes: list[Shape], gpu: str | None, bench: Bench | None = None
) -> Iterator[dict]:
    """The rows of kernel_bench.csv: every variant at every shape, measured by `bench` where there is one."""
    blank = dict.fromkeys(COLUMNS)
    for shape in shapes:
        known = {key: value for key, value in asdict(shape).items() if key in COLUMNS}
        workload = (
            None if shape.batch is None else Workload(shape.heads, shape.s_q, shape.batch, shape.context)
        )
        reasons = {name: shape.unfit or why_not(variant, gpu, workload) for name, variant in variants.items()}
        possible = {name: variants[name] for name, reason in reasons.items() if reason is None}
        measured = bench.rows(possible, workload) if bench and possible else {}
        for name, reason in reasons.items():
            row = blank | known | {"variant": name, "source": "measured", "status": "not run", "gpu": gpu}
            yield row | {"reason": reason} | measured.get(name, {})


def start_bench(cfg: KernelBenchConfig, gpu: str, monitor: Monitor, run: Run) -> Bench:
    """Pool, clock and ceilings on the current GPU. Raises RuntimeError where another process computes on it."""
    if (others := other_processes()) and not cfg.timing.shared_gpu:
        raise RuntimeError(
            f"the GPU must be free for a measurement, got {len(others)} other processes: set timing.shared_gpu=true "
            "to measure all the same."
        )
    clock = CudaClock()
    ceilings = measure_ceilings(clock)
    run.progress(", ".join(f"{name} {value:.4g}" for name, value in ceilings.items()))
    description = provenance.gpus()
    made_by = {
        "shared_gpu": bool(others),
        "driver": description[0]["driver_version"] if description else None,
        "cuda": torch.version.cuda,
        "commit": provenance.git_commit()[0],
        "library": library_hash(),
    }
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    pool = Pool(cfg.timing.pool_pages, cfg.seed)
    return Bench(gpu, clock, pool, monitor, ceilings, properties.L2_cache_size, cfg.timing.seconds, made_by)


def library_hash() -> str | None:
    """The first 16 digits of the kernels' library's sha256."""
    path = native.library_path()
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


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


def longest(rows: list[dict]) -> dict[str, float]:
    """TFLOPS of each variant and number of heads at its longest context, one query, of Fig 6's rows."""
    timed = [row for row in rows if row["status"] == "ok" and row["model"] is None and row["s_q"] == 1]
    return {f"tflops/{row['variant']}/{row['heads']}": row["tflops"] for row in sorted(timed, key=lambda row: row["context"])}


@application("kernel_bench", KernelBenchConfig)
def main(cfg: KernelBenchConfig, run: Run) -> None:
    check(cfg.variant)
    shapes = fig5_shapes(cfg.fig5, cfg.engine) + fig6_shapes(cfg.fig6)
    gpu = hopper_gpu()
    sets = {"kernel_bench.csv": [(cfg.variant, shapes)]}
    sets["latency.csv"] = [
        ({name: variant for name, variant in cfg.variant.items() if name in grid.variants}, grid_shapes(grid))
        for grid in (cfg.latency, cfg.crossover)
    ]
    with Monitor() if gpu else contextlib.nullcontext() as monitor:
        bench = start_bench(cfg, gpu, monitor, run) if gpu else None
        ceilings = bench.ceilings if bench else dict.fromkeys(CEILINGS)
        status = {"source": "measured", "status": "ok" if bench else "not run", "gpu": gpu}
        status["reason"] = None if bench else NO_GPU
        run.write_table("ceilings.csv", [{"what": k, "value": v, **status} for k, v in ceilings.items()])
        for filename, parts in sets.items():
            rows = []
            for row in itertools.chain.from_iterable(bench_table(*part, gpu, bench) for part in parts):
                rows.append(row)
                if bench and len(rows) % 50 == 0:
                    run.progress(f"{filename}: {len(rows)} rows")
            if rows:  # none: no variant of the grid is selected
                run.write_table(filename, rows)
            if filename == "kernel_bench.csv" and bench:
                run.log(longest(rows))
            for reason, count in Counter(row["reason"] for row in rows if row["reason"]).items():
                run.progress(f"{filename}: {count} of {len(rows)} measurements not run: {reason}")
    run.write_table("roofline.csv", roofline_table(cfg, shapes))


if __name__ == "__main__":
    main()
