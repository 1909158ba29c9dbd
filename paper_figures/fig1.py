"""Fig 1: end-to-end decode throughput of a node, FlashMLA BF16 against SnapMLA.

    python paper_figures/fig1.py --results results

Reads throughput/throughput.csv. One panel per model and parallel layout. The batch that fits the memory is
printed below each context, the ratio above each pair. The paper prints one ratio (up to 1.91x, at DP8/TP1)
and no tokens/s: it is drawn as a mark at 1.91 times our BF16 bar.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from matplotlib.axes import Axes
from sources import PAPER, Results, Source
from style import BADGE, VARIANTS, WIDTH, badge, context_name, footer, not_run, plt, save

COLUMNS = ("variant", "model", "layout", "context", "batch", "tokens_per_s", "source", "status", "reason")
PAIR = ["bf16", "snapmla"]
BAR = 0.4


def draw_pairs(ax: Axes, rows: pd.DataFrame, paper_speedup: float | None) -> None:
    """A pair of bars per context, their ratio above, and the batch of each below the context."""
    contexts = sorted(rows["context"].unique())
    values = rows.pivot_table(index="context", columns="variant", values="tokens_per_s").reindex(
        contexts, columns=PAIR
    )
    batches = rows.pivot_table(index="context", columns="variant", values="batch").reindex(
        contexts, columns=PAIR
    )
    top = values.max().max()
    for side, variant in enumerate(PAIR):
        places = [index + (side - 0.5) * BAR for index in range(len(contexts))]
        ax.bar(places, values[variant], BAR * 0.94, color=VARIANTS[variant][1], alpha=0.85)
    for index, (bf16, ours) in enumerate(zip(values["bf16"], values["snapmla"], strict=True)):
        if not (bf16 > 0 and ours > 0):
            continue
        marks = [bf16, ours]
        if paper_speedup:
            marks.append(bf16 * paper_speedup)
            left = index + BAR * 0.03
            ax.hlines(marks[-1], left - BAR * 0.12, left + BAR * 1.06, color=BADGE["paper"], lw=1.3, zorder=4)
        ax.text(index, max(marks) + 0.02 * top, f"{ours / bf16:.2f}×", ha="center", va="bottom", fontsize=6)
    counts = [
        " | ".join("–" if pd.isna(count) else f"{count:.0f}" for count in pair) for pair in batches.to_numpy()
    ]
    ax.set_xticks(
        range(len(contexts)),
        [f"{context_name(int(context))}\n{count}" for context, count in zip(contexts, counts, strict=True)],
    )
    ax.set_ylim(0, top * 1.2)


def build(results: Results) -> None:
    table = results.table("throughput", "throughput.csv", COLUMNS)
    paper = sources.published("method.toml")["throughput"]
    models, layouts = table["model"].unique(), table["layout"].unique()
    fig, axes = plt.subplots(
        len(models),
        len(layouts),
        figsize=(WIDTH, 0.75 + 1.75 * len(models)),
        squeeze=False,
    )
    for row, model in enumerate(models):
        for column, layout in enumerate(layouts):
            ax, rows = axes[row, column], table[(table["model"] == model) & (table["layout"] == layout)]
            done = sources.best_evidence(sources.ran(rows))
            at_paper = layout == paper["layout"] and set(PAIR) <= set(done["variant"])
            ax.set_title(layout)
            ax.grid(visible=False, axis="x")
            if done.empty:
                not_run(ax, sources.reason(rows) if len(rows) else "not in throughput.csv")
                ax.set(xticks=[], yticks=[])
                badge(ax, Source("not run"))
            else:
                draw_pairs(ax, done, paper["speedup"] if at_paper else None)
                badge(ax, *results.label("throughput", done), *([PAPER] if at_paper else []))
            if row == len(models) - 1:
                ax.set_xlabel("context; batch BF16 | SnapMLA")
        axes[row, 0].set_ylabel(f"{model}\ntokens/s, node of 8 GPUs")
    handles = [plt.Rectangle((0, 0), 1, 1, color=VARIANTS[variant][1], alpha=0.85) for variant in PAIR]
    names = [
        "FlashMLA BF16",
        "SnapMLA FP8",
        f"paper: {paper['speedup']}× BF16 (its best case, {paper['layout']})",
    ]
    handles += [plt.Line2D([], [], color=BADGE["paper"], lw=1.3)]
    fig.legend(handles, names, loc="outside upper center", ncols=3)
    footer(
        fig,
        "Batch: sequences per data-parallel group that fit the memory. Above the bars: SnapMLA over BF16. "
        "The paper prints no tokens/s.",
    )
    save(fig, results.root, "fig1")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
