"""RMSNorm of the content and rotary embedding of the RoPE part: what an engine does to a token before it caches it, in
the roundings of the fused kernel (kernels/common/quantize.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla.checks import check_tensor
from snapmla.layout import KV_LORA_RANK, QK_ROPE_HEAD_DIM


def check_norm_rope(content: Tensor, norm_weight: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Refuse arguments of another shape, dtype or device."""
    check_tensor("norm_weight", norm_weight, shape=[KV_LORA_RANK], dtype=torch.bfloat16, like=content)
    dtypes = torch.float32, torch.bfloat16
    check_tensor("cos_sin", cos_sin, shape=["positions", QK_ROPE_HEAD_DIM], dtype=dtypes, like=content)
    tokens = [content.shape[0]]
    check_tensor("positions", positions, shape=tokens, dtype=(torch.int64, torch.int32), like=content)
    for name, value in (("norm_weight", norm_weight), ("cos_sin", cos_sin)):
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(value.stride())}.")


def rms_norm(content: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """bfloat16 [tokens, 512]: x / sqrt(mean x^2 + epsilon) rounded to BF16, then times the weight, rounded again."""
    squares = content.double().square().mean(-1, keepdim=True).float()
    inverse = 1.0 / torch.sqrt(squares + torch.tensor(epsilon, dtype=torch.float32))
    return ((content.float() * inverse).bfloat16().float() * weight.float()).bfloat16()


def rotate(rope: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """bfloat16 [tokens, 64] turned by angles given as cos_sin [tokens, 64]: 32 cosines, then 32 sines; pairs are
    values 2 i, 2 i + 1 (interleaved) or i, i + 32; one rounding to BF16."""
    cosine, sine = cos_sin.float().chunk(2, -1)
    x, y = rope.float().unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rope.float().chunk(2, -1)
    turned = x * cosine - y * sine, y * cosine + x * sine
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).bfloat16()
