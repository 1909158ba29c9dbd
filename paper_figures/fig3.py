"""Fig 3: (a) distribution of the content and RoPE parts of the latent cache, (b) their FP8 error, per layer.

    python paper_figures/fig3.py --results results

Reads distribution/ranges.csv, histogram.csv and mse.csv. The ranges that the paper reports for
LongCat-Flash-Thinking (content about +-10, RoPE about +-1000) are drawn as lines and labelled "paper".
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from matplotlib.axes import Axes
from sources import PAPER, Results
from style import BADGE, BLUE, VERMILION, WIDTH, badge, footer, log_axis, plt, save

QUANTILES = ("min", "p001", "p01", "p50", "p99", "p999", "max")
PARTS = {"content": ("content", BLUE, "o"), "rope": ("RoPE", VERMILION, "^")}
LINEAR = 0.1  # values below this magnitude are drawn on a linear scale


def symlog(ax: Axes, axis: str, largest: float, step: int) -> None:
    """Symmetric logarithmic axis with a tick at every ``step``-th power of ten up to ``largest``."""
    getattr(ax, f"set_{axis}scale")("symlog", linthresh=LINEAR, linscale=0.5)
    powers = [10.0**power for power in range(step - 1, 6, step) if 10.0**power <= largest * 1.5]
    ticks = [-power for power in powers[::-1]] + [0.0] + powers
    names = ["0" if tick == 0 else f"{'−' if tick < 0 else ''}{abs(tick):g}" for tick in ticks]
    getattr(ax, f"set_{axis}ticks")(ticks, names)
    ax.minorticks_off()


def draw_bands(ax: Axes, ranges: pd.DataFrame, paper: dict) -> None:
    """Per layer and part: range (line), 0.1 to 99.9% (thin box), 1 to 99% (thick box), median (dot)."""
    for side, (part, (_, color, marker)) in enumerate(PARTS.items()):
        rows = ranges[ranges["part"] == part].sort_values("layer")
        places = rows["layer"] + (side - 0.5) * 0.36
        ax.vlines(places, rows["min"], rows["max"], color=color, lw=0.8)
        ax.vlines(places, rows["p001"], rows["p999"], color=color, lw=2.6, alpha=0.45)
        ax.vlines(places, rows["p01"], rows["p99"], color=color, lw=5.0, alpha=0.6)
        ax.plot(
            places, rows["p50"], linestyle="none", marker=marker, color="white", markeredgecolor=color, ms=3
        )
        for sign in (-1, 1):
            ax.axhline(
                sign * paper[part], color=BADGE["paper"], lw=0.8, ls="--" if part == "content" else ":"
            )
    symlog(ax, "y", max(paper["rope"], ranges["absmax"].max()), step=1)
    ax.set_xticks(sorted(ranges["layer"].unique()))
    ax.set(xlabel="layer", ylabel="value")
    ax.grid(visible=False, axis="x")


def draw_histogram(ax: Axes, histogram: pd.DataFrame, paper: dict) -> None:
    for part, (_, color, _) in PARTS.items():
        rows = histogram[histogram["part"] == part]
        for _, layer in rows.groupby("layer"):
            ax.stairs(
                layer["density"],
                [*layer["bin_low"], layer["bin_high"].iloc[-1]],
                color=color,
                lw=0.4,
                alpha=0.35,
            )
        mean = rows.groupby("bin_low", sort=True).agg({"density": "mean", "bin_high": "first"}).reset_index()
        ax.stairs(mean["density"], [*mean["bin_low"], mean["bin_high"].iloc[-1]], color=color, lw=1.4)
        for sign in (-1, 1):
            ax.axvline(
                sign * paper[part], color=BADGE["paper"], lw=0.8, ls="--" if part == "content" else ":"
            )
    filled = histogram.loc[histogram["density"] > 0, "density"]
    largest = max(
        paper["rope"], histogram.loc[histogram["density"] > 0, ["bin_low", "bin_high"]].abs().max().max()
    )
    ax.set_ylim(filled.min() / 2, filled.max() * 3)
    log_axis(ax)
    symlog(ax, "x", largest, step=2)
    ax.set_xlim(-largest * 1.6, largest * 1.6)
    ax.set(xlabel="value", ylabel="density")


def draw_mse(ax: Axes, mse: pd.DataFrame) -> None:
    for part, (_, color, marker) in PARTS.items():
        rows = mse[mse["part"] == part].sort_values("layer")
        ax.plot(rows["layer"], rows["mse"], color=color, marker=marker)
    log_axis(ax)
    ax.set_xticks(sorted(mse["layer"].unique()))
    ax.set(xlabel="layer", ylabel="MSE of the FP8 round trip")


def build(results: Results) -> None:
    ranges = results.table("distribution", "ranges.csv", ("layer", "part", *QUANTILES, "absmax", "source"))
    histogram = results.table(
        "distribution", "histogram.csv", ("layer", "part", "bin_low", "bin_high", "density", "source")
    )
    mse = results.table("distribution", "mse.csv", ("layer", "part", "mse", "source"))
    method = sources.published("method.toml")
    paper, shape = method["range"], method["shape"]
    fig, axes = plt.subplots(1, 3, figsize=(WIDTH, 2.9), width_ratios=(1.15, 1, 0.9))
    draw_bands(axes[0], ranges, paper)
    draw_histogram(axes[1], histogram, paper)
    draw_mse(axes[2], mse)
    titles = ("(a) values per layer", "(a) histogram", "(b) FP8 error per layer")
    for ax, title, table in zip(axes, titles, (ranges, histogram, mse), strict=True):
        ax.set_title(title, pad=15)
        badge(ax, *results.label("distribution", table), *([] if ax is axes[2] else [PAPER]))
    handles = [plt.Line2D([], [], color=color, marker=marker) for _, color, marker in PARTS.values()]
    handles += [plt.Line2D([], [], color=BADGE["paper"], lw=0.8, ls=style) for style in ("--", ":")]
    names = [f"{label} ({shape[part]} wide)" for part, (label, _, _) in PARTS.items()]
    names += [
        f"paper, {paper['model']}: {label} about ±{paper[part]:g}" for part, (label, _, _) in PARTS.items()
    ]
    fig.legend(handles, names, loc="outside upper center", ncols=2)
    largest = ranges.groupby("part")["absmax"].max()
    footer(
        fig,
        f"Latents of {results.model('latents')}. Left: whole range (line), 0.1-99.9% and 1-99% of the "
        "values (bars), median (mark). Middle: layers "
        f"(thin), their mean. Largest magnitude: content {largest.get('content', float('nan')):.3g}, RoPE "
        f"{largest.get('rope', float('nan')):.3g}.",
    )
    save(fig, results.root, "fig3")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
