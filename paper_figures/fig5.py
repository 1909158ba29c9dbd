"""Fig 5: kernel TFLOPS against sequence length for the workloads of each model and parallel layout.

    python paper_figures/fig5.py --results results [--recorded results/recorded]

Reads kernel_bench/kernel_bench.csv (the rows with a model and a layout) and roofline.csv.
"""

from __future__ import annotations

from collections.abc import Sequence

import sources
from kernel_plots import draw, finish, load
from sources import InputError, Results, Source
from style import WIDTH, badge, not_run, plt, save

PAPER_GPU = "H20"  # by inference: its BF16 peak is the 148 TFLOPS that the paper quotes


def build(results: Results) -> None:
    peak = sources.published("method.toml")["peak"]
    data = load(results, PAPER_GPU)
    shapes = data.planned[data.planned["model"].notna() & data.planned["layout"].notna()]
    if shapes.empty:
        raise InputError(
            "kernel_bench/kernel_bench.csv must have rows with a model and a layout for Fig 5, got none."
        )
    models, layouts = shapes["model"].unique(), shapes["layout"].unique()
    fig, axes = plt.subplots(
        len(models),
        len(layouts),
        figsize=(WIDTH, 0.9 + 1.75 * len(models)),
        squeeze=False,
    )
    for row, model in enumerate(models):
        for column, layout in enumerate(layouts):
            ax = axes[row, column]
            panel = shapes[(shapes["model"] == model) & (shapes["layout"] == layout)]
            rows = data.rows[(data.rows["model"] == model) & (data.rows["layout"] == layout)]
            if panel.empty:
                ax.set_title(layout, pad=15)
                not_run(ax, "no shape of this layout in kernel_bench.csv")
                badge(ax, Source("not run"))
                continue
            ax.set_title(f"{layout}, H = {panel['heads'].iloc[0]:.0f}", pad=15)
            draw(ax, data, panel, rows, peak["effective"], width=45)
            if row == len(models) - 1:
                ax.set_xlabel("sequence length (tokens)")
        axes[row, 0].set_ylabel(f"{model}\nTFLOPS per GPU")
    finish(
        fig,
        data,
        peak["effective"],
        peak["bf16"],
        "H: heads per GPU. Batch: what fits the memory at each length (kernel_bench.csv).",
    )
    save(fig, results.root, "fig5")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
