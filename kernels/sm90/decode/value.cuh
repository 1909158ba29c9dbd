// The role of a PV group: O^T = V^T P^T for 256 of the 512 output columns, every block's sum promoted to float32. Group 1 also
// asks the copy engine for keys.
#pragma once

#include "../../common/quantize.cuh"
#include "../../common/wgmma.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace snapmla::decode {

constexpr int kGroupColumns = kKvLoraRank / kValueGroups;
constexpr int kColumnTiles = kGroupColumns / 64;  // WGMMAs have 64 rows: columns of the output, here

// Asks for a key block: one thread of each of the four warps for a part of it.
__device__ __forceinline__ void load_key(const Storage& storage, const CUtensorMap* content, const CUtensorMap* rope,
                                         const Params& p, int stage, int page) {
  const int warp = threadIdx.x % kGroup / kWarp;
  const Latents& key = storage.key[stage];
  const uint32_t full = shared_address(&storage.key_full[stage]);
  const int bytes = sizeof(key.content[0]) + (warp == 1 ? sizeof(key.rope) : warp == 2 ? sizeof(storage.k_scale[0]) : 0);
  mbarrier_arrive_expect(full, bytes);
  tma_load_3d(shared_address(key.content[warp]), content, full, warp * kContentTile, 0, page);
  if (warp == 1) tma_load_3d(shared_address(key.rope), rope, full, 0, 0, page);
  if (warp == 2) {
    bulk_load(shared_address(storage.k_scale[stage]), p.scale_cache + page * p.scale_page_stride, sizeof(storage.k_scale[0]), full);
  }
}

// Clears one group's columns of the keys from `valid` on. Anything may be stored past the end of a sequence, and P's zeros do not
// help against it: 0 times NaN is NaN.
__device__ __forceinline__ void clear_keys(uint32_t columns, int valid) {
  constexpr int kPieces = kContentTile / 16;
  for (int i = group_thread(); i < (kBlockKeys - valid) * kPieces; i += kGroup) {
    const uint32_t row = columns + valid * kContentTile + i * 16;
    for (int t = 0; t < kGroupColumns / kContentTile; ++t) store_shared(row + t * sizeof(Latents::content[0]), make_uint4(0, 0, 0, 0));
  }
  fence_async_proxy();  // before the copy engine writes the stage again
}

// `group` is not a template argument: two copies of the loop would not fit the instruction cache beside the softmax groups'.
__device__ __forceinline__ void value_role(Storage& storage, const CUtensorMap* k_content, const CUtensorMap* k_rope,
                                           const Params& p, int group, int tile, int part) {
  static_assert(kContentTiles == kGroupWarps, "a warp of the loading group asks for one content tile");
  const bool loads = group == 1;
  // Where this lane reads V: key `lane` of 32, columns 16 warp … of a tile of 64; the other half of a content tile is 64 bytes on,
  // which the swizzle makes an exclusive or.
  const int lane = threadIdx.x % kWarp;
  const uint32_t v_lane = lane * kContentTile + ((threadIdx.x % kGroup / kWarp ^ (lane & 7)) << 4);
  Parities parities;

  for_each_piece(p, part, storage.boundaries, [&](int sequence, const Piece& piece) {
    if (piece.begin == piece.end) {  // an empty sequence
      const int rows = min(p.rows - tile * kRowTile, kRowTile);
      for (int i = group_thread(); group == 0 && i < rows * (kKvLoraRank / 8); i += kGroup) {
        reinterpret_cast<uint4*>(p.out + p.out_row(sequence, tile * kRowTile))[i] = make_uint4(0, 0, 0, 0);
      }
      return;
    }
    const int* pages = p.block_table + sequence * p.block_table_stride;
    if (loads) {
      for (int stage = 0; stage < kStages && piece.begin + stage < piece.end; ++stage) {
        mbarrier_wait(shared_address(&storage.key_empty[stage]), parities.before(stage));
        if (elect_one()) load_key(storage, k_content, k_rope, p, stage, pages[piece.begin + stage]);
      }
    }
    float o[kColumnTiles][32];
#pragma unroll
    for (int m = 0; m < kColumnTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 32; ++i) o[m][i] = 0.f;
    }

    for (int block = piece.begin; block < piece.end; ++block) {
      const int stage = (block - piece.begin) % kStages;
      const uint32_t v_stage = shared_address(&storage.key[0]) + stage * sizeof(Latents) +
                               group * (kGroupColumns / kContentTile) * sizeof(Latents::content[0]);
      const bool refill = loads && block + kStages < piece.end;
      const int next_page = refill ? pages[block + kStages] : 0;
      uint32_t v[8];  // V^T of one column tile: [k step][operand register]
      const auto load_v = [&](int m) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32_t address = v_stage + m / 2 * sizeof(Latents::content[0]) + step * 32 * kContentTile +
                                   (m % 2 ? v_lane ^ 64 : v_lane);
          const uint4 q = load_matrices_transposed(address);
          v[4 * step] = __byte_perm(q.x, q.y, 0x6420);
          v[4 * step + 1] = __byte_perm(q.x, q.y, 0x7531);
          v[4 * step + 2] = __byte_perm(q.z, q.w, 0x6420);
          v[4 * step + 3] = __byte_perm(q.z, q.w, 0x7531);
        }
      };
      mbarrier_wait(shared_address(&storage.key_full[0]) + stage * 8, parities.of(stage));
      if (const int valid = piece.length - block * kBlockKeys; valid < kBlockKeys) {
        mbarrier_wait(shared_address(&storage.p_full[0]) + stage * 8, parities.of(stage));  // QK has read the keys
        clear_keys(v_stage, valid);
        named_sync(kKeysCleared + group, kGroup);
      }
      load_v(0);
      mbarrier_wait(shared_address(&storage.p_full[0]) + stage * 8, parities.of(stage));

      // O into the units of this block's references, eight rows at a time, where one of them moved.
      const uint2 moved = load_shared_uint2(shared_address(&storage.moved[0]) + stage * sizeof(storage.moved[0]));
      if (moved.x | moved.y) {
        const int column = v_lane / kContentTile % 4 * 2;
        const uint32_t gamma = shared_address(&storage.gamma[0]) + stage * sizeof(storage.gamma[0]) + column * sizeof(float);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if ((j < 4 ? moved.x : moved.y) >> 8 * (j % 4) & 1) {
            const float2 factor = load_shared_float2(gamma + j * 8 * sizeof(float));
#pragma unroll
            for (int m = 0; m < kColumnTiles; ++m) {
              o[m][4 * j] *= factor.x;
              o[m][4 * j + 1] *= factor.y;
              o[m][4 * j + 2] *= factor.x;
              o[m][4 * j + 3] *= factor.y;
            }
          }
        }
      }

      const uint64_t p_rows = descriptor_swizzle_64(shared_address(&storage.p[0])) + stage * (sizeof(storage.p[0]) >> 4);
      constexpr uint64_t kHalf = 32 * kBlockKeys >> 4;  // rows 32 to 63 of P
      constexpr uint64_t kStep = 32 >> 4;               // keys 32 to 63
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
        float low[16], high[16];  // of rows 0 to 31 and 32 to 63: O's sums of this block alone
        wgmma_fence();
        wgmma_e4m3_n32_zero(low, v[0], v[1], v[2], v[3], p_rows);
        wgmma_e4m3_n32(low, v[4], v[5], v[6], v[7], p_rows + kStep);
        wgmma_commit();
        wgmma_e4m3_n32_zero(high, v[0], v[1], v[2], v[3], p_rows + kHalf);
        wgmma_e4m3_n32(high, v[4], v[5], v[6], v[7], p_rows + kHalf + kStep);
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_results(low);
#pragma unroll
        for (int i = 0; i < 16; ++i) o[m][i] += low[i];
        wgmma_wait<0>();
        wgmma_results(high);
        if (m + 1 < kColumnTiles) load_v(m + 1);
#pragma unroll
        for (int i = 0; i < 16; ++i) o[m][16 + i] += high[i];
      }

      if (elect_one()) {
        mbarrier_arrive(shared_address(&storage.key_empty[0]) + stage * 8);
        mbarrier_arrive(shared_address(&storage.p_empty[0]) + stage * 8);
      }
      if (refill) {
        mbarrier_wait(shared_address(&storage.key_empty[0]) + stage * 8, parities.of(stage));
        if (elect_one()) load_key(storage, k_content, k_rope, p, stage, next_page);
      }
      parities.advance(stage);
    }

    const int thread = group_thread();
    // O^T lies in pairs of neighbouring columns: the order in which V's fragments come.
    const int64_t first_column = group * kGroupColumns + thread / kWarp * 16 + thread % kWarp / 4 * 2;
    mbarrier_wait(shared_address(&storage.sum_full), parities.of(kSequence));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        const int row = 8 * j + thread % 4 * 2 + l, r = tile * kRowTile + row;
        const float factor = storage.inverse_sum[row];  // 0 for a row that sees no key, and so is its O
#pragma unroll
        for (int m = 0; m < kColumnTiles; ++m) {
          const float2 pair = make_float2(o[m][4 * j + l] * factor, o[m][4 * j + 2 + l] * factor);
          if (piece.slot >= 0) {
            const int64_t at = p.partial_row(tile, piece.slot, row) * kKvLoraRank + first_column + m * 64;
            *reinterpret_cast<float2*>(p.partial_out + at) = pair;
          } else if (r < p.rows) {
            const int64_t at = p.out_row(sequence, r) + first_column + m * 64;
            *reinterpret_cast<uint32_t*>(p.out + at) = float2_to_bf16x2(pair.x, pair.y);
          }
        }
      }
    }
    __syncwarp();
    if (thread % kWarp == 0) mbarrier_arrive(shared_address(&storage.sum_empty));
    parities.advance(kSequence);
  });
}

}  // namespace snapmla::decode
