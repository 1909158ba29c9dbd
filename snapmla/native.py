"""The CUDA kernels' library (kernels/snapmla.h), called through its C interface.

`kernels/build.sh` (or `make kernels`) builds it; it depends on no version of Python or torch. It is loaded at the first
call on a CUDA tensor, and a machine without it, or without a Hopper GPU, is told so in one sentence.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch
from torch import Tensor

from snapmla.quantization import Quantized
from snapmla.schedule import ROW_TILE, parts_for, row_tiles

LIBRARY = Path(__file__).parent / "lib" / "libsnapmla_sm90.so"
"""Where the build puts the library; the environment variable SNAPMLA_LIBRARY names another."""

_pointer, _size, _int, _double = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double


class _Cache(ctypes.Structure):
    """`struct snapmla_cache`."""

    _fields_ = [
        ("content", _pointer),
        ("rope", _pointer),
        ("scale", _pointer),
        ("content_stride", _size),
        ("rope_stride", _size),
        ("scale_stride", _size),
        ("pages", _size),
    ]


class _NormRope(ctypes.Structure):
    """`struct snapmla_norm_rope`."""

    _fields_ = [
        ("weight", _pointer),
        ("cos_sin", _pointer),
        ("positions", _pointer),
        ("cos_sin_is_float32", _int),
        ("positions_are_int32", _int),
        ("interleaved", _int),
        ("epsilon", ctypes.c_float),
    ]


class _Query(ctypes.Structure):
    """`struct snapmla_query`."""

    _fields_ = [
        ("content", _pointer),
        ("rope", _pointer),
        ("scale", _pointer),
        ("s_q", _size),
        ("heads", _size),
    ]


class _Batch(ctypes.Structure):
    """`struct snapmla_batch`."""

    _fields_ = [
        ("block_table", _pointer),
        ("cache_seqlens", _pointer),
        ("size", _size),
        ("max_pages", _size),
        ("block_table_stride", _size),
    ]


class _Split(ctypes.Structure):
    """`struct snapmla_split`."""

    _fields_ = [
        ("boundaries", _pointer),
        ("partial_out", _pointer),
        ("partial_lse", _pointer),
        ("parts", _size),
    ]


_SIGNATURES = {
    "snapmla_quantize_q": [
        _pointer,
        _size,
        _size,
        _pointer,
        _size,
        _size,
        *[_pointer] * 3,
        _size,
        _size,
        _pointer,
    ],
    "snapmla_append_kv": [_pointer, _size, _pointer, _size, _pointer, _int, _size, _Cache, _pointer],
    "snapmla_norm_rope_append_kv": [
        *[_pointer, _size, _pointer, _size],
        _NormRope,
        *[_pointer, _int, _size, _Cache, _pointer],
    ],
    "snapmla_fetch_kv": [_Cache, _pointer, _int, _size, _pointer, _pointer],
    "snapmla_decode_schedule": [_pointer, _size, _size, _size, _pointer, _pointer],
    "snapmla_mla_decode": [_Query, _Cache, _Batch, _Split, _double, _int, _pointer, _pointer, _pointer],
}


def library_path() -> Path:
    """Where the library is, or would be."""
    return Path(os.environ.get("SNAPMLA_LIBRARY") or LIBRARY)


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises RuntimeError where it is not built."""
    path = library_path()
    if not path.is_file():
        raise RuntimeError(
            f"snapmla's CUDA kernels are not built: expected {path.name}, made by `make kernels`, found none."
        )
    loaded = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        getattr(loaded, name).argtypes = arguments
    return loaded


@functools.cache
def _check_device(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        raise RuntimeError(
            f"snapmla's kernels need a Hopper GPU (compute capability 9.0), got {torch.cuda.get_device_name(device)} "
            f"({capability[0]}.{capability[1]})."
        )


def quantize_q(q_content: Tensor, q_rope: Tensor, content: Tensor, rope: Tensor, scale: Tensor) -> None:
    """Fused-Q-Quant of q_content [tokens, heads, 512] and q_rope [tokens, heads, 64] into contiguous results."""
    _check_aligned("q_content", q_content)
    _check_aligned("q_rope", q_rope, 4)
    tokens, heads, _ = q_content.shape
    strides = [q_content.stride(0), q_content.stride(1)], [q_rope.stride(0), q_rope.stride(1)]
    results = (x.data_ptr() for x in (content, rope, scale))
    _launch(
        "snapmla_quantize_q",
        q_content,
        q_content.data_ptr(),
        *strides[0],
        q_rope.data_ptr(),
        *strides[1],
        *results,
        tokens,
        heads,
    )


def append_kv(content: Tensor, rope: Tensor, slots: Tensor, *planes: Tensor) -> None:
    """Fused-K-Append of content [tokens, 512] and rope [tokens, 64] to their slots."""
    _launch("snapmla_append_kv", content, *_tokens(content, rope), *_slots(slots), _cache(*planes))


def norm_rope_append_kv(
    content: Tensor,
    rope: Tensor,
    slots: Tensor,
    before: tuple[Tensor, Tensor, Tensor, float, bool],
    *planes: Tensor,
) -> None:
    """The same after RMSNorm and rotary embedding; `before`: weight, cos_sin, positions, epsilon, interleaved."""
    weight, cos_sin, positions, epsilon, interleaved = before
    rows = _tokens(content, rope)
    _check_aligned("norm_weight", weight)
    positions = positions.contiguous()
    kinds = cos_sin.dtype == torch.float32, positions.dtype == torch.int32, interleaved, epsilon
    norm_rope = _NormRope(weight.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(), *kinds)
    _launch("snapmla_norm_rope_append_kv", content, *rows, norm_rope, *_slots(slots), _cache(*planes))


def fetch_kv(planes: tuple[Tensor, Tensor, Tensor], slots: Tensor, out: Tensor) -> None:
    """Fused-Fetch-Dequant of slots into out, bfloat16 [tokens, 576], contiguous."""
    _launch("snapmla_fetch_kv", out, _cache(*planes), *_slots(slots), out.data_ptr())


def decode_schedule(cache_seqlens: Tensor, max_pages: int, parts: int) -> Tensor:
    """`snapmla.schedule.boundaries` on the GPU."""
    cache_seqlens = cache_seqlens.contiguous()
    result = cache_seqlens.new_empty(parts + 1, 2)
    arguments = cache_seqlens.data_ptr(), cache_seqlens.shape[0], max_pages, parts, result.data_ptr()
    _launch("snapmla_decode_schedule", cache_seqlens, *arguments)
    return result


def mla_decode(
    query: Quantized,
    planes: tuple[Tensor, Tensor, Tensor],
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor,
    schedule: Tensor | None = None,
) -> None:
    """Schedule (where none is given), decode and combine, into out and lse."""
    batch, s_q, heads, _ = out.shape
    if batch == 0:
        return
    if planes[0].shape[0] == 0 or block_table.shape[1] == 0:  # no token anywhere
        out.zero_()
        lse.fill_(torch.inf)
        return
    cache = _cache(*planes, rope_alignment=16)
    _check_aligned("scale_cache", planes[2])
    query = Quantized(*(x.contiguous() for x in query))
    for name, x in (("q_nope", query.content), ("q_rope", query.rope), ("out", out)):
        _check_aligned(name, x)
    cache_seqlens = cache_seqlens.contiguous()
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    if schedule is None:
        multiprocessors = torch.cuda.get_device_properties(out.device).multi_processor_count
        parts = parts_for(multiprocessors, s_q * heads)
        schedule = decode_schedule(cache_seqlens, block_table.shape[1], parts)
    schedule = schedule.contiguous()
    parts = schedule.shape[0] - 1
    # Two results a part at most: of the sequence that it goes on with, and of the one that it leaves unfinished.
    slots = row_tiles(s_q * heads), 2 * parts, ROW_TILE
    partial_out = lse.new_empty(*slots, out.shape[-1])
    partial_lse = lse.new_empty(slots)
    _launch(
        "snapmla_mla_decode",
        out,
        _Query(*(x.data_ptr() for x in query), s_q, heads),
        cache,
        _Batch(
            block_table.data_ptr(),
            cache_seqlens.data_ptr(),
            batch,
            block_table.shape[1],
            block_table.stride(0),
        ),
        _Split(schedule.data_ptr(), partial_out.data_ptr(), partial_lse.data_ptr(), parts),
        softmax_scale,
        causal,
        out.data_ptr(),
        lse.data_ptr(),
    )


def _launch(name: str, like: Tensor, *arguments: object) -> None:
    """Call a function of the library on the device and the current stream of `like`."""
    _check_device(like.device)
    with torch.cuda.device(like.device):
        error = getattr(library(), name)(*arguments, torch.cuda.current_stream().cuda_stream)
    if error:
        raise RuntimeError(f"{name} failed to launch with CUDA error {error}.")


def _tokens(content: Tensor, rope: Tensor) -> tuple[int, int, int, int]:
    _check_aligned("content", content)
    _check_aligned("rope", rope, 4)
    return content.data_ptr(), content.stride(0), rope.data_ptr(), rope.stride(0)


def _slots(slots: Tensor) -> tuple[int, bool, int]:
    slots = slots.contiguous()
    return slots.data_ptr(), slots.dtype == torch.int32, slots.shape[0]


def _cache(content: Tensor, rope: Tensor, scale: Tensor, rope_alignment: int = 4) -> _Cache:
    planes = content, rope, scale
    for name, plane in zip(("content_cache", "rope_cache", "scale_cache"), planes, strict=True):
        if plane.shape[0] and not plane[0].is_contiguous():
            raise ValueError(f"{name} must have contiguous pages, got strides {list(plane.stride())}.")
    _check_aligned("content_cache", content)
    _check_aligned("rope_cache", rope, rope_alignment)
    return _Cache(*(p.data_ptr() for p in planes), *(p.stride(0) for p in planes), content.shape[0])


def _check_aligned(name: str, x: Tensor, size: int = 16) -> None:
    """Rows are read and written in pieces of `size` bytes: 16, and 4 for a RoPE part."""
    step = size // x.element_size()
    if x.data_ptr() % size or any(
        s % step for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1
    ):
        raise ValueError(f"{name} must have rows aligned to {size} bytes, got strides {list(x.stride())}.")
