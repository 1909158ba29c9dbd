// Launches the kernels of a decode call: schedule, decode, combine.
#include <algorithm>

#include <cuda_runtime.h>
#include <cudaTypedefs.h>

#include "../../snapmla.h"
#include "combine.cuh"
#include "kernel.cuh"
#include "schedule.cuh"

namespace snapmla::decode {
namespace {

// The driver's function that describes a tensor to the copy engine; the library does not link against the driver.
PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// A cache's content [pages, 64, 512] in the order of `Page`, a page at a time. Stride of pages in bytes. L2 fetches no more than
// asked for: with its promotion to 256 bytes pages stream at 4.14 instead of 4.43 TB/s (../../LOG.md).
CUresult describe_keys(CUtensorMap* map, const void* base, uint64_t pages, uint64_t page_stride) {
  constexpr uint64_t kRow = kKvLoraRank;
  const cuuint64_t sizes[] = {kContentTile, kAtomRows, kContentTiles, kPageAtoms, pages};
  const cuuint64_t strides[] = {kRow, kContentTile, kAtomRows * kRow, page_stride};
  const cuuint32_t box[] = {kContentTile, kAtomRows, kContentTiles, kPageAtoms, 1}, steps[] = {1, 1, 1, 1, 1};
  const auto encode = tensor_map_encoder();
  if (!encode) return CUDA_ERROR_NOT_FOUND;
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, const_cast<void*>(base), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A tensor [outer, 64 or more rows, columns] that is copied in boxes of 64 rows of 128 bytes, swizzled. Strides in bytes; reads
// outside give zeros.
template <typename Element>
CUresult describe(CUtensorMap* map, const void* base, uint64_t columns, uint64_t rows, uint64_t outer, uint64_t row_stride,
                  uint64_t outer_stride) {
  constexpr CUtensorMapDataType kType = sizeof(Element) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[] = {columns, rows, outer}, strides[] = {row_stride, outer_stride};
  const cuuint32_t box[] = {128 / sizeof(Element), kRowTile, 1}, steps[] = {1, 1, 1};
  const auto encode = tensor_map_encoder();
  if (!encode) return CUDA_ERROR_NOT_FOUND;
  return encode(map, kType, 3, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A launch that may begin before the kernel before it in the stream has finished: the kernel waits where it needs that.
template <typename... Arguments>
cudaError_t launch_overlapped(void (*kernel)(Arguments...), dim3 grid, unsigned threads, size_t shared, cudaStream_t stream,
                              const Arguments&... arguments) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace
}  // namespace snapmla::decode

int snapmla_decode_schedule(const void* cache_seqlens, int64_t batch, int64_t max_pages, int64_t parts, void* boundaries,
                            void* stream) {
  using namespace snapmla::decode;
  schedule_kernel<<<1, kScheduleThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const int*>(cache_seqlens), int(batch), int(max_pages), int(parts), static_cast<Boundary*>(boundaries));
  return cudaGetLastError();
}

int snapmla_mla_decode(snapmla_query query, snapmla_cache cache, snapmla_batch batch, snapmla_split split, double softmax_scale,
                       int causal, void* out, void* lse, void* stream) {
  using namespace snapmla;
  using namespace snapmla::decode;
  const int64_t rows = query.s_q * query.heads;
  TensorMaps maps;
  constexpr int64_t kRopeBytes = kQkRopeHeadDim * sizeof(__nv_bfloat16);
  const CUresult results[] = {
      describe<uint8_t>(&maps.q_content, query.content, kKvLoraRank, rows, batch.size, kKvLoraRank, rows * kKvLoraRank),
      describe<__nv_bfloat16>(&maps.q_rope, query.rope, kQkRopeHeadDim, rows, batch.size, kRopeBytes, rows * kRopeBytes),
      describe_keys(&maps.k_content, cache.content, cache.pages, cache.content_stride),
      describe<__nv_bfloat16>(&maps.k_rope, cache.rope, kQkRopeHeadDim, kPageSize, cache.pages, kRopeBytes,
                              cache.rope_stride * sizeof(__nv_bfloat16))};
  for (const CUresult result : results) {
    if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  }

  Params p;
  p.q_scale = static_cast<const float*>(query.scale);
  p.block_table = static_cast<const int*>(batch.block_table);
  p.cache_seqlens = static_cast<const int*>(batch.cache_seqlens);
  p.scale_cache = static_cast<const float*>(cache.scale);
  p.boundaries = static_cast<const Boundary*>(split.boundaries);
  p.out = static_cast<__nv_bfloat16*>(out);
  p.lse = static_cast<float*>(lse);
  p.partial_out = static_cast<float*>(split.partial_out);
  p.partial_lse = static_cast<float*>(split.partial_lse);
  p.block_table_stride = batch.block_table_stride;
  p.scale_page_stride = cache.scale_stride;
  p.batch = int(batch.size);
  p.s_q = int(query.s_q);
  p.heads = int(query.heads);
  p.rows = int(rows);
  p.max_pages = int(batch.max_pages);
  p.parts = int(split.parts);
  p.scale_log2 = float(softmax_scale * 1.4426950408889634);
  p.causal = causal != 0;

  const auto launch_stream = static_cast<cudaStream_t>(stream);
  const auto kernel = rows <= kHalfRows ? decode_kernel<1> : decode_kernel<2>;
  const cudaError_t attribute = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Storage));
  if (attribute != cudaSuccess) return attribute;
  const unsigned tiles = unsigned((rows + kRowTile - 1) / kRowTile), parts = unsigned(split.parts);
  const cudaError_t launched =
      launch_overlapped(kernel, dim3(tiles, parts), kThreads, sizeof(Storage), launch_stream, maps, p);
  if (launched != cudaSuccess || parts == 1) return launched;
  const unsigned candidates = unsigned(std::min(batch.size, split.parts));
  // Parts that a sequence has at most, on average: more than one group of threads loads in two goes?
  const int64_t most = std::min(split.parts / batch.size, (batch.max_pages + kBlockPages - 1) / kBlockPages);
  const bool many = most > 2 * kInFlight;
  return launch_overlapped(many ? combine_kernel<kManyGroups> : combine_kernel<1>, dim3(unsigned(rows), candidates),
                           (many ? kManyGroups : 1) * kCombineThreads, 0, launch_stream, p);
}
