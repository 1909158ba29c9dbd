// The decode kernel: a row tile (blockIdx.x) of one part of the work (blockIdx.y). Design and roofline: README.md.
#pragma once

#include "softmax.cuh"
#include "value.cuh"

namespace snapmla::decode {

// kHalves: halves of the row tile that are computed.
template <int kHalves>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ TensorMaps maps, const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Storage& storage = *reinterpret_cast<Storage*>(memory);
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0);
  const int tile = blockIdx.x, part = blockIdx.y;

  if (threadIdx.x == 0) {
    constexpr int kValueWarps = kValueGroups * kGroupWarps;
    mbarrier_init(shared_address(&storage.query_full), 1);
    for (int stage = 0; stage < kStages; ++stage) {
      for (int page = 0; page < kBlockPages; ++page) mbarrier_init(shared_address(&storage.key_full[stage][page]), 1);
      mbarrier_init(shared_address(&storage.p_full[stage]), kSoftmaxGroups * kGroupWarps / 2 * kHalves);
      mbarrier_init(shared_address(&storage.key_empty[stage]), kValueWarps);
      mbarrier_init(shared_address(&storage.p_empty[stage]), kValueWarps);
    }
    mbarrier_init(shared_address(&storage.sum_full), kGroupWarps);
    mbarrier_init(shared_address(&storage.sum_empty), kValueWarps);
    mbarrier_init_fence();
  }
  dependency_wait();    // for the schedule, the queries and the cache
  dependency_launch();  // only now: the combination may then read the schedule at once
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) storage.boundaries[i] = p.boundaries[part + i];
  }
  __syncthreads();

  if (group < kSoftmaxGroups) {
    registers_shrink<kSoftmaxRegisters<kHalves>>();
    if (group == 0) {
      softmax_role<kHalves, 0>(storage, maps, p, tile);
    } else {
      softmax_role<kHalves, 1>(storage, maps, p, tile);
    }
  } else {
    registers_grow<kValueRegisters<kHalves>>();
    value_role<kHalves>(storage, maps, p, group - kSoftmaxGroups, tile);
  }
}

}  // namespace snapmla::decode
