"""The probe's tasks in lm-evaluation-harness: what `snapmla.probe.answers` scores, by somebody else's rules.

Wants the extra `benchmarks`.
"""

from __future__ import annotations

from collections.abc import Sequence

import datasets
import numpy as np
from lm_eval import evaluator
from lm_eval.api.task import ConfigurableTask

from snapmla.integrations.lm_eval import SnapMLA
from snapmla.probe import answers
from snapmla.probe.source import Source


def local_task(source: Source, task: str, context: int, documents: int, seed: int) -> ConfigurableTask:
    """A task of the harness with the documents of `answers.examples`; its metric `acc` counts those whose every byte is
    the likeliest."""
    examples = answers.examples(source, task, context, documents, seed)
    rows = [{name: bytes(part).decode("latin-1") for name, part in example._asdict().items()} for example in examples]
    return ConfigurableTask(
        config={
            "task": f"{task}_{context}",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
            "test_split": "test",
            "output_type": "loglikelihood",
            "doc_to_text": "prompt",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    )


def evaluate(
    source: Source, variants: Sequence[str], *, task: str, context: int, documents: int, seed: int
) -> dict[str, np.ndarray]:
    """As `answers.evaluate`, each variant on its own paged cache, which is filled and read by the harness's requests."""
    found, asked = {}, local_task(source, task, context, documents, seed)
    name = asked.task_name
    for variant in variants:
        model = SnapMLA(source.model, variant)
        try:
            # Not simple_evaluate, which first reads all of the harness's own tasks.
            done = evaluator.evaluate(model, {"tasks": {name: asked}, "groups": {}, "group_map": {}}, bootstrap_iters=0)
        finally:
            model.close()
        samples = sorted(done["samples"][name], key=lambda sample: sample["doc_id"])
        found[variant] = np.array([float(sample["acc"]) for sample in samples])
    return found
