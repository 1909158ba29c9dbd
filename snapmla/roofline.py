"""The roofline of MLA decoding (paper, Eq 7): the shortest time that a GPU's data sheet allows.

Cost in tiles 64 wide, a block of keys: QK takes 8 content tiles and 1 RoPE tile, PV 8 content tiles. In BF16
that is 17 units of time; with the content in FP8, at twice the rate, 16/2 + 1 = 9. The *effective peak* is
therefore 17/9 of the BF16 peak. Results made from these functions are labelled ``modelled``. A GPU under its
power cap does not reach its data sheet: ``effective_peak`` also takes measured peaks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from snapmla.layout import FLOPS_PER_QUERY_KEY, KV_LORA_RANK, QK_HEAD_DIM, QK_ROPE_HEAD_DIM
from snapmla.memory import cache_bytes_per_token

TILE = 64
"""Width of a tile in Eq 7."""
CONTENT_TILES = 2 * KV_LORA_RANK // TILE  # QK and PV
ROPE_TILES = QK_ROPE_HEAD_DIM // TILE
FP8_SPEEDUP = 2.0
"""Rate of FP8 tensor cores over BF16 on Hopper, by data sheet."""

LSE_BYTES = 4  # float32
OUT_BYTES = 2 * KV_LORA_RANK  # bfloat16


@dataclass(frozen=True)
class GPU:
    """Data-sheet values of a GPU: dense peaks (no sparsity), SXM form where there are several."""

    name: str
    bf16_tflops: float
    bandwidth_tbs: float
    """Device-memory bandwidth in TB/s (1e12 bytes)."""
    memory_gib: float
    """Memory that CUDA reports, in GiB (data sheets give nominal GB)."""
    l2_mib: int
    sms: int

    @property
    def fp8_tflops(self) -> float:
        return FP8_SPEEDUP * self.bf16_tflops


# Rates from NVIDIA's data sheets; memory and L2 about as cudaGetDeviceProperties reports them. The H20's 148
# TFLOPS is also the BF16 peak that the paper prints. H800 and H100 differ in NVLink and FP64 only. GH200: the
# variant with 96 GB of HBM3.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("H20", bf16_tflops=148.0, bandwidth_tbs=4.0, memory_gib=95.0, l2_mib=60, sms=78),
        GPU("H800", bf16_tflops=989.0, bandwidth_tbs=3.35, memory_gib=79.1, l2_mib=50, sms=132),
        GPU("H100", bf16_tflops=989.0, bandwidth_tbs=3.35, memory_gib=79.1, l2_mib=50, sms=132),
        GPU("H200", bf16_tflops=989.0, bandwidth_tbs=4.8, memory_gib=139.8, l2_mib=60, sms=132),
        GPU("GH200", bf16_tflops=989.0, bandwidth_tbs=4.0, memory_gib=94.5, l2_mib=60, sms=132),
    )
}


def get_gpu(name: str) -> GPU:
    """The GPU of that name. Raises ValueError that lists the known names."""
    if name not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {name!r}.")
    return GPUS[name]


def effective_peak(bf16_tflops: float, fp8_tflops: float | None = None) -> float:
    """Peak rate of SnapMLA's mix of FP8 content and BF16 RoPE tiles, in TFLOPS (Eq 7).

    Args:
        bf16_tflops: peak in BF16, by data sheet or measured.
        fp8_tflops: peak in FP8; default: twice the BF16 peak, which gives bf16_tflops · 17/9.
    """
    fp8_tflops = FP8_SPEEDUP * bf16_tflops if fp8_tflops is None else fp8_tflops
    time = CONTENT_TILES / fp8_tflops + ROPE_TILES / bf16_tflops
    return (CONTENT_TILES + ROPE_TILES) / time


def peak_tflops(gpu: GPU, cache_format: str) -> float:
    """Tensor-core ceiling for a cache format: the BF16 peak, or Eq 7's effective peak for snapmla."""
    cache_bytes_per_token(cache_format)  # refuses an unknown format
    return gpu.bf16_tflops if cache_format == "bf16" else effective_peak(gpu.bf16_tflops, gpu.fp8_tflops)


def decode_flops(heads: int, s_q: int, batch: int, context: int) -> int:
    """Operations of one decode call.

    Query i of s_q sees context − s_q + 1 + i keys (causal, bottom-right aligned; ``context`` includes the s_q
    new tokens).
    """
    if not 1 <= s_q <= context:
        raise ValueError(f"s_q must be between 1 and the context ({context}), got {s_q}.")
    visible = s_q * context - s_q * (s_q - 1) // 2
    return FLOPS_PER_QUERY_KEY * heads * batch * visible


def decode_bytes(heads: int, s_q: int, batch: int, context: int, cache_format: str) -> int:
    """Bytes that one decode call has to move: the cache once for all heads, q, out and lse.

    For snapmla q is the quantized query: per head the same three parts as a cached token. The block table (4
    bytes for 64 tokens) and partial results of split sequences are not counted.
    """
    token_bytes = cache_bytes_per_token(cache_format)
    q_bytes = 2 * QK_HEAD_DIM if cache_format == "bf16" else token_bytes
    return traffic(heads, s_q, batch, context, token_bytes, q_bytes)


def traffic(heads: int, s_q: int, batch: int, context: int, token_bytes: int, q_bytes: int) -> int:
    """Bytes of a decode call whose cache takes `token_bytes` a token and whose queries `q_bytes` a head."""
    return batch * context * token_bytes + batch * s_q * heads * (q_bytes + OUT_BYTES + LSE_BYTES)


@dataclass(frozen=True)
class Roofline:
    """The least time of one decode call, and what bounds it."""

    flops: int
    bytes: int
    memory_us: float
    compute_us: float

    @property
    def time_us(self) -> float:
        return max(self.memory_us, self.compute_us)

    @property
    def bound(self) -> str:
        """``memory`` or ``compute``."""
        return "memory" if self.memory_us >= self.compute_us else "compute"

    @property
    def tflops(self) -> float:
        """Rate in TFLOPS at that time."""
        return self.flops / self.time_us * 1e-6

    @property
    def gbps(self) -> float:
        """Traffic in GB/s (1e9 bytes) at that time."""
        return self.bytes / self.time_us * 1e-3


def decode_roofline(gpu: GPU, heads: int, s_q: int, batch: int, context: int, cache_format: str) -> Roofline:
    """Least time of one decode call of one layer on ``gpu``: the larger of memory and tensor-core time.

    Args:
        heads: query heads on this GPU.
        s_q: new tokens per request (1, or more with multi-token prediction).
        batch, context: requests, and cached tokens of each, the new ones included.
        cache_format: ``bf16`` (1152 bytes a token) or ``snapmla`` (644).
    """
    flops = decode_flops(heads, s_q, batch, context)
    moved = decode_bytes(heads, s_q, batch, context, cache_format)
    return Roofline(
        flops=flops,
        bytes=moved,
        memory_us=moved / gpu.bandwidth_tbs * 1e-6,
        compute_us=flops / peak_tflops(gpu, cache_format) * 1e-6,
    )


def compute_bound_heads(gpu: GPU, s_q: int, cache_format: str) -> int:
    """Smallest number of heads at which a long context is bound by the tensor cores instead of the memory.

    For context → ∞, where only the cache's own bytes count; may exceed what one kernel call takes (128).
    """
    seconds_per_key = cache_bytes_per_token(cache_format) / gpu.bandwidth_tbs
    seconds_per_head_key = s_q * FLOPS_PER_QUERY_KEY / peak_tflops(gpu, cache_format)
    return math.ceil(seconds_per_key / seconds_per_head_key)
