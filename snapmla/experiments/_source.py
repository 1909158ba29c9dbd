"""Which model an experiment runs, and on which device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from snapmla.bench.machine import hopper_gpu
from snapmla.experiments._app import Run
from snapmla.probe import source


@dataclass
class SourceConfig:
    path: str | None = None
    device: str = "auto"


def device_of(name: str) -> torch.device:
    """"auto" is a Hopper GPU where there is one, on which the kernels run, and the CPU elsewhere."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if hopper_gpu() else "cpu")


def measured_on(device: torch.device, rows: list[dict]) -> list[dict]:
    """Rows with what recording asks of them: their status, "ok" unless they have one, and the GPU's name (None: a CPU)."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return [{**row, "status": row.get("status", "ok"), "gpu": gpu} for row in rows]


def load(cfg: SourceConfig, run: Run) -> source.Source:
    """The configured checkpoint, or the workflow's own probe model."""
    path = cfg.path or run.input("probe", "model")
    return source.load(path, probe=cfg.path is None, device=device_of(cfg.device))
