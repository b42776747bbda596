// Where the bytes of a batch lie in the shards, and where they belong in the caller's buffer: what has to
// be fetched for samples whose shards are not mapped here, and what to do with fetched bytes.
//
// An extent that is stored as it is arrives straight in its place in the buffer. A compressed one arrives
// in memory of the plan and is decoded to its place. Both are compared with their checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "paceline/pack_reader.hpp"
#include "paceline/peer_link.hpp"

namespace paceline {

// Not thread-safe, but different extents may be fetched and finished by different threads.
class ExtentPlan {
 public:
  struct Item {
    std::int64_t number;  // of the sample in the batch
    Extent extent;
    std::size_t position;  // in the buffer
    std::size_t scratch;   // where the stored bytes of a compressed one arrive
  };

  // Throws PackError, std::out_of_range. `reader` must outlive the plan.
  ExtentPlan(const PackReader& reader, std::span<const std::int64_t> ids);

  const std::vector<Item>& items() const noexcept { return items_; }
  std::span<const std::int64_t> offsets() const noexcept { return offsets_; }
  std::size_t size() const noexcept { return static_cast<std::size_t>(offsets_.back()); }

  // What to fetch for an extent, into a buffer of `size` bytes.
  WantedRange wanted(std::size_t item, std::span<std::byte> out);
  // Decodes an extent that was fetched, if it is compressed, and says whether it is what was packed.
  RangeOutcome finish(std::size_t item, std::span<std::byte> out, RangeOutcome outcome);
  // Reads from files that are mapped here those samples of which all extents are among `items`; says
  // of each extent of the plan whether it was. Throws PackError: a sample cannot be read, or is damaged.
  std::vector<RangeOutcome> read_mapped(const PackReader& mapped, std::span<const std::int64_t> items,
                                        std::span<std::byte> out) const;

 private:
  const PackReader& reader_;
  std::vector<std::int64_t> ids_;
  std::vector<std::int64_t> offsets_;
  std::vector<Item> items_;
  std::vector<std::byte> scratch_;
};

}  // namespace paceline
