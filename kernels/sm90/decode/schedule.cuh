// Cuts a batch into parts of like cost on the device, without the host knowing the lengths. snapmla/schedule.py is the same rule.
#pragma once

#include "../../common/ptx.cuh"
#include "params.cuh"

namespace snapmla::decode {

constexpr int kScheduleThreads = 1024;

// A sequence costs kSequenceCost + its blocks; laid end to end they make a line, cut into at most `parts` equal pieces. In pieces of s
// the longest sequence of n blocks takes the time of s blocks and of combining n / s parts, kCombinedParts a block: so a piece is not
// less than s = sqrt(n / kCombinedParts), rounded up. And where pieces longer by up to kCutCost hold the longest sequence, they do: equal
// sequences then remain whole. A cut inside a sequence's first kSequenceCost units, or before it, comes before
// its first block.
__global__ void __launch_bounds__(kScheduleThreads) schedule_kernel(const int* cache_seqlens, int batch, int max_pages, int parts,
                                                                    Boundary* boundaries) {
  dependency_launch();
  __shared__ int64_t warp_sums[kScheduleThreads / 32];
  __shared__ int warp_longest[kScheduleThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int each = (batch + kScheduleThreads - 1) / kScheduleThreads;
  const int begin = min(int(threadIdx.x) * each, batch), end = min(begin + each, batch);
  const auto blocks = [&](int sequence) { return blocks_of(length_of(cache_seqlens, sequence, max_pages)); };

  int64_t own = 0;
  int longest = 0;
  for (int sequence = begin; sequence < end; ++sequence) {
    own += kSequenceCost + blocks(sequence);
    longest = max(longest, blocks(sequence));
  }
  longest = __reduce_max_sync(~0u, longest);
  int64_t through = own;  // costs of this warp's threads up to this one
  for (int other = 1; other < 32; other *= 2) {
    const int64_t before = __shfl_up_sync(~0u, through, other);
    if (lane >= other) through += before;
  }
  if (lane == 31) {
    warp_sums[warp] = through;
    warp_longest[warp] = longest;
  }
  __syncthreads();
  int64_t start = through - own, total = 0;
  for (int w = 0; w < kScheduleThreads / 32; ++w) {
    if (w < warp) start += warp_sums[w];
    total += warp_sums[w];
    longest = max(longest, warp_longest[w]);
  }

  int64_t share = max((total + parts - 1) / parts, int64_t(1));
  while (kCombinedParts * share * share < longest) ++share;
  const int whole = kSequenceCost + longest;
  if (whole > share && whole <= share + kCutCost) share = whole;
  for (int sequence = begin; sequence < end; ++sequence) {
    const int64_t stop = start + kSequenceCost + blocks(sequence);
    for (int64_t part = (start + share - 1) / share; part * share < stop && part <= parts; ++part) {
      boundaries[part] = {sequence, int(max(part * share - start - kSequenceCost, int64_t(0)))};
    }
    start = stop;
  }
  for (int part = threadIdx.x; part <= parts; part += kScheduleThreads) {
    if (part * share >= total) boundaries[part] = {batch, 0};
  }
}

}  // namespace snapmla::decode
