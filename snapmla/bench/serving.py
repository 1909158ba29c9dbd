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
from snapmla.layout import MAX_QUERIES


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


@torch.no_grad()
def likeliest(
    model: hf.PreTrainedModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], variant: str
) -> Tensor:
    """The token that the model on `variant`'s cache would write in the place of each token of the answers, behind those before:
    int64 [prompts, tokens]. Answers have one length; prompts at least two tokens.
    """
    device, width = model.device, max(map(len, prompts)) - 1
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, prompt in enumerate(prompts):  # the last token of each prompt is decoded
        tokens[i, width - len(prompt) + 1 :] = torch.tensor(prompt[:-1])
        mask[i, width - len(prompt) + 1 :] = 1
    last = torch.tensor([prompt[-1] for prompt in prompts])
    decoded = torch.cat([last[:, None], torch.tensor([answer[:-1] for answer in answers], dtype=torch.int64)], 1)
    tokens, mask, decoded = (x.to(device) for x in (tokens, mask, decoded))
    cache = PagedLatents(len(hf.attention_layers(model)), variant, width + decoded.shape[1])
    found = []
    with hf.enable(model, variant):
        position = (mask.cumsum(1) - 1).clamp_min(0)
        model(tokens, attention_mask=mask, position_ids=position, use_cache=True, logits_to_keep=1, **{hf.CACHE: cache})
        for piece in decoded.split(MAX_QUERIES, 1):
            mask = torch.cat([mask, torch.ones_like(piece)], 1)
            position = mask.cumsum(1)[:, -piece.shape[1] :] - 1
            logits = model(piece, attention_mask=mask, position_ids=position, use_cache=True, **{hf.CACHE: cache}).logits
            found.append(logits.argmax(-1))
    return torch.cat(found, 1).cpu()
