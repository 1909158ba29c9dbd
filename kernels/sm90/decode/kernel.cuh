// The decode kernel: a row tile (blockIdx.x) of one part of the work (blockIdx.y). Design and roofline: README.md.
#pragma once

#include "softmax.cuh"
#include "value.cuh"

namespace snapmla::decode {

// One for each thing that the copy engine reads; dimensions from the fastest.
struct TensorMaps {
  CUtensorMap q_content, q_rope;  // [512, rows, batch] e4m3 and [64, rows, batch] BF16
  CUtensorMap k_content, k_rope;  // [512, 64, pages] e4m3 and [64, 64, pages] BF16
};

__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Storage& storage = *reinterpret_cast<Storage*>(memory);
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0);
  const int tile = blockIdx.x, part = blockIdx.y;

  if (threadIdx.x == 0) {
    constexpr int kValueWarps = kValueGroups * kGroupWarps;
    mbarrier_init(shared_address(&storage.query_full), 1);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(shared_address(&storage.key_full[stage]), kGroupWarps);
      mbarrier_init(shared_address(&storage.key_empty[stage]), kValueWarps);
      mbarrier_init(shared_address(&storage.p_full[stage]), kGroupWarps);
      mbarrier_init(shared_address(&storage.p_empty[stage]), kValueWarps);
    }
    mbarrier_init(shared_address(&storage.sum_full), kGroupWarps);
    mbarrier_init(shared_address(&storage.sum_empty), kValueWarps);
    mbarrier_init_fence();
  }
  dependency_launch();
  dependency_wait();  // for the schedule, the queries and the cache
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) storage.boundaries[i] = p.boundaries[part + i];
  }
  __syncthreads();

  if (group < kSoftmaxGroups) {
    registers_shrink<kSoftmaxRegisters>();
    if (group == 0) {
      softmax_role<0>(storage, &maps.q_content, &maps.q_rope, p, tile, part);
    } else {
      softmax_role<1>(storage, &maps.q_content, &maps.q_rope, p, tile, part);
    }
  } else {
    registers_grow<kValueRegisters>();
    value_role(storage, &maps.k_content, &maps.k_rope, p, group - kSoftmaxGroups, tile, part);
  }
}

}  // namespace snapmla::decode
