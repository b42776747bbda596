// Operations on the page cache and on this process's page table: bring pages in, check whether they
// are present, count faults. Stateless; thread-safe, and safe to use in a forked child.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline {

constexpr std::size_t page_size = 4096;

// Fills `present[i]` for the i-th page of `pages`, which begins at a page: whether it is in this
// process's page table. False if the system does not say.
bool pages_present(std::span<const std::byte> pages, std::span<std::uint8_t> present) noexcept;

// Counts the page faults of the thread that made it.
class FaultWatch {
 public:
  FaultWatch() noexcept;
  // Whether this thread had a fault since, or the system does not say.
  bool struck() const noexcept;

 private:
  std::int64_t before_;
};

// Brings the pages under `bytes` into the page table; false if they cannot be read, where touching
// them would raise SIGBUS: the file was truncated, or the device failed.
bool populate(std::span<const std::byte> bytes) noexcept;
// Populates the pages under `target`, so that copying to them does not fault.
void populate_for_writing(std::span<std::byte> target) noexcept;
// Starts to read the pages under `bytes` from storage, and no others.
void read_ahead(std::span<const std::byte> bytes) noexcept;

}  // namespace paceline
