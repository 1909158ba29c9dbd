// The decode kernels' C interface (kernels/snapmla.h), on the CPU.
#include "sm90/decode/decode.cu"

namespace snapmla::decode {
alignas(1024) uint8_t memory[host::kSharedBytes];  // the dynamic shared memory of kernel.cuh
}

namespace {
const bool ready = [] {
  host::shared_base = snapmla::decode::memory;
  return true;
}();
}  // namespace
