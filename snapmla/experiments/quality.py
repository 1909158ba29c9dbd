"""Held-out quality of BF16 and of Table 2's FP8 configurations on the probe model (in the place of Table 1): bytes of real
text, and answers that must be found exactly in a long context (`snapmla.probe.tasks`).

    python -m snapmla.experiments.quality contexts=[512] windows=4

Attention runs in the kernels on a Hopper GPU, in their emulation elsewhere. Writes results/quality/quality.csv.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from omegaconf import MISSING

from snapmla import reference
from snapmla.experiments import _source
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.experiments._source import SourceConfig
from snapmla.integrations import attention
from snapmla.probe import answers, quality


@dataclass
class TasksConfig:
    names: list[str] = MISSING
    contexts: list[int] = MISSING
    documents: int = MISSING
    seeds: list[int] = MISSING
    harness: bool = MISSING


@dataclass
class QualityConfig(BaseConfig):
    contexts: list[int] = MISSING
    windows: int = MISSING
    scored: int = MISSING
    variants: list[str] = MISSING
    tasks: TasksConfig = field(default_factory=TasksConfig)
    source: SourceConfig = field(default_factory=SourceConfig)


@application("quality", QualityConfig)
def main(cfg: QualityConfig, run: Run) -> None:
    origin = _source.load(cfg.source, run)
    attend = attention.attend if origin.model.device.type == "cuda" else reference.attend
    rows = []
    for context in cfg.contexts:
        scores = quality.evaluate(
            origin,
            cfg.variants,
            attend,
            context=context,
            windows=cfg.windows,
            scored=cfg.scored,
            report=run.progress,
        )
        rows += quality.rows(scores, context, cfg.seed)
    if cfg.tasks.harness:
        from snapmla.probe import harness  # wants the extra `benchmarks`

        score = partial(harness.evaluate, origin, cfg.variants)
    else:
        score = partial(answers.evaluate, origin, cfg.variants, attend)
    for task in cfg.tasks.names:
        for context in cfg.tasks.contexts:
            for seed in cfg.tasks.seeds:
                right = score(task=task, context=context, documents=cfg.tasks.documents, seed=seed)
                rows += quality.rows({task: right}, context, seed)
            found = ", ".join(f"{name} {values.mean():.3f}" for name, values in right.items())
            run.progress(f"{task}, context {context}, last seed: {found}")
    run.write_table("quality.csv", _source.measured_on(origin.model.device, rows))
    for row in rows:
        run.log({f"{row['task']}/{row['context']}/{row['variant']}": row["score"]})


if __name__ == "__main__":
    main()
