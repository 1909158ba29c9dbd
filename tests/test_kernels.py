"""What can be said of the CUDA kernels without a GPU: they build, their constants and interface are Python's."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from snapmla import layout, native, quantization
from snapmla.reference.emulated import DROP_BITS, KEEP_BITS
from snapmla.schedule import ROW_TILE, SEQUENCE_COST

KERNELS = Path(__file__).resolve().parents[1] / "kernels"


def constants(header: str) -> dict[str, str]:
    """constexpr name -> its expression."""
    return dict(re.findall(r"constexpr \w+ (k\w+) = ([^;]+);", (KERNELS / header).read_text()))


def test_layout_is_the_librarys():
    found = constants("common/layout.cuh")
    assert found.pop("kQkHeadDim") == "kKvLoraRank + kQkRopeHeadDim"
    assert {name: int(value) for name, value in found.items()} == {
        "kKvLoraRank": layout.KV_LORA_RANK,
        "kQkRopeHeadDim": layout.QK_ROPE_HEAD_DIM,
        "kPageSize": layout.PAGE_SIZE,
    }


def test_quantization_rule_is_the_librarys():
    found = constants("common/quantize.cuh")
    assert float(found["kE4m3Max"].rstrip("f")) == quantization.E4M3_MAX
    assert float.fromhex(found["kScaleFloor"].rstrip("f")) == quantization.SCALE_FLOOR


def test_decode_rules_are_the_librarys():
    found = constants("sm90/decode/config.cuh")
    assert float(found["kKeepBits"].rstrip("f")) == KEEP_BITS
    assert float(found["kDropBits"].rstrip("f")) == DROP_BITS
    assert int(found["kRowTile"]) == ROW_TILE
    assert int(found["kSequenceCost"]) == SEQUENCE_COST


def test_interface_is_the_headers():
    header = re.sub(r"//[^\n]*", "", (KERNELS / "snapmla.h").read_text())
    functions = {name: args.split(",") for name, args in re.findall(r"int (snapmla_\w+)\(([^)]*)\)", header)}
    structures = {
        "snapmla_cache": native._Cache,
        "snapmla_norm_rope": native._NormRope,
        "snapmla_query": native._Query,
        "snapmla_batch": native._Batch,
        "snapmla_split": native._Split,
    }
    kinds = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "double": ctypes.c_double, **structures}
    declared = {
        name: [ctypes.c_void_p if "*" in argument else kinds[argument.split()[0]] for argument in arguments]
        for name, arguments in functions.items()
    }
    assert declared == native._SIGNATURES
    for name, structure in structures.items():
        fields = re.search(rf"struct {name} {{(.*?)}}", header, re.DOTALL).group(1)
        assert re.findall(r"(\w+)(?=[,;])", fields) == [field for field, _ in structure._fields_]


@pytest.mark.skipif(not (os.environ.get("NVCC") or shutil.which("nvcc")), reason="needs nvcc, found none")
def test_library_builds_and_loads_without_a_gpu(tmp_path, monkeypatch):
    library = tmp_path / "folder" / "kernels.so"
    subprocess.run([KERNELS / "build.sh", library], check=True, capture_output=True)
    monkeypatch.setenv("SNAPMLA_LIBRARY", str(library))
    native.library.cache_clear()
    try:
        assert all(hasattr(native.library(), name) for name in native._SIGNATURES)
    finally:
        native.library.cache_clear()


def test_a_missing_library_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPMLA_LIBRARY", str(tmp_path / "none.so"))
    native.library.cache_clear()
    with pytest.raises(
        RuntimeError, match=r"CUDA kernels are not built: expected none.so, made by `make kernels`"
    ):
        native.library()


def test_a_build_without_a_compiler_is_one_sentence(tmp_path):
    done = subprocess.run(
        [KERNELS / "build.sh", tmp_path / "x.so"],
        env={**os.environ, "NVCC": "no-such-nvcc"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "needs nvcc" in done.stderr
    assert not list(tmp_path.iterdir())
