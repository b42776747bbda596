// Which pages of a mapped file still hold bytes that this process verified: the interface by which a
// reader decides whether it may skip a checksum (docs/decisions/0002).
//
// A reader returns the same bytes with either implementation. To remove the page-table
// implementation, set ReadOptions::residency to `verify_always` and delete page_table_residency.cpp.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "paceline/page_cache.hpp"

namespace paceline {

// A page of its own is what tells a sample from its neighbours: smaller ones are never trusted.
constexpr std::size_t min_trusted_bytes = 2 * page_size;

// Of one mapped file. Thread-safe. All `bytes` lie within the mapping.
class Residency {
 public:
  virtual ~Residency() = default;

  // Whether all pages under `bytes` were in the page table once; `confirm` asks the kernel whether
  // they are. A hint: what is not resident is populated before it is read.
  virtual bool resident(std::span<const std::byte> bytes, bool confirm) const noexcept = 0;
  // Whether all pages under `bytes` hold verified bytes, unless some were dropped since: a reader
  // that skips a checksum because of this must know that no fault happened while it copied.
  virtual bool trusted(std::span<const std::byte> bytes) const noexcept = 0;
  // After pages under `bytes` were populated.
  virtual void note_resident(std::span<const std::byte> bytes) noexcept = 0;
  // After `bytes` were verified.
  virtual void trust(std::span<const std::byte> bytes) noexcept = 0;
  // Before pages under `bytes` may be faulted in.
  virtual void expect_faults(std::span<const std::byte> bytes) noexcept = 0;
  // After a fault that was not expected: pages around `bytes` may be back from storage.
  virtual void invalidate_around(std::span<const std::byte> bytes) noexcept = 0;
  // After the file was rewritten, or its pages were dropped.
  virtual void invalidate_all() noexcept = 0;
  // Now and then: what was verified before the last call is not trusted any more after this one.
  virtual void age() noexcept = 0;
};

// Makes the residency of a mapping.
using ResidencyMaker = std::unique_ptr<Residency> (*)(std::span<const std::byte> mapping);

// Trusts a page from when its bytes were verified for as long as it stays in this process's page
// table (page_table_residency.cpp).
std::unique_ptr<Residency> trust_page_table(std::span<const std::byte> mapping);

// Trusts no page: every read populates and verifies.
std::unique_ptr<Residency> verify_always(std::span<const std::byte> mapping);

}  // namespace paceline
