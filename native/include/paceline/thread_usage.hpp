// How long this process's threads ran, and how long they were runnable without getting a core:
// the second number distinguishes "not running" (another process uses the core) from work and sleep.
// Source: Linux Documentation/scheduler/sched-stats.rst, /proc/<pid>/task/<tid>/schedstat.
#pragma once

#include <cstdint>
#include <map>

namespace paceline {

struct ThreadTimes {
  std::uint64_t running_ns = 0;
  std::uint64_t runnable_ns = 0;  // waited on a run queue
};

// The descriptor of a thread's schedstat, or -1; and what it says now, zeros if nothing.
int open_thread_times(int tid) noexcept;
ThreadTimes read_thread_times(int descriptor) noexcept;

// Keeps one descriptor per thread so that a sample costs one pread each. Not thread-safe.
class ThreadUsage {
 public:
  ThreadUsage() = default;
  ~ThreadUsage();
  ThreadUsage(const ThreadUsage&) = delete;
  ThreadUsage& operator=(const ThreadUsage&) = delete;

  // Sums over all threads that live or lived since the first sample; never decreases.
  ThreadTimes sample(std::uint64_t now_ns);
  // What the last sample found of one thread; zeros for a thread that it did not find. The time on
  // a core of a thread that is running lags by up to a tick of the scheduler.
  ThreadTimes last_of(int tid) const;

 private:
  struct Thread {
    int descriptor;
    ThreadTimes last;
  };

  void rescan();

  std::map<int, Thread> threads_;
  ThreadTimes retired_;
  std::uint64_t rescan_at_ns_ = 0;
};

}  // namespace paceline
