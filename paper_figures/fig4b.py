"""Fig 4 through the kernels, and to contexts beyond the paper's: relative L2 of the attention output per layer.

    python paper_figures/fig4b.py --results results [--recorded results/recorded]

Reads fidelity/layer_error.csv and kernels.csv where this run measured them on a GPU, else a recorded fidelity.csv and
fidelity_kernels.csv. One panel per context (lines: the emulation; hollow marks: the kernels), and the mean over the
layers against the context.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from matplotlib.axes import Axes
from sources import LARGE, Results, Source
from style import (
    WIDTH,
    badge,
    context_name,
    context_ticks,
    footer,
    log_axis,
    not_run,
    plt,
    save,
    variant_style,
)

ERRORS = ("config", "panel", "layer", "context", "queries", "relative_l2", "source", "status", "gpu")
KERNELS = (
    "config", "layer", "context", "queries", "relative_l2", "from_emulation", "source", "status", "reason", "gpu",
)  # fmt: skip


def layers(ax: Axes, emulated: pd.DataFrame, by_kernels: pd.DataFrame) -> None:
    """One context's errors against the layer."""
    for variant, rows in emulated.groupby("config", sort=False):
        style = variant_style(str(variant))
        ax.plot(rows["layer"], rows["relative_l2"], **style | {"marker": ""})
        points = by_kernels[by_kernels["config"] == variant]
        ax.plot(points["layer"], points["relative_l2"], ls="", marker=style["marker"], mfc="none", color=style["color"], ms=5)
    ax.set_xticks(sorted(emulated["layer"].unique()))
    ax.set_xlabel("layer")
    log_axis(ax)


def means(ax: Axes, emulated: pd.DataFrame, by_kernels: pd.DataFrame) -> None:
    """The mean over the layers against the context."""
    for variant, rows in emulated.groupby("config", sort=False):
        style = variant_style(str(variant))
        for table, change in ((rows, {"marker": ""}), (by_kernels[by_kernels["config"] == variant], {"ls": "", "mfc": "none"})):
            mean = table.groupby("context")["relative_l2"].mean()
            ax.plot(mean.index, mean, **style | change | {"label": "_"})
    context_ticks(ax, emulated["context"])
    ax.set_xlabel("keys")
    log_axis(ax)


def draw(label: Source, errors: pd.DataFrame, kernels: pd.DataFrame, model: str) -> plt.Figure:
    emulated = errors[errors["panel"] == "teacher_forced"].sort_values("layer")
    contexts = sorted(emulated["context"].unique())
    fig, axes = plt.subplots(1, len(contexts) + 1, figsize=(WIDTH, 2.7), sharey=True, squeeze=False)
    for ax, context in zip(axes[0], contexts, strict=False):
        layers(ax, emulated[emulated["context"] == context], kernels[kernels["context"] == context])
        ax.set_title(f"{context_name(int(context))} keys", pad=15)
    means(axes[0, -1], emulated, kernels)
    axes[0, -1].set_title("mean", pad=15)
    for ax in axes[0]:
        badge(ax, label, width=24)
    axes[0, 0].set_ylabel("relative L2 of the output")
    # Every configuration, also where the first context has fewer.
    styles = [variant_style(str(variant)) for variant in emulated["config"].unique()]
    fig.legend(handles=[plt.Line2D([], [], **style, mfc="none") for style in styles], loc="outside upper center", ncols=3)
    distance = kernels.groupby("config")["from_emulation"].max()
    worst = distance.drop("bf16", errors="ignore").max()
    note = (
        f"Latents of {model}, teacher-forced, {emulated['queries'].min():.0f} to {emulated['queries'].max():.0f} queries "
        f"per layer, against exact attention; right: the mean over layers. Lines: emulation by Algorithm 1; hollow marks: kernels. "
    )
    if pd.notna(worst):
        note += f"The FP8 kernels are at most {worst:.1e} (relative L2) from the emulation by their own rules."
    footer(fig, note)
    return fig


def build(results: Results) -> None:
    found = results.timed_tables("fidelity", "layer_error.csv", ERRORS, recorded_as="fidelity.csv")
    kernels = results.timed_tables("fidelity", "kernels.csv", KERNELS, recorded_as="fidelity_kernels.csv")
    if found and kernels:
        (label, errors), (_, by_kernels) = found[0], kernels[0]
        model = results.model("fidelity") if label.kind == "measured" else LARGE
        fig = draw(label, errors, by_kernels, model)
    else:
        fig, ax = plt.subplots(figsize=(WIDTH, 2.4))
        not_run(ax, "no Hopper GPU, and nothing recorded")
        badge(ax, Source(sources.NOT_RUN))
        footer(fig, "Wants the model's attention in the kernels.")
    save(fig, results.root, "fig4b")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
