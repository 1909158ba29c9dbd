// The functions of kernels/common/wgmma.cuh on the CPU: products in float32, without the tensor cores' truncation.
#pragma once

#include "descriptor.cuh"
#include "ptx.cuh"
#include "quantize.cuh"

namespace snapmla {

inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int>
void wgmma_wait() {}
template <int kCount>
void wgmma_results(float (&)[kCount]) {}

struct Operand {  // K-major, in shared memory
  uint32_t start, atom_bytes, row_bytes, pieces;
  explicit Operand(uint64_t descriptor)
      : start(descriptor << 4 & 0x3FFFF), atom_bytes((descriptor >> 32 & 0x3FFF) << 4), row_bytes(descriptor >> 62 == 1 ? 128 : 64),
        pieces(row_bytes / 16) {}
  const uint8_t* at(int row, int byte) const {
    const uint32_t address = start + row / 8 * atom_bytes + row % 8 * row_bytes + byte;
    return snapmla::at(address ^ (address >> 7 & (pieces - 1)) << 4);
  }
};

// d[4 j + 2 i + l] of thread t is D[16 (t / 32) + t % 32 / 4 + 8 i][8 j + 2 (t % 4) + l]; a(row, k) and b(column, k).
template <int kCount, typename A, typename B>
void accumulate(float (&d)[kCount], bool zero, int steps, const A& a, const B& b) {
  const int thread = threadIdx.x % 128;
  for (int i = 0; i < kCount; ++i) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < steps; ++k) sum += double(a(row, k)) * double(b(column, k));
    d[i] = (zero ? 0.f : d[i]) + float(sum);
  }
}
inline void both_shared_e4m3(float (&d)[32], uint64_t a, uint64_t b, bool zero) {
  host::group().meet.arrive_and_wait();
  const Operand x(a), y(b);
  accumulate(d, zero, 32, [&](int row, int k) { return e4m3_value(*x.at(row, k)); },
             [&](int column, int k) { return e4m3_value(*y.at(column, k)); });
}
inline void wgmma_e4m3_n64_zero(float (&d)[32], uint64_t a, uint64_t b) { both_shared_e4m3(d, a, b, true); }
inline void wgmma_e4m3_n64(float (&d)[32], uint64_t a, uint64_t b) { both_shared_e4m3(d, a, b, false); }
inline void wgmma_bf16_n64(float (&d)[32], uint64_t a, uint64_t b) {
  host::group().meet.arrive_and_wait();
  const Operand x(a), y(b);
  accumulate(d, false, 16, [&](int row, int k) { return bf16_value(*reinterpret_cast<const uint16_t*>(x.at(row, 2 * k))); },
             [&](int column, int k) { return bf16_value(*reinterpret_cast<const uint16_t*>(y.at(column, 2 * k))); });
}

// A [64, 32] from registers: rows t % 32 / 4 (a[0], a[2]) and + 8 (a[1], a[3]) of the warp's 16, columns 4 (t % 4) … (a[0], a[1]) and + 16.
template <int kCount>
void from_registers(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, bool zero) {
  host::WarpGroup& group = host::group();
  std::memcpy(group.a[threadIdx.x % 128], a, sizeof(a));
  group.meet.arrive_and_wait();
  const Operand y(b);
  accumulate(d, zero, 32,
             [&](int row, int k) {
               const uint32_t fragment = group.a[row / 16 * 32 + row % 8 * 4 + k % 16 / 4][row % 16 / 8 + k / 16 * 2];
               return e4m3_value(fragment >> 8 * (k % 4) & 0xFF);
             },
             [&](int column, int k) { return e4m3_value(*y.at(column, k)); });
  group.meet.arrive_and_wait();
}
template <int kCount>
void wgmma_e4m3_zero(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) {
  from_registers(d, a, b, true);
}
template <int kCount>
void wgmma_e4m3(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b) {
  from_registers(d, a, b, false);
}

}  // namespace snapmla
