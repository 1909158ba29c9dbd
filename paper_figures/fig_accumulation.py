"""Beyond the paper: error of flat attention against the context, for four rules of accumulating FP8 products.

    python paper_figures/fig_accumulation.py --results results

Reads accumulation/accumulation.csv, and kernels.csv beside it (or a recorded flat_attention.csv) for what real
kernels do. Hopper's FP8 tensor cores add into their float32 accumulator with about 13 bits, truncating: one accumulator
over a long context stalls where values do not cancel. One panel per distribution of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from sources import Results, Source
from style import (
    BLACK,
    BLUE,
    ORANGE,
    VERMILION,
    WIDTH,
    badge,
    context_ticks,
    footer,
    log_axis,
    plt,
    save,
    variant_style,
)

RULES = {
    "single": ("one accumulator per sequence", VERMILION, "^"),
    "split_4k": ("a new accumulator every 4k keys", ORANGE, "s"),
    "promoted": ("each key block promoted to float32", BLUE, "o"),
    "float32": ("float32 throughout (floor)", BLACK, "x"),
}
KERNELS = (
    "variant", "batch", "keys", "value_mean", "value_std", "relative_l2", "source", "status", "reason", "gpu",
)  # fmt: skip


def kernels(results: Results) -> tuple[Source, pd.DataFrame] | None:
    """Errors of real kernels at the largest batch: measured by this run, else recorded, else None."""
    tables = results.timed_tables("accumulation", "kernels.csv", KERNELS, recorded_as="flat_attention.csv")
    if not tables:
        return None
    label, found = tables[0]
    return label, found[found["batch"] == found["batch"].max()]


def build(results: Results) -> None:
    columns = ("value_mean", "value_std", "keys", "rule", "block", "bits", "relative_l2", "source")
    table = results.table("accumulation", "accumulation.csv", columns)
    groups = list(table.groupby(["value_mean", "value_std"], sort=False))
    real = kernels(results)
    fig, axes = plt.subplots(1, len(groups), figsize=(WIDTH, 2.7), squeeze=False, sharey=True)
    for ax, ((mean, std), rows) in zip(axes[0], groups, strict=True):
        for rule, (label, color, marker) in RULES.items():
            line = rows[rows["rule"] == rule].groupby("keys")["relative_l2"].mean()
            if len(line):
                ax.plot(
                    line.index,
                    line,
                    color=color,
                    marker=marker,
                    label=label,
                    ls="--" if rule == "float32" else "-",
                )
        labels = results.label("accumulation", rows)
        if real:
            label, table_of_kernels = real
            labels.insert(0, label)
            here = (table_of_kernels["value_mean"] == mean) & (table_of_kernels["value_std"] == std)
            for variant, points in table_of_kernels[here].groupby("variant", sort=False):
                style = variant_style(str(variant))
                name = f"{style['label']}, kernel"
                ax.plot(points["keys"], points["relative_l2"], ls="", marker=style["marker"], ms=5, mfc="none",
                        color=style["color"], label=name)  # fmt: skip
        ax.set_title(f"values {mean:g} ± {std:g} (e4m3 units)", pad=15)
        context_ticks(ax, rows["keys"])
        ax.set_xlabel("keys")
        badge(ax, *labels)
    log_axis(axes[0, 0])  # shared by all panels
    axes[0, 0].set_ylabel("relative L2 of the output")
    handles, names = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, names, loc="outside upper center", ncols=2)
    blocks = sorted(table["block"].unique())
    bits = sorted(table.loc[table["rule"] != "float32", "bits"].dropna().unique())
    note = ""
    if real:
        note = f" Open markers: kernels on a GPU, batch {real[1]['batch'].iloc[0]:.0f}; FlashMLA's FP8 kernel keeps one accumulator for each part of a sequence."
    footer(
        fig,
        f"Emulated in blocks of {', '.join(f'{keys:g}' for keys in blocks)} keys: an accumulator that keeps "
        f"{', '.join(f'{bit:g}' for bit in bits)} bits and truncates; flat attention (every key has the "
        f"same weight).{note}",
    )
    save(fig, results.root, "fig_accumulation")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
