"""What can be said of the CUDA kernels without a GPU: they build, their constants and interface are Python's."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

from snapmla import layout, native, quantization
from snapmla.experiments import kernels
from snapmla.reference.emulated import DROP_BITS, KEEP_BITS
from snapmla.schedule import BLOCK_KEYS, COMBINED_PARTS, CUT_COST, ROW_TILE, SEQUENCE_COST

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
NVCC = subprocess.run(
    [KERNELS / "build.sh", "--nvcc"], capture_output=True, text=True, check=False
).stdout.strip()


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
    assert int(found["kBlockPages"]) * layout.PAGE_SIZE == BLOCK_KEYS
    assert int(found["kSequenceCost"]) == SEQUENCE_COST
    assert int(found["kCombinedParts"]) == COMBINED_PARTS
    assert int(found["kCutCost"]) == CUT_COST


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


class TestTheWorkflowsStep:
    """snapmla.experiments.kernels: built, prebuilt or not run, and never silently wrong."""

    def test_without_a_compiler_the_packages_library_is_taken(self, tmp_path, monkeypatch):
        packaged = tmp_path / "packaged.so"
        packaged.write_bytes(b"a library")
        monkeypatch.setattr(native, "LIBRARY", packaged)
        (tmp_path / "out").mkdir()
        row = kernels.build(tmp_path / "out", "no-such-nvcc")
        assert row["status"] == "prebuilt" and "needs nvcc" in row["reason"] and row["bytes"] == 9
        assert (tmp_path / "out" / "packaged.so").read_bytes() == b"a library"

    def test_without_either_it_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setattr(native, "LIBRARY", tmp_path / "none.so")
        row = kernels.build(tmp_path, "no-such-nvcc")
        assert row["status"] == "not run" and row["reason"].endswith("set NVCC.") and row["sha256"] is None
        assert not list(tmp_path.iterdir())

    def test_code_that_does_not_compile_stops_the_workflow(self, tmp_path):
        broken = tmp_path / "nvcc"
        broken.write_text("#!/bin/sh\necho 'error: no code' >&2; exit 1\n")
        broken.chmod(0o755)
        with pytest.raises(RuntimeError, match=r"build.sh failed:\n.*error: no code"):
            kernels.build(tmp_path, str(broken))


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
