"""Teacher-forced next-token quality of a model whose attention runs in BF16 or in one of the FP8
configurations.

For each held-out window, an ordinary prefill makes the cache of all but the last ``scored`` tokens; these
then run through the whole model at once, each variant's attention in every layer, and predict the token after
each of them. So the errors of all layers accumulate, as they do in serving. It is the place of the paper's
Table 1, which needs models of 560B and more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from snapmla.integrations import transformers as hf
from snapmla.probe import corpus
from snapmla.probe.source import Source

BASELINE = "bf16"
TASKS = ("bits_per_byte", "next_byte_agreement", "next_byte_accuracy")

AttendVariant = Callable[[str, Tensor, Tensor, Tensor, float], Tensor]
"""``snapmla.reference.attend``: (variant, q, content, rope, softmax_scale) -> [n, heads, 512]."""


def evaluate(
    source: Source,
    variants: Sequence[str],
    attend: AttendVariant,
    *,
    context: int,
    windows: int,
    scored: int,
    report: Callable[[str], None] = lambda message: None,
) -> dict[str, dict[str, np.ndarray]]:
    """Scores by task and variant, float64 [windows] each: task -> variant -> a value per window.

    context: tokens that the last scored position sees, itself included. ``variants`` must contain "bf16", to
    which the agreement refers. Raises ValueError if it does not, or if ``scored`` is not within 1 … context.
    """
    if BASELINE not in variants:
        raise ValueError(f"variants: expected {BASELINE} among them, got {list(variants)}")
    if not 1 <= scored <= context:
        raise ValueError(f"scored: expected 1 to {context} at a context of {context}, got {scored}")
    scores = {task: {variant: np.zeros(windows) for variant in variants} for task in TASKS}
    for w, tokens in enumerate(corpus.spread(source.tokens, windows, context + 1).to(source.model.device)):
        prefix, inputs, targets = tokens[: context - scored], tokens[context - scored : -1], tokens[-scored:]
        # Every variant caches the same latents of the prefix, in its own format.
        cached = hf.latents(source.model, tokens[:-1]).first(len(prefix))
        predictions = {}
        for variant in variants:
            logits = hf.absorbed_forward(
                source.model, inputs, cached, lambda layer, *rest, variant=variant: attend(variant, *rest)
            ).logits.float()
            predictions[variant] = logits.argmax(-1)
            bits = F.cross_entropy(logits, targets, reduction="sum").item() / math.log(2)
            scores["bits_per_byte"][variant][w] = bits / source.bytes_of(targets)
            scores["next_byte_accuracy"][variant][w] = (predictions[variant] == targets).float().mean().item()
        for variant in variants:
            agreement = (predictions[variant] == predictions[BASELINE]).float().mean().item()
            scores["next_byte_agreement"][variant][w] = agreement
        report(f"context {context}: window {w + 1} of {windows}")
    return scores


def rows(scores: dict[str, dict[str, np.ndarray]], context: int, seed: int) -> list[dict]:
    """Rows of quality.csv. ci95 is the half width of the 95% interval over windows: of the paired difference
    to BF16, and for BF16 of the score itself; empty with fewer than two windows. n: windows."""
    return [
        {
            "task": task,
            "context": context,
            "variant": variant,
            "seed": seed,
            "score": values.mean(),
            "ci95": half_width(values if variant == BASELINE else values - by_variant[BASELINE]),
            "n": len(values),
            "source": "measured",
        }
        for task, by_variant in scores.items()
        for variant, values in by_variant.items()
    ]


def half_width(values: np.ndarray) -> float | None:
    """Half width of the two-sided 95% Student interval of the mean; None with fewer than two values."""
    if len(values) < 2:
        return None
    return float(_student_quantile(len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))


def _student_quantile(freedom: int) -> float:
    """97.5% quantile of Student's t by its expansion in the normal one (Abramowitz & Stegun 26.7.5): 0.7% low
    at 3 degrees of freedom, 0.1% at 5."""
    z = NormalDist().inv_cdf(0.975)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
