"""Layer-wise error of the attention output for Table 2's configurations, against exact attention (Fig 4).

    python -m snapmla.experiments.fidelity variants=[snapmla,config_a]

Two panels. Teacher-forced: every layer gets the latents and queries of the unquantized model. Accumulated:
the last tokens of the context run through the whole model with the variant's attention in every layer, so
that each layer also gets the errors of those before it (in what these tokens cache as well as in what they
ask). Both on the context of results/latents/. On a Hopper GPU the kernels compute the first panel as well.

Writes results/fidelity/layer_error.csv and kernels.csv (the kernels' errors, and how far they are from their emulation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from omegaconf import MISSING
from safetensors import safe_open
from torch import Tensor

from snapmla import results
from snapmla.experiments import _source
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.experiments._source import SourceConfig
from snapmla.integrations import attention, flashmla
from snapmla.integrations import transformers as hf
from snapmla.metrics import METRICS
from snapmla.reference import ALGORITHM_1, KERNEL, attend


@dataclass
class FidelityConfig(BaseConfig):
    variants: list[str] = MISSING
    accumulated_queries: int = MISSING
    source: SourceConfig = field(default_factory=SourceConfig)


Call = tuple[Tensor, Tensor, Tensor, float]
"""One layer's attention: queries [n, heads, 576], content [keys, 512], RoPE [keys, 64], softmax_scale."""


def errors(value: Tensor, reference: Tensor) -> dict[str, float]:
    """Fig 4's three metrics."""
    return {name: metric(value, reference) for name, metric in METRICS.items()}


def teacher_forced(
    variants: list[str], call: Call, visible: Tensor, exact: Tensor
) -> Iterator[tuple[str, dict[str, float]]]:
    """Each variant's error in one layer."""
    for variant in variants:
        yield variant, errors(attend(variant, *call, visible=visible), exact)


def by_kernels(variants: list[str], call: Call, visible: Tensor, exact: Tensor) -> Iterator[dict]:
    """Rows of kernels.csv of one layer."""
    for variant in variants:
        reason = flashmla.why_not("bf16") if variant == "bf16" else None
        if not exact.is_cuda:
            reason = "no Hopper GPU"
        relative_l2 = from_emulation = None
        if reason is None:
            rules = ALGORITHM_1 if variant == "bf16" else KERNEL
            emulated = attend(variant, *call, visible=visible, rules=rules)
            whole = attention.attend(variant, *call, visible=visible, split=False)
            relative_l2 = METRICS["relative_l2"](attention.attend(variant, *call, visible=visible), exact)
            from_emulation = METRICS["relative_l2"](whole, emulated)
        yield {
            "config": variant, "relative_l2": relative_l2, "from_emulation": from_emulation, "source": "measured",
            "status": "not run" if reason else "ok", "reason": reason,
        }  # fmt: skip


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
    device = _source.device_of(cfg.source.device)
    found = hf.Latents(softmax_scale=info["softmax_scale"])
    with safe_open(run.input("latents", "latents.safetensors"), "pt") as stored:
        positions, tokens = (stored.get_tensor(name).to(device) for name in ("positions", "tokens"))
        for part in ("content", "rope", "query"):
            setattr(found, part, [stored.get_tensor(f"{part}.{layer}").to(device) for layer in range(layers)])
    rows, kernel_rows = [], []

    def record(panel: str, variant: str, layer: int, queries: int, metrics: dict[str, float]) -> None:
        row = {"config": variant, "panel": panel, "layer": layer, "context": context, "queries": queries}
        rows.append({**row, **metrics, "source": "measured"})
        run.log({f"{panel}/{variant}/{name}": value for name, value in metrics.items()}, step=len(rows))

    visible = positions + 1
    for layer in range(layers):
        call = found.query[layer], found.content[layer], found.rope[layer], found.softmax_scale
        exact = attend("exact", *call, visible=visible)
        for variant, metrics in teacher_forced(cfg.variants, call, visible, exact):
            record("teacher_forced", variant, layer, len(positions), metrics)
        where = {"layer": layer, "context": context, "queries": len(positions)}
        kernel_rows += [where | row for row in by_kernels(cfg.variants, call, visible, exact)]
        run.progress(f"teacher-forced: layer {layer + 1} of {layers}")

    model = _source.load(cfg.source, run).model
    exact = accumulated_outputs("exact", model, tokens, found, n)
    for variant in cfg.variants:
        outputs = accumulated_outputs(variant, model, tokens, found, n)
        for layer in range(layers):
            record("accumulated", variant, layer, n, errors(outputs[layer], exact[layer]))
        run.progress(f"accumulated: {variant}, last layer's relative L2 {rows[-1]['relative_l2']:.4f}")
    run.write_table("layer_error.csv", _source.measured_on(device, rows))
    run.write_table("kernels.csv", _source.measured_on(device, kernel_rows))


if __name__ == "__main__":
    main()
