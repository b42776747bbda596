// Which pages of a mapped file still hold what this process verified.
//
// A page is trusted from when its bytes were verified for as long as it stays in this process's
// page table: the kernel takes a page out of every page table before it can drop its contents, so
// what comes back from storage later, whoever brings it back, comes as a page that is not present.
// A bit "verified" beside a page that is merely resident (mincore, or state shared with other
// processes) would not tell a page that stayed from one that was dropped and read again.
//
// Two things make pages present that nobody looked at. A fault maps what is resident around it
// ("fault-around", 64 KiB): before a fault, pages there that are gone lose their trust. And a page
// that two samples share may be brought back for one of them: then the page beyond it loses its
// trust, so that the other sample is verified as well.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace paceline {

constexpr std::size_t page_size = 4096;
// A page of its own is what tells a sample from its neighbours: smaller ones are never trusted.
constexpr std::size_t min_trusted_bytes = 2 * page_size;

class Residency {
 public:
  explicit Residency(std::span<const std::byte> mapping);

  // Whether all pages under `bytes` hold verified bytes, unless some were dropped since: whoever
  // skips a checksum because of this must know that no fault happened while it copied.
  bool trusted(std::span<const std::byte> bytes) const noexcept;
  // Whether all of them were in the page table once, as a hint; and whether they are.
  bool seen(std::span<const std::byte> bytes) const noexcept;
  bool present(std::span<const std::byte> bytes) const noexcept;
  void note_seen(std::span<const std::byte> bytes) noexcept;
  // Before pages under `bytes` may be faulted in.
  void expect_faults(std::span<const std::byte> bytes) noexcept;
  // After a fault that came unexpected: pages around `bytes` may be back from storage.
  void distrust_around(std::span<const std::byte> bytes) noexcept;
  void distrust_all() noexcept;
  // After `bytes` were verified.
  void trust(std::span<const std::byte> bytes) noexcept;
  void forget() noexcept;

 private:
  struct Range {
    std::size_t first;
    std::size_t end;
  };

  using Bits = std::unique_ptr<std::atomic<std::uint64_t>[]>;

  Range pages(std::span<const std::byte> bytes) const noexcept;
  Range around(Range range) const noexcept;
  void clear(Bits& bits) noexcept;

  std::span<const std::byte> mapping_;
  std::size_t page_count_;
  Bits trusted_;  // a bit a page
  Bits seen_;
};

// Fills `present[i]` for the pages from `address` on: whether each is in this process's page table.
// False if the system does not tell.
bool pages_present(const std::byte* address, std::span<std::uint8_t> present) noexcept;

// Page faults of the calling thread so far, or -1 if the system does not tell.
std::int64_t thread_faults() noexcept;

// Brings the pages under `bytes` into the page table; false if they cannot be read, where touching
// them would raise SIGBUS: the file was cut off, or the device failed.
bool populate(std::span<const std::byte> bytes) noexcept;
// Has the pages under `target` made, so that copying to them does not fault.
void populate_for_writing(std::span<std::byte> target) noexcept;
// Starts to read the pages under `bytes` from storage, and nothing beside them.
void read_ahead(std::span<const std::byte> bytes) noexcept;

}  // namespace paceline
