// Finds the records of a TFRecord file, without reading their data:
//
//     length u64 | masked CRC-32C of the length | data | masked CRC-32C of the data | next record...
//
// A masked checksum is rotated right by 15 bits, plus 0xa282ead8 (tensorflow/core/lib/hash/crc32c.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "paceline/pack_index.hpp"

namespace paceline {

struct TfRecordBlock {  // some records, in the order of the file
  std::vector<std::uint64_t> offsets;  // of the data
  std::vector<std::uint64_t> lengths;
  std::vector<std::uint32_t> checksums;  // CRC-32C of the data, as the file says
};

// One pass over a file. Not thread-safe.
class TfRecords {
 public:
  // Throws PackError; an empty file is one, too. `to_cut`: a file that ends amid a record, because
  // its writer was killed or writes still, ends with the record before it.
  explicit TfRecords(std::string path, bool to_cut = false);
  // The next records, at most `count`; none at the end. Throws PackError.
  TfRecordBlock next(std::size_t count);
  // Bytes behind the last whole record, once all were read; 0 unless `to_cut`.
  std::uint64_t cut_bytes() const noexcept { return cut_; }

 private:
  Mapping file_;
  bool to_cut_;
  std::uint64_t at_ = 0;
  std::uint64_t cut_ = 0;
};

}  // namespace paceline
