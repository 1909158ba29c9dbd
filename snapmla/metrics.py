"""Error metrics of the paper's Fig 4, computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def rmse(value: Tensor, reference: Tensor) -> float:
    """Root mean square error, in the units of the values."""
    return (value.double() - reference.double()).square().mean().sqrt().item()


def relative_l2(value: Tensor, reference: Tensor) -> float:
    """||value - reference|| / ||reference||."""
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm()).item()


def one_minus_cosine(value: Tensor, reference: Tensor) -> float:
    """1 - cos(value, reference), both flattened.

    Taken from the distance of the two unit vectors, ||a - b||^2 / 2, which keeps its precision where 1 - a.b would cancel.
    """
    a = torch.nn.functional.normalize(value.double().flatten(), dim=0, eps=0.0)
    b = torch.nn.functional.normalize(reference.double().flatten(), dim=0, eps=0.0)
    return ((a - b).square().sum() / 2).item()


METRICS = {"rmse": rmse, "one_minus_cosine": one_minus_cosine, "relative_l2": relative_l2}
