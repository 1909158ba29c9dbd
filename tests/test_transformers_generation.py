"""Models that decode on a paged latent cache (`enable`) against their own eager forward and generation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers
from test_transformers_integration import CASES, build

from snapmla import layout, memory
from snapmla.integrations import transformers as hf
from snapmla.integrations.attention import attend
from snapmla.integrations.transformers_cache import PAGES, FP8Pages, PagedLatents, UnquantizedPages

TYPES = ["v2", "v3", "glm", "longcat"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOAT32 = partial(UnquantizedPages, dtype=torch.float32)
"""Nothing is rounded on the way: what is left is the integration's arithmetic."""
# First token and the one past the last of each forward: single tokens, decode calls, prefills on a cached text, both sides
# of page borders.
STEPS = [(0, 50), (50, 51), (51, 54), (54, 62), (62, 63), (63, 64), (64, 65), (65, 90), (90, 128), (128, 129), (129, 150)]  # fmt: skip


def text(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def ragged(tokens: int = 70) -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts of 40, 1 and 70 tokens, padded on the left, and their mask."""
    ids, mask = text(3, tokens), torch.ones(3, tokens, dtype=torch.int64)
    mask[0, :30] = mask[1, : tokens - 1] = 0
    return ids.where(mask == 1, 0), mask


@torch.no_grad()
def logits_by_steps(model, ids: torch.Tensor, steps, cache=None) -> tuple[torch.Tensor, PagedLatents]:
    found = []
    for begin, end in steps:
        out = model(ids[:, begin:end], use_cache=True, **{hf.CACHE: cache})
        found.append(out.logits)
        cache = out[hf.CACHE]
    return torch.cat(found, 1), cache


@pytest.mark.parametrize("case", CASES)
def test_steps_equal_the_eager_model(case: str) -> None:
    model, ids = build(case), text(2, 150)
    with torch.no_grad():
        expected = model(ids).logits
    with hf.enable(model, FLOAT32):
        found, cache = logits_by_steps(model, ids, STEPS)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert isinstance(cache, PagedLatents) and cache.get_seq_length() == 150
    assert cache.paging.lengths.tolist() == [150, 150]
    assert model.config._attn_implementation == "eager"
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)  # disabled


@pytest.mark.parametrize("case", TYPES)
def test_bf16_pages_equal_the_eager_model_but_for_rounding(case: str) -> None:
    model, ids = build(case), text(2, 150)
    with torch.no_grad():
        expected = model(ids).logits
    with hf.enable(model, "bf16"):
        found, _ = logits_by_steps(model, ids, STEPS)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.median() < 3e-3 and (error > 0.02).float().mean() < 0.01  # a token may change its experts


@pytest.mark.parametrize("case", TYPES)
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 16}], ids=["greedy", "beams", "chunks"]
)
def test_generation_of_ragged_prompts_is_the_eager_models(case: str, options: dict) -> None:
    model = build(case)
    ids, mask = ragged()
    generate = partial(
        model.generate, ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0, **options
    )
    expected = generate()
    with hf.enable(model, FLOAT32):
        assert torch.equal(generate(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", TYPES)
def test_fp8_generation_equals_teacher_forced_scoring(case: str, device: str) -> None:
    model, ids = build(case).bfloat16().to(device), text(4, 60).to(device)
    with hf.enable(model):
        found = model.generate(
            ids, max_new_tokens=20, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
        )  # fmt: skip
        generated = found.sequences[:, 60:]
        steps = [(0, 60), *((t, min(t + 7, 79)) for t in range(60, 79, 7))]
        scored, cache = logits_by_steps(model, found.sequences, steps)
    assert all(isinstance(pages, FP8Pages) for pages in cache.pages)
    stepped = torch.stack(found.logits, 1)
    torch.testing.assert_close(scored[:, 59:].float(), stepped.float(), atol=0.05, rtol=0.02)
    best = stepped.float().topk(2).values
    clear = best[..., 0] - best[..., 1] > 0.1  # elsewhere BF16 may turn the order
    assert clear.sum() > 20
    assert torch.equal(scored[:, 59:].argmax(-1)[clear], generated[clear])


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_is_close_to_bf16_and_not_the_same(device: str) -> None:
    model, ids = build("v3").to(device), text(2, 90).to(device)
    found = {}
    for pages in ("snapmla", "bf16"):
        with hf.enable(model, pages):
            found[pages], _ = logits_by_steps(model, ids, [(0, 70), *((t, t + 1) for t in range(70, 90))])
    error = (found["snapmla"] - found["bf16"])[:, 70:].norm() / found["bf16"][:, 70:].norm()
    assert 1e-3 < error < 0.1
    torch.testing.assert_close(found["snapmla"][:, :70], found["bf16"][:, :70])  # the prefill quantizes nothing


@pytest.mark.parametrize("pages", ["config_a", "config_b", "config_c", "config_d"])
def test_table_2_in_the_model(pages: str) -> None:
    """The same as `absorbed_forward` with that configuration's attention."""
    model, ids = build("v3"), text(1, 75)
    with hf.enable(model, pages):
        found, _ = logits_by_steps(model, ids, [(0, 70), (70, 75)])
    prefix = hf.latents(model, ids[0, :70])
    expected = hf.absorbed_forward(model, ids[0, 70:], prefix, lambda _layer, *call: attend(pages, *call))
    torch.testing.assert_close(found[0, 70:], expected.logits, atol=1e-5, rtol=1e-5)


def test_a_prefix_is_used_again() -> None:
    """Two continuations of one cached text: the cache is cropped between them."""
    model, ids, other = build("v3"), text(2, 100), text(2, 100, seed=1)
    other[:, :80] = ids[:, :80]
    with torch.no_grad():
        expected = model(ids).logits, model(other).logits
    with hf.enable(model, FLOAT32):
        _, cache = logits_by_steps(model, ids, [(0, 80)])
        first, _ = logits_by_steps(model, ids, [(80, 81), (81, 100)], cache)
        cache.crop(-20)
        second, _ = logits_by_steps(model, other, [(80, 95), (95, 100)], cache)
    torch.testing.assert_close(first, expected[0][:, 80:], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(second, expected[1][:, 80:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("use_cache", [False, True])
def test_hidden_tokens_change_nothing(use_cache: bool) -> None:
    model = build("v3")
    ids, mask = ragged()
    noise = ids.where(mask == 1, 5)
    with hf.enable(model, FLOAT32), torch.no_grad():
        first, second = (model(x, attention_mask=mask, use_cache=use_cache) for x in (ids, noise))
        torch.testing.assert_close(first.logits[mask == 1], second.logits[mask == 1])
        alone = model(ids[:1, 30:], position_ids=torch.arange(30, 70)[None], use_cache=use_cache)
    torch.testing.assert_close(first.logits[0, 30:], alone.logits[0], atol=2e-5, rtol=2e-5)
    if use_cache:
        assert first[hf.CACHE].paging.lengths.tolist() == [40, 1, 70]


@pytest.mark.parametrize("pages", ["snapmla", "bf16"])
def test_a_single_hidden_token_is_not_stored(pages: str) -> None:
    cache = PagedLatents(1, pages)
    cache.begin(2, 1, torch.tensor([[0], [1]]), torch.device("cpu"))
    cache.pages[0].append(torch.ones(2, 512), torch.ones(2, 64), cache.paging)
    tokens = cache.pages[0].fetch(torch.arange(128))
    assert tokens.float().abs().sum(1).nonzero().flatten().tolist() == [64]  # the second sequence's first slot


@pytest.mark.parametrize(("pages", "bytes_per_token"), [("snapmla", 644), ("bf16", 1152)])
def test_bytes_are_the_calculators(pages: str, bytes_per_token: int) -> None:
    model = build("v3")
    with hf.enable(model, pages, max_tokens=32768):
        _, cache = logits_by_steps(model, text(2, 9), [(0, 9)])
    assert cache.nbytes == 3 * 2 * 32768 * bytes_per_token
    assert PAGES[pages](torch.device("cpu")).bytes_per_token == bytes_per_token
    grown = PagedLatents(3, pages)
    for _ in range(300):
        grown.begin(2, 1, None, torch.device("cpu"))
    assert 300 * 6 * bytes_per_token <= grown.nbytes <= 1.6 * (300 + layout.PAGE_SIZE) * 6 * bytes_per_token


@pytest.mark.gpu
@pytest.mark.parametrize("pages", ["snapmla", "bf16"])
def test_peak_memory_of_a_long_cache_is_the_calculators(pages: str) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cache = PagedLatents(27, pages, max_tokens=32768)
    cache.begin(1, 1, None, torch.device("cuda"))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == pytest.approx(27 * 32768 * memory.cache_bytes_per_token(pages), rel=0.02)
    assert cache.nbytes <= peak


def test_bad_input_is_named() -> None:
    model, ids = build("v3"), text(2, 6)
    filled = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **{hf.CACHE: filled})
    with hf.enable(model):
        with pytest.raises(ValueError, match="cache: expected PagedLatents or an empty cache, got DynamicCache"):
            model(ids, **{hf.CACHE: filled})
        _, cache = logits_by_steps(model, ids, [(0, 6)])
        with pytest.raises(ValueError, match=r"attention_mask: expected \[2, 7\].*got \[2, 6\]"):
            model(ids[:, :1], attention_mask=torch.ones(2, 6), **{hf.CACHE: cache})
        with pytest.raises(ValueError, match=r"attention_mask: expected \[batch, tokens\], got \(2, 1, 6, 6\)"):
            model(ids, attention_mask=torch.ones(2, 1, 6, 6))
        with pytest.raises(ValueError, match="expected a batch of 2.*got 1"):
            model(ids[:1, :1], **{hf.CACHE: cache})
        with pytest.raises(ValueError, match="on already"):
            hf.enable(model)
        with pytest.raises(ValueError, match="crop: expected.*got 3"):
            cache.crop(3)
    with pytest.raises(ValueError, match="kv_lora_rank"):
        hf.enable(
            transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=8
                )
            )
        )


@pytest.mark.parametrize(("first", "end", "sizes"), [(0, 1, [1]), (0, 9, [8, 1]), (90, 100, [90, 8, 2])])
def test_pieces_follow_each_other(first: int, end: int, sizes: list[int]) -> None:
    pieces = hf.pieces(first, end)
    assert [stop - start for start, stop in pieces] == sizes
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
