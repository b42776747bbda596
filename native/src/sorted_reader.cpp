#include "paceline/sorted_reader.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>

#include "paceline/crc32c.hpp"

namespace paceline {
namespace {

constexpr std::size_t sample_alignment = 64;  // of what is decoded

std::uint64_t rounded_down(std::uint64_t value) { return value & ~std::uint64_t{page_size - 1}; }
std::uint64_t rounded_up(std::uint64_t value) { return rounded_down(value + page_size - 1); }

class File {
 public:
  File(const std::string& path, int flags) : descriptor_(open(path.c_str(), flags)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const noexcept { return descriptor_; }

 private:
  int descriptor_;
};

// Reads until `needed` bytes are there; what lies behind them may be past the end of the file.
bool read_all(int descriptor, std::byte* target, std::size_t size, std::size_t needed,
              std::uint64_t offset) {
  for (std::size_t done = 0; done < needed;) {
    const ssize_t count =
        pread(descriptor, target + done, size - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    done += static_cast<std::size_t>(count);
  }
  return true;
}

}  // namespace

SortedReader::SortedReader(const PackReader& reader, const SortedReadOptions& options)
    : reader_(reader), options_(options), pool_(std::max(options.threads, options.cores)) {
  if (options.read_bytes == 0 || options.read_bytes % page_size != 0 ||
      options.threads == 0 || options.cores == 0) {
    throw std::invalid_argument("read_bytes must be a multiple of a page, threads and cores at least 1");
  }
}

SortedPlan SortedReader::plan(std::span<const std::int64_t> ids) const {
  SortedPlan plan;
  plan.begins.assign(ids.size(), 0);
  plan.lengths.assign(ids.size(), 0);
  plan.same_as.resize(ids.size());
  std::vector<std::size_t> by_sample(ids.size());
  std::iota(by_sample.begin(), by_sample.end(), std::size_t{0});
  std::stable_sort(by_sample.begin(), by_sample.end(),
                   [&](std::size_t left, std::size_t right) { return ids[left] < ids[right]; });
  const PackIndex& index = reader_.index();
  std::vector<std::size_t> moved;  // positions of samples that are decoded, put together or repeated
  std::vector<bool> is_moved(ids.size(), false);
  index.request(ids);
  // Within `read` nothing may be destroyed when the index shrinks: hence the vectors outside.
  index.read([&] {
    for (std::size_t i = 0; i < by_sample.size(); ++i) {
      const std::size_t at = by_sample[i];
      if (ids[at] < 0) throw std::out_of_range("no such sample");
      const bool is_repeated = i > 0 && ids[by_sample[i - 1]] == ids[at];
      plan.same_as[at] = is_repeated ? plan.same_as[by_sample[i - 1]] : at;
      if (is_repeated) {
        plan.lengths[at] = plan.lengths[plan.same_as[at]];
        moved.push_back(at);
        continue;
      }
      const auto sample = static_cast<std::uint64_t>(ids[at]);
      plan.lengths[at] = static_cast<std::int64_t>(reader_.checked_length(sample));
      const auto [first, end] = index.extents(sample);
      std::size_t within = 0;
      for (std::uint64_t number = first; number < end; ++number) {
        plan.pieces.push_back({at, sample, index.extent(number), 0, within});
        within += plan.pieces.back().extent.length;
      }
      if (end == first + 1 && !plan.pieces.back().extent.is_encoded()) continue;
      is_moved[at] = true;
      moved.push_back(at);
    }
  });
  std::stable_sort(plan.pieces.begin(), plan.pieces.end(),
                   [](const SortedPlan::Piece& left, const SortedPlan::Piece& right) {
                     if (left.extent.shard != right.extent.shard) {
                       return left.extent.shard < right.extent.shard;
                     }
                     return left.extent.offset < right.extent.offset;
                   });
  for (SortedPlan::Piece& piece : plan.pieces) {
    const std::uint64_t end = piece.extent.offset + piece.extent.stored_length;
    const bool joins = !plan.ranges.empty() && plan.ranges.back().shard == piece.extent.shard &&
                       piece.extent.offset <= plan.ranges.back().end + options_.gap_bytes;
    if (!joins) {
      if (!plan.ranges.empty()) {
        const auto& last = plan.ranges.back();
        plan.target_bytes += rounded_up(last.end - last.begin);
      }
      const std::uint64_t begin = rounded_down(piece.extent.offset);
      plan.ranges.push_back({piece.extent.shard, begin, end, plan.target_bytes});
    }
    SortedPlan::Range& range = plan.ranges.back();
    range.end = std::max(range.end, end);
    piece.stored_at = range.target + (piece.extent.offset - range.begin);
    if (is_moved[piece.position]) continue;
    piece.decoded_at = piece.stored_at;
    plan.begins[piece.position] = static_cast<std::int64_t>(piece.stored_at);
  }
  for (const SortedPlan::Range& range : plan.ranges) {
    const std::uint64_t size = range.end - range.begin;
    plan.storage_bytes += size;
    plan.reads += (size + options_.read_bytes - 1) / options_.read_bytes;
  }
  if (!plan.ranges.empty()) {
    plan.target_bytes += rounded_up(plan.ranges.back().end - plan.ranges.back().begin);
  }
  for (const std::size_t at : moved) {
    plan.begins[at] = static_cast<std::int64_t>(plan.target_bytes);
    plan.target_bytes += (static_cast<std::size_t>(plan.lengths[at]) + sample_alignment - 1) &
                         ~(sample_alignment - 1);
  }
  for (SortedPlan::Piece& piece : plan.pieces) {
    if (!is_moved[piece.position]) continue;
    piece.decoded_at += static_cast<std::size_t>(plan.begins[piece.position]);
  }
  return plan;
}

struct SortedReader::OpenShard {
  std::uint32_t number = 0;
  bool direct = false;
  std::unique_ptr<File> file;  // null: none yet, or not to be used
};

bool SortedReader::read_part(const Read& part, std::span<std::byte> target,
                             OpenShard& shard) const {
  std::byte* const place = target.data() + part.target;
  const bool direct =
      options_.direct && reinterpret_cast<std::uintptr_t>(place) % page_size == 0;
  if (shard.file == nullptr || shard.number != part.shard || shard.direct != direct) {
    const std::string path = reader_.shard_path(part.shard);
    constexpr int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;  // it may be a pipe by now
    auto file = std::make_unique<File>(path, direct ? flags | O_DIRECT : flags);
    if (direct && file->get() < 0 && errno == EINVAL) {  // no reads past the cache here
      file = std::make_unique<File>(path, flags);
    }
    shard = {part.shard, direct, nullptr};
    if (file->get() < 0 || !reader_.is_shard(part.shard, FileState::of(file->get()))) return false;
    shard.file = std::move(file);
  }
  const std::size_t size = direct ? rounded_up(part.size) : part.size;
  return read_all(shard.file->get(), place, size, part.needed, part.offset);
}

bool SortedReader::finish(const SortedPlan::Piece& piece, std::span<std::byte> target) const {
  const Extent& extent = piece.extent;
  const auto stored = target.subspan(piece.stored_at, extent.stored_length);
  const auto decoded = target.subspan(piece.decoded_at, extent.length);
  if (extent.is_encoded()) {
    if (!decode(extent.encoding, reader_.index().dictionary(), stored, decoded)) return false;
  } else {
    if (decoded.data() != stored.data()) std::memcpy(decoded.data(), stored.data(), stored.size());
    if (!reader_.compares()) return true;
  }
  return crc32c(decoded.data(), decoded.size()) == extent.checksum;
}

void SortedReader::share(unsigned threads, std::size_t count,
                         const std::function<void(std::size_t, std::size_t)>& task) const {
  std::atomic<std::size_t> next = 0;
  pool_.run(std::min<std::size_t>(threads, count), [&](std::size_t thread) {
    for (std::size_t i = next++; i < count; i = next++) task(thread, i);
  });
}

void SortedReader::read(SortedPlan& plan, std::span<std::byte> target, unsigned depth) const {
  if (target.size() < plan.target_bytes) throw std::length_error("the target is too small");
  std::vector<Read> reads;
  reads.reserve(plan.reads);
  for (const SortedPlan::Range& range : plan.ranges) {
    for (std::uint64_t at = range.begin; at < range.end; at += options_.read_bytes) {
      const auto size =
          static_cast<std::size_t>(std::min<std::uint64_t>(options_.read_bytes, range.end - at));
      reads.push_back({range.shard, at, size, size, range.target + (at - range.begin)});
    }
  }
  // The bytes of a read that failed are not what the shard holds: nothing of it is used, whatever the
  // policy for checksums is.
  std::vector<std::atomic<bool>> is_read(reads.size());
  const unsigned at_a_time = depth == 0 ? options_.threads : std::min(depth, options_.threads);
  // Open for this window only: a shard that is replaced is noticed, and few files are open.
  std::vector<OpenShard> open(at_a_time);
  share(at_a_time, reads.size(), [&](std::size_t thread, std::size_t i) {
    is_read[i] = read_part(reads[i], target, open[thread]);
  });
  open.clear();
  std::vector<std::atomic<bool>> is_bad(plan.lengths.size());
  const auto is_there = [&](const SortedPlan::Piece& piece) {
    const std::size_t end = piece.stored_at + piece.extent.stored_length;
    auto part = std::upper_bound(reads.begin(), reads.end(), piece.stored_at,
                                 [](std::size_t at, const Read& read) { return at < read.target; });
    if (part != reads.begin()) --part;
    for (; part != reads.end() && part->target < end; ++part) {
      if (!is_read[static_cast<std::size_t>(part - reads.begin())]) return false;
    }
    return true;
  };
  constexpr std::size_t pieces_at_once = 64;
  const std::size_t slices = (plan.pieces.size() + pieces_at_once - 1) / pieces_at_once;
  share(options_.cores, slices, [&](std::size_t, std::size_t slice) {
    const std::size_t end = std::min((slice + 1) * pieces_at_once, plan.pieces.size());
    for (std::size_t i = slice * pieces_at_once; i < end; ++i) {
      const SortedPlan::Piece& piece = plan.pieces[i];
      if (!is_there(piece) || !finish(piece, target)) is_bad[piece.position] = true;
    }
  });
  const bool is_unchanged = reader_.is_unchanged();
  for (std::size_t i = 0; i < plan.lengths.size(); ++i) {
    if (is_bad[i] || !is_unchanged) plan.lengths[i] = -1;
  }
  for (std::size_t i = 0; i < plan.lengths.size(); ++i) {
    const std::size_t first = plan.same_as[i];
    if (first == i) continue;
    plan.lengths[i] = plan.lengths[first];
    if (plan.lengths[i] <= 0) continue;
    std::memcpy(target.data() + plan.begins[i], target.data() + plan.begins[first],
                static_cast<std::size_t>(plan.lengths[i]));
  }
}

}  // namespace paceline
