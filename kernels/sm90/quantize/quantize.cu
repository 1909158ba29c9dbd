// Launches Fused-Q-Quant and Fused-K-Append.
#include <type_traits>

#include "quantize.cuh"

namespace snapmla::quantize {
namespace {

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
}  // namespace snapmla::quantize

int snapmla_quantize_q(const void* content, int64_t content_token_stride, int64_t content_head_stride, const void* rope,
                       int64_t rope_token_stride, int64_t rope_head_stride, void* out_content, void* out_rope,
                       void* out_scale, int64_t tokens, int64_t heads, void* stream) {
  using namespace snapmla;
  using namespace snapmla::quantize;
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
  using namespace snapmla::quantize;
  const Tokens given{static_cast<const __nv_bfloat16*>(content), content_stride, static_cast<const __nv_bfloat16*>(rope),
                     rope_stride, tokens};
  return append(given, AsItIs{}, slots, slots_are_int32, cache, stream);
}

int snapmla_norm_rope_append_kv(const void* content, int64_t content_stride, const void* rope, int64_t rope_stride,
                                snapmla_norm_rope norm_rope, const void* slots, int slots_are_int32, int64_t tokens,
                                snapmla_cache cache, void* stream) {
  using namespace snapmla;
  using namespace snapmla::quantize;
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
