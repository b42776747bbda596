#include "paceline/tfrecord_records.hpp"

#include <cstring>
#include <utility>

#include "paceline/crc32c.hpp"
#include "paceline/fault_guard.hpp"

namespace paceline {
namespace {

constexpr std::uint64_t head_bytes = 12;  // length and its checksum
constexpr std::uint64_t tail_bytes = 4;

std::uint32_t unmasked(std::uint32_t masked) noexcept {
  const std::uint32_t rotated = masked - 0xa282ead8U;
  return rotated >> 17 | rotated << 15;
}

}  // namespace

TfRecords::TfRecords(std::string path, bool to_cut) : file_(std::move(path)), to_cut_(to_cut) {}

TfRecordBlock TfRecords::next(std::size_t count) {
  TfRecordBlock block;
  const auto bytes = file_.bytes();
  const auto copy = [&](std::uint64_t at, void* target, std::size_t size) {
    const bool is_there = completes(FaultRange(bytes), [&] {
      std::memcpy(target, bytes.data() + at, size);
    });
    if (!is_there) {
      throw PackError(PackError::Kind::source, file_.path(), "its bytes cannot be read");
    }
  };
  while (block.offsets.size() < count && at_ < bytes.size()) {
    const auto fail = [&](const std::string& why) {
      throw PackError(PackError::Kind::source, file_.path(),
                      "the record at byte " + std::to_string(at_) + " " + why);
    };
    const std::uint64_t left = bytes.size() - at_;
    const auto is_cut = [&] {
      if (!to_cut_) fail("is truncated");
      cut_ = left;
      at_ = bytes.size();
      return true;
    };
    if (left < head_bytes + tail_bytes && is_cut()) break;
    std::uint64_t length = 0;
    std::uint32_t masked = 0;
    copy(at_, &length, sizeof length);
    copy(at_ + sizeof length, &masked, sizeof masked);
    const std::uint32_t found = crc32c(&length, sizeof length);
    if (found != unmasked(masked)) {
      fail("has a damaged length: " + checksum_mismatch(unmasked(masked), found));
    }
    if (length > left - head_bytes - tail_bytes && is_cut()) break;
    copy(at_ + head_bytes + length, &masked, sizeof masked);
    block.offsets.push_back(at_ + head_bytes);
    block.lengths.push_back(length);
    block.checksums.push_back(unmasked(masked));
    at_ += head_bytes + length + tail_bytes;
  }
  return block;
}

}  // namespace paceline
