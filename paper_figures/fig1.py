"""Fig 1: end-to-end decode throughput of a node, FlashMLA BF16 against SnapMLA.

    python paper_figures/fig1.py --results results [--recorded results/recorded]

Reads throughput/throughput.csv, and a recorded one where this run measured nothing. One panel per model and parallel
layout. Measured bars are of a node in vLLM, or of one rank, times the ranks; the model's value for the node is then a grey line. The batch
is printed below each context, SnapMLA over BF16 above each group. The paper prints one ratio (up to 1.91x, at DP8/TP1) and
no tokens/s: it is drawn as a mark at 1.91 times our BF16 bar.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from matplotlib.axes import Axes
from sources import PAPER, Results, Source
from style import BADGE, GREY, VARIANTS, WIDTH, badge, context_name, footer, not_run, plt, save

COLUMNS = (
    "variant", "model", "layout", "context", "batch", "tokens_per_s", "source", "status", "reason", "gpu", "scope",
    "pool_gb", "routing",
)  # fmt: skip
ENGINES = {
    "bf16": VARIANTS["flashmla_bf16"],
    "fp8": VARIANTS["flashmla_fp8"],
    "snapmla": ("SnapMLA FP8", *VARIANTS["snapmla"][1:]),
}
"""Label, colour and marker of each cache in vLLM."""
COMMUNICATION = "what ranks send each other is left out"
SCOPES = {
    "node": "all GPUs of the layout",
    "rank": f"one rank of the layout (its share of heads and experts, all layers), times the ranks; {COMMUNICATION}",
}
"""What was measured, by the column `scope`."""
POINT = ["model", "layout", "context", "variant"]
"""What tells a bar from the others."""
ROOM = 0.8
"""Width of a group of bars; the next one is 1 away."""


def whole_pool(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose cache has all the memory that is left, as in the paper; measured ones, with tokens spread over the experts."""
    return rows[rows["pool_gb"].isna() & (rows["routing"] != "weights")]


def of_nodes(rows: pd.DataFrame) -> pd.DataFrame:
    """Without one rank's rows of a model and layout all of whose GPUs were measured."""
    measured = (rows["scope"] == "node").groupby([rows["model"], rows["layout"]]).transform("any")
    return rows[(rows["scope"] == "node") | ~measured]


def measured(results: Results) -> tuple[Source, pd.DataFrame] | None:
    """What this run measured in vLLM, else what was recorded, in the whole pool: of a layout all GPUs, else one rank; else None."""
    tables = results.timed_tables("throughput", "throughput.csv", COLUMNS)
    return next(((label, of_nodes(kept)) for label, rows in tables if len(kept := whole_pool(rows))), None)


def off(found: pd.DataFrame, rows: pd.DataFrame, point: list[str] = POINT) -> pd.Series:
    """Tokens/s of `found` over those of `rows`, less 1, at each point that both have."""
    both = rows.merge(found, on=point, suffixes=("", "_found"))
    return both["tokens_per_s_found"] / both["tokens_per_s"] - 1


def rank_off(results: Results, rows: pd.DataFrame) -> pd.Series:
    """`off` of one rank's rows, wherever they were measured on such a GPU, from all GPUs' in `rows`."""
    point = [*POINT, "gpu"]
    ranks = [table[table["scope"] == "rank"] for _, table in results.timed_tables("throughput", "throughput.csv", COLUMNS)]
    found = whole_pool(pd.concat(ranks)).drop_duplicates(point)  # this run's come first
    return off(found, rows[rows["scope"] == "node"], point)


def one_rank(rows: pd.DataFrame) -> bool:
    """Whether a measured row is of one rank, not of all GPUs of its layout."""
    return bool((rows["scope"] == "rank").any())


def draw_bars(ax: Axes, rows: pd.DataFrame, modelled: pd.DataFrame, paper_speedup: float | None) -> None:
    """A group of bars per context, SnapMLA over BF16 above it, the batches below, the model's values as lines."""
    contexts = sorted(rows["context"].unique())
    shown = [variant for variant in ENGINES if variant in set(rows["variant"])]
    values, batches, model = (
        table.pivot_table(index="context", columns="variant", values=column).reindex(contexts, columns=shown)
        for table, column in ((rows, "tokens_per_s"), (rows, "batch"), (modelled, "tokens_per_s"))
    )
    top, bar = max(values.max().max(), model.max().max() if len(modelled) else 0.0), ROOM / len(shown)
    lefts = {variant: -ROOM / 2 + i * bar for i, variant in enumerate(shown)}
    for variant, left in lefts.items():
        places = [index + left + bar / 2 for index in range(len(contexts))]
        ax.bar(places, values[variant], bar * 0.94, color=ENGINES[variant][1], alpha=0.85)
        ax.hlines(model[variant], [p - bar / 2 for p in places], [p + bar / 2 for p in places], color=GREY, lw=1.0, zorder=4)
    for index, context in enumerate(contexts):
        bf16, ours = (values.loc[context].get(variant, float("nan")) for variant in ("bf16", "snapmla"))
        if not (bf16 > 0 and ours > 0):
            continue
        marks = [*values.loc[context].dropna(), *model.loc[context].dropna()]
        if paper_speedup:
            marks.append(bf16 * paper_speedup)
            left = index + lefts["snapmla"]
            ax.hlines(marks[-1], left - bar * 0.1, left + bar * 1.06, color=BADGE["paper"], lw=1.3, zorder=4)
        ax.text(index, max(marks) + 0.02 * top, f"{ours / bf16:.2f}×", ha="center", va="bottom", fontsize=6)
    between = " | " if len(shown) < 3 else "|"
    counts = [between.join("–" if pd.isna(count) else f"{count:.0f}" for count in group) for group in batches.to_numpy()]
    ax.set_xticks(
        range(len(contexts)),
        [f"{context_name(int(context))}\n{count}" for context, count in zip(contexts, counts, strict=True)],
        fontsize=6 if len(shown) > 2 else None,
    )
    ax.set_ylim(0, top * 1.2)


def build(results: Results) -> None:
    table = results.table("throughput", "throughput.csv", COLUMNS)
    paper = sources.published("method.toml")["throughput"]
    results.label("throughput", table)  # refuses a source that there is not
    models, layouts = table["model"].unique(), table["layout"].unique()
    found = measured(results)
    fig, axes = plt.subplots(
        len(models),
        len(layouts),
        figsize=(WIDTH, 0.75 + 1.75 * len(models)),
        squeeze=False,
    )
    for row, model in enumerate(models):
        for column, layout in enumerate(layouts):
            ax, rows = axes[row, column], table[(table["model"] == model) & (table["layout"] == layout)]
            planned = sources.ran(rows[rows["source"] == "modelled"])
            done, labels, lines = planned, results.label("throughput", planned), planned[:0]
            if found and len(own := found[1][(found[1]["model"] == model) & (found[1]["layout"] == layout)]):
                done, labels, lines = own, [found[0], *labels], planned
            at_paper = layout == paper["layout"] and {"bf16", "snapmla"} <= set(done["variant"])
            ax.set_title(layout, pad=14)  # a badge of three sources is two lines
            ax.grid(visible=False, axis="x")
            if done.empty:
                not_run(ax, sources.reason(rows) if len(rows) else "not in throughput.csv")
                ax.set(xticks=[], yticks=[])
                badge(ax, Source("not run"))
            else:
                draw_bars(ax, done, lines, paper["speedup"] if at_paper else None)
                badge(ax, *labels, *([PAPER] if at_paper else []))
            if row == len(models) - 1:
                ax.set_xlabel("context; batch of each bar")
        axes[row, 0].set_ylabel(f"{model}\ntokens/s, node of 8 GPUs")
    variants = [name for name in ENGINES if name in {"bf16", "snapmla"} | set(found[1]["variant"] if found else ())]
    names, colors, _ = map(list, zip(*(ENGINES[variant] for variant in variants), strict=True))
    handles = [plt.Rectangle((0, 0), 1, 1, color=color, alpha=0.85) for color in colors]
    if found:
        handles.append(plt.Line2D([], [], color=GREY, lw=1.0))
        names.append("the model, where bars are measured")
    names.append(f"paper: {paper['speedup']}× BF16 (its best case, {paper['layout']})")
    handles += [plt.Line2D([], [], color=BADGE["paper"], lw=1.3)]
    fig.legend(handles, names, loc="outside upper center", ncols=3)
    note = ""
    if found:
        rows = found[1]
        kinds = [
            f"{how}{f' ({names})' if rows['scope'].nunique() > 1 else ''}"
            for scope, how in SCOPES.items()
            if (names := ", ".join(sorted(rows.loc[rows["scope"] == scope, "layout"].unique())))
        ]
        note = f" Measured bars: {'; '.join(kinds)}; in vLLM with dummy weights."
        if len(error := rank_off(results, rows)):
            note += f" One rank, times the ranks, is {error.min():+.0%} to {error.max():+.0%} off at {len(error)} of all GPUs' bars."
        if len(error := off(sources.ran(table[table["source"] == "modelled"]), rows)):
            note += f" The model is {error.min():+.0%} to {error.max():+.0%} off at {len(error)} of the measured bars."
    footer(
        fig,
        "Batch: sequences per data-parallel group that fit the memory. Above the bars: SnapMLA over BF16. "
        f"The paper prints no tokens/s.{note}",
    )
    save(fig, results.root, "fig1")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
