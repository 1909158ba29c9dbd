"""Kernel times beside the least times of every Hopper part (beyond the paper): Fig 6's shapes, and few sequences.

    python paper_figures/table_kernels.py --results results [--recorded results/recorded]

Reads kernel_bench/kernel_bench.csv and latency.csv (or the recorded ones) and roofline.csv; writes
tables/table_kernels.csv (tidy), .md and .tex. A least time is Eq 7's by data sheet: nothing of it was timed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from fig5 import PAPER_GPU
from kernel_plots import KEY, ROOFLINE, load
from sources import Results, Source
from style import context_name, label_of, save_table

TIMED = ("variant", "heads", "s_q", "batch", "context", "time_us", "source", "status", "reason", "gpu")
CONTEXTS = (1024, 4096, 16384, 65536, 131072)
MISSING = "–"


def microseconds(value: float) -> str:
    return MISSING if pd.isna(value) else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def shapes_of(index: pd.MultiIndex) -> pd.DataFrame:
    """The columns that name a shape, of an index over ``KEY``."""
    named = index.to_frame(index=False)
    return pd.DataFrame(
        {
            "H": named["heads"].map("{:.0f}".format),
            "s_q": named["s_q"].map("{:.0f}".format),
            "batch": named["batch"].map("{:.0f}".format),
            "context": named["context"].map(lambda context: context_name(int(context))),
        }
    )


def timed_part(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per shape, a column of µs per variant, and the ratios of ours to the peers."""
    times = rows.pivot_table(index=KEY, columns="variant", values="time_us")
    shown = shapes_of(times.index)
    order = [variant for variant in rows["variant"].unique() if variant in times]
    for variant in order:
        shown[f"{label_of(variant)}, µs"] = times[variant].map(microseconds).to_numpy()
    for peer in order:
        if "snapmla" in times and peer.startswith("flash"):
            ratio = times[peer] / times["snapmla"]
            shown[f"over {label_of(peer)}"] = ratio.map(
                lambda x: MISSING if pd.isna(x) else f"{x:.2f}"
            ).to_numpy()
    return shown


def least_part(roofline: pd.DataFrame) -> pd.DataFrame:
    """One row per shape, a column of least µs per GPU and cache format."""
    wide = roofline.pivot_table(index=KEY, columns=["gpu", "format"], values="time_us")
    shown = shapes_of(wide.index).drop(columns="batch")
    for gpu in roofline["gpu"].unique():
        for kind, name in (("snapmla", "FP8"), ("bf16", "BF16")):
            shown[f"{gpu} {name}"] = wide[gpu, kind].map(microseconds).to_numpy()
    return shown


def build(results: Results) -> None:
    data = load(results, PAPER_GPU)
    roofline = results.table("kernel_bench", "roofline.csv", ROOFLINE)
    planned = data.planned[data.planned["model"].isna() & data.planned["context"].isin(CONTEXTS)]
    shapes = planned[KEY].drop_duplicates()
    least = roofline.merge(shapes, on=KEY)
    grid = data.rows[data.rows["model"].isna() & data.rows["context"].isin(CONTEXTS)]
    few = next((table for _, table in results.timed_tables("kernel_bench", "latency.csv", TIMED)), grid[:0])
    few = few.drop_duplicates([*KEY, "variant"])
    label = data.source or Source("not run", detail=data.why())

    tidy = pd.concat([grid, few])[[*TIMED]] if len(grid) else planned.reindex(columns=[*TIMED])
    where = f"Source: {label.long}. µs a call of one layer, queries quantized and schedule made."
    shown = []
    if len(grid):
        shown.append((f"Kernel times, batch 32. {where}", timed_part(grid)))
    if len(few):
        shown.append((f"Kernel times, few sequences and short contexts. {where}", timed_part(few)))
    model = "Least µs of the same calls by data sheet (Eq 7; modelled, nothing timed), FP8 cache and BF16 cache, batch 32."
    note = "" if len(grid) else f" Kernel times: {label.long}."
    shown.append((model + note, least_part(least)))
    save_table(results.root, "table_kernels", tidy, shown)


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
