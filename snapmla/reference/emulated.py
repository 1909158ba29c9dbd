"""Emulated attention: Algorithm 1 of the paper, block by block, with every rounding the FP8 kernel does.

In base 2, with the reference u of a row standing for Algorithm 1's sigma_P e^m, for each block of keys and each row
(one query of one head):

    s   = (q8 . k8 + q_R . k_R) * S_q * S_k * softmax_scale * log2(e)   content first, RoPE into the same accumulator
    v   = max(s + log2 S_K) - log2 448                         what would make the block's largest P' 448
    u'  = v                                                    one per row and block ("block-wise dynamic"), or
    u'  = u while u - keep_bits <= v <= u                       the reference is kept while it is close enough
    e   = 2^(s - u')
    P8  = e4m3(e * S_K)                                        scale fusion: V is k8, its scale moves into P
    gamma = 2^(u - u')
    O   = gamma * O + P8 . V8
    l   = gamma * l + sum e

and at the end out = O / l, lse = ln(2) (u + log2 l). With keep_bits = 0 this is Algorithm 1 (its sigma' e^m' is 2^u'):
the row's largest P' of each block is exactly 448. Keeping a reference spares the kernel a multiplication of O, and
costs that exactness in blocks whose maximum is not a new one. e4m3's numbers reach 17.8 bits down from 448, so that a
block 12 bits below the reference still has 6 bits for its own values.

The blocks are visited in order, which is what Algorithm 1's barriers enforce between its two warp groups (P0.V0 before
P1.V1): a probability is quantized once and never rescaled afterwards. The appendix's Eqs 13-14, which divide the
logit by the scale inside exp, contradict this; Algorithm 1 is right, since without rounding it equals exact attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from snapmla.layout import PAGE_SIZE
from snapmla.quantization import E4M3_MAX, Quantized, to_e4m3
from snapmla.reference.accumulation import FLOAT32_ADDS, PROMOTED, Accumulation
from snapmla.reference.exact import visible_keys
from snapmla.schedule import BLOCK_KEYS

LOG2_E = math.log2(math.e)

UINT8_MAX = 255.0

P_MAX = {"block": E4M3_MAX, "none": E4M3_MAX, "uint8": UINT8_MAX}
"""What a reference makes of its block's largest P', for each `Rules.p_rule` that has a reference by the block."""

KEEP_BITS = 12.0
"""How far below a row's reference a block's largest P' may lie before the kernel moves the reference down."""

DROP_BITS = 40.0
"""A reference is never more than this many bits below the row's highest: O and l, which are in its units, stay finite,
and what is lost below it weighs less than 2^-40."""


@dataclass(frozen=True)
class Rules:
    """What the emulated kernel does where the algorithm leaves a choice. The defaults are Algorithm 1.

    Attributes:
        block: keys per block (BlockN).
        p_rule: how P is rounded. "block": to e4m3, its reference by the block (Algorithm 1). "none": scaled
            likewise, not rounded. "uint8": to an integer, the block's largest P' being 255 (for INT8 content).
            "bf16": to BF16 with the running maximum as reference, as BF16 kernels do.
        keep_bits: the reference is kept while the block's own lies at most this many bits below it.
        accumulation: how the tensor cores add (the BF16 RoPE part of QK is added without loss).
    """

    block: int = PAGE_SIZE
    p_rule: Literal["block", "none", "uint8", "bf16"] = "block"
    keep_bits: float = 0.0
    accumulation: Accumulation = FLOAT32_ADDS


ALGORITHM_1 = Rules()

KERNEL = Rules(block=BLOCK_KEYS, keep_bits=KEEP_BITS, accumulation=PROMOTED)
"""What the decode kernel (kernels/sm90/decode) computes."""

KERNEL_FLOAT32_ADDS = Rules(block=BLOCK_KEYS, keep_bits=KEEP_BITS)
"""The same without the tensor cores' truncation, whose model is slow: what CPU tensors get."""


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
    q_scale = q.scale.reshape(rows, 1).to(dtype) * (softmax_scale * LOG2_E)
    limit = visible_keys(s_q, keys, causal, q_scale.device) if visible is None else visible
    limit = limit.repeat_interleave(heads)[:, None]

    reference = q_scale.new_zeros(rows, 1)
    highest = q_scale.new_full((rows, 1), -torch.inf)
    ell = q_scale.new_zeros(rows, 1)
    o = q_scale.new_zeros(rows, k.content.shape[-1])

    for start in range(0, keys, rules.block):
        block = slice(start, min(start + rules.block, keys))
        content, rope, scale = (x[block].to(dtype) for x in k)
        s = rules.accumulation.dot(q_content, content.T)
        s = (s + q_rope @ rope.T) * scale * q_scale
        hidden = torch.arange(block.start, block.stop, device=s.device) >= limit
        s = s.masked_fill(hidden, -torch.inf)  # selection, never multiplication: a hidden slot may hold NaN

        before, reference = reference, _reference(s, scale, reference, highest, rules)
        highest = torch.where(hidden.all(-1, keepdim=True), highest, torch.maximum(highest, reference))
        e = torch.exp2(s - reference)
        p = _round_p(torch.where(hidden, 0.0, e * scale), rules.p_rule)

        gamma = torch.exp2(before - reference) if start else 0.0
        o = rules.accumulation.add(gamma * o, p, content)
        ell = gamma * ell + e.sum(-1, keepdim=True)

    empty = ell == 0
    out = torch.where(empty, 0.0, o / torch.where(empty, 1.0, ell))
    lse = torch.where(empty, torch.inf, (reference + torch.log2(ell)) / LOG2_E)
    return out.reshape(s_q, heads, -1), lse.reshape(s_q, heads)


def _reference(s: Tensor, k_scale: Tensor, before: Tensor, highest: Tensor, rules: Rules) -> Tensor:
    """The references [rows, 1] of a block of base-2 logits s [rows, keys], by those of the block before."""
    if rules.p_rule == "bf16":
        own = s.amax(-1, keepdim=True)
        moved = own > highest
    else:
        largest = torch.where(s == -torch.inf, -torch.inf, s + torch.log2(k_scale))
        own = largest.amax(-1, keepdim=True) - math.log2(P_MAX[rules.p_rule])
        kept = (own <= before) & (own >= before - rules.keep_bits) & (highest > -torch.inf)
        moved = ~kept & (own > -torch.inf)
    return torch.where(moved, torch.maximum(own, highest - DROP_BITS), before)


def _round_p(p: Tensor, p_rule: str) -> Tensor:
    if p_rule == "none":
        return p
    if p_rule == "uint8":
        return p.round().clamp(0.0, UINT8_MAX)
    return (to_e4m3(p) if p_rule == "block" else p.to(torch.bfloat16)).to(p.dtype)
