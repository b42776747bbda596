#include "paceline/extent_plan.hpp"

#include "paceline/crc32c.hpp"

namespace paceline {

ExtentPlan::ExtentPlan(const PackReader& reader, std::span<const std::int64_t> ids)
    : reader_(reader), ids_(ids.begin(), ids.end()), offsets_(ids.size() + 1) {
  reader.plan_batch(ids, offsets_);
  reader.check_memory(ids, offsets_);
  items_.reserve(ids.size());
  std::size_t scratch = 0;
  const PackIndex& index = reader.index();
  index.read([&] {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto [first, end] = index.extents(static_cast<std::uint64_t>(ids[i]));
      auto position = static_cast<std::size_t>(offsets_[i]);
      for (std::uint64_t at = first; at < end; ++at) {
        const Extent extent = index.extent(at);
        items_.push_back({static_cast<std::int64_t>(i), extent, position, scratch});
        position += extent.length;
        if (extent.is_encoded()) scratch += extent.stored_length;
      }
      // Planned by what the index said a moment ago: nothing is written beyond that.
      if (position != static_cast<std::size_t>(offsets_[i + 1])) {
        fail_corrupt(index.path(), "it was changed while it was open");
      }
    }
  });
  for (const Item& item : items_) {
    const Codec codec = item.extent.encoding.codec;
    if (!codec_available(codec)) {
      throw PackError(PackError::Kind::library, codec_library(codec), "");
    }
  }
  scratch_.resize(scratch);
}

WantedRange ExtentPlan::wanted(std::size_t item, std::span<std::byte> out) {
  const Item& it = items_[item];
  const bool is_encoded = it.extent.is_encoded();
  std::byte* const target =
      is_encoded ? scratch_.data() + it.scratch : out.subspan(it.position).data();
  return {.shard = it.extent.shard,
          .range = {it.extent.offset, it.extent.stored_length},
          .target = target,
          .checksum = it.extent.checksum,
          .is_checked = !is_encoded && reader_.index().has_checksums()};
}

RangeOutcome ExtentPlan::finish(std::size_t item, std::span<std::byte> out, RangeOutcome outcome) {
  const Item& it = items_[item];
  if (outcome != RangeOutcome::good || !it.extent.is_encoded()) return outcome;
  const auto target = out.subspan(it.position, it.extent.length);
  const std::span<const std::byte> stored(scratch_.data() + it.scratch, it.extent.stored_length);
  const bool is_decoded = decode(it.extent.encoding, reader_.index().dictionary(), stored, target);
  const bool is_good = is_decoded && crc32c(target.data(), target.size()) == it.extent.checksum;
  return is_good ? RangeOutcome::good : RangeOutcome::damaged;
}

std::vector<RangeOutcome> ExtentPlan::read_mapped(const PackReader& mapped,
                                                  std::span<const std::int64_t> items,
                                                  std::span<std::byte> out) const {
  std::vector<RangeOutcome> outcomes(items_.size());
  std::vector<std::size_t> missing(ids_.size());  // extents of each sample that are not among them
  for (const Item& item : items_) ++missing[static_cast<std::size_t>(item.number)];
  for (const std::int64_t item : items) {
    --missing[static_cast<std::size_t>(items_.at(static_cast<std::size_t>(item)).number)];
  }
  std::vector<std::int64_t> ids, begins, ends;
  for (const std::int64_t item : items) {
    const auto number = static_cast<std::size_t>(items_[static_cast<std::size_t>(item)].number);
    if (missing[number] != 0) continue;
    outcomes[static_cast<std::size_t>(item)] = RangeOutcome::good;
    const bool is_first = items_[static_cast<std::size_t>(item)].position ==
                          static_cast<std::size_t>(offsets_[number]);
    if (!is_first) continue;
    ids.push_back(ids_[number]);
    begins.push_back(offsets_[number]);
    ends.push_back(offsets_[number + 1]);
  }
  mapped.read_scattered(ids, begins, ends, out);
  return outcomes;
}

}  // namespace paceline
