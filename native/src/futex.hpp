// Sleeping on a word of memory that processes share.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace paceline {

// Sleeps until the word is woken, has another value than `expected`, or the time is over.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                       std::uint64_t duration_ns) noexcept {
  const timespec duration{static_cast<time_t>(duration_ns / 1'000'000'000),
                          static_cast<long>(duration_ns % 1'000'000'000)};
  // Not FUTEX_PRIVATE_FLAG: the word lies in memory that processes share.
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &duration, nullptr, 0);
}

inline void futex_wake(const std::atomic<std::uint32_t>& word, int most = INT_MAX) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, most, nullptr, nullptr, 0);
}

}  // namespace paceline
