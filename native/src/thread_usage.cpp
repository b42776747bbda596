#include "paceline/thread_usage.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>

namespace paceline {
namespace {

constexpr std::uint64_t rescan_interval_ns = 250'000'000;  // new threads are rare after start-up

bool read_times(int descriptor, ThreadTimes& times) {
  char text[96];
  const ssize_t length = pread(descriptor, text, sizeof text - 1, 0);
  if (length <= 0) return false;  // the thread has ended
  text[length] = '\0';
  char* rest = nullptr;
  times.running_ns = std::strtoull(text, &rest, 10);
  times.runnable_ns = std::strtoull(rest, &rest, 10);
  return true;
}

}  // namespace

int open_thread_times(int tid) noexcept {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/task/%d/schedstat", tid);
  return open(path, O_RDONLY | O_CLOEXEC);
}

ThreadTimes read_thread_times(int descriptor) noexcept {
  ThreadTimes times;
  if (descriptor >= 0) read_times(descriptor, times);
  return times;
}

ThreadUsage::~ThreadUsage() {
  for (const auto& [tid, thread] : threads_) close(thread.descriptor);
}

void ThreadUsage::rescan() {
  DIR* directory = opendir("/proc/self/task");
  if (directory == nullptr) return;
  while (const dirent* entry = readdir(directory)) {
    const int tid = std::atoi(entry->d_name);
    if (tid <= 0 || threads_.contains(tid)) continue;
    const int descriptor = open_thread_times(tid);
    if (descriptor >= 0) threads_.emplace(tid, Thread{descriptor, {}});
  }
  closedir(directory);
}

ThreadTimes ThreadUsage::sample(std::uint64_t now_ns) {
  if (now_ns >= rescan_at_ns_) {
    rescan();
    rescan_at_ns_ = now_ns + rescan_interval_ns;
  }
  ThreadTimes sum = retired_;
  for (auto entry = threads_.begin(); entry != threads_.end();) {
    Thread& thread = entry->second;
    const bool alive = read_times(thread.descriptor, thread.last);
    sum.running_ns += thread.last.running_ns;
    sum.runnable_ns += thread.last.runnable_ns;
    if (alive) {
      ++entry;
      continue;
    }
    retired_.running_ns += thread.last.running_ns;
    retired_.runnable_ns += thread.last.runnable_ns;
    close(thread.descriptor);
    entry = threads_.erase(entry);
  }
  return sum;
}

ThreadTimes ThreadUsage::last_of(int tid) const {
  const auto found = threads_.find(tid);
  return found == threads_.end() ? ThreadTimes{} : found->second.last;
}

}  // namespace paceline
