// Trusts pages for as long as they stay in this process's page table.
//
// A page is trusted from when its bytes were verified for as long as it stays in this process's
// page table: the kernel takes a page out of every page table before it can drop its contents, so
// what comes back from storage later, for whichever process, comes as a page that is not present.
// A bit "verified" beside a page that is merely resident (mincore, or state shared with other
// processes) would not tell a page that stayed from one that was dropped and read again.
//
// Two events make pages present that were not verified. A fault maps resident pages around it
// ("fault-around", 64 KiB): before a fault, pages there that are gone are invalidated. And a page
// that two samples share may be brought back for one of them: then the page beyond it is
// invalidated, so that the other sample is verified as well.
//
// Trust ages: it has two generations, the present and the one before. `age` forgets the one before
// and begins another, so that a page is trusted for one to two periods after it was verified.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "paceline/page_cache.hpp"
#include "paceline/residency.hpp"

namespace paceline {
namespace {

constexpr std::size_t word_bits = 64;
// The kernel's fault_around_bytes: its default, which only root can change.
constexpr std::size_t around_pages = 64 * 1024 / page_size;

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

// In either of two bit maps of one size.
bool all_set(const Word* words, const Word* others, std::size_t first, std::size_t end) noexcept {
  while (first < end) {
    const std::size_t from = first % word_bits;
    const std::size_t count = std::min(word_bits - from, end - first);
    const std::uint64_t wanted =
        (count == word_bits ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1) << from;
    const std::uint64_t found = words[first / word_bits].load(std::memory_order_acquire) |
                                others[first / word_bits].load(std::memory_order_acquire);
    if ((found & wanted) != wanted) return false;
    first += count;
  }
  return true;
}

class PageTableResidency final : public Residency {
 public:
  explicit PageTableResidency(std::span<const std::byte> mapping);

  bool resident(std::span<const std::byte> bytes, bool confirm) const noexcept override;
  bool trusted(std::span<const std::byte> bytes) const noexcept override;
  void note_resident(std::span<const std::byte> bytes) noexcept override;
  void trust(std::span<const std::byte> bytes) noexcept override;
  void expect_faults(std::span<const std::byte> bytes) noexcept override;
  void invalidate_around(std::span<const std::byte> bytes) noexcept override;
  void invalidate_all() noexcept override;
  void age() noexcept override;

 private:
  struct Range {  // of pages
    std::size_t first;
    std::size_t end;
  };

  using Bits = std::unique_ptr<Word[]>;

  Range pages(std::span<const std::byte> bytes) const noexcept;
  Range around(Range range) const noexcept;
  std::span<const std::byte> bytes_of(std::size_t first, std::size_t count) const noexcept;
  bool present(Range range) const noexcept;
  bool is_trusted(std::size_t page) const noexcept;
  void invalidate(std::size_t page) noexcept;
  void clear(Bits& bits) noexcept;

  std::span<const std::byte> mapping_;
  std::size_t page_count_;
  std::array<Bits, 2> trusted_;  // a bit a page, by generation
  std::atomic<unsigned> present_generation_{0};
  Bits resident_;
};

PageTableResidency::PageTableResidency(std::span<const std::byte> mapping)
    : mapping_(mapping),
      page_count_((mapping.size() + page_size - 1) / page_size),
      trusted_{std::make_unique<Word[]>((page_count_ + word_bits - 1) / word_bits),
               std::make_unique<Word[]>((page_count_ + word_bits - 1) / word_bits)},
      resident_(std::make_unique<Word[]>((page_count_ + word_bits - 1) / word_bits)) {}

PageTableResidency::Range PageTableResidency::pages(std::span<const std::byte> bytes) const noexcept {
  const auto begin = static_cast<std::size_t>(bytes.data() - mapping_.data());
  return {begin / page_size, (begin + bytes.size() + page_size - 1) / page_size};
}

PageTableResidency::Range PageTableResidency::around(Range range) const noexcept {
  // Aligned by address, as the kernel does it; a mapping begins at a page, not at 64 KiB.
  const auto base = reinterpret_cast<std::uintptr_t>(mapping_.data()) / page_size;
  const std::size_t first = (base + range.first) / around_pages * around_pages;
  const std::size_t end = (base + range.end + around_pages - 1) / around_pages * around_pages;
  return {first > base ? first - base : 0, std::min(end - base, page_count_)};
}

void PageTableResidency::clear(Bits& bits) noexcept {
  for (std::size_t i = 0; i < (page_count_ + word_bits - 1) / word_bits; ++i) {
    bits[i].store(0, std::memory_order_release);
  }
}

bool PageTableResidency::is_trusted(std::size_t page) const noexcept {
  return get(trusted_[0].get(), page) || get(trusted_[1].get(), page);
}

void PageTableResidency::invalidate(std::size_t page) noexcept {
  unset(trusted_[0].get(), page);
  unset(trusted_[1].get(), page);
}

bool PageTableResidency::trusted(std::span<const std::byte> bytes) const noexcept {
  if (bytes.size() < min_trusted_bytes) return false;
  const Range range = pages(bytes);
  return all_set(trusted_[0].get(), trusted_[1].get(), range.first, range.end);
}

bool PageTableResidency::resident(std::span<const std::byte> bytes, bool confirm) const noexcept {
  if (bytes.empty()) return true;
  const Range range = pages(bytes);
  const Word* const words = resident_.get();
  return all_set(words, words, range.first, range.end) && (!confirm || present(range));
}

std::span<const std::byte> PageTableResidency::bytes_of(std::size_t first,
                                                        std::size_t count) const noexcept {
  const std::size_t begin = first * page_size;
  return mapping_.subspan(begin, std::min(count * page_size, mapping_.size() - begin));
}

bool PageTableResidency::present(Range range) const noexcept {
  std::array<std::uint8_t, 512> found;
  for (std::size_t first = range.first; first < range.end; first += found.size()) {
    const std::size_t count = std::min(found.size(), range.end - first);
    if (!pages_present(bytes_of(first, count), {found.data(), count})) return false;
    if (std::find(found.begin(), found.begin() + count, 0) != found.begin() + count) return false;
  }
  return true;
}

void PageTableResidency::note_resident(std::span<const std::byte> bytes) noexcept {
  const Range range = pages(bytes);
  for (std::size_t page = range.first; page < range.end; ++page) {
    if (!get(resident_.get(), page)) set(resident_.get(), page);
  }
}

void PageTableResidency::expect_faults(std::span<const std::byte> bytes) noexcept {
  if (bytes.empty()) return;
  const Range window = around(pages(bytes));
  std::size_t first_trusted = window.first;
  while (first_trusted < window.end && !is_trusted(first_trusted)) ++first_trusted;
  if (first_trusted == window.end) return;  // nothing to lose
  std::array<std::uint8_t, 512> found;
  for (std::size_t first = window.first; first < window.end; first += found.size()) {
    const std::size_t count = std::min(found.size(), window.end - first);
    const bool known = pages_present(bytes_of(first, count), {found.data(), count});
    for (std::size_t i = 0; i < count; ++i) {
      if (!known || found[i] == 0) invalidate(first + i);
    }
  }
}

void PageTableResidency::invalidate_around(std::span<const std::byte> bytes) noexcept {
  if (bytes.empty()) return;
  const Range window = around(pages(bytes));
  for (std::size_t page = window.first; page < window.end; ++page) invalidate(page);
}

void PageTableResidency::trust(std::span<const std::byte> bytes) noexcept {
  if (bytes.size() < min_trusted_bytes) return;
  const Range range = pages(bytes);
  const auto begin = static_cast<std::size_t>(bytes.data() - mapping_.data());
  Word* const words = trusted_[present_generation_.load(std::memory_order_acquire)].get();
  // The rest of a page at the edge was not verified: if the page was not trusted before, whatever
  // shares it must not become trusted by this.
  if (begin % page_size != 0 && range.first > 0 && !is_trusted(range.first)) {
    invalidate(range.first - 1);
  }
  if ((begin + bytes.size()) % page_size != 0 && range.end < page_count_ &&
      !is_trusted(range.end - 1)) {
    invalidate(range.end);
  }
  for (std::size_t page = range.first; page < range.end; ++page) {
    if (!get(words, page)) set(words, page);
  }
}

void PageTableResidency::invalidate_all() noexcept {
  clear(trusted_[0]);
  clear(trusted_[1]);
  clear(resident_);
}

// A thread that still marks pages in the generation before marks them as older than they are.
void PageTableResidency::age() noexcept {
  const unsigned next = 1 - present_generation_.load(std::memory_order_relaxed);
  clear(trusted_[next]);
  present_generation_.store(next, std::memory_order_release);
}

}  // namespace

std::unique_ptr<Residency> trust_page_table(std::span<const std::byte> mapping) {
  return std::make_unique<PageTableResidency>(mapping);
}

}  // namespace paceline
