// Reads the samples of many batches in few large reads: in the order of storage, neighbours together.
//
// What is read lies in the target as it lies in the shards, range after range, gaps between samples
// included, so that nothing is copied. Behind the ranges lie the samples that had to be decoded, or
// put together of several extents, and copies of those that were asked for more than once: each
// position has bytes of its own, which the rank that gets it may change.
//
//     target  | range: sample . sample ... sample | range | range | decoded | decoded | repeated |
//              ^ at a multiple of a page, as in the file: memory that O_DIRECT can read to
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "paceline/pack_reader.hpp"
#include "paceline/worker_pool.hpp"

namespace paceline {

struct SortedReadOptions {
  std::size_t gap_bytes = 16 * 1024;        // between samples: read rather than left out
  std::size_t read_bytes = 4 * 1024 * 1024;  // of one read at most; a multiple of a page
  unsigned threads = 8;  // reads that are under way at a time at most; they sleep in the kernel
  unsigned cores = 1;    // threads that verify and decode
  bool direct = true;                        // past the page cache, where the file system can
};

// What to read for some samples, and to where.
struct SortedPlan {
  struct Piece {  // an extent of a sample
    std::size_t position;  // of the sample among those that were asked for
    std::uint64_t sample;
    Extent extent;
    std::size_t stored_at;   // in the target
    std::size_t decoded_at;  // in the target; equals stored_at where nothing has to be moved
  };
  struct Range {  // a contiguous part of a shard
    std::uint32_t shard;
    std::uint64_t begin;  // a multiple of a page
    std::uint64_t end;
    std::size_t target;
  };

  std::vector<Piece> pieces;  // by shard and offset; those of one sample need not be neighbours
  std::vector<Range> ranges;
  std::vector<std::int64_t> begins;   // of each sample in the target
  std::vector<std::int64_t> lengths;  // of each sample
  std::vector<std::size_t> same_as;   // the first position of the same sample
  std::size_t target_bytes = 0;
  std::uint64_t storage_bytes = 0;
  std::size_t reads = 0;
};

// Thread-safe, as a PackReader is; `reader` must outlive it.
class SortedReader {
 public:
  SortedReader(const PackReader& reader, const SortedReadOptions& options);

  // Throws PackError where the index is damaged, std::out_of_range where there is no such sample.
  SortedPlan plan(std::span<const std::int64_t> ids) const;
  // Reads and, as the reader's policy says, verifies. A sample that cannot be read whole and verified
  // gets the length -1 in `plan.lengths`: PackReader::read_batch says of it what is wrong.
  // Of the threads that the options allow, `depth` read at a time; 0 = all of them.
  void read(SortedPlan& plan, std::span<std::byte> target, unsigned depth = 0) const;

 private:
  struct Read {  // one call to the system
    std::uint32_t shard;
    std::uint64_t offset;
    std::size_t size;
    std::size_t needed;  // bytes up to the range's end: what is missing behind is past the file's end
    std::size_t target;
  };

  struct OpenShard;  // what a thread read from last

  // Calls task(thread, 0) to task(thread, count - 1) on so many threads at most.
  void share(unsigned threads, std::size_t count,
             const std::function<void(std::size_t, std::size_t)>& task) const;
  bool read_part(const Read& part, std::span<std::byte> target, OpenShard& shard) const;
  bool finish(const SortedPlan::Piece& piece, std::span<std::byte> target) const;

  const PackReader& reader_;
  SortedReadOptions options_;
  mutable WorkerPool pool_;
};

}  // namespace paceline
