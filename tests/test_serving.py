"""vLLM's answers against the model's: teacher forcing of ragged prompts, and what becomes of a (stand-in) vLLM's tokens."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_engine import GPU, program
from test_perf_experiments import compose
from test_transformers_integration import build

from snapmla.bench import engine, serving
from snapmla.experiments import serving as experiment
from snapmla.integrations import transformers as hf


def text(tokens: int, seed: int) -> list[int]:
    return torch.randint(1, 97, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def test_ragged_prompts_are_forced_as_each_alone() -> None:
    model = build("v3")
    prompts = [text(n, n) for n in (70, 2, 40)]
    answers = [text(21, 100 + i) for i in range(3)]
    found = serving.likeliest(model, prompts, answers, "bf16")
    for prompt, answer, ours in zip(prompts, answers, found, strict=True):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        top = logits.topk(2).values
        clear = top[:, 0] - top[:, 1] > 0.05 * logits.std()  # roundings of the BF16 cache decide the others
        assert clear.float().mean() > 0.5 and torch.equal(ours[clear], logits.argmax(-1)[clear])
    assert model.config._attn_implementation != hf.IMPLEMENTATION


def test_every_second_prompt_begins_alike() -> None:
    prompts = experiment.prompts_of(torch.arange(5000), 6, [65, 300], 640)
    assert [len(prompt) for prompt in prompts] == [65, 705, 300, 940, 65, 705]
    assert prompts[1][:640] == prompts[3][:640] == list(range(640)) and prompts[0][0] >= 640


def test_a_module_is_made_of_the_last_layer(tmp_path: Path) -> None:
    model, folder = build("v3"), tmp_path / "model"
    model.config.num_nextn_predict_layers = 0
    model.save_pretrained(folder)
    windows = torch.tensor([text(200, seed) for seed in range(8)])
    made = serving.with_mtp(folder, tmp_path / "mtp", model, windows)
    config = json.loads((made / "config.json").read_text())
    layers, dense = (model.config.num_hidden_layers, model.config.first_k_dense_replace)
    assert config["num_nextn_predict_layers"] == 1 and config["num_hidden_layers"] == layers
    assert config["first_k_dense_replace"] == dense + (dense == layers)  # the module's layer is dense or not as the last one
    of_model, module = (load_file(made / name) for name in ("model.safetensors", "mtp.safetensors"))
    own = f"model.layers.{layers}."
    assert all(name.startswith(own) for name in module)
    for name, of_module in module.items():
        copied = name.replace(own, f"model.layers.{layers - 1}.")
        if copied in of_model:
            assert torch.equal(of_module, of_model[copied])
    assert {name.replace(own, f"model.layers.{layers - 1}.") for name in module} >= {
        name for name in of_model if name.startswith(f"model.layers.{layers - 1}.")
    }
    assert serving.with_mtp(made, tmp_path / "again", model, windows) == made
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="must have a multi-token prediction module or be DeepSeek-V3's"):
        serving.with_mtp(folder, tmp_path / "none", model, windows)


def test_the_projection_is_what_makes_the_last_layers_input() -> None:
    """Of a model whose last layer's input is made of the normed embedding at a token and the normed last state before it."""
    generator = torch.Generator().manual_seed(0)
    embedding, behind = torch.nn.Embedding(50, 8), torch.randn(4, 30, 8, generator=generator) * 3
    tokens = torch.randint(0, 50, (4, 30), generator=generator)
    norm, made = torch.nn.RMSNorm(8, eps=1e-6, elementwise_affine=False), torch.randn(8, 16, generator=generator)
    entering = torch.randn(4, 30, 8, generator=generator)  # at a window's first token nothing is known
    entering[:, 1:] = torch.cat([norm(embedding(tokens[:, 1:])), norm(behind[:, :-1])], -1).detach() @ made.T

    class Model:
        device, config = "cpu", types.SimpleNamespace(rms_norm_eps=1e-6)

        def get_input_embeddings(self) -> torch.nn.Embedding:
            return embedding

        def __call__(self, given: torch.Tensor, output_hidden_states: bool) -> types.SimpleNamespace:
            assert torch.equal(given, tokens) and output_hidden_states
            return types.SimpleNamespace(hidden_states=(torch.empty(0), entering, behind))

    torch.testing.assert_close(serving.entry_of_last_layer(Model(), tokens), made.double(), atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_module_drafts_what_the_model_would_write() -> None:
    """As vLLM runs it, of a model whose last layer alone does something: the entry is the embedding, and drafts are right."""
    model, norm = build("v3"), torch.nn.RMSNorm(64, eps=1e-6, elementwise_affine=False)
    embedding = model.get_input_embeddings().weight
    embedding.copy_(norm(embedding))
    *others, last = model.model.layers
    for name, weight in (item for layer in others for item in layer.named_parameters()):
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    fitted, fresh = (torch.tensor([text(200, seed + i) for i in range(8)]) for seed in (0, 100))
    behind = model.model(fresh).last_hidden_state
    ends = norm(model.model.embed_tokens(fresh[:, 1:])), norm(behind[:, :-1])
    entry = torch.cat(ends, -1) @ serving.entry_of_last_layer(model, fitted).float().T
    positions = torch.arange(entry.shape[1])[None].expand(len(entry), -1)
    causal = torch.full((entry.shape[1],) * 2, float("-inf")).triu(1).expand(len(entry), 1, -1, -1)
    rotary = model.model.rotary_emb(entry, positions)
    state = last(entry, attention_mask=causal, position_ids=positions, position_embeddings=rotary)
    drafts, written = (model.lm_head(x).argmax(-1) for x in (model.model.norm(state), behind[:, 1:]))
    right = (drafts == written)[:, 100:]  # a window's first token is not in the drafts' context, and fades
    assert right.float().mean() > 0.95


def run_of(**changes: object) -> serving.GenerateRun:
    values = {
        "model": "folder", "backend": "CUSTOM", "prompts": [[1, 2]], "max_tokens": 4, "long_steps": 8, "max_model_len": 99,
        "max_num_batched_tokens": 64, "gpu_memory_utilization": 0.5, "compilation_config": {"mode": 0},
    }  # fmt: skip
    return serving.GenerateRun(**values | changes)


def test_the_program_gets_its_run_and_its_variables(tmp_path: Path) -> None:
    python = program(
        tmp_path,
        "import json, os, sys\n"
        "run = json.load(sys.stdin)\n"
        "assert sys.argv[1:] == ['-m', 'snapmla.bench.vllm_generate'] and os.environ['MINE'] == '1'\n"
        "assert os.environ['VLLM_ENABLE_V1_MULTIPROCESSING'] == '0'\n"
        f"print({engine.MARK!r} + json.dumps({{'kv_tokens': 64, 'at_s': 1.0}})); print('noise')\n"
        f"print({engine.MARK!r} + json.dumps({{'tokens': run['prompts'], 'at_s': 2.0}}))\n",
    )
    said: list[str] = []
    assert serving.generate(run_of(), python, said.append, tmp_path / "vllm.log", {"MINE": "1"}) == {"kv_tokens": 64, "tokens": [[1, 2]], "at_s": 2.0}
    assert said == ["kv_tokens 64, at_s 1.0", "at_s 2.0"]
    with pytest.raises(RuntimeError, match="vLLM ended with 1: no memory"):
        serving.generate(run_of(), program(tmp_path, "import sys\nsys.exit('no memory')\n"), print, tmp_path / "vllm.log")
    with pytest.raises(RuntimeError, match="vLLM ended with 0: nothing"):
        serving.generate(run_of(), program(tmp_path, ""), print, tmp_path / "vllm.log")


def test_memory_is_watched_while_sequences_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake engine that leaks 1 byte a step, and frees all at its end."""
    import sys

    from snapmla.bench import vllm_generate

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(SamplingParams=lambda **settings: settings))
    inputs = types.SimpleNamespace(TokensPrompt=lambda prompt_token_ids: prompt_token_ids)
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)

    class Engine:
        made, names = 0, []

        def add_request(self, name: str, prompt: list[int], params: dict) -> None:
            self.names.append(name)

        def has_unfinished_requests(self) -> bool:
            return self.made < 100

        def step(self) -> list[types.SimpleNamespace]:
            self.made += 1
            tokens = types.SimpleNamespace(token_ids=[0] * self.made)
            return [types.SimpleNamespace(request_id=name, outputs=[tokens]) for name in self.names]

    fake = Engine()
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0 if fake.made == 100 else 1000 + fake.made)
    assert vllm_generate.long_decode(fake, [[1], [2]], 100) == (1025, 1099, 100)


class TestRows:
    @pytest.fixture(autouse=True)
    def _machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[serving.GenerateRun, dict]] = []
        monkeypatch.setattr(experiment, "hopper_gpu", lambda: GPU)
        monkeypatch.setattr(engine, "why_not", lambda python, gpu: None)

        def generate(run: serving.GenerateRun, python: str, report: object, log: Path, settings: dict) -> dict:
            self.runs.append((run, settings))
            tokens = [[5] * run.max_tokens for _ in run.prompts]
            told = {"cached_tokens": 7, "kv_tokens": 640, "early_bytes": 1, "late_bytes": 2, "tokens_per_step": 1.0}
            return told | {"tokens": tokens, "vllm": "0.25.1"}

        def likeliest(model: object, prompts: list, answers: list, variant: str) -> torch.Tensor:
            found = torch.tensor(answers)
            found[0, : 2 if variant == "bf16" else 1] = 6
            return found

        monkeypatch.setattr(serving, "generate", generate)
        monkeypatch.setattr(serving, "likeliest", likeliest)
        self.origin = lambda: (Path("folder"), types.SimpleNamespace(model=None, tokens=torch.arange(9000)))

    def test_one_row_for_each_pair(self) -> None:
        changes = "prompts=5", "tokens=8", "lengths=[65,100]", "+measure.environment.MINE=x", "measure.speculative_tokens=[0]"
        cfg = compose("serving", *changes)
        rows = experiment.measured_rows(cfg, self.origin, lambda message: None, Path())
        assert all(tuple(row) == experiment.COLUMNS for row in rows)
        assert [(row["backend"], row["against"], row["agreement"]) for row in rows] == [
            ("CUSTOM", "snapmla", pytest.approx(39 / 40)), ("CUSTOM", "bf16", pytest.approx(38 / 40)),
            ("FLASHMLA", "bf16", pytest.approx(38 / 40)), ("FLASH_ATTN_MLA", "bf16", pytest.approx(38 / 40)),
        ]  # fmt: skip
        assert {(row["n"], row["prompts"], row["status"], row["gpu"]) for row in rows} == {(40, 5, "ok", GPU)}
        (run, settings), *_ = self.runs
        assert len(self.runs) == 3 and settings == {"MINE": "x"} and run.max_model_len == 64 + 2000 + 1

    def test_speculative_tokens_have_their_own_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[tuple[Path, Path]] = []
        monkeypatch.setattr(serving, "with_mtp", lambda folder, out, model, text: made.append((folder, out)) or out)
        changes = "prompts=5", "tokens=8", "measure.backends=[FLASHMLA,FLASH_ATTN_MLA]", "measure.speculative_tokens=[0,3]"
        rows = experiment.measured_rows(compose("serving", *changes), self.origin, lambda message: None, Path())
        assert [row["speculative_tokens"] for row in rows] == [0, 3, 0, 3]
        (plain, _), (speculative, _), _, (last, _) = self.runs
        assert (plain.model, plain.speculative_tokens) == ("folder", 0) and speculative.speculative_tokens == 3
        assert made == [(Path("folder"), Path(speculative.model))] and last.model == speculative.model  # once for all
        assert speculative.max_model_len == plain.max_model_len + 3

    def test_a_backend_that_fails_leaves_the_others_theirs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        generate = serving.generate

        def fails(run: serving.GenerateRun, *rest: object) -> dict:
            if run.backend == "CUSTOM":
                raise RuntimeError("vLLM ended with 1: no memory")
            return generate(run, *rest)

        monkeypatch.setattr(serving, "generate", fails)
        cfg, said = compose("serving", "prompts=5", "tokens=8", "measure.speculative_tokens=[0]"), []
        rows = experiment.measured_rows(cfg, self.origin, said.append, Path())
        assert said[1] == "vLLM ended with 1: no memory"  # at once
        assert [(row["backend"], row["status"], row["reason"]) for row in rows] == [
            ("CUSTOM", "not run", "vLLM ended with 1: no memory"), ("CUSTOM", "not run", "vLLM ended with 1: no memory"),
            ("FLASHMLA", "ok", None), ("FLASH_ATTN_MLA", "ok", None),
        ]  # fmt: skip
        assert all(tuple(row) == experiment.COLUMNS for row in rows)

    def test_a_machine_without_vllm_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "why_not", lambda python, gpu: "FAKE reason.")
        rows = experiment.measured_rows(compose("serving"), self.origin, lambda message: None, Path())
        assert [(row["status"], row["reason"]) for row in rows] == [("not run", "FAKE reason.")] * 8 and not self.runs

    @pytest.mark.parametrize(
        ("override", "message"),
        [("measure.backends=[TRITON_MLA]", "must be among CUSTOM, .*, got 'TRITON_MLA'"), ("lengths=[1]", "at least 2, got 1")],
    )
    def test_bad_values_are_named(self, override: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            experiment.measured_rows(compose("serving", override), self.origin, lambda message: None, Path())


def test_runs_are_json() -> None:
    assert json.loads(json.dumps(run_of().__dict__))["prompts"] == [[1, 2]]
