// Probe: what FP8 WGMMA really adds. One warp group runs a chain of m64n64k32 e4m3 instructions into an accumulator of given
// start values; nothing else touches the sums. tests/data/record_fp8_accumulation.py drives it and records its outputs, which
// snapmla/reference/accumulation.py must equal bit by bit.
//
// Build: nvcc -O2 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -Xcompiler -fPIC -shared -o probe.so fp8_accumulation.cu
#include <cstdint>

#include <cuda_runtime.h>

namespace {

constexpr int kTile = 64;       // rows of A, rows of B (columns of the result)
constexpr int kStep = 32;       // e4m3 values that one instruction reduces
constexpr int kPitch = 128;     // bytes of a row in shared memory: the 128-byte swizzle's row
constexpr int kThreads = 128;   // one warp group

// Descriptor of a K-major operand in the 128-byte swizzle: eight rows are 1024 bytes.
__device__ uint64_t descriptor(const void* shared) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(8 * kPitch >> 4) << 32 | uint64_t(1) << 62;
}

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
__device__ void wgmma_m64n64k32(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 1, 1, 1;"
      : FOUR(0), FOUR(4), FOUR(8), FOUR(12), FOUR(16), FOUR(20), FOUR(24), FOUR(28)
      : "l"(a), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
#undef FOUR

// d = c + a b^T; a, b: e4m3 [64, k]; c, d: float32 [64, 64].
__global__ void __launch_bounds__(kThreads) probe(const uint8_t* a, const uint8_t* b, const float* c, float* d, int k) {
  __shared__ __align__(1024) uint8_t tile_a[kTile * kPitch], tile_b[kTile * kPitch];
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  // A thread holds columns 8n + 2 quad + {0, 1} of rows 16 warp + group and that + 8 (PTX ISA, WGMMA accumulator layout).
  auto at = [&](int i) { return (warp * 16 + group + (i & 2) * 4) * kTile + i / 4 * 8 + quad * 2 + (i & 1); };
  float sum[32];
  for (int i = 0; i < 32; ++i) sum[i] = c[at(i)];
  for (int start = 0; start < k; start += kStep) {
    __syncthreads();  // the instruction before has read the tiles
    for (int i = threadIdx.x; i < kTile * kStep; i += kThreads) {
      const int row = i / kStep, column = i % kStep;
      const int offset = row * kPitch + ((column / 16 ^ row % 8) * 16) + column % 16;
      tile_a[offset] = a[size_t(row) * k + start + column];
      tile_b[offset] = b[size_t(row) * k + start + column];
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // ordinary stores, read by the tensor core next
    __syncthreads();
    wgmma_m64n64k32(sum, descriptor(tile_a), descriptor(tile_b));
  }
  for (int i = 0; i < 32; ++i) d[at(i)] = sum[i];
}

}  // namespace

// Device pointers; k a multiple of 32. Returns the CUDA error code.
extern "C" int fp8_accumulation_probe(const void* a, const void* b, const void* c, void* d, int k) {
  probe<<<1, kThreads>>>(static_cast<const uint8_t*>(a), static_cast<const uint8_t*>(b), static_cast<const float*>(c),
                         static_cast<float*>(d), k);
  const cudaError_t launched = cudaGetLastError();
  return launched != cudaSuccess ? launched : cudaDeviceSynchronize();
}
