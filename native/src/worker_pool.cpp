#include "paceline/worker_pool.hpp"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "paceline/fork.hpp"

namespace paceline {

constexpr std::size_t max_posted = 64;

struct WorkerPool::State {
  explicit State(unsigned count) {
    // The workers must not take the script's signals.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (unsigned i = 0; i < count; ++i) workers.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // the system gives no more threads: fewer will do
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~State() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
      posted.clear();
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
  }

  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      wake.wait(lock, [this] { return stopping || !posted.empty(); });
      if (stopping) return;
      const auto task = std::move(posted.front());
      posted.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::function<void()>> posted;
  bool stopping = false;
  std::vector<std::thread> workers;
};

WorkerPool::WorkerPool(unsigned threads) : threads_(threads) {}

WorkerPool::~WorkerPool() { retire(); }

void WorkerPool::retire() noexcept {
  // A forked child has the memory of the threads but not the threads: nothing can be joined.
  if (state_ && generation_ != fork_generation()) static_cast<void>(state_.release());
  state_.reset();
}

WorkerPool::State& WorkerPool::state() {
  const std::lock_guard lock(starting_);
  if (!state_ || generation_ != fork_generation()) {
    retire();
    generation_ = fork_generation();
    state_ = std::make_unique<State>(std::max(threads_, 2U) - 1);
  }
  return *state_;
}

void WorkerPool::run(std::size_t count, const std::function<void(std::size_t)>& task) {
  if (threads_ < 2 || count < 2) {
    for (std::size_t i = 0; i < count; ++i) task(i);
    return;
  }
  // Helpers may come late, when the caller has long returned: what they touch then is theirs too.
  struct Job {
    const std::function<void(std::size_t)>* task;
    std::size_t count;
    std::atomic<std::size_t> next{0};
    std::mutex mutex;
    std::condition_variable over;
    std::size_t done = 0;
    std::exception_ptr problem;  // the first one
  };
  const auto job = std::make_shared<Job>();
  job->task = &task;
  job->count = count;
  const auto take_part = [job] {
    std::size_t mine = 0;
    for (std::size_t i = job->next++; i < job->count; i = job->next++, ++mine) {
      try {
        (*job->task)(i);
      } catch (...) {
        const std::lock_guard lock(job->mutex);
        if (!job->problem) job->problem = std::current_exception();
      }
    }
    if (mine == 0) return;
    const std::lock_guard lock(job->mutex);
    job->done += mine;
    if (job->done == job->count) job->over.notify_one();
  };
  State& pool = state();
  const std::size_t helpers = std::min(count - 1, pool.workers.size());
  {
    const std::lock_guard lock(pool.mutex);
    for (std::size_t i = 0; i < helpers; ++i) pool.posted.push_front(take_part);
  }
  for (std::size_t i = 0; i < helpers; ++i) pool.wake.notify_one();
  take_part();
  std::unique_lock lock(job->mutex);
  job->over.wait(lock, [&] { return job->done == count; });
  if (job->problem) std::rethrow_exception(job->problem);
}

void WorkerPool::post(std::function<void()> task) {
  State& pool = state();
  {
    const std::lock_guard lock(pool.mutex);
    if (pool.workers.empty() || pool.posted.size() >= max_posted) return;
    pool.posted.push_back(std::move(task));
  }
  pool.wake.notify_one();
}

}  // namespace paceline
