"""What else could be kept in about SnapMLA's bytes, and what would it cost? (Beyond the paper.)

    python -m snapmla.experiments.ablation formats=[snapmla,int8] queries=40

Every layer gets the latents and queries of the unquantized model (teacher-forced, as in Fig 4's first panel), and its
attention output is compared with exact attention. The mean that `centered` takes off the content is that of the context's
first tokens (`calibration`), which the queries see as keys too.

Writes results/ablation/ablation.csv; and accumulation.csv: the error of SnapMLA's kernel in one layer against context, for
each way in which the tensor cores could add. There the last query sees a window of keys that ends at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from omegaconf import MISSING
from safetensors import safe_open
from torch import Tensor

from snapmla import results
from snapmla.experiments import _source
from snapmla.experiments._app import BaseConfig, Run, application, check_names
from snapmla.experiments.accumulation import ACCUMULATION
from snapmla.layout import KV_LORA_RANK
from snapmla.metrics import relative_l2
from snapmla.quantization import SNAPMLA, dequantize, quantize_key, quantize_query
from snapmla.reference import KERNEL, attend, emulated_attention, exact_attention
from snapmla.reference.alternatives import ALTERNATIVES, Inputs

RULES = {name: ACCUMULATION[name] for name in ("float32", "single", "promoted")}
"""Not split_4k, which cuts the sequence, not the sums."""


@dataclass
class AdditionsConfig:
    rules: list[str] = MISSING
    layer: int | None = None
    shortest: int = MISSING


@dataclass
class AblationConfig(BaseConfig):
    formats: list[str] = MISSING
    queries: int = MISSING
    calibration: float = MISSING
    device: str = MISSING
    accumulation: AdditionsConfig = field(default_factory=AdditionsConfig)


def spread(n: int, count: int) -> Tensor:
    """int64 [count]: `count` of n indices, evenly spread, the last one included."""
    if not 1 <= count <= n:
        raise ValueError(f"queries must be from 1 to the {n} of the latents, got {count}.")
    return torch.arange(1, count + 1) * n // count - 1


def contexts(shortest: int, longest: int) -> list[int]:
    """`shortest`, four times as many keys and so on up to `longest`, and `longest` itself."""
    if not 1 <= shortest <= longest:
        raise ValueError(f"accumulation.shortest must be from 1 to the latents' {longest}, got {shortest}.")
    lengths = [shortest]
    while 4 * lengths[-1] < longest:
        lengths.append(4 * lengths[-1])
    return lengths if lengths[-1] == longest else [*lengths, longest]


def crest_factor(content: Tensor) -> float:
    """Largest magnitude of a token over its root mean square, of [tokens, n]: the median token's."""
    rms = torch.linalg.vector_norm(content, dim=-1, dtype=torch.float32) / content.shape[-1] ** 0.5
    return (content.abs().amax(-1) / rms).median().item()


def query_errors(out: Tensor, exact: Tensor) -> Tensor:
    """Relative L2 error of each query's output, of [queries, heads, 512]: float64 [queries]."""
    return (out.double() - exact).flatten(1).norm(dim=1) / exact.double().flatten(1).norm(dim=1)


def format_errors(formats: list[str], inputs: Inputs) -> Iterator[tuple[str, float, int]]:
    """Each format's relative L2 error of one layer's attention output, and for how many queries it is lower than
    SnapMLA's."""
    exact = attend("exact", *inputs[:4], visible=inputs.visible)
    outputs = {name: ALTERNATIVES[name].attend(inputs) for name in formats}
    base = query_errors(outputs[SNAPMLA.name], exact)
    for name, out in outputs.items():
        yield name, relative_l2(out, exact), int((query_errors(out, exact) < base).sum())


def accumulation_errors(
    rules: list[str], inputs: Inputs, keys: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Each rule's relative L2 errors of SnapMLA's kernel, for the last query and the `keys` tokens that end at it: against
    exact attention, and against exact attention over the same quantized values (what P and the additions cost)."""
    end = int(inputs.visible[-1])
    window = slice(end - keys, end)
    q, content, rope, softmax_scale = (
        inputs.q[-1:],
        inputs.content[window],
        inputs.rope[window],
        inputs.softmax_scale,
    )
    query, key = quantize_query(q[..., :KV_LORA_RANK], q[..., KV_LORA_RANK:]), quantize_key(content, rope)
    stored = dequantize(key)
    exact, _ = exact_attention(q, content, rope, softmax_scale)
    same, _ = exact_attention(
        dequantize(query), stored[:, :KV_LORA_RANK], stored[:, KV_LORA_RANK:], softmax_scale
    )
    for rule in rules:
        emulated = replace(KERNEL, accumulation=RULES[rule])
        ours = emulated_attention(query, key, softmax_scale, rules=emulated)[0].bfloat16()
        found = {"relative_l2": relative_l2(ours, exact), "relative_l2_quantized": relative_l2(ours, same)}
        yield rule, found


@application("ablation", AblationConfig)
def main(cfg: AblationConfig, run: Run) -> None:
    check_names("formats", cfg.formats, ALTERNATIVES)
    if SNAPMLA.name not in cfg.formats:
        raise ValueError(
            f"formats must include {SNAPMLA.name}, which the others are compared with, got {cfg.formats}."
        )
    check_names("accumulation.rules", cfg.accumulation.rules, RULES)
    if not 0 < cfg.calibration <= 1:
        raise ValueError(f"calibration must be above 0 and at most 1, got {cfg.calibration}.")
    info = results.read_json(run.input("latents", "latents.json"))
    context, layers = info["context"], info["layers"]
    lengths = contexts(cfg.accumulation.shortest, context)
    middle = layers // 2 if cfg.accumulation.layer is None else cfg.accumulation.layer
    if not 0 <= middle < layers:
        raise ValueError(f"accumulation.layer must be from 0 to {layers - 1}, got {middle}.")
    device = _source.device_of(cfg.device)
    formats, accumulated = [], []
    with safe_open(run.input("latents", "latents.safetensors"), "pt") as stored:
        positions = stored.get_tensor("positions")
        chosen = spread(len(positions), cfg.queries)
        for layer in range(layers):
            query, content, rope = (
                stored.get_tensor(f"{part}.{layer}").to(device) for part in ("query", "content", "rope")
            )
            mean = content[: max(1, round(cfg.calibration * context))].float().mean(0)
            crest = crest_factor(content)
            visible = (positions[chosen] + 1).to(device)
            inputs = Inputs(query[chosen], content, rope, info["softmax_scale"], visible, mean)
            for name, error, lower in format_errors(cfg.formats, inputs):
                found = ALTERNATIVES[name]
                formats.append(
                    {
                        "format": name, "label": found.label, "bytes_per_token": found.bytes_per_token,
                        "products": found.products, "layer": layer, "context": context, "queries": len(chosen),
                        "crest": crest, "relative_l2": error, "queries_lower": lower, "source": "measured",
                    }
                )  # fmt: skip
                run.log({f"relative_l2/{name}": error}, step=len(formats))
            run.progress(f"formats: layer {layer + 1} of {layers}")
            if layer == middle:
                for keys in lengths:
                    for rule, errors in accumulation_errors(cfg.accumulation.rules, inputs, keys):
                        row = {"rule": rule, "layer": layer, "context": context, "keys": keys}
                        accumulated.append({**row, **errors, "source": "measured"})
                run.progress(f"accumulation: {len(lengths)} contexts")
    run.write_table("ablation.csv", _source.measured_on(device, formats))
    run.write_table("accumulation.csv", _source.measured_on(device, accumulated))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
