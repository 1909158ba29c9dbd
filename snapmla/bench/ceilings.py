"""What the GPU reaches on plain work, measured in the same run: the ceilings that a share is a share of."""

from __future__ import annotations

import torch

from snapmla.bench.timing import Clock, measure
from snapmla.quantization import E4M3

CEILINGS = ("read_tbs", "bf16_tflops", "fp8_tflops", "bf16_sustained_tflops", "fp8_sustained_tflops")


def measure_ceilings(clock: Clock, seconds: float = 0.3, rest: float = 0.05) -> dict[str, float]:
    """Rates of `CEILINGS` on random data.

    Reading is a sum over 4 GiB. Products are of 8192 x 8192 matrices: single ones between rests of `rest` seconds, which is
    the chip's best, and one after another for `seconds`, at whatever clock the power limit leaves.
    """
    n = 8192
    data = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    read = measure(clock, [data.sum] * 4, seconds=seconds)
    rates = {"read_tbs": data.nbytes / read.time_us * 1e-6}
    del data
    a, b = (torch.randn(n, n, device="cuda") for _ in range(2))
    x, y, x8, y8 = a.bfloat16(), b.bfloat16(), a.to(E4M3), b.to(E4M3).t()
    one, product = torch.ones((), device="cuda"), torch._scaled_mm
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    products = {"bf16": lambda: x @ y, "fp8": lambda: product(x8, y8, **options)}
    for name, call in products.items():
        burst = measure(clock, [call], seconds=0, rest=rest)
        rates[f"{name}_tflops"] = 2 * n**3 / burst.time_us * 1e-6
    for name, call in products.items():
        sustained = measure(clock, [call] * 4, seconds=seconds)
        rates[f"{name}_sustained_tflops"] = 2 * n**3 / sustained.time_us * 1e-6
    return rates
