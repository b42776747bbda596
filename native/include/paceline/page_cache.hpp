// Operations on the page cache and on this process's page table: bring pages in, check whether they
// are present, count faults. Stateless; thread-safe, and safe to use in a forked child.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace paceline {

constexpr std::size_t page_size = 4096;

// Of a clock that costs nothing to read and moves on every few milliseconds.
std::uint64_t coarse_ns() noexcept;

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
// Whether bytes of a file wait in memory to be written to storage. While they do, a program that has
// mapped them may change them further without the kernel's notice: the file's times stay as they are.
// Unknown before Linux 6.5, on a file system in memory, and if `path` is not that inode any more.
enum class DirtyPages { none, some, unknown };
DirtyPages dirty_pages(const std::string& path, std::uint64_t inode, std::uint64_t offset,
                       std::uint64_t length) noexcept;
DirtyPages dirty_pages(int descriptor, std::uint64_t inode, std::uint64_t offset,
                       std::uint64_t length) noexcept;  // of an open file

// Populates the pages under `target`, so that copying to them does not fault.
void populate_for_writing(std::span<std::byte> target) noexcept;
// Starts to read the pages under `bytes` from storage, and no others, until `stopping` is true.
void read_ahead(std::span<const std::byte> bytes,
                const std::atomic<bool>* stopping = nullptr) noexcept;

}  // namespace paceline
