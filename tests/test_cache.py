"""The paged cache: layout, writes, gathers, page copies (cases 11-13)."""

from __future__ import annotations

import pytest
import torch
from paging import latents, paged

from snapmla import BYTES_PER_TOKEN, LatentCache, dequantize, layout, quantize_key


def test_bytes_per_token():
    assert BYTES_PER_TOKEN == LatentCache.bytes_per_token == 512 + 4 + 128 == 644
    assert layout.PAGE_BYTES == 32768 + 8192 + 256 == 64 * 644
    assert LatentCache.allocate(3).buffer.nbytes == 3 * 64 * 644


def test_planes_lie_one_after_another_in_a_page():
    cache = LatentCache.allocate(4)
    content, rope, scale = cache.planes
    base = cache.buffer.data_ptr()
    assert [p[2].data_ptr() - base for p in (content, rope, scale)] == [
        2 * layout.PAGE_BYTES + offset for offset in (0, 32768, 40960)
    ]
    assert content.shape == (4, 64, 512) and rope.shape == (4, 64, 64) and scale.shape == (4, 64)
    scale[1, 5] = 2.5
    raw = cache.buffer[1, 40960 + 20 : 40960 + 24].contiguous().view(torch.float32)
    assert raw.item() == 2.5


def test_append_and_fetch_round_trip():
    content, rope = latents(150, rope=100.0)
    sequence = paged([(content, rope)])
    expected = dequantize(quantize_key(content, rope)).bfloat16()
    assert torch.equal(sequence.cache.fetch(sequence.slots[0]), expected)
    assert torch.equal(sequence.cache.fetch(sequence.slots[0].int()), expected)


def test_fetch_of_a_negative_slot_is_zero():
    sequence = paged([latents(10)])
    slots = torch.tensor([-1, int(sequence.slots[0][3])])
    rows = sequence.cache.fetch(slots)
    assert (rows[0] == 0).all() and (rows[1] != 0).any()


def test_append_writes_its_slots_and_nothing_else():
    """Case 12."""
    guard = 5
    memory = torch.full((2 * guard + 3, layout.PAGE_BYTES), 0xA5, dtype=torch.uint8)
    before = memory.clone()
    cache = LatentCache(memory[guard : guard + 3])
    content, rope = latents(4)
    last = cache.capacity - 1
    cache.append(content, rope, torch.tensor([-1, 5, -1, last]))
    stored = quantize_key(content, rope)
    changed = memory != before
    assert not changed[:guard].any() and not changed[guard + 3 :].any() and not changed[guard + 1].any()
    for token, slot in ((1, 5), (3, last)):
        page, offset = divmod(slot, 64)
        assert torch.equal(
            cache.content[page, offset].view(torch.uint8), stored.content[token].view(torch.uint8)
        )
        assert torch.equal(cache.rope[page, offset], stored.rope[token])
        assert cache.scale[page, offset] == stored.scale[token]
    expected = before.clone()
    for page, offset in ((0, 5), (2, 63)):
        row = expected[guard + page]
        row[offset * 512 : (offset + 1) * 512] = cache.content[page, offset].view(torch.uint8)
        row[32768 + offset * 128 : 32768 + (offset + 1) * 128] = cache.rope[page, offset].view(torch.uint8)
        row[40960 + offset * 4 : 40960 + (offset + 1) * 4] = cache.scale[page, offset : offset + 1].view(
            torch.uint8
        )
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("slot", [192, 10**12])
def test_a_slot_past_the_capacity_is_refused(slot):
    cache = LatentCache.allocate(3)
    before = cache.buffer.clone()
    with pytest.raises(IndexError, match=f"slot_mapping must be below the cache's 192 slots, got {slot}"):
        cache.append(*latents(2), torch.tensor([0, slot]))
    assert torch.equal(cache.buffer, before)
    with pytest.raises(IndexError, match="slots must be below"):
        cache.fetch(torch.tensor([slot]))


def test_three_separate_planes_serve_as_well():
    content, rope = latents(100)
    one = LatentCache.allocate(2)
    three = LatentCache.from_planes(*(plane.clone() for plane in one.planes))
    for cache in (one, three):
        cache.append(content, rope, torch.arange(100))
    for a, b in zip(one.planes, three.planes, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert three.buffer is None and three.num_pages == 2 and three.capacity == 128


@pytest.mark.parametrize("separate", [False, True])
def test_copy_pages(separate):
    cache = paged([latents(64 * 4)]).cache
    if separate:
        cache = LatentCache.from_planes(*(plane.clone() for plane in cache.planes))
    before = [plane.clone() for plane in cache.planes]
    cache.copy_pages(torch.tensor([0, 1]), torch.tensor([1, 2]))  # a chain: sources are read first
    for plane, old in zip(cache.planes, before, strict=True):
        plane, old = plane.view(torch.uint8), old.view(torch.uint8)
        assert torch.equal(plane[1], old[0]) and torch.equal(plane[2], old[1])
        assert torch.equal(plane[0], old[0]) and torch.equal(plane[3:], old[3:])


def test_an_engines_buffer_shape_is_accepted():
    buffer = torch.zeros(5, 64, 644, dtype=torch.uint8)
    cache = LatentCache(buffer)
    cache.append(*latents(3), torch.arange(3))
    assert cache.buffer.data_ptr() == buffer.data_ptr() and buffer.any()


@pytest.mark.parametrize("page", [16, 32, 128])
def test_another_page_size_is_refused(page):
    """Case 13."""
    planes = LatentCache.allocate(2).planes
    with pytest.raises(ValueError, match="pages of 64 tokens"):
        LatentCache.from_planes(torch.zeros(2, page, 512).to(torch.float8_e4m3fn), *planes[1:])
    with pytest.raises(ValueError, match="64"):
        LatentCache(torch.zeros(2, page, 644, dtype=torch.uint8))


def test_pages_past_two_gigabytes_are_addressed():
    """Case 11, as far as ordinary memory goes: one page id whose content plane lies past 2^31 bytes."""
    page = 65_536
    memory = torch.empty((page + 1) * layout.PAGE_BYTES, dtype=torch.uint8)  # untouched pages cost no memory
    cache = LatentCache(memory.view(-1, layout.PAGE_BYTES))
    content, rope = latents(64)
    near = LatentCache.allocate(1)
    near.append(content, rope, torch.arange(64))
    cache.append(content, rope, torch.arange(64) + page * 64)
    assert torch.equal(cache.buffer[page], near.buffer[0])
    assert torch.equal(cache.fetch(torch.arange(64) + page * 64), near.fetch(torch.arange(64)))


BAD_ARGUMENTS = {
    "content": (lambda c, r, s: (c.float(), r, s), TypeError, "content must be bfloat16, got float32"),
    "content width": (
        lambda c, r, s: (c[:, :256], r, s),
        ValueError,
        r"content must have shape \[tokens, 512\]",
    ),
    "rope": (lambda c, r, s: (c, r[:1], s), ValueError, r"rope must have shape \[2, 64\], got \[1, 64\]"),
    "slot dtype": (
        lambda c, r, s: (c, r, s.float()),
        TypeError,
        "slot_mapping must be int64 or int32, got float32",
    ),
    "slot count": (lambda c, r, s: (c, r, s[:1]), ValueError, "slot_mapping must have 2 entries"),
    "slot rank": (lambda c, r, s: (c, r, s[None]), ValueError, r"slot_mapping must have shape \[tokens\]"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_named(name):
    change, error, message = BAD_ARGUMENTS[name]
    cache = LatentCache.allocate(1)
    with pytest.raises(error, match=message):
        cache.append(*change(*latents(2), torch.arange(2)))


def test_bad_buffers_are_named():
    with pytest.raises(TypeError, match="buffer must be uint8, got int8"):
        LatentCache(torch.zeros(1, layout.PAGE_BYTES, dtype=torch.int8))
    with pytest.raises(ValueError, match="contiguous"):
        LatentCache(torch.zeros(layout.PAGE_BYTES, 2, dtype=torch.uint8).T)
    with pytest.raises(TypeError, match="buffer must be a tensor, got NoneType"):
        LatentCache(None)
