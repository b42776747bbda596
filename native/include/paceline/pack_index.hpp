// The index of a pack: one mapped file of flat arrays, and access to the entries of each sample.
// The layout: docs/reference/pack-format.md. Everything in the file is checked before it is used:
// whatever its bytes are, every result is within the bounds of the files, or a PackError.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "paceline/codecs.hpp"
#include "paceline/fault_guard.hpp"
#include "paceline/page_cache.hpp"

namespace paceline {

constexpr std::uint32_t pack_format_version = 3;

// A column may be narrower than it says here (SectionEntry::width).
enum class Section : std::uint32_t {
  offsets = 1,           // u64[extents], within the shard
  lengths = 2,           // u64[extents], uncompressed
  shards = 3,            // u32[extents]
  checksums = 4,         // u32[extents], CRC-32C of the uncompressed bytes
  labels = 5,            // i32[samples]
  modes = 6,             // u32[samples]
  mtimes = 7,            // i64[samples], nanoseconds
  name_offsets = 8,      // u64[samples + 1], into names
  names = 9,             // bytes, ascending
  folder_offsets = 10,   // u64[folders + 1], into folders
  folders = 11,          // bytes, depth first
  class_offsets = 12,    // u64[classes + 1], into classes
  classes = 13,          // bytes
  shard_lengths = 14,    // u64[shards]
  stored_lengths = 15,   // u64[extents]; absent: as lengths
  codecs = 16,           // u8[extents], Encoding::code; absent: none
  first_extents = 17,    // u64[samples + 1]; absent: a sample is an extent
  name_table = 18,       // u64[slots]; absent: names are searched
  folder_samples = 19,   // u64[2 * folders]
  folder_ends = 20,      // u64[folders]
  shard_digests = 21,    // u8[32 * shards], SHA-256
  parity = 22,           // u64[1 + parity files]
  parity_digests = 23,   // u8[32 * parity files]
  files = 24,            // u64[shards + 1], then bytes: the shards are these files of the user's
  sources = 25,          // SourcesHeader, SourceState[shards]: what these files were; with 24
  block_sums = 26,       // u32[blocks of all other sections]; absent: a section is one block
  dictionary = 27,       // bytes, of codec zstd_dictionary; absent: no extent has that
};
constexpr std::uint32_t last_section = 27;
constexpr bool is_known_section(std::uint32_t id) noexcept {
  return id >= 1 && id <= last_section;
}
// A section is verified in blocks of so many bytes, each when it is first touched.
constexpr unsigned sum_block_bits = 16;
constexpr std::uint64_t sum_block_bytes = std::uint64_t{1} << sum_block_bits;

constexpr std::size_t max_name_bytes = 4095;  // PATH_MAX of the kernel, without the final NUL

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
  // Bytes of an entry of a column that is narrower than its type, from version 3 on: 1, 2, 4 or 8.
  // One entry then stands for all. 0: as wide as its type.
  std::uint32_t width;
};
static_assert(sizeof(SectionEntry) == 32);
constexpr std::uint32_t section_required = 1;

// Of an index of data in place: its shards are the user's own files, without headers and alignment.
enum class SourceKind : std::uint32_t { files = 1, lmdb = 3, tfrecord = 4, tar = 5 };

struct SourcesHeader {
  SourceKind kind;
  std::uint32_t key_names;    // of lmdb: KeyNames (lmdb_records.hpp)
  std::uint64_t transaction;  // of lmdb: that was indexed
  std::uint32_t page_bytes;   // of lmdb
  std::uint32_t meta_checksum;  // of lmdb: LmdbCommit::checksum; 0 = not known
  std::uint64_t last_page;      // of lmdb
};
static_assert(sizeof(SourcesHeader) == 32);

struct SourceState {
  std::uint64_t size;
  std::int64_t mtime_ns;
  std::uint64_t inode;  // 0: not known
};
static_assert(sizeof(SourceState) == 24);

struct PackError : std::runtime_error {
  // source, changed, unsupported: of the user's own files, damaged, written to since they were
  // indexed, or of a kind that is not read in place.
  // library: which decodes a sample and is not there; `file` is its name.
  enum class Kind { io, corrupt, sample, version, memory, source, changed, unsupported, library };

  PackError(Kind what_kind, std::string file_name, const std::string& why)
      : std::runtime_error(why), kind(what_kind), file(std::move(file_name)) {}

  Kind kind;
  std::string file;
  int error = 0;              // errno of Kind::io
  bool direct = false;        // of Kind::io: it was opened past the page cache
  std::uint64_t sample = 0;   // of Kind::sample and Kind::memory, with shard and name
  std::uint32_t shard = 0;
  std::string name;           // "" if the index is damaged there
  std::uint32_t version = 0;  // of Kind::version: what a reader needs; 0 = an unknown section
};

[[noreturn]] void fail_io(const std::string& path, int error, bool direct = false);
[[noreturn]] void fail_corrupt(const std::string& path, const std::string& why);
[[noreturn]] void fail_version(const std::string& path, std::uint32_t version,
                               const std::string& why);
std::string checksum_mismatch(std::uint32_t expected, std::uint32_t found);

struct FileState {  // all 0: there is no such file
  static FileState of(const std::string& path) noexcept;
  static FileState of(int descriptor) noexcept;
  bool operator==(const FileState& other) const noexcept {
    return device == other.device && inode == other.inode && size == other.size &&
           written_ns == other.written_ns && changed_ns == other.changed_ns;
  }

  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t size = 0;
  std::int64_t written_ns = 0;
  std::int64_t changed_ns = 0;
  // Whether a later write would show: a file's times advance in steps of a few milliseconds.
  bool is_settled = true;
};

// A read-only mapping of a whole regular file, which a pack never changes once it is there.
class Mapping {
 public:
  // Throws PackError. `dirty`, unless null, becomes what is known of the file's pages at this moment.
  explicit Mapping(std::string path, DirtyPages* dirty = nullptr);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping& operator=(Mapping&&) = delete;

  const std::string& path() const noexcept { return path_; }
  std::span<const std::byte> bytes() const noexcept { return bytes_; }
  const FileState& state() const noexcept { return state_; }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
  FileState state_;  // when it was mapped
};

struct Extent {  // a contiguous stored piece of one sample
  std::uint64_t offset;
  std::uint64_t stored_length;
  std::uint64_t length;
  std::uint32_t shard;
  std::uint32_t checksum;
  Encoding encoding;

  bool is_encoded() const noexcept { return encoding.codec != Codec::none; }
};

// A state that is replaced now and then, while others compare theirs with it.
class LatestState {
 public:
  explicit LatestState(const FileState& state) : latest_(new Node{state, nullptr}) {}
  ~LatestState();
  LatestState(const LatestState&) = delete;
  LatestState& operator=(const LatestState&) = delete;

  const FileState& get() const noexcept { return latest_.load(std::memory_order_acquire)->state; }
  void set(const FileState& state);

 private:
  struct Node {  // kept until the end: someone may be reading it
    FileState state;
    const Node* older;
  };
  std::atomic<const Node*> latest_;
};

class PackIndex;

// The entries of a section, each verified with its block when it is first touched. Valid as long as
// the index; used within PackIndex::read.
template <class T>
class Column {
 public:
  std::uint64_t size() const noexcept { return size_; }
  bool empty() const noexcept { return size_ == 0; }
  T operator[](std::uint64_t i) const;
  void prefetch(std::uint64_t i) const noexcept {
    if (!is_constant_) __builtin_prefetch(data_ + (i << width_bits_));
  }

 private:
  friend class PackIndex;

  const PackIndex* index_ = nullptr;
  const std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
  std::uint64_t first_block_ = 0;
  std::uint32_t section_ = 0;
  std::uint8_t block_bits_ = 0;
  std::uint8_t width_bits_ = 0;
  bool is_constant_ = false;
  T constant_{};
};

// The hash of the name table: FNV-1a with the finaliser of MurmurHash3, both of 64 bits.
std::uint64_t name_hash(std::string_view name) noexcept;

// Thread-safe. What reads the mapping runs within `read`, as do all callers of the functions below
// that take or return a place in it.
class PackIndex {
 public:
  // Of the pack in a folder, or an index of data in place, which is a file. Throws PackError.
  explicit PackIndex(const std::string& place);

  // Calls `work`, which may use all of this object. Throws PackError if the file was changed in place
  // since it was opened (looked at every 20 ms), or shrinks meanwhile; then `work` ends where it is,
  // without destroying what it has on its stack (fault_guard.hpp).
  template <class Work>
  void read(Work&& work) const {
    check_file();
    if (!completes(FaultRange(file_.bytes()), work)) fail_unreadable();
  }
  // Looks at the file, if that was not done within the last 20 ms, or `now`: what was read of it before
  // is what it was when it was opened. Throws PackError if it was changed since, or cut off.
  void check_file(bool now = false) const;
  // Verifies the bytes of a section, those of all sections. Throws PackError.
  void verify_section(Section id) const;
  void verify_sections() const;
  // Verifies all sections, and all that they say about each other, which is otherwise checked where
  // it is used: for those who use whole columns. Throws PackError.
  void check_content() const;
  // Starts to read what is not verified yet of the entries that reading these samples takes.
  void request(std::span<const std::int64_t> samples) const;

  const std::string& path() const noexcept { return file_.path(); }
  std::uint32_t version() const noexcept { return header_.version; }
  std::uint64_t sample_count() const noexcept { return header_.sample_count; }
  std::uint64_t extent_count() const noexcept { return lengths_.size(); }
  std::uint64_t folder_count() const noexcept { return header_.folder_count; }
  std::uint32_t class_count() const noexcept { return header_.class_count; }
  std::uint32_t shard_count() const noexcept { return header_.shard_count; }
  // Whether the shards are the user's own files; then there is a `sources` and a `source_state`.
  bool is_in_place() const noexcept { return is_in_place_; }
  const SourcesHeader& sources() const noexcept { return sources_; }
  SourceState source_state(std::uint32_t shard) const;
  // Whether the samples have checksums: of data in place they are computed on request.
  bool has_checksums() const noexcept { return has(Section::checksums); }
  std::string shard_path(std::uint32_t shard) const;  // throws PackError
  // Header and section table as they were when the pack was opened: their checksums cover the whole
  // content.
  std::span<const std::byte> head() const noexcept { return head_; }
  std::span<const std::byte> bytes() const noexcept { return file_.bytes(); }

  const Column<std::int32_t>& labels() const noexcept { return labels_; }
  const Column<std::uint32_t>& modes() const noexcept { return modes_; }
  const Column<std::int64_t>& mtimes() const noexcept { return mtimes_; }
  // What the samples with the codec zstd_dictionary need to be decoded.
  const ZstdDictionary& dictionary() const noexcept { return dictionary_; }
  const std::vector<std::uint64_t>& shard_lengths() const noexcept { return shard_lengths_; }
  std::uint64_t shard_bytes() const noexcept { return shard_bytes_; }  // of all; saturates
  // A view into the mapping, not verified by this.
  std::span<const std::byte> section(Section id) const noexcept { return place(id).bytes; }

  std::string_view name(std::uint64_t sample) const { return samples_.at(sample); }
  std::string_view class_name(std::uint64_t index) const { return classes_.at(index); }
  std::int64_t find(std::string_view name) const;  // the sample of that name, or -1

  // Folders are numbered depth first, whatever the version: those below one follow it.
  std::string_view folder(std::uint64_t index) const;
  std::int64_t find_folder(std::string_view name) const;  // or -1
  std::pair<std::uint64_t, std::uint64_t> folder_samples(std::uint64_t index) const;
  std::uint64_t folder_end(std::uint64_t index) const;  // the folder after those below it

  // The extents [first, end) of a sample. Throws PackError, std::out_of_range.
  std::pair<std::uint64_t, std::uint64_t> extents(std::uint64_t sample) const;
  Extent extent(std::uint64_t index) const;  // known to lie within its shard
  // Has what a later call says of a sample come from memory, if it is one extent.
  void prefetch(std::uint64_t sample) const noexcept {
    if (sample >= sample_count() || !first_extents_.empty()) return;
    offsets_.prefetch(sample);
    lengths_.prefetch(sample);
    shards_.prefetch(sample);
    checksums_.prefetch(sample);
  }
  // Bytes of a sample by the index alone, unchecked; at most 2^42, so that a batch's add up.
  std::uint64_t claimed_length(std::uint64_t sample) const;

 private:
  template <class T>
  friend class Column;

  struct Place {  // of a section
    std::span<const std::byte> bytes;
    std::uint64_t first_block = 0;  // among the blocks of all sections
    std::uint64_t block_count = 0;
    std::uint32_t number = 0;
    std::uint32_t checksum = 0;
    std::uint32_t width = 0;
    std::uint8_t block_bits = 0;
  };

  // What is known of the blocks. Threads that verify a block are counted: a thread that finds that
  // the file was changed meanwhile verifies it too, and refutes it where it is wrong. It cannot say
  // whether the block was ever right: those that verify it can.
  class Blocks {
   public:
    explicit Blocks(std::uint64_t count = 0) : states_(new std::atomic<std::uint16_t>[count]()) {}
    bool verified(std::uint64_t block) const noexcept {
      return (states_[block].load(std::memory_order_acquire) & verified_bit) != 0;
    }
    bool touched(std::uint64_t block) const noexcept { return states_[block].load() != 0; }
    void begin(std::uint64_t block) const noexcept { states_[block].fetch_add(1); }
    // Returns whether the block was verified before.
    bool refute(std::uint64_t block) const noexcept {
      std::uint16_t state = states_[block].load();
      while ((state & count_bits) != 0 &&
             !states_[block].compare_exchange_weak(state, state | refuted_bit)) {
      }
      return (state & verified_bit) != 0;
    }
    // Returns whether it is news that the block is verified.
    bool end(std::uint64_t block, bool is_right) const noexcept {
      std::uint16_t before = states_[block].load();
      std::uint16_t after = 0;
      do {
        after = static_cast<std::uint16_t>(before - 1);
        if (is_right && (before & refuted_bit) == 0) after |= verified_bit;
        if ((after & count_bits) == 0) after &= verified_bit;  // no thread is left that verifies it
      } while (!states_[block].compare_exchange_weak(before, after));
      return ((before ^ after) & verified_bit) != 0;
    }

   private:
    static constexpr std::uint16_t refuted_bit = 0x4000;
    static constexpr std::uint16_t count_bits = 0x3fff;
    static constexpr std::uint16_t verified_bit = 0x8000;
    std::unique_ptr<std::atomic<std::uint16_t>[]> states_;
  };

  struct Strings {
    Column<std::uint64_t> offsets;
    const Place* blob = nullptr;
    const PackIndex* index = nullptr;
    std::string_view at(std::uint64_t number) const;
  };

  void read_header();
  void read_sections();
  void read_sums();
  void read_columns();
  void look_at_file(std::uint64_t now_ns) const;
  void check_touched_blocks() const;
  const Place& place(Section id) const noexcept { return places_[static_cast<std::uint32_t>(id)]; }
  std::span<const std::byte> block(const Place& place, std::uint64_t number) const noexcept;
  void verify_block(const Place& place, std::uint64_t number) const;
  void verify_bytes(const Place& place, std::uint64_t begin, std::uint64_t end) const;
  template <class T>
  void read_verified(const Place& place, std::uint64_t at, T& target) const;
  void check_names() const;
  void check_extents() const;
  void check_folders() const;
  void check_digests() const;
  [[noreturn]] void fail_unreadable() const;
  void check_claim(std::uint64_t index, const Extent& extent) const;
  std::uint64_t sample_of(std::uint64_t extent) const;
  [[noreturn]] void fail_extent(std::uint64_t index, const std::string& why) const;
  void read_extents();
  void read_folders();
  void read_files();
  void read_dictionary();
  void order_folders();
  bool has(Section id) const noexcept { return section(id).data() != nullptr; }
  [[noreturn]] void fail_section(Section id) const;
  // A small section, verified as a whole.
  template <class T>
  std::span<const T> array(Section id, std::uint64_t count) const;
  template <class T>
  Column<T> column(Section id, std::uint64_t count) const;
  Strings strings(Section offsets, Section blob, std::uint64_t count) const;
  std::int64_t find_in_table(std::string_view name) const;

  DirtyPages first_pages_ = DirtyPages::unknown;  // when the file was mapped
  Mapping file_;
  std::string folder_;  // of the shards
  // What was found when the file was looked at. Without a lock, which a fork could leave held: threads
  // that look at the same time find the same.
  mutable std::atomic<std::uint64_t> next_look_ns_{0};
  mutable std::atomic<std::uint64_t> verified_ns_{0};
  mutable std::atomic<bool> shows_writes_{false};  // by the file's times
  mutable LatestState state_;
  std::vector<std::byte> head_;
  PackHeader header_{};
  std::vector<Place> places_;  // by number of the section; no bytes: the pack does not have it
  std::vector<std::uint32_t> sums_;  // of blocks; own: the file may change
  Blocks blocks_;
  // Blocks of the columns of `request` that are not verified yet.
  mutable std::atomic<std::uint64_t> unverified_{0};
  Column<std::uint64_t> offsets_;
  Column<std::uint64_t> lengths_;
  Column<std::uint64_t> stored_lengths_;
  Column<std::uint32_t> shards_;
  Column<std::uint32_t> checksums_;
  Column<std::uint8_t> codecs_;
  std::vector<std::byte> dictionary_bytes_;  // own: the file may change
  ZstdDictionary dictionary_;
  Column<std::uint64_t> first_extents_;
  Column<std::int32_t> labels_;
  Column<std::uint32_t> modes_;
  Column<std::int64_t> mtimes_;
  std::vector<std::uint64_t> shard_lengths_;  // own: looked at for each extent
  std::uint64_t shard_bytes_ = 0;
  bool is_in_place_ = false;
  SourcesHeader sources_{};
  Column<std::uint64_t> name_table_;
  Column<std::uint64_t> folder_samples_;
  Column<std::uint64_t> folder_ends_;
  Strings samples_;
  Strings folders_;
  Strings classes_;
  // For packs of version 1, which order folders by name and store no ranges.
  std::vector<std::uint64_t> folder_order_;
  std::vector<std::uint64_t> own_folder_samples_;
  std::vector<std::uint64_t> own_folder_ends_;
};

template <class T>
T Column<T>::operator[](std::uint64_t i) const {
  if (is_constant_) return constant_;
  const std::uint64_t at = i << width_bits_;
  const std::uint64_t block = at >> block_bits_;
  if (!index_->blocks_.verified(first_block_ + block)) [[unlikely]] {
    index_->verify_block(index_->places_[section_], block);
  }
  // The entry as an unsigned and, where T is signed, as a signed number.
  const auto load = [&](auto narrow) {
    std::memcpy(&narrow, data_ + at, sizeof narrow);
    return static_cast<T>(narrow);
  };
  constexpr bool is_signed = std::is_signed_v<T>;
  switch (width_bits_) {
    case 0: return load(std::conditional_t<is_signed, std::int8_t, std::uint8_t>{});
    case 1: return load(std::conditional_t<is_signed, std::int16_t, std::uint16_t>{});
    case 2: return load(std::conditional_t<is_signed, std::int32_t, std::uint32_t>{});
    default: return load(std::conditional_t<is_signed, std::int64_t, std::uint64_t>{});
  }
}

}  // namespace paceline
