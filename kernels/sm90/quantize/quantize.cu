// Fused-Q-Quant and Fused-K-Append: a warp for each row of 576 values. Both are bound by memory: 1152 bytes in and 644 out
// for each row, 18 divisions a lane hidden behind them.
#include "../../common/quantize.cuh"
#include "../../snapmla.h"

namespace snapmla {
namespace {

constexpr int kWarpsPerBlock = 8;

__device__ int64_t global_warp() { return int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp; }

struct QuantizeQ {
  const __nv_bfloat16* content;  // [tokens, heads, 512]
  int64_t content_token_stride, content_head_stride;
  const __nv_bfloat16* rope;  // [tokens, heads, 64]
  int64_t rope_token_stride, rope_head_stride;
  uint8_t* out_content;      // [tokens, heads, 512] e4m3
  __nv_bfloat16* out_rope;   // [tokens, heads, 64]
  float* out_scale;          // [tokens, heads]
  int64_t rows, heads;
};

__global__ void __launch_bounds__(kWarpsPerBlock* kWarp) quantize_q_kernel(const QuantizeQ p) {
  const int64_t row = global_warp();
  if (row >= p.rows) return;
  const int64_t token = row / p.heads, head = row % p.heads;
  const int lane = threadIdx.x % kWarp;
  Row values;
  values.load(p.content + token * p.content_token_stride + head * p.content_head_stride,
              p.rope + token * p.rope_token_stride + head * p.rope_head_stride, lane);
  const float scale = values.scale();
  values.store(p.out_content + row * kKvLoraRank, p.out_rope + row * kQkRopeHeadDim, scale, lane);
  if (lane == 0) p.out_scale[row] = scale;
}

template <typename Slot>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    append_kv_kernel(const __nv_bfloat16* content, int64_t content_stride, const __nv_bfloat16* rope, int64_t rope_stride,
                     const Slot* slots, int64_t tokens, const snapmla_cache cache) {
  const int64_t token = global_warp();
  if (token >= tokens) return;
  const int64_t slot = slots[token];
  if (slot < 0 || slot >= cache.pages * kPageSize) return;
  const int64_t page = slot / kPageSize, offset = slot % kPageSize;
  const int lane = threadIdx.x % kWarp;
  Row values;
  values.load(content + token * content_stride, rope + token * rope_stride, lane);
  const float scale = values.scale();
  values.store(static_cast<uint8_t*>(cache.content) + page * cache.content_stride + offset * kKvLoraRank,
               static_cast<__nv_bfloat16*>(cache.rope) + page * cache.rope_stride + offset * kQkRopeHeadDim, scale, lane);
  if (lane == 0) static_cast<float*>(cache.scale)[page * cache.scale_stride + offset] = scale;
}

unsigned blocks(int64_t rows) { return unsigned((rows + kWarpsPerBlock - 1) / kWarpsPerBlock); }

}  // namespace
}  // namespace snapmla

int snapmla_quantize_q(const void* content, int64_t content_token_stride, int64_t content_head_stride, const void* rope,
                       int64_t rope_token_stride, int64_t rope_head_stride, void* out_content, void* out_rope,
                       void* out_scale, int64_t tokens, int64_t heads, void* stream) {
  using namespace snapmla;
  const QuantizeQ p{static_cast<const __nv_bfloat16*>(content),
                    content_token_stride,
                    content_head_stride,
                    static_cast<const __nv_bfloat16*>(rope),
                    rope_token_stride,
                    rope_head_stride,
                    static_cast<uint8_t*>(out_content),
                    static_cast<__nv_bfloat16*>(out_rope),
                    static_cast<float*>(out_scale),
                    tokens * heads,
                    heads};
  if (p.rows == 0) return cudaSuccess;
  quantize_q_kernel<<<blocks(p.rows), kWarpsPerBlock * kWarp, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

int snapmla_append_kv(const void* content, int64_t content_stride, const void* rope, int64_t rope_stride, const void* slots,
                      int slots_are_int32, int64_t tokens, snapmla_cache cache, void* stream) {
  using namespace snapmla;
  if (tokens == 0) return cudaSuccess;
  const auto launch = [&](auto* typed_slots) {
    append_kv_kernel<<<blocks(tokens), kWarpsPerBlock * kWarp, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<const __nv_bfloat16*>(content), content_stride, static_cast<const __nv_bfloat16*>(rope), rope_stride,
        typed_slots, tokens, cache);
  };
  if (slots_are_int32) {
    launch(static_cast<const int32_t*>(slots));
  } else {
    launch(static_cast<const int64_t*>(slots));
  }
  return cudaGetLastError();
}
