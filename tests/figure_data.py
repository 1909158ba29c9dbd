"""Small, clearly fake result folders for the tests of paper_figures: every number below is invented.

The files follow the contract of ARCHITECTURE.md. ``Fake`` holds them as tables that a test may change before
``write``.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd

FAKE_CPU = "FAKE-9000"
FAKE_GPU = "FAKE-GPU"
FAKE_COMMIT = "fa4e000fa4e000"
LAYERS = range(6)
CONFIGS = {"bf16": 0.1, "snapmla": 1.0, "config_a": 2.0, "config_b": 5.0, "config_c": 3.0, "config_d": 1.1}
NOT_RUN = {"source": "measured", "status": "not run", "reason": "FAKE reason: no such GPU."}


def ranges() -> pd.DataFrame:
    rows = []
    for layer, (part, size) in itertools.product(LAYERS, (("content", 5.0), ("rope", 200.0))):
        quantiles = {"min": -1, "p001": -0.6, "p01": -0.3, "p50": 0.01, "p99": 0.3, "p999": 0.5, "max": 0.9}
        row = {name: value * size * (1 + layer / 6) for name, value in quantiles.items()}
        rows.append(
            {
                "layer": layer,
                "part": part,
                **row,
                "absmax": size * (1 + layer / 6),
                "rms": size / 8,
                "source": "measured",
            }
        )
    return pd.DataFrame(rows)


def histogram() -> pd.DataFrame:
    positive = np.logspace(-2, 3, 16)
    edges = np.concatenate([-positive[::-1], positive])
    rows = []
    for layer, (part, size) in itertools.product(LAYERS, (("content", 1.0), ("rope", 40.0))):
        for low, high in itertools.pairwise(edges):
            density = float(np.exp(-abs(low + high) / 2 / size) / size)
            row = {"bin_low": low, "bin_high": high, "density": density if density > 1e-9 else 0.0}
            rows.append({"layer": layer, "part": part, **row, "source": "measured"})
    return pd.DataFrame(rows)


def mse() -> pd.DataFrame:
    rows = [
        {"layer": layer, "part": part, "mse": size * (1 + layer), "relative_mse": 1e-3, "source": "measured"}
        for layer, (part, size) in itertools.product(LAYERS, (("content", 1e-4), ("rope", 3e-3)))
    ]
    return pd.DataFrame(rows)


def layer_error() -> pd.DataFrame:
    rows = []
    for panel, layer, (config, size) in itertools.product(
        ("teacher_forced", "accumulated"), LAYERS, CONFIGS.items()
    ):
        error = 0.01 * size * (1 + 0.1 * layer) * (1.5**layer if config == "config_a" else 1.0)
        error *= 1 + layer if panel == "accumulated" else 1
        rows.append(
            {
                "config": config, "panel": panel, "layer": layer, "context": 32768, "queries": 7,
                "rmse": error / 3,
                "one_minus_cosine": error**2 / 2, "relative_l2": error, "source": "measured", "status": "ok", "gpu": None,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)


def fidelity_kernels() -> pd.DataFrame:
    rows = [
        {"config": config, "layer": layer, "context": 32768, "queries": 7, "relative_l2": None, "from_emulation": None}
        for layer, config in itertools.product(LAYERS, CONFIGS)
    ]
    return pd.DataFrame(rows).assign(**NOT_RUN, gpu=None)


def accumulation() -> pd.DataFrame:
    growth = {"float32": 0.0, "single": 1.0, "split_4k": 0.2, "promoted": 0.01}
    rows = [
        {
            "value_mean": mean, "value_std": std, "keys": keys, "rule": rule,
            "block": 128, "bits": 24 if rule == "float32" else 13,
            "relative_l2": 0.001 * (keys / 1024) ** power, "source": "measured",
        }
        for (mean, std), keys, (rule, power) in itertools.product(
            ((120, 16), (0, 120)), (1024, 4096, 16384, 65536), growth.items()
        )
    ]  # fmt: skip
    return pd.DataFrame(rows)


def accumulation_kernels() -> pd.DataFrame:
    rows = [
        {
            "variant": variant, "heads": 16, "batch": batch, "keys": keys, "value_mean": mean, "value_std": std,
            "relative_l2": None, **NOT_RUN, "gpu": None,
        }
        for variant, batch, keys, (mean, std) in itertools.product(
            ("snapmla", "flashmla_fp8"), (1, 128), (1024, 65536), ((120, 16), (0, 120))
        )
    ]  # fmt: skip
    return pd.DataFrame(rows)


def timed_errors(error: float, source: str = "measured") -> pd.DataFrame:
    """The same as if it had run: SnapMLA with this error at the largest batch, its peer with 0.5."""
    table = accumulation_kernels()
    errors = table["variant"].map({"snapmla": error, "flashmla_fp8": 0.5}).where(table["batch"] == 128, 0.9)
    return table.assign(relative_l2=errors, source=source, status="ok", reason=None, gpu="NVIDIA H200")


def kernel_shapes() -> list[dict]:
    contexts = (1024, 16384, 131072)
    grid = [
        {"model": None, "layout": None, "heads": heads, "s_q": s_q, "batch": 32, "context": context}
        for heads, s_q, context in itertools.product((16, 32, 64, 128), (1, 2), contexts)
    ]
    workloads = [
        {
            "model": model,
            "layout": layout,
            "heads": heads,
            "s_q": 1,
            "batch": 131072 // context,
            "context": context,
        }
        for model, (layout, heads), context in itertools.product(
            ("FAKE-A", "FAKE-B"), (("DP1/TP8", 16), ("DP4/TP2", 64), ("DP8/TP1", 128)), contexts
        )
    ]
    return workloads + grid


def kernel_bench() -> pd.DataFrame:
    numbers = dict.fromkeys(("time_us", "tflops", "gbps", "ideal_us", "share_of_ideal"))
    rows = [
        {"variant": variant, **shape, **numbers, **NOT_RUN, "gpu": None}
        for variant, shape in itertools.product(("snapmla", "flashmla_bf16"), kernel_shapes())
    ]
    return pd.DataFrame(rows)


def timed(table: pd.DataFrame, source: str, gpu: str, share: float) -> pd.DataFrame:
    """``table`` as if every row had run on ``gpu`` at ``share`` of the fake effective peak of 1868 TFLOPS."""
    speed = table["variant"].map({"snapmla": 1868 * share, "flashmla_bf16": 600.0})
    flops = 1e9 * table["heads"] * table["context"]
    timed = {"flops": flops, "time_us": flops / speed * 1e-6, "ideal_measured_us": flops / 1868 * 1e-6}
    return table.assign(**timed, tflops=speed, source=source, status="ok", reason=None, gpu=gpu)


def roofline() -> pd.DataFrame:
    peaks = {
        ("H20", "bf16"): 148,
        ("H20", "snapmla"): 279.6,
        ("H200", "bf16"): 989,
        ("H200", "snapmla"): 1868,
    }
    shapes = pd.DataFrame(kernel_shapes())[["heads", "s_q", "batch", "context"]].drop_duplicates()
    rows = [
        {
            "gpu": gpu, **shape, "format": name, "time_us": 10.0,
            "tflops": min(peak, 3 * shape["heads"] * shape["s_q"]),
            "bound": "memory", "effective_peak_tflops": peak, "source": "modelled",
        }
        for (gpu, name), peak in peaks.items()
        for shape in shapes.to_dict("records")
    ]  # fmt: skip
    return pd.DataFrame(rows)


def throughput() -> pd.DataFrame:
    rows = []
    for model, layout, context, variant in itertools.product(
        ("FAKE-A", "FAKE-B"), ("DP1/TP8", "DP4/TP2", "DP8/TP1"), (16384, 65536), ("bf16", "snapmla")
    ):
        size = 1.8 if variant == "snapmla" else 1.0
        row = {"variant": variant, "model": model, "layout": layout, "context": context, "memory_gb": 40.0}
        row |= {
            "batch": 100 * 16384 / context * size,
            "step_ms": 20.0,
            "attention_ms": 10.0,
            "tokens_per_s": 9e7 * size / context,
        }
        row |= {
            "bytes_per_token": 644 if variant == "snapmla" else 1152,
            "source": "modelled",
            "status": "ok",
            "reason": None,
            "gpu": None,
            "scope": None,
            "pool_gb": None,
            "routing": None,
        }
        if (model, layout) == ("FAKE-B", "DP1/TP8"):
            row |= dict.fromkeys(("batch", "step_ms", "attention_ms", "tokens_per_s"))
            row |= {"status": "not run", "reason": "FAKE reason: the weights do not fit."}
        rows.append(row)
    return pd.DataFrame(rows)


def quality() -> pd.DataFrame:
    rows = []
    for (task, score), context, variant in itertools.product(
        (("bits_per_byte", 2.5), ("next_byte_agreement", 0.99), ("next_byte_accuracy", 0.5)),
        (1024, 4096),
        CONFIGS,
    ):
        value = (
            score + 0.001 * CONFIGS[variant] if task != "next_byte_agreement" or variant != "bf16" else 1.0
        )
        row = {"task": task, "context": context, "variant": variant, "seed": 0, "score": value}
        rows.append({**row, "ci95": 0.05 if variant == "bf16" else 0.002, "n": 99, "source": "measured"})
    return pd.DataFrame(rows)


def drift() -> pd.DataFrame:
    rows = [
        {
            "variant": variant, "prompt": 99, "step_from": step, "step_to": step + 100,
            "kl": 1e-4 * size * (1 + step / 4000), "top1_agreement": 1 - 0.01 * size, "n": 100, "source": "measured",
            "status": "ok", "gpu": None,
        }
        for (variant, size), step in itertools.product((("snapmla", 1), ("config_a", 3)), range(0, 800, 100))
    ]  # fmt: skip
    return pd.DataFrame(rows)


def ablation() -> pd.DataFrame:
    """Nothing beats SnapMLA at its bytes; a larger format does."""
    formats = {
        "snapmla": ("SnapMLA", 644, "FP8", 1.0),
        "fake_large": ("FAKE large", 656, "BF16", 0.8),
        "fake_small": ("FAKE small", 580, "INT8", 2.0),
    }
    rows = [
        {
            "format": name, "label": label, "bytes_per_token": size, "products": products, "layer": layer,
            "context": 32768, "queries": 7, "crest": 3.5, "relative_l2": 0.01 * error * (1 + 0.1 * layer),
            "queries_lower": 7 if error < 1 else 0, "source": "measured",
        }
        for (name, (label, size, products, error)), layer in itertools.product(formats.items(), LAYERS)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def ablation_accumulation() -> pd.DataFrame:
    rows = [
        {
            "rule": rule, "layer": 3, "context": 4096, "keys": keys, "relative_l2": 0.02, "relative_l2_quantized": error,
            "source": "measured",
        }
        for (rule, error), keys in itertools.product((("float32", 0.001), ("single", 0.01)), (1024, 4096))
    ]  # fmt: skip
    return pd.DataFrame(rows)


def serving() -> pd.DataFrame:
    numbers = ("agreement", "n", "prompts", "cached_tokens", "kv_tokens", "early_bytes", "late_bytes", "long_steps", "tokens_per_step", "engine")
    pairs = (("CUSTOM", "snapmla"), ("CUSTOM", "bf16"), ("FLASHMLA", "bf16"))
    rows = [{"backend": backend, "against": against, **dict.fromkeys(numbers), **NOT_RUN} for backend, against in pairs]
    return pd.DataFrame(rows).assign(gpu=None, speculative_tokens=2)


class Fake:
    """Tables by (experiment, file name); change or delete entries, then ``write`` them below a folder."""

    def __init__(self) -> None:
        self.tables = {
            ("distribution", "ranges.csv"): ranges(),
            ("distribution", "histogram.csv"): histogram(),
            ("distribution", "mse.csv"): mse(),
            ("fidelity", "layer_error.csv"): layer_error(),
            ("fidelity", "kernels.csv"): fidelity_kernels(),
            ("accumulation", "accumulation.csv"): accumulation(),
            ("accumulation", "kernels.csv"): accumulation_kernels(),
            ("kernel_bench", "kernel_bench.csv"): kernel_bench(),
            ("kernel_bench", "latency.csv"): kernel_bench().query("model.isna()").assign(batch=1),
            ("kernel_bench", "roofline.csv"): roofline(),
            ("throughput", "throughput.csv"): throughput(),
            ("serving", "serving.csv"): serving(),
            ("quality", "quality.csv"): quality(),
            ("drift", "drift.csv"): drift(),
            ("ablation", "ablation.csv"): ablation(),
            ("ablation", "accumulation.csv"): ablation_accumulation(),
        }

    def write(self, root: Path) -> Path:
        for (experiment, filename), table in self.tables.items():
            folder = root / experiment
            folder.mkdir(parents=True, exist_ok=True)
            table.to_csv(folder / filename, index=False)
            write_run_json(folder, experiment)
        return root


def write_run_json(folder: Path, experiment: str) -> None:
    provenance = {
        "date": "1999-12-31T00:00:00+00:00",
        "commit": FAKE_COMMIT,
        "dirty": False,
        "cpu": FAKE_CPU,
        "cores": 2,
        "gpus": [],
    }
    run = {
        "experiment": experiment,
        "config": {"engine": {"gpu": FAKE_GPU}, "source": {"path": None}},
        "provenance": provenance,
    }
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
