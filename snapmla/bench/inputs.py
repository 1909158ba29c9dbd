"""Inputs of the kernel benchmark: random, in the ranges of a model's latents, and larger than any cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from snapmla.cache import LatentCache
from snapmla.layout import KV_LORA_RANK, PAGE_SIZE, QK_HEAD_DIM, QK_ROPE_HEAD_DIM
from snapmla.quantization import E4M3, to_e4m3

ROPE = 8.0
"""Standard deviation of the RoPE part, the content's being 1: wider, as in the paper's Fig 3."""
TOKEN_SPREAD = 0.25
"""Of the logarithm of a token's size: scales that differ from token to token."""


@dataclass
class Pool:
    """Pages of random latents in every format; sequences of any length are random pages of it.

    A workload larger than the pool uses a page more than once. The pool is far larger than L2, so that a page has long
    been evicted when its turn comes again.
    """

    pages: int
    seed: int = 0
    device: str = "cuda"
    _formats: dict[str, object] = field(default_factory=dict)

    def rows(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """BF16 content [count, 512] and RoPE [count, 64] of tokens; the same for every format."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 1_000_003 + start)
        size = torch.exp(torch.randn(count, 1, generator=generator, device=self.device) * TOKEN_SPREAD)
        content = torch.randn(count, KV_LORA_RANK, generator=generator, device=self.device) * size
        rope = torch.randn(count, QK_ROPE_HEAD_DIM, generator=generator, device=self.device) * ROPE
        return content.bfloat16(), rope.bfloat16()

    def format(self, name: str) -> LatentCache | Tensor:
        """The pool as "snapmla" (LatentCache), "bf16" or "fp8" ([pages, 64, 1, 576])."""
        if name not in self._formats:
            self._formats[name] = self._make(name)
        return self._formats[name]

    def _make(self, name: str) -> LatentCache | Tensor:
        tokens, chunk = self.pages * PAGE_SIZE, 1 << 17
        cache = LatentCache.allocate(self.pages, self.device) if name == "snapmla" else None
        dtype = torch.bfloat16 if name == "bf16" else E4M3
        flat = None if cache else torch.empty(tokens, QK_HEAD_DIM, dtype=dtype, device=self.device)
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            content, rope = self.rows(start, count)
            check_random(content)
            if cache:
                cache.append(content, rope, torch.arange(start, start + count, device=self.device))
            else:
                row = torch.cat([content, rope], -1)
                flat[start : start + count] = row if name == "bf16" else to_e4m3(row.float())
        return cache or flat.view(self.pages, PAGE_SIZE, 1, QK_HEAD_DIM)

    def block_table(self, batch: int, context: int, seed: int) -> Tensor:
        """int32 [batch, pages of the context]: random pages, each used as seldom as the pool allows."""
        generator = torch.Generator(self.device).manual_seed(seed)
        needed = batch * -(-context // PAGE_SIZE)
        rounds = [
            torch.randperm(self.pages, generator=generator, device=self.device)
            for _ in range(-(-needed // self.pages))
        ]
        return torch.cat(rounds)[:needed].int().view(batch, -1)

    def queries(self, batch: int, s_q: int, heads: int, seed: int) -> Tensor:
        """BF16 [batch, s_q, heads, 576], whose RoPE part is as much smaller as the keys' is larger."""
        generator = torch.Generator(self.device).manual_seed(seed)
        q = torch.randn(batch, s_q, heads, QK_HEAD_DIM, generator=generator, device=self.device)
        q[..., KV_LORA_RANK:] /= ROPE
        return q.bfloat16()


def check_random(x: Tensor) -> None:
    """Refuse constant rows or columns: tensor cores run faster on them than on any real data."""
    sample = x[: 1 << 12].float()
    if not (bool((sample.std(0) > 0).all()) and bool((sample.std(-1) > 0).all())):
        raise ValueError("the benchmark's inputs must be random, got constant rows or columns.")
