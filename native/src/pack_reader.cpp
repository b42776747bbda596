#include "paceline/pack_reader.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>

#include "paceline/crc32c.hpp"
#include "paceline/zstd.hpp"

namespace paceline {
namespace {

constexpr std::size_t piece_bytes = 64 * 1024;   // copied, then checked while still in the cache
// What a thread takes of a batch at a time: small enough that all end together, large enough that
// asking for faults (two system calls) costs a few percent.
constexpr std::size_t min_part_bytes = 128 * 1024;
constexpr std::size_t max_part_bytes = 1024 * 1024;
constexpr std::size_t parts_per_thread = 8;
constexpr std::size_t part_pieces = 512;
constexpr std::size_t shared_bytes = 2 * 1024 * 1024;  // below it, waking threads costs more
constexpr std::size_t gap_bytes = 16 * 1024;          // read rather than leave out
constexpr std::uint64_t check_interval_ns = 20'000'000;
constexpr int wary_batches = 64;
constexpr std::size_t cache_line = 64;
constexpr std::size_t prefetched_bytes = 16 * cache_line;
constexpr std::size_t direct_alignment = 4096;

std::uint64_t coarse_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(now.tv_nsec);
}

// Copies and returns the checksum of the copy.
std::uint32_t copy_checked(std::byte* target, std::span<const std::byte> source) {
  std::uint32_t crc = 0;
  for (std::size_t done = 0; done < source.size();) {
    const std::size_t size = std::min(piece_bytes, source.size() - done);
    std::memcpy(target + done, source.data() + done, size);
    crc = crc32c(target + done, size, crc);
    done += size;
  }
  return crc;
}

// Touches each page once, and has the compiler believe that this matters.
void touch(std::span<const std::byte> bytes) {
  unsigned sum = 0;
  for (std::size_t at = 0; at < bytes.size(); at += page_size) {
    sum += std::to_integer<unsigned>(*const_cast<const volatile std::byte*>(&bytes[at]));
  }
  static_cast<void>(sum);
}

struct Scratch {  // aligned memory of a thread, for reads past the page cache
  ~Scratch() { std::free(memory); }
  std::byte* get(std::size_t wanted) {
    if (wanted > size) {
      std::free(memory);
      memory = static_cast<std::byte*>(std::aligned_alloc(direct_alignment, wanted));
      size = memory == nullptr ? 0 : wanted;
      if (memory == nullptr) throw std::bad_alloc();
    }
    return memory;
  }
  std::byte* memory = nullptr;
  std::size_t size = 0;
};

}  // namespace

// What went wrong first, in the order of the batch, whichever thread met it.
class PackReader::Failure {
 public:
  void note(const Piece& piece) noexcept {
    const std::lock_guard lock(mutex_);
    if (problem_ && piece.target >= target_) return;
    target_ = piece.target;
    problem_ = std::current_exception();
  }
  void rethrow() const {
    if (problem_) std::rethrow_exception(problem_);
  }

 private:
  std::mutex mutex_;
  const std::byte* target_ = nullptr;
  std::exception_ptr problem_;
};

PackReader::PackReader(const std::string& folder, const ReadOptions& options)
    : index_(folder), options_(options), pool_(options.threads) {
  if (!options.index_only) open_shards(folder);
}

PackReader::~PackReader() {
  for (const auto& shard : shards_) {
    if (shard->direct >= 0) close(shard->direct);
  }
}

void PackReader::open_shards(const std::string& folder) {
  const auto expected = index_.shard_lengths();
  for (std::uint32_t number = 0; number < index_.shard_count(); ++number) {
    char name[32];
    std::snprintf(name, sizeof name, "/shard-%05u.pace", number);
    Mapping mapping(folder + name);
    const auto bytes = mapping.bytes();
    // Exactly: a sample beyond the end of a mapped file would be a SIGBUS.
    if (bytes.size() != expected[number]) {
      fail_corrupt(mapping.path(), std::to_string(expected[number]) + " bytes expected, " +
                                       std::to_string(bytes.size()) + " found");
    }
    ShardHeader header{};
    if (bytes.size() < sizeof header) fail_corrupt(mapping.path(), "shorter than its header");
    if (!populate(bytes.first(sizeof header))) fail_corrupt(mapping.path(), "cannot be read");
    std::memcpy(&header, bytes.data(), sizeof header);
    if (std::memcmp(header.magic, "PACESHRD", sizeof header.magic) != 0 ||
        crc32c(&header, sizeof header - sizeof header.checksum) != header.checksum ||
        header.shard != number) {
      fail_corrupt(mapping.path(), "not shard " + std::to_string(number) + " of a pack");
    }
    if (header.version > pack_format_version) {
      fail_version(mapping.path(), header.version,
                   "format version " + std::to_string(header.version) + " is newer than " +
                       std::to_string(pack_format_version));
    }
    // Samples are read in random order: what lies beside them is read for nothing. What is wanted
    // is requested as a whole.
    madvise(const_cast<std::byte*>(bytes.data()), bytes.size(), MADV_RANDOM);
    shards_.push_back(std::make_unique<Shard>(std::move(mapping)));
  }
}

std::span<const std::byte> PackReader::stored(const Extent& extent) const {
  // Within the shard: the index compared it with the length, and the length with the file.
  return shards_[extent.shard]->mapping.bytes().subspan(extent.offset, extent.stored_length);
}

std::size_t PackReader::checked_length(std::uint64_t sample) const {
  const auto [first, end] = index_.extents(sample);
  if (end == first + 1) return index_.extent(first).length;
  std::size_t length = 0;
  for (std::uint64_t i = first; i < end; ++i) {
    const Extent extent = index_.extent(i);
    length += extent.length;  // of each at most a file's, so this cannot overflow before it is seen
    if (extent.codec != Codec::none || length > index_.shard_bytes()) {
      fail_corrupt(index_.path(), "sample " + std::to_string(sample) + " has impossible pieces");
    }
  }
  return length;
}

std::size_t PackReader::plan_batch(std::span<const std::int64_t> ids,
                                   std::int64_t* offsets) const {
  std::int64_t total = 0;
  offsets[0] = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) throw std::out_of_range("no such sample");
    const auto length =
        static_cast<std::int64_t>(checked_length(static_cast<std::uint64_t>(ids[i])));
    if (__builtin_add_overflow(total, length, &total)) throw std::bad_alloc();
    offsets[i + 1] = total;
  }
  return static_cast<std::size_t>(total);
}

void PackReader::add_pieces(std::vector<Piece>& pieces, std::uint64_t sample,
                            std::byte* target) const {
  const auto [first, end] = index_.extents(sample);
  for (std::uint64_t i = first; i < end; ++i) {
    const Extent extent = index_.extent(i);
    if (extent.shard >= shards_.size()) fail_corrupt(index_.path(), "opened without its shards");
    pieces.push_back({sample, extent, shards_[extent.shard].get(), stored(extent), target,
                      /*resident=*/false, /*trusted=*/false});
    if (target != nullptr) target += extent.length;
  }
}

void PackReader::check_shard(Shard& shard, std::uint64_t now_ns) const {
  const std::uint64_t before_ns = shard.checked_ns.load(std::memory_order_relaxed);
  if (now_ns < before_ns + check_interval_ns) return;
  shard.checked_ns.store(now_ns, std::memory_order_relaxed);
  const FileState state = FileState::of(shard.mapping.path());
  const std::lock_guard lock(shard.mutex);
  // Replaced or removed: the mapping still has the file that was there.
  if (state == shard.state || state.inode != shard.state.inode) return;
  if (state.size != shard.state.size) {
    shard.checked_ns.store(0, std::memory_order_relaxed);
    fail_corrupt(shard.mapping.path(), "its length changed while it was open");
  }
  shard.state = state;  // rewritten, perhaps repaired: everything is verified again
  shard.residency.distrust_all();
}

void PackReader::look_up(std::vector<Piece>& pieces) const {
  const bool wary = wary_.load(std::memory_order_relaxed) > 0;
  if (wary) wary_.fetch_sub(1, std::memory_order_relaxed);
  const std::uint64_t now_ns = coarse_ns();
  for (Piece& piece : pieces) {
    check_shard(*piece.shard, now_ns);
    const Residency& known = piece.shard->residency;
    piece.resident = known.seen(piece.stored) && (!wary || known.present(piece.stored));
    piece.trusted = piece.resident && options_.verify == Verify::first &&
                    piece.extent.codec == Codec::none && known.trusted(piece.stored);
  }
}

void PackReader::request(std::vector<Piece>& pieces) const {
  const auto is_resident = [](const Piece& one) { return one.resident; };
  if (std::all_of(pieces.begin(), pieces.end(), is_resident)) return;
  const auto lies_before = [](const Piece& left, const Piece& right) {
    if (left.resident != right.resident) return left.resident;
    return !left.resident && left.stored.data() < right.stored.data();
  };
  std::stable_sort(pieces.begin(), pieces.end(), lies_before);
  auto piece = std::find_if_not(pieces.begin(), pieces.end(), is_resident);
  while (piece != pieces.end()) {
    const std::byte* const begin = piece->stored.data();
    const std::byte* end = begin + piece->stored.size();
    const Shard* const shard = piece->shard;
    for (++piece; piece != pieces.end() && piece->shard == shard &&
                  piece->stored.data() <= end + gap_bytes;
         ++piece) {
      end = std::max(end, piece->stored.data() + piece->stored.size());
    }
    read_ahead({begin, end});
  }
}

void PackReader::load(Piece& piece) const {
  if (piece.resident) return;
  piece.shard->residency.expect_faults(piece.stored);
  if (!populate(piece.stored)) fail_unreadable(piece);
}

void PackReader::decode(Piece& piece) const {
  const std::span<std::byte> target(piece.target, piece.extent.length);
  std::string why;
  if (!zstd_decompress(piece.stored, target, &why)) fail_sample(piece, "zstd: " + why);
  const std::uint32_t found = crc32c(target.data(), target.size());
  if (found != piece.extent.checksum) fail_sample(piece, found);
}

void PackReader::copy(Piece& piece) const {
  if (options_.direct) return read_direct(piece);
  load(piece);
  if (piece.extent.codec != Codec::none) {
    decode(piece);
  } else if (piece.trusted || options_.verify == Verify::never) {
    std::memcpy(piece.target, piece.stored.data(), piece.stored.size());
  } else {
    const std::uint32_t found = copy_checked(piece.target, piece.stored);
    if (found != piece.extent.checksum) fail_sample(piece, found);
    piece.shard->residency.trust(piece.stored);
  }
  if (!piece.resident) piece.shard->residency.note_seen(piece.stored);
}

void PackReader::read_direct(Piece& piece) const {
  thread_local Scratch scratch;
  int descriptor = piece.shard->direct.load(std::memory_order_acquire);
  if (descriptor < 0) {
    const std::string& path = piece.shard->mapping.path();
    descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (descriptor < 0) fail_io(path, errno);
    int none = -1;
    if (!piece.shard->direct.compare_exchange_strong(none, descriptor)) {
      close(descriptor);
      descriptor = none;
    }
  }
  const std::uint64_t begin = piece.extent.offset & ~(direct_alignment - 1);
  const std::uint64_t end = piece.extent.offset + piece.extent.stored_length;
  const std::size_t size = (end - begin + direct_alignment - 1) & ~(direct_alignment - 1);
  std::byte* const memory = scratch.get(std::max(size, direct_alignment));
  for (std::size_t done = 0; begin + done < end;) {
    const ssize_t count = pread(descriptor, memory + done, size - done,
                                static_cast<off_t>(begin + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail_unreadable(piece);
    done += static_cast<std::size_t>(count);
  }
  piece.stored = {memory + (piece.extent.offset - begin), piece.extent.stored_length};
  if (piece.extent.codec != Codec::none) return decode(piece);
  const std::uint32_t found = copy_checked(piece.target, piece.stored);
  if (options_.verify != Verify::never && found != piece.extent.checksum) fail_sample(piece, found);
}

void PackReader::copy_part(std::span<Piece> part, Failure& failure) const {
  const std::int64_t faults = thread_faults();
  for (Piece& piece : part) {
    // While this one is copied, the beginning of the next comes from memory.
    const Piece* const next = &piece == &part.back() ? nullptr : &piece + 1;
    for (std::size_t at = 0; next != nullptr && at < prefetched_bytes; at += cache_line) {
      __builtin_prefetch(next->stored.data() + at);
    }
    try {
      copy(piece);
    } catch (...) {
      failure.note(piece);
    }
  }
  if (!part.front().resident || (faults >= 0 && faults == thread_faults())) return;
  // Some page was not where it was thought to be: nothing of this part is believed unseen.
  wary_.store(wary_batches, std::memory_order_relaxed);
  for (Piece& piece : part) piece.shard->residency.distrust_around(piece.stored);
  for (Piece& piece : part) {
    if (!piece.trusted) continue;
    const std::uint32_t found = crc32c(piece.target, piece.extent.length);
    try {
      if (found != piece.extent.checksum) fail_sample(piece, found);
      piece.shard->residency.trust(piece.stored);
    } catch (...) {
      failure.note(piece);
    }
  }
}

void PackReader::read_batch(std::span<const std::int64_t> ids, const std::int64_t* offsets,
                            std::byte* target) const {
  std::vector<Piece> pieces;
  pieces.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    add_pieces(pieces, static_cast<std::uint64_t>(ids[i]), target + offsets[i]);
  }
  if (!options_.direct) {
    look_up(pieces);
    request(pieces);
  }
  const auto total = static_cast<std::size_t>(offsets[ids.size()]);
  const std::size_t part_bytes = std::clamp(total / (pool_.threads() * parts_per_thread),
                                            min_part_bytes, max_part_bytes);
  // Parts of one kind: a fault among resident pieces means something, among others it does not.
  std::vector<std::span<Piece>> parts;
  for (std::size_t first = 0; first < pieces.size();) {
    std::size_t end = first;
    for (std::size_t bytes = 0; end < pieces.size() && bytes < part_bytes &&
                                end - first < part_pieces &&
                                pieces[end].resident == pieces[first].resident;
         ++end) {
      bytes += pieces[end].extent.length;
    }
    parts.emplace_back(&pieces[first], end - first);
    first = end;
  }
  Failure failure;
  const auto work = [&](std::size_t part) { copy_part(parts[part], failure); };
  if (options_.direct || total >= shared_bytes) {
    pool_.run(parts.size(), work);
  } else {
    for (std::size_t part = 0; part < parts.size(); ++part) work(part);
  }
  failure.rethrow();
}

void PackReader::check_in_place(Piece& piece) const {
  load(piece);
  const std::uint32_t found = crc32c(piece.stored.data(), piece.stored.size());
  if (found != piece.extent.checksum) fail_sample(piece, found);
  piece.shard->residency.trust(piece.stored);
  if (!piece.resident) piece.shard->residency.note_seen(piece.stored);
}

std::vector<std::optional<std::span<const std::byte>>> PackReader::views(
    std::span<const std::int64_t> ids) const {
  std::vector<std::optional<std::span<const std::byte>>> found(ids.size());
  std::vector<Piece> pieces;
  pieces.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) throw std::out_of_range("no such sample");
    const std::size_t before = pieces.size();
    add_pieces(pieces, static_cast<std::uint64_t>(ids[i]), nullptr);
    if (pieces.size() == before) {
      found[i].emplace();
    } else if (pieces.size() == before + 1 && pieces[before].extent.codec == Codec::none) {
      found[i] = pieces[before].stored;
    } else {
      pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(before), pieces.end());
    }
  }
  look_up(pieces);
  request(pieces);
  const std::int64_t faults = thread_faults();
  auto piece = pieces.begin();
  for (; piece != pieces.end() && piece->resident; ++piece) {
    if (piece->trusted || options_.verify == Verify::never) touch(piece->stored);
  }
  const bool faulted = faults < 0 || faults != thread_faults();
  if (faulted) wary_.store(wary_batches, std::memory_order_relaxed);
  for (Piece& one : pieces) {
    if (faulted && one.resident) one.shard->residency.distrust_around(one.stored);
    if (options_.verify == Verify::never) {
      load(one);
    } else if (faulted || !one.trusted) {
      check_in_place(one);
    }
  }
  return found;
}

void PackReader::prefetch(std::span<const std::int64_t> ids) const {
  if (options_.direct) return;
  pool_.post([this, wanted = std::vector<std::int64_t>(ids.begin(), ids.end())] {
    try {
      std::vector<Piece> pieces;
      pieces.reserve(wanted.size());
      for (const std::int64_t id : wanted) {
        if (id >= 0) add_pieces(pieces, static_cast<std::uint64_t>(id), nullptr);
      }
      look_up(pieces);
      request(pieces);
    } catch (const std::exception&) {  // who reads it will be told
    }
  });
}

std::vector<BadSample> PackReader::verify(std::uint64_t first, std::uint64_t end) const {
  std::vector<BadSample> bad;
  std::vector<std::byte> decoded;
  for (std::uint64_t sample = first; sample < std::min(end, index_.sample_count()); ++sample) {
    try {
      static_cast<void>(index_.name(sample));
      std::vector<Piece> pieces;
      add_pieces(pieces, sample, nullptr);
      request(pieces);
      for (Piece& piece : pieces) {
        check_shard(*piece.shard, coarse_ns());
        if (piece.extent.codec == Codec::none) {
          check_in_place(piece);
          continue;
        }
        load(piece);
        decoded.resize(piece.extent.length);
        piece.target = decoded.data();
        decode(piece);
      }
    } catch (const PackError& problem) {
      bad.push_back({sample, problem.what()});
    }
  }
  return bad;
}

void PackReader::evict() const {
  for (const auto& shard : shards_) {
    const auto bytes = shard->mapping.bytes();
    madvise(const_cast<std::byte*>(bytes.data()), bytes.size(), MADV_DONTNEED);
    const int descriptor = open(shard->mapping.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor >= 0) {
      posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
      close(descriptor);
    }
    shard->residency.forget();
  }
}

void PackReader::fail_unreadable(const Piece& piece) const {
  fail_sample(piece, "its bytes cannot be read: the file was cut off, or the device failed");
}

void PackReader::fail_sample(const Piece& piece, std::uint32_t found) const {
  PackError problem(PackError::Kind::sample, piece.shard->mapping.path(),
                    checksum_mismatch(piece.extent.checksum, found));
  problem.sample = piece.sample;
  problem.shard = piece.extent.shard;
  problem.expected = piece.extent.checksum;
  problem.found = found;
  throw problem;
}

void PackReader::fail_sample(const Piece& piece, const std::string& why) const {
  PackError problem(PackError::Kind::sample, piece.shard->mapping.path(), why);
  problem.sample = piece.sample;
  problem.shard = piece.extent.shard;
  throw problem;
}

}  // namespace paceline
