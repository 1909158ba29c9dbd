"""Beyond Fig 1: smaller cache pools, and where the gain comes from, of what was measured in vLLM.

    python paper_figures/fig1b.py --results results [--recorded results/recorded]

Reads throughput/throughput.csv, or a recorded one where this run measured nothing. Left: tokens/s against the context for
each pool of cache memory. Right: SnapMLA over FlashMLA BF16 in the whole pool as the product of two factors, larger batches
and shorter steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from fig1 import COLUMNS, COMMUNICATION, ENGINES, one_rank, whole_pool
from matplotlib.axes import Axes
from sources import Results, Source
from style import (
    GREEN,
    ORANGE,
    WIDTH,
    badge,
    context_name,
    context_ticks,
    footer,
    log_axis,
    not_run,
    plt,
    save,
)

STYLES = ("-", "--", ":", "-.")


def pools(ax: Axes, rows: pd.DataFrame) -> None:
    """Tokens/s against the context: a colour for each variant, a style for each pool."""
    sizes = sorted(rows["pool_gb"].fillna(float("inf")).unique(), reverse=True)
    for size, style in zip(sizes, STYLES, strict=False):
        own = rows[rows["pool_gb"].fillna(float("inf")) == size]
        for variant, (_, color, marker) in ENGINES.items():
            line = own[own["variant"] == variant].sort_values("context")
            ax.plot(line["context"], line["tokens_per_s"], color=color, ls=style, marker=marker, ms=4)
    handles = [plt.Line2D([], [], color="k", ls=style) for _, style in zip(sizes, STYLES, strict=False)]
    names = ["all that is left" if size == float("inf") else f"{size:g} GB" for size in sizes]
    ax.legend(handles, names, title="cache on each GPU", fontsize=6, title_fontsize=6)
    context_ticks(ax, rows["context"])
    log_axis(ax)
    ax.set_xlabel("context")
    ax.set_ylabel("tokens/s, node of 8 GPUs")


def factors(rows: pd.DataFrame) -> pd.DataFrame:
    """By context, of the whole pool: how much larger the batch is than BF16's, and how much shorter the step."""
    batch, step = (
        whole_pool(rows).pivot_table(index="context", columns="variant", values=column) for column in ("batch", "step_ms")
    )
    if not {"bf16", "snapmla"} <= set(batch.columns):
        return pd.DataFrame(columns=["batch", "step"])
    found = pd.DataFrame({"batch": batch["snapmla"] / batch["bf16"], "step": step["bf16"] / step["snapmla"]})
    return found.dropna()


def explanation(ax: Axes, found: pd.DataFrame) -> None:
    """From 1 to the batch's factor, and on to the product."""
    for index, row in enumerate(found.itertuples()):
        product = row.batch * row.step
        ax.bar(index - 0.2, row.batch - 1, 0.36, bottom=1, color=ORANGE)
        ax.bar(index + 0.2, product - row.batch, 0.36, bottom=row.batch, color=GREEN)
        ax.text(index - 0.2, row.batch, f"{row.batch:.2f}×", ha="center", va="bottom", fontsize=6)
        ax.text(index + 0.2, max(product, row.batch), f"{product:.2f}×", ha="center", va="bottom", fontsize=6)
    ax.axhline(1, color="k", lw=0.6)
    ax.set_xticks(range(len(found)), [context_name(int(context)) for context in found.index])
    ax.set_ylim(0.9 * min(1.0, *(found["batch"] * found["step"])), 1.2 * max(*found["batch"], *(found["batch"] * found["step"])))
    ax.set_xlabel("context")
    ax.set_ylabel("SnapMLA over BF16")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in (ORANGE, GREEN)]
    ax.legend(handles, ["larger batch", "and shorter (or longer) step"], fontsize=6, loc="upper right", ncols=2)


def build(results: Results) -> None:
    tables = results.timed_tables("throughput", "throughput.csv", (*COLUMNS, "step_ms"))
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.9), layout="constrained")
    if not tables:
        planned = results.table("throughput", "throughput.csv", COLUMNS)
        rows = planned[planned["source"] == "measured"]
        for ax in axes:
            not_run(ax, sources.reason(rows) if len(rows) else "measuring is off (measure.enabled)")
            ax.set(xticks=[], yticks=[])
            badge(ax, Source("not run"))
        footer(fig, "Decode steps in vLLM with smaller cache pools, and what makes the gain.")
        save(fig, results.root, "fig1b")
        return
    label, rows = tables[0]
    model, layout = rows[["model", "layout"]].iloc[0]
    rows = rows[(rows["model"] == model) & (rows["layout"] == layout)]
    pools(axes[0], rows)
    axes[0].set_title(f"{model}, {layout}", pad=15)
    found = factors(rows)
    axes[1].set_title("the gain in the whole pool", pad=15)
    if found.empty:
        not_run(axes[1], "no pair of FlashMLA BF16 and SnapMLA")
    else:
        explanation(axes[1], found)
    for ax in axes:
        badge(ax, label)
    shown = [ENGINES[name] for name in ENGINES if name in set(rows["variant"])]
    handles = [plt.Line2D([], [], color=color, marker=marker, label=label) for label, color, marker in shown]
    fig.legend(handles=handles, loc="outside upper center", ncols=3)
    footer(fig, f"Measured on one rank of the layout; {COMMUNICATION} (Fig 1)." if one_rank(rows) else "All GPUs of the layout.")
    save(fig, results.root, "fig1b")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
