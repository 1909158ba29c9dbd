"""The model of the tensor core's additions: equal to an H200 bit by bit, and what follows from it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from snapmla.bench.variants import Variant
from snapmla.experiments import accumulation
from snapmla.experiments.accumulation import kernel_error
from snapmla.metrics import relative_l2
from snapmla.quantization import Quantized, to_e4m3
from snapmla.reference import PROMOTED, SINGLE_ACCUMULATOR, Accumulation, Rules, emulated_attention
from snapmla.reference.accumulation import tensor_core_add

RECORDED = Path(__file__).parent / "data" / "fp8_accumulation.safetensors"

with safe_open(RECORDED, "pt") as _file:
    CASES = sorted({name.split(".")[0] for name in _file.keys()})  # noqa: SIM118 (no mapping)
    METADATA = _file.metadata()


def recorded(case: str) -> tuple[torch.Tensor, ...]:
    """a [64, k] and b [64, k] (e4m3 values, float32), start value c and hardware result d [64, 64]."""
    with safe_open(RECORDED, "pt") as file:
        a, b = (file.get_tensor(f"{case}.{x}").view(torch.float8_e4m3fn).float() for x in "ab")
        return a, b, file.get_tensor(f"{case}.c"), file.get_tensor(f"{case}.d")


@pytest.mark.parametrize("case", CASES)
def test_model_equals_the_hardware_bit_by_bit(case):
    a, b, c, d = recorded(case)
    assert torch.equal(tensor_core_add(c, a, b.T), d)
    for bits in (12, 14):
        assert not torch.equal(tensor_core_add(c, a, b.T, bits), d)


def test_recording_says_where_it_comes_from():
    assert "NVIDIA H200" in METADATA["gpu"] and METADATA["date"] and METADATA["cuda"]
    assert len(CASES) == 8


def test_additions_are_cut_off_toward_zero():
    one = torch.ones(1, 1)
    for sign in (1.0, -1.0):
        start = sign * (1.0 + 2.0**-14) * one
        assert tensor_core_add(start, one * 0, one).item() == sign
        assert tensor_core_add(sign * one * 2.0**13, one * sign, one).item() == sign * (2.0**13 + 1)
        assert tensor_core_add(sign * one * 2.0**14, one * sign, one).item() == sign * 2.0**14
    assert tensor_core_add(0 * one, 0 * one, one).item() == 0.0
    with pytest.raises(TypeError, match="float32"):
        tensor_core_add(one.double(), one.double(), one.double())


def flat_error(keys: int, mean: float, std: float, accumulation: Accumulation) -> float:
    """Flat attention over values of this mean and deviation in e4m3 units, against float64 on the same values.

    BF16's rounding of the output is added as an independent error: a sum of 13 bits often lies halfway between two BF16
    values, and the last bit of a division would decide the result.
    """
    generator = torch.Generator().manual_seed(0)
    content = to_e4m3(torch.randn(keys, 64, generator=generator) * std + mean)
    key = Quantized(content, torch.zeros(keys, 64), torch.ones(keys))
    query = Quantized(torch.zeros(1, 1, 64), torch.zeros(1, 1, 64), torch.ones(1, 1))
    out, _ = emulated_attention(query, key, 1.0, rules=Rules(accumulation=accumulation))
    exact = content.double().mean(0)
    return math.hypot(relative_l2(out[0, 0], exact), relative_l2(exact.bfloat16(), exact))


@pytest.mark.parametrize(
    ("keys", "mean", "std", "measured"),
    [
        (1024, 120, 16, 0.0125),
        (4096, 120, 16, 0.077),
        (16384, 120, 16, 0.385),
        (4096, 40, 60, 0.038),
        (4096, 0, 120, 0.0020),
    ],
)
def test_one_accumulator_has_the_errors_of_an_h200(keys, mean, std, measured):
    """`measured`: one accumulator for the whole sequence, an attention sketch on an H200 (driver 580, CUDA 13.0)."""
    assert flat_error(keys, mean, std, SINGLE_ACCUMULATOR) == pytest.approx(measured, rel=0.06)


def test_promoted_accumulation_keeps_the_error_from_growing():
    """The project's guarantee: the error does not grow with the context."""
    errors = [flat_error(keys, 120, 16, PROMOTED) for keys in (64, 1024, 16384)]
    assert max(errors) < 2e-3 and errors[-1] < 1.2 * errors[0]


@pytest.mark.parametrize("keys", [64, 130])
def test_the_error_of_a_kernel_is_measured_as_the_models(keys):
    """On the CPU "the kernel" is the emulation: what is left is the rounding of the output."""
    content = to_e4m3(torch.randn(keys, 512, generator=torch.Generator().manual_seed(0)) * 16 + 120)
    exact = content.double().mean(0)
    rounding = relative_l2(exact.bfloat16(), exact)
    assert kernel_error(Variant("snapmla", "snapmla"), content, batch=2, heads=1) == pytest.approx(
        rounding, rel=0.1
    )


def test_kernels_that_cannot_run_have_rows_that_say_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kernels = accumulation.KernelsConfig(batches=[1, 128], heads=16)
    variant = {"snapmla": Variant("snapmla", "snapmla"), "flashmla_fp8": Variant("flashmla", "fp8")}
    values = [accumulation.ValuesConfig(mean=1.0, std=2.0)]
    cfg = accumulation.AccumulationConfig(keys=[64, 128], values=values, kernels=kernels, variant=variant)
    rows = accumulation.kernel_rows(cfg)
    assert len(rows) == 8 and {row["status"] for row in rows} == {"not run"}
    assert all(row["relative_l2"] is None and "no Hopper GPU" in row["reason"] for row in rows)
