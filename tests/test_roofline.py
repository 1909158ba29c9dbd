"""Eq 7 and the decode roofline, against the paper's numbers, direct counting and recorded kernel times."""

from __future__ import annotations

import pytest

from snapmla.layout import BF16_BYTES_PER_TOKEN, BYTES_PER_TOKEN, KV_LORA_RANK, QK_HEAD_DIM
from snapmla.roofline import (
    GPUS,
    compute_bound_heads,
    decode_bytes,
    decode_flops,
    decode_roofline,
    effective_peak,
    get_gpu,
    peak_tflops,
)


def test_effective_peak_is_the_papers():
    assert effective_peak(148) == pytest.approx(279.6, abs=0.05)  # printed in the paper
    assert effective_peak(9) == pytest.approx(17)  # Eq 7: from 17 units of time to 9
    assert peak_tflops(get_gpu("H200"), "snapmla") == pytest.approx(1868, abs=1)
    assert peak_tflops(get_gpu("H200"), "bf16") == 989


def test_effective_peak_of_measured_gemm_rates():
    """BF16 805 and FP8 1526 TFLOPS, recorded on an H200, top out at 1450."""
    assert effective_peak(805, 1526) == pytest.approx(1450, rel=0.002)
    assert effective_peak(100, 100) == pytest.approx(100)  # no gain without a faster FP8


def test_flops_count_visible_keys():
    heads, batch = 3, 2
    for s_q, context in ((1, 1), (1, 65), (2, 64), (5, 5), (8, 100)):
        visible = sum(1 for i in range(s_q) for key in range(context) if key <= context - s_q + i)
        assert (
            decode_flops(heads, s_q, batch, context)
            == 2 * (QK_HEAD_DIM + KV_LORA_RANK) * heads * batch * visible
        )
    with pytest.raises(ValueError, match=r"s_q must be between 1 and the context \(4\), got 5"):
        decode_flops(1, 5, 1, 4)


def test_bytes_are_those_of_the_tensors():
    import torch

    heads, s_q, batch, context = 16, 2, 3, 130
    rows = (batch, s_q, heads)
    out = [torch.empty(*rows, 512, dtype=torch.bfloat16), torch.empty(batch, heads, s_q, dtype=torch.float32)]
    bf16 = [
        torch.empty(batch, context, 576, dtype=torch.bfloat16),
        torch.empty(*rows, 576, dtype=torch.bfloat16),
    ]
    snapmla = [
        tensor
        for lead in ((batch, context), rows)
        for tensor in (
            torch.empty(*lead, 512, dtype=torch.float8_e4m3fn),
            torch.empty(*lead, 64, dtype=torch.bfloat16),
            torch.empty(*lead, dtype=torch.float32),
        )
    ]
    assert decode_bytes(heads, s_q, batch, context, "bf16") == sum(t.nbytes for t in bf16 + out)
    assert decode_bytes(heads, s_q, batch, context, "snapmla") == sum(t.nbytes for t in snapmla + out)


def test_bound_and_rates():
    gpu = get_gpu("H200")
    few, many = (decode_roofline(gpu, heads, 1, 32, 65536, "snapmla") for heads in (16, 128))
    assert (few.bound, many.bound) == ("memory", "compute")
    assert few.time_us == pytest.approx(few.bytes / 4.8e12 * 1e6)
    assert few.gbps == pytest.approx(4800)
    assert many.time_us == pytest.approx(many.flops / (989e12 * 17 / 9) * 1e6)
    assert many.tflops == pytest.approx(989 * 17 / 9)
    assert many.gbps < 4800 and few.tflops < 989


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("cache_format", ["bf16", "snapmla"])
@pytest.mark.parametrize("s_q", [1, 2])
def test_heads_at_which_it_turns_compute_bound(gpu, cache_format, s_q):
    """The first number of heads is compute bound at a long context and the one before is not."""
    heads = compute_bound_heads(gpu, s_q, cache_format)
    context = 1 << 24  # so long that q and out do not count
    assert decode_roofline(gpu, heads, s_q, 1, context, cache_format).bound == "compute"
    assert decode_roofline(gpu, heads - 1, s_q, 1, context, cache_format).bound == "memory"


def test_ideal_gain_lies_between_the_two_ratios():
    """Memory bound: 1152/644. Compute bound: 17/9. Nothing gains more."""
    for gpu in GPUS.values():
        for heads in (8, 16, 32, 64, 128):
            ours, bf16 = (decode_roofline(gpu, heads, 1, 32, 131072, f).time_us for f in ("snapmla", "bf16"))
            assert BF16_BYTES_PER_TOKEN / BYTES_PER_TOKEN - 0.01 < bf16 / ours < 17 / 9 + 0.01


@pytest.mark.parametrize(
    ("heads", "context", "ms"),
    [
        (16, 131072, 1.058),
        (32, 131072, 1.068),
        (64, 131072, 1.128),
        (128, 65536, 0.847),
        (128, 131072, 1.695),
    ],
)
def test_no_recorded_time_beats_the_roofline(heads, context, ms):
    """FlashMLA BF16 at batch 32, recorded on an H200: slower than the ideal, by less than half again."""
    ideal = decode_roofline(get_gpu("H200"), heads, 1, 32, context, "bf16").time_us * 1e-3
    assert ideal < ms < 1.5 * ideal


def test_unknown_names():
    with pytest.raises(ValueError, match="gpu must be one of H20, .*got 'A100'"):
        get_gpu("A100")
    with pytest.raises(ValueError, match="cache_format must be one of bf16, snapmla, got 'int8'"):
        decode_roofline(get_gpu("H200"), 16, 1, 1, 64, "int8")
