// What a thread of the parent does with a guard, a forked child finds not begun or done.
#include "paceline/fork.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "check.hpp"

using paceline::ForkGuard;

// A child cannot join its parent's threads, which the thread sanitizer reports as it ends.
extern "C" const char* __tsan_default_options() { return "report_thread_leaks=0"; }

namespace {

// The exit status of a forked child, or -1 if a signal ended it.
int status_of_child(const std::function<int()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that waits for ever is named by its signal
    _exit(work());
  }
  int status = 0;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void nothing_is_cut_in_two() {
  std::atomic<bool> ends = false;
  std::atomic<unsigned> first = 0, second = 0;
  std::thread other([&] {
    while (!ends.load()) {
      const ForkGuard whole;
      first.fetch_add(1);
      const ForkGuard nested;
      for (int i = 0; i < 50; ++i) std::this_thread::yield();
      second.fetch_add(1);
    }
  });
  for (int i = 0; i < 100; ++i) {
    CHECK(status_of_child([&] { return first.load() == second.load() ? 0 : 1; }) == 0);
  }
  ends.store(true);
  other.join();
}

// It goes on in the child, which has the thread.
void a_thread_forks_within_its_own_guard() {
  const ForkGuard whole;
  CHECK(status_of_child([] {
          const ForkGuard nested;
          return status_of_child([] { return 7; });
        }) == 7);
}

std::atomic<bool> is_begun = false;

struct Costly {
  Costly() {
    is_begun.store(true);
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    value = 42;
  }
  int value = 0;
};

void an_object_is_made_once_and_never_half() {
  std::thread other([] { CHECK(paceline::made_once<Costly>().value == 42); });
  while (!is_begun.load()) std::this_thread::yield();
  CHECK(status_of_child([] { return paceline::made_once<Costly>().value; }) == 42);
  other.join();
  CHECK(&paceline::made_once<Costly>() == &paceline::made_once<Costly>());
}

}  // namespace

int main() {
  nothing_is_cut_in_two();
  a_thread_forks_within_its_own_guard();
  an_object_is_made_once_and_never_half();
}
