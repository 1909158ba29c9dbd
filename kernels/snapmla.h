// C interface of the kernels. Pointers are device pointers; every function launches on `stream` (a cudaStream_t), returns
// without waiting, allocates nothing, and gives the CUDA error code of the launch (0: none). Strides are in elements of their
// tensor, offsets 64 bits wide. Content rows must be 16-byte aligned, RoPE rows 4-byte aligned.
#pragma once

#include <cstdint>

#define SNAPMLA_API __attribute__((visibility("default")))

extern "C" {

// A paged cache: content e4m3 [pages, 64, 512], rope bfloat16 [pages, 64, 64], scale float32 [pages, 64]; a page is
// contiguous in each plane, pages are `*_stride` elements apart.
struct snapmla_cache {
  void* content;
  void* rope;
  void* scale;
  int64_t content_stride, rope_stride, scale_stride;
  int64_t pages;
};

// Fused-Q-Quant. content bfloat16 [tokens, heads, 512] and rope bfloat16 [tokens, heads, 64] by their strides;
// out_content e4m3 [tokens, heads, 512], out_rope bfloat16 [tokens, heads, 64], out_scale float32 [tokens, heads], contiguous.
SNAPMLA_API int snapmla_quantize_q(const void* content, int64_t content_token_stride, int64_t content_head_stride, const void* rope,
                       int64_t rope_token_stride, int64_t rope_head_stride, void* out_content, void* out_rope,
                       void* out_scale, int64_t tokens, int64_t heads, void* stream);

// Fused-K-Append. content bfloat16 [tokens, 512], rope bfloat16 [tokens, 64] by their row strides; slots int64 (or int32, if
// slots_are_int32) [tokens]. A slot that is negative or past the capacity is skipped.
SNAPMLA_API int snapmla_append_kv(const void* content, int64_t content_stride, const void* rope, int64_t rope_stride, const void* slots,
                      int slots_are_int32, int64_t tokens, snapmla_cache cache, void* stream);

// What an engine does to a token before it is cached: RMSNorm of the content (weight bfloat16 [512]) and rotary embedding of the
// RoPE part (cos_sin bfloat16 or float32 [.., 64], 32 cosines and 32 sines for each position; positions int64 or int32 [tokens];
// interleaved: pairs 2 i, 2 i + 1, otherwise i, i + 32).
struct snapmla_norm_rope {
  const void* weight;
  const void* cos_sin;
  const void* positions;
  int cos_sin_is_float32, positions_are_int32, interleaved;
  float epsilon;
};

// The same after both, from content and rope as the projection leaves them. weight must be 16-byte aligned.
SNAPMLA_API int snapmla_norm_rope_append_kv(const void* content, int64_t content_stride, const void* rope, int64_t rope_stride,
                       snapmla_norm_rope norm_rope, const void* slots, int slots_are_int32, int64_t tokens,
                       snapmla_cache cache, void* stream);

// Fused-Fetch-Dequant. out bfloat16 [tokens, 576], contiguous: zeros for a slot that is negative or past the capacity.
SNAPMLA_API int snapmla_fetch_kv(snapmla_cache cache, const void* slots, int slots_are_int32, int64_t tokens, void* out, void* stream);

// Queries of a decode call, contiguous: content e4m3 [batch, s_q, heads, 512], rope bfloat16 [batch, s_q, heads, 64] divided by
// the scale, scale float32 [batch, s_q, heads].
struct snapmla_query {
  const void* content;
  const void* rope;
  const void* scale;
  int64_t s_q, heads;
};

// Sequences of a decode call: block_table int32 [size, max_pages] by its row stride, cache_seqlens int32 [size].
struct snapmla_batch {
  const void* block_table;
  const void* cache_seqlens;
  int64_t size, max_pages, block_table_stride;
};

// How a decode call is split over thread blocks: boundaries int32 [parts + 1, 2] of snapmla_decode_schedule; and room for the
// parts' results, partial_out float32 [row tiles, 2 parts, 64, 512] and partial_lse float32 [row tiles, 2 parts, 64], where
// row tiles = s_q heads / 64, rounded up.
struct snapmla_split {
  const void* boundaries;
  void* partial_out;
  void* partial_lse;
  int64_t parts;
};

// Tile scheduler metadata: cuts the sequences' key blocks into `parts` of like cost.
SNAPMLA_API int snapmla_decode_schedule(const void* cache_seqlens, int64_t batch, int64_t max_pages, int64_t parts, void* boundaries,
                       void* stream);

// Decode attention and the combination of its parts. out bfloat16 [batch, s_q, heads, 512] and lse float32 [batch, heads, s_q],
// contiguous. Planes of the cache and their page strides must be multiples of 16 bytes.
SNAPMLA_API int snapmla_mla_decode(snapmla_query query, snapmla_cache cache, snapmla_batch batch, snapmla_split split,
                       double softmax_scale, int causal, void* out, void* lse, void* stream);
}
