// The functions of kernels/common/ptx.cuh on the CPU.
#pragma once

#include <cmath>

#include <cuda.h>

#include "../simt.h"

namespace snapmla {

inline uint8_t* at(uint32_t address) {
  if (address >= host::kSharedBytes) host::fail("an address outside shared memory");
  return host::shared_base + address;
}
inline uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const uint8_t*>(pointer) - host::shared_base);
}
template <typename T>
T load(uint32_t address) {
  T value;
  if (address % sizeof(T)) host::fail("a load that is not aligned");
  std::memcpy(&value, at(address), sizeof(T));
  return value;
}

inline void mbarrier_init(uint32_t barrier, int count) { host::mbarrier(barrier).init(count); }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t barrier) { host::mbarrier(barrier).arrive(0); }
inline void mbarrier_arrive_expect(uint32_t barrier, int bytes) { host::mbarrier(barrier).arrive(bytes); }
inline void mbarrier_wait(uint32_t barrier, uint32_t parity) { host::mbarrier(barrier).wait(parity); }

inline void named_sync(int barrier, int threads) { host::block->named[barrier].meet(threads); }
inline void named_sync_roles(int barrier, int threads) { host::block->named[barrier].meet(threads); }

// A box into shared memory, in rows of 128 bytes with swizzled 16-byte pieces; zeros outside the tensor.
inline void copy_box(uint32_t destination, const CUtensorMap* map, uint32_t barrier, const std::array<int, 5>& from) {
  const int row_bytes = map->box[0] * map->element_bytes;
  if (row_bytes != 128 || destination % 1024) host::fail("a box that is not in aligned rows of 128 bytes");
  long rows = 1;
  for (int i = 1; i < map->rank; ++i) rows *= map->box[i];
  for (long row = 0; row < rows; ++row) {
    long rest = row;
    bool inside = from[0] >= 0 && uint64_t(from[0]) + map->box[0] <= map->sizes[0];
    const uint8_t* source = map->base + long(from[0]) * map->element_bytes;
    for (int i = 1; i < map->rank; ++i) {
      const long index = from[i] + rest % map->box[i];
      rest /= map->box[i];
      inside = inside && index >= 0 && uint64_t(index) < map->sizes[i];
      source += index * long(map->strides[i - 1]);
    }
    for (int piece = 0; piece < 8; ++piece) {
      const uint32_t address = destination + row * 128 + piece * 16;
      uint8_t* to = at(address ^ (address >> 7 & 7) << 4);
      inside ? std::memcpy(to, source + piece * 16, 16) : std::memset(to, 0, 16);
    }
  }
  host::mbarrier(barrier).complete(rows * 128);
}
inline void tma_load_3d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x, int y, int z) {
  copy_box(destination, map, barrier, {x, y, z, 0, 0});
}
inline void tma_load_5d(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int u, int v) {
  copy_box(destination, map, barrier, {x, y, z, u, v});
}
inline void bulk_load(uint32_t destination, const void* source, int bytes, uint32_t barrier) {
  if (destination % 16 || reinterpret_cast<uintptr_t>(source) % 16) host::fail("a bulk copy that is not aligned");
  std::memcpy(at(destination), source, bytes);
  host::mbarrier(barrier).complete(bytes);
}
inline void fence_async_proxy() {}

inline bool elect_one() { return host::lane() == 0; }
inline uint32_t thread_index() { return threadIdx.x; }
inline void keep_in_lanes(int&) {}
inline uint32_t block_index_y() { return blockIdx.y; }

inline void dependency_wait() {}
inline void dependency_launch() {}
template <int>
void registers_shrink() {}
template <int>
void registers_grow() {}

inline float load_shared_float(uint32_t address) { return load<float>(address); }
inline float2 load_shared_float2(uint32_t address) { return load<float2>(address); }
inline uint2 load_shared_uint2(uint32_t address) { return load<uint2>(address); }
template <typename T>
void store_shared(uint32_t address, T value) {
  if (address % sizeof(T)) host::fail("a store that is not aligned");
  std::memcpy(at(address), &value, sizeof(T));
}

inline uint4 load_matrices_transposed(uint32_t address) {
  const auto rows = host::gather(address);
  const int lane = host::lane();
  uint32_t result[4];
  for (int matrix = 0; matrix < 4; ++matrix) {
    const int first = 8 * matrix + lane % 4 * 2, column = lane / 4 * 2;
    result[matrix] = load<uint16_t>(rows[first] + column) | uint32_t(load<uint16_t>(rows[first + 1] + column)) << 16;
  }
  return {result[0], result[1], result[2], result[3]};
}

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
inline float exp2_approx(float x) { return flush(std::exp2(flush(x))); }
inline float log2_approx(float x) { return std::log2(flush(x)); }

}  // namespace snapmla
