"""The parts of vLLM 0.25's interfaces that the backend fills, in small: names, signatures and the order of calls are
vLLM's, attention is torch's. For tests, where vLLM itself, which needs a GPU, is not.
"""

from __future__ import annotations

import enum
import logging
import types
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

VERSION = "0.25.1"
T = TypeVar("T")


class AttentionBackendEnum(enum.Enum):
    CUSTOM = None


REGISTERED: dict[AttentionBackendEnum, str] = {}


def register_backend(backend: AttentionBackendEnum, class_path: str) -> None:
    REGISTERED[backend] = class_path


class AttentionCGSupport(enum.Enum):
    UNIFORM_BATCH = 2


class QueryLenSupport(enum.Enum):
    UNIFORM = "uniform"


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    cache_dtype_str: str | None = None

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size * self.dtype.itemsize


class KVCacheSpec:
    pass


@dataclass
class PassConfig:
    fuse_rope_kvcache_cat_mla: bool = False


@dataclass
class VllmConfig:
    """`num_heads` and `speculative` stand for the model's and the speculative configuration."""

    num_heads: int = 4
    speculative: int = 0
    cache_config: Any = field(default_factory=lambda: types.SimpleNamespace(block_size=64, cache_dtype="auto"))
    compilation_config: Any = field(default_factory=lambda: types.SimpleNamespace(pass_config=PassConfig()))
    scheduler_config: Any = field(default_factory=lambda: types.SimpleNamespace(max_num_seqs=4))


CURRENT = VllmConfig()


def get_current_vllm_config() -> VllmConfig:
    return CURRENT


def init_logger(name: str) -> Any:
    logger = logging.getLogger(name)
    return types.SimpleNamespace(info_once=logger.info)


class MLACommonBackend:
    pass


class OtherBackend(MLACommonBackend):
    pass


class MLAAttention:
    """One layer: `attn_backend`, and the cache that vLLM measures by its specification."""

    def __init__(self, attn_backend: type[MLACommonBackend]) -> None:
        self.attn_backend = attn_backend
        self._vllm_config = CURRENT

    @property
    def chunked_prefill_workspace_size(self) -> int:
        return MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(self._vllm_config)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        cache = vllm_config.cache_config
        return MLAAttentionSpec(block_size=cache.block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


@dataclass
class ChunkedContext:
    cu_seq_lens: Tensor
    starts: Tensor
    seq_tot: list[int]
    token_to_seq: Tensor
    prefill_tokens_with_context: int | None


@dataclass
class Prefill:
    block_table: Tensor
    query_start_loc: Tensor
    chunked_context: ChunkedContext | None
    prefill_backend: Any = None


@dataclass
class MLACommonDecodeMetadata:
    block_table: Tensor
    seq_lens: Tensor
    dcp_tot_seq_lens: Tensor | None


@dataclass
class MLACommonMetadata(Generic[T]):
    num_decodes: int
    num_decode_tokens: int
    prefill: Prefill | None
    decode: T | None


@dataclass
class Step:
    """A step's sequences, decodes first: tokens that each had before and gets now, and their blocks."""

    context: Tensor
    new: Tensor
    block_table: Tensor
    decodes: int


class MLACommonMetadataBuilder(Generic[T]):
    """Cuts contexts into pieces of `PIECE` tokens of each sequence."""

    PIECE = 128

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: VllmConfig) -> int:
        return 64 * 1024

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        self.num_heads = vllm_config.num_heads
        self.reorder_batch_threshold = 1 + vllm_config.speculative
        self.device = device

    def build(self, common_prefix_len: int, step: Step, fast_build: bool = False) -> MLACommonMetadata[T]:
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), step.new.cumsum(0).int()])
        lengths, n = (step.context + step.new).int(), step.decodes
        decode = prefill = None
        if n:
            queries = starts[: n + 1]
            decode = self._build_decode(
                step.block_table[:n], lengths[:n], int(lengths.max()), queries, queries, int(queries[-1]), None
            )
        if n < len(step.new):
            context, queries = step.context[n:], starts[n:] - starts[n]
            pieces = None
            if int(context.max()):
                begins = torch.arange(0, int(context.max()), self.PIECE)
                held = (context - begins[:, None]).clamp(0, self.PIECE)  # [pieces, sequences]
                cumulative = torch.nn.functional.pad(held.cumsum(1), (1, 0)).int()
                sequence = torch.zeros(len(begins), int(held.sum(1).max()), dtype=torch.int32)
                for i, of in enumerate(held):
                    sequence[i, : int(of.sum())] = torch.arange(len(of)).repeat_interleave(of)
                begins = begins[:, None].expand_as(held).int()
                leading = int(queries[int((context > 0).sum())])
                pieces = ChunkedContext(cumulative, begins, held.sum(1).tolist(), sequence, leading)
            prefill = Prefill(step.block_table[n:], queries, pieces)
            prefill.prefill_backend = PrefillBackend(prefill)
        return MLACommonMetadata(n, int(starts[n]), prefill, decode)


class PrefillBackend:
    """Attention of sequences that lie one after another, in float32; its log-sum-exps are [heads, tokens]."""

    scale = 0.1

    def __init__(self, prefill: Prefill) -> None:
        self.prefill = prefill

    def run_prefill_context_chunk(self, chunk_idx: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(q, k, v, self.prefill.chunked_context.cu_seq_lens[chunk_idx], causal=False)

    def run_prefill_new_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(q, k, v, self.prefill.query_start_loc, causal=True)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, cu_keys: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for i in range(len(cu_keys) - 1):
            a, b = (slice(*cu[i : i + 2].tolist()) for cu in (self.prefill.query_start_loc, cu_keys))
            s = torch.einsum("qhd,khd->hqk", q[a].float(), k[b].float()) * self.scale
            if causal:
                s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
            lses.append(s.logsumexp(-1))
            outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v[b].float()))
        return torch.cat(outs).to(q.dtype), torch.cat(lses, 1)


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> None:
    lses = torch.stack([prefix_lse, suffix_lse])
    if prefill_tokens_with_context is not None:
        lses[0, :, prefill_tokens_with_context:] = -torch.inf
    weights = lses.softmax(0).mT[..., None]
    output.copy_(weights[0] * prefix_output + weights[1] * suffix_output)
    if output_lse is not None:
        output_lse.copy_(lses.logsumexp(0))


class MLACommonImpl(Generic[T]):
    def __init__(self, num_heads: int, scale: float, kv_b_proj: Any, **dims: int) -> None:
        self.num_heads, self.scale, self.kv_b_proj = num_heads, scale, kv_b_proj
        self.kv_lora_rank, self.qk_rope_head_dim = dims["kv_lora_rank"], dims["qk_rope_head_dim"]
        self.qk_nope_head_dim, self.v_head_dim = dims["qk_nope_head_dim"], dims["v_head_dim"]
        self.supports_quant_query_input = True

    def _concat_k_nope_k_pe(self, k_nope: Tensor, k_pe: Tensor) -> Tensor:
        return torch.cat([k_nope, k_pe.expand(*k_nope.shape[:-1], -1)], -1)

    def forward_mha(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, metadata: MLACommonMetadata, output: Tensor
    ) -> None:
        prefill = metadata.prefill
        k_nope, v = self.kv_b_proj(kv_c_normed)[0].unflatten(-1, (self.num_heads, -1)).split([self.qk_nope_head_dim, self.v_head_dim], -1)
        own = prefill.prefill_backend.run_prefill_new_tokens(q, self._concat_k_nope_k_pe(k_nope, k_pe), v)
        if prefill.chunked_context is None:
            output.copy_(own[0])
        else:
            cached = self._compute_prefill_context(q, kv_cache, metadata, torch.ones(1))
            leading = prefill.chunked_context.prefill_tokens_with_context
            merge_attn_states(output, *cached, *own, prefill_tokens_with_context=leading)


class DecodeBenchConnector:
    def __init__(self) -> None:
        self.connector_worker = types.SimpleNamespace(kv_caches=None)

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.connector_worker.kv_caches = kv_caches


CONTENTS = {
    "vllm": {"__version__": VERSION},
    "vllm.config": {"VllmConfig": VllmConfig, "get_current_vllm_config": get_current_vllm_config},
    "vllm.logger": {"init_logger": init_logger},
    "vllm.model_executor.layers.attention.mla_attention": {
        x.__name__: x
        for x in (
            MLAAttention, MLACommonBackend, MLACommonDecodeMetadata, MLACommonImpl, MLACommonMetadata,
            MLACommonMetadataBuilder, QueryLenSupport,
        )
    },
    "vllm.v1.attention.backend": {"AttentionCGSupport": AttentionCGSupport},
    "vllm.v1.attention.backends.registry": {"AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend},
    "vllm.v1.attention.ops.merge_attn_states": {"merge_attn_states": merge_attn_states},
    "vllm.v1.kv_cache_interface": {"KVCacheSpec": KVCacheSpec, "MLAAttentionSpec": MLAAttentionSpec},
    "vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector": {"DecodeBenchConnector": DecodeBenchConnector},
}  # fmt: skip


def modules() -> dict[str, types.ModuleType]:
    """Entries for sys.modules: a package for each part of a name."""
    found: dict[str, types.ModuleType] = {}
    for name, contents in CONTENTS.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
        vars(found[name]).update(contents)
    return found

