"""The decode kernel on a Hopper GPU: equal to the emulation, split or not, at any shape; and what only a GPU can show.

Cases that the CPU has as well are in test_decode.py, where every test runs on both.
"""

from __future__ import annotations

import functools
import random

import emulation
import pytest
import torch
from emulation import SCALE, Call, errors
from paging import UNUSED_PAGE, latents, paged, poison, queries

from snapmla import LatentCache, decode_schedule, layout, mla_decode, mla_decode_quantized, ops, quantize_q
from snapmla.metrics import relative_l2
from snapmla.quantization import Quantized, to_e4m3
from snapmla.reference import exact_attention
from snapmla.schedule import boundaries

pytestmark = pytest.mark.gpu

call_of = functools.partial(emulation.call_of, device="cuda")


def run(call: Call, schedule: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode into NaN-filled results with guards behind them."""
    batch, s_q, heads = call.query.scale.shape
    guard = 4096
    memory = torch.full((batch * s_q * heads * 512 + guard,), torch.nan, dtype=torch.bfloat16, device="cuda")
    lse_memory = torch.full((batch * s_q * heads + guard,), torch.nan, device="cuda")
    out, lse = memory[:-guard].view(batch, s_q, heads, 512), lse_memory[:-guard].view(batch, heads, s_q)
    mla_decode_quantized(*call.arguments, out=out, lse=lse, schedule=schedule)
    assert memory[-guard:].isnan().all() and lse_memory[-guard:].isnan().all()
    assert not out.isnan().any() and not lse.isnan().any()
    return out, lse


def schedule_of(call: Call, parts: int | None = None) -> torch.Tensor:
    _, s_q, heads = call.query.scale.shape
    if parts is None:
        return decode_schedule(call.cache_seqlens, call.block_table, s_q, heads)
    return ops.decode_schedule(call.cache_seqlens, call.block_table.shape[1], parts)


def check(call: Call, parts: int | None = None) -> None:
    schedule = schedule_of(call, parts)
    errors(call, *run(call, schedule), schedule).check()


INPUTS = {
    "gauss": {},
    "sharp": {"sharpness": 4.0},
    "outlier rope": {"rope": 1e3, "softmax_scale": SCALE / 1000},
    "flat": {"sharpness": 0.0},
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("parts", [1, 3, None])
@pytest.mark.parametrize(("lengths", "s_q", "heads"), [([2000, 1, 777], 1, 128), ([1000, 130], 2, 16)])
def test_kernel_equals_emulation(lengths, s_q, heads, parts, inputs):
    check(call_of(lengths, s_q, heads, **INPUTS[inputs]), parts)


@pytest.mark.parametrize("seed", range(320))
def test_random_shapes(seed):
    """Batch, queries, heads, lengths, inputs and the split at random; lengths often at the edges of pages."""
    pick = random.Random(seed)
    edges = [0, 1, 2, 7, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 257, 320]
    lengths = [
        pick.choice(edges) if pick.random() < 0.5 else pick.randrange(700)
        for _ in range(pick.choice([1, 1, 2, 3, 6]))
    ]
    heads = pick.choice([1, 8, 16, 20, 32, 63, 64, 65, 127, 128, pick.randrange(1, 129)])
    call = call_of(
        lengths,
        pick.choice([1, 1, 1, 2, 3, 4, 5, 8]),
        heads,
        rope=pick.choice([1.0, 1.0, 5.0]),
        sharpness=pick.choice([0.3, 1.0, 1.0, 4.0]),
        causal=pick.random() < 0.8,
        seed=seed,
    )
    if pick.random() < 0.3:
        call.cache = LatentCache.from_planes(*(plane.clone() for plane in call.cache.planes))
    check(call, pick.choice([None, None, None, 1, 2, 5, 17, 200]))


@pytest.mark.parametrize("batch", [0, 1, 32, 1000, 5000])
@pytest.mark.parametrize("parts", [1, 8, 66, 132])
def test_schedule_is_the_python_rule(batch, parts):
    lengths = torch.randint(
        -3, 3000, (batch,), dtype=torch.int32, generator=torch.Generator().manual_seed(batch)
    )
    lengths[torch.rand(batch) < 0.2] = 0
    for max_pages in (0, 10, 47):
        expected = boundaries(lengths, max_pages, parts)
        assert torch.equal(ops.decode_schedule(lengths.cuda(), max_pages, parts).cpu(), expected)


@pytest.mark.parametrize(
    ("lengths", "s_q", "heads"),
    [([130, 0, 64], 1, 16), ([1, 300], 3, 60), ([700], 1, 128), ([65] * 5, 8, 20)],
)
def test_small_shapes(lengths, s_q, heads):
    """Few launches beside the kernels' own: the set for compute-sanitizer (kernels/README.md)."""
    call = call_of(lengths, s_q, heads)
    content, rope = (x.cuda() for x in latents(40, seed=3))
    call.cache.append(
        content, rope, torch.arange(40, device="cuda")
    )  # over pages of other sequences and of none
    assert call.cache.fetch(torch.arange(-1, 40, device="cuda")).shape == (41, 576)
    for parts in (1, 3, None):
        out, lse = mla_decode_quantized(*call.arguments, schedule=schedule_of(call, parts))
        assert out.shape[0] == lse.shape[0] == len(lengths)
    torch.cuda.synchronize()


def test_thousands_of_short_sequences():
    """Every 50th is compared."""
    call = call_of([i % 150 for i in range(3000)], 1, 4)
    out, lse = run(call)
    some = torch.arange(0, 3000, 50, device="cuda")
    schedule = schedule_of(call)
    cuts = torch.searchsorted(some, schedule[:, 0].contiguous())  # the schedule of the compared sequences
    kept = some[cuts.clamp_max(len(some) - 1)] == schedule[:, 0]
    of_some = torch.stack([cuts, schedule[:, 1]], 1)[kept]
    sample = Call(
        Quantized(*(x[some] for x in call.query)),
        call.cache,
        call.block_table[some],
        call.cache_seqlens[some],
        SCALE,
    )
    errors(sample, out[some], lse[some], of_some).check()


def test_the_same_call_gives_the_same_bits():
    call = call_of([3000, 5, 900], 2, 128)
    first = run(call)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run(call), first, strict=True))


@pytest.mark.parametrize("key_content", [0.0, 1e-30, 1e-20, 1e-8])
@pytest.mark.parametrize("query_content", [0.0, 1e-30, 1e-8, 1.0])
@pytest.mark.parametrize("rope", [1e-3, 1.0, 1e3])
def test_tiny_content_neither_overflows_nor_underflows(query_content, key_content, rope):
    """Case 1."""
    content, rotary = latents(130, seed=2)
    sequences = paged([((content * key_content).bfloat16(), (rotary * rope).bfloat16())])
    q = torch.cat([content[:3] * query_content, rotary[:3] * rope], -1).bfloat16()[None, None].cuda()
    paging = sequences.block_table.cuda(), sequences.cache_seqlens.cuda()
    call = Call(quantize_q(q), LatentCache(sequences.cache.buffer.cuda()), *paging, 1.0)
    _, lse = run(call)
    key = sequences.dequantized(0)
    _, exact_lse = exact_attention(q[0].cpu(), *key, 1.0)
    logits = (q[0, 0].cpu().double() @ torch.cat(key, -1).double().T).abs().max().item()
    torch.testing.assert_close(lse[0].T.cpu().double(), exact_lse, rtol=0, atol=2**-8 * max(1.0, logits))
    schedule = schedule_of(call)
    found = errors(call, *run(call, schedule), schedule)
    assert found.lse <= found.lse_allowed
    # Below 1e-8 nothing of the content is left and the output is 0; at 1e3 the logits reach 10^8, where float32's last place
    # is 8, and two ways of summing choose different keys.
    if key_content == 1e-8 and rope < 1e3:
        found.check()


def test_a_fault_stays_in_its_sequence():
    """NaN in a visible token shows in every row that sees it, and in no other sequence."""
    call = call_of([200, 200, 200], 1, 16)
    clean, clean_lse = run(call)
    content, _, scale = call.cache.planes
    page = int(call.block_table[1, 1])
    scale[page, 3] = torch.nan
    content.view(torch.uint8)[page, 3] = 0x7F
    out, lse = mla_decode_quantized(*call.arguments)
    assert out[1].isnan().all() and lse[1].isnan().all()
    for i in (0, 2):
        assert torch.equal(out[i], clean[i]) and torch.equal(lse[i], clean_lse[i])


def test_tokens_with_scale_zero_weigh_nothing_in_the_output():
    """A scale that the library never stores, at the start of a sequence and everywhere in it."""
    call = call_of([200], 1, 4)
    scale = call.cache.scale
    scale[int(call.block_table[0, 0])] = 0.0
    scale[int(call.block_table[0, 1]), :6] = 0.0
    check(call, 1)
    scale[call.block_table[0, :4].long()] = 0.0
    out, lse = run(call)
    assert (out == 0).all()
    torch.testing.assert_close(lse, torch.full_like(lse, 200).log(), rtol=0, atol=1e-5)
    call = call_of([200], 3, 4)  # the last two tokens: some queries see them, some do not
    call.cache.scale[int(call.block_table[0, 3]), 6:8] = 0.0
    check(call, 1)


@pytest.mark.parametrize("page", [65_536, 524_288])
def test_far_pages(page):
    """Case 11: content planes beyond 2^31 bytes and beyond 2^34."""
    near = call_of([64], 1, 16)
    far = LatentCache(torch.empty(page + 1, layout.PAGE_BYTES, dtype=torch.uint8, device="cuda"))
    far.buffer[page] = near.cache.buffer[int(near.block_table[0, 0])]
    expected = run(near)
    near.cache, near.block_table = far, torch.full_like(near.block_table, UNUSED_PAGE)
    near.block_table[0, 0] = page
    assert all(torch.equal(a, b) for a, b in zip(run(near), expected, strict=True))


def test_a_million_tokens():
    """Against float64 on the stored values; also the largest block table row and 16,384 pages."""
    tokens = 2**20
    cache = LatentCache.allocate(tokens // 64, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for start in range(0, tokens, 2**17):
        content = torch.randn(2**17, 512, generator=generator, device="cuda") + 0.5
        rope = torch.randn(2**17, 64, generator=generator, device="cuda")
        slots = torch.arange(start, start + 2**17, device="cuda")
        cache.append(content.bfloat16(), rope.bfloat16(), slots)
    table = torch.randperm(tokens // 64, generator=generator, device="cuda").int()[None]
    lengths = torch.tensor([tokens - 3], dtype=torch.int32, device="cuda")
    call = Call(quantize_q(queries(1, 1, 2, sharpness=0.5).cuda()), cache, table, lengths, SCALE)
    out, lse = run(call)
    query, key = call.sequence(0)
    q = query.content.double() * query.scale[..., None], query.rope.double() * query.scale[..., None]
    logits = sum(a @ (b.double() * key.scale[:, None]).T for a, b in zip(q, key, strict=False)) * SCALE
    exact = torch.softmax(logits, -1) @ (key.content.double() * key.scale[:, None])
    assert relative_l2(out[0], exact) < 0.02
    torch.testing.assert_close(lse[0].T.double(), torch.logsumexp(logits, -1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("batch", [1, 128])
@pytest.mark.parametrize("keys", [64, 1024, 4096, 16384, 65536, 131072])
def test_error_of_flat_attention_does_not_grow_with_the_context(keys, batch):
    """The project's guarantee. The sequences of the batch share their pages."""
    generator = torch.Generator("cuda").manual_seed(0)
    values = to_e4m3(torch.randn(keys, 512, generator=generator, device="cuda") * 16 + 120)
    cache = LatentCache.allocate(-(-keys // 64), "cuda")
    content, _, scale = cache.planes
    content.view(torch.uint8).copy_(values.view(torch.uint8).view(-1, 64, 512))
    scale.fill_(1 / 120)
    table = torch.arange(cache.num_pages, dtype=torch.int32, device="cuda").expand(batch, -1)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    q = torch.zeros(batch, 1, 16, 576, dtype=torch.bfloat16, device="cuda")
    out, lse = mla_decode(q, cache, table, lengths, SCALE)
    exact = values.double().mean(0) / 120
    assert relative_l2(out, exact.expand_as(out)) < 3e-3
    torch.testing.assert_close(lse, torch.full_like(lse, keys).log(), rtol=0, atol=1e-5)


def test_a_captured_graph_follows_other_lengths():
    """Captured at one set of lengths, replayed at others, rows without tokens included; no memory stays allocated."""
    batch, s_q, heads = 6, 2, 128
    longest = call_of([2000] * batch, s_q, heads)
    lengths = longest.cache_seqlens
    out = torch.empty(batch, s_q, heads, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(batch, heads, s_q, device="cuda")
    mla_decode_quantized(*longest.arguments, out=out, lse=lse)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_decode_quantized(*longest.arguments, out=out, lse=lse)
    assert (
        torch.cuda.memory_allocated() - before < 10_000
    )  # torch's own state of a graph; the partial results take 34 MB
    for new in ([2000] * 6, [0, 1, 64, 1999, 0, 700], [0] * 6, [3, 2000, 0, 0, 0, 0]):
        lengths.copy_(torch.tensor(new, dtype=torch.int32))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        eager = mla_decode_quantized(*longest.arguments)
        assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])
        schedule = schedule_of(longest)
        errors(longest, out, lse, schedule).check()


def test_a_schedule_serves_several_calls():
    """Made once a step, used by every layer: the same bits as a call that makes its own."""
    call, other = call_of([500, 70], 1, 64), call_of([500, 70], 1, 64, seed=5)
    schedule = schedule_of(call)
    for each in (call, other):
        assert all(torch.equal(a, b) for a, b in zip(run(each, schedule), run(each), strict=True))


def test_another_stream_is_used():
    call = call_of([300, 40], 1, 16)
    expected = run(call)
    stream, late = torch.cuda.Stream(), torch.zeros_like(call.query.rope)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(call.query.rope)
        call.query = Quantized(call.query.content, late, call.query.scale)
        got = mla_decode_quantized(*call.arguments)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_compiled_with_fullgraph():
    call = call_of([300, 40], 1, 16)
    q = queries(2, 1, 16).cuda()

    def step(q):
        return mla_decode(q, call.cache, call.block_table, call.cache_seqlens, SCALE)

    expected = step(q)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_opcheck():
    """Case 16."""
    call = call_of([300, 40], 1, 16)
    out, lse = mla_decode_quantized(*call.arguments)
    schedule = schedule_of(call)
    arguments = (
        *call.query,
        *call.cache.planes,
        call.block_table,
        call.cache_seqlens,
        SCALE,
        True,
        out,
        lse,
        schedule,
    )
    utilities = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(ops.mla_decode, arguments, test_utils=utilities)
    torch.library.opcheck(ops.decode_schedule, (call.cache_seqlens, 9, 5))


def test_an_empty_cache():
    cache = LatentCache.allocate(0, "cuda")
    table, lengths = (torch.zeros(s, dtype=torch.int32, device="cuda") for s in ((2, 0), (2,)))
    out, lse = mla_decode(queries(2, 1, 3).cuda(), cache, table, lengths, SCALE)
    assert (out == 0).all() and torch.isposinf(lse).all()


def test_lengths_past_the_block_table_are_cut():
    """What the CPU refuses, a kernel cannot: it reads no page that the table does not name."""
    call = call_of([128, 64], 1, 16)
    call.block_table = call.block_table[:, :2].contiguous()
    expected = run(call)
    call.cache_seqlens = torch.tensor([100_000, 64], dtype=torch.int32, device="cuda")
    assert all(torch.equal(a, b) for a, b in zip(run(call), expected, strict=True))
    call.cache_seqlens = torch.tensor([-5, 64], dtype=torch.int32, device="cuda")
    out, lse = run(call)
    assert (out[0] == 0).all() and torch.isposinf(lse[0]).all() and relative_l2(out[1], expected[0][1]) < 0.05


def test_wrong_arguments_are_named():
    """Case 15."""
    call = call_of([70], 1, 3)
    good = {
        "block_table": call.block_table,
        "cache_seqlens": call.cache_seqlens,
        "cache": call.cache,
    }

    def decode(**changes):
        given = good | changes
        return mla_decode_quantized(
            *call.query, given["cache"], given["block_table"], given["cache_seqlens"], SCALE
        )

    with pytest.raises(ValueError, match="block_table must be on cuda:0, got cpu"):
        decode(block_table=call.block_table.cpu())
    with pytest.raises(TypeError, match="cache_seqlens must be int32, got int64"):
        decode(cache_seqlens=call.cache_seqlens.long())
    content, rope, scale = (plane.clone() for plane in call.cache.planes)
    shifted = torch.empty(rope.numel() + 2, dtype=rope.dtype, device="cuda")[2:].view(rope.shape)
    with pytest.raises(ValueError, match="rope_cache must have rows aligned to 16 bytes"):
        decode(cache=LatentCache.from_planes(content, shifted, scale))
    poison(call.cache)
    out = torch.empty(1, 1, 512, 3, dtype=torch.bfloat16, device="cuda").transpose(2, 3)
    with pytest.raises(ValueError, match="out must be contiguous"):
        mla_decode_quantized(*call.arguments, out=out, lse=torch.empty(1, 3, 1, device="cuda"))
