// Shared memory of the decode kernel, and the barriers that hand it over.
#pragma once

#include <cstdint>

#include "../../common/ptx.cuh"
#include "params.cuh"

namespace snapmla::decode {

constexpr int kContentTile = 128;  // content columns of one copy: the 128-byte swizzle's width
constexpr int kContentTiles = kKvLoraRank / kContentTile;

constexpr int kAtomRows = 8;  // of the 128-byte swizzle
constexpr int kAtomBytes = kAtomRows * kContentTile;
constexpr int kPageAtoms = kPageSize / kAtomRows;

// 64 rows of e4m3 content and BF16 RoPE as the copy engine leaves them: in rows of 128 bytes, the 16-byte pieces of each swizzled.
struct Query {
  uint8_t content[kContentTiles][kRowTile][kContentTile];
  uint8_t rope[kRowTile][2 * kQkRopeHeadDim];
};
// A page of keys comes eight at a time with all of their content, so that the copy engine reads memory in order.
struct Page {
  uint8_t content[kPageAtoms][kContentTiles][kAtomRows][kContentTile];
  uint8_t rope[kPageSize][2 * kQkRopeHeadDim];
};

struct alignas(1024) Storage {
  Query query;
  Page key[kStages][kBlockPages];
  // P in e4m3, [row][key], keys of 16 in the order in which a lane holds them (README.md), 16-byte pieces swizzled.
  uint8_t p[kStages][kBlockPages][kRowTile][kPageSize];
  float k_scale[kStages][kBlockPages][kPageSize];
  float gamma[kStages][kRowTile];          // what O is multiplied by before the block is added
  uint8_t moved[kStages][kRowTile / 8];    // of eight rows each: whether any gamma is not 1
  float largest[kStages][kSoftmaxGroups][kRowTile];  // log2 of each page's largest P' before any reference
  float sum[kSoftmaxGroups][kRowTile];     // each softmax group's share of the sum of exponentials
  float inverse_sum[kRowTile];
  int slot;                                // where the sequence's result goes (Piece::slot)
  Boundary boundaries[2];                  // of this thread block's part

  // mbarriers                                completed by                           waited for by
  uint64_t query_full;                        // the copy engine                     both softmax groups: Q of a sequence
  uint64_t key_full[kStages][kBlockPages];    // the copy engine (a warp announces)  the page's softmax group (QK), both PV groups (V)
  uint64_t p_full[kStages];                   // the warps of both softmax groups    both PV groups: P, gamma, moved
  uint64_t key_empty[kStages];                // 8 warps of the PV groups            a warp of each PV group: to ask for the next keys
  uint64_t p_empty[kStages];                  // 8 warps of the PV groups            both softmax groups: to write P, gamma, moved
  uint64_t sum_full;                          // 4 warps of softmax group 0          both PV groups: inverse_sum and slot of a sequence
  uint64_t sum_empty;                         // 8 warps of the PV groups            softmax group 0
};

// Named barriers. Each PV group has one of its own, kKeysCleared + group.
enum NamedBarrier { kMaximaKnown = 1, kSoftmaxDone = 2, kKeysCleared = 3 };

// Parities of the mbarriers. A stage's barriers advance together, once for each block that uses it, so that one bit a stage
// says which use is next; the sequence's three advance with each sequence. Every role counts on its own.
constexpr int kSequence = kStages;
struct Parities {
  uint32_t bits = 0;

  __device__ uint32_t of(int stage) const { return bits >> stage & 1; }      // completes: this use has been filled
  __device__ uint32_t before(int stage) const { return of(stage) ^ 1; }      // completes: the use before was released
  __device__ void advance(int stage) { bits ^= 1u << stage; }
};

// The thread in its group, read afresh: what follows from it would otherwise wait in registers from block to block.
__device__ __forceinline__ int group_thread() {
  return int(thread_index() % kGroup);
}

}  // namespace snapmla::decode
