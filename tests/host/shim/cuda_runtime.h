// The runtime calls of the launchers.
#pragma once

#include <cuda.h>

#include "../simt.h"

#define CUDART_VERSION 13000
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault, cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, uint32_t rank, void* base, const cuuint64_t* sizes,
                             const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {static_cast<const uint8_t*>(base), int(rank), type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2, {}, {}, {}};
  for (uint32_t i = 0; i < rank; ++i) map->sizes[i] = sizes[i], map->box[i] = box[i];
  for (uint32_t i = 0; i + 1 < rank; ++i) map->strides[i] = strides[i];
  return CUDA_SUCCESS;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, int, cudaDriverEntryPointQueryResult*) {
  *function = reinterpret_cast<void*>(&encode_tiled);
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, size_t bytes) {
  return bytes <= host::kSharedBytes ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
template <typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Arguments...), const Arguments&... arguments) {
  host::run(config->gridDim, config->blockDim.x, [&] { kernel(arguments...); });
  return cudaSuccess;
}
