"""Fused-K-Append of tokens before RMSNorm and rotary embedding: the roundings, and the kernel's bytes."""

from __future__ import annotations

import pytest
import torch
from paging import latents

from snapmla import LatentCache, layout
from snapmla.norm_rope import rms_norm, rotate

WEIGHT = (torch.rand(512, generator=torch.Generator().manual_seed(4)) * 2).bfloat16()


def angles(positions: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    turns = torch.arange(positions)[:, None] * torch.logspace(0, -4, 32)
    return torch.cat([turns.cos(), turns.sin()], 1).to(dtype)


def test_rms_norm_is_a_norm_with_two_roundings():
    content, _ = latents(50)
    content[::3] *= 100
    normalized = torch.nn.functional.rms_norm(content.float(), (512,), eps=1e-5).bfloat16()
    expected = normalized * WEIGHT  # as transformers' and vLLM's: the product of two BF16 values
    got = rms_norm(content, WEIGHT, 1e-5)
    assert (got != expected).float().mean() < 1e-3  # their sum of squares is float32
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_turns_pairs(interleaved):
    _, rope = latents(20)
    cos_sin = angles(20)
    pairs = rope.float().unflatten(-1, (32, 2)) if interleaved else rope.float().unflatten(-1, (2, 32)).mT
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(*cos_sin.chunk(2, -1))
    expected = torch.view_as_real(turned)
    expected = (expected if interleaved else expected.mT).flatten(-2)
    assert torch.equal(rotate(rope, cos_sin, interleaved), expected.bfloat16())
    assert torch.equal(rotate(rope, cos_sin[:1].expand(20, -1), interleaved), rope)  # no turn at position 0


def append(
    device, content, rope, slots, cos_sin, positions, interleaved, separate=False, **options
) -> LatentCache:
    cache = LatentCache(torch.full((6, layout.PAGE_BYTES), 0xA5, dtype=torch.uint8, device=device))
    if separate:
        cache = LatentCache.from_planes(*(p.clone() for p in cache.planes))
    tensors = (x.to(device) for x in (content, rope, slots, WEIGHT, cos_sin, positions))
    cache.norm_rope_append(*tensors, interleaved=interleaved, **options)
    return cache


def test_it_is_append_after_both():
    content, rope = latents(100)
    slots, positions = torch.randperm(384)[:100] - 1, torch.randint(0, 5000, (100,))
    got = append("cpu", content, rope, slots, angles(5000), positions, True, epsilon=1e-5)
    expected = LatentCache(torch.full_like(got.buffer, 0xA5))
    expected.append(rms_norm(content, WEIGHT, 1e-5), rotate(rope, angles(5000)[positions], True), slots)
    assert torch.equal(got.buffer, expected.buffer)


def test_a_skipped_tokens_position_is_not_read():
    content, rope = latents(4)
    slots, positions = torch.tensor([-1, 5, -1, 7]), torch.tensor([10**9, 3, -(10**9), 4])
    cache = append("cpu", content, rope, slots, angles(9), positions, True)
    assert (cache.buffer != 0xA5).any()


@pytest.mark.gpu
@pytest.mark.parametrize("separate", [False, True], ids=["one buffer", "three planes"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_kernels_bytes_are_the_cpus(index, dtype, interleaved, separate):
    content, rope = latents(300, rope=30.0, seed=9)
    content[::5] *= 1000
    content[7] = 0
    slots = torch.randperm(384, generator=torch.Generator().manual_seed(1))[:300].to(index)
    slots[::11] = -1
    positions = torch.randint(0, 5000, (300,), dtype=index, generator=torch.Generator().manual_seed(2))
    positions[::11] = 2**30  # of tokens that are skipped
    arguments = content, rope, slots, angles(5000, dtype), positions, interleaved, separate
    cpu, gpu = append("cpu", *arguments), append("cuda", *arguments)
    for a, b in zip(cpu.planes, gpu.planes, strict=True):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


def test_wrong_arguments_are_named():
    content, rope = latents(3)
    arguments = {"slots": torch.arange(3), "cos_sin": angles(9), "positions": torch.arange(3)}
    with pytest.raises(TypeError, match="cos_sin must be float32 or bfloat16, got float64"):
        append("cpu", content, rope, **{**arguments, "cos_sin": angles(9).double()}, interleaved=True)
    with pytest.raises(TypeError, match="content must be bfloat16, got float32"):
        append("cpu", content.float(), rope, **arguments, interleaved=True)
    with pytest.raises(ValueError, match=r"positions must have shape \[3\], got \[2\]"):
        append("cpu", content, rope, **{**arguments, "positions": torch.arange(2)}, interleaved=True)
    with pytest.raises(ValueError, match="cos_sin must be contiguous"):
        append("cpu", content, rope, **{**arguments, "cos_sin": angles(9).T.contiguous().T}, interleaved=True)
