// Dimensions of MLA and the byte layout of the paged cache. snapmla/layout.py explains them; a test compares the two files.
#pragma once

namespace snapmla {

constexpr int kKvLoraRank = 512;      // content of a token
constexpr int kQkRopeHeadDim = 64;    // RoPE part of a token
constexpr int kQkHeadDim = kKvLoraRank + kQkRopeHeadDim;
constexpr int kPageSize = 64;         // tokens in a page

}  // namespace snapmla
