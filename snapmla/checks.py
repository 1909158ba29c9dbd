"""Argument checks. Every error is one sentence: which argument, what was expected, what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapmla.layout import KV_LORA_RANK, MAX_HEADS, MAX_QUERIES, PAGE_SIZE, QK_HEAD_DIM, QK_ROPE_HEAD_DIM
from snapmla.quantization import E4M3


def check_tensor(
    name: str,
    value: object,
    *,
    shape: Sequence[int | str],
    dtype: torch.dtype | Sequence[torch.dtype],
    like: Tensor | None = None,
) -> None:
    """Refuse a tensor of another rank, size, dtype or device.

    Args:
        name: the argument's name, for the message.
        shape: sizes; a string stands for any size and names it; a leading "..." for any leading dimensions.
        dtype: the dtype, or the dtypes, that are accepted.
        like: a tensor whose device is expected.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}.")
    wanted = "[" + ", ".join(str(s) for s in shape) + "]"
    sizes = list(shape)
    got = list(value.shape)
    if sizes and sizes[0] == "...":
        sizes = sizes[1:]
        got = got[len(got) - len(sizes) :] if len(got) >= len(sizes) else []
    if len(got) != len(sizes) or any(isinstance(s, int) and s != g for s, g in zip(sizes, got, strict=True)):
        raise ValueError(f"{name} must have shape {wanted}, got {list(value.shape)}.")
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(_name(d) for d in dtypes)}, got {_name(value.dtype)}.")
    if like is not None and value.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {value.device}.")


def check_last_dim_contiguous(name: str, value: Tensor) -> None:
    """Refuse a tensor whose last dimension is strided: kernels read it in 16-byte pieces."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {list(value.stride())}."
        )


def check_query_parts(content: Tensor, rope: Tensor) -> None:
    """BF16 queries in two parts, [..., heads, 512] and [..., heads, 64]."""
    check_tensor("q_content", content, shape=["...", "heads", KV_LORA_RANK], dtype=torch.bfloat16)
    check_tensor(
        "q_rope", rope, shape=[*content.shape[:-1], QK_ROPE_HEAD_DIM], dtype=torch.bfloat16, like=content
    )
    check_last_dim_contiguous("q_content", content)
    check_last_dim_contiguous("q_rope", rope)


def check_cache(content: Tensor, rope: Tensor, scale: Tensor) -> None:
    """The three planes of a paged cache."""
    if isinstance(content, Tensor) and content.dim() > 1 and content.shape[1] != PAGE_SIZE:
        raise ValueError(f"content_cache must have pages of {PAGE_SIZE} tokens, got {content.shape[1]}.")
    check_tensor("content_cache", content, shape=["pages", PAGE_SIZE, KV_LORA_RANK], dtype=E4M3)
    pages = content.shape[0]
    check_tensor(
        "rope_cache", rope, shape=[pages, PAGE_SIZE, QK_ROPE_HEAD_DIM], dtype=torch.bfloat16, like=content
    )
    check_tensor("scale_cache", scale, shape=[pages, PAGE_SIZE], dtype=torch.float32, like=content)
    check_last_dim_contiguous("content_cache", content)
    check_last_dim_contiguous("rope_cache", rope)


def check_decode(
    q_nope: Tensor,
    q_rope: Tensor,
    q_scale: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    out: Tensor,
    lse: Tensor,
    schedule: Tensor | None,
) -> None:
    """Quantized queries, paging arguments, results and schedule of a decode call."""
    check_tensor("q_nope", q_nope, shape=["batch", "s_q", "heads", KV_LORA_RANK], dtype=E4M3)
    batch, s_q, heads, _ = q_nope.shape
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"q_nope must have 1 to {MAX_HEADS} heads, got {heads}.")
    if not 1 <= s_q <= MAX_QUERIES:
        raise ValueError(f"q_nope must have s_q from 1 to {MAX_QUERIES}, got {s_q}.")
    for name, value, shape, dtype in (
        ("q_rope", q_rope, [batch, s_q, heads, QK_ROPE_HEAD_DIM], torch.bfloat16),
        ("q_scale", q_scale, [batch, s_q, heads], torch.float32),
        ("block_table", block_table, [batch, "max_pages"], torch.int32),
        ("cache_seqlens", cache_seqlens, [batch], torch.int32),
        ("out", out, [batch, s_q, heads, KV_LORA_RANK], torch.bfloat16),
        ("lse", lse, [batch, heads, s_q], torch.float32),
    ):
        check_tensor(name, value, shape=shape, dtype=dtype, like=q_nope)
    if schedule is not None:
        check_tensor("schedule", schedule, shape=["parts + 1", 2], dtype=torch.int32, like=q_nope)
        if schedule.shape[0] < 2:
            raise ValueError(f"schedule must have at least one part, got {schedule.shape[0] - 1}.")
    for name, value in (("out", out), ("lse", lse)):
        if not value.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(value.stride())}.")


def check_query(q: Tensor) -> None:
    """BF16 queries [..., heads, 576]."""
    check_tensor("q", q, shape=["...", "heads", QK_HEAD_DIM], dtype=torch.bfloat16)


def check_slots(name: str, slots: Tensor, like: Tensor) -> None:
    """A one-dimensional int64 or int32 tensor of cache slots."""
    check_tensor(name, slots, shape=["tokens"], dtype=(torch.int64, torch.int32), like=like)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
