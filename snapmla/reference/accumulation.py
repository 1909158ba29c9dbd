"""How Hopper's tensor cores add products of e4m3 values, bit by bit.

The instruction set does not say with how many bits an FP8 WGMMA adds to its float32 accumulator. Measured on an
H200, each step of 32 products does this, and nothing else:

1. Each product that is not zero gets the sum of its factors' exponents (a subnormal has the exponent -6, as in its
   encoding), the accumulator its own. The largest of these 33 exponents, e, sets the last place: 2^(e - 13).
2. The products and the accumulator are cut off at the last place, toward zero, and added exactly.
3. The sum is cut off 13 fraction bits below its own leading bit, toward zero.

So the accumulator is a float with 13 fraction bits, and once it is 2^13 times larger than a product, the product is
lost entirely: a sum over a long context stalls. kernels/probes/fp8_accumulation.cu is the probe; its outputs are
recorded in tests/data/ and this model equals every one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MMA_K = 32
"""Products that one FP8 WGMMA instruction adds to its accumulator."""

E4M3_MIN_EXPONENT = -6
"""Exponent of e4m3's smallest normal numbers, and of its subnormals."""


@dataclass(frozen=True)
class Accumulation:
    """How the products of an attention block are summed.

    Attributes:
        bits: fraction bits of the tensor core's accumulator (Hopper: 13); None adds in the arithmetic type, without
            any loss beyond its own rounding.
        promote: every block of keys starts a new tensor-core accumulator, which is added to the output in float32;
            otherwise one accumulator runs through the whole sequence.
    """

    bits: int | None = None
    promote: bool = True

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """a [rows, n] @ b [n, columns] in a fresh accumulator; with `bits`, float32 tensors of e4m3 values."""
        if self.bits is None:
            return a @ b
        return tensor_core_add(a.new_zeros(a.shape[0], b.shape[1]), a, b, self.bits)

    def add(self, total: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """total [rows, columns] + a [rows, n] @ b [n, columns]."""
        if self.bits is None or self.promote:
            return total + self.dot(a, b)
        return tensor_core_add(total, a, b, self.bits)


FLOAT32_ADDS = Accumulation()
SINGLE_ACCUMULATOR = Accumulation(bits=13, promote=False)
PROMOTED = Accumulation(bits=13, promote=True)


def tensor_core_add(accumulator: Tensor, a: Tensor, b: Tensor, bits: int = 13) -> Tensor:
    """accumulator [rows, columns] + a [rows, n] @ b [n, columns], as a chain of FP8 WGMMA instructions.

    Args:
        accumulator: float32.
        a, b: float32, holding e4m3 values.
        bits: fraction bits of the accumulator.
    """
    a_unit, b_unit = _operand_unit(a), _operand_unit(b)
    for k in range(0, a.shape[1], MMA_K):
        step = slice(k, k + MMA_K)
        unit = (a_unit[:, step, None] * b_unit[None, step]).amax(1)
        last_place = _last_place(torch.maximum(unit, _leading_bit(accumulator)), bits)
        products = _cut(a[:, step, None] * b[None, step], last_place[:, None])
        # exact in float32: at most 21 bits in units of the last place
        total = _cut(accumulator, last_place) + products.sum(1)
        accumulator = _cut(total, _last_place(_leading_bit(total), bits))
    return accumulator


def _operand_unit(x: Tensor) -> Tensor:
    """2^exponent of e4m3 values, 0 for 0."""
    return torch.where(x == 0, 0.0, _leading_bit(x).clamp_min(2.0**E4M3_MIN_EXPONENT))


def _leading_bit(x: Tensor) -> Tensor:
    """2^floor(log2 |x|) of float32 values, 0 for 0: the exponent field alone."""
    if x.dtype != torch.float32:
        raise TypeError(f"the tensor core's additions are modelled on float32, got {x.dtype}.")
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _last_place(unit: Tensor, bits: int) -> Tensor:
    return (unit * 2.0**-bits).clamp_min(torch.finfo(unit.dtype).tiny)


def _cut(x: Tensor, last_place: Tensor) -> Tensor:
    return torch.trunc(x / last_place) * last_place
