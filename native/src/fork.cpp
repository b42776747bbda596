#include "paceline/fork.hpp"

#include <pthread.h>

#include <atomic>

namespace paceline {
namespace {

std::atomic<std::uint64_t> generation{0};
const int installed = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });

}  // namespace

std::uint64_t fork_generation() noexcept {
  static_cast<void>(installed);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace paceline
