"""What is timed: each variant makes calls of a decode kernel over a pool of random pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapmla.bench.inputs import Pool
from snapmla.bench.machine import NO_GPU
from snapmla.bench.timing import Call
from snapmla.decode import decode_schedule, mla_decode_quantized, quantize_q
from snapmla.integrations import flashinfer, flashmla
from snapmla.layout import KV_LORA_RANK, PAGE_SIZE, QK_HEAD_DIM
from snapmla.quantization import to_e4m3

SOFTMAX_SCALE = 192**-0.5
SDPA_BYTES = 1 << 30
"""torch's attention writes its float32 logits out: shapes beyond this are left out."""

KERNELS = {
    "snapmla": ("snapmla",),
    "flashmla": ("bf16", "fp8"),
    "flashinfer": ("bf16", "fp8"),
    "torch_sdpa": ("bf16",),
}
"""Kernels, and the formats of the cache (`Pool.format`) that each reads."""


@dataclass
class Variant:
    """A kernel and the cache that it reads: one file of conf/variant/."""

    kernel: str
    cache: str
    backend: str = "auto"
    """Of FlashInfer, which has several implementations for Hopper: fa2, fa3; auto is its own choice."""

    @property
    def arithmetic(self) -> str:
        """Of its products: bf16, fp8, or mixed (Eq 7: content in FP8, RoPE part in BF16)."""
        return {"snapmla": "mixed", "flashmla": self.cache}.get(self.kernel, "bf16")


@dataclass(frozen=True)
class Workload:
    """One decode call of one layer."""

    heads: int
    s_q: int
    batch: int
    context: int


def check(variants: Mapping[str, Variant]) -> None:
    """Raises ValueError where there is no such kernel, or no such kernel for that cache."""
    for name, variant in variants.items():
        if variant.kernel not in KERNELS:
            raise ValueError(
                f"variant.{name}.kernel must be among {', '.join(KERNELS)}, got {variant.kernel!r}."
            )
        if variant.cache not in (formats := KERNELS[variant.kernel]):
            raise ValueError(
                f"variant.{name}.cache must be {' or '.join(formats)} for {variant.kernel}, got {variant.cache!r}."
            )


def why_not(variant: Variant, gpu: str | None, workload: Workload | None = None) -> str | None:
    """Why a variant is not timed on `gpu` (None: no Hopper GPU) or at a shape, in one sentence; or None."""
    if gpu is None:
        return NO_GPU
    if variant.kernel == "flashmla":
        return flashmla.why_not(variant.cache)
    if variant.kernel == "flashinfer":
        return flashinfer.why_not()
    if variant.kernel == "torch_sdpa" and workload:
        if workload.s_q > 1:
            return (
                "torch's attention has no bottom-right causal mask for several queries that share their keys."
            )
        if 4 * workload.heads * workload.batch * workload.context > SDPA_BYTES:
            return "torch's attention would write out more than 1 GiB of logits."
    return None


def decode_calls(variant: Variant, pool: Pool, workload: Workload, tables: Sequence[Tensor]) -> list[Call]:
    """One call for each block table; queries are quantized and schedules made, as they are once a step."""
    return [_prepare(variant, pool, workload, table, seed) for seed, table in enumerate(tables)]


def step_calls(pool: Pool, workload: Workload, tables: Sequence[Tensor]) -> list[Call]:
    """SnapMLA with everything a step's first layer pays: append the new tokens, quantize q, make the schedule, decode."""
    return [_snapmla_step(pool, workload, table, seed) for seed, table in enumerate(tables)]


def peer_call(
    variant: Variant,
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    softmax_scale: float,
) -> Call:
    """A call of a kernel that is not ours: q bfloat16 [batch, s_q, heads, 576], cache [pages, 64, 1, 576] in its format,
    sequences of one length; returns what starts with out [batch, s_q, heads, 512]."""
    paging = block_table, cache_seqlens, softmax_scale
    if variant.kernel == "flashinfer":
        return flashinfer.prepare(q, cache, *paging, backend=variant.backend)
    if variant.kernel == "flashmla":
        return flashmla.prepare(q if variant.cache == "bf16" else to_e4m3(q.float()), cache, *paging)
    batch, s_q, heads, _ = q.shape
    keys = cache[block_table.long()].view(batch, 1, -1, QK_HEAD_DIM)[:, :, : int(cache_seqlens[0])]
    rows = q.view(batch, 1, s_q * heads, QK_HEAD_DIM)  # heads share the keys: rows of one head
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: (
        attention(rows, keys, keys[..., :KV_LORA_RANK], scale=softmax_scale).view(batch, s_q, heads, -1),
    )


def _prepare(variant: Variant, pool: Pool, workload: Workload, table: Tensor, seed: int) -> Call:
    w, q, lengths = workload, *_batch(pool, workload, seed)
    arguments = pool.format(variant.cache), table, lengths, SOFTMAX_SCALE
    if variant.kernel != "snapmla":
        return peer_call(variant, q, *arguments)
    query, schedule = quantize_q(q), decode_schedule(lengths, table, w.s_q, w.heads)
    out, lse = _results(q)
    return lambda: mla_decode_quantized(*query, *arguments, out=out, lse=lse, schedule=schedule)


def _snapmla_step(pool: Pool, workload: Workload, table: Tensor, seed: int) -> Call:
    q, lengths = _batch(pool, workload, seed)
    out, lse = _results(q)
    cache, tokens = pool.format("snapmla"), pool.rows(seed, workload.batch * workload.s_q)
    positions = torch.arange(workload.context - workload.s_q, workload.context, device=table.device)
    slots = (table[:, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE).flatten()

    def call() -> tuple[Tensor, Tensor]:
        cache.append(*tokens, slots)
        return mla_decode_quantized(*quantize_q(q), cache, table, lengths, SOFTMAX_SCALE, out=out, lse=lse)

    return call


def _batch(pool: Pool, workload: Workload, seed: int) -> tuple[Tensor, Tensor]:
    q = pool.queries(workload.batch, workload.s_q, workload.heads, seed)
    lengths = torch.full((workload.batch,), workload.context, dtype=torch.int32, device=q.device)
    return q, lengths


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    batch, s_q, heads, _ = q.shape
    return q.new_empty(batch, s_q, heads, KV_LORA_RANK), q.new_empty(batch, heads, s_q, dtype=torch.float32)
