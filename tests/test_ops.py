"""The torch.library operators: opcheck, torch.compile, FakeTensorMode (case 16)."""

from __future__ import annotations

import pytest
import torch
from paging import latents, queries
from torch._subclasses.fake_tensor import FakeTensorMode

from snapmla import LatentCache, mla_decode, ops, quantize_q

TABLE = torch.tensor([[2, 0]], dtype=torch.int32)
LENGTHS = torch.tensor([100], dtype=torch.int32)


def filled(separate: bool = False) -> LatentCache:
    cache = LatentCache.allocate(3)
    if separate:
        cache = LatentCache.from_planes(*(plane.clone() for plane in cache.planes))
    cache.append(*latents(192), torch.arange(192))
    return cache


def results(s_q: int = 2, heads: int = 4):
    return torch.zeros(1, s_q, heads, 512, dtype=torch.bfloat16), torch.zeros(1, heads, s_q)


def before(tokens: int):
    """RMSNorm and rotary embedding: weight, cos_sin, positions, epsilon, interleaved."""
    angles = torch.arange(50)[:, None] * torch.logspace(0, -3, 32)
    return (
        torch.linspace(0.5, 2, 512).bfloat16(),
        torch.cat([angles.cos(), angles.sin()], 1),
        torch.arange(tokens),
        1e-6,
        True,
    )


CALLS = {
    "quantize_q": lambda: (ops.quantize_q, (queries(1, 2, 4)[..., :512], queries(1, 2, 4)[..., 512:])),
    "append_kv": lambda: (ops.append_kv, (*latents(9), torch.arange(9) - 2, *filled(separate=True).planes)),
    "append_kv_buffer": lambda: (ops.append_kv_buffer, (*latents(9), torch.arange(9) - 2, filled().buffer)),
    "norm_rope_append_kv": lambda: (
        ops.norm_rope_append_kv,
        (*latents(9), torch.arange(9) - 2, *before(9), *filled(separate=True).planes),
    ),
    "norm_rope_append_kv_buffer": lambda: (
        ops.norm_rope_append_kv_buffer,
        (*latents(9), torch.arange(9) - 2, *before(9), filled().buffer),
    ),
    "decode_schedule": lambda: (ops.decode_schedule, (LENGTHS, 2, 3)),
    "fetch_kv": lambda: (ops.fetch_kv, (*filled().planes, torch.arange(9) - 2)),
    "mla_decode": lambda: (
        ops.mla_decode,
        (*quantize_q(queries(1, 2, 4)), *filled().planes, TABLE, LENGTHS, 0.07, True, *results()),
    ),
}
MUTATED = {
    "append_kv": (3, 4, 5),
    "append_kv_buffer": (3,),
    "norm_rope_append_kv": (8, 9, 10),
    "norm_rope_append_kv_buffer": (8,),
    "mla_decode": (10, 11),
}


def has_e4m3_input(arguments) -> bool:
    return any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    op, arguments = CALLS[name]()
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not has_e4m3_input(arguments):
        utils.append("test_schema")  # torch compares e4m3 inputs with allclose, which it does not implement
    torch.library.opcheck(op, arguments, test_utils=utils)


@pytest.mark.parametrize("name", CALLS)
def test_only_the_declared_arguments_change(name):
    op, arguments = CALLS[name]()
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    op(*arguments)
    for i, (old, new) in enumerate(zip(before, arguments, strict=True)):
        if isinstance(new, torch.Tensor):
            same = torch.equal(old.view(torch.uint8), new.view(torch.uint8))
            assert same != (i in MUTATED.get(name, ()))


@pytest.mark.parametrize("separate", [False, True], ids=["one buffer", "three planes"])
def test_compiled_step_equals_eager(separate):
    """Append and decode in one graph without breaks."""

    def step(q, content, rope, slots, cache):
        cache.append(content, rope, slots)
        return *mla_decode(q, cache, TABLE, LENGTHS, 0.07), cache.fetch(slots)

    arguments = (queries(1, 2, 4), *latents(20, seed=9), torch.arange(20) + 128)
    eager_cache, compiled_cache = filled(separate), filled(separate)
    expected = step(*arguments, eager_cache)
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments, compiled_cache)
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(eager_cache.planes, compiled_cache.planes, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_shapes_without_a_gpu():
    with FakeTensorMode():
        q = torch.empty(5, 2, 20, 576, dtype=torch.bfloat16)
        cache = LatentCache(torch.empty(7, 41216, dtype=torch.uint8))
        table = torch.empty(5, 3, dtype=torch.int32)
        lengths = torch.empty(5, dtype=torch.int32)
        out, lse = mla_decode(q, cache, table, lengths, 0.07)
        rows = cache.fetch(torch.empty(11, dtype=torch.int64))
        cache.append(q[:, 0, 0, :512], q[:, 0, 0, 512:], lengths)
        with pytest.raises(ValueError, match="block_table must have shape"):
            mla_decode(q, cache, table[0], lengths, 0.07)
    assert out.shape == (5, 2, 20, 512) and out.dtype == torch.bfloat16
    assert lse.shape == (5, 20, 2) and lse.dtype == torch.float32
    assert rows.shape == (11, 576) and rows.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "on_gpu"),
    [
        ("append_kv", ops._append_on_gpu),
        ("norm_rope_append_kv", ops._norm_rope_append_on_gpu),
        ("mla_decode", ops._decode_on_gpu),
    ],
)
def test_what_the_kernels_are_given(monkeypatch, name, on_gpu):
    """The CUDA implementations check their arguments and hand every one on, in order; seen with CPU tensors."""
    given = []
    monkeypatch.setattr(ops.native, name, lambda *arguments: given.extend(arguments))
    _, arguments = CALLS[name]()
    on_gpu(*arguments)
    flat = [x for a in given for x in (a if isinstance(a, tuple) else [a])]
    assert all(a is b for a, b in zip(flat, arguments, strict=True))
    broken = [arguments[0].float(), *arguments[1:]]
    with pytest.raises(TypeError, match="must be (bfloat16|float8_e4m3fn), got float32"):
        on_gpu(*broken)
