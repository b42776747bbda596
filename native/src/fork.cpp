#include "paceline/fork.hpp"

#include <pthread.h>
#include <time.h>

#include <atomic>
#include <cerrno>

namespace paceline {
namespace {

constexpr long pause_ns = 50'000;
constexpr int most_pauses = 20'000;  // a second

std::atomic<std::uint64_t> generation{0};
std::atomic<int> guarded{0};  // threads with a guard
std::atomic<int> forking{0};  // threads between the two ends of fork
// Of this thread. Initial-exec: a signal's handler may ask for it first, and must not allocate memory.
constinit thread_local int depth [[gnu::tls_model("initial-exec")]] = 0;

int own() noexcept { return depth > 0 ? 1 : 0; }

void wait_a_moment() noexcept {
  const int problem = errno;
  const timespec time{0, pause_ns};
  nanosleep(&time, nullptr);
  errno = problem;
}

void before_fork() noexcept {
  forking.fetch_add(1);
  for (int i = 0; i < most_pauses && guarded.load() > own(); ++i) wait_a_moment();
}

void after_fork_in_parent() noexcept { forking.fetch_sub(1); }

void after_fork_in_child() noexcept {
  generation.fetch_add(1);
  forking.store(0);
  guarded.store(own());
}

const int installed = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

}  // namespace

std::uint64_t fork_generation() noexcept {
  static_cast<void>(installed);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace paceline

// One of the two sees the other: the thread that enters, `forking`; the one that forks, `guarded`.
void fork_guard_enter() {
  using namespace paceline;
  if (depth++ > 0) return;
  for (int i = 0;; ++i) {
    guarded.fetch_add(1);
    if (forking.load() == 0 || i == most_pauses) return;
    guarded.fetch_sub(1);
    wait_a_moment();
  }
}

void fork_guard_leave() {
  using namespace paceline;
  if (--depth == 0) guarded.fetch_sub(1);
}
