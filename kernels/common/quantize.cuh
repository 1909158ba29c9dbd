// The quantization rule on the device: the same bytes as snapmla/quantization.py, value by value.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "layout.cuh"

namespace snapmla {

constexpr float kE4m3Max = 448.f;
constexpr float kScaleFloor = 0x1p-40f;
constexpr int kWarp = 32;

// Maximum that keeps a NaN, unlike fmaxf.
__device__ inline float max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

// S = max(amax / 448, 2^-40); NaN for a row with a NaN or an infinity. IEEE division, as on the CPU.
__device__ inline float scale_from_amax(float amax) {
  return isfinite(amax) ? fmaxf(__fdiv_rn(amax, kE4m3Max), kScaleFloor) : __int_as_float(0x7FC00000);
}

// Two values to e4m3, to nearest even, saturating; a in the low byte.
__device__ inline uint32_t e4m3x2(float a, float b) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(b), "f"(a));
  return packed;
}

__device__ inline uint32_t e4m3x4(float a, float b, float c, float d) { return e4m3x2(a, b) | e4m3x2(c, d) << 16; }

__device__ inline float2 bf16x2_to_float2(uint32_t packed) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(packed));
}

__device__ inline uint32_t float2_to_bf16x2(float a, float b) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(a, b);
  return reinterpret_cast<const uint32_t&>(packed);
}

// One row (content [512], rope [64], BF16) held by a warp. Lane l holds content 8l … 8l + 7 and 256 + 8l … 256 + 8l + 7, so
// that loads are 16 bytes and stores 8 bytes a lane, coalesced; and RoPE 2l, 2l + 1.
struct Row {
  uint4 content[2];
  uint32_t rope;

  __device__ void load(const __nv_bfloat16* content_row, const __nv_bfloat16* rope_row, int lane) {
    content[0] = __ldg(reinterpret_cast<const uint4*>(content_row) + lane);
    content[1] = __ldg(reinterpret_cast<const uint4*>(content_row) + kWarp + lane);
    rope = __ldg(reinterpret_cast<const uint32_t*>(rope_row) + lane);
  }

  // RMSNorm of the content, in the two roundings to BF16 that engines have: of the normalized value, and of its product with
  // the weight. Squares are summed in float64, so that no order of summation shows.
  __device__ void normalize(const __nv_bfloat16* weight, float epsilon, int lane) {
    double squares = 0.;
    for (const uint4& piece : content) {
      for (const uint32_t pair : {piece.x, piece.y, piece.z, piece.w}) {
        const float2 value = bf16x2_to_float2(pair);
        squares += double(value.x) * value.x + double(value.y) * value.y;
      }
    }
    for (int other = kWarp / 2; other > 0; other /= 2) squares += __shfl_xor_sync(~0u, squares, other);
    const float inverse = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(float(squares / kKvLoraRank), epsilon)));
    for (int half = 0; half < 2; ++half) {
      const uint4 w = __ldg(reinterpret_cast<const uint4*>(weight) + half * kWarp + lane);
      const auto scaled = [inverse](uint32_t value, uint32_t by) {
        const float2 v = bf16x2_to_float2(value), b = bf16x2_to_float2(by);
        const float2 normalized = bf16x2_to_float2(float2_to_bf16x2(v.x * inverse, v.y * inverse));
        return float2_to_bf16x2(normalized.x * b.x, normalized.y * b.y);
      };
      uint4& c = content[half];
      c = make_uint4(scaled(c.x, w.x), scaled(c.y, w.y), scaled(c.z, w.z), scaled(c.w, w.w));
    }
  }

  // Rotary embedding of the RoPE part: of the pairs 2 i, 2 i + 1 (interleaved) or i, i + 32, by the angle with cosine
  // cos_sin[i] and sine cos_sin[32 + i]; one rounding to BF16.
  template <typename Angle>
  __device__ void rotate(const Angle* cos_sin, bool interleaved, int lane) {
    constexpr int kPairs = kQkRopeHeadDim / 2;
    // No fused multiply-add: on the CPU there is none.
    const auto turn = [cos_sin](int pair, float x, float y) {
      return __fadd_rn(__fmul_rn(x, float(cos_sin[pair])), __fmul_rn(y, float(cos_sin[kPairs + pair])));
    };
    const float2 value = bf16x2_to_float2(rope);
    if (interleaved) {
      rope = float2_to_bf16x2(turn(lane, value.x, -value.y), turn(lane, value.y, value.x));
    } else {
      const uint32_t partner_pair = __shfl_xor_sync(~0u, rope, kWarp / 2);
      const float2 partner = bf16x2_to_float2(partner_pair);
      const float sign = lane < kWarp / 2 ? -1.f : 1.f;
      const int pair = 2 * (lane % (kWarp / 2));
      rope = float2_to_bf16x2(turn(pair, value.x, sign * partner.x), turn(pair + 1, value.y, sign * partner.y));
    }
  }

  // The content's scale, the same in all lanes.
  __device__ float scale() const {
    float amax = 0.f;
    for (const uint4& piece : content) {
      for (const uint32_t pair : {piece.x, piece.y, piece.z, piece.w}) {
        const float2 value = bf16x2_to_float2(pair);
        amax = max_nan(amax, max_nan(fabsf(value.x), fabsf(value.y)));
      }
    }
    for (int other = kWarp / 2; other > 0; other /= 2) amax = max_nan(amax, __shfl_xor_sync(~0u, amax, other));
    return scale_from_amax(amax);
  }

  // e4m3(content / scale) and bfloat16(rope / scale) (Eq 6).
  __device__ void store(uint8_t* content_row, __nv_bfloat16* rope_row, float scale, int lane) const {
    for (int half = 0; half < 2; ++half) {
      const float2 a = bf16x2_to_float2(content[half].x), b = bf16x2_to_float2(content[half].y);
      const float2 c = bf16x2_to_float2(content[half].z), d = bf16x2_to_float2(content[half].w);
      const auto by = [scale](float x) { return __fdiv_rn(x, scale); };
      reinterpret_cast<uint2*>(content_row)[half * kWarp + lane] =
          make_uint2(e4m3x4(by(a.x), by(a.y), by(b.x), by(b.y)), e4m3x4(by(c.x), by(c.y), by(d.x), by(d.y)));
    }
    const float2 r = bf16x2_to_float2(rope);
    reinterpret_cast<uint32_t*>(rope_row)[lane] = float2_to_bf16x2(__fdiv_rn(r.x, scale), __fdiv_rn(r.y, scale));
  }
};

}  // namespace snapmla
