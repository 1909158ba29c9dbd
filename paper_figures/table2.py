"""Table 2: the quantization configurations, and the mean error over all layers that each of them gives here.

    python paper_figures/table2.py --results results

Reads published/table2.csv and fidelity/layer_error.csv; writes tables/table2.csv, .md and .tex.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from sources import PAPER, Results
from style import context_name, label_of, save_table

METRICS = {"rmse": "RMSE", "one_minus_cosine": "1 − cosine", "relative_l2": "relative L2"}
PANELS = {"teacher_forced": "teacher-forced", "accumulated": "accumulated"}


def build(results: Results) -> None:
    configs = sources.published_table("table2.csv")
    errors = results.table(
        "fidelity", "layer_error.csv", ("config", "panel", "layer", "context", *METRICS, "source")
    )
    errors = errors[errors["context"] == errors["context"].max()]
    means = errors.groupby(["config", "panel"])[list(METRICS)].mean()
    label = "; ".join(source.long for source in results.label("fidelity", errors))

    tidy = configs.assign(context=int(errors["context"].iloc[0]))
    shown = configs.assign(config=configs["config"].map(lambda config: label_of(config).split(":")[0]))
    shown.columns = ["configuration", "content (paper)", "RoPE (paper)", "decided here"]
    for panel, panel_name in PANELS.items():
        for metric, metric_name in METRICS.items():
            values = [means[metric].get((config, panel), float("nan")) for config in configs["config"]]
            tidy[f"{panel}_{metric}"] = values
            shown[f"{metric_name}, {panel_name}"] = [
                f"{value:.2e}" if pd.notna(value) else "–" for value in values
            ]
    tidy["source"] = ", ".join(sorted(errors["source"].unique()))
    context = context_name(int(errors["context"].iloc[0]))
    caption = (
        f"Table 2. Quantization configurations, all in E4M3. Source of the configurations: {PAPER.long}. "
        f"Errors: mean over layers at {context} keys, against exact attention (–: not run); source: {label}."
    )
    save_table(results.root, "table2", tidy, [(caption, shown)])


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
