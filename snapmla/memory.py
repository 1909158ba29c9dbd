"""How many tokens, and how many requests, the memory of a GPU leaves room for.

The latent cache belongs to no head: under tensor parallelism each GPU of a group holds all of it. Only data
parallelism multiplies the tokens that a node holds; tensor parallelism merely divides some weights, which
leaves more room on each GPU. Everything here is arithmetic; results made from it are labelled ``modelled``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from snapmla.layout import BF16_BYTES_PER_TOKEN, BYTES_PER_TOKEN, PAGE_SIZE
from snapmla.models import MLAModel, ParallelLayout

GIB = 1024**3

CACHE_BYTES_PER_TOKEN = {"bf16": BF16_BYTES_PER_TOKEN, "snapmla": BYTES_PER_TOKEN}
"""Bytes of one cached token in one layer, by cache format."""


CONTEXT_TOKENS = {"bf16": 64 * 1024, "snapmla": 16 * 1024}
"""Cached tokens that a prefill in vLLM projects up at once, by cache format: vLLM's own backends, and ours. The engine keeps
memory free for them. 16k tokens are enough to fill the GPU; a piece more is a merge of the new tokens' outputs more."""


class DoesNotFit(ValueError):
    """The weights leave no memory for a cache, or the cache has no room for one sequence."""


def cache_bytes_per_token(cache_format: str) -> int:
    """Bytes of one token in one layer. Raises ValueError for a format other than bf16 and snapmla."""
    return _of_format(CACHE_BYTES_PER_TOKEN, cache_format)


def _of_format(values: Mapping[str, int], cache_format: str) -> int:
    if cache_format not in values:
        raise ValueError(f"cache_format must be one of {', '.join(values)}, got {cache_format!r}.")
    return values[cache_format]


def kv_bytes_per_token(model: MLAModel, cache_format: str) -> int:
    """Bytes of one token in all attention layers of the model."""
    return model.attention_layers * cache_bytes_per_token(cache_format)


@dataclass(frozen=True)
class MemoryBudget:
    """Memory of one GPU and the part of it that an engine may use."""

    total_gib: float
    """Memory that CUDA reports, in GiB."""
    utilization: float
    """Share of it that weights, activations and cache may take together (vLLM's gpu_memory_utilization)."""
    overhead_gib: float
    """Activations but for projected contexts, CUDA graphs, communication buffers and the CUDA context, in GiB."""

    def __post_init__(self) -> None:
        if not 0.0 < self.utilization <= 1.0:
            raise ValueError(f"utilization must be a share in (0, 1], got {self.utilization}.")

    def cache_bytes(self, model: MLAModel, layout: ParallelLayout, cache_format: str) -> float:
        """Bytes left for the cache on each GPU. Raises DoesNotFit where nothing is left."""
        usable = self.total_gib * self.utilization - self.overhead_gib - context_bytes(model, layout, cache_format) / GIB
        weights = model.weight_bytes(layout) / GIB
        if weights >= usable:
            raise DoesNotFit(
                f"the weights of {model.name} in {layout} must fit {usable:.1f} GiB a GPU, got {weights:.1f}."
            )
        return (usable - weights) * GIB


def context_bytes(model: MLAModel, layout: ParallelLayout, cache_format: str) -> int:
    """Bytes of the keys and values, in BF16, to which a prefill projects up a piece of cached context on each GPU. Raises
    ValueError for a format other than bf16 and snapmla."""
    width = model.qk_nope_head_dim + model.v_head_dim
    return _of_format(CONTEXT_TOKENS, cache_format) * model.heads_per_gpu(layout) * width * 2


def tokens_that_fit(cache_bytes: float, model: MLAModel, cache_format: str) -> int:
    """Tokens, in whole pages, that a cache of so many bytes on each GPU of an attention group holds."""
    return tokens_in(cache_bytes, kv_bytes_per_token(model, cache_format))


def tokens_in(cache_bytes: float, token_bytes: int) -> int:
    """Tokens of so many bytes in all layers, in whole pages, that a cache holds."""
    return int(cache_bytes // (PAGE_SIZE * token_bytes)) * PAGE_SIZE


def sequences_in(tokens: int, length: int) -> int:
    """Sequences of that length, each in whole pages, that a cache of so many tokens holds."""
    return tokens // (math.ceil(length / PAGE_SIZE) * PAGE_SIZE)


def largest_batch(cache_bytes: float, model: MLAModel, context: int, cache_format: str) -> int:
    """Sequences of ``context`` tokens that one attention group (dp rank) can hold at once.

    A sequence takes whole pages. Raises DoesNotFit where not even one fits, ValueError for a context below 1.
    """
    if context < 1:
        raise ValueError(f"context must be at least 1 token, got {context}.")
    tokens = tokens_that_fit(cache_bytes, model, cache_format)
    batch = sequences_in(tokens, context)
    if batch == 0:
        raise DoesNotFit(
            f"the {cache_format} cache must hold a sequence of {context} tokens, got room for {tokens}."
        )
    return batch
