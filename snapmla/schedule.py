"""How a decode call is split over thread blocks: the rule of kernels/sm90/decode/schedule.cuh.

A sequence costs `SEQUENCE_COST` plus its key blocks. Laid end to end, the sequences make a line that is cut into equal
parts, each visited by its own thread blocks (one for each tile of `ROW_TILE` rows); a sequence that is cut has its
parts combined afterwards. In parts of s blocks the longest sequence, of n, takes the time of s blocks and of combining
n / s parts, `COMBINED_PARTS` a block: so s is at least sqrt(n / `COMBINED_PARTS`). Where parts longer by up to
`CUT_COST` hold the longest sequence, they do: equal sequences then remain whole. Lengths are read on the device only,
so that a captured CUDA graph follows new ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla.layout import PAGE_SIZE

ROW_TILE = 64
"""Rows (a query of a head each) of one thread block."""

BLOCK_KEYS = 2 * PAGE_SIZE
"""Keys of one step of the kernel's main loop: they share a row's reference and an accumulator (`Rules.block`)."""

SEQUENCE_COST = 2
"""What a sequence costs besides its key blocks, in blocks: its queries' load, the pipeline's start, its results."""

CUT_COST = 4
"""What it costs to cut a sequence, in blocks: the second part's start, partial results, their combination."""

COMBINED_PARTS = 16
"""Parts of a sequence that are combined in the time of one key block."""


def row_tiles(rows: int) -> int:
    """Thread blocks that the rows of a sequence, s_q * heads, need."""
    return -(-rows // ROW_TILE)


def parts_for(multiprocessors: int, rows: int) -> int:
    """Parts that give every multiprocessor one thread block."""
    return max(1, multiprocessors // row_tiles(rows))


def boundaries(cache_seqlens: Tensor, max_pages: int, parts: int) -> Tensor:
    """Where each part begins.

    Args:
        cache_seqlens: int32 [batch], on the CPU.
        max_pages: width of the block table; longer lengths are cut.
        parts: how many.

    Returns:
        int32 [parts + 1, 2]: sequence and key block of it; part p visits the blocks from boundary p to boundary p + 1.
    """
    lengths = cache_seqlens.long().clamp(0, max_pages * PAGE_SIZE)
    blocks = (lengths + BLOCK_KEYS - 1).div(BLOCK_KEYS, rounding_mode="floor")
    ends = (blocks + SEQUENCE_COST).cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    longest = int(blocks.max()) if len(blocks) else 0
    share = max(-(-total // parts), 1)
    while COMBINED_PARTS * share**2 < longest:
        share += 1
    whole = longest + SEQUENCE_COST
    if share < whole <= share + CUT_COST:
        share = whole
    cuts = torch.arange(parts + 1) * share
    sequence = torch.searchsorted(ends, cuts, right=True)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])[sequence]
    block = torch.where(cuts >= total, 0, (cuts - starts - SEQUENCE_COST).clamp_min(0))
    return torch.stack([sequence, block], 1).int()
