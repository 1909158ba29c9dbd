// A tensor as the copy engine is told of it: what cuTensorMapEncodeTiled was given.
#pragma once

#include <cstdint>

struct CUtensorMap {
  const uint8_t* base;
  int rank, element_bytes;
  uint64_t sizes[5], strides[4];  // strides in bytes, from the second dimension on
  uint32_t box[5];
};
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_NOT_FOUND = 500 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
