"""lm-evaluation-harness on the paged latent cache: its scores are those of the library's own evaluation.

Needs the extra `benchmarks`, which the test command does not install: .ci/run installs it and runs this file at its end.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_tasks import RATES, TINY

from snapmla import reference
from snapmla.probe import answers, corpus, source, tasks, train

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra `benchmarks`)")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from snapmla.integrations.lm_eval import SnapMLA
from snapmla.integrations.transformers import IMPLEMENTATION
from snapmla.probe import harness


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> source.Source:
    """A model that has learned a little, so that its likeliest bytes differ."""
    model, folder = train.build(TINY, 0), tmp_path_factory.mktemp("model")
    phases, evaluation = {"only": train.Phase(64, 2, 12)}, train.Phase(64, 2, 0)
    train.train(model, corpus.load(), phases, RATES, seed=0, evaluate_every=12, evaluation=evaluation, report=lambda row: None)
    model.save_pretrained(folder)
    return source.load(folder, probe=True)


def request(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def own_answers(origin: source.Source) -> tasks.Task:
    """A task whose answer is now and then what the model itself writes."""

    def example(rng: np.random.Generator, length: int, text: np.ndarray) -> tasks.Example:
        ids = torch.from_numpy(text[:length].copy()).long()[None]
        for _ in range(10):
            with torch.no_grad():
                ids = torch.cat([ids, origin.model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        answer = ids[0, length:].numpy().astype(np.uint8)
        return tasks.Example(text[:length].copy(), answer if rng.random() < 0.5 else answer[::-1] + 1)

    return tasks.Task(tasks.copy_document, example)


def test_the_harness_scores_what_the_library_scores(origin: source.Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.TASKS, "own", own_answers(origin))
    settings = {"task": "own", "context": 90, "documents": 6, "seed": 1}
    ours = answers.evaluate(origin, ["bf16", "snapmla"], reference.attend, **settings)
    theirs = harness.evaluate(origin, ["bf16", "snapmla"], **settings)
    assert 0 < ours["bf16"].mean() < 1
    for variant in ours:
        assert np.array_equal(ours[variant], theirs[variant])
    assert origin.model.config._attn_implementation != IMPLEMENTATION  # as it was


@pytest.mark.parametrize(("context", "continuation"), [(1, 3), (70, 1), (70, 20)])
def test_likelihoods_are_the_models(origin: source.Source, context: int, continuation: int) -> None:
    tokens = origin.tokens[: context + continuation]
    behind_newline = torch.cat([torch.tensor([ord("\n")]), tokens])
    with torch.no_grad():
        logits = origin.model(tokens[None], use_cache=False).logits[0, context - 1 : -1].float()
        of_all = origin.model(behind_newline[None], use_cache=False).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(1, tokens[context:, None]).sum().item()
    expected_of_all = of_all.log_softmax(-1).gather(1, tokens[:, None]).sum().item()
    text = bytes(tokens.tolist()).decode("latin-1")
    model = SnapMLA(origin.model, "bf16")
    try:
        found = model.loglikelihood([request("loglikelihood", text[:context], text[context:])])
        rolling = model.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    finally:
        model.close()
    assert found[0][0] == pytest.approx(expected, rel=1e-2)
    assert found[0][1] == torch.equal(logits.argmax(-1), tokens[context:])
    assert rolling[0] == pytest.approx(expected_of_all, rel=1e-2)


def test_generation_ends_where_it_is_told(origin: source.Source) -> None:
    prompt = bytes(origin.tokens[:70].tolist()).decode("latin-1")
    model = SnapMLA(origin.model)
    try:
        whole = model.generate_until([request("generate_until", prompt, {"until": [], "max_gen_toks": 12})])[0]
        stop = whole[5:7]
        cut = model.generate_until([request("generate_until", prompt, {"until": [stop], "max_gen_toks": 12})])[0]
    finally:
        model.close()
    assert len(whole) == 12 and cut == whole.split(stop)[0]


def test_models_are_named_for_the_command_line() -> None:
    assert get_model("snapmla") is SnapMLA
