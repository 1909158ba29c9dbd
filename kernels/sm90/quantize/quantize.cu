// Fused-Q-Quant and Fused-K-Append: a warp for each row of 576 values. Both are bound by memory: 1152 bytes in and 644 out
// for each row, 18 divisions a lane hidden behind them.
#include <type_traits>

#include "../../common/quantize.cuh"
#include "../../snapmla.h"

namespace snapmla {
namespace {

constexpr int kWarpsPerBlock = 8;

__device__ int64_t global_warp() { return int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp; }

struct QuantizeQ {
  const __nv_bfloat16* content;  // [tokens, heads, 512]
  int64_t content_token_stride, content_head_stride;
  const __nv_bfloat16* rope;  // [tokens, heads, 64]
  int64_t rope_token_stride, rope_head_stride;
  uint8_t* out_content;      // [tokens, heads, 512] e4m3
  __nv_bfloat16* out_rope;   // [tokens, heads, 64]
  float* out_scale;          // [tokens, heads]
  int64_t rows, heads;
};

__global__ void __launch_bounds__(kWarpsPerBlock* kWarp) quantize_q_kernel(const QuantizeQ p) {
  const int64_t row = global_warp();
  if (row >= p.rows) return;
  const int64_t token = row / p.heads, head = row % p.heads;
  const int lane = threadIdx.x % kWarp;
  Row values;
  values.load(p.content + token * p.content_token_stride + head * p.content_head_stride,
              p.rope + token * p.rope_token_stride + head * p.rope_head_stride, lane);
  const float scale = values.scale();
  values.store(p.out_content + row * kKvLoraRank, p.out_rope + row * kQkRopeHeadDim, scale, lane);
  if (lane == 0) p.out_scale[row] = scale;
}

// What happens to a token before it is quantized: nothing.
struct AsItIs {
  __device__ void apply(Row&, int64_t, int) const {}
};

// RMSNorm of the content and rotary embedding of the RoPE part: what an engine has in hand is before both.
template <typename Angle, typename Position>
struct NormAndRope {
  const __nv_bfloat16* weight;  // [512]
  const Angle* cos_sin;         // [positions, 64]: 32 cosines, 32 sines
  const Position* positions;    // [tokens]
  float epsilon;
  bool interleaved;

  __device__ void apply(Row& row, int64_t token, int lane) const {
    row.normalize(weight, epsilon, lane);
    row.rotate(cos_sin + int64_t(positions[token]) * kQkRopeHeadDim, interleaved, lane);
  }
};

struct Tokens {
  const __nv_bfloat16* content;  // [tokens, 512]
  int64_t content_stride;
  const __nv_bfloat16* rope;  // [tokens, 64]
  int64_t rope_stride;
  int64_t count;
};

template <typename Slot, typename Before>
__global__ void __launch_bounds__(kWarpsPerBlock* kWarp)
    append_kv_kernel(const Tokens tokens, const Before before, const Slot* slots, const snapmla_cache cache) {
  const int64_t token = global_warp();
  if (token >= tokens.count) return;
  const int64_t slot = slots[token];
  if (slot < 0 || slot >= cache.pages * kPageSize) return;
  const int64_t page = slot / kPageSize, offset = slot % kPageSize;
  const int lane = threadIdx.x % kWarp;
  Row values;
  values.load(tokens.content + token * tokens.content_stride, tokens.rope + token * tokens.rope_stride, lane);
  before.apply(values, token, lane);
  const float scale = values.scale();
  values.store(static_cast<uint8_t*>(cache.content) + page * cache.content_stride + offset * kKvLoraRank,
               static_cast<__nv_bfloat16*>(cache.rope) + page * cache.rope_stride + offset * kQkRopeHeadDim, scale, lane);
  if (lane == 0) static_cast<float*>(cache.scale)[page * cache.scale_stride + offset] = scale;
}

unsigned blocks(int64_t rows) { return unsigned((rows + kWarpsPerBlock - 1) / kWarpsPerBlock); }

template <typename Before>
int append(const Tokens& tokens, const Before& before, const void* slots, bool slots_are_int32, const snapmla_cache& cache,
           void* stream) {
  if (tokens.count == 0) return cudaSuccess;
  const auto launch = [&](auto* typed_slots) {
    append_kv_kernel<<<blocks(tokens.count), kWarpsPerBlock * kWarp, 0, static_cast<cudaStream_t>(stream)>>>(tokens, before,
                                                                                                           typed_slots, cache);
  };
  if (slots_are_int32) {
    launch(static_cast<const int32_t*>(slots));
  } else {
    launch(static_cast<const int64_t*>(slots));
  }
  return cudaGetLastError();
}

}  // namespace
}  // namespace snapmla

int snapmla_quantize_q(const void* content, int64_t content_token_stride, int64_t content_head_stride, const void* rope,
                       int64_t rope_token_stride, int64_t rope_head_stride, void* out_content, void* out_rope,
                       void* out_scale, int64_t tokens, int64_t heads, void* stream) {
  using namespace snapmla;
  const QuantizeQ p{static_cast<const __nv_bfloat16*>(content),
                    content_token_stride,
                    content_head_stride,
                    static_cast<const __nv_bfloat16*>(rope),
                    rope_token_stride,
                    rope_head_stride,
                    static_cast<uint8_t*>(out_content),
                    static_cast<__nv_bfloat16*>(out_rope),
                    static_cast<float*>(out_scale),
                    tokens * heads,
                    heads};
  if (p.rows == 0) return cudaSuccess;
  quantize_q_kernel<<<blocks(p.rows), kWarpsPerBlock * kWarp, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

int snapmla_append_kv(const void* content, int64_t content_stride, const void* rope, int64_t rope_stride, const void* slots,
                      int slots_are_int32, int64_t tokens, snapmla_cache cache, void* stream) {
  using namespace snapmla;
  const Tokens given{static_cast<const __nv_bfloat16*>(content), content_stride, static_cast<const __nv_bfloat16*>(rope),
                     rope_stride, tokens};
  return append(given, AsItIs{}, slots, slots_are_int32, cache, stream);
}

int snapmla_norm_rope_append_kv(const void* content, int64_t content_stride, const void* rope, int64_t rope_stride,
                                snapmla_norm_rope norm_rope, const void* slots, int slots_are_int32, int64_t tokens,
                                snapmla_cache cache, void* stream) {
  using namespace snapmla;
  const Tokens given{static_cast<const __nv_bfloat16*>(content), content_stride, static_cast<const __nv_bfloat16*>(rope),
                     rope_stride, tokens};
  const auto with = [&](auto* cos_sin, auto* positions) {
    using Angle = std::remove_const_t<std::remove_pointer_t<decltype(cos_sin)>>;
    using Position = std::remove_const_t<std::remove_pointer_t<decltype(positions)>>;
    const NormAndRope<Angle, Position> before{static_cast<const __nv_bfloat16*>(norm_rope.weight), cos_sin, positions,
                                              norm_rope.epsilon, norm_rope.interleaved != 0};
    return append(given, before, slots, slots_are_int32, cache, stream);
  };
  const auto with_angles = [&](auto* cos_sin) {
    return norm_rope.positions_are_int32 ? with(cos_sin, static_cast<const int32_t*>(norm_rope.positions))
                                         : with(cos_sin, static_cast<const int64_t*>(norm_rope.positions));
  };
  return norm_rope.cos_sin_is_float32 ? with_angles(static_cast<const float*>(norm_rope.cos_sin))
                                      : with_angles(static_cast<const __nv_bfloat16*>(norm_rope.cos_sin));
}
