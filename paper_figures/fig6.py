"""Fig 6: kernel TFLOPS against sequence length at batch 32, by heads and tokens per step.

    python paper_figures/fig6.py --results results [--recorded results/recorded]

Reads kernel_bench/kernel_bench.csv (the rows of batch 32 without a model) and roofline.csv.
"""

from __future__ import annotations

from collections.abc import Sequence

import sources
from fig5 import PAPER_GPU
from kernel_plots import draw, finish, load
from sources import InputError, Results
from style import WIDTH, plt, save

BATCH = 32
HEADS = (16, 32, 64, 128)
MTP = (1, 2)


def build(results: Results) -> None:
    peak = sources.published("method.toml")["peak"]
    data = load(results, PAPER_GPU)
    planned, rows = (
        table[(table["batch"] == BATCH) & table["model"].isna()] for table in (data.planned, data.rows)
    )
    fig, axes = plt.subplots(len(MTP), len(HEADS), figsize=(WIDTH, 4.1), sharex=True)
    for row, s_q in enumerate(MTP):
        for column, heads in enumerate(HEADS):
            shapes, points = (
                table[(table["heads"] == heads) & (table["s_q"] == s_q)] for table in (planned, rows)
            )
            if shapes.empty:
                raise InputError(
                    f"kernel_bench/kernel_bench.csv must have rows of batch {BATCH}, heads {heads}, s_q "
                    f"{s_q} for Fig 6, got none."
                )
            ax = axes[row, column]
            ax.set_title(f"H = {heads}, MTP {s_q}", pad=21)
            draw(ax, data, shapes, points, peak["effective"], width=23)
            if row == len(MTP) - 1:
                ax.set_xlabel("sequence length (tokens)")
        axes[row, 0].set_ylabel("TFLOPS per GPU")
    finish(
        fig,
        data,
        peak["effective"],
        peak["bf16"],
        f"Batch {BATCH}. MTP: query tokens per sequence and step (s_q).",
    )
    save(fig, results.root, "fig6")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
