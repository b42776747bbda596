// Reads a pack: one mapped index of flat arrays and the mapped shards that it names.
// The layout: docs/reference/pack-format.md. Nothing in a file is believed before it is checked:
// whatever the bytes are, the outcome is a sample that matches its checksum or a PackError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace paceline {

constexpr std::uint32_t pack_format_version = 1;

enum class Section : std::uint32_t {
  offsets = 1,         // u64[samples], within the shard
  lengths = 2,         // u64[samples]
  shards = 3,          // u32[samples]
  checksums = 4,       // u32[samples], CRC-32C
  labels = 5,          // i32[samples]
  modes = 6,           // u32[samples]
  mtimes = 7,          // i64[samples], nanoseconds
  name_offsets = 8,    // u64[samples + 1], into names
  names = 9,           // bytes, ascending
  folder_offsets = 10,  // u64[folders + 1], into folders
  folders = 11,        // bytes, ascending
  class_offsets = 12,  // u64[classes + 1], into classes
  classes = 13,        // bytes
  shard_lengths = 14,  // u64[shards]
};
constexpr std::uint32_t last_section = 14;

struct PackHeader {  // little-endian on disk, as everything here
  char magic[8];     // "PACEPACK"
  std::uint32_t version;
  std::uint32_t section_count;
  std::uint64_t index_bytes;
  std::uint64_t sample_count;
  std::uint64_t folder_count;
  std::uint32_t shard_count;
  std::uint32_t class_count;
  std::uint64_t reserved;
  std::uint32_t table_checksum;   // of the section table that follows
  std::uint32_t header_checksum;  // of the 60 bytes before; here in every version
};
static_assert(sizeof(PackHeader) == 64);

struct SectionEntry {
  std::uint32_t id;
  std::uint32_t flags;   // bit 0: a reader that does not know the section must refuse the pack
  std::uint64_t offset;  // from the start of the index, a multiple of 64
  std::uint64_t length;
  std::uint32_t checksum;
  std::uint32_t reserved;
};
static_assert(sizeof(SectionEntry) == 32);
constexpr std::uint32_t section_required = 1;

struct ShardHeader {
  char magic[8];  // "PACESHRD"
  std::uint32_t version;
  std::uint32_t shard;
  char reserved[44];
  std::uint32_t checksum;  // of the 60 bytes before
};
static_assert(sizeof(ShardHeader) == 64);

struct PackError : std::runtime_error {
  enum class Kind { io, corrupt, sample, version };

  PackError(Kind what_kind, std::string file_name, const std::string& why)
      : std::runtime_error(why), kind(what_kind), file(std::move(file_name)) {}

  Kind kind;
  std::string file;
  int error = 0;             // errno of Kind::io
  std::uint64_t sample = 0;  // of Kind::sample, with what follows
  std::uint32_t shard = 0;
  std::uint32_t expected = 0;
  std::uint32_t found = 0;
  std::uint32_t version = 0;  // of Kind::version: what a reader needs; 0 = an unknown section
};

// A read-only mapping of a whole regular file, which a pack never changes once it is there.
class Mapping {
 public:
  explicit Mapping(std::string path);  // throws PackError
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping& operator=(Mapping&&) = delete;

  const std::string& path() const noexcept { return path_; }
  std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

struct BadSample {
  std::uint64_t sample;
  std::string why;
};

// Immutable after construction, hence thread-safe, and safe to use in a forked child.
class PackReader {
 public:
  // Opens and checks the index and every shard's length. Throws PackError.
  explicit PackReader(const std::string& folder);

  std::uint64_t sample_count() const noexcept { return header_.sample_count; }
  std::uint64_t folder_count() const noexcept { return header_.folder_count; }
  std::uint32_t class_count() const noexcept { return header_.class_count; }
  std::uint32_t shard_count() const noexcept { return header_.shard_count; }
  // Stands for the index's whole content.
  std::uint32_t identity() const noexcept { return header_.header_checksum; }

  // Views into the mapping: valid as long as this object.
  std::span<const std::uint64_t> lengths() const noexcept { return lengths_; }
  std::span<const std::int32_t> labels() const noexcept { return labels_; }
  std::span<const std::uint32_t> modes() const noexcept { return modes_; }
  std::span<const std::int64_t> mtimes() const noexcept { return mtimes_; }
  std::span<const std::uint32_t> shards() const noexcept { return shards_; }
  std::string_view name(std::uint64_t sample) const { return samples_.at(sample); }
  std::string_view folder(std::uint64_t index) const { return folders_.at(index); }
  std::string_view class_name(std::uint64_t index) const { return classes_.at(index); }

  // The sample of that name, or -1. Binary search: the names are sorted anyway, so that look-up
  // and folder ranges need no further section to write, check and trust.
  std::int64_t find(std::string_view name) const;

  // Length of a sample, known to lie within its shard. Throws PackError, std::out_of_range.
  std::size_t checked_length(std::uint64_t sample) const { return locate(sample).size(); }
  // Copies a sample to `target` (checked_length bytes) and verifies the copy. Throws PackError.
  void read(std::uint64_t sample, std::byte* target) const;
  // Fills offsets[ids + 1], the places of these samples in one buffer; returns the buffer's size.
  std::size_t plan_batch(std::span<const std::int64_t> ids, std::int64_t* offsets) const;
  void read_batch(std::span<const std::int64_t> ids, const std::int64_t* offsets,
                  std::byte* target) const;
  // Verifies samples [first, end) in place and returns the bad ones.
  std::vector<BadSample> verify(std::uint64_t first, std::uint64_t end) const;

 private:
  struct Strings {
    std::span<const std::uint64_t> offsets;
    std::string_view blob;
    const std::string* file = nullptr;
    std::string_view at(std::uint64_t index) const;
  };

  void read_header();
  void read_sections();
  void open_shards(const std::string& folder);
  template <class T>
  std::span<const T> array(Section id, std::uint64_t count) const;
  Strings strings(Section offsets, Section blob, std::uint64_t count) const;
  std::span<const std::byte> locate(std::uint64_t sample) const;
  [[noreturn]] void fail_sample(std::uint64_t sample, std::uint32_t found) const;

  Mapping index_;
  PackHeader header_{};
  std::vector<std::span<const std::byte>> sections_;  // by id
  std::span<const std::uint64_t> offsets_;
  std::span<const std::uint64_t> lengths_;
  std::span<const std::uint32_t> shards_;
  std::span<const std::uint32_t> checksums_;
  std::span<const std::int32_t> labels_;
  std::span<const std::uint32_t> modes_;
  std::span<const std::int64_t> mtimes_;
  Strings samples_;
  Strings folders_;
  Strings classes_;
  std::vector<Mapping> mapped_;
};

}  // namespace paceline
