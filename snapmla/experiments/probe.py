"""Train the probe model from a fixed seed for a fixed number of steps.

    python -m snapmla.experiments.probe phases.short.steps=100
    python -m snapmla.experiments.probe size=large

Writes results/probe/: model/ (Hugging Face format), training.csv, corpus.json (which text: it depends on the
Python version).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from omegaconf import MISSING

from snapmla import results
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.probe import corpus, train


@dataclass
class EvaluationConfig:
    every: int = MISSING
    sequence: int = MISSING
    windows: int = MISSING
    tasks: bool = MISSING


@dataclass
class ProbeConfig(BaseConfig):
    device: str = MISSING
    shape: train.Shape = MISSING
    phases: dict[str, train.Phase] = MISSING
    optimizer: train.Optimizer = MISSING
    evaluation: EvaluationConfig = MISSING


@application("probe", ProbeConfig)
def main(cfg: ProbeConfig, run: Run) -> None:
    if cfg.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device must be one of this machine's, got {cfg.device} without a GPU: choose size=small.")
    torch.set_float32_matmul_precision("high")  # Muon's products on a GPU, in TF32
    text = corpus.load()
    run.progress(
        f"{text.documents} documents: {len(text.train):,} bytes to train on, {len(text.heldout):,} held out"
    )
    model = train.build(cfg.shape, cfg.seed).to(cfg.device)
    run.progress(f"{cfg.shape.layers} layers, {sum(p.numel() for p in model.parameters()):,} parameters")
    rows = []

    def report(row: dict) -> None:
        rows.append({**row, "source": "measured"})
        run.log({f"{row['split']}/loss_bits_per_byte": row["loss_bits_per_byte"]}, step=row["step"])
        run.progress(f"step {row['step']}: {row['loss_bits_per_byte']:.3f} bits per byte ({row['split']})")

    train.train(
        model,
        text,
        cfg.phases,
        cfg.optimizer,
        seed=cfg.seed,
        evaluate_every=cfg.evaluation.every,
        evaluation=train.Phase(
            cfg.evaluation.sequence, cfg.evaluation.windows, steps=0, tasks=float(cfg.evaluation.tasks)
        ),
        report=report,
    )
    model.save_pretrained(run.out / "model")
    run.write_table("training.csv", rows)
    results.write_json(
        run.out / "corpus.json",
        {
            "sha256": text.sha256,
            "documents": text.documents,
            "train_bytes": len(text.train),
            "heldout_bytes": len(text.heldout),
        },
    )


if __name__ == "__main__":
    main()
