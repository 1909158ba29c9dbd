// The role of a PV group: O^T = V^T P^T for 256 of the 512 output columns, every block's sum promoted to float32. It also asks the copy
// engine for keys, because it is the last to read them.
#pragma once

#include "../../common/quantize.cuh"
#include "../../common/wgmma.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace snapmla::decode {

constexpr int kGroupColumns = kKvLoraRank / kValueGroups;
constexpr int kTileColumns = 64;  // WGMMAs have 64 rows: columns of the output, here
constexpr int kColumnTiles = kGroupColumns / kTileColumns;
constexpr int kSteps = kBlockKeys / 32;  // of a block: the keys of one WGMMA

// Clears one group's columns of a page's keys from `valid` on. Anything may be stored past the end of a sequence, and P's zeros do not
// help against it: 0 times NaN is NaN.
__device__ __forceinline__ void clear_keys(uint32_t columns, int valid) {
  constexpr int kPieces = kContentTile / 16;
  for (int i = threadIdx.x % kGroup; i < (kPageSize - valid) * kPieces; i += kGroup) {
    const int key = valid + i / kPieces;
    const uint32_t piece = columns + key / kAtomRows * sizeof(Page::content[0]) + key % kAtomRows * kContentTile + i % kPieces * 16;
    for (int t = 0; t < kGroupColumns / kContentTile; ++t) store_shared(piece + t * kAtomBytes, make_uint4(0, 0, 0, 0));
  }
  fence_async_proxy();  // before the copy engine writes the stage again
}

// Asks the copy engine for a page of keys; a negative one is none, and what lies there stays.
__device__ __forceinline__ void load_page(const TensorMaps& maps, const Params& p, uint32_t key, uint32_t k_scale, uint32_t full, int page) {
  constexpr int kScaleBytes = kPageSize * sizeof(float);
  if (page < 0) {
    mbarrier_arrive(full);
    return;
  }
  mbarrier_arrive_expect(full, sizeof(Page) + kScaleBytes);
  tma_load_5d(key, &maps.k_content, full, 0, 0, 0, 0, page);
  tma_load_3d(key + sizeof(Page::content), &maps.k_rope, full, 0, 0, page);
  bulk_load(k_scale, p.scale_cache + page * p.scale_page_stride, kScaleBytes, full);
}

// V^T of a column tile of a block, as A operands: [k step][operand register].
using Fragments = uint32_t[kSteps][4];

// Where a lane reads V of a group's first tile: key `lane` of 32, columns 16 warp …. A tile's other half of a content tile is 64 bytes
// on, which the swizzle makes an exclusive or.
__device__ __forceinline__ uint32_t v_of_lane() {
  const int lane = threadIdx.x % kWarp;
  return lane / kAtomRows * sizeof(Page::content[0]) + lane % kAtomRows * kContentTile +
         ((threadIdx.x % kGroup / kWarp ^ lane % 8) << 4);
}
__device__ __forceinline__ void load_v(Fragments& v, uint32_t stage, uint32_t lane, int m) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint32_t keys = step / 2 * sizeof(Page) + step % 2 * 32 / kAtomRows * sizeof(Page::content[0]);
    const uint4 q = load_matrices_transposed(stage + keys + m / 2 * kAtomBytes + (m % 2 ? lane ^ 64 : lane));
    v[step][0] = __byte_perm(q.x, q.y, 0x6420);
    v[step][1] = __byte_perm(q.x, q.y, 0x7531);
    v[step][2] = __byte_perm(q.z, q.w, 0x6420);
    v[step][3] = __byte_perm(q.z, q.w, 0x7531);
  }
}

// d = V^T P^T of a column tile over one block, for all 64 rows (32 sums a thread) or the first 32 (16). `p`: descriptor of the block's P.
template <int kSums>
__device__ __forceinline__ void multiply_pv(float (&d)[kSums], const Fragments& v, uint64_t p) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t keys = p + ((step / 2 * sizeof(Storage::p[0][0]) + step % 2 * 32) >> 4);
    if (step == 0) {
      wgmma_e4m3_zero(d, v[step], keys);
    } else {
      wgmma_e4m3(d, v[step], keys);
    }
  }
  wgmma_commit();
}

// O into the units of a block's references, eight rows at a time, where one of them moved.
template <int kHalves>
__device__ __forceinline__ void rescale(float (&o)[kColumnTiles][16 * kHalves], uint32_t moved, uint32_t gamma) {
  const uint2 flags = load_shared_uint2(moved);
  if (!(kHalves == 1 ? flags.x : flags.x | flags.y)) return;
  const int column = group_thread() % 4 * 2;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const uint32_t of_half = half ? flags.y : flags.x;
    if (!of_half) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!(of_half >> 8 * i & 1)) continue;
      const float2 factor = load_shared_float2(gamma + ((half * 4 + i) * 8 + column) * sizeof(float));
      const int j = 4 * (4 * half + i);
#pragma unroll
      for (int m = 0; m < kColumnTiles; ++m) {
        o[m][j] *= factor.x;
        o[m][j + 1] *= factor.y;
        o[m][j + 2] *= factor.x;
        o[m][j + 3] *= factor.y;
      }
    }
  }
}

template <int kSums>
__device__ __forceinline__ void add(float (&o)[kSums], const float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) o[i] += d[i];
}

// `group` is not a template argument: two copies of the loop would not fit the instruction cache beside the softmax groups'.
template <int kHalves>
__device__ __forceinline__ void value_role(Storage& storage, const TensorMaps& maps, const Params& p, int group, int tile) {
  const uint32_t v_lane = v_of_lane();
  Parities parities;

  for_each_piece(p, storage.boundaries, [&](unsigned sequence, const Piece& piece) {
    if (piece.begin == piece.end) {  // an empty sequence
      const int rows = min(p.rows - tile * kRowTile, kRowTile);
      for (int i = group_thread(); group == 0 && i < rows * (kKvLoraRank / 8); i += kGroup) {
        reinterpret_cast<uint4*>(p.out + p.out_row(sequence, tile * kRowTile))[i] = make_uint4(0, 0, 0, 0);
      }
      return;
    }
    float o[kColumnTiles][16 * kHalves];
#pragma unroll
    for (int m = 0; m < kColumnTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 16 * kHalves; ++i) o[m][i] = 0.f;
    }

    // Blocks are named by how many of the sequence's keys are left at their begin. Of each, a warp of this group asks for one page.
    const int start = piece.length - piece.begin * kBlockKeys, stop = piece.length - piece.end * kBlockKeys;
    const bool asks = uniform(group_thread() / kWarp) == 0;
    const auto page_of = [&](int left) {
      const int page = (piece.length - left) / kPageSize + group;
      return left > group * kPageSize ? p.block_table[sequence * p.block_table_stride + page] : -1;
    };
    const auto ask = [&](unsigned stage, int page, uint32_t parity) {  // once all that read the stage's keys have
      mbarrier_wait(shared_address(&storage.key_empty[0]) + stage * 8, parity);
      if (elect_one()) {
        load_page(maps, p, shared_address(&storage.key[0]) + stage * sizeof(storage.key[0]) + group * sizeof(Page),
                  shared_address(&storage.k_scale[0]) + stage * sizeof(storage.k_scale[0]) + group * sizeof(storage.k_scale[0][0]),
                  shared_address(&storage.key_full[0]) + stage * sizeof(storage.key_full[0]) + group * 8, page);
      }
    };
    if (asks) {
      for (int s = 0, left = start; s < kStages && left > stop; ++s, left -= kBlockKeys) ask(s, page_of(left), parities.before(s));
    }

    unsigned stage = 0;
    for (int left = start; left > stop; left -= kBlockKeys, stage = (stage + 1) % kStages) {
      const uint32_t keys = shared_address(&storage.key[0]) + stage * sizeof(storage.key[0]) +
                            group * (kGroupColumns / kContentTile) * kAtomBytes;
      const uint32_t p_full = shared_address(&storage.p_full[0]) + stage * 8;
      const bool refill = asks && left - kStages * kBlockKeys > stop;
      int next = 0;  // page
      if (refill) {
        next = page_of(left - kStages * kBlockKeys);
        keep_in_lanes(next);
      }

      for (int page = 0; page < kBlockPages; ++page) {
        mbarrier_wait(shared_address(&storage.key_full[0]) + stage * sizeof(storage.key_full[0]) + page * 8, parities.of(stage));
      }
      if (left < kBlockKeys) {
        mbarrier_wait(p_full, parities.of(stage));  // QK has read the keys
        for (int page = 0; page < kBlockPages; ++page) {
          clear_keys(keys + page * sizeof(Page), min(max(left - page * kPageSize, 0), kPageSize));
        }
        named_sync(kKeysCleared + group, kGroup);
      }

      const uint64_t p_rows = descriptor_swizzle_64(shared_address(&storage.p[0])) + stage * (sizeof(storage.p[0]) >> 4);
      const uint32_t moved = shared_address(&storage.moved[0]) + stage * sizeof(storage.moved[0]);
      const uint32_t gamma = shared_address(&storage.gamma[0]) + stage * sizeof(storage.gamma[0]);
      // The keys have been read: by QK before P was full, and as V.
      const auto release_keys = [&] {
        if (elect_one()) mbarrier_arrive(shared_address(&storage.key_empty[0]) + stage * 8);
        if (refill) ask(stage, next, parities.of(stage));
      };
      Fragments v;
      load_v(v, keys, v_lane, 0);
      if constexpr (kHalves == 2) {
        float d[32];
        mbarrier_wait(p_full, parities.of(stage));
        multiply_pv(d, v, p_rows);
        rescale<kHalves>(o, moved, gamma);  // while the first products run
#pragma unroll
        for (int m = 0; m < kColumnTiles; ++m) {
          wgmma_wait<0>();
          wgmma_results(d);
          if (m + 1 < kColumnTiles) load_v(v, keys, v_lane, m + 1);
          add(o[m], d);
          if (m + 1 < kColumnTiles) multiply_pv(d, v, p_rows);
          if (m + 2 == kColumnTiles) release_keys();
        }
      } else {  // registers are left for two tiles at a time: one's sums are added while the other's products run
        Fragments w;
        float d[16], e[16];
        load_v(w, keys, v_lane, 1);
        mbarrier_wait(p_full, parities.of(stage));
        multiply_pv(d, v, p_rows);
        multiply_pv(e, w, p_rows);
        rescale<kHalves>(o, moved, gamma);
#pragma unroll
        for (int m = 0; m < kColumnTiles; m += 2) {
          const bool last = m + 2 == kColumnTiles;
          wgmma_wait<1>();
          wgmma_results(d);
          add(o[m], d);
          if (!last) {
            load_v(v, keys, v_lane, m + 2);
            multiply_pv(d, v, p_rows);
            wgmma_wait<1>();
          } else {
            wgmma_wait<0>();
          }
          wgmma_results(e);
          add(o[m + 1], e);
          if (!last) {
            load_v(w, keys, v_lane, m + 3);
            multiply_pv(e, w, p_rows);
            if (m + 4 == kColumnTiles) release_keys();
          }
        }
      }
      if (elect_one()) mbarrier_arrive(shared_address(&storage.p_empty[0]) + stage * 8);
      parities.advance(stage);
    }

    const int thread = threadIdx.x % kGroup;
    // O^T lies in pairs of neighbouring columns: the order in which V's fragments come.
    const int64_t first_column = group * kGroupColumns + thread / kWarp * 16 + thread % kWarp / 4 * 2;
    mbarrier_wait(shared_address(&storage.sum_full), parities.of(kSequence));
    const int slot = storage.slot;
#pragma unroll
    for (int j = 0; j < 4 * kHalves; ++j) {
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        const int row = 8 * j + thread % 4 * 2 + l, r = tile * kRowTile + row;
        if (r >= p.rows) continue;
        const float factor = storage.inverse_sum[row];  // 0 for a row that sees no key, and so is its O
#pragma unroll
        for (int m = 0; m < kColumnTiles; ++m) {
          const float2 pair = make_float2(o[m][4 * j + l] * factor, o[m][4 * j + 2 + l] * factor);
          if (slot >= 0) {
            const int64_t at = p.partial_row(tile, slot, row) * kKvLoraRank + first_column + m * kTileColumns;
            *reinterpret_cast<float2*>(p.partial_out + at) = pair;
          } else {
            const int64_t at = p.out_row(sequence, r) + first_column + m * kTileColumns;
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
