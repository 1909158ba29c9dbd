"""Other ways of keeping MLA's latents in about SnapMLA's bytes: what each would cost in accuracy.

Keys and queries are quantized alike, by the rule of `snapmla.quantization`, and attention is computed as a kernel of the
format would compute it on Hopper:

* One scale per token folds into the logits and into P: such formats run through Algorithm 1, with FP8 or INT8 products.
* A scale per group of columns folds into neither, since P weighs all columns alike. FlashMLA's kernel for this format (its
  README: "FP8 with scale") dequantizes to BF16 and computes in BF16, with a query that was never quantized, and so does
  this file. `snapmla_bf16` does the same with SnapMLA's bytes, which tells the groups' share from BF16's.
* A rotation or a shift of the content changes no bytes: it ends in the weights (`rotated`, `centered`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from snapmla.layout import (
    BF16_BYTES_PER_TOKEN,
    BYTES_PER_TOKEN,
    CONTENT_BYTES,
    KV_LORA_RANK,
    QK_ROPE_HEAD_DIM,
    ROPE_BYTES,
    SCALE_BYTES,
)
from snapmla.quantization import (
    CONFIGS,
    E4M3_MAX,
    SNAPMLA,
    Quantized,
    dequantize,
    quantize_by,
    quantize_key,
    scale_from_amax,
    to_e4m3,
)
from snapmla.reference import ALGORITHM_1, KERNEL_FLOAT32_ADDS, Rules, attend, emulated_attention

GROUP = 128
"""Columns that share a scale in FlashMLA's format."""

E5M2 = torch.float8_e5m2
E5M2_MAX = torch.finfo(E5M2).max
INT8_MAX = 127.0

KEYS_AT_ONCE = 2048
"""Keys that are quantized in one go."""

RUNNING_MAXIMUM = Rules(keep_bits=math.inf)
"""P's reference moves only to a new maximum of its row."""

UINT8_P = Rules(p_rule="uint8")
"""INT8 products need integers on both sides: P, which is not negative, gets all of uint8."""


class Inputs(NamedTuple):
    """Attention of one sequence, nothing quantized yet.

    Attributes:
        q: [s_q, heads, 576], floating point.
        content: [keys, 512], floating point.
        rope: [keys, 64], floating point.
        softmax_scale: multiplies the logits.
        visible: how many leading keys each query sees, int64 [s_q].
        mean: what `centered` takes off the content, float [512].
    """

    q: Tensor
    content: Tensor
    rope: Tensor
    softmax_scale: float
    visible: Tensor
    mean: Tensor


Attend = Callable[[Inputs], Tensor]
"""Attention of `Inputs`: float32 [s_q, heads, 512], rounded to BF16 as a kernel's output."""

Quantize = Callable[[Tensor, Tensor], Quantized]
"""Keys' or queries' content [..., 512] and RoPE [..., 64] as a format stores them."""


@dataclass(frozen=True)
class Alternative:
    """A format, or a rule of computing with SnapMLA's.

    Attributes:
        label: name in tables.
        bytes_per_token: of the cache, per layer.
        products: what the tensor cores multiply: "FP8", "INT8" or "BF16".
        attend: attention as computed with it.
    """

    label: str
    bytes_per_token: int
    products: str
    attend: Attend


def power_of_two(content: Tensor, rope: Tensor) -> Quantized:
    """SnapMLA's format, each scale rounded up to a power of two (which the exponent byte of an E8M0 could hold)."""
    mantissa, exponent = torch.frexp(scale_from_amax(_amax(content)))  # mantissa from 0.5 to below 1, or NaN
    above = torch.ldexp(torch.ones_like(mantissa), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return quantize_by(content, rope, torch.where(mantissa.isnan(), mantissa, above))


def rope_e4m3(content: Tensor, rope: Tensor) -> Quantized:
    """RoPE in e4m3 too, with a scale of its own.

    A kernel would add the RoPE part's products after a multiplication by the ratio of the two scales; here the ratio is in
    the RoPE part, float32.
    """
    key = quantize_key(content, rope)
    own = scale_from_amax(_amax(rope)).unsqueeze(-1)
    return key._replace(rope=to_e4m3(rope.float() / own).float() * (own / key.scale.unsqueeze(-1)))


def e5m2(content: Tensor, rope: Tensor) -> Quantized:
    """Content in e5m2, one scale per token. P may stay e4m3: Hopper multiplies the two types."""
    return quantize_by(content, rope, _scale_for(content, E5M2_MAX), to_stored=_to_e5m2)


def int8(content: Tensor, rope: Tensor) -> Quantized:
    """Content in symmetric INT8, from -127 to 127, one scale per token.

    The content's products add up exactly, in INT32; a kernel would need another accumulator for the RoPE part's, BF16, which
    FP8 content shares.
    """
    return quantize_by(content, rope, _scale_for(content, INT8_MAX), to_stored=_to_int8)


def dequantized_groups(content: Tensor) -> Tensor:
    """Content [..., 512] in e4m3 with a scale for each `GROUP` columns, dequantized: BF16 [..., 512]."""
    groups = content.float().unflatten(-1, (-1, GROUP))
    scale = scale_from_amax(_amax(groups)).unsqueeze(-1)
    return (to_e4m3(groups / scale).float() * scale).bfloat16().flatten(-2)


def quantized(quantize: Quantize, rules: Rules = ALGORITHM_1) -> Attend:
    """Attention over keys and queries that `quantize` has stored, emulated by `rules`."""

    def run(x: Inputs) -> Tensor:
        key = Quantized(*map(torch.cat, zip(*(quantize(*part) for part in _parts(x)), strict=True)))
        out, _ = emulated_attention(
            quantize(*_split(x.q)), key, x.softmax_scale, visible=x.visible, rules=rules
        )
        return out.bfloat16().float()

    return run


def attend_bf16(x: Inputs) -> Tensor:
    """Attention as BF16 kernels compute it."""
    return attend("bf16", *x[:4], visible=x.visible)


def groups_bf16(x: Inputs) -> Tensor:
    """Attention in BF16 over groups of columns, dequantized; RoPE and queries are BF16 as they were."""
    content = torch.cat([dequantized_groups(content) for content, _ in _parts(x)])
    return attend_bf16(x._replace(content=content))


def snapmla_bf16(x: Inputs) -> Tensor:
    """Attention in BF16 over SnapMLA's cache, dequantized; queries are BF16 as they were."""
    keys = torch.cat([dequantize(quantize_key(*part)).bfloat16() for part in _parts(x)])
    content, rope = _split(keys)
    return attend_bf16(x._replace(content=content, rope=rope))


def hadamard(size: int) -> Tensor:
    """Sylvester's Hadamard matrix over sqrt(size), which is symmetric and its own inverse: float64 [size, size]."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"size must be a power of two, got {size}.")
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def rotated(attend: Attend) -> Attend:
    """`attend` on content and queries that a Hadamard matrix has rotated; the output is rotated back.

    Logits and probabilities stay what they were. W_UK and W_UV take up the rotations of queries and outputs, W_DKV that of
    the latents if the gains of the RMSNorm between are moved into W_UK and W_UV.
    """

    def rotate(x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return x.to(dtype) @ hadamard(KV_LORA_RANK).to(x.device, dtype)

    def run(x: Inputs) -> Tensor:
        content, rope = _split(x.q)
        q = torch.cat([rotate(content), rope], -1)
        return rotate(attend(x._replace(q=q, content=rotate(x.content))))

    return run


def centered(attend: Attend) -> Attend:
    """`attend` on content without its mean, which the output gets back.

    All logits of a query lose q.mean alike, which softmax does not see. W_UV times the mean is a bias behind the
    attention.
    """
    return lambda x: attend(x._replace(content=x.content - x.mean)) + x.mean


def _parts(x: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
    """Content and RoPE of `KEYS_AT_ONCE` keys after another, each of which is quantized by itself: whole contexts would
    take as long for fresh memory as for arithmetic."""
    return zip(x.content.split(KEYS_AT_ONCE), x.rope.split(KEYS_AT_ONCE), strict=True)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., :KV_LORA_RANK], x[..., KV_LORA_RANK:]


def _amax(x: Tensor) -> Tensor:
    return x.float().abs().amax(-1)


def _scale_for(content: Tensor, largest: float) -> Tensor:
    """The rule's scale, for a type whose largest value is another one than e4m3's."""
    return scale_from_amax(_amax(content)) * (E4M3_MAX / largest)


def _to_e5m2(x: Tensor) -> Tensor:
    return x.clamp(-E5M2_MAX, E5M2_MAX).to(E5M2)


def _to_int8(x: Tensor) -> Tensor:
    return x.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


_SNAPMLA = quantized(quantize_key)

ALTERNATIVES: dict[str, Alternative] = {
    "bf16": Alternative("BF16", BF16_BYTES_PER_TOKEN, "BF16", attend_bf16),
    "snapmla": Alternative(SNAPMLA.label, BYTES_PER_TOKEN, "FP8", _SNAPMLA),
    "snapmla_kernel": Alternative(
        "SnapMLA, the kernel's blocks and kept references",
        BYTES_PER_TOKEN,
        "FP8",
        quantized(quantize_key, KERNEL_FLOAT32_ADDS),
    ),
    "running_maximum": Alternative(
        "SnapMLA, P relative to the running maximum",
        BYTES_PER_TOKEN,
        "FP8",
        quantized(quantize_key, RUNNING_MAXIMUM),
    ),
    "snapmla_bf16": Alternative("SnapMLA, dequantized to BF16", BYTES_PER_TOKEN, "BF16", snapmla_bf16),
    "power_of_two": Alternative("power-of-two scales", BYTES_PER_TOKEN, "FP8", quantized(power_of_two)),
    "groups": Alternative(
        f"scales per {GROUP} columns, dequantized to BF16 (FlashMLA)",
        CONTENT_BYTES + KV_LORA_RANK // GROUP * SCALE_BYTES + ROPE_BYTES,
        "BF16",
        groups_bf16,
    ),
    "rope_e4m3": Alternative(
        "RoPE in e4m3, a scale of its own",
        CONTENT_BYTES + QK_ROPE_HEAD_DIM + 2 * SCALE_BYTES,
        "FP8",
        quantized(rope_e4m3),
    ),
    "config_a": Alternative(
        "RoPE in e4m3, the content's scale (Table 2, A)",
        CONTENT_BYTES + QK_ROPE_HEAD_DIM + SCALE_BYTES,
        "FP8",
        quantized(partial(quantize_key, config=CONFIGS["config_a"])),
    ),
    "e5m2": Alternative("content in e5m2", BYTES_PER_TOKEN, "FP8", quantized(e5m2)),
    "int8": Alternative("content in INT8, P in uint8", BYTES_PER_TOKEN, "INT8", quantized(int8, UINT8_P)),
    "hadamard": Alternative("Hadamard-rotated content", BYTES_PER_TOKEN, "FP8", rotated(_SNAPMLA)),
    "centered": Alternative("centered content", BYTES_PER_TOKEN, "FP8", centered(_SNAPMLA)),
}
"""By their names in configurations and result files."""
