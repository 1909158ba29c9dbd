"""Fig 7: granularities of quantization: which values of a [tokens, channels] cache share a scale.

    python paper_figures/fig7.py --results results

A diagram, drawn from structure, no data. The paper draws per token, per channel and per block; per tensor is
added because two rows of Table 2 use it. The hatched row is a token that decoding has just appended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import sources
from matplotlib.axes import Axes
from sources import DIAGRAM, Results
from style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, WIDTH, YELLOW, badge, footer, plt, save

TOKENS, CHANNELS, BLOCK = 7, 8, 4  # cells drawn; the last token is the new one
CYCLE = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, "#7A7A7A")

Group = Callable[[int, int], int]
GRANULARITIES: dict[str, tuple[Group, str, str]] = {  # title: group of a cell, scales, what a new token does
    "per tensor": (lambda token, channel: 0, "1 scale", "a new token may change\nthe scale of everything"),
    "per channel": (
        lambda token, channel: channel,
        "1 scale per channel",
        "a new token may change\nevery scale",
    ),
    "per block": (
        lambda token, channel: token // BLOCK * (CHANNELS // BLOCK) + channel // BLOCK,
        "1 scale per block",
        "a new token waits for, or\nrescales, its open block",
    ),
    "per token (SnapMLA)": (
        lambda token, channel: token,
        "1 scale per token",
        "a new token is quantized\nat once, never again",
    ),
}


def draw(ax: Axes, group: Group) -> None:
    for token in range(TOKENS):
        for channel in range(CHANNELS):
            new = token == TOKENS - 1
            ax.add_patch(
                plt.Rectangle(
                    (channel, TOKENS - 1 - token), 0.92, 0.92, alpha=0.75,
                    fc=CYCLE[group(token, channel) % len(CYCLE)],
                    ec="#202020" if new else "white", lw=0.5, hatch="////" if new else None,
                )
            )  # fmt: skip
    ax.set(xlim=(-0.2, CHANNELS + 0.1), ylim=(-0.2, TOKENS + 0.1), xticks=[], yticks=[], aspect="equal")
    ax.spines[:].set_visible(False)
    ax.grid(visible=False)


def build(results: Results) -> None:
    shape = sources.published("method.toml")["shape"]
    configs = sources.published_table("table2.csv")
    fig, axes = plt.subplots(1, len(GRANULARITIES), figsize=(WIDTH, 2.75))
    for ax, (title, (group, scales, growth)) in zip(axes, GRANULARITIES.items(), strict=True):
        draw(ax, group)
        granularity = title.split(" (")[0]
        users = configs.loc[configs["content"].str.startswith(granularity), "config"]
        names = ", ".join(
            "SnapMLA" if name == "snapmla" else name.removeprefix("config_").upper() for name in users
        )
        ax.set_title(title, pad=15)
        ax.set_xlabel(f"{scales}\n{growth}\nTable 2: {names or '–'}", linespacing=1.4)
        badge(ax, DIAGRAM)
    axes[0].set_ylabel("← tokens")
    footer(
        fig,
        f"Rows are tokens (the hatched one is new), columns stand for the {shape['content']} content "
        "channels; cells of one colour "
        "share a scale.",
    )
    save(fig, results.root, "fig7")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
