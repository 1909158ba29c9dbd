"""The vLLM backend: its tensors on the CPU, and its interfaces against a stand-in of vLLM's (vllm_stand_in.py)."""

from __future__ import annotations

import importlib
import importlib.util
import math
import subprocess
import sys
import tomllib

import pytest
import torch
import vllm_stand_in as stand_in
from paging import UNUSED_PAGE, latents, poison, queries
from toy_project import REPOSITORY

from snapmla import LatentCache, mla_decode
from snapmla.integrations import vllm as plugin
from snapmla.integrations.vllm import pages
from snapmla.layout import BYTES_PER_TOKEN, PAGE_BYTES, PAGE_SIZE
from snapmla.metrics import relative_l2

DIMS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 16}
HEADS = 4


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch):
    """`backend.py`, imported on the stand-in, which every test gets afresh."""
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("get_kv_cache_spec", "chunked_prefill_workspace_size"):
        monkeypatch.setattr(stand_in.MLAAttention, name, getattr(stand_in.MLAAttention, name))
    monkeypatch.setattr(stand_in, "CURRENT", stand_in.VllmConfig(num_heads=HEADS))
    for name in ("backend", "decode_bench"):
        monkeypatch.delitem(sys.modules, f"{plugin.__name__}.{name}", raising=False)
    yield importlib.import_module(f"{plugin.__name__}.backend")
    for name in ("backend", "decode_bench"):
        sys.modules.pop(f"{plugin.__name__}.{name}", None)


def kv_cache(blocks: int) -> torch.Tensor:
    """As vLLM allocates a layer's cache, poisoned."""
    cache = torch.zeros(pages.cache_shape(blocks), dtype=torch.uint8)
    poison(LatentCache(cache))
    return cache


def table(rows: list[list[int]], width: int = 8) -> torch.Tensor:
    """Block table whose unused entries would fault."""
    return torch.tensor([row + [UNUSED_PAGE] * (width - len(row)) for row in rows], dtype=torch.int32)


def slots_of(row: list[int], start: int, stop: int) -> torch.Tensor:
    position = torch.arange(start, stop)
    return torch.tensor(row)[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


class TestPages:
    def test_a_block_is_a_page(self):
        assert math.prod(pages.cache_shape(7)) == 7 * PAGE_BYTES == 7 * 64 * BYTES_PER_TOKEN

    def test_padding_is_not_written(self):
        cache, before = kv_cache(3), kv_cache(3)
        content, rope = latents(6)
        slots = torch.tensor([70, -1, 64])  # three rows of padding have no slot at all
        pages.append(cache, content, rope[:, None], slots)
        expected = LatentCache(before)
        expected.append(content[[0, 2]], rope[[0, 2]], slots[[0, 2]])
        assert torch.equal(cache.flatten(), before.flatten())
        pages.append(torch.empty(0, dtype=torch.uint8), content, rope[:, None], slots)  # while memory is measured

    @pytest.mark.parametrize("s_q", [1, 2])
    def test_decode_takes_what_vllm_hands_over(self, s_q: int):
        """Queries in two parts, neither contiguous; a cache viewed as e4m3; rows of padding; garbage in the table."""
        cache, rows, lengths = kv_cache(9), [[3, 1], [8], [], [2, 5, 7]], [100, 64, 0, 150]
        content, rope = latents(sum(lengths))
        begin = 0
        for row, length in zip(rows, lengths):
            if length:
                part = slice(begin, begin + length)
                pages.append(cache, content[part], rope[part][:, None], slots_of(row, 0, length))
            begin += length
        q = queries(len(rows), s_q, HEADS).flatten(0, 1)
        q_content = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)  # a transpose of [heads, tokens, 512]
        q_rope = torch.cat([torch.full((*q.shape[:2], 128), torch.nan), q[..., 512:]], -1).bfloat16()[..., 128:]
        seq_lens, block_table = torch.tensor(lengths, dtype=torch.int32), table(rows)
        found = pages.decode(cache.view(torch.float8_e4m3fn), q_content, q_rope, block_table, seq_lens, 0.1, None)
        expected, _ = mla_decode(q.unflatten(0, (-1, s_q)), LatentCache(cache), block_table, seq_lens, 0.1)
        assert torch.equal(found, expected.flatten(0, 1)) and found.isfinite().all()
        assert not found[2 * s_q : 3 * s_q].any() and found[3 * s_q :].any()

    def test_unequal_queries_are_refused(self):
        q, lengths = queries(1, 3, 2)[0], torch.tensor([5, 5], dtype=torch.int32)
        with pytest.raises(ValueError, match="same number for each of 2 sequences, got 3"):
            pages.decode(kv_cache(2), q[..., :512], q[..., 512:], table([[0], [1]]), lengths, 0.1, None)

    def test_slots_of_a_piece_of_contexts(self):
        rows = [[4, 2, 6], [1], [3, 5]]
        starts, counts = [64, 0, 60], [70, 0, 5]
        cumulative = torch.tensor([0, *torch.tensor(counts).cumsum(0)])
        sequence = torch.arange(3).repeat_interleave(torch.tensor(counts))
        given = table(rows), sequence.int(), cumulative.int(), torch.tensor(starts, dtype=torch.int32)
        expected = [slots_of(row, s, s + n) for row, s, n in zip(rows, starts, counts) if n]
        assert torch.equal(pages.context_slots(*given), torch.cat(expected))

    def test_a_schedule_keeps_its_memory(self):
        schedules, lengths = pages.Schedules(), torch.tensor([100, 900], dtype=torch.int32)
        first = schedules.make(lengths, table([[0], [1]], 16), 1, HEADS)
        kept = first.clone()
        second = schedules.make(torch.ones(3, dtype=torch.int32), table([[0], [1], [2]], 16), 1, HEADS)
        assert second.data_ptr() == first.data_ptr() and not torch.equal(second, kept)


class TestRegistration:
    def test_the_entry_point_names_the_backend(self, backend):
        points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]
        module, _, function = points["vllm.general_plugins"]["snapmla"].partition(":")
        stand_in.REGISTERED.clear()
        for _ in range(2):  # vLLM may load it again
            getattr(importlib.import_module(module), function)()
        path, _, name = stand_in.REGISTERED[stand_in.AttentionBackendEnum.CUSTOM].rpartition(".")
        assert getattr(importlib.import_module(path), name) is backend.SnapMLABackend
        assert backend.SnapMLABackend.get_name() == "CUSTOM"

    def test_an_older_vllm_starts_without_it(self, backend, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delattr(sys.modules["vllm.v1.attention.backends.registry"], "register_backend")
        stand_in.REGISTERED.clear()
        plugin.register()
        assert not stand_in.REGISTERED

    @pytest.mark.parametrize("version", ["0.25.0", "0.25.1", "0.25.2rc1"])
    def test_supported_versions(self, version: str):
        plugin.check_version(version)

    @pytest.mark.parametrize("version", ["0.24.9", "0.26.0", "1.25.0", "0.250.1"])
    def test_others_are_refused_when_it_is_selected(self, version: str, monkeypatch: pytest.MonkeyPatch):
        modules = stand_in.modules()
        modules["vllm"].__version__ = version
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, f"{plugin.__name__}.backend", raising=False)
        plugin.register()
        with pytest.raises(ImportError, match=f"needs vLLM 0.25, got {version}"):
            importlib.import_module(f"{plugin.__name__}.backend")

    def test_importing_the_plugin_imports_no_vllm(self):
        assert not any(name == "vllm" or name.startswith("vllm.") for name in sys.modules)


AGAINST_VLLM = """
import importlib, inspect, sys
import vllm_stand_in
from snapmla.integrations.vllm import backend

wrong = [
    f"{module}.{name} is missing"
    for module, contents in vllm_stand_in.CONTENTS.items()
    for name in contents
    if not hasattr(importlib.import_module(module), name)
]
for ours, names in (
    (backend.SnapMLABackend, ("get_kv_cache_shape", "supports_compute_capability")),
    (backend.SnapMLAMetadataBuilder, ("_build_decode", "determine_chunked_prefill_workspace_size")),
    (backend.SnapMLAImpl, ("do_kv_cache_update", "forward_mqa", "_compute_prefill_context")),
):
    for name in names:
        base = next(cls for cls in ours.__mro__[1:] if name in vars(cls))
        given, wanted = (list(inspect.signature(getattr(cls, name)).parameters) for cls in (ours, base))
        if given != wanted:
            wrong.append(f"{ours.__name__}.{name} takes {given}, vLLM gives {wanted}")
print("\\n".join(wrong))
sys.exit(bool(wrong))
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_has_what_the_stand_in_has():
    """Every name, and the parameters of what the backend overrides."""
    tests = str(REPOSITORY / "tests")
    done = subprocess.run([sys.executable, "-c", AGAINST_VLLM], cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class TestBackend:
    def test_a_layer_asks_for_644_bytes_a_token(self, backend):
        config = stand_in.VllmConfig()
        ours = stand_in.MLAAttention(backend.SnapMLABackend).get_kv_cache_spec(config)
        assert ours.page_size_bytes == PAGE_BYTES and ours.head_size == BYTES_PER_TOKEN
        shape = backend.SnapMLABackend.get_kv_cache_shape(5, 64, ours.num_kv_heads, ours.head_size)
        assert math.prod(shape) * ours.dtype.itemsize == 5 * ours.page_size_bytes
        other = stand_in.MLAAttention(stand_in.OtherBackend).get_kv_cache_spec(config)
        assert other.page_size_bytes == 64 * 1152
        with pytest.raises(ValueError, match="block_size must be 64, got 128"):
            backend.SnapMLABackend.get_kv_cache_shape(5, 128, 1, 644)

    @pytest.mark.parametrize(("max_num_seqs", "tokens"), [(4, 16384), (256, 16384), (1024, 65536)])
    def test_a_prefill_takes_a_quarter_of_vllms_memory(self, backend, max_num_seqs: int, tokens: int):
        """As the engine measures it, and as contexts are cut; each sequence has a page of a piece."""
        ours, other = (stand_in.MLAAttention(of) for of in (backend.SnapMLABackend, stand_in.OtherBackend))
        config = ours._vllm_config = other._vllm_config = stand_in.VllmConfig()
        config.scheduler_config.max_num_seqs = max_num_seqs
        assert ours.chunked_prefill_workspace_size == tokens
        assert backend.SnapMLAMetadataBuilder.determine_chunked_prefill_workspace_size(config) == tokens
        assert other.chunked_prefill_workspace_size == 65536

    def test_what_it_supports(self, backend):
        ours = backend.SnapMLABackend
        assert ours.get_supported_kernel_block_sizes() == [64] and ours.get_supported_head_sizes() == [576]
        assert [ours.supports_compute_capability(x) for x in ((9, 0), (8, 9), (10, 0))] == [True, False, False]
        assert ours.get_impl_cls() is backend.SnapMLAImpl
        assert ours.get_builder_cls() is backend.SnapMLAMetadataBuilder

    @pytest.mark.parametrize(("speculative", "refused"), [(0, False), (7, False), (8, True)])
    def test_speculative_tokens_must_fit_a_call(self, backend, speculative: int, refused: bool):
        arguments = None, ["layer"], stand_in.VllmConfig(speculative=speculative), torch.device("cpu")
        if refused:
            with pytest.raises(ValueError, match="at most 8 queries a step, got 9"):
                backend.SnapMLAMetadataBuilder(*arguments)
        else:
            backend.SnapMLAMetadataBuilder(*arguments)

    def test_other_dimensions_are_refused(self, backend):
        for change, message in (({"kv_lora_rank": 256}, "must be 512 and 64, got 256 and 64"), ({}, "num_heads must be at most 128")):
            with pytest.raises(ValueError, match=message):
                backend.SnapMLAImpl(num_heads=HEADS if change else 129, scale=0.1, kv_b_proj=None, **DIMS | change)

    def test_the_fusion_that_writes_another_layout_is_off(self, backend):
        passes = stand_in.CURRENT.compilation_config.pass_config
        passes.fuse_rope_kvcache_cat_mla = True
        impl = backend.SnapMLAImpl(num_heads=HEADS, scale=0.1, kv_b_proj=None, **DIMS)
        assert not passes.fuse_rope_kvcache_cat_mla and not impl.supports_quant_query_input


class Engine:
    """One layer of a model and its steps, as vLLM's runner takes them: append, then attention of prefills and decodes."""

    def __init__(self, backend, speculative: int = 0) -> None:
        generator = torch.Generator().manual_seed(3)
        width = DIMS["qk_nope_head_dim"] + DIMS["v_head_dim"]
        self.up = (torch.randn(512, HEADS, width, generator=generator) / 512**0.5).bfloat16()
        scale = stand_in.PrefillBackend.scale
        project = lambda content: (content @ self.up.flatten(1),)
        self.impl = backend.SnapMLAImpl(num_heads=HEADS, scale=scale, kv_b_proj=project, **DIMS)
        config = stand_in.VllmConfig(num_heads=HEADS, speculative=speculative)
        self.builder = backend.SnapMLAMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
        self.cache = kv_cache(16)

    def step(self, step: stand_in.Step, q: torch.Tensor, content: torch.Tensor, rope: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Attention outputs of all new tokens, [tokens, heads, v]."""
        self.impl.do_kv_cache_update(content, rope[:, None], self.cache, slots, "auto", torch.ones(1))
        metadata = self.builder.build(0, step)
        n, nope = metadata.num_decode_tokens, DIMS["qk_nope_head_dim"]
        out = torch.empty(len(q), HEADS, DIMS["v_head_dim"], dtype=torch.bfloat16)
        if n < len(q):
            self.impl.forward_mha(q[n:], content[n:], rope[n:, None], self.cache, metadata, out[n:])
        if n:
            w_uk, w_uv = self.up.split([nope, DIMS["v_head_dim"]], -1)
            absorbed = torch.einsum("thn,chn->htc", q[:n, :, :nope], w_uk).transpose(0, 1)
            latent, _ = self.impl.forward_mqa((absorbed, q[:n, :, nope:]), self.cache, metadata, None)
            out[:n] = torch.einsum("thc,chv->thv", latent, w_uv)
        return out

    def exact(self, q: torch.Tensor, content: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """Of the last tokens of one text, float64."""
        up = torch.einsum("tc,chw->thw", content.double(), self.up.double())
        k_nope, v = up.split([DIMS["qk_nope_head_dim"], DIMS["v_head_dim"]], -1)
        k = torch.cat([k_nope, rope.double()[:, None].expand(-1, HEADS, -1)], -1)
        s = torch.einsum("qhd,khd->hqk", q.double(), k) * self.impl.scale
        hidden = torch.ones(s.shape[1:], dtype=torch.bool).triu(len(content) - len(q) + 1)
        return torch.einsum("hqk,khv->qhv", s.masked_fill(hidden, -torch.inf).softmax(-1), v)


ROWS = [[3, 9, 4], [3, 5, 11], [7], [2, 8], []]
"""Blocks of five sequences: the second shares the first one's first block, the last is padding."""


class Texts:
    """Three texts of 190 tokens, the second like the first in its first 64; queries of each token."""

    def __init__(self) -> None:
        drawn = [latents(190, seed=i) for i in range(4)]
        self.content, self.rope = ([x[i].clone() for x in drawn] for i in range(2))
        for x in (self.content, self.rope):
            x[1][:64] = x[0][:64]
        width = DIMS["qk_nope_head_dim"] + 64
        generator = torch.Generator().manual_seed(9)
        self.q = [torch.randn(190, HEADS, width, generator=generator).bfloat16() for _ in range(4)]

    def step(self, parts: list[tuple[int, int, int]], decodes: int, padding: int = 0):
        """What `Engine.step` takes, for (text, tokens before, tokens now); rows of padding go with the decodes."""
        new = torch.tensor([now for *_, now in parts[:decodes]] + [0] * padding + [now for *_, now in parts[decodes:]])
        context = torch.tensor([b for _, b, _ in parts[:decodes]] + [0] * padding + [b for _, b, _ in parts[decodes:]])
        rows = [ROWS[t] for t, *_ in parts[:decodes]] + [[]] * padding + [ROWS[t] for t, *_ in parts[decodes:]]
        tensors = (torch.cat([x[t][b : b + n] for t, b, n in parts]) for x in (self.q, self.content, self.rope))
        slots = torch.cat([slots_of(ROWS[t], b, b + n) for t, b, n in parts])
        return stand_in.Step(context, new, table(rows), decodes + padding), *tensors, slots

    def expected(self, engine: Engine, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        return torch.cat([engine.exact(self.q[t][b : b + n], self.content[t][: b + n], self.rope[t][: b + n]) for t, b, n in parts])


class TestSteps:
    """A wrong block, piece or merge is an error of order one, the FP8 cache's one of a few percent."""

    @staticmethod
    def check(engine: Engine, texts: Texts, parts: list[tuple[int, int, int]], decodes: int, tolerance: float = 0.06):
        found, expected = engine.step(*texts.step(parts, decodes)), texts.expected(engine, parts)
        begin = 0
        for *_, n in parts:
            assert relative_l2(found[begin : begin + n], expected[begin : begin + n]) < tolerance
            begin += n

    def test_prefill_in_chunks_behind_shared_blocks_then_decode(self, backend):
        engine, texts = Engine(backend), Texts()
        self.check(engine, texts, [(0, 0, 130)], 0, 1e-2)  # reads no cache
        # A sequence without a context comes before those with one; the second text's first block is the first's.
        self.check(engine, texts, [(0, 130, 1), (2, 0, 20), (1, 64, 90), (3, 0, 100)], 1)
        self.check(engine, texts, [(0, 131, 1), (2, 20, 1), (1, 154, 1), (3, 100, 20)], 3)
        self.check(engine, texts, [(0, 132, 1), (2, 21, 1), (1, 155, 1), (3, 120, 1)], 4)

    def test_contexts_of_several_pieces(self, backend):
        engine, texts = Engine(backend), Texts()
        self.check(engine, texts, [(0, 0, 150)], 0, 1e-2)
        self.check(engine, texts, [(1, 64, 10), (0, 150, 40)], 0)  # the second piece has no token of the first sequence

    def test_speculative_queries(self, backend):
        engine, texts = Engine(backend, speculative=1), Texts()
        self.check(engine, texts, [(0, 0, 130), (2, 0, 30)], 0, 1e-2)
        self.check(engine, texts, [(0, 130, 2), (2, 30, 2)], 2)

    def test_rows_of_padding(self, backend):
        """A captured batch has more rows than sequences: their queries are garbage, their slots -1, their lengths 0."""
        engine, texts = Engine(backend), Texts()
        engine.step(*texts.step([(0, 0, 130), (2, 0, 30)], 0))
        parts = [(0, 130, 1), (2, 30, 1)]
        step, *tensors, slots = texts.step(parts, 2)
        step = stand_in.Step(*(torch.cat([x, x.new_zeros(2)]) for x in (step.context, step.new)), table([ROWS[0], ROWS[2], [], []]), 4)
        tensors = [torch.cat([x, torch.full((2, *x.shape[1:]), torch.nan, dtype=x.dtype)]) for x in tensors]
        metadata = engine.builder.build(0, step)
        engine.impl.do_kv_cache_update(tensors[1], tensors[2][:, None], engine.cache, torch.cat([slots, torch.tensor([-1, -1])]), "auto", None)
        q = queries(4, 1, HEADS)[:, 0]
        whole, _ = engine.impl.forward_mqa((q[..., :512], q[..., 512:]), engine.cache, metadata, None)
        alone, _ = mla_decode(q[:2, None], LatentCache(engine.cache), table([ROWS[0], ROWS[2]]), metadata.decode.seq_lens[:2], engine.impl.scale)
        assert torch.equal(whole[:2], alone[:, 0]) and not whole[2:].any()


class TestDecodeBench:
    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [((3, 64, 576), torch.bfloat16), ((3, 64, 576), torch.uint8), ((3, 64, BYTES_PER_TOKEN), torch.uint8)],
    )
    def test_the_whole_cache_is_filled(self, backend, shape: tuple[int, ...], dtype: torch.dtype):
        module = importlib.import_module(f"{plugin.__name__}.decode_bench")
        caches = {f"layer{i}": torch.zeros(shape, dtype=dtype) for i in range(2)}
        connector = module.RandomDecodeBench()
        connector.register_kv_caches(caches)
        first, second = caches.values()
        assert torch.equal(first, second) and connector.connector_worker.kv_caches is caches
        if shape[-1] == BYTES_PER_TOKEN:
            tokens = LatentCache(first).fetch(torch.arange(192)).float()
        else:
            tokens = (first if dtype == torch.bfloat16 else first.view(torch.float8_e4m3fn)).flatten(0, 1).float()
        assert tokens.std().item() == pytest.approx(1, rel=0.02) and abs(tokens.mean().item()) < 0.01
        before = first.clone()
        connector.connector_worker._fill_block_tensor(first, [0, 1])
        assert torch.equal(first, before)
