"""Build, train and score the probe model: transformers' own DeepSeek-V3 classes, all layers dense, one token
a byte."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from snapmla.integrations import transformers as hf
from snapmla.layout import KV_LORA_RANK, QK_ROPE_HEAD_DIM
from snapmla.probe import corpus, tasks
from snapmla.probe.muon import Muon

VOCABULARY = 256


@dataclass
class Shape:
    """Sizes of the probe model; kv_lora_rank and qk_rope_head_dim are the cache's."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    qk_nope_head_dim: int
    v_head_dim: int
    rope_theta: float
    max_position_embeddings: int
    initializer_range: float


@dataclass
class Phase:
    """A stretch of training with ``batch`` sequences of ``sequence`` bytes in each of ``steps`` steps, a share ``tasks``
    of which are documents of tasks (`snapmla.probe.tasks`), each drawn at random, the rest windows of real text."""

    sequence: int
    batch: int
    steps: int
    tasks: float = 0.0


@dataclass
class Optimizer:
    """Muon for the layers' matrices, AdamW for embedding, head and norms. Both rates rise linearly over
    ``warmup_steps``, stay, and fall linearly to zero over the last ``cooldown_share`` of all steps."""

    muon_learning_rate: float
    adamw_learning_rate: float
    warmup_steps: int
    cooldown_share: float
    weight_decay: float
    clip_norm: float


def build(shape: Shape, seed: int) -> DeepseekV3ForCausalLM:
    """A randomly initialised probe model in float32."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        first_k_dense_replace=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        q_lora_rank=None,
        kv_lora_rank=KV_LORA_RANK,
        qk_nope_head_dim=shape.qk_nope_head_dim,
        qk_rope_head_dim=QK_ROPE_HEAD_DIM,
        v_head_dim=shape.v_head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,  # byte pairs are learnt at once through embedding and head
        initializer_range=shape.initializer_range,
        bos_token_id=corpus.SEPARATOR[0],
        eos_token_id=corpus.SEPARATOR[0],
        pad_token_id=None,
        num_nextn_predict_layers=0,
    )
    return DeepseekV3ForCausalLM._from_config(
        config, attn_implementation=hf.IMPLEMENTATION, dtype=torch.float32
    )


def train(
    model: PreTrainedModel,
    text: corpus.Corpus,
    phases: Mapping[str, Phase],
    optimizer: Optimizer,
    *,
    seed: int,
    evaluate_every: int,
    evaluation: Phase,
    report: Callable[[dict], None],
) -> None:
    """Train ``model`` in place on random windows of ``text.train`` and on tasks, phase after phase, for a fixed number of
    steps; in BF16 (autocast) on a GPU. The loss of a document is the mean over the tokens that it teaches, and documents
    count alike.

    Every ``evaluate_every`` steps and after the last, ``report`` gets rows {step, tokens, loss_bits_per_byte, split}: the
    mean training loss since the row before (split "train"), the loss on ``evaluation.batch`` fixed held-out windows
    ("heldout") and, if ``evaluation.tasks`` is above 0, on a document of each task (its name).
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(phase.steps for phase in phases.values())

    def rate(step: int) -> float:
        left = (total - step) / max(total * optimizer.cooldown_share, 1)
        return min(1.0, (step + 1) / max(optimizer.warmup_steps, 1), left)

    optimizers = _optimizers(model, optimizer)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, rate) for each in optimizers]
    heldout = {"heldout": (corpus.spread(text.heldout, evaluation.batch, evaluation.sequence), None)}
    if evaluation.tasks > 0:
        rng = np.random.default_rng(seed)
        heldout |= {name: _task(rng, name, evaluation.sequence, text.heldout, 0) for name in tasks.TASKS}
    step, tokens, losses = 0, 0, []
    model.train()
    for phase in phases.values():
        for _ in range(phase.steps):
            batch, taught = _batch(text.train, phase, generator)
            loss = _loss(model, batch, taught)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip_norm)
            for each in (*optimizers, *schedules):
                each.step()
            model.zero_grad()
            step, tokens = step + 1, tokens + batch.numel()
            losses.append(loss.detach())
            if step % evaluate_every == 0 or step == total:
                row = {"step": step, "tokens": tokens}
                report({**row, "loss_bits_per_byte": torch.stack(losses).mean().item(), "split": "train"})
                model.eval()
                with torch.no_grad():
                    for split, document in heldout.items():
                        report({**row, "loss_bits_per_byte": _loss(model, *document).item(), "split": split})
                model.train()
                losses.clear()
    model.eval()


def _optimizers(
    model: PreTrainedModel, optimizer: Optimizer
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices, up_projections, rest = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2 or "embed_tokens" in name or "lm_head" in name:
            rest.append(parameter)
        else:
            (up_projections if "kv_b_proj" in name else matrices).append(parameter)
    # A head's W_UK and W_UV as one matrix: what the heads do is independent, and the Gram matrices stay
    # small.
    groups = [{"params": matrices}, {"params": up_projections, "blocks": model.config.num_attention_heads}]
    muon = Muon(groups, lr=optimizer.muon_learning_rate, weight_decay=optimizer.weight_decay)
    adamw = torch.optim.AdamW(
        rest, lr=optimizer.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    return muon, adamw


def _batch(text: Tensor, phase: Phase, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Tokens int64 [batch, sequence] of a step, and which of them it teaches, bool; None: all."""
    starts = torch.randint(len(text) - phase.sequence, (phase.batch,), generator=generator)
    batch = torch.stack([corpus.window(text, int(start), phase.sequence) for start in starts])
    if not phase.tasks:
        return batch, None
    taught = torch.ones(batch.shape, dtype=torch.bool)
    rng = np.random.default_rng(torch.randint(2**62, (), generator=generator).item())
    names = list(tasks.TASKS)
    for i in np.flatnonzero(rng.random(phase.batch) < phase.tasks):
        task = names[rng.integers(len(names))]
        batch[i], taught[i] = (x[0] for x in _task(rng, task, phase.sequence, text, int(starts[i])))
    return batch, taught


def _task(rng: np.random.Generator, name: str, length: int, text: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """A document of a task, in text from `start` on: tokens int64 and taught bool, both [1, length]."""
    document = tasks.TASKS[name].document(rng, length, text[start : start + length].numpy())
    return torch.from_numpy(document.tokens).long()[None], torch.from_numpy(document.taught)[None]


def _loss(model: PreTrainedModel, batch: Tensor, taught: Tensor | None) -> Tensor:
    """Bits, the mean over documents of the mean over what each teaches."""
    found = bits(model, batch.to(model.device))
    if taught is None:
        return found.mean()
    taught = taught[:, 1:].to(found.device)
    return ((found * taught).sum(1) / taught.sum(1).clamp_min(1)).mean()


def bits(model: PreTrainedModel, batch: Tensor) -> Tensor:
    """Bits of each token but the first, [batch, length − 1] float32, for int64 ``batch`` [batch, length]."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=batch.device.type == "cuda"):
        logits = model(batch, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none") / math.log(2)
