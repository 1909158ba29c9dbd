"""Error of flat attention against context for each way of accumulating FP8 products (beyond the paper).

    python -m snapmla.experiments.accumulation keys=[1024,16384]

A query of zeros attends to every key alike, which is the worst case for an accumulator that keeps 13 bits:
thousands of equal addends. The tensor core is modelled (snapmla.reference.accumulation); the errors are
computed here, against float64 on the same e4m3 values, output rounded to BF16.

Writes results/accumulation/accumulation.csv.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from omegaconf import MISSING
from torch import Tensor

from snapmla.decode import merge_partials
from snapmla.experiments._app import BaseConfig, Run, application
from snapmla.layout import QK_ROPE_HEAD_DIM
from snapmla.metrics import relative_l2
from snapmla.quantization import Quantized, to_e4m3
from snapmla.reference import (
    FLOAT32_ADDS,
    PROMOTED,
    SINGLE_ACCUMULATOR,
    Accumulation,
    Rules,
    emulated_attention,
)

ACCUMULATION = {
    "float32": FLOAT32_ADDS,
    "single": SINGLE_ACCUMULATOR,
    "split_4k": SINGLE_ACCUMULATOR,
    "promoted": PROMOTED,
}


@dataclass
class ValuesConfig:
    mean: float = MISSING
    std: float = MISSING


@dataclass
class AccumulationConfig(BaseConfig):
    keys: list[int] = MISSING
    values: list[ValuesConfig] = field(default_factory=list)
    columns: int = MISSING
    split: int = MISSING


def flat_attention(content: Tensor, accumulation: Accumulation, split: int) -> Tensor:
    """Attention of a zero query over e4m3 content [keys, n] in parts of `split` keys merged by LSE: float32
    [n]."""
    query = Quantized(
        torch.zeros(1, 1, content.shape[1]), torch.zeros(1, 1, QK_ROPE_HEAD_DIM), torch.ones(1, 1)
    )
    parts = []
    for part in content.split(split):
        key = Quantized(part, torch.zeros(len(part), QK_ROPE_HEAD_DIM), torch.ones(len(part)))
        parts.append(
            emulated_attention(query, key, 1.0, causal=False, rules=Rules(accumulation=accumulation))
        )
    out, _ = merge_partials(*(torch.stack(x)[:, None] for x in zip(*parts, strict=True)))
    return out[0, 0, 0]


@application("accumulation", AccumulationConfig)
def main(cfg: AccumulationConfig, run: Run) -> None:
    rows = []
    for values in cfg.values:
        generator = torch.Generator().manual_seed(cfg.seed)
        noise = torch.randn(max(cfg.keys), cfg.columns, generator=generator)
        content = to_e4m3(noise * values.std + values.mean)
        for keys in cfg.keys:
            exact = content[:keys].double().mean(0)
            for rule, accumulation in ACCUMULATION.items():
                out = flat_attention(content[:keys], accumulation, cfg.split if rule == "split_4k" else keys)
                error = relative_l2(out.bfloat16(), exact)
                row = {"value_mean": values.mean, "value_std": values.std, "keys": keys, "rule": rule}
                rows.append({**row, "bits": accumulation.bits, "relative_l2": error, "source": "modelled"})
            run.progress(f"values {values.mean:g} ± {values.std:g}, {keys} keys")
    run.write_table("accumulation.csv", rows)


if __name__ == "__main__":
    main()
