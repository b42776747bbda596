#include "paceline/residency.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>

namespace paceline {
namespace {

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

constexpr std::size_t word_bits = 64;
// The kernel's fault_around_bytes: its default, which only root can change.
constexpr std::size_t around_pages = 64 * 1024 / page_size;
// The kernel cuts one request at what the device takes at once, often 1 MiB.
constexpr std::size_t read_ahead_bytes = 512 * 1024;

using Word = std::atomic<std::uint64_t>;

bool get(const Word* words, std::size_t page) noexcept {
  return ((words[page / word_bits].load(std::memory_order_acquire) >> (page % word_bits)) & 1U) != 0;
}

void set(Word* words, std::size_t page) noexcept {
  words[page / word_bits].fetch_or(std::uint64_t{1} << (page % word_bits),
                                   std::memory_order_acq_rel);
}

void unset(Word* words, std::size_t page) noexcept {
  words[page / word_bits].fetch_and(~(std::uint64_t{1} << (page % word_bits)),
                                    std::memory_order_acq_rel);
}

bool all_set(const Word* words, std::size_t first, std::size_t end) noexcept {
  while (first < end) {
    const std::size_t from = first % word_bits;
    const std::size_t count = std::min(word_bits - from, end - first);
    const std::uint64_t wanted =
        (count == word_bits ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1) << from;
    if ((words[first / word_bits].load(std::memory_order_acquire) & wanted) != wanted) return false;
    first += count;
  }
  return true;
}

bool any_set(const Word* words, std::size_t first, std::size_t end) noexcept {
  for (; first < end; ++first) {
    if (get(words, first)) return true;
  }
  return false;
}

std::span<const std::byte> whole_pages(std::span<const std::byte> bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data()) & ~(page_size - 1);
  const auto end = reinterpret_cast<std::uintptr_t>(bytes.data()) + bytes.size();
  return {reinterpret_cast<const std::byte*>(begin), end - begin};
}

int advise(std::span<const std::byte> bytes, int advice) noexcept {
  const auto range = whole_pages(bytes);
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

}  // namespace

Residency::Residency(std::span<const std::byte> mapping)
    : mapping_(mapping),
      page_count_((mapping.size() + page_size - 1) / page_size),
      trusted_(std::make_unique<Word[]>((page_count_ + word_bits - 1) / word_bits)),
      seen_(std::make_unique<Word[]>((page_count_ + word_bits - 1) / word_bits)) {}

Residency::Range Residency::pages(std::span<const std::byte> bytes) const noexcept {
  const auto begin = static_cast<std::size_t>(bytes.data() - mapping_.data());
  return {begin / page_size, (begin + bytes.size() + page_size - 1) / page_size};
}

Residency::Range Residency::around(Range range) const noexcept {
  // Aligned by address, as the kernel does it; a mapping begins at a page, not at 64 KiB.
  const auto base = reinterpret_cast<std::uintptr_t>(mapping_.data()) / page_size;
  const std::size_t first = (base + range.first) / around_pages * around_pages;
  const std::size_t end = (base + range.end + around_pages - 1) / around_pages * around_pages;
  return {first > base ? first - base : 0, std::min(end - base, page_count_)};
}

void Residency::clear(Bits& bits) noexcept {
  for (std::size_t i = 0; i < (page_count_ + word_bits - 1) / word_bits; ++i) {
    bits[i].store(0, std::memory_order_release);
  }
}

bool Residency::trusted(std::span<const std::byte> bytes) const noexcept {
  if (bytes.size() < min_trusted_bytes) return false;
  const Range range = pages(bytes);
  return all_set(trusted_.get(), range.first, range.end);
}

bool Residency::seen(std::span<const std::byte> bytes) const noexcept {
  if (bytes.empty()) return true;
  const Range range = pages(bytes);
  return all_set(seen_.get(), range.first, range.end);
}

bool Residency::present(std::span<const std::byte> bytes) const noexcept {
  const Range range = pages(bytes);
  std::array<std::uint8_t, 512> found;
  for (std::size_t first = range.first; first < range.end; first += found.size()) {
    const std::size_t count = std::min(found.size(), range.end - first);
    if (!pages_present(mapping_.data() + first * page_size, {found.data(), count})) return false;
    if (std::find(found.begin(), found.begin() + count, 0) != found.begin() + count) return false;
  }
  return true;
}

void Residency::note_seen(std::span<const std::byte> bytes) noexcept {
  const Range range = pages(bytes);
  for (std::size_t page = range.first; page < range.end; ++page) {
    if (!get(seen_.get(), page)) set(seen_.get(), page);
  }
}

void Residency::expect_faults(std::span<const std::byte> bytes) noexcept {
  if (bytes.empty()) return;
  const Range window = around(pages(bytes));
  if (!any_set(trusted_.get(), window.first, window.end)) return;  // nothing to lose
  std::array<std::uint8_t, 512> present;
  for (std::size_t first = window.first; first < window.end; first += present.size()) {
    const std::size_t count = std::min(present.size(), window.end - first);
    const bool known = pages_present(mapping_.data() + first * page_size, {present.data(), count});
    for (std::size_t i = 0; i < count; ++i) {
      if (!known || present[i] == 0) unset(trusted_.get(), first + i);
    }
  }
}

void Residency::distrust_around(std::span<const std::byte> bytes) noexcept {
  if (bytes.empty()) return;
  const Range window = around(pages(bytes));
  for (std::size_t page = window.first; page < window.end; ++page) unset(trusted_.get(), page);
}

void Residency::distrust_all() noexcept { clear(trusted_); }

void Residency::trust(std::span<const std::byte> bytes) noexcept {
  if (bytes.size() < min_trusted_bytes) return;
  const Range range = pages(bytes);
  const auto begin = static_cast<std::size_t>(bytes.data() - mapping_.data());
  Word* const words = trusted_.get();
  // The rest of a page at the edge was not verified: if the page was not trusted before, whatever
  // shares it must not become trusted by this.
  if (begin % page_size != 0 && range.first > 0 && !get(words, range.first)) {
    unset(words, range.first - 1);
  }
  if ((begin + bytes.size()) % page_size != 0 && range.end < page_count_ &&
      !get(words, range.end - 1)) {
    unset(words, range.end);
  }
  for (std::size_t page = range.first; page < range.end; ++page) {
    if (!get(words, page)) set(words, page);
  }
}

void Residency::forget() noexcept {
  clear(trusted_);
  clear(seen_);
}

bool pages_present(const std::byte* address, std::span<std::uint8_t> present) noexcept {
  constexpr int present_bit = 63;
  std::array<std::uint64_t, 512> entries;
  const auto page = reinterpret_cast<std::uintptr_t>(address) / page_size;
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

std::int64_t thread_faults() noexcept {
  rusage usage{};
  if (getrusage(RUSAGE_THREAD, &usage) != 0) return -1;
  return static_cast<std::int64_t>(usage.ru_minflt) + static_cast<std::int64_t>(usage.ru_majflt);
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
