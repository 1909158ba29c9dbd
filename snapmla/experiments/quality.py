"""Held-out quality of BF16 and of Table 2's FP8 configurations on the probe model (in the place of Table 1).

    python -m snapmla.experiments.quality contexts=[512] windows=4

Writes results/quality/quality.csv.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from snapmla import reference
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.experiments.latents import SourceConfig
from snapmla.probe import quality, source


@dataclass
class QualityConfig(BaseConfig):
    contexts: list[int] = MISSING
    windows: int = MISSING
    scored: int = MISSING
    variants: list[str] = MISSING
    source: SourceConfig = field(default_factory=SourceConfig)


@application("quality", QualityConfig)
def main(cfg: QualityConfig, run: Run) -> None:
    origin = source.load(cfg.source.path or run.input("probe", "model"), probe=cfg.source.path is None)
    rows = []
    for context in cfg.contexts:
        scores = quality.evaluate(
            origin,
            cfg.variants,
            reference.attend,
            context=context,
            windows=cfg.windows,
            scored=cfg.scored,
            report=run.progress,
        )
        rows += quality.rows(scores, context, cfg.seed)
    run.write_table("quality.csv", rows)
    for row in rows:
        run.log({f"{row['task']}/{row['context']}/{row['variant']}": row["score"]})


if __name__ == "__main__":
    main()
