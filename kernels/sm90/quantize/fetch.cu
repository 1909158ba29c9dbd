// Launches Fused-Fetch-Dequant.
#include "fetch.cuh"

int snapmla_fetch_kv(snapmla_cache cache, const void* slots, int slots_are_int32, int64_t tokens, void* out, void* stream) {
  using namespace snapmla;
  using namespace snapmla::fetch;
  if (tokens == 0) return cudaSuccess;
  const auto launch = [&](auto* typed_slots) {
    const unsigned blocks = unsigned((tokens + kWarpsPerBlock - 1) / kWarpsPerBlock);
    fetch_kv_kernel<<<blocks, kWarpsPerBlock * kWarp, 0, static_cast<cudaStream_t>(stream)>>>(
        cache, typed_slots, tokens, static_cast<__nv_bfloat16*>(out));
  };
  if (slots_are_int32) {
    launch(static_cast<const int32_t*>(slots));
  } else {
    launch(static_cast<const int64_t*>(slots));
  }
  return cudaGetLastError();
}
