"""The kernels' device code without a GPU: CUDA 12 compiles it, and its tensor core instructions are the right ones."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import nvrtc
import pytest
from test_kernels import KERNELS, NVCC

from snapmla import native

DEVICE_CODE = sorted(path.relative_to(KERNELS) for path in KERNELS.glob("sm90/*/*.cuh"))

INSTANCES = """
template __global__ void snapmla::quantize::append_kv_kernel<int>(
    const Tokens, const AsItIs, const int*, const snapmla_cache);
template __global__ void snapmla::quantize::append_kv_kernel<int64_t>(
    const Tokens, const NormAndRope<float, int64_t>, const int64_t*, const snapmla_cache);
template __global__ void snapmla::fetch::fetch_kv_kernel<int64_t>(
    const snapmla_cache, const int64_t*, int64_t, __nv_bfloat16*);
template __global__ void snapmla::decode::combine_kernel<1>(const __grid_constant__ Params);
template __global__ void snapmla::decode::combine_kernel<snapmla::decode::kManyGroups>(const __grid_constant__ Params);
template __global__ void snapmla::decode::decode_kernel<1>(
    const __grid_constant__ TensorMaps, const __grid_constant__ Params);
template __global__ void snapmla::decode::decode_kernel<2>(
    const __grid_constant__ TensorMaps, const __grid_constant__ Params);
"""
"""Templates are compiled where something asks for them."""

KERNEL_NAMES = (
    "quantize_q_kernel",
    "append_kv_kernel",
    "fetch_kv_kernel",
    "schedule_kernel",
    "decode_kernel",
    "combine_kernel",
)


@pytest.mark.skipif(nvrtc.find() is None, reason="needs NVRTC of CUDA 12 (cuda-tools.lock), found none")
def test_cuda_12_compiles_the_device_code():
    library, includes = nvrtc.find()
    source = "".join(f'#include "{path}"\n' for path in DEVICE_CODE) + INSTANCES
    cubin = nvrtc.compile_to_cubin(source, [KERNELS, *includes], library)
    for name in KERNEL_NAMES:
        assert name.encode() in cubin
    with pytest.raises(RuntimeError, match="this_is_no_code"):
        nvrtc.compile_to_cubin(source + "this_is_no_code;", [KERNELS, *includes], library)


def disassembler() -> dict[str, str] | None:
    """Environment in which `cuobjdump` runs and finds nvdisasm: from PATH, or from the packages of cuda-tools.lock."""
    spec = importlib.util.find_spec("nvidia")
    folders = (
        [str(Path(root) / "cu13" / "bin") for root in (spec.submodule_search_locations or [])] if spec else []
    )
    path = os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])
    found = all(shutil.which(name, path=path) for name in ("cuobjdump", "nvdisasm"))
    return {**os.environ, "PATH": path} if found else None


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    """Compiled here, once."""
    path = tmp_path_factory.mktemp("built") / "folder" / "kernels.so"
    subprocess.run([KERNELS / "build.sh", path], check=True, capture_output=True)
    return path


@pytest.mark.skipif(not NVCC, reason="needs nvcc, found none")
def test_library_builds_and_loads_without_a_gpu(library, monkeypatch):
    monkeypatch.setenv("SNAPMLA_LIBRARY", str(library))
    native.library.cache_clear()
    try:
        assert all(hasattr(native.library(), name) for name in native._SIGNATURES)
    finally:
        native.library.cache_clear()


@pytest.fixture(scope="module")
def sass(library) -> dict[str, str]:
    """Kernel name -> the SASS of all its instances."""
    done = subprocess.run(
        ["cuobjdump", "-sass", library], env=disassembler(), check=True, capture_output=True, text=True
    )
    parts = re.split(r"\n\s*Function : (\S+)", done.stdout)
    found: dict[str, str] = {}
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        kernel = next((n for n in KERNEL_NAMES if n in name), name)
        found[kernel] = found.get(kernel, "") + text
    return found


@pytest.mark.skipif(not NVCC or disassembler() is None, reason="needs nvcc, cuobjdump and nvdisasm")
class TestInstructions:
    def test_content_is_multiplied_in_fp8_and_rope_in_bf16(self, sass):
        """Two kernels (all of a row tile, or half of it), each with four copies of QK (two roles, two stages) and one PV loop."""
        decode = sass["decode_kernel"]
        used = Counter(re.findall(r"\b([QHI]GMMA\.\S+)", decode))
        pv = 4 * 128 // 32  # column tiles, steps of a block
        assert used == {
            "QGMMA.64x64x32.F32.E4M3.E4M3": 2 * 4 * 512 // 32 + pv,
            "QGMMA.64x32x32.F32.E4M3.E4M3": pv,
            "HGMMA.64x64x16.F32.BF16": 2 * 4 * 64 // 16,
        }

    def test_nothing_lies_in_local_memory(self, sass):
        for name, text in sass.items():
            assert not re.search(r"\b(LDL|STL)\b", text), name

    def test_loads_of_rows_are_wide(self, sass):
        for name in ("quantize_q_kernel", "append_kv_kernel"):
            assert "LDG.E.128" in sass[name]
