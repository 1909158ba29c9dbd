// Constants of the decode kernel. What they trade off is in README.md.
#pragma once

#include <math_constants.h>  // CUDART_INF_F

#include "../../common/layout.cuh"

namespace snapmla::decode {

// Keys of one step of the main loop (BlockN): they share a row's reference, and their products one accumulator (Rules.block).
constexpr int kBlockPages = 2;
constexpr int kBlockKeys = kBlockPages * kPageSize;
constexpr int kRowTile = 64;  // rows (a query of a head each) of one thread block
constexpr int kStages = 2;    // key blocks in shared memory; each has its own buffer for P

// P's reference is kept while a block's largest P' lies at most this many bits below it (Rules.keep_bits).
constexpr float kKeepBits = 12.f;
// A reference is never more than this many bits below the row's highest: the outputs' units cannot overflow (Rules.drop_bits).
constexpr float kDropBits = 40.f;

// Warp groups, in this order: two compute QK and the softmax (a page of each block), two PV (output columns 0–255, 256–511).
constexpr int kSoftmaxGroups = kBlockPages;
constexpr int kValueGroups = 2;
constexpr int kGroup = 128;  // threads of a warp group
constexpr int kGroupWarps = 4;
constexpr int kThreads = (kSoftmaxGroups + kValueGroups) * kGroup;
// Where all rows of a call fit half a tile, the other half is not computed: two kernels, kHalves 1 and 2.
constexpr int kHalfRows = kRowTile / 2;
// Registers a thread of each role; 128 on average is what 512 threads get, and setmaxnreg must hand out.
template <int kHalves>
constexpr int kSoftmaxRegisters = kHalves == 2 ? 72 : 80;
template <int kHalves>
constexpr int kValueRegisters = 2 * 128 - kSoftmaxRegisters<kHalves>;

// What a sequence costs besides its key blocks, in key blocks: its queries' load, pipeline start and results.
constexpr int kSequenceCost = 2;
// What it costs to cut a sequence, in key blocks: the second part's start, partial results, their combination.
constexpr int kCutCost = 4;
// Parts of a sequence that are combined in the time of one key block.
constexpr int kCombinedParts = 16;

constexpr float kLn2 = 0.693147181f;

}  // namespace snapmla::decode
