// The tensor core instructions of the decode kernel (WGMMA of sm_90a). A warp group multiplies A [64, k] by B [n, k]^T (both
// K-major) into float32 accumulators; thread t of the group holds D[16 (t / 32) + t % 32 / 4 + 8 i][8 j + 2 (t % 4) + l] in
// d[4 j + 2 i + l]. FP8 accumulators keep 13 fraction bits (snapmla/reference/accumulation.py).
//
// `_zero` variants start an accumulation: they overwrite d, so that nothing needs to be cleared.
#pragma once

#include <cstdint>

#include "descriptor.cuh"

namespace snapmla {

// Before the first WGMMA that reads registers the thread has written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from reading accumulators before the wait that precedes this.
template <int kCount>
__device__ __forceinline__ void wgmma_results(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define SNAPMLA_16(c) \
  c(d[0]), c(d[1]), c(d[2]), c(d[3]), c(d[4]), c(d[5]), c(d[6]), c(d[7]), \
  c(d[8]), c(d[9]), c(d[10]), c(d[11]), c(d[12]), c(d[13]), c(d[14]), c(d[15])
#define SNAPMLA_32(c) \
  c(d[0]), c(d[1]), c(d[2]), c(d[3]), c(d[4]), c(d[5]), c(d[6]), c(d[7]), \
  c(d[8]), c(d[9]), c(d[10]), c(d[11]), c(d[12]), c(d[13]), c(d[14]), c(d[15]), \
  c(d[16]), c(d[17]), c(d[18]), c(d[19]), c(d[20]), c(d[21]), c(d[22]), c(d[23]), \
  c(d[24]), c(d[25]), c(d[26]), c(d[27]), c(d[28]), c(d[29]), c(d[30]), c(d[31])

// The same accumulators in the instruction, and a false predicate for its scale-d.
#define SNAPMLA_LIST_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
#define SNAPMLA_LIST_32 \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define SNAPMLA_FALSE_P "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"

#define SNAPMLA_OUT(x) "=f"(x)
#define SNAPMLA_INOUT(x) "+f"(x)

// d [64, 64] = A [64, 32] B [64, 32]^T in e4m3, both from shared memory.
__device__ __forceinline__ void wgmma_e4m3_n64_zero(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile(
      SNAPMLA_FALSE_P
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SNAPMLA_LIST_32
      "%32, %33, p, 1, 1;\n}"
      : SNAPMLA_32(SNAPMLA_OUT)
      : "l"(a), "l"(b));
}

// d [64, 64] += A [64, 32] B [64, 32]^T in e4m3, both from shared memory.
__device__ __forceinline__ void wgmma_e4m3_n64(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SNAPMLA_LIST_32
      "%32, %33, 1, 1, 1;"
      : SNAPMLA_32(SNAPMLA_INOUT)
      : "l"(a), "l"(b));
}

// d [64, 64] += A [64, 16] B [64, 16]^T in BF16, both from shared memory.
__device__ __forceinline__ void wgmma_bf16_n64(float (&d)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " SNAPMLA_LIST_32
      "%32, %33, 1, 1, 1, 0, 0;"
      : SNAPMLA_32(SNAPMLA_INOUT)
      : "l"(a), "l"(b));
}

// d [64, 32] = A [64, 32] B [32, 32]^T in e4m3, A from registers: rows t % 32 / 4 (a[0], a[2]) and + 8 (a[1], a[3]) of the
// warp's 16, columns 4 (t % 4) … + 3 (a[0], a[1]) and + 16 (a[2], a[3]).
__device__ __forceinline__ void wgmma_e4m3_zero(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      SNAPMLA_FALSE_P
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 " SNAPMLA_LIST_16
      "{%16, %17, %18, %19}, %20, p, 1, 1;\n}"
      : SNAPMLA_16(SNAPMLA_OUT)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d [64, 32] += A [64, 32] B [32, 32]^T in e4m3, A from registers.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 " SNAPMLA_LIST_16
      "{%16, %17, %18, %19}, %20, 1, 1, 1;"
      : SNAPMLA_16(SNAPMLA_INOUT)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d [64, 64] = A [64, 32] B [64, 32]^T in e4m3, A from registers as above.
__device__ __forceinline__ void wgmma_e4m3_zero(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      SNAPMLA_FALSE_P
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SNAPMLA_LIST_32
      "{%32, %33, %34, %35}, %36, p, 1, 1;\n}"
      : SNAPMLA_32(SNAPMLA_OUT)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d [64, 64] += A [64, 32] B [64, 32]^T in e4m3, A from registers as above.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " SNAPMLA_LIST_32
      "{%32, %33, %34, %35}, %36, 1, 1, 1;"
      : SNAPMLA_32(SNAPMLA_INOUT)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef SNAPMLA_16
#undef SNAPMLA_32
#undef SNAPMLA_LIST_16
#undef SNAPMLA_LIST_32
#undef SNAPMLA_FALSE_P
#undef SNAPMLA_OUT
#undef SNAPMLA_INOUT

}  // namespace snapmla
