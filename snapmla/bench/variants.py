"""What is timed: each variant makes calls of a decode kernel over a pool of random pages."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapmla.bench.inputs import Pool
from snapmla.bench.timing import Call
from snapmla.decode import decode_schedule, mla_decode_quantized, quantize_q
from snapmla.integrations import flashmla
from snapmla.layout import KV_LORA_RANK, QK_HEAD_DIM
from snapmla.quantization import to_e4m3

SOFTMAX_SCALE = 192**-0.5
SDPA_BYTES = 1 << 30
"""torch's attention writes its float32 logits out: shapes beyond this are left out."""

VARIANTS = ("snapmla", "flashmla_bf16", "flashmla_fp8", "flashinfer_bf16", "flashinfer_fp8kv", "torch_sdpa")


@dataclass(frozen=True)
class Workload:
    """One decode call of one layer."""

    heads: int
    s_q: int
    batch: int
    context: int


def why_not(variant: str, gpu: str | None, workload: Workload | None = None) -> str | None:
    """Why a variant is not timed on `gpu` (None: no Hopper GPU) or at a shape, in one sentence; or None."""
    if variant not in VARIANTS:
        raise ValueError(f"variants must be among {', '.join(VARIANTS)}, got {variant!r}.")
    if gpu is None:
        return "This machine has no Hopper GPU (compute capability 9.0)."
    if variant.startswith("flashmla"):
        return flashmla.why_not(variant)
    if variant.startswith("flashinfer"):
        installed = importlib.util.find_spec("flashinfer") is not None
        return "This version does not call FlashInfer." if installed else "FlashInfer is not installed."
    if variant == "torch_sdpa" and workload:
        if workload.s_q > 1:
            return (
                "torch's attention has no bottom-right causal mask for several queries that share their keys."
            )
        if 4 * workload.heads * workload.batch * workload.context > SDPA_BYTES:
            return "torch's attention would write out more than 1 GiB of logits."
    return None


def decode_calls(variant: str, pool: Pool, workload: Workload, tables: Sequence[Tensor]) -> list[Call]:
    """One call for each block table; queries are quantized and schedules made, as they are once a step."""
    return [_prepare(variant, pool, workload, table, seed) for seed, table in enumerate(tables)]


def step_calls(pool: Pool, workload: Workload, tables: Sequence[Tensor]) -> list[Call]:
    """SnapMLA with everything a layer's first call of a step pays: quantize q, make the schedule, decode."""
    return [_snapmla_step(pool, workload, table, seed) for seed, table in enumerate(tables)]


def _prepare(variant: str, pool: Pool, workload: Workload, table: Tensor, seed: int) -> Call:
    w, q, lengths = workload, *_batch(pool, workload, seed)
    if variant == "snapmla":
        query, schedule = quantize_q(q), decode_schedule(lengths, table, w.s_q, w.heads)
        out, lse = _results(q)
        arguments = *query, pool.format("snapmla"), table, lengths, SOFTMAX_SCALE
        return lambda: mla_decode_quantized(*arguments, out=out, lse=lse, schedule=schedule)
    if variant == "torch_sdpa":
        keys = pool.format("bf16")[table.long()].view(w.batch, 1, -1, QK_HEAD_DIM)[:, :, : w.context]
        rows = q.view(w.batch, 1, w.heads, QK_HEAD_DIM)  # heads share the keys: rows of one head
        attention = torch.nn.functional.scaled_dot_product_attention
        return lambda: attention(rows, keys, keys[..., :KV_LORA_RANK], scale=SOFTMAX_SCALE)
    name = variant.removeprefix("flashmla_")
    q = q if name == "bf16" else to_e4m3(q.float())
    return flashmla.prepare(variant, q, pool.format(name), table, lengths, SOFTMAX_SCALE)


def _snapmla_step(pool: Pool, workload: Workload, table: Tensor, seed: int) -> Call:
    q, lengths = _batch(pool, workload, seed)
    out, lse = _results(q)
    cache = pool.format("snapmla")
    return lambda: mla_decode_quantized(
        *quantize_q(q), cache, table, lengths, SOFTMAX_SCALE, out=out, lse=lse
    )


def _batch(pool: Pool, workload: Workload, seed: int) -> tuple[Tensor, Tensor]:
    q = pool.queries(workload.batch, workload.s_q, workload.heads, seed)
    lengths = torch.full((workload.batch,), workload.context, dtype=torch.int32, device=q.device)
    return q, lengths


def _results(q: Tensor) -> tuple[Tensor, Tensor]:
    batch, s_q, heads, _ = q.shape
    return q.new_empty(batch, s_q, heads, KV_LORA_RANK), q.new_empty(batch, heads, s_q, dtype=torch.float32)
