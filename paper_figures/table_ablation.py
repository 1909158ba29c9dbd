"""Other ways of keeping the latents in about SnapMLA's bytes: their error beside SnapMLA's (beyond the paper).

    python paper_figures/table_ablation.py --results results

Reads ablation/ablation.csv and accumulation.csv, and the recorded ones of the large probe model where there are any; writes tables/table_ablation.csv (tidy), .md and .tex.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from sources import LARGE, InputError, Results
from style import context_name, save_table

COLUMNS = (
    "format", "label", "bytes_per_token", "products", "layer", "context", "queries", "crest", "relative_l2",
    "queries_lower", "source",
)  # fmt: skip
ACCUMULATION = ("rule", "layer", "context", "keys", "relative_l2", "relative_l2_quantized", "source")
BASE = "snapmla"
AGAINST = {"relative_l2": "all", "relative_l2_quantized": "P and additions"}


def compared(errors: pd.DataFrame) -> pd.DataFrame:
    """One row per format: mean and worst relative L2 over layers, the mean's ratio to SnapMLA's, and of how many queries
    (each counts in every layer) the error is lower."""
    groups = errors.groupby("format", sort=False)
    mean = groups["relative_l2"].mean()
    if BASE not in mean:
        raise InputError(f"ablation/ablation.csv must have rows of the format {BASE!r}, got none.")
    table = groups[["label", "bytes_per_token", "products"]].first()
    return table.assign(
        mean_relative_l2=mean,
        worst_relative_l2=groups["relative_l2"].max(),
        ratio_to_snapmla=mean / mean[BASE],
        queries_lower=groups["queries_lower"].sum(),
        queries=groups["queries"].sum(),
    ).reset_index()


def winners(table: pd.DataFrame) -> str:
    """Which rows have a lower error than SnapMLA at no more bytes, as one sentence.

    That is a mean whose ratio is printed as less than 1, and a lower error for more queries than tosses of a coin would
    come up heads: two standard deviations above half of them.
    """
    allowed = table.set_index("format").loc[BASE, "bytes_per_token"]
    lower = table["ratio_to_snapmla"].round(2) < 1
    lower &= table["queries_lower"] > table["queries"] / 2 + table["queries"] ** 0.5
    better = table[lower & (table["bytes_per_token"] <= allowed)]
    if better.empty:
        return "Nothing here has a lower error than SnapMLA at no more bytes (sign test over queries)."
    named = [
        f"{row.label} ({row.ratio_to_snapmla:.2f}x, {row.products} products, {row.queries_lower} of {row.queries} queries)"
        for row in better.sort_values("ratio_to_snapmla").itertuples()
    ]
    return f"Lower than SnapMLA at no more bytes (sign test over queries): {'; '.join(named)}."


def formats_part(table: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "format": table["label"],
            "bytes a token": table["bytes_per_token"].map("{:.0f}".format),
            "products": table["products"],
            "relative L2, mean": table["mean_relative_l2"].map("{:.2e}".format),
            "worst layer": table["worst_relative_l2"].map("{:.2e}".format),
            "over SnapMLA": table["ratio_to_snapmla"].map("{:.2f}".format),
            "queries below SnapMLA": [
                f"{lower} of {queries}" for lower, queries in zip(table["queries_lower"], table["queries"])
            ],
        }
    )


def accumulation_part(table: pd.DataFrame) -> pd.DataFrame:
    """One row per context, two columns per rule."""
    wide = table.pivot_table(index="keys", columns="rule", values=list(AGAINST))
    shown = pd.DataFrame({"keys": [context_name(int(keys)) for keys in wide.index]})
    for rule in table["rule"].unique():
        for column, name in AGAINST.items():
            shown[f"{rule}, {name}"] = wide[column, rule].map("{:.2e}".format).to_numpy()
    return shown


def of_formats(errors: pd.DataFrame, model: str, label: str) -> tuple[pd.DataFrame, tuple[str, pd.DataFrame]]:
    """The tidy table, and caption and text of what is shown."""
    table = compared(errors)
    tidy = table.assign(
        model=model, context=errors["context"].max(), source=", ".join(errors["source"].unique())
    )
    caption = (
        f"Formats of the cache, latents of {model} at {context_name(int(errors['context'].max()))} keys, "
        f"{errors['queries'].max():.0f} queries in each layer: relative L2 of the attention output against exact "
        f"attention. "
        f"{winners(table)} A token's largest content value is here {errors['crest'].mean():.1f} times its root mean "
        f"square; INT8 gains where that is small. Source: {label}."
    )
    return tidy, (caption, formats_part(table))


def of_additions(errors: pd.DataFrame, model: str, label: str) -> tuple[str, pd.DataFrame]:
    layers = ", ".join(str(layer) for layer in errors["layer"].unique())
    caption = (
        f"Ways of adding up FP8 products, layer {layers} of the latents of {model}, the last query: relative L2 of "
        f"SnapMLA's output against exact attention (all), and against exact attention over the same quantized values (P "
        f"and additions). Source: {label}."
    )
    return caption, accumulation_part(errors)


def build(results: Results) -> None:
    errors = results.table("ablation", "ablation.csv", COLUMNS)
    accumulation = results.table("ablation", "accumulation.csv", ACCUMULATION)
    label, same = (
        "; ".join(source.long for source in results.label("ablation", x)) for x in (errors, accumulation)
    )
    model = results.model("latents")
    tidy, shown = of_formats(errors, model, label)
    tables, parts = [tidy], [shown, of_additions(accumulation, model, same)]
    for source, table in results.recorded_tables("ablation.csv", COLUMNS)[:1]:
        for _, rows in table.groupby("context"):
            tidy, shown = of_formats(rows, LARGE, source.long)
            tables.append(tidy)
            parts.append(shown)
    for source, table in results.recorded_tables("ablation_accumulation.csv", ACCUMULATION)[:1]:
        longest = table[table["context"] == table["context"].max()]
        parts.append(of_additions(longest, LARGE, source.long))
    save_table(results.root, "table_ablation", pd.concat(tables, ignore_index=True), parts)


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
