"""SnapMLA: FP8 decoding for multi-head latent attention (arXiv 2602.10718), and the paper's experiments.

    import snapmla
    cache = snapmla.LatentCache.allocate(pages)
    cache.append(content, rope, slot_mapping)
    out, lse = snapmla.mla_decode(q, cache, block_table, cache_seqlens, softmax_scale)

CUDA tensors on a Hopper GPU go to the kernels, CPU tensors to an emulation that rounds exactly where they round.
"""

from snapmla.cache import LatentCache
from snapmla.decode import decode_schedule, merge_partials, mla_decode, mla_decode_quantized, quantize_q
from snapmla.layout import BYTES_PER_TOKEN, KV_LORA_RANK, PAGE_SIZE, QK_HEAD_DIM, QK_ROPE_HEAD_DIM
from snapmla.quantization import CONFIGS, QuantConfig, Quantized, dequantize, quantize_key, quantize_query

__version__ = "0.1.0"

__all__ = [
    "BYTES_PER_TOKEN",
    "CONFIGS",
    "KV_LORA_RANK",
    "PAGE_SIZE",
    "QK_HEAD_DIM",
    "QK_ROPE_HEAD_DIM",
    "LatentCache",
    "QuantConfig",
    "Quantized",
    "decode_schedule",
    "dequantize",
    "merge_partials",
    "mla_decode",
    "mla_decode_quantized",
    "quantize_key",
    "quantize_q",
    "quantize_query",
]
