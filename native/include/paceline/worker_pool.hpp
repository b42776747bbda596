// Threads that share the work of one call, and sleep in between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace paceline {

class WorkerPool {
 public:
  // `threads` counts the caller; the others start when they are first needed. A forked child
  // starts its own.
  explicit WorkerPool(unsigned threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  unsigned threads() const noexcept { return threads_; }
  // Calls task(0) to task(count - 1), each once, here and on the other threads; returns when all
  // are done, with the first exception that one of them threw.
  void run(std::size_t count, const std::function<void(std::size_t)>& task);
  // Calls `task` some time later on another thread. A hint: dropped when too many are waiting.
  void post(std::function<void()> task);

 private:
  struct State;

  State& state();
  void retire() noexcept;

  unsigned threads_;
  std::mutex starting_;
  std::uint64_t generation_ = 0;
  std::unique_ptr<State> state_;
};

}  // namespace paceline
