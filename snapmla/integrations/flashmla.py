"""FlashMLA's Hopper decode kernels, the peers that errors and times are compared with.

The package `sgl-flash-mla` (`make flashmla`) has both; a FlashMLA built from source has the BF16 kernel only. Both are
called on queries and caches that a caller has made, in a form that a CUDA graph can capture.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from snapmla.layout import KV_LORA_RANK
from snapmla.quantization import E4M3


def why_not(cache: str) -> str | None:
    """Why the kernel that reads this cache (bf16, or fp8: e4m3 throughout with one scale per tensor, RoPE part included)
    cannot run here, in one sentence; or None."""
    try:
        import flash_mla
    except (ImportError, OSError) as error:  # OSError: its libraries do not load, for want of CUDA
        return f"FlashMLA is not installed ({type(error).__name__})."
    legacy = getattr(flash_mla, "has_legacy", None)
    if legacy is not None and not legacy():
        return "The installed FlashMLA has no Hopper kernels."
    if cache == "fp8" and legacy is None:
        return "The installed FlashMLA has no FP8 kernel for Hopper."
    return None


def prepare(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool = True,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call of the kernel, its tile scheduler metadata made.

    Args:
        q: bfloat16 or e4m3 [batch, s_q, heads, 576].
        cache: of the same dtype, [pages, 64, 1, 576]; e4m3 values have the scale 1.
        block_table: int32 [batch, max_pages]; cache_seqlens: int32 [batch].

    Returns:
        A function that returns out bfloat16 [batch, s_q, heads, 512] and lse float32 [batch, heads, s_q].
    """
    from flash_mla import flash_mla_interface as interface

    rows = q.shape[1] * q.shape[2]
    decode = interface.flash_mla_with_kvcache
    # Only sgl-flash-mla, which has newer kernels beside Hopper's, has to be told which.
    legacy = {"use_legacy": True} if "use_legacy" in inspect.signature(decode).parameters else {}
    options = dict(legacy)
    if not hasattr(interface, "FlashMLASchedMeta"):  # FlashMLA before 2026
        metadata, num_splits = interface.get_mla_metadata(cache_seqlens, rows, 1)
    else:
        metadata, num_splits = interface.FlashMLASchedMeta(), None  # filled by the first call
        if cache.dtype == E4M3:
            metadata.tile_scheduler_metadata, metadata.num_splits = interface.get_mla_decoding_metadata(
                cache_seqlens, rows, 1, is_fp8_kvcache=True, **legacy
            )
            one = torch.ones(1, device=q.device)
            options |= {"is_fp8_kvcache": True, "descale_q": one, "descale_k": one}
    paging = block_table, cache_seqlens, KV_LORA_RANK
    return lambda: decode(q, cache, *paging, metadata, num_splits, softmax_scale, causal, **options)
