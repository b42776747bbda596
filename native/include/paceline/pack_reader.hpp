// Reads a pack: the mapped shards that its index names.
//
// A batch is read in three steps. Bytes that are not in memory are requested first, all of them, in
// the order of their storage; then bytes in memory are copied, while storage reads the others; then
// these are copied as they arrive. The copy is verified, unless its pages are known to hold bytes that
// this process verified before (residency.hpp).
//
// The shards of a pack are mapped when it is opened. Data in place may be a million files: each is
// mapped when it is first read and must then be what was indexed; beyond some thousands of them, a
// file is opened for each read. Samples without checksums are handed out as they are, but never bytes
// of a file that was written to since it was indexed, as far as its times, or LMDB's transactions, say.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "paceline/checksum_timer.hpp"
#include "paceline/pack_index.hpp"
#include "paceline/page_cache.hpp"
#include "paceline/residency.hpp"
#include "paceline/worker_pool.hpp"

namespace paceline {

struct ShardHeader {
  char magic[8];  // "PACESHRD"
  std::uint32_t version;
  std::uint32_t shard;
  char reserved[44];
  std::uint32_t checksum;  // of the 60 bytes before
};
static_assert(sizeof(ShardHeader) == 64);

struct BadSample {
  std::uint64_t sample;
  std::uint32_t shard;  // in which it begins
  std::string name;     // "" if the index is damaged there
  std::string why;
};

enum class Verify : std::uint8_t { first, always, never };

struct ReadOptions {
  Verify verify = Verify::first;
  unsigned threads = 1;     // that share a large batch, the caller included
  bool index_only = false;  // open no shard, as repairing them needs it
  bool lazy = false;        // map a shard when it is first read: a node may hold only some of them
  bool direct = false;      // past the page cache (O_DIRECT), for data that is larger than memory
  ResidencyMaker residency = &trust_page_table;
  // For how long a verified page is trusted at most. A set that fits into memory is read at the speed
  // of memory within this time, and one that is read more slowly does not wait for checksums.
  std::uint64_t trust_ns = 30'000'000'000;
};

// Thread-safe, and safe to use in a forked child.
class PackReader {
  struct Shard;

 public:
  struct ExtentRead {  // an extent on its way into a buffer
    std::uint64_t sample;
    Extent extent;
    Shard* shard;  // nullptr: its file is opened for this read
    std::span<const std::byte> stored;
    std::byte* target;  // room for extent.length bytes; nullptr: it is only looked at
    bool resident;      // as far as is known
    bool trusted;
  };

  // Opens and checks the index and, of a pack, every shard's length. `place` is the folder of a pack, or
  // the index of data in place. Throws PackError.
  explicit PackReader(const std::string& place, const ReadOptions& options = {});
  ~PackReader();
  PackReader(const PackReader&) = delete;
  PackReader& operator=(const PackReader&) = delete;

  const PackIndex& index() const noexcept { return index_; }
  const ReadOptions& options() const noexcept { return options_; }
  // Whether read bytes are compared with checksums.
  bool compares() const noexcept { return compares_; }

  // For other readers of the same files: the path of a shard, whether a file is still the one that was
  // indexed, and whether all that was read until now is what was indexed.
  std::string shard_path(std::uint32_t number) const;
  bool is_shard(std::uint32_t number, const FileState& found) const noexcept;
  bool is_unchanged() const noexcept;

  // Length of a sample, known to be in its shards. Throws PackError, std::out_of_range.
  std::size_t checked_length(std::uint64_t sample) const;
  // Fills `offsets`, one longer than `ids`, with the offsets of these samples in one buffer; returns
  // the size of that buffer.
  std::size_t plan_batch(std::span<const std::int64_t> ids, std::span<std::int64_t> offsets) const;
  // Throws PackError if a batch of this size does not fit into the memory that is free, rather than let
  // the kernel end some process for it.
  void check_memory(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets) const;
  [[noreturn]] void fail_memory(std::span<const std::int64_t> ids,
                                std::span<const std::int64_t> offsets,
                                std::uint64_t free_bytes) const;
  // Reads samples to the places that plan_batch found in `target`. Throws the PackError of the first
  // sample of the batch that has one.
  void read_batch(std::span<const std::int64_t> ids, std::span<const std::int64_t> offsets,
                  std::span<std::byte> target) const;
  // As `read_batch`, each sample to a place of its own: bytes [begins[i], ends[i]) of `target`.
  void read_scattered(std::span<const std::int64_t> ids, std::span<const std::int64_t> begins,
                      std::span<const std::int64_t> ends, std::span<std::byte> target) const;
  // Time that threads have spent in read_batch copying samples, waiting for storage included, and
  // the part of it in checksums; summed over threads and over all batches so far.
  std::uint64_t busy_ns() const noexcept { return busy_ns_.load(std::memory_order_relaxed); }
  std::uint64_t verify_ns() const noexcept { return checksums_.ns(); }
  // Where a sample lies, to be read on its own by `read_single`; none if it takes a batch: it is
  // compressed, in several extents, empty, in a file that is not kept mapped, or read past the page
  // cache. A file that is not mapped yet is mapped, which takes memory, unless `only_mapped`. Throws
  // PackError, std::out_of_range.
  std::optional<ExtentRead> find_single(std::uint64_t sample, bool only_mapped = false) const;
  // Reads it to `read.target`. Throws PackError.
  void read_single(ExtentRead& read) const;
  // Views of the samples, verified; empty for a sample that is compressed or in several extents.
  // Valid as long as this object.
  std::vector<std::optional<std::span<const std::byte>>> views(
      std::span<const std::int64_t> ids) const;
  // Starts to read samples that are not in memory; returns at once.
  void prefetch(std::span<const std::int64_t> ids) const;
  // Verifies samples [first, end) in place and returns the bad ones; without checksums, those that
  // cannot be read.
  std::vector<BadSample> verify(std::uint64_t first, std::uint64_t end) const;
  // Computes the checksums of samples [first, end), each of one extent. Throws PackError.
  std::vector<std::uint32_t> checksums(std::uint64_t first, std::uint64_t end) const;
  // Drops all pages of the shards, and the knowledge which of them were verified.
  void evict() const;
  // Drops the pages of the index.
  void evict_index() const;

 private:
  struct Shard {
    Shard(Mapping file, ResidencyMaker make_residency)
        : mapping(std::move(file)),
          residency(make_residency(mapping.bytes())),
          state(mapping.state()) {}
    Mapping mapping;
    std::unique_ptr<Residency> residency;
    std::mutex mutex;
    FileState state;                           // of the file, when it was last looked at
    std::uint64_t aged_ns = 0;                 // when trust aged last; with the mutex, as is `state`
    std::atomic<std::uint64_t> checked_ns{0};  // when that was
    std::atomic<int> direct{-1};               // its descriptor past the page cache
  };

  // Each shard once it is mapped; none is replaced, so that views stay valid.
  class ShardTable {
   public:
    explicit ShardTable(std::uint32_t size)
        : shards_(std::make_unique<std::atomic<Shard*>[]>(size)), size_(size) {}
    ~ShardTable();
    ShardTable(const ShardTable&) = delete;
    ShardTable& operator=(const ShardTable&) = delete;

    std::uint32_t size() const noexcept { return size_; }  // 0: opened without them
    std::atomic<Shard*>& operator[](std::uint32_t number) const noexcept { return shards_[number]; }

   private:
    std::unique_ptr<std::atomic<Shard*>[]> shards_;
    std::uint32_t size_ = 0;
  };

  class Failure;

  void open_shards();
  std::unique_ptr<Shard> open_shard(std::uint32_t number) const;
  std::unique_ptr<Shard> open_source(std::uint32_t number) const;
  std::unique_ptr<Shard> mapped(Mapping mapping) const;
  void check_source(const std::string& path, const FileState& found, std::uint32_t number) const;
  // The shard, mapped; nullptr if too many of the files in place are.
  Shard* shard(std::uint32_t number) const;
  // Finds the shards of reads that the index was asked for.
  void attach(ExtentRead& read) const;
  void attach(std::vector<ExtentRead>& reads) const;
  // Looks at the files in place that are read past the page cache: look_up does it for the others.
  void check_sources(const std::vector<ExtentRead>& reads) const;
  // Throws PackError if a transaction was committed to an LMDB database since it was indexed: then
  // pages that were read until now may have been written again.
  void check_transaction() const;
  void note_write(Shard& shard, const FileState& state) const;
  // Returns where the sample ends in the buffer.
  std::byte* add_extents(std::vector<ExtentRead>& reads, std::uint64_t sample,
                         std::byte* target) const;
  void check_shard(Shard& shard, std::uint64_t now_ns) const;
  bool revalidates() const;
  void look_up(ExtentRead& read, bool revalidate, std::uint64_t now_ns) const;
  void look_up(std::vector<ExtentRead>& reads) const;
  void request(std::vector<ExtentRead>& reads) const;
  void load(ExtentRead& read) const;
  bool times_show_writes(const ExtentRead& read) const;
  std::span<const std::byte> own_pages(const ExtentRead& read) const;
  void copy(ExtentRead& read) const;
  void decode(ExtentRead& read) const;
  void read_direct(ExtentRead& read) const;
  void read_file(ExtentRead& read) const;
  void copy_slice(std::span<ExtentRead> slice, Failure& failure) const;
  void copy_guarded(std::span<ExtentRead> slice, Failure& failure) const;
  void check_in_place(ExtentRead& read) const;
  void touch_resident(std::span<ExtentRead> reads) const;
  template <class Work>
  void guarded(const ExtentRead& read, Work&& work) const;
  [[noreturn]] void fail_unreadable(const ExtentRead& read) const;
  [[noreturn]] void fail_sample(const ExtentRead& read, std::uint32_t found) const;
  [[noreturn]] void fail_sample(const ExtentRead& read, const std::string& why) const;
  std::string name_or_nothing(std::uint64_t sample) const;
  std::uint32_t first_shard(std::uint64_t sample) const;

  PackIndex index_;
  ReadOptions options_;
  // False: what is read cannot be compared, or is not meant to be.
  bool compares_ = true;
  ShardTable shards_;
  mutable std::atomic<std::uint32_t> mapped_count_{0};
  mutable ChecksumTimer checksums_;
  mutable std::atomic<std::uint64_t> busy_ns_{0};
  mutable std::atomic<int> revalidate_{0};  // batches in which to ask the kernel about each page
  std::atomic<bool> closing_{false};  // a prefetch under way ends early
  mutable WorkerPool pool_;  // last: its threads end before what they use is destroyed
};

}  // namespace paceline
