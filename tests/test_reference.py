"""The emulation against exact attention, and its options."""

from __future__ import annotations

import math

import pytest
import torch
from paging import latents, queries

from snapmla import merge_partials, quantize_key, quantize_query
from snapmla.metrics import one_minus_cosine, relative_l2, rmse
from snapmla.quantization import Quantized, dequantize
from snapmla.reference import (
    ALGORITHM_1,
    KERNEL_FLOAT32_ADDS,
    Rules,
    attend,
    emulated_attention,
    exact_attention,
)

SCALE = 192**-0.5


def unrounded(q, content, rope):
    """Aligned and scaled like quantized values, but in float64 and not rounded."""
    q_scale = quantize_query(q[..., :512], q[..., 512:]).scale.double()
    k_scale = quantize_key(content, rope).scale.double()
    q = q.double() / q_scale[..., None]
    return (
        Quantized(q[..., :512], q[..., 512:], q_scale),
        Quantized(content.double() / k_scale[:, None], rope.double() / k_scale[:, None], k_scale),
    )


@pytest.mark.parametrize("block", [1, 16, 64, 100, 1000])
@pytest.mark.parametrize("s_q", [1, 5])
def test_algorithm_1_without_rounding_is_exact_attention(block, s_q):
    """Scale fusion, block scales and rescaling cancel: what is left is float64 noise."""
    content, rope = latents(333, rope=30.0)
    content[::7] *= 100  # scales that differ from token to token
    q = queries(1, s_q, 4)[0]
    rules = Rules(block=block, p_rule="none")
    out, lse = emulated_attention(*unrounded(q, content, rope), SCALE, rules=rules, dtype=torch.float64)
    exact, exact_lse = exact_attention(q, content, rope, SCALE)
    assert relative_l2(out, exact) < 1e-9
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=1e-9)


def test_wrong_scale_fusion_would_be_seen():
    """The test above can fail: without S_K in P' the result is far off."""
    content, rope = latents(333)
    content[::7] *= 100
    q, k = unrounded(queries(1, 1, 4)[0], content, rope)
    exact, _ = exact_attention(queries(1, 1, 4)[0], content, rope, SCALE)
    unfused = Quantized(k.content * k.scale[:, None], k.rope * k.scale[:, None], torch.ones_like(k.scale))
    out, _ = emulated_attention(q, unfused, SCALE, rules=Rules(p_rule="none"), dtype=torch.float64)
    assert relative_l2(out, exact) < 1e-9  # the scale folded into the values is the same attention
    dropped = Quantized(k.content, k.rope * k.scale[:, None], torch.ones_like(k.scale))
    out, _ = emulated_attention(q, dropped, SCALE, rules=Rules(p_rule="none"), dtype=torch.float64)
    assert relative_l2(out, exact) > 0.1


@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_fp8_error_is_small_and_bf16_error_smaller(sharpness):
    content, rope = latents(2000)
    q = queries(1, 2, 8, sharpness=sharpness)[0]
    exact = attend("exact", q, content, rope, SCALE)
    fp8, bf16 = (relative_l2(attend(v, q, content, rope, SCALE), exact) for v in ("snapmla", "bf16"))
    assert bf16 < 0.01 < fp8 < 0.3


def test_sharp_attention_does_not_overflow():
    """After a block of negligible probabilities 1 / sigma_P is huge; the accumulator in those units stays finite."""
    content, rope = latents(640)
    rope.zero_()
    rope[3, 0] = 90.0  # token 3 wins by more than float32's exponent range can hold
    q = torch.zeros(1, 1, 576)
    q[..., 512] = 1.0
    out, lse = emulated_attention(
        quantize_query(q[..., :512], q[..., 512:]), quantize_key(content, rope), 1.0
    )
    assert torch.isfinite(out).all()
    assert relative_l2(out[0, 0], content[3]) < 0.05
    assert lse.item() == pytest.approx(90.0, abs=0.5)


class TestKeptReferences:
    """Rules.keep_bits: what the kernel does where a block's maximum is no new one."""

    @pytest.mark.parametrize("keep_bits", [0.0, 4.0, 12.0])
    def test_without_rounding_it_is_exact_attention_too(self, keep_bits):
        content, rope = latents(333, rope=30.0)
        content[::7] *= 100
        q = queries(1, 3, 4)[0]
        rules = Rules(p_rule="none", keep_bits=keep_bits)
        out, lse = emulated_attention(*unrounded(q, content, rope), SCALE, rules=rules, dtype=torch.float64)
        exact, exact_lse = exact_attention(q, content, rope, SCALE)
        assert relative_l2(out, exact) < 1e-9
        torch.testing.assert_close(lse, exact_lse, rtol=0, atol=1e-9)

    @pytest.mark.parametrize(
        ("sharpness", "algorithm_1", "kept"), [(0.3, 0.02, 0.025), (1.0, 0.015, 0.02), (4.0, 0.002, 0.005)]
    )
    def test_it_costs_less_than_quantizing_does(self, sharpness, algorithm_1, kept):
        """Error of P's rounding alone, on the quantized values; quantizing q and k costs 4 to 11%."""
        content, rope = latents(2000)
        q = queries(1, 2, 16, sharpness=sharpness)[0]
        query, key = quantize_query(q[..., :512], q[..., 512:]), quantize_key(content, rope)
        k = dequantize(key)
        exact, _ = exact_attention(dequantize(query), k[:, :512], k[:, 512:], SCALE)
        for rules, limit in ((ALGORITHM_1, algorithm_1), (KERNEL_FLOAT32_ADDS, kept)):
            out, _ = emulated_attention(query, key, SCALE, rules=rules)
            assert relative_l2(out, exact) < limit

    @pytest.mark.parametrize("rules", [ALGORITHM_1, KERNEL_FLOAT32_ADDS])
    def test_a_row_that_loses_weight_from_block_to_block_stays_finite(self, rules):
        """Each block weighs 2^-30 of the one before: its units may not follow it down."""
        keys = 64 * 12
        key = Quantized(torch.full((keys, 512), 3.0), torch.zeros(keys, 64), torch.ones(keys))
        key.rope[:, 0] = -30.0 * math.log(2) * (torch.arange(keys) // 64)
        query = Quantized(torch.zeros(1, 1, 512), torch.zeros(1, 1, 64), torch.ones(1, 1))
        query.rope[..., 0] = 1.0
        out, lse = emulated_attention(query, key, 1.0, rules=rules)
        torch.testing.assert_close(out, torch.full_like(out, 3.0), rtol=1e-5, atol=0)
        assert lse.item() == pytest.approx(math.log(64), abs=1e-5)

    def test_a_sink_before_flat_attention(self):
        """The first key weighs as much as the 4,095 others together, 12 bits above each: they keep their precision."""
        keys = 4096
        content = torch.full((keys, 512), 1.0)
        content[0] = -1.0
        rope = torch.zeros(keys, 64)
        rope[0, 0] = math.log(keys - 1)
        query = Quantized(torch.zeros(1, 1, 512), torch.zeros(1, 1, 64), torch.ones(1, 1))
        query.rope[..., 0] = 1.0
        out, _ = emulated_attention(
            query, Quantized(content, rope, torch.ones(keys)), 1.0, rules=KERNEL_FLOAT32_ADDS
        )
        assert out.abs().max() < 0.02  # of values of 1 and -1 that cancel


@pytest.mark.parametrize("length", [1, 2, 64, 1000])
def test_lse_of_flat_attention_is_the_log_of_the_length(length):
    """Case 4."""
    content, rope = latents(length)
    q = torch.zeros(1, 3, 576)
    _, lse = emulated_attention(quantize_query(q[..., :512], q[..., 512:]), quantize_key(content, rope), 1.0)
    torch.testing.assert_close(lse, torch.full((1, 3), math.log(length)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", [0, 1, 63, 64, 65, 299, 300])
def test_split_and_merge_equals_one_call(split):
    """Case 4: within the emulation's own error, since the blocks of P shift; an empty part has weight 0."""
    content, rope = latents(300)
    q = queries(1, 1, 8)
    query, key = quantize_query(q[0, ..., :512], q[0, ..., 512:]), quantize_key(content, rope)
    whole, whole_lse = emulated_attention(query, key, SCALE)
    exact, _ = exact_attention(q[0], content, rope, SCALE)
    parts = [Quantized(*(x[part] for x in key)) for part in (slice(0, split), slice(split, 300))]
    results = [emulated_attention(query, part, SCALE, causal=False) for part in parts]
    outs = torch.stack([out.masked_fill(torch.isinf(lse)[..., None], torch.nan) for out, lse in results])
    out, lse = merge_partials(outs[:, None], torch.stack([lse.T[None] for _, lse in results]))
    assert relative_l2(out[0], exact) < 1.1 * relative_l2(whole, exact)
    torch.testing.assert_close(lse[0].T, whole_lse, rtol=0, atol=1e-5)


def test_merge_of_nothing_is_nothing():
    outs = torch.full((2, 1, 1, 3, 512), torch.nan)
    out, lse = merge_partials(outs, torch.full((2, 1, 3, 1), torch.inf))
    assert (out == 0).all() and torch.isposinf(lse).all()


@pytest.mark.parametrize("softmax_scale", [576**-0.5, 192**-0.5, 192**-0.5 * 1.87, 1.0])
def test_softmax_scale_is_honoured(softmax_scale):
    """Case 5."""
    content, rope = latents(200)
    q = queries(1, 1, 4)[0]
    query, key = quantize_query(q[..., :512], q[..., 512:]), quantize_key(content, rope)
    out, lse = emulated_attention(query, key, softmax_scale)
    exact, exact_lse = exact_attention(q, content, rope, softmax_scale)
    logit = (
        q[..., :].float().norm(dim=-1).max() * torch.cat([content, rope], -1).float().norm(dim=-1).max()
    ).item()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=0.01 * logit * softmax_scale)
    assert relative_l2(out, exact) < 0.25


def test_metrics():
    x = torch.tensor([3.0, 4.0])
    assert rmse(x + 1, x) == 1.0 and relative_l2(x * 1.1, x) == pytest.approx(0.1)
    assert one_minus_cosine(x * 7, x) == pytest.approx(0, abs=1e-15)
    assert one_minus_cosine(torch.tensor([4.0, -3.0]), x) == pytest.approx(1.0)
    tiny = torch.tensor([3.0, 4.0 + 1e-6], dtype=torch.float64)
    assert one_minus_cosine(tiny, x.double()) == pytest.approx((0.6e-6 / 5) ** 2 / 2, rel=1e-3)


def test_unknown_variant_is_named():
    with pytest.raises(ValueError, match="'config_e'"):
        attend("config_e", queries(1, 1, 1)[0], *latents(4), 1.0)
