"""The scale rule, the e4m3 conversion and Table 2's configurations (cases 1-3)."""

from __future__ import annotations

import pytest
import torch
from paging import latents

from snapmla import CONFIGS, QuantConfig, dequantize, quantize_key, quantize_query
from snapmla.metrics import relative_l2
from snapmla.quantization import E4M3, E4M3_MAX, SCALE_FLOOR, scale_from_amax, to_e4m3
from snapmla.reference import emulated_attention, exact_attention

BF16_MAX = torch.finfo(torch.bfloat16).max
BF16_ROUNDING = 2.0**-8
"""Largest relative error of one rounding to BF16."""


def logits(q_content, q_rope, k_content, k_rope):
    """What the kernel's accumulator and one multiply give, and float64."""
    q, k = quantize_query(q_content, q_rope), quantize_key(k_content, k_rope)
    raw = q.content.float() @ k.content.float().T + q.rope.float() @ k.rope.float().T
    exact = q_content.double() @ k_content.double().T + q_rope.double() @ k_rope.double().T
    return raw * (q.scale[:, None] * k.scale), exact


@pytest.mark.parametrize("rope", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("key_content", [0.0, 1e-30, 1e-20, 1e-8])
@pytest.mark.parametrize("query_content", [0.0, 1e-30, 1e-20, 1e-8, 1.0])
def test_tiny_content_neither_overflows_nor_underflows(query_content, key_content, rope):
    """Case 1: the aligned RoPE part stays finite and the logits are the exact ones."""
    content, rotary = latents(65, seed=2)
    k_content, k_rope = (content * key_content).bfloat16(), (rotary * rope).bfloat16()
    q_content, q_rope = (content[:3] * query_content).bfloat16(), (rotary[:3] * rope).bfloat16()
    value, exact = logits(q_content, q_rope, k_content, k_rope)
    assert torch.isfinite(quantize_key(k_content, k_rope).rope).all()
    assert relative_l2(value, exact) < BF16_ROUNDING
    q, k = quantize_query(q_content[:, None], q_rope[:, None]), quantize_key(k_content, k_rope)
    out, lse = emulated_attention(q, k, 1.0, causal=False)
    _, exact_lse = exact_attention(
        torch.cat([q_content, q_rope], -1)[:, None], k_content, k_rope, 1.0, causal=False
    )
    assert torch.isfinite(out).all()
    tolerance = BF16_ROUNDING * max(1.0, exact.abs().max().item())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=tolerance)


@pytest.mark.parametrize("amax", [448.0, 448 * (1 + 2**-12), 1e4, 3e38, BF16_MAX])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_largest_value_is_stored_as_448(amax, sign):
    """Case 2: finite input never becomes 0x7F or 0xFF, whatever its size."""
    content = torch.linspace(-0.9, 0.9, 512).float() * amax
    content[7] = sign * amax
    for config in CONFIGS.values():
        stored = quantize_key(content[None], torch.zeros(1, 64), config).content
        assert stored.float().abs().max() == E4M3_MAX
        assert stored[0, 7].float() == sign * E4M3_MAX
        assert not (stored.view(torch.uint8) & 0x7F == 0x7F).any()


def test_conversion_rounds_to_nearest_even_and_saturates():
    table = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = table[torch.isfinite(table)]
    assert torch.equal(to_e4m3(finite).float(), finite)
    assert to_e4m3(torch.tensor([17.0, 19.0, 449.0, 1e30, -1e30, torch.inf])).tolist() == [
        16,
        20,
        448,
        448,
        -448,
        448,
    ]
    assert to_e4m3(torch.tensor(2.0**-10)).item() == 0.0  # half the smallest subnormal: to even
    assert to_e4m3(torch.tensor(torch.nan)).isnan()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_non_finite_content_makes_its_scale_group_nan(bad, config):
    content, rope = latents(130)
    content[70, 3] = bad
    stored = quantize_key(content, rope, config)
    hit = torch.isnan(stored.scale)
    group = {"token": slice(70, 71), "block": slice(64, 128)}.get(config.key_scale, slice(None))
    if config.key_scale == "static":
        group = slice(None)
    expected = torch.zeros(130, dtype=torch.bool)
    expected[group] = True
    assert torch.equal(hit, expected)
    assert torch.isnan(stored.content[hit].float()).all() and torch.isnan(stored.rope[hit]).all()
    assert torch.isfinite(stored.content[~hit].float()).all()


@pytest.mark.parametrize("ratio", [1e-3, 1e-2, 1.0, 30.0, 300.0, 1e3, 1e4])
def test_rope_keeps_bf16_accuracy_at_any_ratio_to_the_content(ratio):
    """Case 3: the RoPE part's error is that of a BF16 rounding or two, whatever the content's scale."""
    content, rope = latents(200, seed=3)
    content = (content / content.float().abs().amax() * 0.1).bfloat16()
    rope = (rope / rope.float().abs().amax() * 0.1 * ratio).bfloat16()
    stored = quantize_key(content, rope)
    back = dequantize(stored)[:, 512:]
    assert ((back - rope.float()).abs() <= BF16_ROUNDING * rope.float().abs()).all()
    zero = torch.zeros_like(content)
    query = quantize_query(zero[:4], rope[:4])
    value = (query.rope.float() @ stored.rope.float().T) * (query.scale[:, None] * stored.scale)
    magnitude = rope[:4].double().abs() @ rope.double().abs().T  # a dot product's error scales with this
    assert ((value - rope[:4].double() @ rope.double().T).abs() <= 3 * BF16_ROUNDING * magnitude).all()


def test_scale_rule():
    amax = torch.tensor([0.0, 1e-20, 448.0, 1.0, 1e-9])
    expected = torch.tensor([SCALE_FLOOR, SCALE_FLOOR, 1.0, 1 / 448, 1e-9 / 448])
    torch.testing.assert_close(scale_from_amax(amax), expected, rtol=1e-7, atol=0)


def test_rows_do_not_share_scales_under_snapmla():
    content, rope = latents(10)
    louder = content.clone()
    louder[4] *= 8
    a, b = quantize_key(content, rope), quantize_key(louder, rope)
    same = torch.arange(10) != 4
    assert torch.equal(a.scale[same], b.scale[same])
    assert torch.equal(b.scale[4], a.scale[4] * 8)


KEY_GROUPS = {
    "token": lambda amax: amax,
    "block": lambda amax: torch.cat([b.max().expand(len(b)) for b in (amax[:64], amax[64:128], amax[128:])]),
    "tensor": lambda amax: amax.max().expand(len(amax)),
}
QUERY_GROUPS = {
    "head": lambda amax: amax,
    "token": lambda amax: amax.max(-1, keepdim=True).values.expand_as(amax),
    "tensor": lambda amax: amax.max().expand_as(amax),
}
TABLE_2 = {
    "snapmla": ("token", "head"),
    "config_a": ("token", "head"),
    "config_c": ("tensor", "tensor"),
    "config_d": ("block", "token"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations_share_scales_as_table_2_says(name):
    content, rope = latents(130, seed=5)
    q_content, q_rope = content[:12].view(4, 3, 512), rope[:12].view(4, 3, 64)
    keys, query = quantize_key(content, rope, CONFIGS[name]), quantize_query(q_content, q_rope, CONFIGS[name])
    if name == "config_b":
        assert (keys.scale == 1).all() and (query.scale == 1).all()
        assert torch.equal(keys.content.float(), to_e4m3(content.float()).float())
        return
    key_group, query_group = TABLE_2[name]
    rows, q_rows = (torch.cat([content, rope], -1), torch.cat([q_content, q_rope], -1))
    if name != "config_a":
        rows, q_rows = content, q_content
    assert torch.equal(keys.scale, scale_from_amax(KEY_GROUPS[key_group](rows.float().abs().amax(-1))))
    assert torch.equal(query.scale, scale_from_amax(QUERY_GROUPS[query_group](q_rows.float().abs().amax(-1))))


def test_config_a_rounds_rope_to_e4m3_on_the_joint_scale():
    content, rope = latents(20, rope=100.0)
    stored = quantize_key(content, rope, CONFIGS["config_a"])
    joint = torch.cat([content, rope], -1).float().abs().amax(-1)
    assert torch.equal(stored.scale, scale_from_amax(joint))
    assert torch.equal(stored.rope.float(), to_e4m3(stored.rope.float()).float())
    assert not torch.equal(quantize_key(content, rope).rope.float(), stored.rope.float())


def test_static_scale_and_block_size_are_data():
    content, rope = latents(64)
    config = QuantConfig("x", "x", key_scale="static", query_scale="static", static_scale=0.5)
    assert (quantize_key(content, rope, config).scale == 0.5).all()
    config = QuantConfig("x", "x", key_scale="block", query_scale="head", block_tokens=16)
    scale = quantize_key(content, rope, config).scale.view(4, 16)
    assert torch.equal(scale[:, 0], scale_from_amax(content.view(4, -1).float().abs().amax(-1)))
    assert (scale == scale[:, :1]).all()


def test_empty_input_keeps_its_shape():
    for config in CONFIGS.values():
        stored = quantize_key(torch.zeros(0, 512), torch.zeros(0, 64), config)
        assert stored.content.shape == (0, 512) and stored.scale.shape == (0,)
        query = quantize_query(torch.zeros(0, 4, 512), torch.zeros(0, 4, 64), config)
        assert query.scale.shape == (0, 4)
