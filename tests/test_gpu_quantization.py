"""The quantization kernels on a Hopper GPU: the same bytes as the CPU operators, and nothing else written."""

from __future__ import annotations

import pytest
import torch
from paging import latents, queries

from snapmla import LatentCache, layout, ops, quantize_q
from snapmla.quantization import E4M3

pytestmark = pytest.mark.gpu


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, a NaN equal to any NaN."""
    a, b = a.cpu(), b.cpu()
    nan = a.float().isnan()
    if not torch.equal(nan, b.float().isnan()):
        return False
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(kind)[~nan], b.view(kind)[~nan])


def rows(kind: str, count: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Content [count, 512] and RoPE [count, 64] of a kind that has broken kernels (cases 1 to 3)."""
    content, rope = latents(count, seed=7)
    sizes = torch.logspace(-30, 38, count)[:, None]
    match kind:
        case "gauss":
            return content, rope
        case "outlier rope":
            return content, (rope * 1000).bfloat16()
        case "no content":
            return torch.zeros_like(content), (rope * sizes.clamp(max=1e3)).bfloat16()
        case "any size":
            return (content.sign() * sizes).bfloat16(), rope
        case "any bits":
            bits = torch.randint(-(2**15), 2**15, (count, 576), generator=torch.Generator().manual_seed(3))
            values = bits.short().view(torch.bfloat16)
            return values[:, :512].contiguous(), values[:, 512:].contiguous()
        case "not finite":
            content[3, 5], content[4, 511], content[5, 256], rope[6, 1] = (
                torch.nan,
                torch.inf,
                -torch.inf,
                torch.nan,
            )
            return content, rope
    raise ValueError(kind)


KINDS = ["gauss", "outlier rope", "no content", "any size", "any bits", "not finite"]


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_queries_are_the_cpus(kind):
    content, rope = (x.view(20, 15, -1) for x in rows(kind))
    for cpu, gpu in zip(
        ops.quantize_q(content, rope), ops.quantize_q(content.cuda(), rope.cuda()), strict=True
    ):
        assert cpu.shape == gpu.shape and cpu.dtype == gpu.dtype and same_bytes(cpu, gpu)


@pytest.mark.parametrize("heads", [1, 8, 16, 20, 63, 128])
@pytest.mark.parametrize("batch", [0, 1, 33])
def test_query_shapes(batch, heads):
    q = queries(batch, 3, heads)
    for cpu, gpu in zip(quantize_q(q), quantize_q(q.cuda()), strict=True):
        assert same_bytes(cpu, gpu)


def test_query_slices_are_taken_as_they_are():
    """An engine's q: content a transpose of [heads, tokens, 512], RoPE a slice with a row stride of 192."""
    q = queries(1, 6, 4)[0]
    content = q[..., :512].transpose(0, 1).contiguous().cuda().transpose(0, 1)
    wide = torch.full((6, 4, 192), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[..., 128:] = q[..., 512:]
    for cpu, gpu in zip(quantize_q(q), ops.quantize_q(content, wide[..., 128:]), strict=True):
        assert same_bytes(cpu, gpu)


@pytest.mark.parametrize("separate", [False, True], ids=["one buffer", "three planes"])
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", KINDS)
def test_appended_tokens_are_the_cpus(kind, slot_dtype, separate):
    content, rope = rows(kind)
    slots = torch.randperm(640, generator=torch.Generator().manual_seed(1))[:300].to(slot_dtype)
    slots[::17] = -1
    memory = torch.full((12, layout.PAGE_BYTES), 0xA5, dtype=torch.uint8)
    caches = LatentCache(memory.clone()[1:11]), LatentCache(memory.cuda()[1:11])
    if separate:
        caches = tuple(LatentCache.from_planes(*(p.clone() for p in cache.planes)) for cache in caches)
    for cache, device in zip(caches, ("cpu", "cuda"), strict=True):
        cache.append(content.to(device), rope.to(device), slots.to(device))
    for cpu, gpu in zip(caches[0].planes, caches[1].planes, strict=True):
        assert same_bytes(cpu, gpu)


def test_nothing_else_is_written():
    """Case 12, with guards around the cache and slots past its end, which a kernel skips."""
    memory = torch.full((7, layout.PAGE_BYTES), 0xA5, dtype=torch.uint8, device="cuda")
    cache = LatentCache(memory[2:5])
    content, rope = (x.cuda() for x in latents(6))
    last = cache.capacity - 1
    cache.append(content, rope, torch.tensor([-1, 5, -1, last, last + 1, 2**40], device="cuda"))
    changed = (memory != 0xA5).cpu()
    assert not changed[:2].any() and not changed[3].any() and not changed[5:].any()
    for page, offset in ((2, 5), (4, 63)):
        row = changed[page]
        for start, width in ((0, 512), (layout.ROPE_OFFSET, 128), (layout.SCALE_OFFSET, 4)):
            row[start + offset * width : start + (offset + 1) * width] = False
    assert not changed.any()


@pytest.mark.parametrize("kind", KINDS)
def test_fetched_rows_are_the_cpus(kind):
    cache = LatentCache.allocate(5)
    cache.append(*rows(kind), torch.arange(300))
    on_gpu = LatentCache(cache.buffer.cuda())
    slots = torch.randint(-2, 300, (1000,), generator=torch.Generator().manual_seed(2))
    expected = cache.fetch(slots)
    for dtype in (torch.int64, torch.int32):
        assert same_bytes(expected, on_gpu.fetch(slots.to("cuda", dtype)))
    beyond = on_gpu.fetch(torch.tensor([320, 2**40], device="cuda"))
    assert (beyond == 0).all()


@pytest.mark.parametrize("page", [65_536, 524_288])
def test_far_pages(page):
    """Case 11: content planes beyond 2^31 bytes and beyond 2^34."""
    far = LatentCache(torch.empty(page + 1, layout.PAGE_BYTES, dtype=torch.uint8, device="cuda"))
    near = LatentCache.allocate(1, "cuda")
    content, rope = (x.cuda() for x in latents(64))
    slots = torch.arange(64, device="cuda")
    near.append(content, rope, slots)
    far.append(content, rope, slots + page * 64)
    assert torch.equal(far.buffer[page], near.buffer[0])
    assert torch.equal(far.fetch(slots + page * 64), near.fetch(slots))


def test_a_captured_graph_follows_its_inputs():
    """Captured once, replayed with other tokens and slots, padding included."""
    cache = LatentCache.allocate(4, "cuda")
    content, rope = (torch.zeros(8, n, dtype=torch.bfloat16, device="cuda") for n in (512, 64))
    slots = torch.full((8,), -1, device="cuda")
    cache.append(content, rope, slots)  # loads the library
    rows_out = cache.fetch(slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(content, rope, slots)
        rows_out = cache.fetch(slots)
    reference = LatentCache.allocate(4)
    for seed in range(3):
        new_content, new_rope = latents(8, seed=seed)
        new_slots = torch.randperm(256, generator=torch.Generator().manual_seed(seed))[:8]
        new_slots[-2:] = -1
        for static, new in ((content, new_content), (rope, new_rope), (slots, new_slots)):
            static.copy_(new)
        graph.replay()
        reference.append(new_content, new_rope, new_slots)
        assert torch.equal(cache.buffer.cpu(), reference.buffer)
        assert torch.equal(rows_out.cpu(), reference.fetch(new_slots))


def test_another_stream_is_used():
    """Work goes to the current stream: behind a slow kernel there, the input is still what that kernel leaves."""
    q = queries(64, 1, 128).cuda()
    expected = quantize_q(q)
    stream, late = torch.cuda.Stream(), torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        got = quantize_q(late)
    stream.synchronize()
    assert all(same_bytes(a, b) for a, b in zip(got, expected, strict=True))


def test_compiled_with_fullgraph():
    def step(q, content, rope, slots, buffer):
        cache = LatentCache(buffer)
        cache.append(content, rope, slots)
        return *quantize_q(q), cache.fetch(slots)

    arguments = [queries(2, 1, 4).cuda(), *(x.cuda() for x in latents(20)), torch.arange(20, device="cuda")]
    buffers = [LatentCache.allocate(1, "cuda").buffer for _ in range(2)]
    expected = step(*arguments, buffers[0])
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments, buffers[1])
    assert all(same_bytes(a, b) for a, b in zip(expected, got, strict=True))
    assert torch.equal(*buffers)


def test_unaligned_rows_are_refused():
    memory = torch.zeros(8, 513, dtype=torch.bfloat16, device="cuda")
    rope = torch.zeros(8, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="content must have rows aligned to 16 bytes"):
        LatentCache.allocate(1, "cuda").append(memory[:, :512], rope, torch.arange(8, device="cuda"))
    with pytest.raises(ValueError, match="rope must have rows aligned to 4 bytes"):
        odd = torch.zeros(8, 65, dtype=torch.bfloat16, device="cuda")[:, :64]
        content = torch.zeros(8, 512, dtype=torch.bfloat16, device="cuda")
        LatentCache.allocate(1, "cuda").append(content, odd, torch.arange(8, device="cuda"))
    with pytest.raises(TypeError, match="content_cache must be float8_e4m3fn"):
        planes = LatentCache.allocate(1, "cuda").planes
        ops.fetch_kv(planes[0].view(torch.uint8), *planes[1:], torch.arange(8, device="cuda"))


def test_e4m3_of_the_library_is_e4m3fn():
    content, _, scale = ops.quantize_q(
        torch.full((1, 1, 512), 3.0, dtype=torch.bfloat16, device="cuda"),
        queries(1, 1, 1)[0, ..., 512:].cuda(),
    )
    assert content.dtype == E4M3 and (content.float() == 448).all() and scale.item() == pytest.approx(3 / 448)
