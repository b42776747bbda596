#include "paceline/page_cache.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>

namespace paceline {
namespace {

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

// The kernel cuts one request at what the device takes at once, often 1 MiB.
constexpr std::size_t read_ahead_bytes = 512 * 1024;

std::span<const std::byte> pages_under(std::span<const std::byte> bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data()) & ~(page_size - 1);
  const auto end = reinterpret_cast<std::uintptr_t>(bytes.data()) + bytes.size();
  return {reinterpret_cast<const std::byte*>(begin), end - begin};
}

int advise(std::span<const std::byte> bytes, int advice) noexcept {
  const auto range = pages_under(bytes);
  if (range.empty()) return 0;
  int result = 0;
  do {
    result = madvise(const_cast<std::byte*>(range.data()), range.size(), advice);
  } while (result != 0 && errno == EINTR);
  return result;
}

// /proc/self/pagemap shows the page table of the process that opened it: after a fork the child
// needs its own.
class PageMap {
 public:
  static PageMap& of_this_process() {
    static PageMap map;
    return map;
  }

  bool read(std::uintptr_t page, std::span<std::uint64_t> entries) {
    const int descriptor = descriptor_.load(std::memory_order_acquire);
    const auto size = static_cast<ssize_t>(entries.size_bytes());
    return descriptor >= 0 && pread(descriptor, entries.data(), entries.size_bytes(),
                                    static_cast<off_t>(page * sizeof(std::uint64_t))) == size;
  }

 private:
  PageMap() {
    open_own();
    pthread_atfork(nullptr, nullptr, [] { of_this_process().reopen(); });
  }

  void open_own() { descriptor_ = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC); }
  void reopen() {
    const int before = descriptor_.exchange(-1);
    if (before >= 0) close(before);
    open_own();
  }

  std::atomic<int> descriptor_{-1};
};

// Page faults of the calling thread so far, or -1 if the system does not say.
std::int64_t thread_faults() noexcept {
  rusage usage{};
  if (getrusage(RUSAGE_THREAD, &usage) != 0) return -1;
  return static_cast<std::int64_t>(usage.ru_minflt) + static_cast<std::int64_t>(usage.ru_majflt);
}

}  // namespace

FaultWatch::FaultWatch() noexcept : before_(thread_faults()) {}

bool FaultWatch::struck() const noexcept { return before_ < 0 || before_ != thread_faults(); }

bool pages_present(std::span<const std::byte> pages, std::span<std::uint8_t> present) noexcept {
  constexpr int present_bit = 63;
  std::array<std::uint64_t, 512> entries;
  const auto page = reinterpret_cast<std::uintptr_t>(pages.data()) / page_size;
  for (std::size_t done = 0; done < present.size();) {
    const std::size_t count = std::min(entries.size(), present.size() - done);
    if (!PageMap::of_this_process().read(page + done, {entries.data(), count})) return false;
    for (std::size_t i = 0; i < count; ++i) {
      present[done + i] = static_cast<std::uint8_t>(entries[i] >> present_bit);
    }
    done += count;
  }
  return true;
}

bool populate(std::span<const std::byte> bytes) noexcept {
  // EINVAL: a kernel before 5.14, where touching the pages has to do.
  return advise(bytes, MADV_POPULATE_READ) == 0 || errno == EINVAL;
}

void populate_for_writing(std::span<std::byte> target) noexcept {
  static_cast<void>(advise(target, MADV_POPULATE_WRITE));
}

void read_ahead(std::span<const std::byte> bytes) noexcept {
  for (std::size_t done = 0; done < bytes.size(); done += read_ahead_bytes) {
    const std::size_t size = std::min(read_ahead_bytes, bytes.size() - done);
    static_cast<void>(advise(bytes.subspan(done, size), MADV_WILLNEED));
  }
}

}  // namespace paceline
