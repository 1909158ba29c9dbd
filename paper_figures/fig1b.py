"""Beyond Fig 1: smaller cache pools, and where the gain comes from, of what was measured in vLLM.

    python paper_figures/fig1b.py --results results [--recorded results/recorded]

Reads throughput/throughput.csv, or a recorded one where this run measured nothing. Above, a panel for each pool of cache memory
that was set: tokens/s, as in Fig 1. Below, in the whole pool: the GPU's time for a token, in parts of FlashMLA BF16's, as
attention (a faster kernel shortens it) and the rest of the step (a larger batch shares it).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pandas as pd
import sources
from fig1 import COLUMNS, COMMUNICATION, ENGINES, draw_bars, one_rank, whole_pool
from matplotlib.axes import Axes
from sources import Results, Source
from style import (
    GREY,
    WIDTH,
    badge,
    context_name,
    footer,
    not_run,
    plt,
    save,
)


def time_of_a_token(rows: pd.DataFrame) -> pd.DataFrame:
    """By context and variant: attention and rest, whose sum is 1 for bf16; contexts without bf16 or snapmla are left out."""
    rows = rows.assign(attention=rows["attention_ms"] / rows["batch"], whole=rows["step_ms"] / rows["batch"])
    bf16 = rows[rows["variant"] == "bf16"].set_index("context")["whole"]
    both = set(rows.loc[rows["variant"] == "snapmla", "context"]) & set(bf16.index)
    rows = rows[rows["context"].isin(both)]
    unit = rows["context"].map(bf16)
    found = rows.assign(attention=rows["attention"] / unit, rest=(rows["whole"] - rows["attention"]) / unit)
    return found.set_index(["context", "variant"])[["attention", "rest"]].sort_index()


def explanation(ax: Axes, found: pd.DataFrame, unbalanced: pd.DataFrame) -> None:
    """A bar of each variant at each context: attention in its colour, above it the rest, and the gain. unbalanced: the same
    with the dummy weights' own routing, whose sum is a mark."""
    contexts = sorted(set(found.index.get_level_values("context")))
    shown = [name for name in ENGINES if name in set(found.index.get_level_values("variant"))]
    width = 0.84 / len(shown)
    for (index, context), (place, name) in itertools.product(enumerate(contexts), enumerate(shown)):
        if (context, name) not in found.index:
            continue
        attention, rest = found.loc[(context, name)]
        x, color = index + (place - (len(shown) - 1) / 2) * width, ENGINES[name][1]
        ax.bar(x, attention, width * 0.92, color=color, alpha=0.85)
        ax.bar(x, rest, width * 0.92, bottom=attention, color=color, alpha=0.3)
        if name != "bf16":
            top = attention + rest
            if (context, name) in unbalanced.index:
                ax.plot(x, mark := unbalanced.loc[(context, name)].sum(), "D", mfc="none", mec="k", ms=3, mew=0.6)
                top = max(top, mark + 0.02)
            ax.text(x, top + 0.01, f"{1 / (attention + rest):.2f}×", ha="center", va="bottom", fontsize=6)
    ax.set_xticks(range(len(contexts)), [context_name(int(context)) for context in contexts])
    ax.set_ylim(0, 1.22)
    ax.grid(visible=False, axis="x")
    ax.set_xlabel("context")
    ax.set_ylabel("time of a token, BF16 = 1")
    handles = [plt.Rectangle((0, 0), 1, 1, color=GREY, alpha=alpha) for alpha in (0.3, 0.85)]
    names = ["the rest of the step", "attention"]
    if len(unbalanced):
        handles.append(plt.Line2D([], [], marker="D", ls="", mfc="none", mec="k", ms=3, mew=0.6))
        names.append("all, if all tokens meet the same experts")
    ax.legend(handles, names, fontsize=6, loc="upper right", ncols=len(names))


def build(results: Results) -> None:
    tables = results.timed_tables("throughput", "throughput.csv", (*COLUMNS, "step_ms", "attention_ms", "memory_gb"))
    if not tables:
        planned = results.table("throughput", "throughput.csv", COLUMNS)
        rows = planned[planned["source"] == "measured"]
        fig, ax = plt.subplots(figsize=(WIDTH, 1.6))
        not_run(ax, sources.reason(rows) if len(rows) else "measuring is off (measure.enabled)")
        ax.set(xticks=[], yticks=[])
        badge(ax, Source("not run"))
        footer(fig, "Decode steps in vLLM with smaller cache pools, and what makes the gain.")
        save(fig, results.root, "fig1b")
        return
    label, rows = tables[0]
    model, layout = rows[["model", "layout"]].iloc[0]
    papers = sources.published("method.toml")["throughput"]["layout"]
    if ((rows["model"] == model) & (rows["layout"] == papers)).any():
        layout = papers
    rows = rows[(rows["model"] == model) & (rows["layout"] == layout)]
    if one_rank(rows):  # whose kernels are known
        rows = rows[rows["scope"] == "rank"]
    whole, sizes = whole_pool(rows), sorted(rows["pool_gb"].dropna().unique(), reverse=True)
    fig = plt.figure(figsize=(WIDTH, 4.3 if sizes else 2.7))
    grid = fig.add_gridspec(2 if sizes else 1, max(len(sizes), 1))
    for column, size in enumerate(sizes):
        ax = fig.add_subplot(grid[0, column])
        draw_bars(ax, rows[(rows["pool_gb"] == size) & (rows["routing"] != "weights")], rows[:0], None)
        ax.set_title(f"{size:g} GB of cache", pad=14)
        ax.grid(visible=False, axis="x")
        ax.set_xlabel("context; batch of each bar")
    if sizes:
        fig.axes[0].set_ylabel("tokens/s, node of 8 GPUs")
    below = fig.add_subplot(grid[-1, :])
    found = time_of_a_token(whole)
    below.set_title(f"{model}, {layout}: where the gain comes from, with all the cache that fits", pad=4)
    if found.empty:
        not_run(below, "no pair of FlashMLA BF16 and SnapMLA")
    else:
        explanation(below, found, time_of_a_token(rows[(rows["routing"] == "weights") & rows["pool_gb"].isna()]))
    for ax in fig.axes:
        badge(ax, label)
    shown = [ENGINES[name] for name in ENGINES if name in set(rows["variant"])]
    handles = [plt.Rectangle((0, 0), 1, 1, color=color, alpha=0.85, label=name) for name, color, _ in shown]
    fig.legend(handles=handles, loc="outside upper center", ncols=3)
    note = f"Measured on one rank of the layout; {COMMUNICATION} (Fig 1)." if one_rank(rows) else "All GPUs of the layout."
    note += " Above the bars: SnapMLA over BF16." if sizes else ""
    note += " Attention: the backend's kernels under torch's profiler, where the engine ran in one process."
    if len(found):
        held = whole.groupby("variant")["memory_gb"].max()
        note += f" All that fits: {', '.join(f'{ENGINES[name][0]} {held[name]:.1f} GB' for name in ENGINES if name in held)}."
    footer(fig, note)
    save(fig, results.root, "fig1b")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
