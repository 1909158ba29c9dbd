// The role of a softmax group: S = Q K^T of one page of every key block, and P from it.
#pragma once

#include <type_traits>

#include "../../common/quantize.cuh"
#include "../../common/wgmma.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace snapmla::decode {

constexpr float kNoReference = -1e30f;       // below every other
constexpr float kLog2E4m3Max = 8.80735492f;   // log2(448)
constexpr float kTinyScale = 0x1p-120f;       // stands for a query's scale of 0, so that an infinity times it is one
constexpr float kLeastScale = 0x1p-149f;      // the same for a key's: its logarithm is still taken as that of 0
constexpr int kSoftmaxThreads = kSoftmaxGroups * kGroup;

// What a thread knows of its two rows (8 apart) while it goes through a sequence.
struct Rows {
  float scale[2];      // log2(e) softmax_scale q_scale: from S times the key's scale to a base-2 logit
  float reference[2];  // the exponent that P' is divided by, in log2 units; the same in both groups
  float highest[2];    // of its references so far
  float sum[2];        // of exponentials over the group's pages, in units of 2^reference
};

// The first of a thread's two rows in its tile.
__device__ __forceinline__ int first_row(int thread) { return thread / kWarp * 16 + thread % kWarp / 4; }

// How many leading keys of a sequence a row of the call sees.
__device__ __forceinline__ int visible_keys(const Params& p, int length, int row) {
  return p.causal ? max(length - p.s_q + 1 + row / p.heads, 0) : length;
}

// S = Q K^T: e4m3 content first, then the aligned BF16 RoPE part into the same accumulator (Eq 6).
__device__ __forceinline__ void multiply_qk(float (&s)[32], uint32_t query, uint32_t key) {
  const uint64_t q = descriptor_swizzle_128(query), k = descriptor_swizzle_128(key, kContentTiles * kAtomBytes);
  const uint64_t q_rope = descriptor_swizzle_128(query + sizeof(Query::content));
  const uint64_t k_rope = descriptor_swizzle_128(key + sizeof(Page::content));
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kKvLoraRank / 32; ++step) {
    constexpr int kStepsPerTile = kContentTile / 32;
    const uint64_t q_offset = (step / kStepsPerTile * kRowTile * kContentTile + step % kStepsPerTile * 32) >> 4;
    const uint64_t k_offset = (step / kStepsPerTile * kAtomBytes + step % kStepsPerTile * 32) >> 4;
    if (step == 0) {
      wgmma_e4m3_n64_zero(s, q, k);
    } else {
      wgmma_e4m3_n64(s, q + q_offset, k + k_offset);
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

// Hides the keys of a page (of the sequence) that a row does not see: their S becomes what makes the logit -inf, once it has been
// multiplied by the key's scale; so no scale may stay 0, and those of slots past the end, which may be anything, become 1.
__device__ __forceinline__ void hide_keys(float (&s)[32], const Params& p, const Rows& rows, uint32_t k_scale, int first_of_call,
                                          int length, int page) {
  const int thread = group_thread(), lane = thread % kWarp;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // Of this lane's keys, by their distance from its first.
    const int seen = visible_keys(p, length, first_of_call + first_row(thread) + 8 * i) - page * kPageSize - lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        if (j * 8 + l >= seen) s[4 * j + 2 * i + l] = copysignf(CUDART_INF_F, -rows.scale[i]);
      }
    }
  }
  for (int key = lane; key < kPageSize; key += kWarp) {  // each warp on its own: all write the same
    const uint32_t scale = k_scale + key * sizeof(float);
    if (key >= length - page * kPageSize) {
      store_shared(scale, 1.f);
    } else if (load_shared_float(scale) == 0.f) {
      store_shared(scale, kLeastScale);
    }
  }
  __syncwarp();
}

// A group's page of one key block of a sequence.
//   first_of_call: the tile's first row; page: its number in the sequence; masked: some row does not see all of its keys;
//   first: of the blocks that this part visits.
template <int kHalves, int kGroupIndex, int kStage>
__device__ __forceinline__ void softmax_page(const Storage& storage, const Params& p, Rows& rows, Parities& parities, int first_of_call,
                                             int length, int page, bool masked, bool first) {
  const int thread = group_thread(), lane = thread % kWarp, warp = thread / kWarp;
  const int row = first_row(thread);
  const int column = lane % 4 * 2;  // in each group of eight keys, with the next one
  const bool leader = lane % 4 == 0;
  const uint32_t k_scale = shared_address(storage.k_scale[kStage][kGroupIndex]);

  mbarrier_wait(shared_address(&storage.key_full[kStage][kGroupIndex]), parities.of(kStage));
  float s[32];
  multiply_qk(s, shared_address(&storage.query), shared_address(&storage.key[kStage][kGroupIndex]));
  wgmma_wait<0>();
  wgmma_results(s);
  if (kHalves == 1 && warp >= kGroupWarps / 2) {  // no rows of theirs
    parities.advance(kStage);
    return;
  }

  const auto key_scale = [&](int j) {  // of this lane's two keys
    return load_shared_float2(k_scale + (column + j * 8) * sizeof(float));
  };
  if (masked) hide_keys(s, p, rows, k_scale, first_of_call, length, page);

  // The largest log2 P' = logit + log2 S_K of each row, P' before any reference. From here on s holds S times the key's scale.
  float largest[2] = {-CUDART_INF_F, -CUDART_INF_F};
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
        largest[i] = fmaxf(largest[i], fmaf(x, rows.scale[i], log_scale[l]));
      }
    }
  }
  largest[0] = quad_max(largest[0]);
  largest[1] = quad_max(largest[1]);

  // Of the whole block: the other group has the other page's.
  constexpr int kActive = kSoftmaxThreads / 2 * kHalves;
  const uint32_t own_largest = shared_address(&storage.largest[kStage][kGroupIndex][row]);
  const uint32_t other_largest = shared_address(&storage.largest[kStage][1 - kGroupIndex][row]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (leader) store_shared(own_largest + i * 8 * sizeof(float), largest[i]);
  }
  named_sync_roles(kMaximaKnown, kActive);
#pragma unroll
  for (int i = 0; i < 2; ++i) largest[i] = fmaxf(largest[i], load_shared_float(other_largest + i * 8 * sizeof(float)));
  mbarrier_wait(shared_address(&storage.p_empty[kStage]), parities.before(kStage));

  // The reference: the block's own (sigma_P e^m of Algorithm 1), or the one before while that is close enough.
  float gamma[2];  // what sums in the old reference's units are multiplied by
  bool moved[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float own = largest[i] - kLog2E4m3Max, before = rows.reference[i], above = own - before;
    const bool padding = first_of_call + row + 8 * i >= p.rows;
    moved[i] = (first || !(above <= 0.f && above >= -kKeepBits)) && largest[i] != -CUDART_INF_F && !padding;
    if (moved[i]) rows.reference[i] = fmaxf(own, rows.highest[i] - kDropBits);
    rows.highest[i] = fmaxf(rows.highest[i], rows.reference[i]);
    gamma[i] = first ? 0.f : exp2_approx(before - rows.reference[i]);
    rows.sum[i] *= gamma[i];
  }
  if (kGroupIndex == 0) {
    const uint32_t any_moved = (__any_sync(~0u, moved[0]) ? 1 : 0) | (__any_sync(~0u, moved[1]) ? 1 << 8 : 0);
    if (lane == 0) store_shared(shared_address(&storage.moved[kStage][2 * warp]), uint16_t(any_moved));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (leader) store_shared(shared_address(&storage.gamma[kStage][row + 8 * i]), gamma[i]);
    }
  }
  float sum[2] = {0.f, 0.f};  // of a page first: thousands of equal terms added one by one would all round the same way
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
          x *= l ? scale.y : scale.x;  // scale fusion: V is the content without its scale
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* x = &s[8 * piece + 2 * i];
      const uint32_t swizzled = (piece ^ (row >> 1 & 3)) * 16;  // the same for both rows
      store_shared(shared_address(storage.p[kStage][kGroupIndex][8 * i]) + row * kPageSize + swizzled + lane % 4 * 4,
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
__device__ __forceinline__ void load_query(const Storage& storage, const TensorMaps& maps, int tile, unsigned sequence) {
  const uint32_t full = shared_address(&storage.query_full);
  mbarrier_arrive_expect(full, sizeof(Query));
  for (int t = 0; t < kContentTiles; ++t) {
    tma_load_3d(shared_address(storage.query.content[t]), &maps.q_content, full, t * kContentTile, tile * kRowTile, sequence);
  }
  tma_load_3d(shared_address(storage.query.rope), &maps.q_rope, full, 0, tile * kRowTile, sequence);
}

template <int kHalves, int kGroupIndex>
__device__ __forceinline__ void softmax_role(Storage& storage, const TensorMaps& maps, const Params& p, int tile) {
  const int first_of_call = tile * kRowTile;
  Parities parities;
  for_each_piece(p, storage.boundaries, [&](unsigned sequence, const Piece& piece) {
    int row = first_row(group_thread());
    if (piece.begin == piece.end) {  // an empty sequence
      for (int i = 0; i < 2; ++i) {
        const int r = first_of_call + row + 8 * i;
        if (kGroupIndex == 0 && r < p.rows) p.lse[p.lse_index(sequence, r)] = CUDART_INF_F;
      }
      return;
    }
    if (kGroupIndex == 0 && threadIdx.x == 0) load_query(storage, maps, tile, sequence);
    Rows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = first_of_call + row + 8 * i;
      rows.scale[i] = r < p.rows ? p.q_scale[int64_t(sequence) * p.rows + r] * p.scale_log2 : 0.f;
      if (rows.scale[i] == 0.f) rows.scale[i] = kTinyScale;
      rows.reference[i] = 0.f;
      rows.highest[i] = kNoReference;
      rows.sum[i] = 0.f;
    }
    __syncwarp();
    mbarrier_wait(shared_address(&storage.query_full), parities.of(kSequence));

    const int all_visible = visible_keys(p, piece.length, 0);  // keys that every row sees
    const auto visit = [&](auto stage, int block) {
      constexpr int kStage = decltype(stage)::value;
      if (block >= piece.end) return;
      const int own_page = block * kBlockPages + kGroupIndex;
      softmax_page<kHalves, kGroupIndex, kStage>(storage, p, rows, parities, first_of_call, piece.length, own_page,
                                                 (own_page + 1) * kPageSize > all_visible, block == piece.begin);
    };
    for (int block = piece.begin; block < piece.end; block += kStages) {
      visit(std::integral_constant<int, 0>(), block);
      visit(std::integral_constant<int, 1>(), block + 1);
    }

    // Both groups' sums.
    const int thread = group_thread();
    const bool leader = thread % 4 == 0;
    row = first_row(thread);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = quad_sum(rows.sum[i]);
      if (leader) storage.sum[kGroupIndex][row + 8 * i] = sum;
    }
    if (kGroupIndex == 0) mbarrier_wait(shared_address(&storage.sum_empty), parities.before(kSequence));
    named_sync_roles(kSoftmaxDone, kSoftmaxThreads);
    if (kGroupIndex == 0) {
      const int slot = piece.slot();
      if (thread == 0) storage.slot = slot;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int tile_row = row + 8 * i, r = first_of_call + tile_row;
        const float sum = storage.sum[0][tile_row] + storage.sum[1][tile_row];
        const bool sees_none = sum == 0.f;
        const float lse = rows.reference[i] + log2f(sum);
        if (leader) {
          storage.inverse_sum[tile_row] = sees_none ? 0.f : 1.f / sum;
          if (slot >= 0) {
            p.partial_lse[p.partial_row(tile, slot, tile_row)] = sees_none ? -CUDART_INF_F : lse;
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
