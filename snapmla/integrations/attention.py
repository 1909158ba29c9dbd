"""One sequence's attention in latent space through the kernels, in the place of `snapmla.reference.attend`.

Every configuration of Table 2 fits the cache's three planes, because an e4m3 RoPE value is a BF16 value and any scale is a scale
per token. So one decode kernel computes them all; on a CPU, its emulation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapmla import reference
from snapmla.cache import LatentCache
from snapmla.decode import mla_decode_quantized
from snapmla.integrations import flashmla
from snapmla.layout import KV_LORA_RANK, MAX_QUERIES, PAGE_SIZE
from snapmla.quantization import CONFIGS, E4M3, quantize_key, quantize_query


def attend(
    variant: str,
    q: Tensor,
    content: Tensor,
    rope: Tensor,
    softmax_scale: float,
    *,
    visible: Tensor | None = None,
    split: bool = True,
) -> Tensor:
    """Attention of one sequence over its keys by a kernel: this package's, or for "bf16" FlashMLA's.

    Arguments and result are `snapmla.reference.attend`'s. Where no kernel runs, "bf16" is its emulation and the others
    are what `mla_decode_quantized` computes on a CPU; "exact" is always float64. split: sequences may be cut into parts;
    not to cut them is slow, but then a GPU rounds P by the same references as an emulation of whole sequences.
    """
    kernel = variant in CONFIGS or (variant == "bf16" and q.is_cuda and flashmla.why_not("bf16") is None)
    if not kernel:
        return reference.attend(variant, q, content, rope, softmax_scale, visible=visible)
    n, keys = len(q), len(content)
    # Sequences of up to 8 queries that share the pages: with `visible`, of one query each.
    s_q = 1 if visible is not None else next(d for d in range(MAX_QUERIES, 0, -1) if n % d == 0)
    lengths = torch.arange(keys - n + s_q, keys + 1, s_q, device=q.device) if visible is None else visible
    lengths = lengths.to(q.device, torch.int32)
    pages = -(-keys // PAGE_SIZE)
    table = torch.arange(pages, dtype=torch.int32, device=q.device).repeat(len(lengths), 1)

    def paged(x: Tensor) -> Tensor:  # [keys, …] to [pages, 64, …]
        padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, pages * PAGE_SIZE - keys))
        return padded.unflatten(0, (pages, PAGE_SIZE))

    if variant == "bf16":
        cache = paged(torch.cat([content, rope], -1).bfloat16())[:, :, None]
        out, _ = flashmla.prepare(q.bfloat16().unflatten(0, (-1, s_q)), cache, table, lengths, softmax_scale)()
    else:
        config = CONFIGS[variant]
        key = quantize_key(content, rope, config)
        query = quantize_query(q[..., :KV_LORA_RANK], q[..., KV_LORA_RANK:], config)
        planes = paged(key.content.view(torch.uint8)).view(E4M3), paged(key.rope), paged(key.scale)
        queries = (x.unflatten(0, (-1, s_q)).contiguous() for x in query)
        schedule = None
        if not split:  # one part
            schedule = torch.tensor([[0, 0], [len(lengths), 0]], dtype=torch.int32, device=q.device)
        cache = LatentCache.from_planes(*planes)
        out, _ = mla_decode_quantized(*queries, cache, table, lengths, softmax_scale, schedule=schedule)
    return out.flatten(0, 1).float()
