// The role of a softmax group: S = Q K^T of every other key block, and P from it.
#pragma once

#include <type_traits>

#include "../../common/quantize.cuh"
#include "../../common/wgmma.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace snapmla::decode {

constexpr float kNoReference = -1e30f;       // below every other
constexpr float kLog2E4m3Max = 8.80735492f;   // log2(448)
constexpr float kTinyScale = 0x1p-120f;       // stands for 0, so that an infinity times it is one
constexpr int kSoftmaxThreads = kSoftmaxGroups * kGroup;

// What a thread knows of its two rows (8 apart) while it goes through a sequence.
struct Rows {
  float scale[2];      // log2(e) softmax_scale q_scale: from S times the key's scale to a base-2 logit
  float reference[2];  // at the group's last block
  float sum[2];        // of exponentials over the group's blocks, in units of 2^reference
};

// The first of a thread's two rows in its tile.
__device__ __forceinline__ int first_row(int thread) { return thread / kWarp * 16 + thread % kWarp / 4; }

// How many leading keys of a sequence a row of the call sees.
__device__ __forceinline__ int visible_keys(const Params& p, int length, int row) {
  return p.causal ? max(length - p.s_q + 1 + row / p.heads, 0) : length;
}

// S = Q K^T: e4m3 content first, then the aligned BF16 RoPE part into the same accumulator (Eq 6).
__device__ __forceinline__ void multiply_qk(float (&s)[32], uint32_t query, uint32_t key) {
  constexpr int kRope = sizeof(Latents::content);
  const uint64_t q = descriptor_swizzle_128(query), k = descriptor_swizzle_128(key);
  const uint64_t q_rope = descriptor_swizzle_128(query + kRope), k_rope = descriptor_swizzle_128(key + kRope);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKvLoraRank / 32; ++step) {
    constexpr int kStepsPerTile = kContentTile / 32;
    const uint64_t offset = (step / kStepsPerTile * kRowTile * kContentTile + step % kStepsPerTile * 32) >> 4;
    if (step == 0) {
      wgmma_e4m3_n64_zero(s, q, k);
    } else {
      wgmma_e4m3_n64(s, q + offset, k + offset);
    }
  }
#pragma unroll
  for (int step = 0; step < kQkRopeHeadDim / 16; ++step) wgmma_bf16_n64(s, q_rope + 2 * step, k_rope + 2 * step);
  wgmma_commit();
}

// The largest of the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// One key block of a sequence. kMasked: some row does not see all of its keys.
//   first_of_call: the tile's first row; block: its number in the sequence; first, last: of those that this part visits.
template <int kGroupIndex, int kStage, bool kMasked>
__device__ __forceinline__ void softmax_block(const Storage& storage, const Params& p, Rows& rows, Parities& parities,
                                              int first_of_call, int length, int block, bool first, bool last) {
  const int thread = group_thread(), lane = thread % kWarp, warp = thread / kWarp;
  const int row = first_row(thread);
  const int column = lane % 4 * 2;  // in each group of eight keys, with the next one
  const bool leader = lane % 4 == 0;
  const uint32_t k_scale = shared_address(storage.k_scale[kStage]) + column * sizeof(float);

  mbarrier_wait(shared_address(&storage.key_full[kStage]), parities.of(kStage));
  float s[32];
  multiply_qk(s, shared_address(&storage.query), shared_address(&storage.key[kStage]));
  wgmma_wait<0>();
  wgmma_results(s);

  const auto key_scale = [&](int j) { return load_shared_float2(k_scale + j * 8 * sizeof(float)); };  // of this lane's two keys

  // The largest log2 P' = logit + log2 S_K of each row, P' before any reference. From here on s holds S times the key's scale,
  // and for a hidden key what makes the logit -inf.
  float largest[2] = {-CUDART_INF_F, -CUDART_INF_F};
  int seen[2];  // of this lane's keys, by their distance from the first
  for (int i = 0; kMasked && i < 2; ++i) {
    seen[i] = visible_keys(p, length, first_of_call + row + 8 * i) - block * kBlockKeys - column;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 scale = key_scale(j);
    const float log_scale[2] = {log2_approx(scale.x), log2_approx(scale.y)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        float& x = s[4 * j + 2 * i + l];
        x *= l ? scale.y : scale.x;
        if (kMasked && j * 8 + l >= seen[i]) x = copysignf(CUDART_INF_F, -rows.scale[i]);
        largest[i] = fmaxf(largest[i], fmaf(x, rows.scale[i], log_scale[l]));  // drops the NaN of a slot past the end
      }
    }
  }
  largest[0] = quad_max(largest[0]);
  largest[1] = quad_max(largest[1]);

  // The reference: the block's own (sigma_P e^m of Algorithm 1), or the one before while that is close enough.
  Reference before[2] = {{0.f, kNoReference}, {0.f, kNoReference}};
  if (!first) {
    named_sync(kReferenceFrom + 1 - kGroupIndex, kSoftmaxThreads);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 r = load_shared_float2(shared_address(&storage.reference[1 - kGroupIndex][row + 8 * i]));
      before[i] = {r.x, r.y};
    }
  }
  float gamma[2];  // what sums in the old reference's units are multiplied by
  bool moved[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float own = largest[i] - kLog2E4m3Max, above = own - before[i].now;
    const bool padding = first_of_call + row + 8 * i >= p.rows;
    moved[i] = (first || !(above <= 0.f && above >= -kKeepBits)) && largest[i] != -CUDART_INF_F && !padding;
    const float now = padding ? 0.f : moved[i] ? fmaxf(own, before[i].highest - kDropBits) : before[i].now;
    if (leader) {
      store_shared(shared_address(&storage.reference[kGroupIndex][row + 8 * i]), make_float2(now, fmaxf(before[i].highest, now)));
    }
    gamma[i] = first ? 0.f : exp2_approx(before[i].now - now);
    rows.sum[i] *= exp2_approx(rows.reference[i] - now);  // the group's last block may lie further back than `before`
    rows.reference[i] = now;
  }
  if (!last) named_arrive(kReferenceFrom + kGroupIndex, kSoftmaxThreads);

  mbarrier_wait(shared_address(&storage.p_empty[kStage]), parities.before(kStage));
  const uint32_t any_moved = (__any_sync(~0u, moved[0]) ? 1 : 0) | (__any_sync(~0u, moved[1]) ? 1 << 8 : 0);
  if (lane == 0) store_shared(shared_address(&storage.moved[kStage][2 * warp]), uint16_t(any_moved));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (leader) store_shared(shared_address(&storage.gamma[kStage][row + 8 * i]), gamma[i]);
  }
  float sum[2] = {0.f, 0.f};  // of a block first: thousands of equal terms added one by one would all round the same way
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {  // 16 keys
#pragma unroll
    for (int j = 2 * piece; j < 2 * piece + 2; ++j) {
      const float2 scale = key_scale(j);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int l = 0; l < 2; ++l) {
          float& x = s[4 * j + 2 * i + l];
          x = exp2_approx(fmaf(x, rows.scale[i], -rows.reference[i]));
          sum[i] += x;
          // Scale fusion: V is the content without its scale. That of a slot past the end may be NaN.
          x = kMasked && x == 0.f ? 0.f : x * (l ? scale.y : scale.x);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* x = &s[8 * piece + 2 * i];
      const uint32_t swizzled = (piece ^ (row >> 1 & 3)) * 16;  // the same for both rows
      store_shared(shared_address(storage.p[kStage][8 * i]) + row * kBlockKeys + swizzled + lane % 4 * 4,
                   e4m3x4(x[0], x[1], x[4], x[5]));
    }
  }
  fence_async_proxy();
  __syncwarp();
  if (lane == 0) mbarrier_arrive(shared_address(&storage.p_full[kStage]));

  rows.sum[0] += sum[0];
  rows.sum[1] += sum[1];
  parities.advance(kStage);
}

// Asks for the queries of a row tile; rows past the last one read as zeros.
__device__ __forceinline__ void load_query(const Storage& storage, const CUtensorMap* content, const CUtensorMap* rope, int tile,
                                           int sequence) {
  const uint32_t full = shared_address(&storage.query_full);
  mbarrier_arrive_expect(full, sizeof(Latents));
  for (int t = 0; t < kContentTiles; ++t) {
    tma_load_3d(shared_address(storage.query.content[t]), content, full, t * kContentTile, tile * kRowTile, sequence);
  }
  tma_load_3d(shared_address(storage.query.rope), rope, full, 0, tile * kRowTile, sequence);
}

template <int kGroupIndex>
__device__ __forceinline__ void softmax_role(Storage& storage, const CUtensorMap* q_content, const CUtensorMap* q_rope,
                                             const Params& p, int tile, int part) {
  const int first_of_call = tile * kRowTile;
  Parities parities;

  for_each_piece(p, part, storage.boundaries, [&](int sequence, const Piece& piece) {
    int row = first_row(group_thread());
    if (piece.begin == piece.end) {  // an empty sequence
      for (int i = 0; i < 2; ++i) {
        const int r = first_of_call + row + 8 * i;
        if (kGroupIndex == 0 && r < p.rows) p.lse[p.lse_index(sequence, r)] = CUDART_INF_F;
      }
      return;
    }
    if (kGroupIndex == 0 && threadIdx.x == 0) load_query(storage, q_content, q_rope, tile, sequence);
    Rows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = first_of_call + row + 8 * i;
      rows.scale[i] = r < p.rows ? p.q_scale[int64_t(sequence) * p.rows + r] * p.scale_log2 : 0.f;
      if (rows.scale[i] == 0.f) rows.scale[i] = kTinyScale;
      rows.reference[i] = kNoReference;
      rows.sum[i] = 0.f;
    }
    __syncwarp();
    mbarrier_wait(shared_address(&storage.query_full), parities.of(kSequence));

    const int all_visible = visible_keys(p, piece.length, 0);  // blocks up to there need no mask
    const auto visit = [&](auto stage, int block) {
      constexpr int kStage = decltype(stage)::value;
      if (block >= piece.end) return;
      const bool first = block == piece.begin, last = block + 1 == piece.end;
      if ((block + 1) * kBlockKeys <= all_visible) {
        softmax_block<kGroupIndex, kStage, false>(storage, p, rows, parities, first_of_call, piece.length, block, first, last);
      } else {
        softmax_block<kGroupIndex, kStage, true>(storage, p, rows, parities, first_of_call, piece.length, block, first, last);
      }
    };
    for (int block = piece.begin + kGroupIndex; block < piece.end; block += kStages) {
      visit(std::integral_constant<int, kGroupIndex>(), block);
      visit(std::integral_constant<int, kGroupIndex + 2>(), block + 2);
    }

    // Both groups' sums, in units of the last block's reference.
    const int thread = group_thread();
    const bool leader = thread % 4 == 0;
    row = first_row(thread);
    named_sync_roles(kSoftmaxDone, kSoftmaxThreads);
    float reference[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      reference[i] = storage.reference[(piece.end - piece.begin - 1) % 2][row + 8 * i].now;
      const float sum = quad_sum(rows.sum[i]) * exp2_approx(rows.reference[i] - reference[i]);
      if (leader) storage.sum[kGroupIndex][row + 8 * i] = sum;
    }
    if (kGroupIndex == 0) mbarrier_wait(shared_address(&storage.sum_empty), parities.before(kSequence));
    named_sync_roles(kSoftmaxDone, kSoftmaxThreads);
    if (kGroupIndex == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int tile_row = row + 8 * i, r = first_of_call + tile_row;
        const float sum = storage.sum[0][tile_row] + storage.sum[1][tile_row];
        const bool sees_none = sum == 0.f;
        const float lse = reference[i] + log2f(sum);
        if (leader) {
          storage.inverse_sum[tile_row] = sees_none ? 0.f : 1.f / sum;
          if (piece.slot >= 0) {
            p.partial_lse[p.partial_row(tile, piece.slot, tile_row)] = sees_none ? -CUDART_INF_F : lse;
          } else if (r < p.rows) {
            p.lse[p.lse_index(sequence, r)] = sees_none ? CUDART_INF_F : lse * kLn2;
          }
        }
      }
      __syncwarp();
      if (thread % kWarp == 0) mbarrier_arrive(shared_address(&storage.sum_full));
    }
    parities.advance(kSequence);
  });
}

}  // namespace snapmla::decode
