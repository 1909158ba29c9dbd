"""What Figs 5 and 6 share: timed rows of the kernel benchmark beside the roofline.

Rows measured by this run come first; if there are none, those recorded on the first GPU found; if there are
none either, only the roofline (modelled) and the paper's peak are drawn, under a mark that says what did not
run and why.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import sources
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sources import PAPER, InputError, Results, Source
from style import BADGE, BLUE, GREY, badge, context_ticks, footer, label_of, not_run, plt, variant_style

KEY = ["heads", "s_q", "batch", "context"]
BENCH = ("variant", "model", "layout", *KEY, "tflops", "source", "status", "reason", "gpu")
ROOFLINE = ("gpu", *KEY, "format", "tflops", "effective_peak_tflops", "source")
SUBJECT = "snapmla"  # the variant whose reason a panel without a time shows
FORMATS = {"snapmla": ("roofline SnapMLA", BLUE, "-"), "bf16": ("roofline BF16", GREY, "--")}


def normal(gpu: object) -> str:
    """A GPU's name without maker and form factor: "NVIDIA H200" and "h200" are the same part."""
    words = str(gpu).upper().replace("-", " ").split()
    return next(
        (word for word in words if word.startswith(("H", "GH", "B")) and any(c.isdigit() for c in word)),
        str(gpu).upper(),
    )


@dataclass(frozen=True)
class KernelData:
    """All shapes of this run (``planned``), timed ``rows`` with their ``source``, the ``roofline`` of
    ``gpu``.
    """

    planned: pd.DataFrame
    rows: pd.DataFrame
    source: Source | None
    roofline: pd.DataFrame
    gpu: str

    def why(self) -> str:
        """Why this run measured nothing: one reason per group of variants."""
        names: dict[str, list[str]] = {}
        for variant, rows in self.planned.groupby("variant", sort=False):
            names.setdefault(sources.reason(rows).rstrip("."), []).append(label_of(str(variant)))
        return "; ".join(f"{', '.join(variants)}: {reason}" for reason, variants in names.items())


def load(results: Results, default_gpu: str) -> KernelData:
    """Benchmark rows and the roofline of their GPU, or of ``default_gpu`` where nothing was measured."""
    planned = results.table("kernel_bench", "kernel_bench.csv", BENCH)
    roofline = results.table("kernel_bench", "roofline.csv", ROOFLINE)
    source, rows = next(
        iter(results.timed_tables("kernel_bench", "kernel_bench.csv", BENCH)), (None, planned[:0])
    )
    gpu = normal(rows["gpu"].iloc[0]) if source else normal(default_gpu)
    names = roofline["gpu"].map(normal)
    if gpu not in set(names):
        raise InputError(
            f"kernel_bench/roofline.csv must have rows of the GPU {gpu}, got {', '.join(sorted(set(names)))}."
        )
    return KernelData(planned, rows, source, roofline[names == gpu], gpu)


def draw(
    ax: Axes, data: KernelData, shapes: pd.DataFrame, rows: pd.DataFrame, peak: float, width: int
) -> None:
    """One panel: TFLOPS against context. ``shapes`` are the panel's planned shapes, ``rows`` its timed rows.

    A panel without a timed row says why, in lines of ``width`` characters; its badge may be a little wider.
    """
    lines = data.roofline.merge(shapes[KEY].drop_duplicates(), on=KEY)
    for name, (label, color, style) in FORMATS.items():
        line = lines[lines["format"] == name].sort_values("context")
        ax.plot(line["context"], line["tflops"], color=color, ls=style, lw=0.9, alpha=0.8, label=label)
    ax.axhline(peak, color=BADGE["paper"], lw=0.9, ls=":")
    top = 1.12 * max(peak, *lines["tflops"], *rows["tflops"])
    ax.set_ylim(0, top)
    for variant, series in rows.groupby("variant", sort=False):
        series = series.sort_values("context")
        ax.plot(series["context"], series["tflops"], **variant_style(str(variant)))
    if rows.empty:
        own = shapes[shapes["variant"] == SUBJECT] if SUBJECT in set(shapes["variant"]) else shapes
        taken = [0.0, 1.0, peak / top, *(lines["tflops"] / top)]
        # Between the lines:
        height = max(np.linspace(0.2, 0.8, 31), key=lambda y: min(abs(y - value) for value in taken))
        why = sources.reason(own) if data.source is None else f"shape not in the {data.source.kind} set"
        not_run(ax, why, height, width)
    labels = [Source("not run") if rows.empty or data.source is None else data.source]
    if len(lines):
        roofline = f"roofline of the {data.gpu}: Eq 7 and data sheet, nothing timed"
        labels.append(Source("modelled", detail=roofline))
    badge(ax, *labels, PAPER, width=width + 7)
    context_ticks(ax, shapes["context"])


def finish(fig: Figure, data: KernelData, peak: float, bf16: float, note: str) -> None:
    """The figure's legend and last line."""
    names = [variant_style(str(variant)) for variant in data.rows["variant"].unique()]
    handles = [plt.Line2D([], [], **style) for style in names]
    handles += [
        plt.Line2D([], [], color=c, ls=s, lw=0.9, label=f"{label}, {data.gpu} (modelled)")
        for label, c, s in FORMATS.values()
    ]
    text = f"paper: effective peak {peak} (BF16 peak {bf16:g})"
    handles += [plt.Line2D([], [], color=BADGE["paper"], ls=":", lw=0.9, label=text)]
    fig.legend(handles=handles, loc="outside upper center", ncols=min(3, len(handles)))
    missing = "" if data.source else f" Not run: {data.why()}."
    footer(fig, note + missing)
