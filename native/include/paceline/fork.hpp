// How often this process came about by fork: what threads and descriptors belong to changes then. And what
// a fork must not cut in two.
#pragma once

#include <atomic>
#include <cstdint>

#include "paceline/fork_guard.h"

namespace paceline {

// getpid() would cost a system call each time, so fork itself counts.
std::uint64_t fork_generation() noexcept;

// While one exists, a fork in another thread waits: the child has no thread that would finish what is half
// done. Short: fork waits for a second at most. Nests.
class ForkGuard {
 public:
  ForkGuard() noexcept { fork_guard_enter(); }
  ~ForkGuard() { fork_guard_leave(); }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;
};

// The one object of a type that is costly to make (it loads a library), made when it is first asked for.
// A static variable of a function alone would have a child wait for ever that is forked while it is made.
template <class Object>
const Object& made_once() {
  static std::atomic<const Object*> known{nullptr};
  const Object* found = known.load(std::memory_order_acquire);
  if (found == nullptr) {
    const ForkGuard whole;
    static const Object made;
    found = &made;
    known.store(found, std::memory_order_release);
  }
  return *found;
}

}  // namespace paceline
