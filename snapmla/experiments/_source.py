"""Which model an experiment runs, and on which device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return torch.device("cuda" if hopper else "cpu")


def gpu_of(device: torch.device) -> str | None:
    """The column `gpu` of results: the name of the GPU that made them, or None."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def load(cfg: SourceConfig, run: Run) -> source.Source:
    """The configured checkpoint, or the workflow's own probe model."""
    path = cfg.path or run.input("probe", "model")
    return source.load(path, probe=cfg.path is None, device=device_of(cfg.device))
