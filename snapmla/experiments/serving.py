"""vLLM's answers against the Transformers integration's, on the probe model: is the backend the model that it serves?

    python -m snapmla.experiments.serving measure.python=/opt/vllm/bin/python

vLLM writes greedily, with CUDA graphs, prefix caching and chunked prefill on; the Transformers integration, given the same
tokens one after another, says which it would have written (`snapmla.bench.serving`). Between two BF16 backends the agreement
is what roundings alone leave. With speculative tokens, which a multi-token prediction module drafts, a step decodes several
queries of each sequence, and the answers must stay.

Writes results/serving/serving.csv; "not run" rows where there is no Hopper GPU or no vLLM, or where vLLM fails; what it
prints is in logs/.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from torch import Tensor

from snapmla.bench import engine, serving
from snapmla.bench.machine import hopper_gpu
from snapmla.experiments import _source
from snapmla.experiments._app import BaseConfig, Run, application, check_names
from snapmla.experiments._source import SourceConfig
from snapmla.probe import corpus

ENGINES = {"CUSTOM": ("snapmla", "bf16"), "FLASHMLA": ("bf16",), "FLASH_ATTN_MLA": ("bf16",)}
"""vLLM's backends, and the caches of the Transformers integration that their tokens are held against. CUSTOM is SnapMLA."""

DRAFTED = 16, 512
"""Pieces of text to which a module that drafts is fitted, and tokens of each."""

COLUMNS = (
    "backend", "speculative_tokens", "against", "agreement", "n", "prompts", "cached_tokens", "kv_tokens", "early_bytes", "late_bytes",
    "long_steps", "tokens_per_step", "engine", "source", "status", "reason", "gpu",
)  # fmt: skip


@dataclass
class MeasureConfig:
    python: str | None = None
    backends: list[str] = MISSING
    speculative_tokens: list[int] = MISSING
    max_num_batched_tokens: int = MISSING
    gpu_memory_utilization: float = MISSING
    compilation_config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class ServingConfig(BaseConfig):
    prompts: int = MISSING
    lengths: list[int] = MISSING
    shared: int = MISSING
    tokens: int = MISSING
    long_steps: int = MISSING
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    source: SourceConfig = field(default_factory=SourceConfig)


def prompts_of(text: Tensor, count: int, lengths: list[int], shared: int) -> list[list[int]]:
    """Pieces of held-out text of these lengths in turns; every second one begins with the same `shared` tokens, which a
    prefix cache holds."""
    prefix = text[:shared].tolist()
    pieces = corpus.spread(text[shared:], count, max(lengths))
    return [
        (prefix if i % 2 else []) + piece[: lengths[i // 2 % len(lengths)]].tolist() for i, piece in enumerate(pieces)
    ]


def measured_rows(
    cfg: ServingConfig, origin: Callable[[], tuple[Path, Any]], progress: Callable[[str], None], logs: Path
) -> list[dict]:
    """The rows of serving.csv. origin: gives the checkpoint's folder and the loaded source, where they are needed; logs: folder for
    what vLLM prints."""
    measure, gpu = cfg.measure, hopper_gpu()
    check_names("measure.backends", measure.backends, ENGINES)
    if min(cfg.lengths) < 2:
        raise ValueError(f"lengths must be at least 2, got {min(cfg.lengths)}.")
    python = measure.python or sys.executable
    starts = [
        dict.fromkeys(COLUMNS) | {"backend": backend, "speculative_tokens": speculative, "source": "measured", "gpu": gpu}
        for backend, speculative in itertools.product(measure.backends, measure.speculative_tokens)
    ]
    if reason := engine.why_not(python, gpu):
        return [row for start in starts for row in _not_run(start, reason)]
    folder, model = origin()
    prompts = prompts_of(model.tokens.cpu(), cfg.prompts, cfg.lengths, cfg.shared)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        drafting = folder
        if any(measure.speculative_tokens):
            drafting = serving.with_mtp(folder, Path(place), model.model, corpus.spread(model.tokens, *DRAFTED))
        for start in starts:
            backend, speculative = start["backend"], start["speculative_tokens"]
            name = f"{backend}, {speculative} speculative"
            progress(f"{name}: starting vLLM")
            run = serving.GenerateRun(
                model=str(drafting if speculative else folder),
                backend=backend,
                prompts=prompts,
                max_tokens=cfg.tokens,
                long_steps=cfg.long_steps,
                max_model_len=max(max(map(len, prompts)) + cfg.tokens, 64 + cfg.long_steps) + speculative + 1,
                max_num_batched_tokens=measure.max_num_batched_tokens,
                gpu_memory_utilization=measure.gpu_memory_utilization,
                compilation_config=measure.compilation_config,
                speculative_tokens=speculative,
            )
            try:
                answer = serving.generate(run, python, progress, logs / f"{backend}-{speculative}.log", measure.environment)
            except RuntimeError as failure:
                progress(str(failure))
                rows += _not_run(start, str(failure))
                continue
            own = _rows_of(start | {"long_steps": cfg.long_steps}, model.model, prompts, answer)
            rows += own
            for row in own:
                progress(f"{name}, against {row['against']}: {row['agreement']:.2%} of {row['n']} tokens")
    return rows


def _not_run(row: dict, reason: str) -> list[dict]:
    return [row | {"against": against, "status": "not run", "reason": reason} for against in ENGINES[row["backend"]]]


def _rows_of(row: dict, model: Any, prompts: list[list[int]], answer: dict) -> list[dict]:
    """What a backend answered, held against each cache of the Transformers integration."""
    told = ("cached_tokens", "kv_tokens", "early_bytes", "late_bytes", "tokens_per_step")
    row |= {name: answer[name] for name in told}
    row |= {"prompts": len(prompts), "engine": f"vLLM {answer['vllm']}", "status": "ok"}
    rows = []
    for against in ENGINES[row["backend"]]:
        agrees = serving.likeliest(model, prompts, answer["tokens"], against) == torch.tensor(answer["tokens"])
        rows.append(row | {"against": against, "agreement": agrees.float().mean().item(), "n": agrees.numel()})
    return rows


@application("serving", ServingConfig)
def main(cfg: ServingConfig, run: Run) -> None:
    def origin() -> tuple[Path, Any]:
        folder = cfg.source.path or run.input("probe", "model")
        return Path(folder), _source.load(cfg.source, run)

    rows = measured_rows(cfg, origin, run.progress, run.out / "logs")
    run.write_table("serving.csv", rows)
    for reason in {row["reason"] for row in rows if row["reason"]}:
        run.progress(f"not run: {reason}")
    for row in rows:
        if row["status"] == "ok":
            run.log({f"agreement/{row['backend']}/{row['speculative_tokens']}/{row['against']}": row["agreement"]})


if __name__ == "__main__":
    main()
