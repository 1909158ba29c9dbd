"""The peers' interface, in the three forms in which it exists, with stand-ins for FlashMLA."""

from __future__ import annotations

import sys
import types

import torch

from snapmla.integrations import flashmla
from snapmla.quantization import E4M3

Q = torch.zeros(2, 1, 16, 576)
CACHE = torch.zeros(4, 64, 1, 576)
ARGUMENTS = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([64, 100]), 0.1


class SchedMeta:
    tile_scheduler_metadata = num_splits = None


def before_2026() -> types.SimpleNamespace:
    def decode(q, cache, table, lengths, width, metadata, num_splits, scale, causal):
        return metadata, num_splits, scale, causal

    return types.SimpleNamespace(
        flash_mla_with_kvcache=decode,
        get_mla_metadata=lambda lengths, rows, h_k: (("metadata", rows), "splits"),
    )


def upstream() -> types.SimpleNamespace:
    def decode(q, cache, table, lengths, width, metadata, num_splits, scale, causal, is_fp8_kvcache=None):
        return metadata, num_splits, scale, causal

    return types.SimpleNamespace(flash_mla_with_kvcache=decode, FlashMLASchedMeta=SchedMeta)


def sgl() -> types.SimpleNamespace:
    def decode(
        q, cache, table, lengths, width, metadata, num_splits, scale, causal,
        is_fp8_kvcache=None, use_legacy=False, descale_q=None, descale_k=None,
    ):  # fmt: skip
        assert use_legacy and (descale_q is None) == (not is_fp8_kvcache)
        return metadata, num_splits, scale, causal

    def metadata(lengths, rows, h_k, is_fp8_kvcache, use_legacy):
        assert is_fp8_kvcache and use_legacy
        return ("fp8 metadata", rows), "fp8 splits"

    return types.SimpleNamespace(
        flash_mla_with_kvcache=decode, FlashMLASchedMeta=SchedMeta, get_mla_decoding_metadata=metadata
    )


def install(monkeypatch, interface, **attributes) -> None:
    module = types.ModuleType("flash_mla")
    module.flash_mla_interface = interface
    for name, value in attributes.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "flash_mla", module)


def test_an_old_build_from_source(monkeypatch):
    install(monkeypatch, before_2026())
    assert flashmla.why_not("bf16") is None
    assert "no FP8 kernel" in flashmla.why_not("fp8")
    assert flashmla.prepare(Q, CACHE, *ARGUMENTS)() == (("metadata", 16), "splits", 0.1, True)


def test_a_newer_build_from_source(monkeypatch):
    install(monkeypatch, upstream())
    metadata, splits, *rest = flashmla.prepare(Q, CACHE, *ARGUMENTS, causal=False)()
    assert isinstance(metadata, SchedMeta) and splits is None and rest == [0.1, False]


def test_the_package_of_sgl(monkeypatch):
    install(monkeypatch, sgl(), has_legacy=lambda: True)
    assert flashmla.why_not("bf16") is None and flashmla.why_not("fp8") is None
    assert flashmla.prepare(Q, CACHE, *ARGUMENTS)()[0].tile_scheduler_metadata is None
    metadata = flashmla.prepare(Q.to(E4M3), CACHE.to(E4M3), *ARGUMENTS)()[0]
    assert metadata.tile_scheduler_metadata == ("fp8 metadata", 16) and metadata.num_splits == "fp8 splits"


def test_what_is_missing_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    assert flashmla.why_not("bf16") == "FlashMLA is not installed (ModuleNotFoundError)."
    install(monkeypatch, sgl(), has_legacy=lambda: False)
    assert flashmla.why_not("fp8") == "The installed FlashMLA has no Hopper kernels."
