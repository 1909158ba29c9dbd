"""vLLM's interfaces of an MLA attention backend, filled with `pages.py`.

Decode goes through our kernel on the FP8 cache. Prefill is vLLM's own, in BF16; it reads the cache only for what is
cached already (chunked prefill, prefix hits), which Fused-Fetch-Dequant gathers in pieces. Selecting the backend imports this
file, which also gives `MLAAttention` the size of the cache and of the pieces: vLLM asks the layer for them, not the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm import __version__ as vllm_version
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLAAttention,
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
from vllm.v1.kv_cache_interface import KVCacheSpec, MLAAttentionSpec

from snapmla.integrations.vllm import check_version, pages
from snapmla.layout import (
    BYTES_PER_TOKEN,
    KV_LORA_RANK,
    MAX_HEADS,
    MAX_QUERIES,
    PAGE_SIZE,
    QK_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
)
from snapmla.memory import CONTEXT_TOKENS

check_version(vllm_version)

logger = init_logger(__name__)


class SnapMLABackend(MLACommonBackend):
    """What vLLM asks before it selects a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the member of vLLM's enumeration under which it is registered

    @staticmethod
    def get_builder_cls() -> type[SnapMLAMetadataBuilder]:
        return SnapMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SnapMLAImpl]:
        return SnapMLAImpl

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int]:
        return [PAGE_SIZE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [QK_HEAD_DIM]

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        return tuple(capability) == (9, 0)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        if block_size != PAGE_SIZE:
            raise ValueError(f"block_size must be {PAGE_SIZE}, got {block_size}.")
        return pages.cache_shape(num_blocks)


@dataclass
class SnapMLADecodeMetadata(MLACommonDecodeMetadata):
    schedule: Tensor


class SnapMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata[SnapMLADecodeMetadata]]):
    """Metadata of a step. All decoding sequences of a step have the same number of queries, 1 + speculative tokens."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.reorder_batch_threshold > MAX_QUERIES:
            raise ValueError(
                f"num_speculative_tokens must leave at most {MAX_QUERIES} queries a step, got {self.reorder_batch_threshold}."
            )
        self._schedules = pages.Schedules()

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: VllmConfig) -> int:
        """Tokens of a piece of context: fewer than vLLM's, whose memory is the cache's instead; a page for each sequence at least."""
        vllms = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)
        of_sequences = vllm_config.scheduler_config.max_num_seqs * vllm_config.cache_config.block_size
        return max(min(vllms, CONTEXT_TOKENS["snapmla"]), of_sequences)

    def build(self, *args, **kwargs) -> MLACommonMetadata[SnapMLADecodeMetadata]:
        metadata = super().build(*args, **kwargs)
        if metadata.prefill is not None and metadata.prefill.chunked_context is not None:
            # vLLM merges the context into so many leading tokens only. Its newer model runner does not put sequences with
            # a context first, so all are merged; where there is no context, its log-sum-exp of -inf weighs nothing.
            metadata.prefill.chunked_context.prefill_tokens_with_context = None
        return metadata

    def _build_decode(
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> SnapMLADecodeMetadata:
        s_q = int(query_start_loc_cpu.diff().max())  # rows of padding have none
        schedule = self._schedules.make(seq_lens_device, block_table_tensor, s_q, self.num_heads)
        return SnapMLADecodeMetadata(block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, schedule)


class SnapMLAImpl(MLACommonImpl[MLACommonMetadata[SnapMLADecodeMetadata]]):
    """One layer's attention."""

    can_return_lse_for_decode: bool = False  # decode context parallelism is not supported

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        dims = self.kv_lora_rank, self.qk_rope_head_dim
        if dims != (KV_LORA_RANK, QK_ROPE_HEAD_DIM):
            raise ValueError(
                f"kv_lora_rank and qk_rope_head_dim must be {KV_LORA_RANK} and {QK_ROPE_HEAD_DIM}, got {dims[0]} and {dims[1]}."
            )
        if self.num_heads > MAX_HEADS:
            raise ValueError(f"num_heads must be at most {MAX_HEADS} on a GPU, got {self.num_heads}.")
        self.supports_quant_query_input = False  # Fused-Q-Quant takes the two BF16 parts
        passes = get_current_vllm_config().compilation_config.pass_config
        if passes.fuse_rope_kvcache_cat_mla:  # it writes vLLM's own layout, past do_kv_cache_update
            logger.info_once("SnapMLA: fuse_rope_kvcache_cat_mla is switched off.")
            passes.fuse_rope_kvcache_cat_mla = False

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor | None,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        if slot_mapping is not None:
            pages.append(kv_cache, kv_c_normed, k_pe, slot_mapping.flatten())

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata[SnapMLADecodeMetadata],
        layer: MLAAttention,
    ) -> tuple[Tensor, None]:
        step = attn_metadata.decode
        parts = q if isinstance(q, tuple) else q.split([KV_LORA_RANK, QK_ROPE_HEAD_DIM], -1)
        paging = step.block_table, step.seq_lens
        return pages.decode(kv_c_and_k_pe_cache, *parts, *paging, self.scale, step.schedule), None

    def _compute_prefill_context(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: MLACommonMetadata, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of new tokens to the cached ones before them, piece by piece, and its log-sum-exp."""
        prefill, cache = attn_metadata.prefill, pages.pages_of(kv_c_and_k_pe_cache)
        pieces, whole = prefill.chunked_context, None
        for i, tokens in enumerate(pieces.seq_tot):
            of_piece = pieces.token_to_seq[i, :tokens], pieces.cu_seq_lens[i], pieces.starts[i]
            latents = cache.fetch(pages.context_slots(prefill.block_table, *of_piece))
            content, rope = latents.split([KV_LORA_RANK, QK_ROPE_HEAD_DIM], -1)
            up = self.kv_b_proj(content)[0].unflatten(-1, (self.num_heads, -1))
            k_nope, v = up.split([self.qk_nope_head_dim, self.v_head_dim], -1)
            k = self._concat_k_nope_k_pe(k_nope, rope[:, None])
            part = prefill.prefill_backend.run_prefill_context_chunk(chunk_idx=i, q=q, k=k, v=v)
            if whole is not None:
                merged = tuple(torch.empty_like(x) for x in whole)
                merge_attn_states(merged[0], *whole, *part, output_lse=merged[1])
                part = merged
            whole = part
        return whole


def _kv_cache_spec(layer: MLAAttention, vllm_config: VllmConfig) -> KVCacheSpec:
    if not issubclass(layer.attn_backend, SnapMLABackend):
        return _vllms_kv_cache_spec(layer, vllm_config)
    return MLAAttentionSpec(
        block_size=vllm_config.cache_config.block_size,
        num_kv_heads=1,
        head_size=BYTES_PER_TOKEN,
        dtype=torch.uint8,
        cache_dtype_str=vllm_config.cache_config.cache_dtype,
    )


def _context_tokens(layer: MLAAttention) -> int:
    """For which vLLM keeps memory free when it measures how much is left for the cache."""
    if not issubclass(layer.attn_backend, SnapMLABackend):
        return _vllms_context_tokens.fget(layer)
    return SnapMLAMetadataBuilder.determine_chunked_prefill_workspace_size(layer._vllm_config)


_vllms_kv_cache_spec = MLAAttention.get_kv_cache_spec
_vllms_context_tokens = MLAAttention.chunked_prefill_workspace_size
MLAAttention.get_kv_cache_spec = _kv_cache_spec
MLAAttention.chunked_prefill_workspace_size = property(_context_tokens)
