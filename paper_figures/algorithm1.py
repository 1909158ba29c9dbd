"""Algorithm 1: the schedule of its two warp groups as a timeline, beside FlashMLA's order.

    python paper_figures/algorithm1.py --results results

Drawn from the steps and their dependencies, no data: ``schedule`` starts each step when its warp group is
free and what it waits for is done. Durations are illustrative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sources
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch
from sources import DIAGRAM, Results
from style import WIDTH, badge, footer, plt, save

KINDS = {  # duration (illustrative), colour, legend
    "qk": (3.0, "#CFE3F5", "QK GEMM"),
    "softmax": (2.2, "#E7E7E7", "softmax, $P' = P \\odot S_K$, $\\sigma_P$, quantize"),
    "pv": (2.6, "#F7C9A3", "PV GEMM (own half of the columns)"),
    "rescale": (1.6, "#F3A6A6", "round P of the even block again, to the new $\\sigma_P$"),
}


@dataclass(frozen=True)
class Step:
    """One step of a warp group: ``after`` names the steps that must be done before it starts."""

    name: str
    group: int
    kind: str
    text: str
    after: tuple[str, ...] = ()


def scores(pair: int) -> list[Step]:
    """What both orders begin a pair of blocks with: each warp group's QK and softmax of its own block."""
    even, odd = 2 * pair, 2 * pair + 1
    last = (f"softmax{even - 1}",) if pair else ()  # m and σ_P run from block to block
    return [
        Step(f"qk{even}", 0, "qk", f"Q·K{even}"),
        Step(f"qk{odd}", 1, "qk", f"Q·K{odd}"),
        Step(f"softmax{even}", 0, "softmax", f"P{even}", last),
        Step(f"softmax{odd}", 1, "softmax", f"P{odd}", (f"softmax{even}",)),
    ]


def snapmla(pairs: int) -> list[Step]:
    """Algorithm 1: both warp groups apply the even block's P before the odd block's."""
    steps = []
    for pair in range(pairs):
        even, odd = 2 * pair, 2 * pair + 1
        steps += [
            *scores(pair),
            Step(f"pv{even}left", 0, "pv", f"P{even}·V{even}"),
            Step(f"pv{odd}left", 0, "pv", f"P{odd}·V{odd}", (f"softmax{odd}",)),
            Step(f"pv{even}right", 1, "pv", f"P{even}·V{even}", (f"softmax{even}",)),
            Step(f"pv{odd}right", 1, "pv", f"P{odd}·V{odd}"),
        ]
    return steps


def flashmla(pairs: int) -> list[Step]:
    """FlashMLA's order in FP8: warp group 1 applies its own P first, so P of the even block comes in an
    outdated scale.
    """
    steps = []
    for pair in range(pairs):
        even, odd = 2 * pair, 2 * pair + 1
        steps += [
            *scores(pair),
            Step(f"pv{even}left", 0, "pv", f"P{even}·V{even}"),
            Step(f"rescale{even}", 0, "rescale", f"P{even}·σ/σ", (f"softmax{odd}",)),
            Step(f"pv{odd}left", 0, "pv", f"P{odd}·V{odd}"),
            Step(f"pv{odd}right", 1, "pv", f"P{odd}·V{odd}"),
            Step(f"pv{even}right", 1, "pv", f"P{even}·V{even}", (f"rescale{even}",)),
        ]
    return steps


def schedule(steps: Sequence[Step]) -> dict[str, tuple[float, float]]:
    """Start and end of each step: in order within its warp group, after all of ``after``."""
    times: dict[str, tuple[float, float]] = {}
    free = {0: 0.0, 1: 0.0}
    for step in steps:
        start = max([free[step.group], *(times[name][1] for name in step.after)])
        times[step.name] = (start, start + KINDS[step.kind][0])
        free[step.group] = times[step.name][1]
    return times


def draw(ax: Axes, steps: Sequence[Step], width: float) -> None:
    times = schedule(steps)
    lane = {0: 1.0, 1: 0.0}
    groups = {step.name: step.group for step in steps}
    for step in steps:
        start, end = times[step.name]
        ax.add_patch(
            plt.Rectangle(
                (start, lane[step.group] - 0.3),
                end - start,
                0.6,
                fc=KINDS[step.kind][1],
                ec="#404040",
                lw=0.6,
            )
        )
        ax.text((start + end) / 2, lane[step.group], step.text, ha="center", va="center", fontsize=5.4)
        for name in step.after:
            if groups[name] != step.group:  # a barrier between the groups
                tip, tail = (start, lane[step.group]), (times[name][1], lane[groups[name]])
                sign = 0.3 if tip[1] < tail[1] else -0.3
                ax.add_patch(
                    FancyArrowPatch(
                        (tail[0], tail[1] - sign), (tip[0] + 0.12, tip[1] + sign), arrowstyle="-|>",
                        mutation_scale=5, lw=0.7, color="#B00020", shrinkA=0, shrinkB=0,
                    )
                )  # fmt: skip
    ax.set(xlim=(-0.1, width), ylim=(-0.45, 1.45), xticks=[], yticks=[1, 0])
    ax.grid(visible=False)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)


def build(results: Results) -> None:
    shape = sources.published("method.toml")["shape"]
    columns, content = shape["columns_per_group"], shape["content"]
    panels = {
        "SnapMLA, Algorithm 1: P0·V0, then P1·V1, in both halves": snapmla(2),
        "FlashMLA's order, carried over to FP8: right half P1·V1, then P0·V0": flashmla(2),
    }
    width = max(end for steps in panels.values() for _, end in schedule(steps).values()) + 0.2
    fig, axes = plt.subplots(2, 1, figsize=(WIDTH, 3.5))
    for ax, (title, steps) in zip(axes, panels.items(), strict=True):
        draw(ax, steps, width)
        ax.set_title(title)
        names = [
            f"WG0: even blocks\ncolumns 0–{columns - 1}",
            f"WG1: odd blocks\ncolumns {columns}–{content - 1}",
        ]
        ax.set_yticklabels(names, fontsize=6)
        badge(ax, DIAGRAM)
    axes[1].set_xlabel("time →  (durations illustrative, not to scale)")
    handles = [plt.Rectangle((0, 0), 1, 1, fc=color, ec="#404040", lw=0.6) for _, color, _ in KINDS.values()]
    handles += [plt.Line2D([], [], color="#B00020", lw=0.7, marker=">", ms=3)]
    names = [text for _, _, text in KINDS.values()] + ["barrier between the warp groups"]
    fig.legend(handles, names, loc="outside upper center", ncols=3)
    footer(
        fig,
        f"Blocks of {shape['key_block']} keys. In FlashMLA's order the accumulator is already in the odd "
        "block's units when the even "
        "block's P arrives: an 8-bit P would be rounded again, losing precision where the odd block's "
        "$\\sigma_P$ is much larger.",
    )
    save(fig, results.root, "algorithm1")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
