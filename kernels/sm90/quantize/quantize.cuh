// Fused-Q-Quant and Fused-K-Append: a warp for each row of 576 values. Both are bound by memory: 1152 bytes in and 644 out
// for each row, 18 divisions a lane hidden behind them.
#pragma once

#include "../../common/quantize.cuh"
#include "../../snapmla.h"

namespace snapmla::quantize {

constexpr int kWarpsPerBlock = 8;

__device__ inline int64_t global_warp() { return int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp; }

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

// What happens to a token before it is quantized: nothing.
struct AsItIs {
  __device__ void apply(Row&, int64_t, int) const {}
};

// RMSNorm of the content and rotary embedding of the RoPE part: what an engine has in hand is before both.
template <typename Angle, typename Position>
struct NormAndRope {
  const __nv_bfloat16* weight;  // [512]
  const Angle* cos_sin;         // [positions, 64]: 32 cosines, 32 sines
  const Position* positions;    // [tokens]
  float epsilon;
  bool interleaved;

  __device__ void apply(Row& row, int64_t token, int lane) const {
    row.normalize(weight, epsilon, lane);
    row.rotate(cos_sin + int64_t(positions[token]) * kQkRopeHeadDim, interleaved, lane);
  }
};

struct Tokens {
  const __nv_bfloat16* content;  // [tokens, 512]
  int64_t content_stride;
  const __nv_bfloat16* rope;  // [tokens, 64]
  int64_t rope_stride;
  int64_t count;
};

template <typename Slot, typename Before>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    append_kv_kernel(const Tokens tokens, const Before before, const Slot* slots, const snapmla_cache cache) {
  const int64_t token = global_warp();
  if (token >= tokens.count) return;
  const int64_t slot = slots[token];
  if (slot < 0 || slot >= cache.pages * kPageSize) return;
  const int64_t page = slot / kPageSize, offset = slot % kPageSize;
  const int lane = threadIdx.x % kWarp;
  Row values;
  values.load(tokens.content + token * tokens.content_stride, tokens.rope + token * tokens.rope_stride, lane);
  before.apply(values, token, lane);
  const float scale = values.scale();
  values.store(static_cast<uint8_t*>(cache.content) + page * cache.content_stride + offset * kKvLoraRank,
               static_cast<__nv_bfloat16*>(cache.rope) + page * cache.rope_stride + offset * kQkRopeHeadDim, scale, lane);
  if (lane == 0) static_cast<float*>(cache.scale)[page * cache.scale_stride + offset] = scale;
}

}  // namespace snapmla::quantize
