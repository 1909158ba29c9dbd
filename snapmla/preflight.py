"""Can this machine run the workflow, and will its GPU measure? One line for each thing looked at, a sentence of advice for a fault.

    python -m snapmla.preflight [--results results] [--gpu] [--running]

No GPU is no fault, since everything but the measurements runs without one: --gpu makes it one. --running, the container's
health check, leaves out what a workflow that runs takes itself: memory, and the GPU's. Exit code 1 for a fault.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from snapmla import native, results
from snapmla.bench import machine

DISK_GB = 5
MEMORY_GB = 8
GPU_MEMORY_GB = 8
"""kernel_bench's largest cache is 5 GB (BF16, 32 sequences of 128k tokens); its queries and splits come to it."""
DRIVERS = {12: 525, 13: 580}
"""The first driver of each major version of CUDA."""


@dataclass(frozen=True)
class Facts:
    """What was found. Sizes in 1e9 bytes, None where nobody says.

    Attributes:
        unwritable: why nothing can be written into the results folder; None if it can.
        gpu: of nvidia-smi: name, driver_version, compute_cap, memory.free (MiB); None without an answer.
        cuda: the version that torch was built for; None for its CPU build.
        cuda_works: whether torch can use the GPU.
        others: processes that compute on the GPU.
        no_kernels: why the kernels' library cannot be loaded; None if it can.
    """

    unwritable: str | None
    disk_gb: float | None
    memory_gb: float | None
    gpu: dict[str, str] | None
    cuda: str | None
    cuda_works: bool
    others: int
    no_kernels: str | None


@dataclass(frozen=True)
class Finding:
    """`fault`: None, or what is wrong and what to do."""

    what: str
    value: str
    fault: str | None = None


def gather(folder: Path) -> Facts:
    unwritable = disk = no_kernels = None
    try:
        with results.atomic_path(folder / "preflight") as partial:
            partial.touch()
        (folder / "preflight").unlink()
        disk = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        unwritable = error.strerror or str(error)
    try:
        native.library()
    except (OSError, RuntimeError) as error:
        no_kernels = str(error)
    gpu = machine.query("name", "driver_version", "compute_cap", "memory.free")
    return Facts(
        unwritable=unwritable,
        disk_gb=disk,
        memory_gb=_memory_gb(),
        gpu=gpu,
        cuda=torch.version.cuda,
        cuda_works=torch.cuda.is_available(),
        others=len(machine.other_processes()) if gpu else 0,
        no_kernels=no_kernels,
    )


def findings(facts: Facts, gpu_wanted: bool = False, running: bool = False) -> Iterator[Finding]:
    """In the order in which they are to be mended: the GPU's end with the first fault that hides the others."""
    yield _results(facts)
    if facts.memory_gb is not None and not running:
        few = facts.memory_gb < MEMORY_GB
        yield Finding(
            "memory",
            f"{facts.memory_gb:.0f} GB free",
            f"The workflow needs {MEMORY_GB} GB: stop other programs, or run `make all SIZE=short`." if few else None,
        )
    if facts.gpu is None:
        missing = (
            "nvidia-smi finds none: install NVIDIA's driver, or give the container the GPU (docker: --gpus all; apptainer: --nv)."
        )
        yield Finding("GPU", "none, recorded measurements stand in", missing if gpu_wanted else None)
        return
    name, driver = facts.gpu["name"], facts.gpu["driver_version"]
    if facts.gpu["compute_cap"] != "9.0":
        other = f"The kernels are for Hopper (compute capability 9.0), {name} has {facts.gpu['compute_cap']}: its figures stay recorded ones."
        yield Finding("GPU", name, other if gpu_wanted else None)
        return
    yield Finding("GPU", name)
    if not facts.cuda_works:
        yield Finding("driver", driver, _no_cuda(facts.cuda, driver))
        return
    yield Finding("driver", f"{driver}, torch for CUDA {facts.cuda}")
    if not running:
        free = float(facts.gpu["memory.free"]) * 2**20 / 1e9
        few = f"The largest measurement needs {GPU_MEMORY_GB} GB: end what holds the rest (nvidia-smi lists it)."
        yield Finding("GPU memory", f"{free:.0f} GB free", few if free < GPU_MEMORY_GB else None)
        shared = "Their work would be measured, too: end them, or choose another GPU by CUDA_VISIBLE_DEVICES."
        yield Finding("other processes on it", str(facts.others), shared if facts.others else None)
    # The workflow compiles its own: what is missing here is missing for the library only.
    yield Finding("kernels", "not loaded, the workflow compiles them" if facts.no_kernels else "loaded")


def _results(facts: Facts) -> Finding:
    if facts.unwritable is not None:
        cure = "choose another by SNAPMLA_RESULTS, or give the user that runs this the right to write (docker: --user, -v)."
        return Finding("results folder", "not writable", f"{facts.unwritable}: {cure}")
    few = f"The workflow needs {DISK_GB} GB: free some, or choose another folder by SNAPMLA_RESULTS."
    return Finding("results folder", f"{facts.disk_gb:.0f} GB free", few if facts.disk_gb < DISK_GB else None)


def _no_cuda(cuda: str | None, driver: str) -> str:
    if cuda is None:
        return "torch is its build for CPUs: `make setup TARGET=cu12` (or cu13 from driver 580 on) installs the other."
    first = DRIVERS.get(int(cuda.split(".")[0]))
    if first and int(driver.split(".")[0]) < first:
        return f"torch is built for CUDA {cuda}, which needs driver {first} or newer, got {driver}: update it, or `make setup TARGET=cu12`."
    return "torch cannot use the GPU: CUDA_VISIBLE_DEVICES may hide it, or another process has it exclusively (nvidia-smi -q -d COMPUTE)."


def _memory_gb() -> float | None:
    """Free, in the container's bounds if there are any."""
    try:
        (kib,) = re.findall(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, ValueError):
        return None
    free = int(kib) * 1024
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii") for name in ("max", "current"))
        free = min(free, int(limit) - int(used))
    except (OSError, ValueError):  # no container, or no bound ("max")
        pass
    return free / 1e9


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="default: SNAPMLA_RESULTS, else the repository's results")
    parser.add_argument("--gpu", action="store_true", help="no Hopper GPU is a fault, too")
    parser.add_argument("--running", action="store_true", help="leave out what a running workflow occupies")
    given = parser.parse_args(argv)
    found = list(findings(gather(results.results_root(given.results)), given.gpu, given.running))
    for finding in found:
        print(f"{'FAULT' if finding.fault else 'ok':<6}{finding.what}: {finding.value}")
        if finding.fault:
            print(f"      {finding.fault}")
    return int(any(finding.fault for finding in found))


if __name__ == "__main__":
    sys.exit(main())
