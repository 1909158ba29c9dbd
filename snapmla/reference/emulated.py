"""Emulated attention: Algorithm 1 of the paper, block by block, with every rounding the FP8 kernel does.

For each block of keys and each row (one query of one head):

    s   = (q8 . k8 + q_R . k_R) * S_q * S_k * softmax_scale      content first, RoPE into the same accumulator
    m'  = max(m, max s)
    P   = exp(s - m')
    P'  = P * S_k                                              scale fusion: V is k8, its scale moves into P
    sigma' = max P' / 448                                      one per row and block ("block-wise dynamic")
    P8  = e4m3(P' / sigma')
    gamma = exp(m - m') * sigma / sigma'
    O   = gamma * O + P8 . V8                                   O in units of 1 / sigma' of the newest block
    l   = gamma * l + sum P / sigma'
    m, sigma = m', sigma'

and at the end out = O / l, lse = m + ln(sigma * l). The blocks are visited in order, which is what Algorithm
1's barriers enforce between its two warp groups (P0.V0 before P1.V1): a probability is quantized once and
never rescaled afterwards. The appendix's Eqs 13-14, which divide the logit by the scale inside exp,
contradict this; Algorithm 1 is right, since without rounding it equals exact attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from snapmla.layout import PAGE_SIZE
from snapmla.quantization import E4M3_MAX, P_SCALE_FLOOR, Quantized, to_e4m3
from snapmla.reference.accumulation import FLOAT32_ADDS, Accumulation
from snapmla.reference.exact import visible_keys


@dataclass(frozen=True)
class Rules:
    """What the emulated kernel does where the algorithm leaves a choice. The defaults are Algorithm 1.

    Attributes:
        block: keys per block (BlockN).
        p_rule: how P is rounded. "block": to e4m3 with one scale per row and block (Algorithm 1). "none":
            scaled likewise, not rounded. "bf16": to BF16 without a scale, as BF16 kernels do.
        accumulation: how the tensor cores add (the BF16 RoPE part of QK is added without loss).
    """

    block: int = PAGE_SIZE
    p_rule: Literal["block", "none", "bf16"] = "block"
    accumulation: Accumulation = FLOAT32_ADDS


ALGORITHM_1 = Rules()


def emulated_attention(
    q: Quantized,
    k: Quantized,
    softmax_scale: float,
    *,
    causal: bool = True,
    visible: Tensor | None = None,
    rules: Rules = ALGORITHM_1,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence as the FP8 kernel computes it.

    Args:
        q: content [s_q, heads, 512], rope [s_q, heads, 64], scale [s_q, heads]; any floating types, so that
            unquantized values with scale 1 can be passed too, and any width of the content.
        k: content [keys, 512], rope [keys, 64], scale [keys].
        softmax_scale: multiplies the logits.
        causal: bottom-right aligned causal mask.
        visible: instead of `causal`, how many leading keys each query sees, int64 [s_q].
        rules: block size, rounding of P, accumulation.
        dtype: arithmetic type, float32 or float64.

    Returns:
        out `dtype` [s_q, heads, 512] (not yet rounded to BF16) and lse `dtype` [s_q, heads] (natural log); a
        query that sees no key gives 0 and +inf.
    """
    s_q, heads = q.scale.shape
    keys = k.scale.shape[0]
    rows = s_q * heads
    q_content, q_rope = (x.reshape(rows, -1).to(dtype) for x in (q.content, q.rope))
    q_scale = q.scale.reshape(rows, 1).to(dtype) * softmax_scale
    k_content, k_rope, k_scale = (x.to(dtype) for x in k)
    limit = visible_keys(s_q, keys, causal, q_scale.device) if visible is None else visible
    limit = limit.repeat_interleave(heads)[:, None]

    m = q_scale.new_full((rows, 1), -torch.inf)
    sigma = q_scale.new_ones(rows, 1)
    ell = q_scale.new_zeros(rows, 1)
    o = q_scale.new_zeros(rows, k_content.shape[-1])

    for start in range(0, keys, rules.block):
        block = slice(start, min(start + rules.block, keys))
        s = rules.accumulation.dot(q_content, k_content[block].T)
        s = (s + q_rope @ k_rope[block].T) * (q_scale * k_scale[block])
        hidden = torch.arange(block.start, block.stop, device=s.device) >= limit
        s = s.masked_fill(hidden, -torch.inf)  # selection, never multiplication: a hidden slot may hold NaN

        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        reference = torch.where(m_new == -torch.inf, 0.0, m_new)  # nothing visible yet: exp(-inf - 0) = 0
        p = torch.exp(s - reference)
        decay = torch.exp(m - reference)
        p_fused = torch.where(hidden, 0.0, p * k_scale[block])
        sigma_new = _p_scale(p_fused, rules.p_rule)
        p_rounded = _round_p(p_fused / sigma_new, rules.p_rule)

        gamma = decay * sigma / sigma_new
        o = rules.accumulation.add(gamma * o, p_rounded, k_content[block])
        ell = gamma * ell + p.sum(-1, keepdim=True) / sigma_new
        m, sigma = m_new, sigma_new

    empty = m == -torch.inf
    out = torch.where(empty, 0.0, o / torch.where(empty, 1.0, ell))
    lse = torch.where(empty, torch.inf, m + torch.log(sigma * ell))
    return out.reshape(s_q, heads, -1), lse.reshape(s_q, heads)


def _p_scale(p_fused: Tensor, p_rule: str) -> Tensor:
    """sigma_P of a block, one per row; 1 where nothing is visible or everything underflowed."""
    largest = p_fused.amax(-1, keepdim=True)
    if p_rule == "bf16":
        return torch.ones_like(largest)
    return torch.where(largest > 0, (largest / E4M3_MAX).clamp_min(P_SCALE_FLOOR), 1.0)


def _round_p(p: Tensor, p_rule: str) -> Tensor:
    if p_rule == "none":
        return p
    return (to_e4m3(p) if p_rule == "block" else p.to(torch.bfloat16)).to(p.dtype)
