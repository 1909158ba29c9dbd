// What the kernels of one decode call share.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_bf16.h>

#include "../../common/ptx.cuh"
#include "config.cuh"

namespace snapmla::decode {

// Work is cut along the sequences: part p of a call visits the key blocks from boundary p to boundary p + 1, in order.
struct Boundary {
  int sequence;
  int block;  // of that sequence
};

// Tokens of a sequence; a length that block_table has no room for is cut.
__device__ inline int length_of(const int* cache_seqlens, unsigned sequence, int max_pages) {
  const int64_t capacity = int64_t(max_pages) * kPageSize;
  return int(max(int64_t(0), min(int64_t(cache_seqlens[sequence]), capacity)));
}

struct Params {
  const float* q_scale;        // [batch, rows]
  const int* block_table;      // [batch, max_pages], rows block_table_stride apart
  const int* cache_seqlens;    // [batch]
  const float* scale_cache;    // [pages, 64], pages scale_page_stride apart
  const Boundary* boundaries;  // [parts + 1]
  __nv_bfloat16* out;          // [batch, rows, 512]
  float* lse;                  // [batch, heads, s_q]
  // Results of parts of sequences: part p leaves that of a sequence which began in an earlier part in slot 2 p, and that of one
  // which ends in a later part in slot 2 p + 1; both, where neither holds, in `out` and `lse`.
  float* partial_out;  // [row tiles, 2 parts, 64, 512], normalized
  float* partial_lse;  // [row tiles, 2 parts, 64], base 2, -inf: sees no key
  int64_t block_table_stride, scale_page_stride;
  int batch, s_q, heads, rows;  // rows = s_q heads, heads the faster
  int max_pages, parts;
  float scale_log2;  // softmax_scale log2(e)
  bool causal;

  __device__ int length(unsigned sequence) const { return length_of(cache_seqlens, sequence, max_pages); }
  // Where the result of a row of one sequence goes.
  __device__ int64_t out_row(unsigned sequence, int row) const { return (int64_t(sequence) * rows + row) * kKvLoraRank; }
  __device__ int64_t lse_index(unsigned sequence, int row) const {
    return (int64_t(sequence) * heads + row % heads) * s_q + row / heads;
  }
  __device__ int64_t partial_row(int tile, int slot, int row) const {
    return (int64_t(tile) * 2 * parts + slot) * kRowTile + row;
  }
};

__host__ __device__ inline int blocks_of(int length) { return (length + kBlockKeys - 1) / kBlockKeys; }

// One for each thing that the copy engine reads; dimensions from the fastest.
struct TensorMaps {
  CUtensorMap q_content, q_rope;  // [512, rows, batch] e4m3 and [64, rows, batch] BF16
  CUtensorMap k_content;          // [128 bytes, 8 keys, 4 tiles, 8, pages] e4m3
  CUtensorMap k_rope;             // [64, 64, pages] BF16
};

// A value that all lanes hold, in a register that they share: the compiler cannot know it of what was loaded.
__device__ __forceinline__ int uniform(int x) { return __reduce_max_sync(~0u, x); }

// The blocks that a part (blockIdx.y) visits of one sequence.
struct Piece {
  int length;      // tokens of the sequence
  int begin, end;  // its blocks

  __device__ Piece(const Params& p, const Boundary& first, const Boundary& last, unsigned sequence)
      : length(uniform(p.length(sequence))) {
    const int blocks = blocks_of(length);
    begin = sequence == unsigned(first.sequence) ? first.block : 0;
    end = sequence == unsigned(last.sequence) ? last.block : blocks;
  }
  // Where the result goes: a slot of the partial ones, or, if negative, `out` and `lse`. Asked for at the end and from what is read
  // afresh: a register that held it would be held through the loop over blocks.
  __device__ int slot() const {
    const int part = block_index_y();
    return begin > 0 ? 2 * part : end < blocks_of(length) ? 2 * part + 1 : -1;
  }
};

// The piece of a sequence between two boundaries.
__device__ __forceinline__ Piece piece_of(const Params& p, const Boundary (&boundaries)[2], unsigned sequence) {
  const Boundary first = {uniform(boundaries[0].sequence), uniform(boundaries[0].block)};
  const Boundary last = {uniform(boundaries[1].sequence), uniform(boundaries[1].block)};
  return Piece(p, first, last, sequence);
}

// Visits the pieces of the part between two boundaries, which lie in shared memory and are read there again for each piece:
// registers are short in the roles.
template <typename Visit>
__device__ __forceinline__ void for_each_piece(const Params& p, const Boundary (&boundaries)[2], const Visit& visit) {
  for (unsigned sequence = uniform(boundaries[0].sequence);; ++sequence) {
    const unsigned last = uniform(boundaries[1].sequence);
    if (sequence > last || (sequence == last && uniform(boundaries[1].block) == 0)) break;
    visit(sequence, piece_of(p, boundaries, sequence));
  }
}

}  // namespace snapmla::decode
