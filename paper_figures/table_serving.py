"""vLLM with SnapMLA against the Transformers integration: agreement, cache size, memory over a long decode (beyond the paper).

    python paper_figures/table_serving.py --results results [--recorded results/recorded]

Reads serving/serving.csv, or a recorded one where this run measured nothing; writes tables/table_serving.csv, .md and .tex.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import sources
from sources import NOT_RUN, Results, Source
from style import save_table

COLUMNS = (
    "backend", "speculative_tokens", "against", "agreement", "n", "prompts", "cached_tokens", "kv_tokens", "early_bytes",
    "late_bytes", "long_steps", "tokens_per_step", "engine", "source", "status", "reason", "gpu",
)  # fmt: skip
BACKENDS = {"CUSTOM": "SnapMLA", "FLASHMLA": "FlashMLA BF16", "FLASH_ATTN_MLA": "FlashAttention 3 BF16"}
AGAINST = {"snapmla": "SnapMLA", "bf16": "BF16"}


def shown(rows: pd.DataFrame) -> pd.DataFrame:
    ran = rows["status"] != NOT_RUN
    grown = (rows["late_bytes"] - rows["early_bytes"]) / 2**20
    return pd.DataFrame(
        {
            "vLLM's backend": rows["backend"].map(BACKENDS),
            "speculative tokens": rows["speculative_tokens"].map("{:.0f}".format),
            "Transformers on": rows["against"].map(AGAINST),
            "same likeliest token": rows["agreement"].map("{:.2%}".format).where(ran, "–"),
            "of tokens": rows["n"].map("{:.0f}".format).where(ran, "–"),
            "prompt tokens from the prefix cache": rows["cached_tokens"].map("{:.0f}".format).where(ran, "–"),
            "cache holds": rows["kv_tokens"].map("{:.0f}".format).where(ran, "–"),
            "tokens a step": rows["tokens_per_step"].map("{:.2f}".format).where(rows["tokens_per_step"].notna(), "–"),
            "memory grown, MiB": grown.map("{:.1f}".format).where(ran, "–"),
        }
    )


def build(results: Results) -> None:
    own = results.table("serving", "serving.csv", COLUMNS)
    tables = results.timed_tables("serving", "serving.csv", COLUMNS)
    label, rows = tables[0] if tables else (Source(NOT_RUN, detail=sources.reason(own)), own)
    grown = ""
    if tables:
        grown = f" Memory: what torch holds more at the end of {rows['long_steps'].max():.0f} decoded tokens than after a quarter of them."
        if (rows["speculative_tokens"] > 0).any():
            grown += " Speculative tokens of a probe model are drafted by a copy of its last layer, untrained."
    model = sources.LARGE if label.kind == "recorded" else results.model("serving")
    caption = (
        f"vLLM's greedy tokens on {model}, and how often the Transformers integration finds the same token likeliest behind the "
        f"same text; between two BF16 backends it is what roundings leave.{grown} "
        f"Source: {label.long}."
    )
    save_table(results.root, "table_serving", rows, [(caption, shown(rows))])


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
