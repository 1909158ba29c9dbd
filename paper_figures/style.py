"""One look for all figures: a fixed colour and marker per variant, source badges, byte-stable files.

Colours are those of Okabe and Ito (distinguishable with any common colour vision); each variant also has its
own marker, so that nothing is told by colour alone. ``save`` refuses a figure with a panel that does not say
where its data comes from.
"""

from __future__ import annotations

import logging
import math
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pages
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from sources import Source

WIDTH = 7.0
"""Inches: the text width of a two-column page. A figure printed in one column is scaled to half."""

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#6E6E6E"

VARIANTS: dict[str, tuple[str, str, str]] = {  # name in result files: label, colour, marker
    "bf16": ("BF16", BLACK, "x"),
    "snapmla": ("SnapMLA", BLUE, "o"),
    "config_a": ("A: per token, RoPE too", VERMILION, "^"),
    "config_b": ("B: per tensor, static", ORANGE, "s"),
    "config_c": ("C: per tensor, dynamic", GREEN, "D"),
    "config_d": ("D: per block", PURPLE, "v"),
    "flashmla_bf16": ("FlashMLA BF16", BLACK, "x"),
    "flashmla_fp8": ("FlashMLA FP8 (per tensor)", SKY, "P"),
    "flashinfer_bf16": ("FlashInfer BF16", PURPLE, "v"),
    "flashinfer_fp8kv": ("FlashInfer, FP8 cache", GREEN, "D"),
    "torch_sdpa": ("torch SDPA (floor)", GREY, "."),
}
BADGE = {  # kind of source: text colour
    "measured": GREEN, "recorded": BLUE, "modelled": GREY, "paper": "#A34700", "diagram": GREY,
    "not run": "#B00020",
}  # fmt: skip

logging.getLogger("fontTools").setLevel(logging.ERROR)  # notes on the fonts' own dates
plt.rcParams.update(
    {
        "font.family": "DejaVu Sans",  # ships with matplotlib: the same glyphs on every machine
        "font.size": 7,
        "axes.titlesize": 7.5,
        "axes.titlelocation": "left",
        "axes.labelsize": 7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.6,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#E3E3E3",
        "grid.linewidth": 0.5,
        "xtick.labelsize": 6.5,
        "ytick.labelsize": 6.5,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "legend.fontsize": 6.5,
        "legend.frameon": False,
        "lines.linewidth": 1.2,
        "lines.markersize": 3.2,
        "figure.dpi": 220,
        "figure.constrained_layout.use": True,
        "pdf.fonttype": 42,  # TrueType: embedded, searchable, accepted by publishers
        "svg.fonttype": "path",
        "svg.hashsalt": "snapmla",
        "path.simplify": False,
    }
)
_METADATA: dict[str, dict[str, None]] = {  # no dates and no versions in the files
    "png": {"Software": None},  # first: the vector formats set the figure's resolution to their own
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}
_CANVAS = {"png": FigureCanvasAgg, "pdf": FigureCanvasPdf, "svg": FigureCanvasSVG}
_SOURCES = "_snapmla_sources"
_INSET = "_snapmla_inset"


def variant_style(variant: str) -> dict[str, object]:
    """Line properties of ``variant``; a name that is not in ``VARIANTS`` gets its own name and grey."""
    label, color, marker = VARIANTS.get(variant, (variant, GREY, "."))
    return {"label": label, "color": color, "marker": marker}


def label_of(variant: str) -> str:
    return VARIANTS.get(variant, (variant, "", ""))[0]


def badge(ax: Axes, *sources: Source, width: int = 200) -> None:
    """Write above the right end of ``ax`` where its data comes from, in lines of ``width`` characters; ``footer`` gives
    the details."""
    shorts = list(dict.fromkeys(source.short for source in sources))
    count = sum(1 for other in ax.figure.axes if getattr(other, _SOURCES, None))
    ax.annotate(
        textwrap.fill(" + ".join(shorts), width), (1.0, 1.0), (0, 3), xycoords="axes fraction", textcoords="offset points",
        ha="right", va="bottom", fontsize=5.5,
        color=BADGE[sources[0].kind], gid=f"source-{count}-{sources[0].kind.replace(' ', '-')}",
        bbox={"boxstyle": "round,pad=0.25", "fc": "white", "ec": BADGE[sources[0].kind], "lw": 0.5},
    )  # fmt: skip
    setattr(ax, _SOURCES, tuple(sources))


def mark_inset(ax: Axes) -> Axes:
    """Declare ``ax`` a magnified part of another panel, which already carries the badge."""
    setattr(ax, _INSET, True)
    return ax


def not_run(ax: Axes, why: str, y: float = 0.5, width: int = 30) -> None:
    """Say inside ``ax``, at the height ``y`` (axes fraction), that a measurement is missing, and why."""
    ax.text(
        0.5, y, textwrap.fill(f"NOT RUN: {why}", width), transform=ax.transAxes, ha="center", va="center",
        fontsize=5.5, color=BADGE["not run"], zorder=5,
        bbox={"boxstyle": "round,pad=0.3", "fc": "white", "ec": BADGE["not run"], "lw": 0.5},
    )  # fmt: skip


def footer(fig: Figure, note: str = "") -> None:
    """The last line of the figure: each source in full, once, and a note."""
    sources = [source for ax in fig.axes for source in getattr(ax, _SOURCES, ())]
    parts = list(dict.fromkeys(source.long for source in sources))
    characters = int(fig.get_figwidth() * 24)
    lines = textwrap.wrap("Sources: " + "; ".join(parts) + ".", characters) + textwrap.wrap(note, characters)
    fig.supxlabel("\n".join(lines), x=0.008, ha="left", fontsize=5.5, color="#404040", linespacing=1.35)


def context_ticks(ax: Axes, contexts: Iterable[int]) -> None:
    """Logarithmic x axis over context lengths, with ticks such as 16k at them, a sixth of the axis or more apart."""
    values = sorted({int(context) for context in contexts}, reverse=True)
    apart = (values[0] / values[-1]) ** (1 / 6)
    ticks = values[:1]
    for value in values[1:]:
        if ticks[-1] >= apart * value:
            ticks.append(value)
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [context_name(value) for value in ticks])
    ax.minorticks_off()


def log_axis(ax: Axes, axis: str = "y", span: tuple[float, float] | None = None) -> None:
    """Logarithmic scale with ticks at powers of ten within ``span`` (default: what is shown), or at 1, 2 and
    5 times powers of ten where that is less than two decades.

    Labels are plain text and minor ticks are left out: both take most of a figure's drawing time otherwise.
    """
    getattr(ax, f"set_{axis}scale")("log")
    low, high = span or getattr(ax, f"get_{axis}lim")()
    steps = (1.0,) if high > 60 * low else (1.0, 2.0, 5.0)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**power for power in powers[:: -(-len(powers) // 9)] for step in steps]
    ticks = [tick for tick in ticks if low <= tick <= high]
    getattr(ax, f"set_{axis}ticks")(ticks, [power_name(tick) for tick in ticks])
    getattr(ax, f"{axis}axis").set_minor_locator(NullLocator())


def power_name(value: float) -> str:
    """1e-3 as "10⁻³", 2e-3 as "2·10⁻³"; numbers from 0.1 to 100 as they are."""
    if 0.09 < value < 101:
        return f"{value:g}"
    digits, power = f"{value:.0e}".split("e")
    exponent = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{exponent}" if digits == "1" else f"{digits}·10{exponent}"


def context_name(context: int) -> str:
    return f"{context // 1024}k" if context >= 1024 and context % 1024 == 0 else str(context)


def save(fig: Figure, root: Path, name: str) -> list[Path]:
    """Write ``root/figures/name`` as .pdf, .svg and .png: all three or none, the same bytes each time.

    Raises ``ValueError`` if a panel has no source badge. Closes ``fig``.
    """
    for number, ax in enumerate(fig.axes):
        if not (getattr(ax, _SOURCES, None) or getattr(ax, _INSET, False)):
            raise ValueError(
                f"Every panel of {name} must have a source badge, got none on panel {number} "
                f"({ax.get_title()!r})."
            )
    folder = root / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    pairs = []
    fig.get_layout_engine().execute(fig)  # once for the three files
    fig.set_layout_engine("none")
    try:
        for suffix, metadata in _METADATA.items():
            target = folder / f"{name}.{suffix}"
            temporary = folder / f".{name}.{os.getpid()}.{suffix}"
            pairs.append((temporary, target))
            # Not savefig: it draws everything twice.
            getattr(_CANVAS[suffix](fig), f"print_{suffix}")(temporary, metadata=metadata)
        for temporary, target in pairs:
            os.replace(temporary, target)
    finally:
        for temporary, _ in pairs:
            temporary.unlink(missing_ok=True)
        plt.close(fig)
    return [target for _, target in pairs]


def write_text(path: Path, text: str) -> Path:
    """Write ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def markdown(table: pd.DataFrame) -> str:
    return table.to_markdown(index=False, disable_numparse=True, colalign=_alignment(table))


def html(table: pd.DataFrame) -> str:
    return pages.table(list(table), [[pages.text(cell) for cell in row] for row in table.to_numpy()], _alignment(table))


def _alignment(table: pd.DataFrame) -> list[str]:
    """Numbers to the right, text to the left. Every cell is text already; "–" stands for not run."""
    return ["right" if table[name].str.fullmatch(r"[-+]?\d.*|–").all() else "left" for name in table]


def latex(table: pd.DataFrame, caption: str, label: str) -> str:
    """A booktabs table for any LaTeX engine. Every cell must already be text."""
    text = table.to_latex(
        index=False,
        escape=True,
        column_format="".join(side[0] for side in _alignment(table)),
        caption=re.sub(r"([&%$#_{}])", r"\\\1", caption),
        label=label,
        position="t",
    )
    for character, command in {"±": r"$\pm$", "Δ": r"$\Delta$", "−": "$-$", "–": "--"}.items():
        text = text.replace(character, command)
    return text


def save_table(
    root: Path, name: str, tidy: pd.DataFrame, shown: Sequence[tuple[str, pd.DataFrame]]
) -> list[Path]:
    """Write ``root/tables/name`` as .csv (``tidy``), .md, .html and .tex (``shown``: captions, tables of text)."""
    folder = root / "tables"
    page = pages.fragment(*(f"<p>{pages.text(caption)}</p>\n{html(table)}" for caption, table in shown))
    md = "\n\n".join(f"{caption}\n\n{markdown(table)}" for caption, table in shown)
    tex = "\n".join(
        latex(table, caption, f"tab:{name}-{number}") for number, (caption, table) in enumerate(shown, 1)
    )
    return [
        write_text(folder / f"{name}.csv", tidy.to_csv(index=False, lineterminator="\n")),
        write_text(folder / f"{name}.md", md + "\n"),
        write_text(folder / f"{name}.html", page),
        write_text(folder / f"{name}.tex", "% Needs \\usepackage{booktabs}.\n" + tex),
    ]
