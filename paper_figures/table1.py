"""Table 1: quality of FP8 against BF16: the paper's values, and beside them the probe model's.

    python paper_figures/table1.py --results results

Reads published/table1.csv, quality/quality.csv and, where somebody has measured them, benchmarks/benchmarks.csv;
writes tables/table1.csv (tidy), .md and .tex. The paper's benchmarks need the full models; ours are held-out bytes of
the small probe model, so the two parts are not comparable with each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from sources import LARGE, NOT_RUN, PAPER, Results, Source
from style import label_of, save_table

COLUMNS = ("task", "context", "variant", "seed", "score", "ci95", "n", "source")
BENCHMARK_COLUMNS = (
    "model", "benchmark", "metric", "variant", "seed", "score", "stderr", "n", "harness", "source", "status", "reason",
)  # fmt: skip
INTERVALS = (
    "k: seeds, n: windows or questions of each. ±: half width of the 95% interval of the mean, of the score for BF16 and of "
    "the paired difference to BF16 for the others"
)
TASKS = {
    "bits_per_byte": "bits per byte (lower is better)",
    "next_byte_accuracy": "next-byte accuracy",
    "next_byte_agreement": "next-byte agreement with BF16",
    "recall": "recall: the value of a key",
    "last": "last: the latest value of a key",
    "needles": "needles: a key strewn in text",
    "copy": "copy: the rest of a string",
    "addition": "addition of two numbers",
}


def paper_part(table: pd.DataFrame) -> pd.DataFrame:
    shown = table[["benchmark", "metric"]].drop_duplicates().reset_index(drop=True)
    for model, rows in table.groupby("model", sort=False):
        for column, name in (("bf16", "BF16"), ("fp8", "FP8"), ("difference", "Δ")):
            text = rows[column].map("{:+.2f}".format if column == "difference" else "{:.2f}".format)
            shown[f"{model} {name}"] = text.to_numpy()
    return shown.assign(source=PAPER.kind)


def mean_and_half(scores: pd.DataFrame) -> tuple[float, float]:
    """Mean over seeds and half width of its 95% interval: seeds are independent, and each has its own. NaN without any."""
    return scores["score"].mean(), scores["ci95"].pow(2).sum(min_count=1) ** 0.5 / len(scores)


def worse(quality: pd.DataFrame) -> str:
    """Which variants are worse than BF16 by more than the paired interval, and on what, as one sentence. The agreement, of
    which BF16 has all by definition, does not count."""
    found: dict[str, list[str]] = {}
    for (task, context), group in quality[quality["task"] != "next_byte_agreement"].groupby(["task", "context"], sort=False):
        means = {str(variant): mean_and_half(scores) for variant, scores in group.groupby("variant", sort=False)}
        base = means.pop("bf16")[0]
        for variant, (mean, half) in means.items():
            loss = mean - base if task == "bits_per_byte" else base - mean
            if loss > (half if half > 0 else 0.0):
                found.setdefault(variant, []).append(f"{task} ({context:.0f})")
    if not found:
        return "No variant is worse than BF16 by more than the interval."
    named = [f"{label_of(variant).split(':')[0]} on {', '.join(where)}" for variant, where in found.items()]
    return f"Worse than BF16 by more than the interval: {'; '.join(named)}."


def our_part(quality: pd.DataFrame) -> pd.DataFrame:
    """One row per task and context; the mean over seeds ± half width of its 95% interval."""
    rows = []
    for (task, context), group in quality.groupby(["task", "context"], sort=False):
        row = {"task": TASKS.get(task, task), "context": f"{context:.0f}"}
        for variant, scores in group.groupby("variant", sort=False):
            mean, half = mean_and_half(scores)
            row[label_of(str(variant)).split(":")[0]] = f"{mean:.4f}" + (f" ± {half:.4f}" if half > 0 else "")
        row |= {"k": f"{group['seed'].nunique()}", "n": f"{group['n'].max():.0f}"}
        rows.append(row | {"source": ", ".join(group["source"].unique())})
    return pd.DataFrame(rows).fillna("–")


def mean_of_runs(runs: pd.DataFrame) -> str:
    """Mean@k of k runs ± its standard error: from run to run, or of a single run over its questions."""
    if runs.empty:
        return "–"
    several = len(runs) > 1
    error = runs["score"].sem() if several else runs["stderr"].iloc[0]
    text = f"{runs['score'].mean():.2f}" + (f" ± {error:.2f}" if error > 0 else "")
    return text + (f" ({len(runs)} runs)" if several else "")


def benchmarks_part(table: pd.DataFrame) -> pd.DataFrame:
    """One row per model and benchmark of the paper, measured or with the reason why not."""
    rows = []
    for (model, benchmark), group in table.groupby(["model", "benchmark"], sort=False):
        done = sources.ran(group)
        row = {"model": model, "benchmark": benchmark}
        for variant in ("bf16", "snapmla"):
            row[label_of(variant)] = mean_of_runs(done[done["variant"] == variant])
        source = f"{NOT_RUN}: {sources.reason(group)}" if done.empty else ", ".join(done["source"].unique())
        rows.append(row | {"source": source})
    return pd.DataFrame(rows)


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
    parts = [wide, ours]
    served = []
    if (results.root / "benchmarks" / "benchmarks.csv").is_file():
        table = results.table("benchmarks", "benchmarks.csv", BENCHMARK_COLUMNS)
        done = sources.ran(table)
        harness = f"lm-evaluation-harness {', '.join(done['harness'].astype(str).unique())}"
        source = Source(NOT_RUN) if done.empty else Source("measured", "a served model", harness)
        served_caption = (
            "Table 1, the paper's benchmarks on a served model, in percent. The prompts are the harness's, so compare "
            f"the caches with each other. Source: {source.long}. ±: standard error, over the runs where there are "
            "several, else over the questions."
        )
        served = [(served_caption, benchmarks_part(table))]
        parts.append(done)
    ours_caption = (
        f"Table 1, this project. Held-out bytes, model: {model} (its scores are no benchmark of the "
        "paper's). "
        f"Source: {label}. {INTERVALS}. {worse(quality)}"
    )
    paper_caption = f"Table 1. Quality, BF16 against FP8. Source: {PAPER.long}."
    shown = [(paper_caption, paper_part(published)), *served, (ours_caption, our_part(quality))]
    for source, table in results.recorded_tables("quality.csv", COLUMNS):
        caption = (
            f"Table 1b. The same of {LARGE} (conf/size/large.yaml), attention in the kernels. Source: {source.long}. "
            f"{INTERVALS}. {worse(table)}"
        )
        shown.append((caption, our_part(table)))
        parts.append(table.rename(columns={"task": "benchmark"}).assign(model=LARGE))
    tidy = pd.concat(parts)[
        ["model", "benchmark", "metric", "context", "variant", "seed", "score", "ci95", "n", "source"]
    ]
    tidy = tidy.astype({"context": "Int64", "seed": "Int64", "n": "Int64"})
    save_table(results.root, "table1", tidy, shown)


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
