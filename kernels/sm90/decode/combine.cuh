// Joins the parts of sequences that were split: out = sum of w_i out_i with w_i = 2^(lse_i - lse), parts in order.
#pragma once

#include "../../common/ptx.cuh"
#include "../../common/quantize.cuh"
#include "params.cuh"

namespace snapmla::decode {

constexpr int kCombineThreads = kKvLoraRank / 4;  // four columns each
constexpr int kCombineBatch = 8;                  // parts whose loads are in flight together

// A row (blockIdx.x) of the sequence that part blockIdx.y begins and does not finish, if there is one.
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ Params p) {
  const int row = blockIdx.x, first = blockIdx.y;
  const Boundary begin = p.boundaries[first], end = p.boundaries[first + 1];
  const int sequence = end.sequence;
  if (sequence >= p.batch || end.block == 0 || (begin.sequence == sequence && begin.block > 0)) return;
  const int blocks = blocks_of(p.length(sequence));
  if (end.block >= blocks) return;
  int last = first + 1;  // the part that finishes it
  while (p.boundaries[last + 1].sequence == sequence && p.boundaries[last + 1].block < blocks) ++last;

  const int tile = row / kRowTile, tile_row = row % kRowTile;
  const auto at = [&](int part) { return p.partial_row(tile, part == first ? 2 * part + 1 : 2 * part, tile_row); };
  float largest = -CUDART_INF_F;
  for (int part = first; part <= last; ++part) largest = fmaxf(largest, p.partial_lse[at(part)]);
  float sum = 0.f;
  float4 out = {};
  if (largest != -CUDART_INF_F) {
    for (int part = first; part <= last; part += kCombineBatch) {
      float weight[kCombineBatch];
      float4 value[kCombineBatch];
#pragma unroll
      for (int i = 0; i < kCombineBatch; ++i) {
        const int64_t from = at(min(part + i, last));
        weight[i] = part + i <= last ? exp2f(p.partial_lse[from] - largest) : 0.f;
        value[i] = reinterpret_cast<const float4*>(p.partial_out + from * kKvLoraRank)[threadIdx.x];
      }
#pragma unroll
      for (int i = 0; i < kCombineBatch; ++i) {
        if (weight[i] == 0.f) continue;  // sees no key, or nothing of weight
        sum += weight[i];
        out.x += weight[i] * value[i].x;
        out.y += weight[i] * value[i].y;
        out.z += weight[i] * value[i].z;
        out.w += weight[i] * value[i].w;
      }
    }
  }
  const float factor = sum == 0.f ? 0.f : 1.f / sum;
  const uint2 packed = {float2_to_bf16x2(out.x * factor, out.y * factor), float2_to_bf16x2(out.z * factor, out.w * factor)};
  reinterpret_cast<uint2*>(p.out + p.out_row(sequence, row))[threadIdx.x] = packed;
  if (threadIdx.x == 0) p.lse[p.lse_index(sequence, row)] = sum == 0.f ? CUDART_INF_F : (largest + log2f(sum)) * kLn2;
}

}  // namespace snapmla::decode
