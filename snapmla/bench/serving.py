"""Does vLLM with SnapMLA write what the model would? Greedy generation there, teacher-forced here.

A greedy token is vLLM's likeliest behind its own tokens. The Transformers integration is given these tokens one after
another and says which one it would have written: where both agree, they agree on the likeliest token behind the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def with_mtp(folder: Path, out: Path) -> Path:
    """The folder of a DeepSeek-V3 checkpoint with a multi-token prediction module (DeepSeek-V3 report, section 2.2): `folder`
    itself if it has one, else `out`, with one made of its last layer, behind the model's last hidden state. Nobody has trained
    it: it repeats what the model has just predicted, which is right where text repeats itself, so drafts of both fates occur.

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
        f"{own}eh_proj.weight": torch.eye(len(norm), 2 * len(norm), dtype=norm.dtype).roll(len(norm), 1),
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


def generate(run: GenerateRun, python: str, settings: dict[str, str] | None = None) -> dict:
    """The program's answer. settings: more environment variables. Raises RuntimeError with its last line where it fails."""
    command = [python, "-m", "snapmla.bench.vllm_generate"]
    return answers_of(start(command, environment() | (settings or {})), asdict(run))[-1]


def likeliest(
    model: hf.PreTrainedModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], variant: str
) -> Tensor:
    """The token that the model on `variant`'s cache would write in the place of each token of the answers, behind those before:
    int64 [prompts, tokens]. Answers have one length; prompts at least two tokens.
    """
    cache = PagedLatents(len(hf.attention_layers(model)), variant, max(map(len, prompts)) + len(answers[0]))
    with hf.enable(model, variant):
        return torch.cat([logits.argmax(-1) for logits in hf.forced(model, cache, prompts, answers)], 1).cpu()
