"""Does vLLM with SnapMLA write what the model would? Greedy generation there, teacher-forced here.

A greedy token is vLLM's likeliest behind its own tokens. The Transformers integration is given these tokens one after
another and says which one it would have written: where both agree, they agree on the likeliest token behind the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from snapmla.bench.engine import answers_of, environment, start
from snapmla.integrations import transformers as hf
from snapmla.integrations.transformers_cache import PagedLatents


@dataclass(frozen=True)
class GenerateRun:
    """What `vllm_generate` reads. prompts: token ids; long_steps: of the decode whose memory is watched; the rest is vLLM's."""

    model: str
    backend: str
    prompts: list[list[int]]
    max_tokens: int
    long_steps: int
    max_model_len: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    compilation_config: dict


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
