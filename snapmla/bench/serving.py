"""Does vLLM with SnapMLA write what the model would? Greedy generation there, teacher-forced here.

A greedy token is vLLM's likeliest behind its own tokens. The Transformers integration is given these tokens one after
another and says which one it would have written: where both agree, they agree on the likeliest token behind the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from snapmla import results
from snapmla.bench.engine import answers_of, environment, start
from snapmla.integrations import transformers as hf
from snapmla.integrations.transformers_cache import PagedLatents


@dataclass(frozen=True)
class GenerateRun:
    """What `vllm_generate` reads. prompts: token ids; long_steps: of the decode whose memory is watched; speculative_tokens: a
    step, by the model's multi-token prediction module; the rest is vLLM's."""

    model: str
    backend: str
    prompts: list[list[int]]
    max_tokens: int
    long_steps: int
    max_model_len: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    compilation_config: dict
    speculative_tokens: int = 0


def with_mtp(folder: Path, out: Path, model: hf.PreTrainedModel, text: Tensor) -> Path:
    """The folder of a DeepSeek-V3 checkpoint with a multi-token prediction module (DeepSeek-V3 report, section 2.2): `folder`
    itself if it has one, else `out`, with one made of its last layer and a projection that is fitted to `text`
    (`entry_of_last_layer`). It drafts well, but not always right: drafts of both fates occur.

    model: the checkpoint, loaded. text: int64 [windows, tokens].

    Raises ValueError where there is none and not one model.safetensors to make it from.
    """
    config = results.read_json(folder / "config.json")
    if config.get("num_nextn_predict_layers"):
        return folder
    weights = folder / "model.safetensors"
    if config["model_type"] != "deepseek_v3" or not weights.is_file():
        raise ValueError(
            f"For speculative tokens source.path must have a multi-token prediction module or be DeepSeek-V3's model.safetensors, got {folder}."
        )
    layers, of_model = config["num_hidden_layers"], load_file(weights)
    last, own = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    norm = of_model["model.norm.weight"]
    module = {own + name.removeprefix(last): x for name, x in of_model.items() if name.startswith(last)}
    module |= {
        f"{own}enorm.weight": torch.ones_like(norm),
        f"{own}hnorm.weight": torch.ones_like(norm),
        f"{own}eh_proj.weight": entry_of_last_layer(model, text).to("cpu", norm.dtype),
        f"{own}shared_head.norm.weight": norm,
        f"{own}shared_head.head.weight": of_model["lm_head.weight"],
        f"{own}embed_tokens.weight": of_model["model.embed_tokens.weight"],
    }
    config["num_nextn_predict_layers"] = 1
    if config["first_k_dense_replace"] == layers:  # the last layer is dense
        config["first_k_dense_replace"] += 1
    out.mkdir(parents=True, exist_ok=True)
    results.write_json(out / "config.json", config)
    (out / weights.name).symlink_to(weights.resolve())
    results.write_tensors(out / "mtp.safetensors", module)
    return out


@torch.no_grad()
def entry_of_last_layer(model: hf.PreTrainedModel, text: Tensor) -> Tensor:
    """float64 [hidden, 2 * hidden]: by least squares, what enters the model's last layer at a token, from the token's embedding
    and the model's last hidden state one token before, each divided by its root mean square (`enorm` and `hnorm` of ones)."""
    text = text.to(model.device)
    *_, entering, behind = model(text, output_hidden_states=True).hidden_states
    ends = model.get_input_embeddings()(text[:, 1:]), behind[:, :-1]
    eps = model.config.rms_norm_eps
    given = torch.cat([x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() for x in ends], -1).flatten(0, 1)
    gram = given.T @ given
    gram.diagonal().add_(1e-6 * gram.diagonal().mean())  # two features of a small model may say the same
    return torch.linalg.solve(gram, given.T @ entering[:, 1:].double().flatten(0, 1)).T


def generate(
    run: GenerateRun, python: str, report: Callable[[str], None], log: Path, settings: dict[str, str] | None = None
) -> dict:
    """All that the program answers, told to `report` as it comes; `log` gets all that it prints. settings: more environment
    variables. Raises RuntimeError with the line that says why where it fails."""
    process = start([python, "-m", "snapmla.bench.vllm_generate"], environment() | (settings or {}), asdict(run))
    return {name: value for answer in answers_of(process, report, log) for name, value in answer.items()}


def likeliest(
    model: hf.PreTrainedModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], variant: str
) -> Tensor:
    """The token that the model on `variant`'s cache would write in the place of each token of the answers, behind those before:
    int64 [prompts, tokens]. Answers have one length; prompts at least two tokens.
    """
    cache = PagedLatents(len(hf.attention_layers(model)), variant, max(map(len, prompts)) + len(answers[0]))
    with hf.enable(model, variant):
        return torch.cat([logits.argmax(-1) for logits in hf.forced(model, cache, prompts, answers)], 1).cpu()
