// How WGMMA is told where its operands lie.
#pragma once

#include <cstdint>

namespace snapmla {

// Descriptors of K-major operands in shared memory. Rows lie as the copy engine's swizzle leaves them, eight rows an atom, atoms
// `atom_bytes` apart; a step along K adds its bytes / 16 to the descriptor.
__device__ __forceinline__ uint64_t descriptor(uint32_t address, uint64_t atom_bytes, uint64_t swizzle) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1) << 16 | (atom_bytes >> 4) << 32 | swizzle << 62;
}
__device__ __forceinline__ uint64_t descriptor_swizzle_128(uint32_t address, uint64_t atom_bytes = 8 * 128) {
  return descriptor(address, atom_bytes, 1);
}
__device__ __forceinline__ uint64_t descriptor_swizzle_64(uint32_t address) { return descriptor(address, 8 * 64, 2); }

}  // namespace snapmla
