"""Paged caches for tests, with poison in everything that a call may not use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from snapmla import LatentCache, dequantize
from snapmla.layout import KV_LORA_RANK, PAGE_BYTES, PAGE_SIZE, QK_ROPE_HEAD_DIM
from snapmla.quantization import Quantized

UNUSED_PAGE = 2147480000
"""Block-table entry past a sequence's last page: reading that page faults."""


def latents(tokens: int, *, rope: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Gaussian content [tokens, 512] and RoPE [tokens, 64] of standard deviation `rope`, BF16."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, KV_LORA_RANK, generator=generator).bfloat16(),
        (torch.randn(tokens, QK_ROPE_HEAD_DIM, generator=generator) * rope).bfloat16(),
    )


def queries(batch: int, s_q: int, heads: int, *, sharpness: float = 1.0, seed: int = 1) -> Tensor:
    """Gaussian queries, BF16 [batch, s_q, heads, 576]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, s_q, heads, KV_LORA_RANK + QK_ROPE_HEAD_DIM)
    return (torch.randn(shape, generator=generator) * sharpness).bfloat16()


def poison(cache: LatentCache) -> None:
    """Fill every slot with NaN: content 0x7F, RoPE NaN, scale NaN."""
    content, rope, scale = cache.planes
    content.view(torch.uint8).fill_(0x7F)
    rope.fill_(torch.nan)
    scale.fill_(torch.nan)


@dataclass
class Paged:
    """Sequences in a poisoned cache."""

    cache: LatentCache
    block_table: Tensor
    cache_seqlens: Tensor
    slots: list[Tensor]

    def stored(self, sequence: int) -> Quantized:
        """What the cache holds of a sequence, in token order."""
        index = self.slots[sequence]
        page, offset = index // PAGE_SIZE, index % PAGE_SIZE
        content, rope, scale = self.cache.planes
        gathered = content.view(torch.uint8)[page, offset].view(content.dtype)
        return Quantized(gathered, rope[page, offset], scale[page, offset])

    def dequantized(self, sequence: int) -> tuple[Tensor, Tensor]:
        """The stored content and RoPE multiplied back, float32."""
        values = dequantize(self.stored(sequence))
        return values[:, :KV_LORA_RANK], values[:, KV_LORA_RANK:]


def paged(sequences: list[tuple[Tensor, Tensor]], *, spare_pages: int = 3, seed: int = 0) -> Paged:
    """Append sequences (content, rope) to a poisoned cache, on shuffled pages, and a poisoned block table."""
    lengths = [content.shape[0] for content, _ in sequences]
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    total = sum(counts) + spare_pages
    cache = LatentCache(torch.zeros(total, PAGE_BYTES, dtype=torch.uint8))
    poison(cache)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    block_table = torch.full((len(sequences), max(counts, default=0) + 2), UNUSED_PAGE, dtype=torch.int32)
    slots, used = [], 0
    for i, (content, rope) in enumerate(sequences):
        pages = order[used : used + counts[i]]
        used += counts[i]
        block_table[i, : counts[i]] = pages.int()
        tokens = torch.arange(lengths[i])
        slots.append(pages[tokens // PAGE_SIZE] * PAGE_SIZE + tokens % PAGE_SIZE)
        cache.append(content, rope, slots[-1])
    return Paged(cache, block_table, torch.tensor(lengths, dtype=torch.int32), slots)
