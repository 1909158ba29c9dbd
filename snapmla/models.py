"""Shapes of the MLA models that the paper and this package use, and what follows from them.

The numbers are those of the models' public ``config.json`` files; entries name the Hugging Face repository.
Parameters are counted as Transformers builds the models (``deepseek_v2``, ``deepseek_v3``, ``glm4_moe_lite``,
``longcat_flash``): every matrix; norms and biases (under 0.01%) and the MTP module are left out.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from snapmla.layout import KV_LORA_RANK, QK_ROPE_HEAD_DIM

BF16_BYTES = 2


@dataclass(frozen=True)
class ParallelLayout:
    """Data and tensor parallelism of the attention over the GPUs of a node.

    Attention runs in ``dp`` groups, each with its own requests. The ``tp`` GPUs of a group share the heads,
    and each holds the whole latent cache of the group's requests. Routed experts are spread over all GPUs.
    """

    dp: int
    tp: int

    def __post_init__(self) -> None:
        if self.dp < 1 or self.tp < 1:
            raise ValueError(
                f"dp and tp of a parallel layout must be at least 1, got DP{self.dp}/TP{self.tp}."
            )

    @property
    def gpus(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        return f"DP{self.dp}/TP{self.tp}"

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """The layout that a name like ``DP8/TP1`` stands for. Raises ValueError for any other form."""
        match = re.fullmatch(r"DP(\d+)/TP(\d+)", text)
        if match is None:
            raise ValueError(f"a parallel layout must be a name such as DP8/TP1, got {text!r}.")
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class MLAModel:
    """Shape of a mixture-of-experts language model with multi-head latent attention.

    A *layer* is what ``config.json`` counts. Each layer of LongCat-Flash has two attention and two dense MLP
    sublayers and one mixture of experts; ``attention_layers`` is the number of latent caches.
    """

    name: str
    source: str
    """Repository whose config.json the numbers come from."""

    hidden_size: int
    layers: int
    heads: int
    q_lora_rank: int | None
    """Rank of the query's down-projection; None: one full-rank projection."""
    qk_nope_head_dim: int
    v_head_dim: int
    vocab_size: int

    dense_intermediate_size: int
    moe_intermediate_size: int
    routed_experts: int
    shared_experts: int
    experts_per_token: int
    """Experts that the router picks for a token, zero experts included."""
    first_dense_layers: int
    """Layers at the start that have a dense MLP instead of experts."""

    attention_per_layer: int = 1
    dense_mlps_beside_experts: int = 0
    """Dense MLPs in each layer that has experts (LongCat-Flash: 2)."""
    zero_experts: int = 0
    """Experts that return their input and have no weights (LongCat-Flash)."""
    yarn_factor: float = 1.0
    yarn_mscale_all_dim: float = 0.0
    """YaRN's length factor and the coefficient of its attention temperature; 0 means none."""
    linear_weight_bytes: int = 1
    """Bytes a weight of the linear layers in the checkpoint that is served: 1 for FP8, 2 for BF16."""

    kv_lora_rank: int = KV_LORA_RANK
    qk_rope_head_dim: int = QK_ROPE_HEAD_DIM

    # Attention

    @property
    def attention_layers(self) -> int:
        """Attention sublayers, that is latent caches."""
        return self.layers * self.attention_per_layer

    @property
    def mscale(self) -> float:
        """YaRN's attention temperature 0.1 · mscale_all_dim · ln(factor) + 1 (1 without YaRN)."""
        if self.yarn_factor <= 1.0:
            return 1.0
        return 0.1 * self.yarn_mscale_all_dim * math.log(self.yarn_factor) + 1.0

    @property
    def softmax_scale(self) -> float:
        """Factor on the logits: (qk_nope_head_dim + qk_rope_head_dim)^-0.5 · mscale².

        The width is that of a head before absorption (192, or 256 for GLM-4.7-Flash), not the latent's 576.
        """
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.mscale**2

    def heads_per_gpu(self, layout: ParallelLayout) -> int:
        """Query heads on one GPU. Raises ValueError where tp does not divide the heads."""
        if self.heads % layout.tp:
            raise ValueError(f"tp must divide the {self.heads} heads of {self.name}, got {layout.tp}.")
        return self.heads // layout.tp

    # Parameters, in numbers of weights

    @property
    def _moe_layers(self) -> int:
        return self.layers - self.first_dense_layers

    @property
    def _latent_projections(self) -> int:
        """Down-projections to the latents, of all layers: not divided by tensor parallelism."""
        q_a = self.hidden_size * self.q_lora_rank if self.q_lora_rank else 0
        kv_a = self.hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim)
        return self.attention_layers * (q_a + kv_a)

    @property
    def _kv_up_projection(self) -> int:
        """W_UK and W_UV of all layers."""
        return (
            self.attention_layers * self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        )

    @property
    def _head_projections(self) -> int:
        """Query up- and output projections, of all layers: divided by heads."""
        q_in = self.q_lora_rank or self.hidden_size
        q_b = q_in * self.heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        out = self.heads * self.v_head_dim * self.hidden_size
        return self.attention_layers * (q_b + out)

    @property
    def _expert(self) -> int:
        """One expert: gate, up and down projection."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def _dense_mlps(self) -> int:
        mlps = self.first_dense_layers + self._moe_layers * self.dense_mlps_beside_experts
        return mlps * 3 * self.hidden_size * self.dense_intermediate_size

    @property
    def _routers(self) -> int:
        return self._moe_layers * self.hidden_size * (self.routed_experts + self.zero_experts)

    @property
    def _embedding(self) -> int:
        """The input embedding; the output head, untied in all models here, has the same size."""
        return self.vocab_size * self.hidden_size

    @property
    def routed_expert_parameters(self) -> int:
        """Weights of all routed experts of all layers."""
        return self._moe_layers * self.routed_experts * self._expert

    @property
    def shared_parameters(self) -> int:
        """Weights that every token passes through, the input embedding (a lookup) left out."""
        attention = self._latent_projections + self._kv_up_projection + self._head_projections
        shared_experts = self._moe_layers * self.shared_experts * self._expert
        return attention + self._dense_mlps + shared_experts + self._routers + self._embedding

    @property
    def total_parameters(self) -> int:
        """All weights, without the MTP module."""
        return self.shared_parameters + self.routed_expert_parameters + self._embedding

    @property
    def active_parameters(self) -> int:
        """Weights that a token is multiplied with, on average.

        A pick of a zero expert costs nothing: with even routing routed/(routed + zero) of the picks are real.
        """
        return self.shared_parameters + round(self.routed_expert_parameters * self.pick_probability)

    @property
    def pick_probability(self) -> float:
        """Chance that a token picks a given expert of a layer, under even routing."""
        return self.experts_per_token / (self.routed_experts + self.zero_experts)

    # Bytes of weights on one GPU

    def routed_weight_bytes(self, layout: ParallelLayout) -> float:
        """Bytes of routed experts on one GPU: expert parallelism over all GPUs of the layout."""
        return self.routed_expert_parameters * self.linear_weight_bytes / layout.gpus

    def resident_weight_bytes(self, layout: ParallelLayout) -> float:
        """Bytes of all other weights on one GPU, as vLLM lays them out.

        Down-projections and routers are replicated; everything else is divided by tp. Embedding, output head
        and routers are BF16. W_UK and W_UV are held twice: in the checkpoint's format for prefill and as BF16
        copies for absorbed decoding. Scales of FP8 blocks of 128 × 128 (0.02%) are not counted.
        """
        shared_experts = self._moe_layers * self.shared_experts * self._expert
        divided = self._head_projections + self._kv_up_projection + self._dense_mlps + shared_experts
        linear = self.linear_weight_bytes * (self._latent_projections + divided / layout.tp)
        bf16 = BF16_BYTES * (self._routers + (2 * self._embedding + self._kv_up_projection) / layout.tp)
        return linear + bf16

    def weight_bytes(self, layout: ParallelLayout) -> float:
        """Bytes of weights on one GPU."""
        return self.routed_weight_bytes(layout) + self.resident_weight_bytes(layout)

    def decode_read_bytes(self, layout: ParallelLayout, tokens: int) -> float:
        """Bytes of weights that one GPU reads in a decoding step, on average.

        Args:
            tokens: tokens that the whole node decodes in the step; each layer's experts see all of them.

        Routed experts count by the chance that at least one token picked them (even, independent routing).
        The input embedding (a lookup) and the prefill copy of W_UK and W_UV are not read.
        """
        unread = self._embedding * BF16_BYTES + self._kv_up_projection * self.linear_weight_bytes
        hit = 1.0 - (1.0 - self.pick_probability) ** tokens
        return (
            self.resident_weight_bytes(layout) - unread / layout.tp + hit * self.routed_weight_bytes(layout)
        )


DEEPSEEK_V3_1 = MLAModel(
    name="DeepSeek-V3.1",
    source="deepseek-ai/DeepSeek-V3.1",
    hidden_size=7168,
    layers=61,
    heads=128,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    vocab_size=129280,
    dense_intermediate_size=18432,
    moe_intermediate_size=2048,
    routed_experts=256,
    shared_experts=1,
    experts_per_token=8,
    first_dense_layers=3,
    yarn_factor=40.0,
    yarn_mscale_all_dim=1.0,
)

LONGCAT_FLASH_THINKING = MLAModel(
    name="LongCat-Flash-Thinking",
    source="meituan-longcat/LongCat-Flash-Thinking-FP8",
    hidden_size=6144,
    layers=28,
    heads=64,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    vocab_size=131072,
    dense_intermediate_size=12288,
    moe_intermediate_size=2048,
    routed_experts=512,
    shared_experts=0,
    experts_per_token=12,
    first_dense_layers=0,
    attention_per_layer=2,
    dense_mlps_beside_experts=2,
    zero_experts=256,
)

DEEPSEEK_V2_LITE = MLAModel(
    name="DeepSeek-V2-Lite",
    source="deepseek-ai/DeepSeek-V2-Lite",
    hidden_size=2048,
    layers=27,
    heads=16,
    q_lora_rank=None,
    qk_nope_head_dim=128,
    v_head_dim=128,
    vocab_size=102400,
    dense_intermediate_size=10944,
    moe_intermediate_size=1408,
    routed_experts=64,
    shared_experts=2,
    experts_per_token=6,
    first_dense_layers=1,
    yarn_factor=40.0,
    yarn_mscale_all_dim=0.707,
    linear_weight_bytes=2,
)

GLM_4_7_FLASH = MLAModel(
    name="GLM-4.7-Flash",
    source="zai-org/GLM-4.7-Flash",
    hidden_size=2048,
    layers=47,
    heads=20,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    v_head_dim=256,
    vocab_size=154880,
    dense_intermediate_size=10240,
    moe_intermediate_size=1536,
    routed_experts=64,
    shared_experts=1,
    experts_per_token=4,
    first_dense_layers=1,
    linear_weight_bytes=2,
)

KIMI_K2 = MLAModel(
    name="Kimi-K2",
    source="moonshotai/Kimi-K2-Instruct",
    hidden_size=7168,
    layers=61,
    heads=64,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    vocab_size=163840,
    dense_intermediate_size=18432,
    moe_intermediate_size=2048,
    routed_experts=384,
    shared_experts=1,
    experts_per_token=8,
    first_dense_layers=1,
    yarn_factor=32.0,
    yarn_mscale_all_dim=1.0,
)

MODELS = {
    m.name: m for m in (DEEPSEEK_V3_1, LONGCAT_FLASH_THINKING, DEEPSEEK_V2_LITE, GLM_4_7_FLASH, KIMI_K2)
}


def get_model(name: str) -> MLAModel:
    """The model of that name. Raises ValueError that lists the known names."""
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}.")
    return MODELS[name]
