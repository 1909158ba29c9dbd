"""Divergence of FP8 caches from a BF16 one along a long teacher-forced decode (beyond the paper).

    python paper_figures/fig_drift.py --results results

Reads drift/drift.csv; where that is of a CPU's small model, a recorded drift.csv of the large one is drawn below. Left:
mean KL divergence of the next-token distribution; right: how often the likeliest token is another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from matplotlib.axes import Axes
from sources import LARGE, Results, Source
from style import WIDTH, badge, footer, log_axis, plt, save, variant_style

COLUMNS = ("variant", "prompt", "step_from", "step_to", "kl", "top1_agreement", "n", "source", "gpu")


def draw(axes: Sequence[Axes], table: pd.DataFrame, labels: Sequence[Source], model: str) -> None:
    for variant, rows in table.groupby("variant", sort=False):
        rows = rows.sort_values("step_from")
        middle = (rows["step_from"] + rows["step_to"]) / 2
        axes[0].plot(middle, rows["kl"], ms=4, **variant_style(variant))
        axes[1].plot(middle, 100 * (1 - rows["top1_agreement"]), ms=4, **variant_style(variant))
    log_axis(axes[0])
    axes[0].set_ylabel("KL divergence, nats")
    axes[1].set_ylabel("another likeliest token, %")
    axes[1].set_ylim(bottom=0)
    for ax in axes:
        ax.set_xlim(left=0)
        ax.set_xlabel("decoded tokens")
        ax.set_title(model, pad=15)
        badge(ax, *labels)


def build(results: Results) -> None:
    own = results.table("drift", "drift.csv", COLUMNS)
    parts = [(own, results.label("drift", own), results.model("drift"))]
    if own["gpu"].isna().all():
        recorded = results.recorded_tables("drift.csv", COLUMNS)
        parts += [(table, [label], LARGE) for label, table in recorded[:1]]
    fig, axes = plt.subplots(
        len(parts), 2, figsize=(WIDTH, 2.5 * len(parts)), squeeze=False, sharey="col", layout="constrained"
    )
    for row, part in zip(axes, parts, strict=True):
        draw(row, *part)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    prompts = sorted({f"{prompt:g}" for table, *_ in parts for prompt in table["prompt"]})
    counts = ", ".join(f"{table['n'].min():.0f}" for table, *_ in parts)
    footer(
        fig,
        f"Teacher-forced behind a prompt of {', '.join(prompts)} tokens, against a BF16 cache; every step caches what the "
        f"variant's own hidden states made of the token. Means over {counts} tokens.",
    )
    save(fig, results.root, "fig_drift")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
