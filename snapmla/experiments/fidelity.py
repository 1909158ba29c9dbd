"""Layer-wise error of the attention output for Table 2's configurations, against exact attention (Fig 4).

    python -m snapmla.experiments.fidelity variants=[snapmla,config_a]

Two panels. Teacher-forced: every layer gets the latents and queries of the unquantized model. Accumulated:
the last tokens of the context run through the whole model with the variant's attention in every layer, so
that each layer also gets the errors of those before it (in what these tokens cache as well as in what they
ask). Both on the context of results/latents/.

Writes results/fidelity/layer_error.csv.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from omegaconf import MISSING
from safetensors import safe_open
from torch import Tensor

from snapmla import results
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.experiments.latents import SourceConfig
from snapmla.integrations import transformers as hf
from snapmla.metrics import METRICS
from snapmla.probe import source
from snapmla.reference import attend


@dataclass
class FidelityConfig(BaseConfig):
    variants: list[str] = MISSING
    accumulated_queries: int = MISSING
    source: SourceConfig = field(default_factory=SourceConfig)


def errors(value: Tensor, reference: Tensor) -> dict[str, float]:
    """Fig 4's three metrics."""
    return {name: metric(value, reference) for name, metric in METRICS.items()}


def teacher_forced(
    variants: list[str], layer: int, query: Tensor, positions: Tensor, found: hf.Latents
) -> Iterator[tuple[str, dict[str, float]]]:
    """Each variant's error in one layer, for queries [n, heads, 576] at `positions`."""
    arguments = (query, found.content[layer], found.rope[layer], found.softmax_scale)
    exact = attend("exact", *arguments, visible=positions + 1)
    for variant in variants:
        yield variant, errors(attend(variant, *arguments, visible=positions + 1), exact)


def accumulated_outputs(
    variant: str, model: hf.PreTrainedModel, tokens: Tensor, found: hf.Latents, n: int
) -> list[Tensor]:
    """Each layer's attention output for the last n tokens, all layers computed as `variant`."""

    def run_variant(_layer: int, *arguments: object) -> Tensor:
        return attend(variant, *arguments)

    return hf.absorbed_forward(model, tokens[-n:], found.first(len(tokens) - n), run_variant).outputs


@application("fidelity", FidelityConfig)
def main(cfg: FidelityConfig, run: Run) -> None:
    info = results.read_json(run.input("latents", "latents.json"))
    context, layers, n = info["context"], info["layers"], cfg.accumulated_queries
    if not 1 <= n < context:
        raise ValueError(
            f"accumulated_queries must be from 1 to {context - 1} at a context of {context}, got {n}."
        )
    found = hf.Latents(softmax_scale=info["softmax_scale"])
    with safe_open(run.input("latents", "latents.safetensors"), "pt") as stored:
        positions, tokens = stored.get_tensor("positions"), stored.get_tensor("tokens")
        found.content = [stored.get_tensor(f"content.{layer}") for layer in range(layers)]
        found.rope = [stored.get_tensor(f"rope.{layer}") for layer in range(layers)]
        found.query = [stored.get_tensor(f"query.{layer}") for layer in range(layers)]
    rows = []

    def record(panel: str, variant: str, layer: int, queries: int, metrics: dict[str, float]) -> None:
        row = {"config": variant, "panel": panel, "layer": layer, "context": context, "queries": queries}
        rows.append({**row, **metrics, "source": "measured"})
        run.log({f"{panel}/{variant}/{name}": value for name, value in metrics.items()}, step=len(rows))

    for layer in range(layers):
        for variant, metrics in teacher_forced(cfg.variants, layer, found.query[layer], positions, found):
            record("teacher_forced", variant, layer, len(positions), metrics)
        run.progress(f"teacher-forced: layer {layer + 1} of {layers}")

    model = source.load(cfg.source.path or run.input("probe", "model"), probe=cfg.source.path is None).model
    exact = accumulated_outputs("exact", model, tokens, found, n)
    for variant in cfg.variants:
        outputs = accumulated_outputs(variant, model, tokens, found, n)
        for layer in range(layers):
            record("accumulated", variant, layer, n, errors(outputs[layer], exact[layer]))
        run.progress(f"accumulated: {variant}, last layer's relative L2 {rows[-1]['relative_l2']:.4f}")
    run.write_table("layer_error.csv", rows)


if __name__ == "__main__":
    main()
