// Fused-Fetch-Dequant: a warp for each slot, dequantized in registers. Bound by memory: 644 bytes in and 1152 out.
#pragma once

#include "../../common/quantize.cuh"
#include "../../snapmla.h"

namespace snapmla::fetch {

constexpr int kWarpsPerBlock = 8;

// Two e4m3 values times the scale, rounded once, to BF16.
__device__ inline uint32_t dequantize_pair(uint32_t two_e4m3, float scale) {
  uint32_t halves;  // every e4m3 value is a half value
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(two_e4m3)));
  const float2 value = __half22float2(reinterpret_cast<const __half2&>(halves));
  return float2_to_bf16x2(value.x * scale, value.y * scale);
}

__device__ inline uint4 dequantize_eight(uint2 e4m3, float scale) {
  return make_uint4(dequantize_pair(e4m3.x, scale), dequantize_pair(e4m3.x >> 16, scale), dequantize_pair(e4m3.y, scale),
                    dequantize_pair(e4m3.y >> 16, scale));
}

template <typename Slot>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    fetch_kv_kernel(const snapmla_cache cache, const Slot* slots, int64_t tokens, __nv_bfloat16* out) {
  const int64_t token = int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
  if (token >= tokens) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t slot = slots[token];
  uint4 content[2] = {};
  uint32_t rope = 0;
  if (slot >= 0 && slot < cache.pages * kPageSize) {
    const int64_t page = slot / kPageSize, offset = slot % kPageSize;
    const auto* content_row = reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(cache.content) +
                                                             page * cache.content_stride + offset * kKvLoraRank);
    const auto* rope_row = reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(cache.rope) +
                                                             page * cache.rope_stride + offset * kQkRopeHeadDim);
    const float scale = static_cast<const float*>(cache.scale)[page * cache.scale_stride + offset];
    content[0] = dequantize_eight(content_row[lane], scale);
    content[1] = dequantize_eight(content_row[kWarp + lane], scale);
    const float2 r = bf16x2_to_float2(rope_row[lane]);
    rope = float2_to_bf16x2(r.x * scale, r.y * scale);
  }
  __nv_bfloat16* row = out + token * kQkHeadDim;
  reinterpret_cast<uint4*>(row)[lane] = content[0];
  reinterpret_cast<uint4*>(row)[kWarp + lane] = content[1];
  reinterpret_cast<uint32_t*>(row + kKvLoraRank)[lane] = rope;
}

}  // namespace snapmla::fetch
