"""Fig 2: the scale-fusion pipeline of one block of keys, as a diagram.

    python paper_figures/fig2.py --results results

Drawn from the method's structure (Algorithm 1), no data; the widths come from published/method.toml.
"""

from __future__ import annotations

from collections.abc import Sequence

import sources
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from sources import DIAGRAM, Results
from style import WIDTH, badge, footer, plt, save

PRECISION = {"FP8 (e4m3)": "#F7C9A3", "BF16": "#CFE3F5", "float32": "#E7E7E7"}
FP8, BF16, FP32 = PRECISION
Point = tuple[float, float]


def box(ax: Axes, center: Point, text: str, precision: str, width: float = 1.7, height: float = 0.74) -> None:
    x, y = center
    ax.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.08",
            fc=PRECISION[precision], ec="#404040", lw=0.7,
        )
    )  # fmt: skip
    ax.text(x, y, text, ha="center", va="center", fontsize=6.5, linespacing=1.3)


def arrow(
    ax: Axes, start: Point, end: Point, text: str = "", shift: Point = (0, 0.12), bend: float = 0.0
) -> None:
    style = f"arc3,rad={bend}"
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=7, lw=0.8, color="#404040", shrinkA=0, shrinkB=0,
            connectionstyle=style,
        )
    )  # fmt: skip
    if text:
        x, y = (start[0] + end[0]) / 2 + shift[0], (start[1] + end[1]) / 2 + shift[1]
        ax.text(x, y, text, ha="center", va="center", fontsize=6)


def build(results: Results) -> None:
    shape = sources.published("method.toml")["shape"]
    content, rope, keys = shape["content"], shape["rope"], shape["key_block"]
    fig, ax = plt.subplots(figsize=(WIDTH, 3.35))
    ax.set(xlim=(0, 12.2), ylim=(0, 5.1), xticks=[], yticks=[])
    ax.axis("off")

    top, middle, low = 4.2, 2.6, 0.75
    box(ax, (1.0, top), f"$q_8$  1 × {content}", FP8)
    box(ax, (1.0, 3.3), f"$q_R / S_Q$  1 × {rope}", BF16)
    box(ax, (1.0, 1.75), f"$k_8$  {keys} × {content}", FP8)
    box(ax, (1.0, low), f"$k_R / S_K$  {keys} × {rope}", BF16)
    box(ax, (3.5, middle), "QK GEMM\none accumulator", FP32)
    box(ax, (5.9, middle), "softmax\n$P = e^{\\,s - m}$", FP32)
    box(ax, (8.1, middle), "scale fusion\n$P' = P \\odot S_K$", FP32, 1.5)
    box(ax, (10.6, middle), "quantize the block\n$P_8 = P' / \\sigma_P$", FP8)
    box(ax, (10.6, low), "PV GEMM\n$P_8 \\cdot V_8$", FP8)
    box(ax, (7.35, low), "$O \\leftarrow \\gamma\\,O + P_8 V_8$\nunits of $1/\\sigma_P$", FP32, 1.95)
    box(ax, (3.75, low), "$o = O / \\ell$\n$\\sigma_P$ cancels", FP32, 1.5)

    for start, bend in (((1.85, top), -0.18), ((1.85, 3.3), -0.05), ((1.85, 1.75), 0.05)):
        arrow(ax, start, (2.62, middle + (start[1] - middle) * 0.16), bend=bend)
    arrow(ax, (1.85, low), (2.62, middle - 0.3), bend=0.18)
    arrow(ax, (4.38, middle), (5.02, middle))
    arrow(ax, (6.78, middle), (7.32, middle))
    arrow(ax, (8.88, middle), (9.72, middle))
    arrow(ax, (10.6, middle - 0.4), (10.6, low + 0.4))
    arrow(ax, (9.72, low), (8.36, low))
    arrow(ax, (6.34, low), (4.53, low), "after the last block", (0, 0.2))

    note = {"ha": "center", "va": "center", "fontsize": 6.2, "linespacing": 1.35}
    ax.text(
        4.62, 3.42, "$\\times\\, S_Q\\, S_K \\times$ softmax_scale\none multiply per logit (Eq 6)", **note
    )
    ax.text(8.1, 3.42, "V's scales lie along\nthe reduction: fold them into P", **note)
    ax.text(
        10.75,
        3.42,
        f"$\\sigma_P = \\max P' / {shape['e4m3_max']}$\nper head row, block of {keys} keys",
        **note,
    )
    ax.text(7.35, 1.63, "$\\gamma = e^{\\,m_{old} - m}\\,\\sigma_P^{old} / \\sigma_P$\n"
            "$\\ell \\leftarrow \\gamma\\,\\ell + \\sum P / \\sigma_P$", **note)  # fmt: skip
    ax.text(11.5, 1.63, "$V_8$ = $k_8$,\ntransposed", **note)
    handles = [plt.Rectangle((0, 0), 1, 1, fc=color, ec="#404040", lw=0.7) for color in PRECISION.values()]
    ax.legend(handles, list(PRECISION), loc="upper right", bbox_to_anchor=(1.0, 0.99), ncols=3)
    ax.set_title("Scale fusion in one block of keys")
    badge(ax, DIAGRAM)
    footer(
        fig,
        "Block after block of keys; $m$, $\\sigma_P$ and $\\ell$ are kept per head row and start at −∞, 1 "
        "and 0.",
    )
    save(fig, results.root, "fig2")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
