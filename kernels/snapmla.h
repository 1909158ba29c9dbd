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

// Fused-Fetch-Dequant. out bfloat16 [tokens, 576], contiguous: zeros for a slot that is negative or past the capacity.
SNAPMLA_API int snapmla_fetch_kv(snapmla_cache cache, const void* slots, int slots_are_int32, int64_t tokens, void* out, void* stream);
}
