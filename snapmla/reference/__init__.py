"""Reference attention, for correctness: exact (float64) and emulated (rounds exactly where the FP8 kernel
rounds)."""

from __future__ import annotations

import torch
from torch import Tensor

from snapmla.layout import KV_LORA_RANK
from snapmla.quantization import CONFIGS, Quantized, quantize_key, quantize_query
from snapmla.reference.accumulation import FLOAT32_ADDS, PROMOTED, SINGLE_ACCUMULATOR, Accumulation
from snapmla.reference.emulated import ALGORITHM_1, KERNEL, KERNEL_FLOAT32_ADDS, Rules, emulated_attention
from snapmla.reference.exact import exact_attention

__all__ = [
    "ALGORITHM_1",
    "FLOAT32_ADDS",
    "KERNEL",
    "KERNEL_FLOAT32_ADDS",
    "PROMOTED",
    "SINGLE_ACCUMULATOR",
    "VARIANTS",
    "Accumulation",
    "Rules",
    "attend",
    "emulated_attention",
    "exact_attention",
]

VARIANTS = ("bf16", *CONFIGS)
"""Attention variants that the experiments compare: the BF16 baseline and Table 2's configurations."""


def attend(
    variant: str,
    q: Tensor,
    content: Tensor,
    rope: Tensor,
    softmax_scale: float,
    *,
    visible: Tensor | None = None,
    rules: Rules = ALGORITHM_1,
) -> Tensor:
    """Attention of one sequence over its keys, as `variant` computes it from BF16 inputs.

    Args:
        variant: "exact" (float64), "bf16" (BF16 operands, P and output; float32 sums) or a name of
            `snapmla.quantization.CONFIGS` (FP8 by Algorithm 1, output rounded to BF16).
        q: [s_q, heads, 576] absorbed queries.
        content: [keys, 512].
        rope: [keys, 64].
        softmax_scale: multiplies the logits.
        visible: how many leading keys each query sees, int64 [s_q]; by default the queries are those of the last
            s_q tokens (causal, bottom-right).
        rules: of the emulation, for the FP8 variants.

    Returns:
        float32 [s_q, heads, 512].
    """
    if variant == "exact":
        return exact_attention(q, content, rope, softmax_scale, visible=visible)[0].float()
    q_content, q_rope = q[..., :KV_LORA_RANK], q[..., KV_LORA_RANK:]
    if variant == "bf16":
        rules = Rules(p_rule="bf16")
        query = _unquantized(q_content.bfloat16(), q_rope.bfloat16())
        key = _unquantized(content.bfloat16(), rope.bfloat16())
    elif variant in CONFIGS:
        query = quantize_query(q_content, q_rope, CONFIGS[variant])
        key = quantize_key(content, rope, CONFIGS[variant])
    else:
        raise ValueError(f"variant must be one of {('exact', *VARIANTS)}, got {variant!r}.")
    out, _ = emulated_attention(query, key, softmax_scale, visible=visible, rules=rules)
    return out.bfloat16().float()


def _unquantized(content: Tensor, rope: Tensor) -> Quantized:
    return Quantized(content, rope, torch.ones(content.shape[:-1], device=content.device))
