// The role of a PV group: O^T = V^T P^T for 256 of the 512 output columns, every block's sum promoted to float32.
#pragma once

#include "../../common/quantize.cuh"
#include "../../common/wgmma.cuh"
#include "params.cuh"
#include "storage.cuh"

namespace snapmla::decode {

constexpr int kGroupColumns = kKvLoraRank / kValueGroups;
constexpr int kColumnTiles = kGroupColumns / 64;  // WGMMAs have 64 rows: columns of the output, here
constexpr int kSteps = kBlockKeys / 32;           // of a block: the keys of one WGMMA

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

// `group` is not a template argument: two copies of the loop would not fit the instruction cache beside the softmax groups'.
template <int kHalves>
__device__ __forceinline__ void value_role(Storage& storage, const Params& p, int group, int tile) {
  // Where this lane reads V: key `lane` of 32, columns 16 warp … of a tile of 64; the other half of a content tile is 64 bytes on,
  // which the swizzle makes an exclusive or.
  const int lane = threadIdx.x % kWarp;
  const uint32_t v_lane = lane / kAtomRows * sizeof(Page::content[0]) + lane % kAtomRows * kContentTile +
                          ((threadIdx.x % kGroup / kWarp ^ lane % 8) << 4);
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

    unsigned stage = 0;
    const int stop = piece.length - piece.end * kBlockKeys;
    for (int left = piece.length - piece.begin * kBlockKeys; left > stop; left -= kBlockKeys, stage = (stage + 1) % kStages) {
      const uint32_t v_stage = shared_address(&storage.key[0]) + stage * sizeof(storage.key[0]) +
                               group * (kGroupColumns / kContentTile) * kAtomBytes;
      // V^T of a column tile, and of another where there are registers for it: [k step][operand register]
      uint32_t v[kSteps][4], w[kSteps][4];
      const auto load_v = [&](uint32_t (&v)[kSteps][4], int m, int begin = 0, int end = kSteps) {
#pragma unroll
        for (int step = begin; step < end; ++step) {
          const uint32_t address = v_stage + step / 2 * sizeof(Page) + step % 2 * 32 / kAtomRows * sizeof(Page::content[0]) +
                                   m / 2 * kAtomBytes + (m % 2 ? v_lane ^ 64 : v_lane);
          const uint4 q = load_matrices_transposed(address);
          v[step][0] = __byte_perm(q.x, q.y, 0x6420);
          v[step][1] = __byte_perm(q.x, q.y, 0x7531);
          v[step][2] = __byte_perm(q.z, q.w, 0x6420);
          v[step][3] = __byte_perm(q.z, q.w, 0x7531);
        }
      };
      for (int page = 0; page < kBlockPages; ++page) {
        mbarrier_wait(shared_address(&storage.key_full[0]) + stage * sizeof(storage.key_full[0]) + page * 8, parities.of(stage));
      }
      const uint32_t p_full = shared_address(&storage.p_full[0]) + stage * 8;
      if (left < kBlockKeys) {
        mbarrier_wait(p_full, parities.of(stage));  // QK has read the keys
        for (int page = 0; page < kBlockPages; ++page) {
          clear_keys(v_stage + page * sizeof(Page), min(max(left - page * kPageSize, 0), kPageSize));
        }
        named_sync(kKeysCleared + group, kGroup);
      }
      // What is in flight while O is rescaled: the first page's products where registers are short, else both.
      constexpr int kAhead = kHalves == 2 ? kSteps / 2 : kSteps;
      load_v(v, 0, 0, kAhead);
      if (kHalves == 1) load_v(w, 1);
      mbarrier_wait(p_full, parities.of(stage));

      const uint64_t p_rows = descriptor_swizzle_64(shared_address(&storage.p[0])) + stage * (sizeof(storage.p[0]) >> 4);
      constexpr uint64_t kHalf = kHalfRows * kPageSize >> 4;  // rows 32 to 63 of P
      const uint2 moved = load_shared_uint2(shared_address(&storage.moved[0]) + stage * sizeof(storage.moved[0]));
      // O's sums of this block alone: a column tile's of rows 0 to 31 and 32 to 63; or two tiles' of rows 0 to 31.
      float first[16], second[16];
      const auto multiply = [&](float (&d)[16], const uint32_t (&v)[kSteps][4], uint64_t rows, int begin = 0, int end = kSteps) {
#pragma unroll
        for (int step = begin; step < end; ++step) {
          const uint64_t keys = rows + ((step / 2 * sizeof(storage.p[0][0]) + step % 2 * 32) >> 4);
          if (step == 0) {
            wgmma_e4m3_n32_zero(d, v[step][0], v[step][1], v[step][2], v[step][3], keys);
          } else {
            wgmma_e4m3_n32(d, v[step][0], v[step][1], v[step][2], v[step][3], keys);
          }
        }
        wgmma_commit();
      };
      wgmma_fence();
      multiply(first, v, p_rows, 0, kAhead);
      if (kHalves == 2) {
        multiply(second, v, p_rows + kHalf, 0, kAhead);
      } else {
        multiply(second, w, p_rows);
      }

      // While they run: O into the units of this block's references, eight rows at a time, where one of them moved.
      if (kHalves == 1 ? moved.x : moved.x | moved.y) {
        const int column = group_thread() % 4 * 2;
        const uint32_t gamma = shared_address(&storage.gamma[0]) + stage * sizeof(storage.gamma[0]) + column * sizeof(float);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const uint32_t flags = half ? moved.y : moved.x;
          if (!flags) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (flags >> 8 * i & 1) {
              const float2 factor = load_shared_float2(gamma + (half * 4 + i) * 8 * sizeof(float));
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
      }

      // A product's sums are added while the next product is computed.
      if constexpr (kHalves == 2) {
        load_v(v, 0, kAhead, kSteps);
        wgmma_fence();
        multiply(first, v, p_rows, kAhead, kSteps);
        multiply(second, v, p_rows + kHalf, kAhead, kSteps);
#pragma unroll
        for (int m = 0; m < kColumnTiles; ++m) {
          wgmma_wait<1>();
          wgmma_results(first);
#pragma unroll
          for (int i = 0; i < 16; ++i) o[m][i] += first[i];
          wgmma_wait<0>();
          wgmma_results(second);
          if (m + 1 < kColumnTiles) {
            load_v(v, m + 1);
            wgmma_fence();
            multiply(first, v, p_rows);
          }
#pragma unroll
          for (int i = 0; i < 16; ++i) o[m][16 + i] += second[i];
          if (m + 1 < kColumnTiles) multiply(second, v, p_rows + kHalf);
        }
      } else {
#pragma unroll
        for (int m = 0; m < kColumnTiles; m += 2) {
          const bool more = m + 2 < kColumnTiles;
          wgmma_wait<1>();
          wgmma_results(first);
#pragma unroll
          for (int i = 0; i < 16; ++i) o[m][i] += first[i];
          if (more) {
            load_v(v, m + 2);
            wgmma_fence();
            multiply(first, v, p_rows);
            wgmma_wait<1>();
          } else {
            wgmma_wait<0>();
          }
          wgmma_results(second);
#pragma unroll
          for (int i = 0; i < 16; ++i) o[m + 1][i] += second[i];
          if (more) {
            load_v(w, m + 3);
            wgmma_fence();
            multiply(second, w, p_rows);
          }
        }
      }

      if (elect_one()) mbarrier_arrive(shared_address(&storage.block_empty[0]) + stage * 8);
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
            const int64_t at = p.partial_row(tile, slot, row) * kKvLoraRank + first_column + m * 64;
            *reinterpret_cast<float2*>(p.partial_out + at) = pair;
          } else {
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
