"""Error of flat attention against context for each way of accumulating FP8 products (beyond the paper).

    python -m snapmla.experiments.accumulation keys=[1024,16384]

A query of zeros attends to every key alike, which is the worst case for an accumulator that keeps 13 bits:
thousands of equal addends. The tensor core is modelled (snapmla.reference.accumulation); the errors are
computed here, against float64 on the same e4m3 values, output rounded to BF16.

Writes results/accumulation/accumulation.csv; and kernels.csv, the same error of real kernels: measured where there is a
Hopper GPU, "not run" elsewhere.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from omegaconf import MISSING
from torch import Tensor

from snapmla.bench.machine import hopper_gpu
from snapmla.bench.variants import Variant, check, peer_call, why_not
from snapmla.cache import LatentCache
from snapmla.decode import merge_partials, mla_decode
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.layout import KV_LORA_RANK, PAGE_SIZE, QK_HEAD_DIM, QK_ROPE_HEAD_DIM
from snapmla.metrics import relative_l2
from snapmla.quantization import E4M3, Quantized, to_e4m3
from snapmla.reference import (
    FLOAT32_ADDS,
    KERNEL,
    PROMOTED,
    SINGLE_ACCUMULATOR,
    Accumulation,
    emulated_attention,
)

ACCUMULATION = {
    "float32": FLOAT32_ADDS,
    "single": SINGLE_ACCUMULATOR,
    "split_4k": SINGLE_ACCUMULATOR,
    "promoted": PROMOTED,
}


@dataclass
class ValuesConfig:
    mean: float = MISSING
    std: float = MISSING


@dataclass
class KernelsConfig:
    """Decode calls of the kernels: `heads` queries of zeros for each of `batch` sequences, which share their pages."""

    batches: list[int] = MISSING
    heads: int = MISSING


@dataclass
class AccumulationConfig(BaseConfig):
    keys: list[int] = MISSING
    values: list[ValuesConfig] = field(default_factory=list)
    columns: int = MISSING
    split: int = MISSING
    variant: dict[str, Variant] = field(default_factory=dict)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)


def flat_attention(content: Tensor, accumulation: Accumulation, split: int) -> Tensor:
    """Attention of a zero query over e4m3 content [keys, n] in the kernel's blocks, and in parts of `split` keys merged by
    LSE: float32 [n]."""
    rules = replace(KERNEL, accumulation=accumulation)
    query = Quantized(
        torch.zeros(1, 1, content.shape[1]), torch.zeros(1, 1, QK_ROPE_HEAD_DIM), torch.ones(1, 1)
    )
    parts = []
    for part in content.split(split):
        key = Quantized(part, torch.zeros(len(part), QK_ROPE_HEAD_DIM), torch.ones(len(part)))
        parts.append(emulated_attention(query, key, 1.0, causal=False, rules=rules))
    out, _ = merge_partials(*(torch.stack(x)[:, None] for x in zip(*parts, strict=True)))
    return out[0, 0, 0]


def kernel_error(variant: Variant, content: Tensor, batch: int, heads: int) -> float:
    """Relative L2 error of a kernel's flat attention over e4m3 content [keys, 512] on a GPU, against float64."""
    keys, device = content.shape[0], content.device
    pages = -(-keys // PAGE_SIZE)
    content = torch.nn.functional.pad(content.float(), (0, 0, 0, pages * PAGE_SIZE - keys))
    content = content.to(E4M3).view(pages, PAGE_SIZE, -1)
    table = torch.arange(pages, dtype=torch.int32, device=device).repeat(batch, 1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    q = torch.zeros(batch, 1, heads, QK_HEAD_DIM, dtype=torch.bfloat16, device=device)
    rope = torch.zeros(pages, PAGE_SIZE, QK_ROPE_HEAD_DIM, dtype=torch.bfloat16, device=device)
    if variant.kernel == "snapmla":
        cache = LatentCache.from_planes(content, rope, torch.ones(pages, PAGE_SIZE, device=device))
        out, _ = mla_decode(q, cache, table, lengths, 1.0)
    else:
        dtype = torch.bfloat16 if variant.cache == "bf16" else E4M3
        rows = torch.cat([content.float(), rope.float()], -1).to(dtype)[:, :, None]
        out = peer_call(variant, q, rows, table, lengths, 1.0)()[0]
    exact = content.double().flatten(0, 1)[:keys].mean(0)
    return relative_l2(out, exact.expand(out.shape))


def kernel_rows(cfg: AccumulationConfig) -> list[dict]:
    """The rows of kernels.csv: every kernel, distribution, batch and context."""
    rows, calls = [], cfg.kernels
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    hopper = hopper_gpu()
    reasons = {name: why_not(variant, hopper) for name, variant in cfg.variant.items()}
    for values in cfg.values:
        if None in reasons.values():
            generator = torch.Generator().manual_seed(cfg.seed)
            noise = torch.randn(max(cfg.keys), KV_LORA_RANK, generator=generator)
            content = to_e4m3(noise * values.std + values.mean).cuda()
        for name, batch, keys in itertools.product(cfg.variant, calls.batches, cfg.keys):
            reason = reasons[name]
            error = None if reason else kernel_error(cfg.variant[name], content[:keys], batch, calls.heads)
            status = {"status": "not run" if reason else "ok", "reason": reason, "gpu": gpu}
            shape = {"variant": name, "heads": calls.heads, "batch": batch, "keys": keys}
            distribution = {"value_mean": values.mean, "value_std": values.std}
            rows.append({**shape, **distribution, "relative_l2": error, "source": "measured", **status})
    return rows


def modelled_rows(cfg: AccumulationConfig, progress: Callable[[str], None]) -> list[dict]:
    """The rows of accumulation.csv: every distribution, context and rule.

    All distributions go through one emulation, side by side: columns do not meet, and its time goes by blocks of keys.
    """
    noise = torch.randn(max(cfg.keys), cfg.columns, generator=torch.Generator().manual_seed(cfg.seed))
    content = torch.cat([to_e4m3(noise * values.std + values.mean).float() for values in cfg.values], 1).to(
        E4M3
    )
    found: dict[tuple[int, str], list[float]] = {}
    for keys in cfg.keys:
        for rule, accumulation in ACCUMULATION.items():
            out = flat_attention(content[:keys], accumulation, cfg.split if rule == "split_4k" else keys)
            exact = content[:keys].double().mean(0)
            pairs = zip(out.bfloat16().split(cfg.columns), exact.split(cfg.columns), strict=True)
            found[keys, rule] = [relative_l2(ours, theirs) for ours, theirs in pairs]
        progress(f"{keys} keys")
    return [
        {
            "value_mean": values.mean, "value_std": values.std, "keys": keys, "rule": rule,
            "block": KERNEL.block, "bits": accumulation.bits, "relative_l2": found[keys, rule][i], "source": "modelled",
        }
        for i, values in enumerate(cfg.values)
        for keys in cfg.keys
        for rule, accumulation in ACCUMULATION.items()
    ]  # fmt: skip


@application("accumulation", AccumulationConfig)
def main(cfg: AccumulationConfig, run: Run) -> None:
    check(cfg.variant)
    run.write_table("accumulation.csv", modelled_rows(cfg, run.progress))
    measured = kernel_rows(cfg)
    run.write_table("kernels.csv", measured)
    for reason, count in Counter(row["reason"] for row in measured if row["reason"]).items():
        run.progress(f"{count} of {len(measured)} kernel calls not run: {reason}")


if __name__ == "__main__":
    main()
