"""NVRTC of CUDA 12 by ctypes: device code to an sm_90a cubin, without a GPU."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

STANDARD_HEADERS = {
    "stdlib.h": "",
    "stdint.h": "#include <cstdint>\n",
    "cstdint": "#pragma once\n#include <cuda/std/cstdint>\nusing namespace cuda::std;\n",
    "type_traits": "#pragma once\n#include <cuda/std/type_traits>\nnamespace std { using namespace cuda::std; }\n",
}
"""What the C++ standard library is to NVRTC, which has none."""


def find() -> tuple[Path, list[Path]] | None:
    """NVRTC's library and the include folders of CUDA 12, from the packages nvidia-cuda-*-cu12; None without them."""
    spec = importlib.util.find_spec("nvidia")
    for root in map(Path, (spec.submodule_search_locations or []) if spec else []):
        libraries = sorted((root / "cuda_nvrtc" / "lib").glob("libnvrtc.so.12*"))
        includes = [root / "cuda_runtime" / "include", root / "cuda_cccl" / "include"]
        if libraries and all(folder.is_dir() for folder in includes):
            return libraries[0], includes
    return None


def compile_to_cubin(source: str, includes: list[Path], library: Path) -> bytes:
    """The cubin of `source` for sm_90a; RuntimeError with the compiler's log where it does not compile."""
    nvrtc = ctypes.CDLL(str(library))
    names, texts = zip(*STANDARD_HEADERS.items(), strict=True)
    program = ctypes.c_void_p()
    headers = [(ctypes.c_char_p * len(x))(*(t.encode() for t in x)) for x in (texts, names)]
    created = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernels.cu", len(names), *headers
    )
    assert created == 0, f"nvrtcCreateProgram: {created}"
    options = [
        "--gpu-architecture=sm_90a",
        "--std=c++17",
        "-default-device",
        *(f"--include-path={folder}" for folder in includes),
    ]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    error = nvrtc.nvrtcCompileProgram(program, len(options), given)
    log = _read(nvrtc, program, "ProgramLog").decode(errors="replace")
    if error:
        raise RuntimeError(log)
    return _read(nvrtc, program, "CUBIN")


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw.rstrip(b"\0") if what == "ProgramLog" else buffer.raw
