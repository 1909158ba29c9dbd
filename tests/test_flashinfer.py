"""How FlashInfer is called, with a stand-in for it."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from snapmla.integrations import flashinfer
from snapmla.quantization import E4M3

TABLE = torch.tensor([[4, 2, 0], [3, 1, 5]], dtype=torch.int32)
LENGTHS = torch.tensor([64, 130], dtype=torch.int32)  # pages used: 1 and 3


class Wrapper:
    """Notes what it is asked for; its output is the number of the call."""

    def __init__(self, workspace, backend):
        self.workspace, self.backend, self.calls = workspace, backend, 0
        Wrapper.last = self

    def plan(self, **arguments):
        self.planned = arguments

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, out, lse, return_lse, **scales):
        self.calls += 1
        self.ran = [q_nope, q_pe, ckv_cache, kpe_cache], scales
        out.fill_(self.calls)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    module = types.ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("s_q", [1, 2])
def test_a_call_is_planned_once_and_runs_on_views(dtype, s_q):
    q, cache = torch.randn(2, s_q, 16, 576).bfloat16(), torch.randn(6, 64, 1, 576).to(dtype)
    call = flashinfer.prepare(q, cache, TABLE, LENGTHS, 0.1, backend="fa3")
    wrapper = Wrapper.last
    plan = wrapper.planned
    assert wrapper.backend == "fa3" and plan["sm_scale"] == 0.1 and plan["causal"] == (s_q > 1)
    assert plan["qo_indptr"].tolist() == [0, s_q, 2 * s_q] and plan["kv_indptr"].tolist() == [0, 1, 4]
    assert plan["kv_indices"].tolist() == [4, 3, 1, 5] and plan["kv_len_arr"].tolist() == [64, 130]
    assert all(plan[name].dtype == torch.int32 for name in ("qo_indptr", "kv_indptr", "kv_indices"))
    assert plan["q_data_type"] == torch.bfloat16 and plan["kv_data_type"] == dtype
    for n in (1, 2):
        out, lse = call()
        assert out.shape == (2, s_q, 16, 512) and (out == n).all() and lse.shape == (2 * s_q, 16)
    (q_nope, q_pe, ckv, kpe), scales = wrapper.ran
    assert torch.equal(torch.cat([q_nope, q_pe], -1), q.flatten(0, 1))
    assert ckv.shape == (6, 64, 512) and kpe.shape == (6, 64, 64) and ckv.data_ptr() == cache.data_ptr()
    assert scales == ({"ckv_scale": 1.0, "kpe_scale": 1.0} if dtype == E4M3 else {})


def test_calls_share_the_workspace():
    q, cache = torch.zeros(2, 1, 16, 576).bfloat16(), torch.zeros(6, 64, 1, 576).bfloat16()
    places = []
    for _ in range(2):
        flashinfer.prepare(q, cache, TABLE, LENGTHS, 0.1)
        places.append(Wrapper.last.workspace.data_ptr())
    assert places[0] == places[1]


def test_what_is_missing_is_said_in_one_sentence(monkeypatch):
    assert flashinfer.why_not() is None
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    assert flashinfer.why_not() == "FlashInfer is not installed (ModuleNotFoundError)."
