"""FlashInfer's paged MLA kernels for Hopper, peers of the kernel benchmark: BF16 arithmetic on a BF16 or an FP8 cache."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from snapmla.layout import KV_LORA_RANK, PAGE_SIZE, QK_ROPE_HEAD_DIM
from snapmla.quantization import E4M3

WORKSPACE_BYTES = 128 << 20
"""Of partial results; FlashInfer's own advice."""


def why_not() -> str | None:
    """Why FlashInfer cannot run here, in one sentence; or None."""
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper  # noqa: F401
    except (ImportError, OSError) as error:
        return f"FlashInfer is not installed ({type(error).__name__})."
    return None


def prepare(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool = True,
    *,
    backend: str = "auto",
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call of the kernel, planned: lengths are read on the host, as FlashInfer does once a step.

    Args:
        q: bfloat16 [batch, s_q, heads, 576].
        cache: bfloat16, or e4m3 with the scale 1, [pages, 64, 1, 576].
        block_table: int32 [batch, max_pages]; cache_seqlens: int32 [batch].
        backend: FlashInfer's name of an implementation; auto is its own choice.

    Returns:
        A function that returns out bfloat16 [batch, s_q, heads, 512] and lse float32 [batch · s_q, heads] (base 2).
    """
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    batch, s_q, heads, _ = q.shape
    pages = -(-cache_seqlens // PAGE_SIZE)
    used = torch.arange(block_table.shape[1], device=q.device) < pages[:, None]
    starts = torch.zeros(batch + 1, dtype=torch.int32, device=q.device)
    starts[1:] = pages.cumsum(0)
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(q.device), backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions wrap these tensors in an object
        wrapper.plan(
            qo_indptr=torch.arange(batch + 1, dtype=torch.int32, device=q.device) * s_q,
            kv_indptr=starts,
            kv_indices=block_table[used].contiguous(),
            kv_len_arr=cache_seqlens,
            num_heads=heads,
            head_dim_ckv=KV_LORA_RANK,
            head_dim_kpe=QK_ROPE_HEAD_DIM,
            page_size=PAGE_SIZE,
            causal=causal and s_q > 1,  # for one query the same, and planned for every number of heads
            sm_scale=softmax_scale,
            q_data_type=q.dtype,
            kv_data_type=cache.dtype,
        )
    parts = [KV_LORA_RANK, QK_ROPE_HEAD_DIM]
    arguments = *q.flatten(0, 1).split(parts, -1), *cache.squeeze(2).split(parts, -1)
    out = q.new_empty(batch * s_q, heads, KV_LORA_RANK)
    lse = q.new_empty(batch * s_q, heads, dtype=torch.float32)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if cache.dtype == E4M3 else {}

    def call() -> tuple[Tensor, Tensor]:
        wrapper.run(*arguments, out=out, lse=lse, return_lse=True, **scales)
        return out.view(batch, s_q, heads, KV_LORA_RANK), lse

    return call


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    """Shared by all calls: they run one after another."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
