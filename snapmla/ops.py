"""The operators `torch.ops.snapmla.*`: schemas, argument checks, CPU implementations and fake
implementations.

| operator | what it does (paper's name) |
|---|---|
| `quantize_q` | BF16 queries -> e4m3 content, aligned BF16 RoPE, scale (Fused-Q-Quant) |
| `append_kv`, `append_kv_buffer` | quantize new tokens and write them to their cache slots (Fused-K-Append) |
| `norm_rope_append_kv`, `norm_rope_append_kv_buffer` | the same after RMSNorm and rotary embedding |
| `fetch_kv` | gather slots and dequantize them to BF16 (Fused-Fetch-Dequant) |
| `decode_schedule` | how a decode call is split over the GPU (tile scheduler metadata) |
| `mla_decode` | attention of quantized queries over the paged cache |

CPU tensors go to the emulation, which rounds exactly where the FP8 kernels do; CUDA tensors on a Hopper GPU to
the kernels (`snapmla.native`). `snapmla.cache.LatentCache` and `snapmla.decode` are the comfortable way in.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from snapmla import native
from snapmla.checks import check_cache, check_decode, check_query_parts, check_slots, check_tensor
from snapmla.layout import (
    KV_LORA_RANK,
    PAGE_BYTES,
    PAGE_SIZE,
    QK_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    ROPE_OFFSET,
    SCALE_OFFSET,
)
from snapmla.norm_rope import check_norm_rope, rms_norm, rotate
from snapmla.quantization import E4M3, Quantized, dequantize, quantize_key, quantize_query
from snapmla.reference.paged import cuts_of, emulated_sequence, stored_tokens
from snapmla.schedule import boundaries


@custom_op("snapmla::quantize_q", mutates_args=(), device_types="cpu")
def quantize_q(q_content: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize BF16 queries [..., heads, 512] and [..., heads, 64]: e4m3 content, aligned BF16 RoPE, float32
    scale [..., heads]."""
    check_query_parts(q_content, q_rope)
    content, rope, scale = quantize_query(q_content, q_rope)
    return content, rope, scale.contiguous()


@quantize_q.register_fake
def _(q_content: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_query_parts(q_content, q_rope)
    return _empty_query(q_content, q_rope)


def _empty_query(q_content: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `quantize_q`, not yet written."""
    return (
        q_content.new_empty(q_content.shape, dtype=E4M3),
        q_rope.new_empty(q_rope.shape),
        q_content.new_empty(q_content.shape[:-1], dtype=torch.float32),
    )


@custom_op(
    "snapmla::append_kv", mutates_args=("content_cache", "rope_cache", "scale_cache"), device_types="cpu"
)
def append_kv(
    content: Tensor,
    rope: Tensor,
    slot_mapping: Tensor,
    content_cache: Tensor,
    rope_cache: Tensor,
    scale_cache: Tensor,
) -> None:
    """Quantize tokens (content [tokens, 512], rope [tokens, 64], BF16) and write token i to slot
    `slot_mapping[i]`; negative: skip.

    The planes are separate tensors; for planes of one buffer take `append_kv_buffer` (torch.compile cannot
    follow a mutation of views with different dtypes).
    """
    _append(content, rope, slot_mapping, content_cache, rope_cache, scale_cache)


@custom_op("snapmla::append_kv_buffer", mutates_args=("buffer",), device_types="cpu")
def append_kv_buffer(content: Tensor, rope: Tensor, slot_mapping: Tensor, buffer: Tensor) -> None:
    """`append_kv` for a cache in one buffer, uint8 [pages, 41216]."""
    _append(content, rope, slot_mapping, *split_planes(buffer))


def split_planes(buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The planes of a cache buffer (uint8 [pages, 41216], contiguous) as views: content, rope, scale
    (layout.py)."""
    check_tensor("buffer", buffer, shape=["pages", PAGE_BYTES], dtype=torch.uint8)
    if not buffer.is_contiguous():
        raise ValueError(f"buffer must be contiguous, got strides {list(buffer.stride())}.")
    content, rope, scale = (
        buffer[:, :ROPE_OFFSET],
        buffer[:, ROPE_OFFSET:SCALE_OFFSET],
        buffer[:, SCALE_OFFSET:],
    )
    return (
        content.view(E4M3).unflatten(1, (PAGE_SIZE, KV_LORA_RANK)),
        rope.view(torch.bfloat16).unflatten(1, (PAGE_SIZE, QK_ROPE_HEAD_DIM)),
        scale.view(torch.float32),
    )


def _append(
    content: Tensor,
    rope: Tensor,
    slot_mapping: Tensor,
    content_cache: Tensor,
    rope_cache: Tensor,
    scale_cache: Tensor,
) -> None:
    _check_append(content, rope, slot_mapping, content_cache, rope_cache, scale_cache)
    _check_slot_range("slot_mapping", slot_mapping, content_cache)
    keep = slot_mapping >= 0
    slots = slot_mapping[keep].long()
    quantized = quantize_key(content[keep], rope[keep])
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
    content_cache.view(torch.uint8)[page, offset] = quantized.content.view(
        torch.uint8
    )  # index_put has no e4m3
    rope_cache[page, offset] = quantized.rope
    scale_cache[page, offset] = quantized.scale


@custom_op(
    "snapmla::norm_rope_append_kv",
    mutates_args=("content_cache", "rope_cache", "scale_cache"),
    device_types="cpu",
)
def norm_rope_append_kv(
    content: Tensor,
    rope: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    epsilon: float,
    interleaved: bool,
    content_cache: Tensor,
    rope_cache: Tensor,
    scale_cache: Tensor,
) -> None:
    """`append_kv` of tokens that have had neither RMSNorm (norm_weight [512], BF16) nor rotary embedding (cos_sin
    [.., 64], positions [tokens]); `snapmla.norm_rope` has the roundings."""
    before = norm_weight, cos_sin, positions, epsilon, interleaved
    _check_norm_rope_append(content, rope, slot_mapping, *before, content_cache, rope_cache, scale_cache)
    turns = cos_sin[positions.long().where(slot_mapping >= 0, 0)]  # a skipped token's position is not read
    content, rope = rms_norm(content, norm_weight, epsilon), rotate(rope, turns, interleaved)
    _append(content, rope, slot_mapping, content_cache, rope_cache, scale_cache)


@custom_op("snapmla::norm_rope_append_kv_buffer", mutates_args=("buffer",), device_types="cpu")
def norm_rope_append_kv_buffer(
    content: Tensor,
    rope: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    epsilon: float,
    interleaved: bool,
    buffer: Tensor,
) -> None:
    """`norm_rope_append_kv` for a cache in one buffer, uint8 [pages, 41216]."""
    before = norm_weight, cos_sin, positions, epsilon, interleaved
    norm_rope_append_kv(content, rope, slot_mapping, *before, *split_planes(buffer))


@custom_op("snapmla::fetch_kv", mutates_args=(), device_types="cpu")
def fetch_kv(content_cache: Tensor, rope_cache: Tensor, scale_cache: Tensor, slots: Tensor) -> Tensor:
    """Gather cache slots and dequantize them: BF16 [tokens, 576]; a negative slot gives a row of zeros."""
    check_cache(content_cache, rope_cache, scale_cache)
    check_slots("slots", slots, content_cache)
    _check_slot_range("slots", slots, content_cache)
    keep = slots >= 0
    index = slots[keep].long()
    page, offset = index // PAGE_SIZE, index % PAGE_SIZE
    content = content_cache.view(torch.uint8)[page, offset].view(E4M3)
    out = rope_cache.new_zeros(slots.shape[0], QK_HEAD_DIM)
    out[keep] = dequantize(Quantized(content, rope_cache[page, offset], scale_cache[page, offset])).bfloat16()
    return out


@fetch_kv.register_fake
def _(content_cache: Tensor, rope_cache: Tensor, scale_cache: Tensor, slots: Tensor) -> Tensor:
    check_cache(content_cache, rope_cache, scale_cache)
    check_slots("slots", slots, content_cache)
    return rope_cache.new_empty(slots.shape[0], QK_HEAD_DIM)


@custom_op("snapmla::decode_schedule", mutates_args=(), device_types="cpu")
def decode_schedule(cache_seqlens: Tensor, max_pages: int, parts: int) -> Tensor:
    """Cut sequences of these lengths (int32 [batch]) into `parts` parts of like cost: int32 [parts + 1, 2]
    (`snapmla.schedule.boundaries`)."""
    _check_schedule(cache_seqlens, max_pages, parts)
    return boundaries(cache_seqlens, max_pages, parts)


@decode_schedule.register_fake
def _(cache_seqlens: Tensor, max_pages: int, parts: int) -> Tensor:
    _check_schedule(cache_seqlens, max_pages, parts)
    return cache_seqlens.new_empty(parts + 1, 2)


def _check_schedule(cache_seqlens: Tensor, max_pages: int, parts: int) -> None:
    check_tensor("cache_seqlens", cache_seqlens, shape=["batch"], dtype=torch.int32)
    for name, value, least in (("max_pages", max_pages, 0), ("parts", parts, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")


@custom_op("snapmla::mla_decode", mutates_args=("out", "lse"), device_types="cpu")
def mla_decode(
    q_nope: Tensor,
    q_rope: Tensor,
    q_scale: Tensor,
    content_cache: Tensor,
    rope_cache: Tensor,
    scale_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor,
    schedule: Tensor | None = None,
) -> None:
    """Decode attention over the paged cache into out and lse; see `snapmla.decode.mla_decode_quantized`.

    One emulated attention per sequence, on the tokens that its pages hold and no others, cut where the schedule says.
    """
    query, planes = (q_nope, q_rope, q_scale), (content_cache, rope_cache, scale_cache)
    paging = block_table, cache_seqlens
    _check_mla_decode(*query, *planes, *paging, softmax_scale, causal, out, lse, schedule)
    pages, capacity = content_cache.shape[0], block_table.shape[1] * PAGE_SIZE
    for i, length in enumerate(cache_seqlens.tolist()):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"cache_seqlens[{i}] must lie between 0 and the {capacity} tokens of block_table, got {length}."
            )
        used = block_table[i, : -(-length // PAGE_SIZE)].long()
        if length and not 0 <= int(used.min()) <= int(used.max()) < pages:
            raise ValueError(f"block_table[{i}] must hold pages from 0 to {pages - 1}, got {used.tolist()}.")
        key = stored_tokens(planes, used, length)
        cuts = [] if schedule is None else cuts_of(schedule, i, length)
        out_i, lse_i = emulated_sequence(Quantized(*(x[i] for x in query)), key, softmax_scale, causal, cuts)
        out[i] = out_i.bfloat16()
        lse[i] = lse_i.T


def _check_append(content: Tensor, rope: Tensor, slot_mapping: Tensor, *cache: Tensor) -> None:
    check_tensor("content", content, shape=["tokens", KV_LORA_RANK], dtype=torch.bfloat16)
    check_tensor("rope", rope, shape=[content.shape[0], QK_ROPE_HEAD_DIM], dtype=torch.bfloat16, like=content)
    check_slots("slot_mapping", slot_mapping, content)
    if slot_mapping.shape[0] != content.shape[0]:
        raise ValueError(
            f"slot_mapping must have {content.shape[0]} entries, one per token, got {slot_mapping.shape[0]}."
        )
    check_cache(*cache)


def _check_norm_rope_append(
    content: Tensor,
    rope: Tensor,
    slot_mapping: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    epsilon: float,
    interleaved: bool,
    *cache: Tensor,
) -> None:
    _check_append(content, rope, slot_mapping, *cache)
    check_norm_rope(content, norm_weight, cos_sin, positions)


def _check_mla_decode(
    q_nope: Tensor,
    q_rope: Tensor,
    q_scale: Tensor,
    content_cache: Tensor,
    rope_cache: Tensor,
    scale_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor,
    schedule: Tensor | None = None,
) -> None:
    check_cache(content_cache, rope_cache, scale_cache)
    check_decode(q_nope, q_rope, q_scale, block_table, cache_seqlens, out, lse, schedule)


# An operator that only writes into its arguments returns nothing: its fake implementation is its checks.
append_kv.register_fake(_check_append)
norm_rope_append_kv.register_fake(_check_norm_rope_append)
mla_decode.register_fake(_check_mla_decode)


@append_kv_buffer.register_fake
def _(content: Tensor, rope: Tensor, slot_mapping: Tensor, buffer: Tensor) -> None:
    _check_append(content, rope, slot_mapping, *split_planes(buffer))


@norm_rope_append_kv_buffer.register_fake
def _(*arguments: object) -> None:
    *given, buffer = arguments
    _check_norm_rope_append(*given, *split_planes(buffer))


def _check_slot_range(name: str, slots: Tensor, content_cache: Tensor) -> None:
    capacity = content_cache.shape[0] * PAGE_SIZE
    if slots.numel() and int(slots.max()) >= capacity:
        raise IndexError(f"{name} must be below the cache's {capacity} slots, got {int(slots.max())}.")


@quantize_q.register_kernel("cuda")
def _(q_content: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_query_parts(q_content, q_rope)
    results = _empty_query(q_content, q_rope)
    # reshape copies only where the strides of the leading dimensions do not collapse
    rows = (x.reshape(-1, *x.shape[-2:]) for x in (q_content, q_rope))
    native.quantize_q(*rows, *results)
    return results


@append_kv.register_kernel("cuda")
def _append_on_gpu(content: Tensor, rope: Tensor, slot_mapping: Tensor, *planes: Tensor) -> None:
    _check_append(content, rope, slot_mapping, *planes)
    native.append_kv(content, rope, slot_mapping, *planes)


@append_kv_buffer.register_kernel("cuda")
def _(content: Tensor, rope: Tensor, slot_mapping: Tensor, buffer: Tensor) -> None:
    _append_on_gpu(content, rope, slot_mapping, *split_planes(buffer))


@norm_rope_append_kv.register_kernel("cuda")
def _norm_rope_append_on_gpu(*arguments: object) -> None:
    _check_norm_rope_append(*arguments)
    tokens, before, planes = arguments[:3], arguments[3:-3], arguments[-3:]
    native.norm_rope_append_kv(*tokens, before, *planes)


@norm_rope_append_kv_buffer.register_kernel("cuda")
def _(*arguments: object) -> None:
    *given, buffer = arguments
    _norm_rope_append_on_gpu(*given, *split_planes(buffer))


@fetch_kv.register_kernel("cuda")
def _(content_cache: Tensor, rope_cache: Tensor, scale_cache: Tensor, slots: Tensor) -> Tensor:
    check_cache(content_cache, rope_cache, scale_cache)
    check_slots("slots", slots, content_cache)
    out = rope_cache.new_empty(slots.shape[0], QK_HEAD_DIM)
    native.fetch_kv((content_cache, rope_cache, scale_cache), slots, out)
    return out


@decode_schedule.register_kernel("cuda")
def _(cache_seqlens: Tensor, max_pages: int, parts: int) -> Tensor:
    _check_schedule(cache_seqlens, max_pages, parts)
    return native.decode_schedule(cache_seqlens, max_pages, parts)


@mla_decode.register_kernel("cuda")
def _decode_on_gpu(*arguments: object) -> None:
    _check_mla_decode(*arguments)
    query, planes, rest = Quantized(*arguments[:3]), arguments[3:6], arguments[6:]
    native.mla_decode(query, planes, *rest)
