"""What the GPU reaches on plain work, measured in the same run: the ceilings that a share is a share of."""

from __future__ import annotations

import torch

from snapmla.bench.timing import Clock, measure
from snapmla.quantization import E4M3


def measure_ceilings(clock: Clock, seconds: float = 0.3) -> dict[str, float]:
    """`read_tbs` (a sum over 4 GiB), `bf16_tflops` and `fp8_tflops` (products of random 8192 x 8192 matrices)."""
    n = 8192
    data = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    read = measure(clock, [data.sum] * 4, seconds=seconds)
    del data
    a, b = (torch.randn(n, n, device="cuda") for _ in range(2))
    flops = 2 * n**3
    x, y = a.bfloat16(), b.bfloat16()
    bf16 = measure(clock, [lambda: x @ y] * 4, seconds=seconds)
    x8, y8, one = a.to(E4M3), b.to(E4M3).t(), torch.ones((), device="cuda")
    product = torch._scaled_mm
    fp8 = measure(
        clock,
        [lambda: product(x8, y8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)]
        * 4,
        seconds=seconds,
    )
    return {
        "read_tbs": 4 * (1 << 30) / read.time_us * 1e-6,
        "bf16_tflops": flops / bf16.time_us * 1e-6,
        "fp8_tflops": flops / fp8.time_us * 1e-6,
    }
