"""Does the error grow with what has been decoded? FP8 caches against a BF16 one over a long teacher-forced decode.

    python -m snapmla.experiments.drift steps=4096 variants=[snapmla]

A held-out text is prefilled up to `prompt` tokens and then decoded by its own next tokens, on a BF16 cache and on each
variant's, through the whole model (`snapmla.integrations.transformers.enable`). Each step appends to the cache what the
variant's own hidden states made of the token, so that errors could add up.

Writes results/drift/drift.csv: KL divergence from the BF16 cache's next-token distribution and top-1 agreement, by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from omegaconf import MISSING
from torch import Tensor

from snapmla.experiments import _source
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.experiments._source import SourceConfig
from snapmla.integrations import transformers as hf
from snapmla.integrations.transformers_cache import PagedLatents
from snapmla.layout import MAX_QUERIES
from snapmla.probe import corpus

BASELINE = "bf16"


@dataclass
class DriftConfig(BaseConfig):
    prompt: int = MISSING
    steps: int = MISSING
    windows: int = MISSING
    bin: int = MISSING
    variants: list[str] = MISSING
    source: SourceConfig = field(default_factory=SourceConfig)


@torch.no_grad()
def decode(
    model: hf.PreTrainedModel, tokens: Tensor, prompt: int, variants: list[str]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Each variant's KL divergence in nats and top-1 agreement, float32 and bool [windows, steps], from the baseline.

    tokens: int64 [windows, prompt + steps], the steps a multiple of 8: so many go through a decode call at once.
    """
    layers = len(hf.attention_layers(model))
    caches = {name: PagedLatents(layers, name, tokens.shape[1]) for name in [BASELINE, *variants]}
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in variants}
    with hf.enable(model):
        for begin in [0, *range(prompt, tokens.shape[1], MAX_QUERIES)]:
            end = prompt if begin == 0 else begin + MAX_QUERIES
            piece = tokens[:, begin:end]
            logits = {
                name: model(piece, use_cache=True, logits_to_keep=MAX_QUERIES, **{hf.CACHE: cache}).logits
                for name, cache in caches.items()
            }
            if begin == 0:
                continue
            logs = {name: x.float().log_softmax(-1) for name, x in logits.items()}
            expected = logs[BASELINE]
            for name in variants:
                kl = (expected.exp() * (expected - logs[name])).sum(-1)
                found[name].append((kl, logs[name].argmax(-1) == expected.argmax(-1)))
    return {name: tuple(torch.cat(x, 1) for x in zip(*parts, strict=True)) for name, parts in found.items()}


@application("drift", DriftConfig)
def main(cfg: DriftConfig, run: Run) -> None:
    if cfg.steps % MAX_QUERIES or cfg.steps % cfg.bin:
        raise ValueError(f"steps must be a multiple of {MAX_QUERIES} and of bin {cfg.bin}, got {cfg.steps}.")
    if BASELINE in cfg.variants:
        raise ValueError(f"variants must not name {BASELINE}, which they are compared with, got it.")
    origin = _source.load(cfg.source, run)
    tokens = corpus.spread(origin.tokens, cfg.windows, cfg.prompt + cfg.steps).to(origin.model.device)
    rows = []
    for name, (kl, agrees) in decode(origin.model, tokens, cfg.prompt, cfg.variants).items():
        for step in range(0, cfg.steps, cfg.bin):
            part = slice(step, step + cfg.bin)
            rows.append(
                {
                    "variant": name, "prompt": cfg.prompt, "step_from": step, "step_to": step + cfg.bin,
                    "kl": kl[:, part].mean().item(), "top1_agreement": agrees[:, part].float().mean().item(),
                    "n": kl[:, part].numel(), "source": "measured",
                }
            )  # fmt: skip
        run.progress(f"{name}: KL {kl.mean():.2e} nats, top-1 agreement {agrees.float().mean():.2%}")
    run.write_table("drift.csv", _source.measured_on(origin.model.device, rows))
    for row in sorted(rows, key=lambda row: row["step_to"]):
        run.log({f"{row['variant']}/{name}": row[name] for name in ("kl", "top1_agreement")}, step=row["step_to"])


if __name__ == "__main__":
    main()
