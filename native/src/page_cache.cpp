#include "paceline/page_cache.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>

#include "paceline/fork.hpp"

namespace paceline {
namespace {

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#ifndef SYS_cachestat
#define SYS_cachestat 451
#endif
struct CacheRange {  // as <linux/mman.h> has them from 6.5 on
  std::uint64_t offset;
  std::uint64_t length;
};
struct CacheCounts {
  std::uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

// Their pages are never written back, and none counts as dirty.
bool lies_in_memory(std::uint64_t file_system) noexcept {
  constexpr std::uint64_t tmpfs = 0x01021994;
  constexpr std::uint64_t ramfs = 0x858458f6;
  constexpr std::uint64_t hugetlbfs = 0x958458f6;
  return file_system == tmpfs || file_system == ramfs || file_system == hugetlbfs;
}

// Asked before a file is opened: on a shared file system each open costs a request to its server.
bool has_cachestat() noexcept {
  struct Cachestat {
    bool known = syscall(SYS_cachestat, -1, nullptr, nullptr, 0U) == 0 ||
                 (errno != ENOSYS && errno != EPERM);  // EPERM: a container's filter
  };
  return made_once<Cachestat>().known;
}

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

std::uint64_t coarse_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(now.tv_nsec);
}

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

DirtyPages dirty_pages(const std::string& path, std::uint64_t inode, std::uint64_t offset,
                       std::uint64_t length) noexcept {
  if (!has_cachestat()) return DirtyPages::unknown;
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return DirtyPages::unknown;
  const DirtyPages found = dirty_pages(descriptor, inode, offset, length);
  close(descriptor);
  return found;
}

DirtyPages dirty_pages(int descriptor, std::uint64_t inode, std::uint64_t offset,
                       std::uint64_t length) noexcept {
  CacheRange range{offset, length};
  struct stat status {};
  struct statfs file_system {};
  CacheCounts counts{};
  if (!has_cachestat() || fstat(descriptor, &status) != 0 || status.st_ino != inode ||
      fstatfs(descriptor, &file_system) != 0 ||
      lies_in_memory(static_cast<std::uint64_t>(file_system.f_type)) ||
      syscall(SYS_cachestat, descriptor, &range, &counts, 0U) != 0) {
    return DirtyPages::unknown;
  }
  return counts.dirty > 0 ? DirtyPages::some : DirtyPages::none;
}

void populate_for_writing(std::span<std::byte> target) noexcept {
  static_cast<void>(advise(target, MADV_POPULATE_WRITE));
}

void read_ahead(std::span<const std::byte> bytes, const std::atomic<bool>* stopping) noexcept {
  for (std::size_t done = 0; done < bytes.size(); done += read_ahead_bytes) {
    if (stopping != nullptr && stopping->load(std::memory_order_relaxed)) return;
    const std::size_t size = std::min(read_ahead_bytes, bytes.size() - done);
    static_cast<void>(advise(bytes.subspan(done, size), MADV_WILLNEED));
  }
}

}  // namespace paceline
