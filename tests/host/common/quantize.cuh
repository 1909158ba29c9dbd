// What the decode kernel uses of kernels/common/quantize.cuh, on the CPU.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "layout.cuh"

namespace snapmla {

constexpr int kWarp = 32;

inline float bf16_value(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}
inline uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) return 0x7FFF;
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline uint32_t float2_to_bf16x2(float a, float b) { return to_bf16(a) | uint32_t(to_bf16(b)) << 16; }

inline float decoded_e4m3(uint32_t byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  if (exponent == 15 && fraction == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude = exponent ? std::ldexp(1.f + fraction / 8.f, exponent - 7) : std::ldexp(fraction / 8.f, -6);
  return byte & 0x80 ? -magnitude : magnitude;
}
inline float e4m3_value(uint8_t byte) {
  static const auto values = [] {
    std::array<float, 256> all;
    for (uint32_t i = 0; i < 256; ++i) all[i] = decoded_e4m3(i);
    return all;
  }();
  return values[byte];
}
// To nearest even, saturating.
inline uint32_t to_e4m3(float x) {
  if (x != x) return 0x7F;
  const uint32_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fmin(std::fabs(x), 448.f);
  int exponent;
  std::frexp(magnitude, &exponent);
  const float unit = std::ldexp(1.f, std::max(exponent - 4, -9));  // of the last place
  const float rounded = std::fmin(std::nearbyint(magnitude / unit) * unit, 448.f);
  std::frexp(rounded, &exponent);
  if (rounded < 0x1p-6f) return sign | uint32_t(rounded * 512);
  return sign | uint32_t(exponent + 6) << 3 | (uint32_t(std::ldexp(rounded, 4 - exponent)) & 7);
}
inline uint32_t e4m3x4(float a, float b, float c, float d) {
  return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;
}

}  // namespace snapmla
