"""What the backend does with one layer's cache, in tensors alone: vLLM appears in shapes only.

vLLM hands a layer uint8 [blocks, 64, 644], or the same bytes viewed as e4m3. A block's bytes are a page of `LatentCache`,
its three planes one after another: the last two numbers are only its size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla import ops
from snapmla.cache import LatentCache
from snapmla.decode import decode_schedule, mla_decode_quantized
from snapmla.layout import BYTES_PER_TOKEN, PAGE_SIZE


def cache_shape(blocks: int) -> tuple[int, int, int]:
    """Of a layer's cache of so many blocks of 64 tokens, one byte an element."""
    return blocks, PAGE_SIZE, BYTES_PER_TOKEN


def pages_of(kv_cache: Tensor) -> LatentCache:
    return LatentCache(kv_cache.view(torch.uint8))


def append(kv_cache: Tensor, content: Tensor, rope: Tensor, slot_mapping: Tensor) -> None:
    """Fused-K-Append of a step's tokens.

    Args:
        kv_cache: the layer's cache; an empty one, as while vLLM measures memory, is left alone.
        content: bfloat16 [tokens, 512], after the RMSNorm; may have more rows than there are slots, padding.
        rope: bfloat16 [tokens, 1, 64] or [tokens, 64], after the rotary embedding.
        slot_mapping: int64 [n]; -1 for padding.
    """
    if kv_cache.numel():
        n = slot_mapping.shape[0]
        pages_of(kv_cache).append(content[:n], rope.flatten(1)[:n], slot_mapping)


def decode(
    kv_cache: Tensor,
    q_content: Tensor,
    q_rope: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    schedule: Tensor | None,
) -> Tensor:
    """Fused-Q-Quant and the decode kernel, for a batch whose sequences ask equally many queries.

    Args:
        q_content: bfloat16 [batch * s_q, heads, 512], any strides of its first two dimensions.
        q_rope: bfloat16 [batch * s_q, heads, 64], likewise.
        block_table: int32 [batch, max_blocks]; entries past a sequence's last block may be anything.
        seq_lens: int32 [batch], the queries' tokens included; 0 for a row of padding.
        schedule: of `Schedules`, or None.

    Returns:
        bfloat16 [batch * s_q, heads, 512]; zeros for padding.
    """
    batch = seq_lens.shape[0]
    if batch == 0 or q_content.shape[0] % batch:
        raise ValueError(f"queries must be the same number for each of {batch} sequences, got {q_content.shape[0]}.")
    query = (x.unflatten(0, (batch, -1)) for x in ops.quantize_q(q_content, q_rope))
    where = pages_of(kv_cache), block_table, seq_lens
    return mla_decode_quantized(*query, *where, softmax_scale, schedule=schedule)[0].flatten(0, 1)


def context_slots(block_table: Tensor, token_to_seq: Tensor, cu_seq_lens: Tensor, starts: Tensor) -> Tensor:
    """Where the tokens of a piece of the cached contexts lie, int64 [tokens]: sequence after sequence.

    Args:
        block_table: int32 [sequences, max_blocks].
        token_to_seq: int32 [tokens], the sequence of each token.
        cu_seq_lens: int32 [sequences + 1], tokens of the sequences before.
        starts: int32 [sequences], each one's first position in this piece.
    """
    sequence = token_to_seq.long()
    index = torch.arange(sequence.shape[0], device=sequence.device)
    position = index - cu_seq_lens[sequence] + starts[sequence]
    return block_table[sequence, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE


class Schedules:
    """The split of a step's decode calls, made once for all layers, in memory that CUDA graphs may keep."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def make(self, seq_lens: Tensor, block_table: Tensor, s_q: int, heads: int) -> Tensor:
        """`decode_schedule`, in the same memory whenever it has as many parts."""
        schedule = decode_schedule(seq_lens, block_table, s_q, heads)
        kept = self._kept.setdefault(len(schedule), schedule)
        if kept is not schedule:
            kept.copy_(schedule)
        return kept
