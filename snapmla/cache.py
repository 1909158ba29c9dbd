"""The paged latent cache of one attention layer: 644 bytes a token (layout.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla import layout, ops
from snapmla.checks import check_cache, check_slots, check_tensor
from snapmla.quantization import E4M3


class LatentCache:
    """Pages of 64 tokens; each page holds its content, RoPE and scale planes one after another.

    Engines that keep one tensor per layer pass it as `buffer`; callers that keep three tensors use
    `from_planes`. Either way the planes are plain tensors and the cache holds no other state.

    Attributes:
        buffer: uint8 [pages, 41216], whose views the planes are, or None for a cache made from planes.
        content, rope, scale: the planes; stored RoPE values are divided by the token's scale.
    """

    bytes_per_token = layout.BYTES_PER_TOKEN

    def __init__(self, buffer: Tensor) -> None:
        """Wrap a buffer: uint8 [pages, 41216] or [pages, 64, 644], contiguous."""
        if isinstance(buffer, Tensor) and buffer.dim() == 3:
            check_tensor(
                "buffer", buffer, shape=["pages", layout.PAGE_SIZE, layout.BYTES_PER_TOKEN], dtype=torch.uint8
            )
            buffer = buffer.flatten(1)
        ops.split_planes(buffer)  # checks it
        self.buffer: Tensor | None = buffer
        self._planes: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def allocate(cls, pages: int, device: torch.device | str = "cpu") -> LatentCache:
        """A zeroed cache of `pages` pages."""
        return cls(torch.zeros(pages, layout.PAGE_BYTES, dtype=torch.uint8, device=device))

    @classmethod
    def from_planes(cls, content: Tensor, rope: Tensor, scale: Tensor) -> LatentCache:
        """A cache over three tensors: content [pages, 64, 512], rope [pages, 64, 64], scale [pages, 64], any
        page stride."""
        check_cache(content, rope, scale)
        cache = cls.__new__(cls)
        cache.buffer, cache._planes = None, (content, rope, scale)
        return cache

    @property
    def planes(self) -> tuple[Tensor, Tensor, Tensor]:
        """content e4m3fn [pages, 64, 512], rope bfloat16 [pages, 64, 64], scale float32 [pages, 64].

        Views of the buffer are made at each call: torch.compile then sees one input, the buffer, instead of
            aliases of it.
        """
        return ops.split_planes(self.buffer) if self._planes is None else self._planes

    @property
    def content(self) -> Tensor:
        return self.planes[0]

    @property
    def rope(self) -> Tensor:
        return self.planes[1]

    @property
    def scale(self) -> Tensor:
        return self.planes[2]

    @property
    def device(self) -> torch.device:
        return (self.planes[0] if self.buffer is None else self.buffer).device

    @property
    def num_pages(self) -> int:
        return (self.planes[0] if self.buffer is None else self.buffer).shape[0]

    @property
    def capacity(self) -> int:
        """Slots: 64 a page; token t of page p is slot 64 p + t."""
        return self.num_pages * layout.PAGE_SIZE

    def append(self, content: Tensor, rope: Tensor, slot_mapping: Tensor) -> None:
        """Quantize new tokens and write them to their slots (the paper's Fused-K-Append).

        Args:
            content: bfloat16 [tokens, 512], c_KV after its RMSNorm.
            rope: bfloat16 [tokens, 64], k_R after the rotary embedding.
            slot_mapping: int64 or int32 [tokens]; a negative slot skips its token.

        Raises:
            IndexError: a slot lies past the capacity (checked on the CPU).
        """
        if self.buffer is None:
            ops.append_kv(content, rope, slot_mapping, *self.planes)
        else:
            ops.append_kv_buffer(content, rope, slot_mapping, self.buffer)

    def norm_rope_append(
        self,
        content: Tensor,
        rope: Tensor,
        slot_mapping: Tensor,
        norm_weight: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        *,
        epsilon: float = 1e-6,
        interleaved: bool = True,
    ) -> None:
        """`append` of tokens as the projection leaves them: RMSNorm and rotary embedding in the same launch.

        Args:
            content: bfloat16 [tokens, 512], c_KV before its RMSNorm.
            rope: bfloat16 [tokens, 64], k_R before the rotary embedding.
            slot_mapping: int64 or int32 [tokens]; a negative slot skips its token.
            norm_weight: bfloat16 [512], of the RMSNorm (`kv_a_layernorm`).
            cos_sin: float32 or bfloat16 [max_position, 64], 32 cosines and 32 sines for each position.
            positions: int64 or int32 [tokens], rows of cos_sin; that of a skipped token is not read.
            epsilon: of the RMSNorm.
            interleaved: pairs are values 2 i, 2 i + 1 (DeepSeek's checkpoints); otherwise i, i + 32.
        """
        before = norm_weight, cos_sin, positions, epsilon, interleaved
        if self.buffer is None:
            ops.norm_rope_append_kv(content, rope, slot_mapping, *before, *self.planes)
        else:
            ops.norm_rope_append_kv_buffer(content, rope, slot_mapping, *before, self.buffer)

    def fetch(self, slots: Tensor) -> Tensor:
        """Gather slots (int64 or int32 [tokens]) and dequantize them: bfloat16 [tokens, 576]; zeros for a
        negative slot."""
        return ops.fetch_kv(*self.planes, slots)

    def copy_pages(self, source: Tensor, destination: Tensor) -> None:
        """Copy whole pages (int64 [n] each), as for copy-on-write of a shared prefix; all are read before any
        is written."""
        like = self.planes[0]
        check_slots("source", source, like)
        check_slots("destination", destination, like)
        if source.shape != destination.shape:
            raise ValueError(
                f"destination must have {source.shape[0]} entries, one per source page, got {destination.shape[0]}."
            )
        for data in self.planes if self.buffer is None else (self.buffer,):
            if data.dtype == E4M3:
                data = data.view(torch.uint8)  # index_put has no e4m3
            data[destination.long()] = data[source.long()]
