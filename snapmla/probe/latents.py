"""Latents of a long context, and how well the model predicted that context."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from snapmla.integrations import transformers as hf
from snapmla.probe import corpus
from snapmla.probe.source import Source


def query_positions(context: int, queries: int) -> Tensor:
    """int64 [queries]: evenly spread over the last quarter of ``context`` positions, the last position
    included."""
    if not 1 <= queries <= context - 3 * context // 4:
        raise ValueError(
            f"queries: expected 1 to {context - 3 * context // 4} at a context of {context}, got {queries}"
        )
    last = context - 1
    return torch.tensor([last - (queries - 1 - i) * (context // 4) // queries for i in range(queries)])


def as_tensors(found: hf.Latents, positions: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """The tensors of results/latents/latents.safetensors (ARCHITECTURE.md), and the int64 ``tokens``
    [context]."""
    tensors = {"positions": positions, "tokens": tokens}
    for part, values in (("content", found.content), ("rope", found.rope), ("query", found.query)):
        tensors.update({f"{part}.{layer}": value.contiguous() for layer, value in enumerate(values)})
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@torch.no_grad()
def heldout_by_position(source: Source, tokens: Tensor, hidden: Tensor, restart: int) -> list[dict]:
    """Held-out bits per byte by position in one long context, beside the same bytes seen in contexts of
    ``restart``.

    tokens: int64 [context]; hidden: [context, hidden_size], the long forward's final hidden states. The
    ranges double from ``restart``. Bytes without a preceding byte in their short context count in neither
    column.
    """
    losses = torch.cat(
        [
            F.cross_entropy(source.model.lm_head(states).float(), target, reduction="none")
            for states, target in zip(hidden[:-1].split(restart), tokens[1:].split(restart))
        ]
    ) / math.log(2)
    rows, start = [], 0
    while start < len(tokens):
        end = min(max(2 * start, restart), len(tokens))
        counted = torch.arange(start, end, device=tokens.device) % restart != 0
        short = [
            F.cross_entropy(
                source.model(piece[None], use_cache=False).logits[0, :-1].float(), piece[1:], reduction="sum"
            )
            for piece in tokens[start:end].split(restart)
        ]
        bits_long = losses[start - 1 : end - 1] if start else F.pad(losses[: end - 1], (1, 0))
        bytes_counted = sum(source.bytes_of(piece[1:]) for piece in tokens[start:end].split(restart))
        rows.append(
            {
                "position_from": start,
                "position_to": end,
                "bits_per_byte": (bits_long[counted].sum() / bytes_counted).item(),
                "bits_per_byte_restarted": (sum(short) / math.log(2) / bytes_counted).item(),
                "restart": restart,
                "source": "measured",
            }
        )
        start = end
    return rows


def heldout_context(source: Source, context: int) -> Tensor:
    """int64 [context]: the first ``context`` held-out tokens."""
    return corpus.window(source.tokens, 0, context)
