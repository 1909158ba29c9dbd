"""FP8 quantization of MLA latents and queries: the scale rule, the e4m3 conversion and Table 2's
configurations.

Everything that is quantized in this project, on a CPU or a GPU, follows the rules of this file:

    S  = max(amax / 448, 2^-40)            the scale of a group of values (`scale_from_amax`)
    x8 = e4m3(x / S), saturating           (`to_e4m3`)
    r  = bfloat16(r / S)                   scale domain alignment of the RoPE part (paper, Eq 6)

With both sides aligned, logit = (q8 . k8 + q_R . k_R) * S_q * S_k * softmax_scale: one accumulator, one
multiply.

Divisions are IEEE float32 divisions, not multiplications by a reciprocal, so that a CPU and a GPU store the
same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from snapmla.layout import PAGE_SIZE

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
"""Largest finite e4m3fn value; conversions saturate to it."""

SCALE_FLOOR = 2.0**-40
"""Smallest scale. A token without content would otherwise get a scale so small that its aligned RoPE part (r
/ S) overflows. The floor changes no byte of a token whose amax exceeds 448 * 2^-40 = 4.1e-10."""


class Quantized(NamedTuple):
    """Quantized latents (K) or queries (Q).

    Attributes:
        content: e4m3fn, [..., 512].
        rope: bfloat16, [..., 64], divided by `scale`.
        scale: float32, [...]: one scale per token (K) or per token and head (Q).
    """

    content: Tensor
    rope: Tensor
    scale: Tensor


@dataclass(frozen=True)
class QuantConfig:
    """One row of Table 2: which values share a scale, and what happens to the RoPE part.

    Attributes:
        name: identifier used in configurations and result files.
        label: name in figures and tables.
        key_scale: what shares a scale among keys: a "token", a "block" of `block_tokens` tokens, the
            "tensor"; "static" takes `static_scale` for everything.
        query_scale: likewise among queries: a "head" (of one token), a "token" (all its heads), the "tensor",
            "static".
        quantize_rope: the RoPE part shares the content's scale and is rounded to e4m3 as well (RoPE-unaware);
            otherwise it is kept in BF16, divided by the content's scale.
    """

    name: str
    label: str
    key_scale: Literal["token", "block", "tensor", "static"]
    query_scale: Literal["head", "token", "tensor", "static"]
    quantize_rope: bool = False
    static_scale: float = 1.0
    block_tokens: int = PAGE_SIZE


CONFIGS: dict[str, QuantConfig] = {
    c.name: c
    for c in (
        QuantConfig("snapmla", "SnapMLA", key_scale="token", query_scale="head"),
        QuantConfig(
            "config_a", "A: per token, RoPE too", key_scale="token", query_scale="head", quantize_rope=True
        ),
        QuantConfig("config_b", "B: static scale 1.0", key_scale="static", query_scale="static"),
        QuantConfig("config_c", "C: per tensor", key_scale="tensor", query_scale="tensor"),
        QuantConfig("config_d", "D: per block", key_scale="block", query_scale="token"),
    )
}
"""Table 2, in its order. What the paper leaves open is decided as: A has one joint scale over all 576 values;
B and C treat Q's content as K's; D uses blocks of 64 tokens x 512 for K and one scale per query token over
its heads."""

SNAPMLA = CONFIGS["snapmla"]


def scale_from_amax(amax: Tensor) -> Tensor:
    """The scale of a group of values from its largest magnitude: max(amax / 448, 2^-40), float32.

    A group that holds a NaN or an infinity gets the scale NaN, which makes every stored value of the group
    NaN: the fault shows in every decode call that sees the token, on every device alike, and in no other.
    """
    amax = amax.float()
    scale = (amax / E4M3_MAX).clamp_min(SCALE_FLOOR)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def to_e4m3(x: Tensor) -> Tensor:
    """Round to e4m3fn (to nearest, ties to even), saturating at +-448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def quantize_key(content: Tensor, rope: Tensor, config: QuantConfig = SNAPMLA) -> Quantized:
    """Quantize the latents of tokens in sequence order.

    Args:
        content: [..., tokens, 512], floating point (c_KV, after its RMSNorm).
        rope: [..., tokens, 64], floating point (k_R, after the rotary embedding).
        config: which tokens share a scale; blocks are counted from token 0.

    Returns:
        content e4m3 [..., tokens, 512], rope bfloat16 [..., tokens, 64], scale float32 [..., tokens].
    """
    amax = _joint_amax(content, rope, config)
    if config.key_scale == "block":
        amax = _amax_over_blocks(amax, config.block_tokens)
    elif config.key_scale in ("tensor", "static"):
        amax = _amax_over_tensor(amax)
    scale = _scale(amax, config.key_scale, config)
    return quantize_by(content, rope, scale, quantize_rope=config.quantize_rope)


def quantize_query(content: Tensor, rope: Tensor, config: QuantConfig = SNAPMLA) -> Quantized:
    """Quantize absorbed queries.

    Args:
        content: [..., heads, 512], floating point (the query's part for c_KV, W_UK absorbed).
        rope: [..., heads, 64], floating point (q_R, after the rotary embedding).
        config: which heads and tokens share a scale.

    Returns:
        content e4m3 [..., heads, 512], rope bfloat16 [..., heads, 64], scale float32 [..., heads].
    """
    amax = _joint_amax(content, rope, config)
    if config.query_scale == "token":
        amax = amax.amax(-1, keepdim=True).expand_as(amax) if amax.numel() else amax
    elif config.query_scale in ("tensor", "static"):
        amax = _amax_over_tensor(amax)
    scale = _scale(amax, config.query_scale, config)
    return quantize_by(content, rope, scale, quantize_rope=config.quantize_rope)


def quantize_by(
    content: Tensor,
    rope: Tensor,
    scale: Tensor,
    *,
    to_stored: Callable[[Tensor], Tensor] = to_e4m3,
    quantize_rope: bool = False,
) -> Quantized:
    """Quantize latents or queries by given scales; both parts are divided by them.

    Args:
        content: [..., 512], floating point.
        rope: [..., 64], floating point.
        scale: float32 [...].
        to_stored: rounds the divided content, float32, to the type that is stored.
        quantize_rope: the divided RoPE part is rounded to e4m3, not only to BF16.

    Returns:
        content of the stored type [..., 512], rope bfloat16 [..., 64], the same scale.
    """
    divisor = scale.unsqueeze(-1)
    rope = rope.float() / divisor
    if quantize_rope:
        rope = to_e4m3(rope).float()  # every e4m3 value is a bfloat16 value: the cache keeps one layout
    return Quantized(to_stored(content.float() / divisor), rope.to(torch.bfloat16), scale)


def dequantize(quantized: Quantized) -> Tensor:
    """Content and RoPE multiplied back by the scale: float32 [..., 576] (the paper's Fused-Fetch-Dequant,
    before rounding)."""
    scale = quantized.scale.unsqueeze(-1)
    return torch.cat([quantized.content.float() * scale, quantized.rope.float() * scale], dim=-1)


def _joint_amax(content: Tensor, rope: Tensor, config: QuantConfig) -> Tensor:
    amax = content.float().abs().amax(-1)
    return torch.maximum(amax, rope.float().abs().amax(-1)) if config.quantize_rope else amax


def _amax_over_tensor(amax: Tensor) -> Tensor:
    return amax.max().expand_as(amax) if amax.numel() else amax


def _amax_over_blocks(amax: Tensor, tokens: int) -> Tensor:
    blocks = amax.split(tokens, dim=-1)
    return (
        torch.cat([b.amax(-1, keepdim=True).expand_as(b) for b in blocks], dim=-1) if amax.numel() else amax
    )


def _scale(amax: Tensor, sharing: str, config: QuantConfig) -> Tensor:
    if sharing == "static":
        return torch.where(torch.isfinite(amax), config.static_scale, torch.nan)
    return scale_from_amax(amax)
