"""vLLM's decode benchmark connector, on a cache of random tokens.

vLLM's DecodeBenchConnector skips prefill and fills the blocks of each request with one constant, which in bytes is 0.
Hopper runs faster on zeros, and a cache of zeros is none of a model: here the whole cache is filled once, with tokens that
are stored as the backend under test stores them, and requests take their blocks as they are.

    kv_transfer_config={"kv_connector": "RandomDecodeBench", "kv_role": "kv_both",
                        "kv_connector_module_path": "snapmla.integrations.vllm.decode_bench"}
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

from snapmla.integrations.vllm import pages
from snapmla.layout import BYTES_PER_TOKEN, KV_LORA_RANK, PAGE_SIZE, QK_HEAD_DIM
from snapmla.quantization import to_e4m3

BLOCKS_AT_ONCE = 4096


def fill(kv_cache: Tensor, generator: torch.Generator) -> None:
    """Random tokens in all blocks of a layer: content of RMS 1, as RMSNorm leaves it, and RoPE alike.

    kv_cache: [blocks, 64, 576] BF16 or e4m3 (as uint8), or SnapMLA's uint8 [blocks, 64, 644].
    """
    for part in kv_cache.split(BLOCKS_AT_ONCE):
        shape = part.shape[0] * PAGE_SIZE, QK_HEAD_DIM
        tokens = torch.randn(shape, dtype=torch.bfloat16, device=part.device, generator=generator)
        if part.shape[-1] == BYTES_PER_TOKEN:
            slots = torch.arange(shape[0], device=part.device)
            pages.append(part, tokens[:, :KV_LORA_RANK], tokens[:, KV_LORA_RANK:], slots)
        elif part.dtype == torch.uint8:
            part.copy_(to_e4m3(tokens.float()).view(torch.uint8).view(part.shape))
        else:
            part.copy_(tokens.view(part.shape))


class RandomDecodeBench(DecodeBenchConnector):
    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        first = next(iter(kv_caches.values()))
        generator = torch.Generator(first.device).manual_seed(0)
        fill(first, generator)
        for other in kv_caches.values():
            if other is not first:
                other.copy_(first)  # the layers' values do not meet
        self.connector_worker._fill_block_tensor = lambda kv_cache, block_ids: None
