"""Cache of a long held-out context, as a trained MLA model fills it: the input of Figs 3 and 4.

    python -m snapmla.experiments.latents context=8192
    python -m snapmla.experiments.latents source.path=/models/DeepSeek-V2-Lite

Writes results/latents/: latents.safetensors, latents.json, heldout.csv (bits per byte by position: is the
model still sane at this context?).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from snapmla import results
from snapmla.experiments import _source
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.experiments._source import SourceConfig
from snapmla.integrations import transformers as hf
from snapmla.probe import latents


@dataclass
class LatentsConfig(BaseConfig):
    context: int = MISSING
    queries: int = MISSING
    restart: int = MISSING
    source: SourceConfig = field(default_factory=SourceConfig)


@application("latents", LatentsConfig)
def main(cfg: LatentsConfig, run: Run) -> None:
    positions = latents.query_positions(cfg.context, cfg.queries)
    origin = _source.load(cfg.source, run)
    tokens = latents.heldout_context(origin, cfg.context).to(origin.model.device)
    run.progress(f"prefill of {cfg.context} tokens through {origin.name}")
    found = hf.latents(origin.model, tokens, positions)
    rows = latents.heldout_by_position(origin, tokens, found.hidden, cfg.restart)
    for row in rows:
        run.progress(
            f"positions {row['position_from']}-{row['position_to']}: {row['bits_per_byte']:.3f} bits per byte"
            f", {row['bits_per_byte_restarted']:.3f} in contexts of {cfg.restart}"
        )
    run.write_table("heldout.csv", rows)
    results.write_tensors(run.out / "latents.safetensors", latents.as_tensors(found, positions, tokens))
    results.write_json(
        run.out / "latents.json",
        {
            "softmax_scale": found.softmax_scale,
            "heads": found.query[0].shape[1],
            "layers": len(found.content),
            "context": cfg.context,
            "model": origin.name,
            "weights_source": origin.weights_source,
            "corpus_sha256": origin.corpus_sha256,
        },
    )


if __name__ == "__main__":
    main()
