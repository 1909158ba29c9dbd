"""Run kernels/probes/fp8_accumulation.cu on a Hopper GPU and record inputs and outputs beside this file.

    python tests/data/record_fp8_accumulation.py [FOLDER]

Needs nvcc, a Hopper GPU and a CUDA build of torch. The file is what tests/test_accumulation.py holds the model to.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "kernels" / "probes" / "fp8_accumulation.cu"
NVCC = [
    "nvcc",
    "-O2",
    "-std=c++17",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-Xcompiler",
    "-fPIC",
    "-shared",
    "-o",
]

# name: operands' mean and standard deviation in e4m3 units (None: any finite bit pattern), products, start value's size
CASES = {
    "any_k32": (None, 32, 0.0),
    "any_k128": (None, 128, 1.0),
    "any_start_1e6": (None, 64, 1e6),
    "gauss_k256": ((0, 60), 256, 0.0),
    "positive_k512": ((120, 16), 512, 0.0),
    "positive_start_1e8": ((120, 16), 64, 1e8),
    "subnormal_k64": ((0, 0.01), 64, 1e-3),
    "zeros_k64": ((0, 0.0003), 64, 1e-6),
}


def operand(values: tuple[float, float] | None, k: int, generator: torch.Generator) -> torch.Tensor:
    """e4m3 bytes, uint8 [64, k]."""
    if values is None:
        x = torch.randint(0, 256, (64, k), generator=generator).to(torch.uint8)
        return torch.where(x & 0x7F == 0x7F, x ^ 1, x)  # NaN becomes 448
    mean, std = values
    return (torch.randn(64, k, generator=generator) * std + mean).to(torch.float8_e4m3fn).view(torch.uint8)


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as build:
        library = Path(build) / "probe.so"
        subprocess.run([*NVCC, str(library), str(PROBE)], check=True)
        probe = ctypes.CDLL(str(library)).fp8_accumulation_probe
    generator = torch.Generator().manual_seed(0)
    recorded = {}
    for name, (values, k, start) in CASES.items():
        a, b = (operand(values, k, generator) for _ in range(2))
        c = torch.randn(64, 64, generator=generator) * start
        on_gpu = [x.cuda() for x in (a, b, c, torch.full_like(c, torch.nan))]
        error = probe(*(ctypes.c_void_p(x.data_ptr()) for x in on_gpu), k)
        if error:
            raise RuntimeError(f"the probe failed with CUDA error {error} on {name}.")
        recorded |= {f"{name}.a": a, f"{name}.b": b, f"{name}.c": c, f"{name}.d": on_gpu[3].cpu()}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    gpu = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
    metadata = {"gpu": gpu, "cuda": str(torch.version.cuda), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    save_file(recorded, folder / "fp8_accumulation.safetensors", metadata)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
