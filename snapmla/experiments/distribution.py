"""Value distributions of the latents' content and RoPE parts, and the error of an FP8 round trip (Fig 3).

    python -m snapmla.experiments.distribution

Reads results/latents/ and writes results/distribution/: ranges.csv, histogram.csv, mse.csv.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from omegaconf import MISSING
from safetensors import safe_open
from torch import Tensor

from snapmla import results
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.quantization import scale_from_amax, to_e4m3

PARTS = ("content", "rope")
QUANTILES = {"p001": 0.001, "p01": 0.01, "p50": 0.5, "p99": 0.99, "p999": 0.999}


@dataclass
class DistributionConfig(BaseConfig):
    histogram_bins: int = MISSING
    linear_below: float = MISSING


def value_range(values: Tensor) -> dict[str, float]:
    """Extremes, quantiles and root mean square of a tensor."""
    x = values.float().numpy().ravel()
    row = {
        "min": x.min(),
        **dict(zip(QUANTILES, np.quantile(x, list(QUANTILES.values())), strict=True)),
        "max": x.max(),
    }
    row |= {"absmax": np.abs(x).max(), "rms": np.sqrt(np.square(x, dtype=np.float64).mean())}
    return {key: float(value) for key, value in row.items()}


def symlog_edges(largest: float, bins: int, linear_below: float) -> np.ndarray:
    """Bin edges from -largest to largest, equally wide on the axis asinh(x / linear_below)."""
    return linear_below * np.sinh(np.linspace(-1, 1, bins + 1) * np.arcsinh(largest / linear_below))


def round_trip_error(values: Tensor) -> tuple[float, float]:
    """Mean squared error of quantizing each token of [tokens, width] to e4m3 with its own scale, absolute and
    relative to the values' mean square (the paper's Fig 3b: each part as if it were cached in FP8)."""
    x = values.double()
    scale = scale_from_amax(values.float().abs().amax(-1, keepdim=True))
    error = (to_e4m3(values.float() / scale).double() * scale - x).square().mean().item()
    return error, error / x.square().mean().item()


@application("distribution", DistributionConfig)
def main(cfg: DistributionConfig, run: Run) -> None:
    layers = results.read_json(run.input("latents", "latents.json"))["layers"]
    ranges, histogram, mse = [], [], []
    with safe_open(run.input("latents", "latents.safetensors"), "pt") as latents:
        keys = [(layer, part) for layer in range(layers) for part in PARTS]
        largest = max(latents.get_tensor(f"{part}.{layer}").abs().max().item() for layer, part in keys)
        edges = symlog_edges(largest, cfg.histogram_bins, cfg.linear_below)
        for layer, part in keys:
            values = latents.get_tensor(f"{part}.{layer}")
            row = {"layer": layer, "part": part}
            ranges.append({**row, **value_range(values), "source": "measured"})
            density, _ = np.histogram(values.float().numpy(), bins=edges, density=True)
            histogram += [
                {**row, "bin_low": low, "bin_high": high, "density": d, "source": "measured"}
                for low, high, d in zip(edges[:-1], edges[1:], density, strict=True)
            ]
            error, relative = round_trip_error(values)
            mse.append({**row, "mse": error, "relative_mse": relative, "source": "measured"})
            run.progress(f"layer {layer} {part}: absmax {ranges[-1]['absmax']:.3g}, FP8 MSE {error:.3g}")
            run.log({f"mse/{part}": error, f"absmax/{part}": ranges[-1]["absmax"]}, step=layer)
    run.write_table("ranges.csv", ranges)
    run.write_table("histogram.csv", histogram)
    run.write_table("mse.csv", mse)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
