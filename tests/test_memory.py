"""KV memory and largest batch, against what vLLM reported on an H200 (recorded) and direct arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapmla.layout import PAGE_SIZE
from snapmla.memory import (
    GIB,
    DoesNotFit,
    MemoryBudget,
    cache_bytes_per_token,
    context_bytes,
    kv_bytes_per_token,
    largest_batch,
    tokens_that_fit,
)
from snapmla.models import DEEPSEEK_V3_1, LONGCAT_FLASH_THINKING, ParallelLayout
from snapmla.roofline import get_gpu

# Recorded: vLLM 0.25.1 on one H200, DeepSeek-V3.1's shape with 32 of its 256 experts (a rank of DP8/TP1 with
# EP8), FP8 weights, gpu_memory_utilization 0.92. The tokens at 644 bytes are that run's BF16 pool divided
# anew. The budget's overhead is fitted to the BF16 tokens; the weights are not fitted.
RANK = replace(DEEPSEEK_V3_1, routed_experts=32)
ONE_GPU = ParallelLayout(1, 1)
RECORDED_WEIGHTS_GIB = 95.7
RECORDED_TOKENS = {"bf16": 425_342, "snapmla": 760_000}
H200 = MemoryBudget(get_gpu("H200").memory_gib, utilization=0.92, overhead_gib=1.0)


def test_weights_of_the_recorded_rank():
    assert RANK.weight_bytes(ONE_GPU) / GIB == pytest.approx(RECORDED_WEIGHTS_GIB, rel=0.01)


@pytest.mark.parametrize("cache_format", ["bf16", "snapmla"])
def test_tokens_of_the_recorded_rank(cache_format):
    tokens = tokens_that_fit(H200.cache_bytes(RANK, ONE_GPU, "bf16"), RANK, cache_format)
    assert tokens == pytest.approx(RECORDED_TOKENS[cache_format], rel=0.03)


def test_one_rank_of_eight_is_the_whole_model_over_eight():
    """The recorded rank stands for a rank of the real layout (its router is smaller: 0.2%)."""
    layout = ParallelLayout(8, 1)
    assert DEEPSEEK_V3_1.weight_bytes(layout) == pytest.approx(RANK.weight_bytes(ONE_GPU), rel=0.003)


def test_bytes_per_token():
    assert cache_bytes_per_token("snapmla") == 644
    assert cache_bytes_per_token("bf16") == 1152
    assert kv_bytes_per_token(DEEPSEEK_V3_1, "snapmla") == 61 * 644
    assert kv_bytes_per_token(LONGCAT_FLASH_THINKING, "bf16") == 28 * 2 * 1152
    with pytest.raises(ValueError, match="cache_format must be one of bf16, snapmla, got 'fp8'"):
        cache_bytes_per_token("fp8")


def test_tensor_parallelism_does_not_divide_the_cache():
    """A group of 8 GPUs holds more tokens than one only by the weights that it divides."""
    spare = {}
    for layout in (ParallelLayout(8, 1), ParallelLayout(1, 8)):
        pool = H200.cache_bytes(DEEPSEEK_V3_1, layout, "snapmla")
        taken = DEEPSEEK_V3_1.weight_bytes(layout) + context_bytes(DEEPSEEK_V3_1, layout, "snapmla")
        assert pool + taken == pytest.approx((139.8 * 0.92 - 1.0) * GIB)
        spare[layout.tp] = tokens_that_fit(pool, DEEPSEEK_V3_1, "snapmla")
    assert spare[1] < spare[8] < 2 * spare[1]


def test_a_prefill_takes_its_memory():
    """64k tokens × 128 heads × (128 + 128) dimensions in BF16 are 4 GiB; ours a quarter."""
    sizes = [context_bytes(DEEPSEEK_V3_1, ParallelLayout(8, 1), name) / GIB for name in ("bf16", "snapmla")]
    assert sizes == [4.0, 1.0] and context_bytes(DEEPSEEK_V3_1, ParallelLayout(1, 8), "bf16") == GIB / 2


def test_batch_counts_whole_pages():
    pool = 10 * PAGE_SIZE * kv_bytes_per_token(DEEPSEEK_V3_1, "snapmla")
    batches = {1: 10, 64: 10, 65: 5, 128: 5, 129: 3, 640: 1}
    assert {context: largest_batch(pool, DEEPSEEK_V3_1, context, "snapmla") for context in batches} == batches
    assert largest_batch(pool - 1, DEEPSEEK_V3_1, 64, "snapmla") == 9


def test_what_does_not_fit_says_so():
    pool = 10 * PAGE_SIZE * kv_bytes_per_token(DEEPSEEK_V3_1, "snapmla")
    with pytest.raises(
        DoesNotFit, match="snapmla cache must hold a sequence of 641 tokens, got room for 640"
    ):
        largest_batch(pool, DEEPSEEK_V3_1, 641, "snapmla")
    small = MemoryBudget(get_gpu("H100").memory_gib, utilization=0.92, overhead_gib=1.0)
    with pytest.raises(
        DoesNotFit, match=r"weights of DeepSeek-V3.1 in DP8/TP1 must fit 67.8 GiB a GPU, got 95.8"
    ):
        small.cache_bytes(DEEPSEEK_V3_1, ParallelLayout(8, 1), "bf16")
    with pytest.raises(ValueError, match="context must be at least 1 token, got 0"):
        largest_batch(pool, DEEPSEEK_V3_1, 0, "snapmla")
    with pytest.raises(ValueError, match=r"utilization must be a share in \(0, 1\], got 92"):
        MemoryBudget(139.8, utilization=92, overhead_gib=1.0)
