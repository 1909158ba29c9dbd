"""MLA decode attention over the paged FP8 cache."""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla import ops
from snapmla.cache import LatentCache
from snapmla.checks import check_query, check_tensor
from snapmla.layout import KV_LORA_RANK
from snapmla.quantization import E4M3, Quantized
from snapmla.reference import paged
from snapmla.schedule import parts_for


def quantize_q(q: Tensor) -> Quantized:
    """Quantize BF16 queries (the paper's Fused-Q-Quant).

    Args:
        q: bfloat16 [..., heads, 576], absorbed content part first, then the RoPE part; any strides with a
            contiguous last dimension.

    Returns:
        content e4m3fn [..., heads, 512], rope bfloat16 [..., heads, 64] (divided by the scale), scale float32
        [..., heads].
    """
    check_query(q)
    return Quantized(*ops.quantize_q(q[..., :KV_LORA_RANK], q[..., KV_LORA_RANK:]))


def mla_decode(
    q: Tensor,
    cache: LatentCache,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode attention for BF16 queries: quantizes them and calls `mla_decode_quantized`.

    Args:
        q: bfloat16 [batch, s_q, heads, 576]: absorbed content part, then RoPE part. s_q 1 to 8, heads 1 to
            128.

    The other arguments and the results are those of `mla_decode_quantized`.
    """
    return mla_decode_quantized(
        *quantize_q(q),
        cache,
        block_table,
        cache_seqlens,
        softmax_scale,
        causal,
        out=out,
        lse=lse,
        schedule=schedule,
    )


def mla_decode_quantized(
    q_nope: Tensor,
    q_rope: Tensor,
    q_scale: Tensor,
    cache: LatentCache,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    schedule: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Decode attention of quantized queries over the paged cache (paper, Algorithm 1).

    Args:
        q_nope: e4m3fn [batch, s_q, heads, 512], content of the absorbed queries.
        q_rope: bfloat16 [batch, s_q, heads, 64], divided by `q_scale`.
        q_scale: float32 [batch, s_q, heads].
        cache: the layer's cache.
        block_table: int32 [batch, max_pages], pages of each sequence; entries past its last page are never
            read.
        cache_seqlens: int32 [batch], tokens in each sequence's cache, those just written included.
        softmax_scale: multiplies the logits; for a model, its own (`snapmla.models`), YaRN's mscale^2
            included.
        causal: query i of s_q sees the first cache_seqlens - s_q + 1 + i tokens (bottom-right aligned).
        out: bfloat16 [batch, s_q, heads, 512] to write to; needs `lse` as well.
        lse: float32 [batch, heads, s_q] to write to.
        schedule: made by `decode_schedule` from the same cache_seqlens, for all layers of a step; by default each
            call makes its own.

    Returns:
        out bfloat16 [batch, s_q, heads, 512] and lse float32 [batch, heads, s_q] (natural logarithm of the
        sum of exponentials, softmax scale included). A query that sees no token gives 0 and +inf, as in
        FlashMLA.

    Raises:
        TypeError, ValueError: an argument of another dtype, shape or device; on the CPU also a length or page
            out of range.
    """
    if not isinstance(cache, LatentCache):
        raise TypeError(
            f"cache must be a LatentCache (see LatentCache.from_planes), got {type(cache).__name__}."
        )
    if (out is None) != (lse is None):
        raise ValueError("out and lse must be given together, got only one of them.")
    if not isinstance(softmax_scale, int | float):
        raise TypeError(f"softmax_scale must be a number, got {type(softmax_scale).__name__}.")
    if out is None:
        check_tensor("q_nope", q_nope, shape=["batch", "s_q", "heads", KV_LORA_RANK], dtype=E4M3)
        batch, s_q, heads, _ = q_nope.shape
        out = q_nope.new_empty(batch, s_q, heads, KV_LORA_RANK, dtype=torch.bfloat16)
        lse = q_nope.new_empty(batch, heads, s_q, dtype=torch.float32)
    query, paging = (q_nope, q_rope, q_scale), (block_table, cache_seqlens)
    ops.mla_decode(*query, *cache.planes, *paging, softmax_scale, causal, out, lse, schedule)
    return out, lse


def decode_schedule(cache_seqlens: Tensor, block_table: Tensor, s_q: int, heads: int) -> Tensor:
    """Tile scheduler metadata: how decode calls with these lengths are split over the GPU (`snapmla.schedule`).

    Args:
        cache_seqlens: int32 [batch].
        block_table: int32 [batch, max_pages]; only its width counts.
        s_q, heads: of the queries.

    Returns:
        int32 [parts + 1, 2], for `mla_decode(..., schedule=)`. Nothing waits for the GPU. On the CPU there is one part.
    """
    parts = 1
    if cache_seqlens.is_cuda:
        parts = parts_for(
            torch.cuda.get_device_properties(cache_seqlens.device).multi_processor_count, s_q * heads
        )
    return ops.decode_schedule(cache_seqlens, block_table.shape[1], parts)


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over disjoint parts of a sequence (split-KV).

    Args:
        outs: [parts, batch, s_q, heads, 512], each part's normalized output.
        lses: [parts, batch, heads, s_q], natural logarithm; +inf marks a part in which a query sees no token:
            weight 0.

    Returns:
        out in the dtype of `outs` and lse float32; a query that sees no token in any part gives 0 and +inf.
    """
    out, lse = paged.merge_partials(outs, lses.transpose(-1, -2))
    return out, lse.transpose(-1, -2)
