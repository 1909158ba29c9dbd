"""Decode over the paged cache: scales, rows, lengths, masks, heads, errors (cases 4-10, 13-15, 17)."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from paging import UNUSED_PAGE, latents, paged, poison, queries

from snapmla import (
    LatentCache,
    compat,
    merge_partials,
    mla_decode,
    mla_decode_quantized,
    native,
    ops,
    quantize_q,
)
from snapmla.metrics import relative_l2
from snapmla.reference import KERNEL_FLOAT32_ADDS, emulated_attention, exact_attention

SCALE = 192**-0.5


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def decode(device):
    """mla_decode on a device into NaN-filled results, which come back to the CPU. On a GPU nothing is split, so that a
    sequence's result does not depend on the others in the batch."""

    def call(q, sequences, softmax_scale=SCALE, causal=True):
        batch, s_q, heads, _ = q.shape
        out = torch.full((batch, s_q, heads, 512), torch.nan, dtype=torch.bfloat16, device=device)
        lse = torch.full((batch, heads, s_q), torch.nan, device=device)
        cache = LatentCache(sequences.cache.buffer.to(device))
        table, lengths = sequences.block_table.to(device), sequences.cache_seqlens.to(device)
        schedule = ops.decode_schedule(lengths, table.shape[1], 1)
        arguments = cache, table, lengths, softmax_scale, causal
        mla_decode(q.to(device), *arguments, out=out, lse=lse, schedule=schedule)
        return out.cpu(), lse.cpu()

    return call


def test_paged_decode_is_the_emulation_of_each_sequence(decode, device):
    sequences = paged([latents(n, seed=n) for n in (300, 1, 64, 129)])
    q = queries(4, 2, 16)
    out, lse = decode(q, sequences)
    for i in range(4):
        query = quantize_q(q[i])
        expected, expected_lse = emulated_attention(
            query, sequences.stored(i), SCALE, rules=KERNEL_FLOAT32_ADDS
        )
        if device == "cpu":
            assert torch.equal(out[i], expected.bfloat16())
            assert torch.equal(lse[i], expected_lse.T)
        else:  # the tensor cores' truncation of QK and PV is not modelled here: tests/test_gpu_decode.py
            assert relative_l2(out[i], expected) < 0.02
            torch.testing.assert_close(lse[i], expected_lse.T, rtol=0, atol=5e-3)


def test_error_against_exact_attention(decode):
    data = [latents(n, rope=5.0, seed=n) for n in (300, 1000)]
    q = queries(2, 1, 16)
    out, lse = decode(q, paged(data))
    for i, (content, rope) in enumerate(data):
        exact, exact_lse = exact_attention(q[i], content, rope, SCALE)
        assert relative_l2(out[i], exact) < 0.08
        torch.testing.assert_close(lse[i].T.double(), exact_lse, rtol=0.01, atol=0)


@pytest.mark.parametrize("length", [1, 2, 64, 1000])
def test_lse_of_a_zero_query(decode, length):
    """Case 4: natural logarithm, nothing added."""
    _, lse = decode(torch.zeros(1, 1, 4, 576, dtype=torch.bfloat16), paged([latents(length)]))
    torch.testing.assert_close(lse, torch.full((1, 4, 1), math.log(length)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", [0, 1, 63, 64, 65, 299, 300])
def test_two_parts_merged_equal_one_call(decode, split):
    """Case 4: a sequence's keys in two caches; the blocks of P shift, and an empty part has weight 0."""
    content, rope = latents(300)
    q = queries(1, 1, 8)
    whole, whole_lse = decode(q, paged([(content, rope)]), causal=False)
    results = [
        decode(q, paged([(content[part], rope[part])]), causal=False)
        for part in (slice(0, split), slice(split, 300))
    ]
    out, lse = merge_partials(*(torch.stack(x) for x in zip(*results, strict=True)))
    exact, _ = exact_attention(q[0], content, rope, SCALE)
    assert relative_l2(out[0], exact) < 1.1 * relative_l2(whole[0], exact)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("softmax_scale", [576**-0.5, 192**-0.5, 192**-0.5 * 1.87, 1.0, 1])
def test_softmax_scale_is_honoured(decode, softmax_scale):
    """Case 5: scaling the softmax is scaling the query."""
    sequences, q = paged([latents(100)]), queries(1, 1, 4)
    out, lse = decode(q, sequences, softmax_scale)
    exact, exact_lse = exact_attention(q[0], *sequences.dequantized(0), softmax_scale)
    torch.testing.assert_close(lse[0].T.double(), exact_lse, rtol=0.02, atol=0.02)
    assert relative_l2(out[0], exact) < 0.2


class TestScalesAreUsed:
    """Case 6."""

    def test_a_keys_scale_changes_what_it_should(self, decode):
        q = queries(2, 1, 8)
        sequences = paged([latents(100, seed=0), latents(100, seed=1)])
        before, _ = decode(q, sequences)
        page, offset = divmod(int(sequences.slots[0][37]), 64)
        sequences.cache.scale[page, offset] *= 2
        after, lse = decode(q, sequences)
        assert torch.equal(after[1], before[1])
        exact, exact_lse = exact_attention(q[0], *sequences.dequantized(0), SCALE)
        assert relative_l2(after[0], before[0]) > 0.05
        assert relative_l2(after[0], exact) < 0.07
        torch.testing.assert_close(lse[0].T.double(), exact_lse, rtol=0, atol=0.05)

    def test_a_queries_scale_changes_its_head_only(self, device):
        sequences = paged([latents(100)])
        nope, rope, scale = (x.to(device) for x in quantize_q(queries(1, 2, 8)))
        cache = LatentCache(sequences.cache.buffer.to(device))
        arguments = cache, sequences.block_table.to(device), sequences.cache_seqlens.to(device)
        before, _ = mla_decode_quantized(nope, rope, scale, *arguments, SCALE)
        scale[0, 1, 3] *= 2
        after, _ = mla_decode_quantized(nope, rope, scale, *arguments, SCALE)
        changed = (after != before).any(-1)
        assert changed[0, 1, 3] and changed.sum() == 1
        doubled, _ = mla_decode_quantized(nope, rope, scale / 2, *arguments, SCALE * 2)
        assert torch.equal(doubled, after)

    @pytest.mark.parametrize("rule", ["power of two", "three times too large"])
    def test_scales_made_by_another_rule_are_obeyed(self, decode, rule):
        content, rope = latents(100)
        sequences, q = paged([(content, rope)]), queries(1, 1, 8)
        stored = sequences.stored(0)
        scale = 2.0 ** stored.scale.log2().ceil() if rule == "power of two" else stored.scale * 3
        page, offset = sequences.slots[0] // 64, sequences.slots[0] % 64
        rounded = (content.float() / scale[:, None]).to(torch.float8_e4m3fn)
        sequences.cache.content.view(torch.uint8)[page, offset] = rounded.view(torch.uint8)
        sequences.cache.rope[page, offset] = (rope.float() / scale[:, None]).bfloat16()
        sequences.cache.scale[page, offset] = scale
        out, _ = decode(q, sequences)
        assert relative_l2(out[0], exact_attention(q[0], content, rope, SCALE)[0]) < 0.07


@pytest.mark.parametrize("token", range(128))
def test_every_row_of_two_pages_is_itself(decode, token):
    """Case 7: token t = unit vector e_t * 2^(t mod 8) with a one-hot RoPE key; finds any
    permutation of rows or columns."""
    tokens = torch.arange(128)
    content = torch.zeros(128, 512)
    content[tokens, 3 * tokens] = 2.0 ** (tokens % 8)
    rope = torch.zeros(128, 64)
    rope[tokens, tokens % 64] = torch.where(tokens < 64, 1.0, -1.0)
    q = torch.zeros(1, 1, 2, 576)
    q[..., 512 + token % 64] = 60.0 if token < 64 else -60.0
    out, _ = decode(
        q.bfloat16(), paged([(content.bfloat16(), rope.bfloat16())], seed=token), softmax_scale=1.0
    )
    assert (out[0, 0].float() - content[token]).abs().max() < 1e-20  # the others weigh e^-60


@pytest.mark.parametrize("lengths", [[0, 37, 0, 64], [0, 0, 0], []])
def test_empty_sequences(decode, lengths):
    """Case 8: output 0, LSE +inf, the neighbours exact, shapes kept."""
    sequences = paged([latents(n, seed=n) for n in lengths])
    q = queries(len(lengths), 2, 5)
    out, lse = decode(q, sequences)
    assert out.shape == (len(lengths), 2, 5, 512) and lse.shape == (len(lengths), 5, 2)
    for i, length in enumerate(lengths):
        if length == 0:
            assert (out[i] == 0).all() and torch.isposinf(lse[i]).all()
        else:
            alone, alone_lse = decode(q[i : i + 1], paged([latents(length, seed=length)]))
            assert torch.equal(out[i], alone[0]) and torch.equal(lse[i], alone_lse[0])


def as_bytes(plane):
    """A plane of a cache as bytes, [pages, 64, bytes of a token]."""
    return plane.unflatten(1, (64, -1)).view(torch.uint8).flatten(2)


@pytest.mark.parametrize("plane", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 13, 63, 65, 127, 129])
def test_poisoned_page_tails_do_not_matter(decode, length, plane):
    """Case 9: bit-equal to zeros in the tail, one plane at a time."""
    sequences, q = paged([latents(length)]), queries(1, 2, 5)
    used = sequences.slots[0]
    results = []
    for poisoned in (False, True):
        clean = LatentCache.allocate(sequences.cache.num_pages)
        if poisoned:
            source = LatentCache.allocate(sequences.cache.num_pages)
            poison(source)
            as_bytes(clean.planes[plane]).copy_(as_bytes(source.planes[plane]))
        for mine, theirs in zip(clean.planes, sequences.cache.planes, strict=True):
            as_bytes(mine)[used // 64, used % 64] = as_bytes(theirs)[used // 64, used % 64]
        sequences.cache = clean
        results.append(decode(q, sequences))
    (out, lse), (poisoned_out, poisoned_lse) = results
    assert torch.equal(out, poisoned_out) and torch.equal(lse, poisoned_lse)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("s_q", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("length", [1, 2, 3, *range(63, 69), *range(127, 133), 260])
def test_causal_queries_are_single_queries_of_shorter_sequences(decode, s_q, length):
    """Case 10: bottom-right alignment; rows with no visible key give the empty result."""
    content, rope = latents(length)
    q = queries(1, s_q, 3)
    out, lse = decode(q, paged([(content, rope)]))
    for i in range(s_q):
        visible = max(length - s_q + 1 + i, 0)
        one, one_lse = decode(q[:, i : i + 1], paged([(content[:visible], rope[:visible])]))
        assert torch.equal(out[:, i], one[:, 0]) or relative_l2(out[:, i], one[:, 0]) < 2e-3
        torch.testing.assert_close(lse[..., i], one_lse[..., 0], rtol=0, atol=1e-5)
        if visible == 0:
            assert (out[:, i] == 0).all() and torch.isposinf(lse[..., i]).all()


def test_without_causal_mask_every_query_sees_everything(decode):
    sequences, q = paged([latents(70)]), queries(1, 4, 3)
    out, _ = decode(q, sequences, causal=False)
    for i in range(4):
        assert torch.equal(out[:, i], decode(q[:, i : i + 1], sequences)[0][:, 0])


@pytest.mark.parametrize("heads", [1, 8, 16, 20, 32, 63, 64, 127, 128])
@pytest.mark.parametrize("s_q", [1, 3])
def test_any_head_count(decode, device, heads, s_q):
    """Case 14: heads do not influence each other and nothing is written past the results."""
    sequences, q = paged([latents(90)]), queries(1, s_q, heads)
    guard = 1024
    memory = torch.full((s_q * heads * 512 + guard,), 7.0, dtype=torch.bfloat16, device=device)
    lse_memory = torch.full((heads * s_q + guard,), 7.0, device=device)
    out, lse = memory[:-guard].view(1, s_q, heads, 512), lse_memory[:-guard].view(1, heads, s_q)
    table, lengths = (x.to(device) for x in (sequences.block_table, sequences.cache_seqlens))
    cache = LatentCache(sequences.cache.buffer.to(device))
    schedule = ops.decode_schedule(lengths, table.shape[1], 1)
    result = mla_decode(q.to(device), cache, table, lengths, SCALE, out=out, lse=lse, schedule=schedule)
    assert result[0] is out and result[1] is lse
    assert (memory[-guard:] == 7).all() and (lse_memory[-guard:] == 7).all()
    head = heads // 2
    one, one_lse = decode(q[:, :, head : head + 1], sequences)
    assert relative_l2(out[:, :, head].cpu(), one[:, :, 0]) < 2e-3
    torch.testing.assert_close(lse[:, head].cpu(), one_lse[:, 0], rtol=0, atol=1e-5)


def test_block_table_may_have_any_row_stride(device):
    sequences, q = paged([latents(100), latents(200, seed=1)]), queries(2, 1, 4).to(device)
    cache, lengths = LatentCache(sequences.cache.buffer.to(device)), sequences.cache_seqlens.to(device)
    expected = mla_decode(q, cache, sequences.block_table.to(device), lengths, SCALE)
    wide = torch.full((2, 50), UNUSED_PAGE, dtype=torch.int32, device=device)
    columns = sequences.block_table.shape[1]
    wide[:, :columns] = sequences.block_table
    got = mla_decode(q, cache, wide[:, :columns], lengths, SCALE)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


BAD_ARGUMENTS = {
    "e4m3fnuz": (
        {"q_nope": torch.float8_e4m3fnuz},
        TypeError,
        "q_nope must be float8_e4m3fn, got float8_e4m3fnuz",
    ),
    "e5m2": ({"q_nope": torch.float8_e5m2}, TypeError, "q_nope must be float8_e4m3fn, got float8_e5m2"),
    "int8": ({"q_nope": torch.int8}, TypeError, "q_nope must be float8_e4m3fn, got int8"),
    "rope dtype": ({"q_rope": torch.float16}, TypeError, "q_rope must be bfloat16, got float16"),
    "scale dtype": ({"q_scale": torch.float64}, TypeError, "q_scale must be float32, got float64"),
    "table dtype": ({"block_table": torch.int64}, TypeError, "block_table must be int32, got int64"),
    "length dtype": ({"cache_seqlens": torch.int64}, TypeError, "cache_seqlens must be int32, got int64"),
    "rank": (
        {"q_nope": lambda x: x[0]},
        ValueError,
        r"q_nope must have shape \[batch, s_q, heads, 512\], got",
    ),
    "scale shape": ({"q_scale": lambda x: x[..., None]}, ValueError, "q_scale must have shape"),
    "batch": (
        {"cache_seqlens": lambda x: x.repeat(2)},
        ValueError,
        r"cache_seqlens must have shape \[1\], got \[2\]",
    ),
    "table rank": ({"block_table": lambda x: x[0]}, ValueError, "block_table must have shape"),
    "device": ({"block_table": lambda x: x.to("meta")}, ValueError, "block_table must be on cpu, got meta"),
    "heads": (
        {"q_nope": lambda x: x.view(torch.uint8).repeat(1, 1, 43, 1).view(x.dtype)},
        ValueError,
        "1 to 128 heads",
    ),
    "s_q": (
        {"q_nope": lambda x: x.view(torch.uint8).repeat(1, 9, 1, 1).view(x.dtype)},
        ValueError,
        "s_q from 1 to 8",
    ),
    "scale type": ({"softmax_scale": lambda x: "x"}, TypeError, "softmax_scale must be a number, got str"),
    "length": (
        {"cache_seqlens": lambda x: x + 1000},
        ValueError,
        r"cache_seqlens\[0\] must lie between 0 and the",
    ),
    "negative length": (
        {"cache_seqlens": lambda x: x - 1000},
        ValueError,
        r"cache_seqlens\[0\] must lie between",
    ),
    "page": ({"block_table": lambda x: x + 100}, ValueError, r"block_table\[0\] must hold pages from 0 to"),
    "cache": ({"cache": lambda x: x.buffer}, TypeError, "cache must be a LatentCache"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_named(name):
    """Cases 13 and 15."""
    changes, error, message = BAD_ARGUMENTS[name]
    sequences = paged([latents(70)])
    nope, rope, scale = quantize_q(queries(1, 1, 3))
    arguments = {
        "q_nope": nope,
        "q_rope": rope,
        "q_scale": scale,
        "cache": sequences.cache,
        "block_table": sequences.block_table,
        "cache_seqlens": sequences.cache_seqlens,
        "softmax_scale": SCALE,
    }
    for key, change in changes.items():
        arguments[key] = change(arguments[key]) if callable(change) else arguments[key].float().to(change)
    with pytest.raises(error, match=message) as caught:
        mla_decode_quantized(**arguments)
    assert "\n" not in str(caught.value)


def test_bad_queries_are_named():
    sequences = paged([latents(70)])
    arguments = (sequences.cache, sequences.block_table, sequences.cache_seqlens, SCALE)
    with pytest.raises(TypeError, match="q must be bfloat16, got float32"):
        mla_decode(queries(1, 1, 3).float(), *arguments)
    with pytest.raises(ValueError, match=r"q must have shape \[..., heads, 576\], got \[1, 1, 3, 512\]"):
        mla_decode(queries(1, 1, 3)[..., :512], *arguments)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        quantize_q(queries(576, 1, 3).transpose(0, 3)[..., :576])
    with pytest.raises(ValueError, match="out and lse must be given together"):
        mla_decode(queries(1, 1, 3), *arguments, out=torch.empty(1, 1, 3, 512, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="lse must be float32"):
        out = torch.empty(1, 1, 3, 512, dtype=torch.bfloat16)
        mla_decode(queries(1, 1, 3), *arguments, out=out, lse=torch.empty(1, 3, 1, dtype=torch.float64))


def test_query_slices_are_taken_as_they_are():
    """An engine's q: content a transpose of [heads, tokens, 512], RoPE a slice with a wider row stride."""
    q = queries(1, 6, 4)[0]
    content = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    rope = torch.cat([torch.zeros(6, 4, 128, dtype=torch.bfloat16), q[..., 512:]], -1)[..., 128:]
    assert not content.is_contiguous() and not rope.is_contiguous()
    for a, b in zip(ops.quantize_q(content, rope), quantize_q(q), strict=True):
        assert torch.equal(a.float(), b.float())


class TestAuthorsNames:
    """The authors' functions, with their shapes and argument orders."""

    def test_whole_path(self, device):
        sequences, q = paged([latents(100)]), queries(1, 2, 8).to(device)
        paging = sequences.block_table.to(device), sequences.cache_seqlens.to(device)
        slots, rows = sequences.slots[0].to(device), torch.cat(latents(100), -1).to(device)
        cache = LatentCache(sequences.cache.buffer.to(device))
        expected = mla_decode(q, cache, *paging, SCALE)
        copy = LatentCache.allocate(cache.num_pages, device)
        lora, rope, scale = copy.content[:, :, None], copy.rope[:, :, None], copy.scale[:, :, None, None]
        compat.quantize_and_cache_k(rows, lora, rope, scale, slots)
        nope, q_scale, q_rope = compat.quantize_ckv_per_token_head(q, 512)
        for q_scales in (q_scale, q_scale.squeeze(-1)):
            out, lse = compat.flash_mla_ckv_fp8_per_token(
                nope, q_rope, lora, rope, q_scales, scale, *paging, 512, None, None, SCALE, True
            )
            assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
        fetched = compat.dequantize_ckv_fused_indexed(lora, rope, scale, slots)
        assert torch.equal(fetched, cache.fetch(slots))
        default, _ = compat.flash_mla_ckv_fp8_per_token(
            nope, q_rope, lora, rope, q_scale, scale, *paging, 512, None, None, causal=True
        )
        assert torch.equal(default, mla_decode(q, cache, *paging, 576**-0.5)[0])  # FlashMLA's default

    def test_another_rank_is_refused(self):
        with pytest.raises(ValueError, match="kv_lora_rank must be 512, got 256"):
            compat.quantize_ckv_per_token_head(queries(1, 1, 8), 256)


def test_import_is_light():
    """Case 17: importing the package initialises no CUDA and pulls in none of the experiments' libraries."""
    code = (
        "import sys, snapmla, torch; assert not torch.cuda.is_initialized();"
        "heavy = {'hydra', 'wandb', 'transformers', 'matplotlib', 'pandas', 'snakemake'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_gpu_is_refused_in_one_sentence(monkeypatch):
    """Case 17, by hand: no GPU is needed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    native._check_device.cache_clear()
    with pytest.raises(RuntimeError, match=r"need a Hopper GPU .* got NVIDIA A100 \(8.0\)\.$"):
        native._check_device(torch.device("cuda", 0))
    native._check_device.cache_clear()
