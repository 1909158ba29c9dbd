"""The GPU while it is measured: clocks, power, why it throttled, who else used it."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Self

import torch

FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "clocks_event_reasons.active")
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "hardware heat",
    0x80: "hardware power brake",
}
"""Bits of `clocks_event_reasons.active` that mean a lower clock."""


NO_GPU = "This machine has no Hopper GPU (compute capability 9.0)."


def hopper_gpu() -> str | None:
    """Name of the current CUDA device if it is a Hopper GPU (compute capability 9.0)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return None
    return torch.cuda.get_device_name()


@dataclass
class Monitor:
    """Samples of nvidia-smi in the background, ten a second; a with statement runs it."""

    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    _process: subprocess.Popen | None = None

    def __enter__(self) -> Self:
        query = f"--query-gpu={','.join(FIELDS)}"
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", "100", "-i", _device()]
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return self
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def _read(self) -> None:
        for line in self._process.stdout:
            if (sample := parse(line)) is not None:
                self.samples.append((time.monotonic(), sample))

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def between(self, start: float, end: float) -> dict[str, object]:
        """Columns of a row that was measured between two readings of time.monotonic()."""
        inside = [sample for at, sample in self.samples if start <= at <= end]
        if not inside:
            return dict.fromkeys(("sm_mhz", "power_w", "power_limit_w", "throttle"))
        reasons = 0
        for sample in inside:
            reasons |= int(sample["clocks_event_reasons.active"])
        return {
            "sm_mhz": statistics.median(s["clocks.sm"] for s in inside),
            "power_w": statistics.median(s["power.draw"] for s in inside),
            "power_limit_w": inside[-1]["power.limit"],
            "throttle": ", ".join(name for bit, name in REASONS.items() if reasons & bit) or "none",
        }


def parse(line: str) -> dict[str, float] | None:
    """One line of nvidia-smi; None where a value is missing."""
    values = [value.strip() for value in line.split(",")]
    if len(values) != len(FIELDS):
        return None
    try:
        return {
            name: float(int(v, 16)) if v.startswith("0x") else float(v)
            for name, v in zip(FIELDS, values, strict=True)
        }
    except ValueError:
        return None


def other_processes() -> list[int]:
    """Processes that compute on the GPU besides this one, as far as nvidia-smi shows them."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader,nounits", "-i", _device()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return []
    pids = [int(line) for line in done.stdout.split() if line.isdigit()]
    return [pid for pid in pids if pid != os.getpid()]


def query(*fields: str) -> dict[str, str] | None:
    """What nvidia-smi says of the GPU, field by field, numbers without units; None without an answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", _device()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(fields, values, strict=True)) if done.returncode == 0 and len(values) == len(fields) else None


def _device() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
