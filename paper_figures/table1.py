"""Table 1: quality of FP8 against BF16: the paper's values, and beside them the probe model's.

    python paper_figures/table1.py --results results

Reads published/table1.csv and quality/quality.csv; writes tables/table1.csv (tidy), .md and .tex. The paper's
benchmarks need the full models; ours are held-out bytes of the small probe model, so the two parts are not
comparable with each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from sources import PAPER, Results
from style import label_of, save_table

COLUMNS = ("task", "context", "variant", "seed", "score", "ci95", "n", "source")
TASKS = {
    "bits_per_byte": "bits per byte (lower is better)",
    "next_byte_accuracy": "next-byte accuracy",
    "next_byte_agreement": "next-byte agreement with BF16",
}


def paper_part(table: pd.DataFrame) -> pd.DataFrame:
    shown = table[["benchmark", "metric"]].drop_duplicates().reset_index(drop=True)
    for model, rows in table.groupby("model", sort=False):
        for column, name in (("bf16", "BF16"), ("fp8", "FP8"), ("difference", "Δ")):
            text = rows[column].map("{:+.2f}".format if column == "difference" else "{:.2f}".format)
            shown[f"{model} {name}"] = text.to_numpy()
    return shown.assign(source=PAPER.kind)


def our_part(quality: pd.DataFrame) -> pd.DataFrame:
    """One row per task and context; score ± half width of the 95% interval."""
    rows = []
    for (task, context), group in quality.groupby(["task", "context"], sort=False):
        row = {"task": TASKS.get(task, task), "context": f"{context:.0f}"}
        for variant, scores in group.groupby("variant", sort=False):
            half = scores["ci95"].mean()
            row[label_of(str(variant)).split(":")[0]] = f"{scores['score'].mean():.4f}" + (
                f" ± {half:.4f}" if half > 0 else ""
            )
        rows.append(row | {"source": ", ".join(group["source"].unique())})
    return pd.DataFrame(rows).fillna("–")


def build(results: Results) -> None:
    published = sources.published_table("table1.csv")
    published["difference"] = (published["fp8"] - published["bf16"]).round(2)
    quality = results.table("quality", "quality.csv", COLUMNS)
    label = "; ".join(source.long for source in results.label("quality", quality))

    wide = published.melt(
        ["benchmark", "metric", "model"], ["bf16", "fp8"], var_name="variant", value_name="score"
    )
    wide["source"] = PAPER.kind
    model = results.model("quality")
    ours = quality.rename(columns={"task": "benchmark"}).assign(model=model)
    tidy = pd.concat([wide, ours])[
        ["model", "benchmark", "metric", "context", "variant", "seed", "score", "ci95", "n", "source"]
    ]
    tidy = tidy.astype({"context": "Int64", "seed": "Int64", "n": "Int64"})
    ours_caption = (
        f"Table 1, this project. Held-out bytes, model: {model} (its scores are no benchmark of the "
        "paper's). "
        f"Source: {label}. ±: half width of the 95% interval, of the score for BF16 and of the paired "
        "difference to BF16 for the others."
    )
    paper_caption = f"Table 1. Quality, BF16 against FP8. Source: {PAPER.long}."
    shown = [(paper_caption, paper_part(published)), (ours_caption, our_part(quality))]
    save_table(results.root, "table1", tidy, shown)


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
