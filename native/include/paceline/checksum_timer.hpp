// Computes checksums and counts the time that they take: one in 16 of the small ones, which a clock
// read each would slow down, stands for all of them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "paceline/crc32c.hpp"

namespace paceline {

// Thread-safe.
class ChecksumTimer {
 public:
  std::uint32_t crc(const void* data, std::size_t size, std::uint32_t before = 0) noexcept {
    thread_local unsigned small = 0;
    const bool is_small = size < small_bytes;
    if (is_small && ++small % timed_one_in != 0) return crc32c(data, size, before);
    const auto began = std::chrono::steady_clock::now();
    const std::uint32_t found = crc32c(data, size, before);
    const auto took = std::chrono::steady_clock::now() - began;
    ns_.fetch_add(static_cast<std::uint64_t>(
                      std::chrono::duration_cast<std::chrono::nanoseconds>(took).count()) *
                      (is_small ? timed_one_in : 1),
                  std::memory_order_relaxed);
    return found;
  }
  // Summed over threads.
  std::uint64_t ns() const noexcept { return ns_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t small_bytes = 16 * 1024;
  static constexpr unsigned timed_one_in = 16;
  std::atomic<std::uint64_t> ns_{0};
};

}  // namespace paceline
