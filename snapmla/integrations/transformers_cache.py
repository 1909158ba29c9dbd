"""A paged latent cache for Hugging Face MLA models: what `generate` keeps of a batch, 644 or 1152 bytes a token and layer.

`snapmla.integrations.transformers.enable` makes models use it. Sequences of a batch may have different lengths: tokens
that the attention mask hides are not cached. All layers share one block table; page j of sequence b is page
j * batch + b, so that a batch grows by whole rows of pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from snapmla.cache import LatentCache
from snapmla.decode import decode_schedule, mla_decode
from snapmla.integrations import flashmla
from snapmla.integrations.attention import attend
from snapmla.layout import KV_LORA_RANK, PAGE_SIZE, QK_HEAD_DIM
from snapmla.quantization import CONFIGS, SNAPMLA


class Paging:
    """Where the tokens of a batch lie, the same in all layers.

    Attributes:
        block_table: int32 [batch, pages of a sequence]. lengths: int32 [batch], cached tokens. before: those before the
        step in progress. slots: int64 [batch, n], where its tokens go, -1 for a hidden one. real: bool [batch, n],
        which of them are not hidden; None if all are, and known to be.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.batch, self.device = batch, device
        self.block_table = torch.empty(batch, 0, dtype=torch.int32, device=device)
        self.lengths = self.before = torch.zeros(batch, dtype=torch.int32, device=device)
        self.columns = 0
        """Tokens of each sequence so far, hidden ones included."""

    def grow(self, columns: int) -> None:
        """Make room for so many tokens of each sequence."""
        rows = -(-columns // PAGE_SIZE)
        if rows > self.block_table.shape[1]:
            first = torch.arange(self.batch, device=self.device)[:, None]
            self.block_table = (torch.arange(rows, device=self.device)[None] * self.batch + first).int()

    def begin(self, n: int, attention_mask: Tensor | None) -> None:
        """A step of n more tokens of each sequence, for which there is room."""
        real = torch.ones(self.batch, n, dtype=torch.bool, device=self.device)
        self.real = None
        if attention_mask is not None:
            real = attention_mask[:, -n:].to(self.device).bool()
            self.real = None if bool(real.all()) else real  # the host waits, once a step for all layers
        position = self.lengths[:, None] + real.cumsum(1) - 1
        self.slots = torch.where(real, self._slots(self.block_table, position.clamp_min(0)), -1)
        self.before, self.lengths = self.lengths, (self.lengths + real.sum(1)).int()
        self.columns += n
        self._schedule: Tensor | None = None

    def schedule(self, s_q: int, heads: int) -> Tensor:
        """The split of this step's decode calls, made once for all layers."""
        if self._schedule is None:
            self._schedule = decode_schedule(self.lengths, self.block_table, s_q, heads)
        return self._schedule

    def slots_of(self, sequence: int, tokens: int) -> Tensor:
        """Slots of a sequence's first tokens: int64 [tokens]."""
        return self._slots(self.block_table[sequence], torch.arange(tokens, device=self.device))

    @staticmethod
    def _slots(pages: Tensor, position: Tensor) -> Tensor:
        return pages.gather(-1, position // PAGE_SIZE).long() * PAGE_SIZE + position % PAGE_SIZE

    def select(self, index: Tensor) -> None:
        """Sequence i becomes what sequence index[i] was."""
        self.lengths, columns = self.lengths[index], self.block_table.shape[1] * PAGE_SIZE
        self.batch = len(index)
        self.block_table = self.block_table.new_empty(self.batch, 0)
        self.grow(columns)


class Pages(ABC):
    """One layer's pages. `buffer`: [pages, …], whose rows are copied and moved as a whole."""

    bytes_per_token: int

    def __init__(self, device: torch.device) -> None:
        self.buffer = self.empty(0, device)

    @abstractmethod
    def empty(self, pages: int, device: torch.device) -> Tensor:
        """A buffer of so many pages, zeroed."""

    @abstractmethod
    def append(self, content: Tensor, rope: Tensor, paging: Paging) -> None:
        """Write this step's tokens, content [batch * n, 512] and rope [batch * n, 64], but for hidden ones."""

    @abstractmethod
    def fetch(self, slots: Tensor) -> Tensor:
        """The tokens of slots [n] as they are read back: [n, 576]."""

    @abstractmethod
    def decode(self, q: Tensor, paging: Paging, softmax_scale: float) -> Tensor:
        """Absorbed attention of the last n tokens of each sequence: q [batch, n, heads, 576] to [batch, n, heads,
        512]."""

    def resize(self, pages: int) -> None:
        if pages > len(self.buffer):
            more = self.empty(pages - len(self.buffer), self.buffer.device)
            self.buffer = torch.cat([self.buffer, more]) if len(self.buffer) else more

    def select(self, batch: int, index: Tensor) -> None:
        self.buffer = self.buffer.unflatten(0, (-1, batch))[:, index].flatten(0, 1)


class FP8Pages(Pages):
    """`LatentCache`: Fused-K-Append, the FP8 decode kernel, Fused-Fetch-Dequant."""

    bytes_per_token = LatentCache.bytes_per_token

    def empty(self, pages: int, device: torch.device) -> Tensor:
        return LatentCache.allocate(pages, device).buffer

    def append(self, content: Tensor, rope: Tensor, paging: Paging) -> None:
        LatentCache(self.buffer).append(content.bfloat16(), rope.bfloat16(), paging.slots.flatten())

    def fetch(self, slots: Tensor) -> Tensor:
        return LatentCache(self.buffer).fetch(slots)

    def decode(self, q: Tensor, paging: Paging, softmax_scale: float) -> Tensor:
        schedule = paging.schedule(*q.shape[1:3]) if q.device.type == "cuda" else None
        where = paging.block_table, paging.lengths
        return mla_decode(q.bfloat16(), LatentCache(self.buffer), *where, softmax_scale, schedule=schedule)[0]


class UnquantizedPages(Pages):
    """Tokens in a floating type, the baseline: FlashMLA's BF16 kernel where it runs, else float64 in torch."""

    attention = "exact"  # of snapmla.integrations.attention
    has_kernel = True

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.dtype = dtype
        self.bytes_per_token = QK_HEAD_DIM * dtype.itemsize
        super().__init__(device)

    def empty(self, pages: int, device: torch.device) -> Tensor:
        return torch.zeros(pages, PAGE_SIZE, QK_HEAD_DIM, dtype=self.dtype, device=device)

    def append(self, content: Tensor, rope: Tensor, paging: Paging) -> None:
        slots, tokens = paging.slots.flatten(), torch.cat([content, rope], -1).to(self.dtype)
        if paging.real is not None:
            slots, tokens = slots[paging.real.flatten()], tokens[paging.real.flatten()]
        self.buffer.flatten(0, 1)[slots] = tokens

    def fetch(self, slots: Tensor) -> Tensor:
        return self.buffer.flatten(0, 1)[slots]

    def decode(self, q: Tensor, paging: Paging, softmax_scale: float) -> Tensor:
        q = q.to(self.dtype)
        runs = self.has_kernel and self.dtype == torch.bfloat16 and q.device.type == "cuda"
        if runs and flashmla.why_not("bf16") is None:
            where = paging.block_table, paging.lengths
            return flashmla.prepare(q, self.buffer[:, :, None], *where, softmax_scale)()[0]
        outs = []
        for sequence, length in enumerate(paging.lengths.tolist()):
            tokens = self.fetch(paging.slots_of(sequence, length))
            keys = tokens[:, :KV_LORA_RANK], tokens[:, KV_LORA_RANK:]
            outs.append(attend(self.attention, q[sequence], *keys, softmax_scale))
        return torch.stack(outs)


class ConfiguredPages(UnquantizedPages):
    """A configuration of Table 2 on tokens that are kept in BF16 and quantized in each call, as scales of a tensor ask for."""

    has_kernel = False

    def __init__(self, device: torch.device, config: str) -> None:
        self.attention = config
        super().__init__(device)


PAGES: dict[str, Callable[[torch.device], Pages]] = {
    "snapmla": FP8Pages,
    "bf16": UnquantizedPages,
    **{name: partial(ConfiguredPages, config=name) for name in CONFIGS if name != SNAPMLA.name},
}
"""How tokens are stored, by name: SnapMLA's cache; the baseline; Table 2's other configurations."""


class LatentLayer(CacheLayerMixin):
    """One layer of `PagedLatents`, as transformers sees it. Its `update` hands back what it is given: tokens are cached
    where attention is computed."""

    supports_early_init = False
    is_sliding = False
    is_croppable = True

    def __init__(self, cache: PagedLatents) -> None:
        super().__init__()
        self.cache = cache
        self.columns = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.columns += key_states.shape[-2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return self.cache.paging.batch if self.cache.paging else -1


class PagedLatents(Cache):
    """What an MLA model caches of a batch, in pages of 64 tokens.

    Args:
        layers: attention layers of the model.
        pages: the kind of storage, a name of `PAGES` or a class like those.
        max_tokens: tokens of a sequence to allocate at once; otherwise pages are added as they are needed, by halves of
            what there is.
    """

    def __init__(
        self, layers: int, pages: str | Callable[[torch.device], Pages] = SNAPMLA.name, max_tokens: int = 0
    ) -> None:
        super().__init__(layers=[LatentLayer(self) for _ in range(layers)])
        self._make = PAGES[pages] if isinstance(pages, str) else pages
        self._max_tokens = max_tokens
        self.paging: Paging | None = None
        self.pages: list[Pages] = []

    def begin(self, batch: int, n: int, attention_mask: Tensor | None, device: torch.device) -> None:
        """Before a forward of n tokens of each sequence.

        attention_mask: [batch, tokens so far + n], 0 for a hidden token, or None.
        Raises ValueError for a mask of another shape or another batch than before.
        """
        if self.paging is None:
            self.paging = Paging(batch, device)
            self.paging.grow(self._max_tokens)
            self.pages = [self._make(device) for _ in self.layers]
        paging = self.paging
        if batch != paging.batch:
            raise ValueError(
                f"input_ids: expected a batch of {paging.batch} as in the steps before, got {batch}"
            )
        expected = (batch, paging.columns + n)
        if attention_mask is not None and tuple(attention_mask.shape) != expected:
            raise ValueError(
                f"attention_mask: expected {list(expected)}, one entry per token so far, got {list(attention_mask.shape)}"
            )
        rows = paging.block_table.shape[1]
        if paging.columns + n > rows * PAGE_SIZE:
            paging.grow(max(paging.columns + n, rows * PAGE_SIZE * 3 // 2))
        for pages in self.pages:
            pages.resize(paging.block_table.numel())
        paging.begin(n, attention_mask)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(pages.buffer.nbytes for pages in self.pages)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.paging:
            self._select(torch.arange(self.paging.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens of each sequence, none of which may be a hidden one."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop: expected a number of tokens to remove, 0 or negative, got {tokens_to_remove}"
            )
        if self.paging:
            self.paging.columns += tokens_to_remove
            self.paging.lengths = self.paging.lengths + tokens_to_remove
            for layer in self.layers:
                layer.columns += tokens_to_remove

    def reset(self) -> None:
        self.paging, self.pages = None, []
        for layer in self.layers:
            layer.columns = 0

    def _select(self, index: Tensor) -> None:
        if self.paging:
            index = index.to(self.paging.device)
            for pages in self.pages:
                pages.select(self.paging.batch, index)
            self.paging.select(index)
