"""The emulation over a paged cache, split as a schedule says: what `torch.ops.snapmla.mla_decode` computes."""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla.layout import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla.quantization import E4M3, Quantized
from snapmla.reference.emulated import KERNEL_FLOAT32_ADDS, Rules, emulated_attention
from snapmla.reference.exact import visible_keys
from snapmla.schedule import BLOCK_KEYS


def stored_tokens(planes: tuple[Tensor, Tensor, Tensor], pages: Tensor, length: int) -> Quantized:
    """The first `length` tokens of the given pages (int64), as the cache's planes hold them; no other is read."""
    content, rope, scale = planes
    return Quantized(
        content.view(torch.uint8)[pages].view(E4M3).reshape(-1, KV_LORA_RANK)[:length],
        rope[pages].reshape(-1, QK_ROPE_HEAD_DIM)[:length],
        scale[pages].reshape(-1)[:length],
    )


def cuts_of(schedule: Tensor, sequence: int, length: int) -> list[int]:
    """The tokens at which a schedule (`snapmla.schedule.boundaries`) cuts a sequence."""
    inside = schedule[schedule[:, 0] == sequence, 1].unique().tolist()
    return [block * BLOCK_KEYS for block in inside if 0 < block * BLOCK_KEYS < length]


def emulated_sequence(
    query: Quantized,
    key: Quantized,
    softmax_scale: float,
    causal: bool,
    cuts: list[int],
    rules: Rules = KERNEL_FLOAT32_ADDS,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence, cut at the given tokens and merged: out float32 [s_q, heads, 512] and lse float32
    [s_q, heads]. The arguments are those of `emulated_attention`."""
    keys = key.scale.shape[0]
    visible = visible_keys(query.scale.shape[0], keys, causal, key.scale.device)
    results = []
    for start, end in zip([0, *cuts], [*cuts, keys], strict=True):
        part = Quantized(*(x[start:end] for x in key))
        seen = (visible - start).clamp(0, end - start)
        results.append(emulated_attention(query, part, softmax_scale, visible=seen, rules=rules))
    if not cuts:
        return results[0]
    out, lse = merge_partials(*(torch.stack(x) for x in zip(*results, strict=True)))
    return out, lse


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """outs [parts, ..., 512] weighted by lses [parts, ...] (natural logarithm; +inf: weight 0); see
    `snapmla.decode.merge_partials`."""
    empty = torch.isposinf(lses)
    log_weights = lses.float().masked_fill(empty, -torch.inf)
    nothing = empty.all(0)
    lse = torch.logsumexp(log_weights, 0)
    weights = torch.exp(log_weights - torch.where(nothing, 0.0, lse)).unsqueeze(-1)
    out = torch.where(weights > 0, outs.float() * weights, 0.0).sum(
        0
    )  # an empty part's values are never read
    return out.to(outs.dtype), torch.where(nothing, torch.inf, lse)
