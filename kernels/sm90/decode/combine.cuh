// Joins the parts of sequences that were split: out = sum of w_i out_i with w_i = 2^(lse_i - lse), parts in order.
#pragma once

#include "../../common/ptx.cuh"
#include "../../common/quantize.cuh"
#include "params.cuh"

namespace snapmla::decode {

constexpr int kCombineThreads = kKvLoraRank / 4;  // of a group: four columns each
constexpr int kInFlight = 8;                      // parts whose values a group loads together
constexpr int kManyGroups = 4;                    // where sequences have many parts, for which see decode.cu

// The cuts of a sequence, the first and the last part that begin inside it: found by all threads together, since one after another
// the boundaries would cost a trip to memory each. {parts, 0} where there is none.
struct Cuts {
  int first, last;
};
template <int kThreads>
__device__ __forceinline__ Cuts cuts_of(const Params& p, int sequence) {
  __shared__ Cuts found;
  if (threadIdx.x == 0) found = {p.parts, 0};
  __syncthreads();
  const int blocks = blocks_of(p.length(sequence));
  for (int part = 1 + threadIdx.x; part < p.parts; part += kThreads) {
    const Boundary begin = p.boundaries[part];
    if (begin.sequence != sequence || begin.block == 0 || begin.block >= blocks) continue;
    atomicMin(&found.first, part);
    atomicMax(&found.last, part);
  }
  __syncthreads();
  return found;
}

// The largest value of a thread block.
template <int kThreads>
__device__ __forceinline__ float block_max(float x) {
  __shared__ float warp_max[kThreads / kWarp];
  for (int other = kWarp / 2; other > 0; other /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, other));
  if (threadIdx.x % kWarp == 0) warp_max[threadIdx.x / kWarp] = x;
  __syncthreads();
  for (const float y : warp_max) x = fmaxf(x, y);
  return x;
}

// A row (blockIdx.x) of a sequence, if it was cut: sequence blockIdx.y, or, where there are more sequences than parts, the one that
// part blockIdx.y begins and does not finish.
// Groups of threads take parts in turns.
template <int kGroups>
__global__ void __launch_bounds__(kGroups * kCombineThreads) combine_kernel(const __grid_constant__ Params p) {
  const int row = blockIdx.x;
  int sequence = blockIdx.y;
  if (p.batch > p.parts) {
    const Boundary begin = p.boundaries[blockIdx.y], end = p.boundaries[blockIdx.y + 1];
    sequence = end.sequence;
    if (sequence >= p.batch || end.block == 0 || (begin.sequence == sequence && begin.block > 0)) return;
  }
  constexpr int kThreads = kGroups * kCombineThreads;
  const Cuts cuts = cuts_of<kThreads>(p, sequence);
  if (cuts.first > cuts.last) return;
  dependency_wait();  // for the decode kernel's results; the schedule is older
  const int first = cuts.first - 1, last = cuts.last;

  const int tile = row / kRowTile, tile_row = row % kRowTile;
  const auto at = [&](int part) { return p.partial_row(tile, part == first ? 2 * part + 1 : 2 * part, tile_row); };
  float largest = -CUDART_INF_F;
  for (int part = first + threadIdx.x; part <= last; part += kThreads) largest = fmaxf(largest, p.partial_lse[at(part)]);
  largest = block_max<kThreads>(largest);

  const int group = threadIdx.x / kCombineThreads, column = threadIdx.x % kCombineThreads;
  __shared__ float weights[kThreads];
  float sum = 0.f;
  float4 out = {};
  for (int chunk = first; chunk <= last; chunk += kThreads) {
    const int count = min(last + 1 - chunk, kThreads);
    __syncthreads();
    if (threadIdx.x < count) {
      const float lse = p.partial_lse[at(chunk + threadIdx.x)];
      weights[threadIdx.x] = lse == -CUDART_INF_F ? 0.f : exp2f(lse - largest);  // -inf: sees no key
    }
    __syncthreads();
    for (int i = group; i < count; i += kInFlight * kGroups) {
      float4 value[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int part = chunk + min(i + j * kGroups, count - 1);
        value[j] = reinterpret_cast<const float4*>(p.partial_out + at(part) * kKvLoraRank)[column];
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const float weight = i + j * kGroups < count ? weights[i + j * kGroups] : 0.f;
        if (weight == 0.f) continue;
        sum += weight;
        out.x += weight * value[j].x;
        out.y += weight * value[j].y;
        out.z += weight * value[j].z;
        out.w += weight * value[j].w;
      }
    }
  }
  if (kGroups > 1) {  // their sums, in order
    __shared__ float4 outs[kGroups][kCombineThreads];
    __shared__ float sums[kGroups];
    outs[group][column] = out;
    if (column == 0) sums[group] = sum;
    __syncthreads();
    if (group > 0) return;
    for (int other = 1; other < kGroups; ++other) {
      const float4 more = outs[other][column];
      sum += sums[other];
      out.x += more.x;
      out.y += more.y;
      out.z += more.z;
      out.w += more.w;
    }
  }
  const float factor = sum == 0.f ? 0.f : 1.f / sum;
  const uint2 packed = {float2_to_bf16x2(out.x * factor, out.y * factor), float2_to_bf16x2(out.z * factor, out.w * factor)};
  reinterpret_cast<uint2*>(p.out + p.out_row(sequence, row))[threadIdx.x] = packed;
  if (threadIdx.x == 0) p.lse[p.lse_index(sequence, row)] = sum == 0.f ? CUDART_INF_F : (largest + log2f(sum)) * kLn2;
}

}  // namespace snapmla::decode
