"""How many answers a model finds in a long context (`snapmla.probe.tasks`), its attention in BF16 or in an FP8 configuration.

A document's cache is made once, by an ordinary prefill; each variant then decodes the answer over its own format of that
cache. An answer counts if every one of its bytes is the model's likeliest: what greedy decoding would have written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from snapmla.integrations import transformers as hf
from snapmla.probe import tasks
from snapmla.probe.quality import AttendVariant
from snapmla.probe.source import Source


def examples(source: Source, task: str, context: int, documents: int, seed: int) -> Iterator[tasks.Example]:
    """The documents of an evaluation; each depends on task, context, seed and its number only.

    context: tokens before the answer.
    """
    text = source.tokens.numpy().astype(np.uint8)
    for i in range(documents):
        rng = np.random.default_rng([seed, i, context, *task.encode()])
        start = rng.integers(len(text) - context)
        yield tasks.TASKS[task].example(rng, context, text[start : start + context])


def evaluate(
    source: Source,
    variants: Sequence[str],
    attend: AttendVariant,
    *,
    task: str,
    context: int,
    documents: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """Which answers are right, float64 [documents] of 0 and 1 by variant, of `examples`."""
    device = source.model.device
    right = {variant: np.zeros(documents) for variant in variants}
    for i, (prompt, answer) in enumerate(examples(source, task, context, documents, seed)):
        tokens = torch.from_numpy(np.concatenate([prompt, answer])).long().to(device)
        cached = hf.latents(source.model, tokens[: context - 1])
        for variant in variants:
            decoded = hf.absorbed_forward(
                source.model, tokens[context - 1 : -1], cached, lambda _, *rest, variant=variant: attend(variant, *rest)
            )
            right[variant][i] = torch.equal(decoded.logits.argmax(-1), tokens[context:])
    return right
