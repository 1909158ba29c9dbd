"""Fig 4: error of the attention output per layer, for five FP8 configurations and the BF16 floor.

    python paper_figures/fig4.py --results results

Reads fidelity/layer_error.csv (errors against exact attention). Rows: RMSE, 1 - cosine, relative L2. Columns:
teacher-forced (each layer gets BF16 activations) and accumulated (each layer gets what the configuration made
of the layers before). An inset magnifies, on a linear scale, the curves that lie close to SnapMLA's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import sources
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from sources import InputError, Results
from style import (
    VARIANTS,
    WIDTH,
    badge,
    context_name,
    footer,
    log_axis,
    mark_inset,
    plt,
    power_name,
    save,
    variant_style,
)

METRICS = {"rmse": "RMSE", "one_minus_cosine": "1 − cosine", "relative_l2": "relative L2"}
PANELS = {"teacher_forced": "teacher-forced", "accumulated": "accumulated over layers"}
CONFIGS = ("snapmla", "config_a", "config_b", "config_c", "config_d")
EXTRA = {  # SnapMLA is drawn over the others, with hollow marks, so that a curve that coincides with it shows
    "bf16": {"ls": "--"},
    "snapmla": {"zorder": 3, "ms": 5, "markerfacecolor": "none"},
}
CLOSE = 1.3  # curves whose median ratio to SnapMLA's lies within this factor share the inset
SPREAD = 3.0  # an inset is worth its room only where the whole panel spans more than this factor


def freest_place(
    ax: Axes, curves: pd.DataFrame, size: tuple[float, float]
) -> tuple[int, tuple[float, float]]:
    """Where a box of ``size`` covers the least of ``curves``: how much, and its lower left corner.

    Sizes and places are axes fractions.
    """
    width, height = size
    to_axes = ax.transData - ax.transAxes
    layers = curves.index.to_numpy(float)
    fine = np.linspace(layers.min(), layers.max(), 100)
    points = [
        np.column_stack([fine, np.exp(np.interp(fine, layers, np.log(curves[name])))]) for name in curves
    ]
    points = to_axes.transform(np.vstack(points))
    places = [
        (x, y)
        for y in (0.92 - height, 0.46, 0.34, 0.23, 0.12)
        for x in (0.12, 0.56 - width / 2, 0.98 - width)
    ]

    def covered(place: tuple[float, float]) -> int:
        left, low = place[0] - 0.09, place[1] - 0.11  # the inset's tick labels
        inside = (points >= (left, low)) & (points <= (place[0] + width, place[1] + height + 0.08))
        return int(inside.all(axis=1).sum())

    return min((covered(place), place) for place in places)


def draw_inset(ax: Axes, curves: pd.DataFrame) -> None:
    """Magnify the curves close to SnapMLA's, in the deeper half of the layers, in an empty part of ``ax``."""
    shown = curves.loc[:, (curves > 0).all()]
    if "snapmla" not in shown or len(shown) < 3:
        return
    ratio = shown.drop(columns="bf16", errors="ignore").div(shown["snapmla"], axis=0).median()
    close = [name for name in ratio.index if 1 / CLOSE <= ratio[name] <= CLOSE]
    lowest, highest = shown.min().min(), shown.max().max()
    if len(close) < 2 or highest < SPREAD * lowest:
        return
    size = (0.4, 0.27)
    for room in (
        0.05,
        0.2,
        0.35,
        0.5,
        0.65,
        0.8,
        1.0,
    ):  # empty space above the curves, in units of their span
        ax.set_ylim(lowest / (highest / lowest) ** 0.08, highest * (highest / lowest) ** room)
        covered, place = freest_place(ax, shown, size)
        if not covered:
            break
    inset = mark_inset(ax.inset_axes((*place, *size)))
    part = curves[close].iloc[-max(3, len(curves) // 2) :]
    for name in close:
        inset.plot(
            part.index, part[name], **variant_style(name), lw=1.0, **({"ms": 2.6} | EXTRA.get(name, {}))
        )
    low, high = part.min().min(), part.max().max()
    margin = 0.15 * (high - low)
    inset.set_ylim(low - margin, high + margin)
    inset.set_xticks(part.index[[0, -1]])
    inset.yaxis.set_major_locator(plt.MaxNLocator(3))
    power = int(np.floor(np.log10(high)))
    inset.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 10.0**power:.3g}"))
    inset.text(0, 1.03, f"× {power_name(10.0**power)}", transform=inset.transAxes, fontsize=5)
    inset.tick_params(labelsize=5, length=1.5, pad=1)
    inset.spines[:].set(visible=True, color="#9A9A9A")


def build(results: Results) -> None:
    table = results.table(
        "fidelity", "layer_error.csv", ("config", "panel", "layer", "context", "queries", *METRICS, "source")
    )
    context = int(table["context"].max())
    table = table[table["context"] == context]
    fig, axes = plt.subplots(len(METRICS), len(PANELS), figsize=(WIDTH, 6.8), sharex=True)
    for column, (panel, title) in enumerate(PANELS.items()):
        rows = table[table["panel"] == panel]
        if rows.empty:
            raise InputError(
                f"fidelity/layer_error.csv must have rows of the panel {panel!r}, got only "
                f"{', '.join(sorted(set(table['panel'])))}."
            )
        for row, (metric, name) in enumerate(METRICS.items()):
            ax = axes[row, column]
            curves = rows.pivot_table(index="layer", columns="config", values=metric)
            curves = curves[[variant for variant in ("bf16", *CONFIGS) if variant in curves]]
            for variant in curves:
                ax.plot(curves.index, curves[variant], **variant_style(variant), **EXTRA.get(variant, {}))
            ax.set_yscale("log")
            draw_inset(ax, curves)
            positive = curves[curves > 0]
            log_axis(ax, span=(0.9 * positive.min().min(), 1.1 * positive.max().max()))
            ax.set_title(f"{name}, {title}")
            ax.set_xticks(curves.index)
            badge(ax, *results.label("fidelity", rows))
            if column == 0:
                ax.set_ylabel(name)
    for ax in axes[-1]:
        ax.set_xlabel("layer")
    handles, names = axes[0, 0].get_legend_handles_labels()
    names = ["BF16 (floor)" if name == VARIANTS["bf16"][0] else name for name in names]
    fig.legend(handles, names, loc="outside upper center", ncols=3)
    queries = int(table["queries"].max())
    paper = sources.published("method.toml")["fidelity"]["context"]
    footer(
        fig,
        f"Latents of {results.model('fidelity')}, {context_name(context)} keys (paper: "
        f"{context_name(paper)}), {queries} queries per layer. The "
        "paper's curves are a plot without printed values. Insets: the same data on a linear scale.",
    )
    save(fig, results.root, "fig4")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
