// The parts of packing that are too slow in Python: reading files in batches, compressing samples,
// sorting and merging names. All functions are thread-safe, keep no state and write only to their
// arguments; Python writes to disk, call by call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "paceline/codecs.hpp"

namespace paceline {

// Concatenated names, and the offset of each (one offset more than names).
struct NameList {
  std::span<const std::uint64_t> offsets;
  std::string_view blob;

  std::size_t size() const noexcept { return offsets.empty() ? 0 : offsets.size() - 1; }
  std::string_view operator[](std::size_t index) const noexcept {
    return blob.substr(offsets[index], offsets[index + 1] - offsets[index]);
  }
  // Whether every name lies within the blob: call this before anything else.
  bool valid() const noexcept;
};

struct FolderEntry {
  std::string name;
  std::uint32_t mode;   // st_mode; 0 when `error` is not
  int error;            // errno of a stat that failed, or 0
  bool is_link;
  std::uint64_t size;
  std::int64_t mtime_ns;
  std::uint64_t device;
  std::uint64_t inode;
};

// The entries of an open folder in bytewise order of their names, folders as if they ended in '/'.
// With `follow`, the targets of links. Throws std::system_error.
std::vector<FolderEntry> list_folder(int descriptor, bool follow);

// The outcome of reading a file.
enum class ReadOutcome : std::uint8_t { complete, unreadable, gone, no_file, resized, touched };

struct FileRead {
  ReadOutcome outcome = ReadOutcome::complete;
  int error = 0;           // errno of `unreadable`
  std::uint64_t size = 0;  // of `resized`: the size found
  std::uint32_t checksum = 0;
};

// Reads the files `names` below the folder `descriptor`: file k, which must have lengths[k] bytes and
// have been last written at mtimes_ns[k], goes to target[positions[k]...]; gaps between the
// files are zeroed. Returns one state per file; the caller looks for those that are not complete.
std::vector<FileRead> read_files(int descriptor, const NameList& names,
                                  std::span<const std::uint64_t> lengths,
                                  std::span<const std::int64_t> mtimes_ns,
                                  std::span<const std::uint64_t> positions,
                                  std::span<std::byte> target, bool follow, int threads);

struct Encoded {
  std::vector<std::byte> bytes;           // aligned like the samples were
  std::vector<std::uint64_t> positions;   // within `bytes`
  std::vector<std::uint64_t> lengths;     // stored
  std::vector<std::uint8_t> codecs;       // Encoding::code
};

// How samples are compressed.
struct EncodeOptions {
  Codec codec = Codec::zstd;
  int level = 3;
  int element_bits = 0;  // log2 of the bytes of an element, to shuffle; `npy_elements`
  double keep_ratio = 1.0;
  int threads = 1;
};
constexpr int npy_elements = -1;  // as the header of each .npy file says; other samples have none

// Compresses each sample, shuffled or not, whichever is smaller; keeps it as it is unless that saves bytes
// and comes to at most `keep_ratio` of it. The dictionary is for Codec::zstd_dictionary alone.
Encoded encode(std::span<const std::byte> source, std::span<const std::uint64_t> positions,
               std::span<const std::uint64_t> lengths, const EncodeOptions& options,
               std::span<const std::byte> dictionary = {});

// A dictionary of at most `capacity` bytes of these samples; empty where they have too little in common.
std::vector<std::byte> train_dictionary(std::span<const std::byte> source,
                                        std::span<const std::uint64_t> positions,
                                        std::span<const std::uint64_t> lengths,
                                        std::size_t capacity);

// The seconds of processor time in which one thread decodes and verifies samples as a reader does, those
// that are not compressed included; negative if one cannot be decoded.
double decode_s(std::span<const std::byte> stored, std::span<const std::uint64_t> positions,
                std::span<const std::uint64_t> stored_lengths,
                std::span<const std::uint64_t> lengths, std::span<const std::uint8_t> codes,
                std::span<const std::byte> dictionary);

// The order that sorts `names` bytewise (stable); empty when they are sorted already.
std::vector<std::uint64_t> sorted_order(const NameList& names);

// Merges lists of names, each sorted, into one ascending sequence, a piece at a time.
class NameMerger {
 public:
  explicit NameMerger(std::vector<NameList> lists);

  struct Piece {
    std::vector<std::uint32_t> lists;  // which list each name is from
    std::vector<std::uint64_t> lengths;
    std::string blob;
    bool duplicate = false;  // the last name of the piece came before: merging ends here
  };
  Piece next(std::size_t count);  // at most `count` names; none at the end

 private:
  struct Head {
    std::string_view name;
    std::uint32_t list;
  };
  struct Later {
    bool operator()(const Head& left, const Head& right) const noexcept {
      const int order = left.name.compare(right.name);
      return order != 0 ? order > 0 : left.list > right.list;
    }
  };
  std::vector<NameList> lists_;
  std::vector<std::size_t> positions_;
  std::priority_queue<Head, std::vector<Head>, Later> heads_;
  std::string last_;
  bool begun_ = false;
};

// For each of `wanted`, the index of the first of `names` (sorted) that does not come before it.
std::vector<std::uint64_t> lower_bounds(const NameList& names, const NameList& wanted);

// Asks the system to begin writing a range of a file to storage, without waiting for it.
void start_writeback(int descriptor, std::int64_t offset, std::int64_t length) noexcept;

}  // namespace paceline
