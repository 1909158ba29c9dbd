"""Decode calls, their two references on the device that ran them, and the bars between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from paging import latents, paged, queries
from torch import Tensor

from snapmla import LatentCache, dequantize, quantize_q
from snapmla.layout import KV_LORA_RANK, PAGE_SIZE
from snapmla.metrics import relative_l2
from snapmla.quantization import Quantized
from snapmla.reference import KERNEL, Rules, exact_attention
from snapmla.reference.paged import cuts_of, emulated_sequence, stored_tokens

SCALE = 192**-0.5


@dataclass
class Call:
    """A decode call's inputs, on one device."""

    query: Quantized
    cache: LatentCache
    block_table: Tensor
    cache_seqlens: Tensor
    softmax_scale: float
    causal: bool = True

    @property
    def arguments(self) -> tuple:
        """Of `mla_decode_quantized`."""
        return (
            *self.query,
            self.cache,
            self.block_table,
            self.cache_seqlens,
            self.softmax_scale,
            self.causal,
        )

    def sequence(self, i: int) -> tuple[Quantized, Quantized]:
        """Queries [s_q, heads, ...] and stored tokens of a sequence."""
        length = int(self.cache_seqlens[i])
        pages = self.block_table[i, : -(-length // PAGE_SIZE)].long()
        return Quantized(*(x[i] for x in self.query)), stored_tokens(self.cache.planes, pages, length)


def call_of(
    lengths, s_q, heads, *, rope=1.0, sharpness=1.0, softmax_scale=SCALE, causal=True, seed=0, device="cpu"
) -> Call:
    """A decode call on poisoned, shuffled pages; the sequences are windows of one."""
    content, rope_part = latents(max(lengths, default=0) + 64, rope=rope, seed=seed)
    sequences = paged(
        [(content[i % 64 :][:n], rope_part[i % 64 :][:n]) for i, n in enumerate(lengths)], seed=seed
    )
    q = queries(len(lengths), s_q, heads, sharpness=sharpness, seed=seed + 1)
    return Call(
        quantize_q(q.to(device)),
        LatentCache(sequences.cache.buffer.to(device)),
        sequences.block_table.to(device),
        sequences.cache_seqlens.to(device),
        softmax_scale,
        causal,
    )


@dataclass
class Errors:
    """Of one decode call: relative L2 errors of out, and errors of lse with what is allowed."""

    kernel_emulated: float
    emulated_exact: float
    kernel_exact: float
    rounding: float
    """Of the emulated output to BF16: about 1.6e-3, more where the output has few distinct values."""
    lse: float
    lse_allowed: float

    def check(self) -> None:
        """The kernel equals the emulation up to BF16's rounding of out, and is as exact as the emulation."""
        floor = max(2e-3, 1.01 * self.rounding)
        assert self.kernel_emulated <= 0.25 * self.emulated_exact + floor, self
        assert self.kernel_exact <= 1.05 * self.emulated_exact + floor, self
        assert self.lse <= self.lse_allowed, self


def errors(call: Call, out: Tensor, lse: Tensor, schedule: Tensor, rules: Rules = KERNEL) -> Errors:
    """Compare out bfloat16 [batch, s_q, heads, 512] and lse [batch, heads, s_q] with both references.

    The emulation is cut where the schedule cuts, since a part of a sequence starts with references of its own. Exact is
    float64 attention of the quantized values, so that what quantization itself costs does not hide the kernel's error.
    """
    schedule = schedule.cpu()
    emulated_outs, exact_outs, kernel_outs = [], [], []
    worst_lse = allowed = 0.0
    for i, length in enumerate(call.cache_seqlens.tolist()):
        query, key = call.sequence(i)
        cuts = cuts_of(schedule, i, length)
        emulated, emulated_lse = emulated_sequence(query, key, call.softmax_scale, call.causal, cuts, rules)
        q, k = dequantize(query), dequantize(key)
        exact, exact_lse = exact_attention(
            q, k[:, :KV_LORA_RANK], k[:, KV_LORA_RANK:], call.softmax_scale, causal=call.causal
        )
        empty = torch.isposinf(exact_lse)
        assert torch.equal(torch.isposinf(lse[i].T), empty), (
            f"sequence {i} of length {length}: empty rows differ"
        )
        assert (out[i][empty] == 0).all(), f"sequence {i} of length {length}: an empty row is not 0"
        for results, value in ((emulated_outs, emulated), (exact_outs, exact), (kernel_outs, out[i])):
            results.append(value[~empty].double())
        if not empty.all():
            worst_lse = max(worst_lse, (lse[i].T - emulated_lse)[~empty].abs().max().item())
            logits = (q.flatten(0, 1) @ k.T).abs().max().item() * call.softmax_scale
            allowed = max(allowed, 2e-4 + 1e-4 * logits)
    emulated, exact, kernel = (torch.cat(x) for x in (emulated_outs, exact_outs, kernel_outs))
    assert torch.isfinite(kernel).all()
    if not exact.numel():
        return Errors(*[0.0] * 6)
    return Errors(
        relative_l2(kernel, emulated),
        relative_l2(emulated, exact),
        relative_l2(kernel, exact),
        relative_l2(emulated.bfloat16(), emulated),
        worst_lse,
        allowed,
    )
