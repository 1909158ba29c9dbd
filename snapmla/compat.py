"""The function names and argument orders of the authors' FlashMLA branch, as used by SGLang-FluentLLM, over
this library.

They keep a cache as three tensors: k_cache_lora [pages, 64, 1, 512] e4m3fn, k_cache_rope [pages, 64, 1, 64]
bfloat16 and k_scale [pages, 64, 1, 1] float32.
"""

from __future__ import annotations

from torch import Tensor

from snapmla.cache import LatentCache
from snapmla.decode import mla_decode_quantized
from snapmla.decode import quantize_q as _quantize_q
from snapmla.layout import KV_LORA_RANK


def quantize_ckv_per_token_head(q: Tensor, kv_lora_rank: int = KV_LORA_RANK) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize BF16 queries [..., heads, 576]; returns (q_nope, q_scale [..., heads, 1], q_rope), in their
    order."""
    _check_rank("kv_lora_rank", kv_lora_rank)
    content, rope, scale = _quantize_q(q)
    return content, scale.unsqueeze(-1), rope


def quantize_and_cache_k(
    k: Tensor,
    k_cache_lora: Tensor,
    k_cache_rope: Tensor,
    k_scale: Tensor,
    slot_mapping: Tensor,
    kv_lora_rank: int = KV_LORA_RANK,
) -> None:
    """Quantize BF16 latents k [tokens, 576] and write them to their slots; a negative slot is skipped."""
    _check_rank("kv_lora_rank", kv_lora_rank)
    _cache(k_cache_lora, k_cache_rope, k_scale).append(
        k[..., :KV_LORA_RANK], k[..., KV_LORA_RANK:], slot_mapping
    )


def dequantize_ckv_fused_indexed(k_lora: Tensor, k_rope: Tensor, k_scale: Tensor, indices: Tensor) -> Tensor:
    """Gather slots and dequantize them: bfloat16 [tokens, 576]."""
    return _cache(k_lora, k_rope, k_scale).fetch(indices)


def flash_mla_ckv_fp8_per_token(
    q_nope: Tensor,
    q_rope: Tensor,
    k_cache_lora: Tensor,
    k_cache_rope: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: object,
    num_splits: object,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Decode attention; returns (out, lse) as `mla_decode_quantized`.

    q_scale is [batch, s_q, heads] or [batch, s_q, heads, 1]. tile_scheduler_metadata is a schedule of
    `snapmla.decode_schedule`; anything else, and num_splits, is ignored, and the call makes its own.
    softmax_scale defaults to 576^-0.5, as in FlashMLA.
    """
    _check_rank("head_dim_v", head_dim_v)
    if softmax_scale is None:
        softmax_scale = (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5
    if q_scale.dim() == 4:
        q_scale = q_scale.squeeze(-1)
    cache = _cache(k_cache_lora, k_cache_rope, k_scale)
    schedule = tile_scheduler_metadata if isinstance(tile_scheduler_metadata, Tensor) else None
    paging = block_table, cache_seqlens
    return mla_decode_quantized(
        q_nope, q_rope, q_scale, cache, *paging, softmax_scale, causal, schedule=schedule
    )


def _cache(content: Tensor, rope: Tensor, scale: Tensor) -> LatentCache:
    if content.dim() == 4:
        content, rope, scale = content.squeeze(2), rope.squeeze(2), scale.flatten(1)
    return LatentCache.from_planes(content, rope, scale)


def _check_rank(name: str, value: int) -> None:
    if value != KV_LORA_RANK:
        raise ValueError(f"{name} must be {KV_LORA_RANK}, got {value}.")
