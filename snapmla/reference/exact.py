"""Exact attention: float64, nothing quantized. What every error in this project is measured against."""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla.layout import KV_LORA_RANK


def visible_keys(s_q: int, keys: int, causal: bool, device: torch.device | None = None) -> Tensor:
    """How many leading keys each query sees, int64 [s_q].

    The causal mask is aligned bottom-right: the last query sees every key, query i the first keys - s_q + 1 +
    i (at least 0).
    """
    if not causal:
        return torch.full((s_q,), keys, device=device)
    return (torch.arange(s_q, device=device) + (keys - s_q + 1)).clamp_min(0)


def exact_attention(
    q: Tensor,
    content: Tensor,
    rope: Tensor,
    softmax_scale: float,
    *,
    causal: bool = True,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA attention of one sequence.

    Args:
        q: [s_q, heads, 576]: content part, then RoPE part.
        content: [keys, 512]: keys' content, and the values.
        rope: [keys, 64].
        softmax_scale: multiplies the logits.
        causal: bottom-right aligned causal mask; the queries are the sequence's last s_q tokens.
        visible: instead of `causal`, how many leading keys each query sees, int64 [s_q].

    Returns:
        out float64 [s_q, heads, 512] and lse float64 [s_q, heads] (natural log, scale included); a query that
        sees no key gives 0 and +inf.
    """
    q, content, rope = q.double(), content.double(), rope.double()
    logits = (q[..., :KV_LORA_RANK] @ content.T + q[..., KV_LORA_RANK:] @ rope.T) * softmax_scale
    limit = visible_keys(q.shape[0], content.shape[0], causal, q.device) if visible is None else visible
    hidden = torch.arange(content.shape[0], device=q.device) >= limit[:, None]
    logits = logits.masked_fill(hidden[:, None, :], -torch.inf)
    empty = (limit == 0)[:, None, None]
    out = torch.where(empty, 0.0, torch.softmax(logits, -1)) @ content
    lse = torch.where(empty[..., 0], torch.inf, torch.logsumexp(logits, -1))
    return out, lse
