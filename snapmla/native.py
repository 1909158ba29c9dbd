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

LIBRARY = Path(__file__).parent / "lib" / "libsnapmla_sm90.so"
"""Where the build puts the library; the environment variable SNAPMLA_LIBRARY names another."""

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


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
    "snapmla_fetch_kv": [_Cache, _pointer, _int, _size, _pointer, _pointer],
}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises RuntimeError where it is not built."""
    path = Path(os.environ.get("SNAPMLA_LIBRARY") or LIBRARY)
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
    _check_aligned("content", content)
    _check_aligned("rope", rope, 4)
    rows = content.data_ptr(), content.stride(0), rope.data_ptr(), rope.stride(0)
    _launch("snapmla_append_kv", content, *rows, *_slots(slots), _cache(*planes))


def fetch_kv(planes: tuple[Tensor, Tensor, Tensor], slots: Tensor, out: Tensor) -> None:
    """Fused-Fetch-Dequant of slots into out, bfloat16 [tokens, 576], contiguous."""
    _launch("snapmla_fetch_kv", out, _cache(*planes), *_slots(slots), out.data_ptr())


def _launch(name: str, like: Tensor, *arguments: object) -> None:
    """Call a function of the library on the device and the current stream of `like`."""
    _check_device(like.device)
    with torch.cuda.device(like.device):
        error = getattr(library(), name)(*arguments, torch.cuda.current_stream().cuda_stream)
    if error:
        raise RuntimeError(f"{name} failed to launch with CUDA error {error}.")


def _slots(slots: Tensor) -> tuple[int, bool, int]:
    slots = slots.contiguous()
    return slots.data_ptr(), slots.dtype == torch.int32, slots.shape[0]


def _cache(content: Tensor, rope: Tensor, scale: Tensor) -> _Cache:
    planes = content, rope, scale
    for name, plane in zip(("content_cache", "rope_cache", "scale_cache"), planes, strict=True):
        if plane.shape[0] and not plane[0].is_contiguous():
            raise ValueError(f"{name} must have contiguous pages, got strides {list(plane.stride())}.")
    _check_aligned("content_cache", content)
    _check_aligned("rope_cache", rope, 4)
    return _Cache(*(p.data_ptr() for p in planes), *(p.stride(0) for p in planes), content.shape[0])


def _check_aligned(name: str, x: Tensor, size: int = 16) -> None:
    """Rows are read and written in pieces of `size` bytes: 16, and 4 for a RoPE part."""
    step = size // x.element_size()
    if x.data_ptr() % size or any(
        s % step for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1
    ):
        raise ValueError(f"{name} must have rows aligned to {size} bytes, got strides {list(x.stride())}.")
