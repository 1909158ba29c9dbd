"""The preflight: each fault with its advice, and none where there is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from snapmla import preflight
from snapmla.bench import machine

H200 = {"name": "NVIDIA H200", "driver_version": "580.95.05", "compute_cap": "9.0", "memory.free": "142000"}
GOOD = preflight.Facts(
    unwritable=None, disk_gb=50.0, memory_gb=64.0, gpu=H200, cuda="13.0", cuda_works=True, others=0, no_kernels=None
)


def faults(facts: preflight.Facts, **options: bool) -> dict[str, str]:
    return {finding.what: finding.fault for finding in preflight.findings(facts, **options) if finding.fault}


def test_a_machine_that_measures_has_no_fault() -> None:
    told = [(finding.what, finding.value) for finding in preflight.findings(GOOD, gpu_wanted=True)]
    assert told == [
        ("results folder", "50 GB free"), ("memory", "64 GB free"), ("GPU", "NVIDIA H200"), ("driver", "580.95.05, torch for CUDA 13.0"),
        ("GPU memory", "149 GB free"), ("other processes on it", "0"), ("kernels", "loaded"),
    ]  # fmt: skip
    assert not faults(GOOD, gpu_wanted=True)


@pytest.mark.parametrize(
    ("change", "what", "advice"),
    [
        ({"unwritable": "Permission denied"}, "results folder", "Permission denied: choose another by SNAPMLA_RESULTS"),
        ({"disk_gb": 4.0}, "results folder", "needs 5 GB"),
        ({"memory_gb": 7.0}, "memory", "SIZE=short"),
        ({"gpu": None}, "GPU", "--gpus all"),
        ({"gpu": H200 | {"name": "NVIDIA A100", "compute_cap": "8.0"}}, "GPU", "NVIDIA A100 has 8.0"),
        ({"cuda": None, "cuda_works": False}, "driver", "build for CPUs"),
        ({"gpu": H200 | {"driver_version": "535.1"}, "cuda_works": False}, "driver", "needs driver 580 or newer, got 535.1"),
        ({"gpu": H200 | {"driver_version": "470.82"}, "cuda": "12.8", "cuda_works": False}, "driver", "needs driver 525"),
        ({"cuda_works": False}, "driver", "CUDA_VISIBLE_DEVICES may hide it"),
        ({"gpu": H200 | {"memory.free": "4000"}}, "GPU memory", "needs 8 GB"),
        ({"others": 2}, "other processes on it", "end them"),
    ],
)
def test_each_fault_has_its_advice(change: dict, what: str, advice: str) -> None:
    found = faults(dataclasses.replace(GOOD, **change), gpu_wanted=True)
    assert list(found) == [what] and advice in found[what]


def test_what_is_no_fault() -> None:
    """No Hopper GPU unless it is wanted; while the workflow runs, what it occupies itself."""
    for gpu in (None, H200 | {"compute_cap": "8.0"}):
        assert not faults(dataclasses.replace(GOOD, gpu=gpu))
    busy = dataclasses.replace(GOOD, memory_gb=1.0, gpu=H200 | {"memory.free": "10"}, others=1)
    assert len(faults(busy)) == 3 and not faults(busy, running=True)
    assert not faults(dataclasses.replace(GOOD, no_kernels="not built"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "query", lambda *fields: None)
    results = tmp_path / "new"
    assert preflight.main(["--results", str(results), "--running"]) == 0
    assert "ok    results folder: " in capsys.readouterr().out and list(results.iterdir()) == []
    assert preflight.main(["--results", str(results), "--gpu"]) == 1
    assert "FAULT GPU: none" in capsys.readouterr().out
    (tmp_path / "file").touch()
    assert preflight.main(["--results", str(tmp_path / "file")]) == 1
    assert "FAULT results folder: not writable" in capsys.readouterr().out


def test_nvidia_smi_is_asked_field_by_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.query("name") is None
    smi.write_text("#!/bin/sh\n[ $# = 4 ] && echo 'NVIDIA H200, 9.0'\n")
    smi.chmod(0o755)
    assert machine.query("name", "compute_cap") == {"name": "NVIDIA H200", "compute_cap": "9.0"}
    assert machine.query("name") is None
