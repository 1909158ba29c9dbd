// Runs a kernel's own source on the CPU: a thread block at a time, a thread for each of its threads. What the GPU does in
// hardware (barriers, the copy engine, tensor cores) is done here as plainly as possible; asynchrony is not modelled, only its
// protocol: who waits for what. tests/test_decode_on_the_host.py compiles and compares it.
#pragma once

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace host {

constexpr int kSharedBytes = 232448;
inline uint8_t* shared_base = nullptr;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "host kernel: %s\n", what);
  std::abort();
}

// Waits for a condition that others make true; a minute without it is a deadlock.
struct Signal {
  std::mutex mutex;
  std::condition_variable changed;
  template <typename Condition>
  void wait(std::unique_lock<std::mutex>& lock, const Condition& condition, const char* what) {
    if (!changed.wait_for(lock, std::chrono::seconds(60), condition)) fail(what);
  }
};

struct Mbarrier : Signal {
  int count = 0, pending = 0;
  long bytes = 0;  // announced and not yet there
  unsigned phase = 0;

  void init(int n) { count = pending = n, bytes = 0, phase = 0; }
  void settle() {
    if (pending > 0 || bytes > 0) return;
    ++phase;
    pending = count;
    changed.notify_all();
  }
  void arrive(long expected) {
    std::lock_guard lock(mutex);
    if (--pending < 0) fail("more arrivals at an mbarrier than it counts");
    bytes += expected;
    settle();
  }
  void complete(long n) {
    std::lock_guard lock(mutex);
    bytes -= n;
    settle();
  }
  bool done(unsigned parity) const { return ((phase - 1) & 1) == parity; }
  void wait(unsigned parity) {
    std::unique_lock lock(mutex);
    Signal::wait(lock, [&] { return done(parity); }, "nobody completes an mbarrier");
  }
};

struct NamedBarrier : Signal {
  int arrived = 0;
  unsigned generation = 0;
  void meet(int threads) {
    std::unique_lock lock(mutex);
    const unsigned mine = generation;
    if (++arrived == threads) {
      arrived = 0;
      ++generation;
      changed.notify_all();
    } else {
      wait(lock, [&] { return generation != mine; }, "nobody comes to a named barrier");
    }
  }
};

struct Warp {
  std::barrier<> meet{32};
  std::array<uint64_t, 32> value;
};
struct WarpGroup {
  std::barrier<> meet{128};
  uint32_t a[128][4];
};
struct Block {
  std::barrier<> meet;
  std::vector<Warp> warps;
  std::vector<WarpGroup> groups;
  std::array<NamedBarrier, 16> named;
  std::vector<Mbarrier> mbarriers{kSharedBytes / 8};
  explicit Block(int threads) : meet(threads), warps(threads / 32), groups((threads + 127) / 128) {}
};
inline Block* block = nullptr;

struct Index {
  unsigned x, y;
};
inline thread_local Index thread_index, block_index;
inline int lane() { return thread_index.x % 32; }
inline Warp& warp() { return block->warps[thread_index.x / 32]; }
inline WarpGroup& group() { return block->groups[thread_index.x / 128]; }
inline Mbarrier& mbarrier(uint32_t address) { return block->mbarriers[address / 8]; }

// What lanes `from(lane)` pass.
template <typename T>
std::array<T, 32> gather(T value) {
  static_assert(sizeof(T) <= 8);
  Warp& w = warp();
  std::memcpy(&w.value[lane()], &value, sizeof(T));
  w.meet.arrive_and_wait();
  std::array<T, 32> all;
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], &w.value[i], sizeof(T));
  w.meet.arrive_and_wait();
  return all;
}

template <typename Kernel>
void run(dim3 grid, unsigned threads, Kernel kernel) {
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      Block here(threads);
      block = &here;
      std::memset(shared_base, 0xFF, kSharedBytes);  // poison: NaN in every format
      std::vector<std::thread> all;
      for (unsigned t = 0; t < threads; ++t) {
        all.emplace_back([&, t] {
          thread_index = {t, 0};
          block_index = {x, y};
          kernel();
          block->meet.arrive_and_drop();
        });
      }
      for (std::thread& t : all) t.join();
    }
  }
}

}  // namespace host

#define threadIdx host::thread_index
#define blockIdx host::block_index

inline void __syncthreads() { host::block->meet.arrive_and_wait(); }
inline void __syncwarp() { host::warp().meet.arrive_and_wait(); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return host::gather(value)[host::lane() ^ mask];
}
template <typename T>
T __shfl_sync(unsigned, T value, int from) {
  return host::gather(value)[from];
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
  const auto all = host::gather(value);
  return all[host::lane() >= by ? host::lane() - by : host::lane()];
}
inline bool __any_sync(unsigned, bool value) {
  for (const bool x : host::gather(value)) {
    if (x) return true;
  }
  return false;
}
inline bool __all_sync(unsigned mask, bool value) { return !__any_sync(mask, !value); }
inline int __reduce_max_sync(unsigned, int value) {
  int most = value;
  for (const int x : host::gather(value)) most = x > most ? x : most;
  return most;
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return result;
}
template <typename T>
T atomicMin(T* at, T value) {
  std::atomic_ref<T> x(*at);
  T old = x.load();
  while (value < old && !x.compare_exchange_weak(old, value)) {}
  return old;
}
template <typename T>
T atomicMax(T* at, T value) {
  std::atomic_ref<T> x(*at);
  T old = x.load();
  while (value > old && !x.compare_exchange_weak(old, value)) {}
  return old;
}
template <typename T>
T min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
T max(T a, T b) {
  return a > b ? a : b;
}
