"""The tasks with exact answers, their scoring, and attention through the kernels in the place of the emulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_probe import RATES, TINY

from snapmla import reference
from snapmla.integrations import attention
from snapmla.layout import MAX_QUERIES
from snapmla.metrics import relative_l2
from snapmla.probe import answers, corpus, source, tasks, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def text() -> corpus.Corpus:
    return corpus.load()


def solve(task: str, prompt: bytes) -> bytes:
    """The answer by reading the prompt, as a model would have to."""
    if task == "addition":
        a, b = prompt[-8:-1].split(b"+")
        return f"{int(a) + int(b):04d}"[::-1].encode()
    if task == "copy":
        at = prompt.index(prompt[-8:])
        return prompt[at + 8 : at + 16]
    key = prompt[-5:-1]
    at = (b"\n" + prompt).rindex(b"\n" + key + b"=")  # the last one; in other tasks there is but one
    return prompt[at + 5 : at + 9]


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("length", [400, 1000, 4096])
def test_an_example_can_be_solved_from_its_prompt(task: str, length: int, text: corpus.Corpus) -> None:
    heldout = text.heldout.numpy()
    answered = set()
    for seed in range(10):
        example = tasks.TASKS[task].example(np.random.default_rng(seed), length, heldout)
        assert len(example.prompt) == length and 1 <= len(example.answer) <= MAX_QUERIES
        assert solve(task, bytes(example.prompt)) == bytes(example.answer)
        answered.add(bytes(example.answer))
    assert len(answered) == 10, "answers must differ from document to document"


def test_what_makes_tasks_hard_is_there() -> None:
    """Keys that are off by a letter, and keys that come again with another value."""
    prompt = bytes(tasks.TASKS["recall"].example(np.random.default_rng(0), 32768, np.empty(0, np.uint8)).prompt)
    keys = [line[:4] for line in prompt.split(b"\n") if b"=" in line]
    known = set(keys)
    assert len(known) == len(keys) > 3000
    close = [sum(key[:i] + other + key[i + 1 :] in known for i in range(4) for other in map(bytes, zip(b"abcdefghijkl"))) - 4
             for key in keys[:200]]  # fmt: skip
    assert np.mean(close) > 5
    prompt = bytes(tasks.TASKS["last"].example(np.random.default_rng(0), 4096, np.empty(0, np.uint8)).prompt)
    assert prompt.count(b"\n" + prompt[-5:-1] + b"=") > 1


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_document_teaches_what_an_example_asks(task: str, text: corpus.Corpus) -> None:
    """Behind each question of a document stands the answer that its beginning implies, and just that is taught."""
    document = tasks.TASKS[task].document(np.random.default_rng(3), 2000, text.train.numpy())
    tokens, taught = bytes(document.tokens), document.taught
    assert len(tokens) == len(taught) == 2000 and 0.1 < taught.mean() < 1
    if task == "copy":
        asked = [i for i in range(32, 1968, 32) if taught[i + 8]]
        assert asked and all(taught[i + 8 : i + 32].all() and not taught[i : i + 8].any() for i in asked)
        assert all(tokens[i : i + 32] in tokens[:i] for i in asked)
    else:
        sign, width = (b"=", 4) if task == "addition" else (b"?", 4)
        ends = [i + 1 for i in range(4, 1990) if tokens[i : i + 1] == sign and taught[i + 1] and not taught[i]]
        assert len(ends) >= 5
        for end in ends:
            assert solve(task, tokens[:end]) == tokens[end : end + width] and taught[end : end + width].all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", reference.VARIANTS)
@pytest.mark.parametrize("visible", [False, True])
@pytest.mark.parametrize(("queries", "split"), [(16, True), (16, False), (7, False), (11, False)])
def test_attention_through_the_kernels_is_the_emulations(
    variant: str, visible: bool, queries: int, split: bool, device: str
) -> None:
    torch.manual_seed(queries)
    q, content, rope = (torch.randn(shape).bfloat16().to(device) for shape in ((queries, 4, 576), (300, 512), (300, 64)))
    seen = torch.randint(1, 300, (queries,), device=device) if visible else None
    found = attention.attend(variant, q, content, rope, 0.07, visible=seen, split=split)
    kernel_rules = reference.KERNEL if device == "cuda" else reference.KERNEL_FLOAT32_ADDS
    rules = reference.ALGORITHM_1 if variant == "bf16" else kernel_rules
    expected = reference.attend(variant, q, content, rope, 0.07, visible=seen, rules=rules)
    assert found.shape == expected.shape and found.dtype == torch.float32
    if device == "cpu":
        assert relative_l2(found, expected) < 1e-6
    else:  # in parts, each has its own references, and P rounds elsewhere
        assert relative_l2(found, expected) < (2e-2 if split and variant != "bf16" else 4e-3)


def test_an_answer_counts_if_greedy_decoding_writes_it(text: corpus.Corpus, tmp_path, monkeypatch) -> None:
    """The model's own continuation is right, another is not, and a variant whose attention is noise misses."""
    model = train.build(TINY, 0)
    phases = {"only": train.Phase(64, 2, 12)}
    train.train(
        model, text, phases, RATES, seed=0, evaluate_every=12, evaluation=train.Phase(64, 2, 0), report=lambda row: None
    )
    model.save_pretrained(tmp_path)
    origin = source.load(tmp_path, probe=True)

    def own(rng: np.random.Generator, length: int, heldout: np.ndarray) -> tasks.Example:
        prompt = heldout[:length].copy()
        ids = torch.from_numpy(prompt).long()[None]
        for _ in range(4):
            with torch.no_grad():
                ids = torch.cat([ids, origin.model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        answer = ids[0, length:].numpy().astype(np.uint8)
        return tasks.Example(prompt, answer if rng.random() < 0.5 else answer[::-1] + 1)

    def attend(variant: str, q: torch.Tensor, *rest) -> torch.Tensor:
        out = reference.attend("exact", q, *rest)
        return out if variant == "exact" else torch.randn_like(out) * 30

    monkeypatch.setitem(tasks.TASKS, "own", tasks.Task(tasks.copy_document, own))
    found = answers.evaluate(origin, ["exact", "noise"], attend, task="own", context=96, documents=6, seed=1)
    again = answers.evaluate(origin, ["exact"], attend, task="own", context=96, documents=6, seed=1)
    rngs = [np.random.default_rng([1, i, 96, *b"own"]) for i in range(6)]
    for rng in rngs:  # as evaluate draws: where the text begins first
        rng.integers(len(text.heldout) - 96)
    assert found["exact"].tolist() == [float(rng.random() < 0.5) for rng in rngs] and 0 < found["exact"].mean() < 1
    assert np.array_equal(found["exact"], again["exact"]) and found["noise"].sum() < found["exact"].sum()


def test_training_on_tasks_reports_each(text: corpus.Corpus) -> None:
    rows: list[dict] = []
    model = train.build(TINY, 0)
    train.train(
        model, text, {"mixed": train.Phase(128, 4, 6, tasks=0.5)}, RATES, seed=0, evaluate_every=6,
        evaluation=train.Phase(128, 2, 0, tasks=1.0), report=rows.append,
    )  # fmt: skip
    assert [row["split"] for row in rows] == ["train", "heldout", *tasks.TASKS]
    assert all(0 < row["loss_bits_per_byte"] < 9 for row in rows)
