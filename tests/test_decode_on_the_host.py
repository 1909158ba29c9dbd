"""The decode kernels' own source, run on the CPU (tests/host): layout, masks, barriers, schedule and combination, without a GPU.

Asynchrony and the tensor cores' truncation are not modelled; tests/test_gpu_decode.py has the real thing.
"""

from __future__ import annotations

import ctypes
import random
import shutil

import host
import pytest
import torch
from emulation import SCALE, Call, call_of, errors
from paging import UNUSED_PAGE

from snapmla import native
from snapmla.reference import KERNEL_FLOAT32_ADDS
from snapmla.schedule import boundaries

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, found none")


@pytest.fixture(scope="module", autouse=True)
def on_the_host(tmp_path_factory):
    """`snapmla.native` calls the host's library, on CPU tensors and no stream."""
    library = ctypes.CDLL(str(host.build(tmp_path_factory.mktemp("host"))))

    def launch(name, like, *arguments):
        function = getattr(library, name)
        function.argtypes = native._SIGNATURES[name]
        assert function(*arguments, None) == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_launch", launch)
        yield


def run(call: Call, parts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out and lse into NaN, and the schedule."""
    batch, s_q, heads = call.query.scale.shape
    out = torch.full((batch, s_q, heads, 512), torch.nan, dtype=torch.bfloat16)
    lse = torch.full((batch, heads, s_q), torch.nan)
    max_pages = call.block_table.shape[1]
    schedule = native.decode_schedule(call.cache_seqlens, max_pages, parts)
    assert torch.equal(schedule, boundaries(call.cache_seqlens, max_pages, parts))
    paging = call.block_table, call.cache_seqlens, call.softmax_scale, call.causal
    native.mla_decode(call.query, call.cache.planes, *paging, out, lse, schedule)
    return out, lse, schedule


def check(call: Call, parts: int) -> None:
    errors(call, *run(call, parts), KERNEL_FLOAT32_ADDS).check()


@pytest.mark.parametrize(
    ("lengths", "s_q", "heads", "parts"),
    [
        ([300], 1, 16, 1),
        ([64], 1, 3, 1),
        ([1, 130, 0], 1, 64, 2),
        ([700], 2, 40, 3),
        ([200, 65], 1, 128, 1),
        ([2200], 1, 8, 40),
    ],
)
def test_kernel_equals_emulation(lengths, s_q, heads, parts):
    check(call_of(lengths, s_q, heads), parts)


@pytest.mark.parametrize("seed", range(6))
def test_random_shapes(seed):
    rng = random.Random(seed)
    lengths = [
        rng.choice([0, 1, rng.randint(60, 70), rng.randint(100, 400)]) for _ in range(rng.randint(1, 3))
    ]
    s_q, heads = rng.choice([(1, 1), (1, 20), (1, 64), (2, 16), (3, 40), (8, 8)])
    call = call_of(lengths, s_q, heads, sharpness=rng.choice([0.0, 1.0, 4.0]), causal=rng.random() < 0.8)
    check(call, rng.randint(1, 5))


def test_a_query_that_sees_no_key():
    """More queries than tokens; and not causal."""
    check(call_of([3, 70], 8, 2), 1)
    check(call_of([3, 70], 8, 2, causal=False), 1)


def test_outlier_rope_and_sharp_queries():
    check(call_of([260], 1, 16, rope=1e3, softmax_scale=SCALE / 1000), 2)
    check(call_of([260], 1, 16, sharpness=4.0), 1)


def test_tokens_with_scale_zero():
    """A scale that the library never stores; the last two tokens, which some queries see and some do not."""
    call = call_of([200], 3, 4)
    call.cache.scale[int(call.block_table[0, 3]), 6:8] = 0.0
    check(call, 1)
    call.cache.scale[call.block_table[0, :4].long()] = 0.0
    out, lse, _ = run(call, 1)
    seen = torch.tensor([198.0, 199.0, 200.0]).log().expand_as(lse)
    assert (out == 0).all() and torch.allclose(lse, seen, rtol=0, atol=1e-5)


def test_unused_pages_are_not_touched():
    call = call_of([100], 1, 8)
    call.block_table = torch.nn.functional.pad(call.block_table, (0, 3), value=UNUSED_PAGE)
    check(call, 1)
