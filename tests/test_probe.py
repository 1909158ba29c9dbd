"""The probe's text, training, latents and quality, at sizes that take seconds."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import transformers

from snapmla.experiments import drift
from snapmla.integrations import transformers as hf
from snapmla.probe import corpus, latents, muon, quality, source, train

TINY = train.Shape(
    hidden_size=48,
    intermediate_size=64,
    layers=2,
    heads=4,
    qk_nope_head_dim=16,
    v_head_dim=24,
    rope_theta=10000.0,
    max_position_embeddings=512,
    initializer_range=0.05,
)
RATES = train.Optimizer(
    muon_learning_rate=0.05,
    adamw_learning_rate=0.003,
    warmup_steps=2,
    cooldown_share=0.5,
    weight_decay=0.1,
    clip_norm=1.0,
)


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    return corpus.load()


def trained(text: corpus.Corpus, seed: int = 0) -> tuple[transformers.PreTrainedModel, list[dict]]:
    model, reported = train.build(TINY, seed), []
    phases = {"short": train.Phase(64, 2, 12), "long": train.Phase(128, 1, 3)}
    evaluation = train.Phase(128, 2, 0)
    train.train(
        model, text, phases, RATES, seed=seed, evaluate_every=6, evaluation=evaluation, report=reported.append
    )
    return model, reported


@pytest.fixture(scope="module")
def probe(text: corpus.Corpus, tmp_path_factory) -> source.Source:
    folder = tmp_path_factory.mktemp("probe")
    trained(text)[0].save_pretrained(folder)
    return source.load(folder, probe=True)


def test_corpus_is_reproducible_and_split_by_document(text: corpus.Corpus) -> None:
    again = corpus.load()
    assert again.sha256 == text.sha256 and torch.equal(again.heldout, text.heldout)
    assert len(text.heldout) > 4 * 32768, "a 32k context and the windows of the quality experiment must fit"
    documents = [set(bytes(part.numpy()).split(corpus.SEPARATOR)) for part in (text.train, text.heldout)]
    shared = {d for d in documents[0] & documents[1] if len(d) > 200}
    assert not shared, "a held-out document is in the training text as well"
    assert b"import pytest" not in bytes(text.train.numpy()), "site-packages must not be read"


def test_windows_spread_over_the_whole_stream() -> None:
    stream = torch.arange(100, dtype=torch.uint8)
    found = corpus.spread(stream, 3, 10)
    assert found.dtype == torch.int64 and found[:, 0].tolist() == [0, 45, 90]
    with pytest.raises(ValueError, match="at least 105 bytes, got 100"):
        corpus.window(stream, 95, 10)


@pytest.mark.parametrize("shape", [(1, 8, 32), (1, 32, 8), (4, 6, 24)])
def test_orthogonalize_makes_singular_values_near_one(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(muon.orthogonalize(torch.randn(shape) * 7))
    assert values.min() > 0.5 and values.max() < 1.3


def test_muon_blocks_are_independent_matrices() -> None:
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.zeros(8, 16))
    halves = [torch.nn.Parameter(torch.zeros(4, 16)) for _ in range(2)]
    whole.grad = torch.randn(8, 16)
    for half, grad in zip(halves, whole.grad.split(4)):
        half.grad = grad.clone()
    muon.Muon([{"params": [whole], "blocks": 2}], lr=0.1, weight_decay=0.0).step()
    muon.Muon(halves, lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(whole.detach(), torch.cat(halves).detach())


def test_training_learns_and_the_seed_decides(text: corpus.Corpus) -> None:
    model, rows = trained(text)
    again, rows_again = trained(text)
    heldout = [row for row in rows if row["split"] == "heldout"]
    assert [row["step"] for row in heldout] == [6, 12, 15]
    assert heldout[-1]["tokens"] == 12 * 2 * 64 + 3 * 128
    assert heldout[-1]["loss_bits_per_byte"] < heldout[0]["loss_bits_per_byte"] < 8.5
    assert rows == rows_again
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    other, _ = trained(text, seed=1)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_query_positions_lie_in_the_last_quarter() -> None:
    positions = latents.query_positions(32768, 64)
    assert positions[-1] == 32767 and positions[0] >= 24576 and len(set(positions.tolist())) == 64
    gaps = positions.diff()
    assert gaps.max() - gaps.min() <= 1
    assert latents.query_positions(1024, 1).tolist() == [1023]
    with pytest.raises(ValueError, match="queries: expected 1 to 256 .* got 300"):
        latents.query_positions(1024, 300)


def test_latents_file_has_the_agreed_names(probe: source.Source) -> None:
    tokens, positions = latents.heldout_context(probe, 200), latents.query_positions(200, 5)
    found = hf.latents(probe.model, tokens, positions)
    tensors = latents.as_tensors(found, positions, tokens)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {"positions": (5,), "tokens": (200,)}
    for layer in range(2):
        expected |= {
            f"content.{layer}": (200, 512),
            f"rope.{layer}": (200, 64),
            f"query.{layer}": (5, 4, 576),
        }
    assert shapes == expected
    assert {tensors[name].dtype for name in tensors if "." in name} == {torch.bfloat16}


def test_heldout_by_position_equals_direct_scoring(probe: source.Source) -> None:
    tokens = latents.heldout_context(probe, 300)
    hidden = hf.latents(probe.model, tokens).hidden
    rows = latents.heldout_by_position(probe, tokens, hidden, restart=64)
    assert [(row["position_from"], row["position_to"]) for row in rows] == [
        (0, 64),
        (64, 128),
        (128, 256),
        (256, 300),
    ]
    with torch.no_grad():
        long = train.bits(probe.model, tokens[None])[0]
        short = (
            train.bits(probe.model, tokens[128:192][None]).sum()
            + train.bits(probe.model, tokens[192:256][None]).sum()
        )
    counted = [position - 1 for position in range(128, 256) if position % 64]  # long[i] scores token i + 1
    assert rows[2]["bits_per_byte"] == pytest.approx(long[counted].mean().item(), rel=1e-4)
    assert rows[2]["bits_per_byte_restarted"] == pytest.approx(short.item() / 126, rel=1e-4)
    assert rows[0]["bits_per_byte"] == pytest.approx(rows[0]["bits_per_byte_restarted"], rel=1e-4)


def exact(variant, q, content, rope, softmax_scale):
    """Float attention; the variant "noise" is off by a tenth, "bf16" and "same" are not."""
    n, keys = len(q), len(content)
    q, content, rope = q.float(), content.float(), rope.float()
    scores = torch.einsum("nhd,td->nht", q, torch.cat([content, rope], dim=-1)) * softmax_scale
    hidden = torch.arange(keys)[None, :] > torch.arange(keys - n, keys)[:, None]
    out = torch.einsum("nht,tc->nhc", scores.masked_fill(hidden[:, None, :], -math.inf).softmax(-1), content)
    return out * 1.1 if variant == "noise" else out


def test_quality_scores_what_the_model_predicts(probe: source.Source) -> None:
    scores = quality.evaluate(probe, ["bf16", "same", "noise"], exact, context=96, windows=3, scored=16)
    windows = corpus.spread(probe.tokens, 3, 97)
    with torch.no_grad():
        direct = train.bits(probe.model, windows)[:, -16:].mean(-1)
    assert scores["bits_per_byte"]["bf16"] == pytest.approx(
        direct.numpy(), rel=0.02
    )  # latents are rounded to BF16
    for task in quality.TASKS:
        assert np.array_equal(scores[task]["same"], scores[task]["bf16"])
    assert not np.array_equal(scores["bits_per_byte"]["noise"], scores["bits_per_byte"]["bf16"])
    assert np.array_equal(scores["next_byte_agreement"]["bf16"], np.ones(3))

    rows = quality.rows(scores, context=96, seed=7)
    assert len(rows) == 9 and {row["source"] for row in rows} == {"measured"}
    assert list(rows[0]) == ["task", "context", "variant", "seed", "score", "ci95", "n", "source"]
    by = {(row["task"], row["variant"]): row for row in rows}
    assert by["bits_per_byte", "same"]["ci95"] == 0.0, "intervals are of the paired difference"
    assert by["bits_per_byte", "bf16"]["ci95"] > 0.0


def test_quality_rejects_what_it_cannot_score(probe: source.Source) -> None:
    with pytest.raises(ValueError, match="expected bf16 among them"):
        quality.evaluate(probe, ["snapmla"], exact, context=96, windows=1, scored=8)
    with pytest.raises(ValueError, match="scored: expected 1 to 96 .* got 97"):
        quality.evaluate(probe, ["bf16"], exact, context=96, windows=1, scored=97)


def test_drift_is_the_divergence_of_single_steps(probe: source.Source) -> None:
    """In calls of 8 tokens as one by one, on two texts at once as on one."""
    tokens = corpus.spread(probe.tokens, 2, 104)
    found = drift.decode(probe.model, tokens, 88, ["snapmla", "config_a"])
    logs = {}
    for name in ("bf16", "snapmla"):
        with hf.enable(probe.model, name), torch.no_grad():
            cache = probe.model(tokens[:1, :88], use_cache=True)[hf.CACHE]
            steps = [probe.model(tokens[:1, t : t + 1], **{hf.CACHE: cache}).logits for t in range(88, 104)]
        logs[name] = torch.cat(steps, 1)[0].float().log_softmax(-1)
    kl, agrees = found["snapmla"]
    assert kl.shape == agrees.shape == (2, 16)
    expected = (logs["bf16"].exp() * (logs["bf16"] - logs["snapmla"])).sum(-1)
    torch.testing.assert_close(kl[0], expected, rtol=0.1, atol=1e-6)
    assert torch.equal(agrees[0], logs["bf16"].argmax(-1) == logs["snapmla"].argmax(-1))
    assert found["config_a"][0].mean() > 0 and (kl > -1e-6).all()


def test_interval_is_students() -> None:
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert quality.half_width(values) == pytest.approx(2.5706 * values.std(ddof=1) / 6**0.5, rel=2e-3)
    assert quality.half_width(values[:1]) is None


def test_a_checkpoint_with_a_tokenizer_is_scored_per_byte(probe: source.Source, tmp_path) -> None:
    """A tokenizer that merges nothing but maps each byte to a token must give what the byte-level model
    gives."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: index for index, letter in enumerate(sorted(letters))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    probe.model.save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    found = source.load(tmp_path, probe=False)
    assert found.bytes_of(found.tokens[:1000]) == 1000
    assert found.name == tmp_path.name and "deepseek_v3" in found.weights_source


def test_a_large_vocabulary_needs_a_tokenizer(probe: source.Source, tmp_path) -> None:
    probe.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch_model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**config))
    torch_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a tokenizer beside a model with 300 tokens"):
        source.load(tmp_path, probe=False)
