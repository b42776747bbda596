#include "paceline/pack_reader.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <numeric>

#include "paceline/buffer_pool.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/fault_guard.hpp"
#include "paceline/fork.hpp"
#include "paceline/lmdb_records.hpp"

namespace paceline {
namespace {

constexpr std::size_t block_bytes = 64 * 1024;   // copied, then checked while still in the cache
// What a thread takes of a batch at a time: small enough that all threads end together, large enough
// that counting faults (two system calls) costs a few percent.
constexpr std::size_t min_slice_bytes = 128 * 1024;
constexpr std::size_t max_slice_bytes = 1024 * 1024;
constexpr std::size_t slices_per_thread = 8;
constexpr std::size_t max_slice_extents = 512;
constexpr std::size_t shared_bytes = 2 * 1024 * 1024;  // below it, waking threads costs more
// Decoding takes about as long as copying so many times as many bytes: lz4 half of it, zstd twice.
constexpr std::size_t decoding_cost = 8;
constexpr std::size_t gap_bytes = 16 * 1024;          // read rather than leave out
constexpr std::uint64_t check_interval_ns = 20'000'000;
constexpr int revalidated_batches = 64;
constexpr std::int64_t large_batch_bytes = std::int64_t{256} << 20;
constexpr std::size_t cache_line = 64;
constexpr std::size_t prefetched_bytes = 16 * cache_line;
constexpr std::size_t direct_alignment = 4096;
// Of data in place: the kernel allows a process 65,530 mappings, and a shell often 1,024 open files.
constexpr std::uint32_t max_mapped_files = 8192;
constexpr std::uint32_t max_direct_files = 256;
constexpr std::size_t entries_ahead = 8;  // of the index, on their way from memory

// Copies and returns the checksum of the copy.
std::uint32_t copy_checked(std::byte* target, std::span<const std::byte> source,
                           ChecksumTimer& checksums) {
  std::uint32_t crc = 0;
  for (std::size_t done = 0; done < source.size();) {
    const std::size_t size = std::min(block_bytes, source.size() - done);
    std::memcpy(target + done, source.data() + done, size);
    crc = checksums.crc(target + done, size, crc);
    done += size;
  }
  return crc;
}

// Touches each page once, in a way that the compiler cannot remove.
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

struct Closed {  // a descriptor, when this goes out of scope
  explicit Closed(int opened) noexcept : descriptor(opened) {}
  ~Closed() {
    if (descriptor >= 0) close(descriptor);
  }
  Closed(const Closed&) = delete;
  Closed& operator=(const Closed&) = delete;
  int descriptor;
};

[[noreturn]] void fail_changed(const std::string& path, const std::string& why) {
  throw PackError(PackError::Kind::changed, path, why);
}

}  // namespace

// What went wrong first, in the order of the batch, whichever thread met it.
class PackReader::Failure {
 public:
  void note(const ExtentRead& read) noexcept {
    const std::lock_guard lock(mutex_);
    if (problem_ && read.target >= target_) return;
    target_ = read.target;
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

PackReader::PackReader(const std::string& place, const ReadOptions& options)
    : index_(place),
      options_(options),
      compares_(options.verify != Verify::never && index_.has_checksums()),
      shards_(options.index_only ? 0 : index_.shard_count()),
      pool_(options.threads) {
  if (!options.index_only) open_shards();
}

PackReader::~PackReader() { closing_.store(true, std::memory_order_relaxed); }

PackReader::ShardTable::~ShardTable() {
  for (std::uint32_t number = 0; number < size_; ++number) {
    const Shard* const shard = shards_[number].load(std::memory_order_acquire);
    if (shard != nullptr && shard->direct >= 0) close(shard->direct);
    delete shard;
  }
}

void PackReader::open_shards() {
  const bool is_lmdb = index_.is_in_place() && index_.sources().kind == SourceKind::lmdb;
  if ((index_.is_in_place() && !is_lmdb) || options_.lazy) return;
  for (std::uint32_t number = 0; number < shards_.size(); ++number) static_cast<void>(shard(number));
  check_transaction();
}

PackReader::Shard* PackReader::shard(std::uint32_t number) const {
  if (number >= shards_.size()) fail_corrupt(index_.path(), "opened without its shards");
  Shard* const known = shards_[number].load(std::memory_order_acquire);
  if (known != nullptr) return known;
  if (index_.is_in_place()) {
    const std::uint32_t most = options_.direct ? max_direct_files : max_mapped_files;
    if (mapped_count_.load(std::memory_order_relaxed) >= most) return nullptr;
  }
  auto opened = index_.is_in_place() ? open_source(number) : open_shard(number);
  Shard* none = nullptr;  // unless another thread was faster
  if (!shards_[number].compare_exchange_strong(none, opened.get(), std::memory_order_acq_rel)) {
    return none;
  }
  mapped_count_.fetch_add(1, std::memory_order_relaxed);
  return opened.release();
}

std::unique_ptr<PackReader::Shard> PackReader::open_shard(std::uint32_t number) const {
  Mapping mapping(shard_path(number));
  const auto bytes = mapping.bytes();
  // Exactly: a sample beyond the end of a mapped file would be a SIGBUS.
  const std::uint64_t expected = index_.shard_lengths()[number];
  if (bytes.size() != expected) {
    fail_corrupt(mapping.path(), std::to_string(expected) + " bytes expected, " +
                                     std::to_string(bytes.size()) + " found");
  }
  ShardHeader header{};
  if (bytes.size() < sizeof header) fail_corrupt(mapping.path(), "shorter than its header");
  const bool is_read = populate(bytes.first(sizeof header)) &&
                       completes(FaultRange(bytes), [&] {
                         std::memcpy(&header, bytes.data(), sizeof header);
                       });
  if (!is_read) fail_corrupt(mapping.path(), "cannot be read");
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
  return mapped(std::move(mapping));
}

std::unique_ptr<PackReader::Shard> PackReader::open_source(std::uint32_t number) const {
  const std::string path = shard_path(number);
  check_source(path, FileState::of(path), number);  // also that it is there, and not empty
  Mapping mapping(path);
  check_source(path, mapping.state(), number);
  return mapped(std::move(mapping));
}

std::unique_ptr<PackReader::Shard> PackReader::mapped(Mapping mapping) const {
  // Samples are read in random order: reading ahead beside them would be in vain. The extents of a
  // batch are requested together.
  const auto bytes = mapping.bytes();
  madvise(const_cast<std::byte*>(bytes.data()), bytes.size(), MADV_RANDOM);
  return std::make_unique<Shard>(std::move(mapping), options_.residency);
}

void PackReader::check_source(const std::string& path, const FileState& found,
                              std::uint32_t number) const {
  SourceState before{};
  index_.read([&] { before = index_.source_state(number); });
  const auto size = static_cast<std::uint64_t>(found.size);
  const std::uint64_t length = index_.shard_lengths()[number];
  const bool is_same_file = before.inode == 0 ? found.inode != 0 : found.inode == before.inode;
  if (index_.sources().kind == SourceKind::lmdb) {  // it may grow before a transaction is committed
    if (is_same_file && size >= length) return;
  } else if (is_same_file && size == length && size == before.size &&
             found.written_ns == before.mtime_ns) {
    return;
  }
  if (found.inode == 0) fail_changed(path, "it is gone");
  fail_changed(path, size == before.size ? "it was written to, or replaced"
                                         : "it had " + std::to_string(before.size) +
                                               " bytes, then " + std::to_string(size));
}

void PackReader::check_sources(const std::vector<ExtentRead>& reads) const {
  if (!index_.is_in_place()) return;
  const std::uint64_t now_ns = coarse_ns();
  for (const ExtentRead& read : reads) {
    if (read.shard != nullptr) check_shard(*read.shard, now_ns);
  }
}

void PackReader::check_transaction() const {
  if (!index_.is_in_place() || index_.sources().kind != SourceKind::lmdb || shards_.size() == 0) return;
  const Shard& file = *shard(0);
  const SourcesHeader& sources = index_.sources();
  const LmdbCommit newest = lmdb_commit(file.mapping.bytes(), sources.page_bytes);
  if (newest.transaction == sources.transaction) {
    if (sources.meta_checksum == 0 || newest.checksum == sources.meta_checksum) return;
    fail_changed(file.mapping.path(), "another database is at its path now");
  }
  fail_committed(file.mapping.path(), sources.transaction, newest.transaction);
}

std::string PackReader::shard_path(std::uint32_t number) const {
  std::string path;
  index_.read([&] { path = index_.shard_path(number); });
  return path;
}

bool PackReader::is_shard(std::uint32_t number, const FileState& found) const noexcept {
  try {
    if (index_.is_in_place()) {
      check_source("", found, number);
      return true;
    }
    const FileState& mapped_state = shard(number)->mapping.state();
    return found.inode == mapped_state.inode && found.device == mapped_state.device &&
           found.size == mapped_state.size;
  } catch (const std::exception&) {
    return false;
  }
}

bool PackReader::is_unchanged() const noexcept {
  try {
    check_transaction();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void PackReader::attach(ExtentRead& read) const {
  read.shard = shard(read.extent.shard);
  if (read.shard == nullptr) return;
  // Within the shard: the index compared it with the length, and the length with the file.
  read.stored = read.shard->mapping.bytes().subspan(read.extent.offset, read.extent.stored_length);
}

void PackReader::attach(std::vector<ExtentRead>& reads) const {
  for (ExtentRead& read : reads) attach(read);
}

std::size_t PackReader::checked_length(std::uint64_t sample) const {
  const auto [first, end] = index_.extents(sample);
  if (end == first + 1) return index_.extent(first).length;
  std::size_t length = 0;
  for (std::uint64_t i = first; i < end; ++i) {
    const Extent extent = index_.extent(i);
    length += extent.length;  // of each at most a file's, so this cannot overflow before it is seen
    if (extent.is_encoded() || length > index_.shard_bytes()) {
      fail_corrupt(index_.path(), "sample " + std::to_string(sample) + " has impossible extents");
    }
  }
  return length;
}

std::size_t PackReader::plan_batch(std::span<const std::int64_t> ids,
                                   std::span<std::int64_t> offsets) const {
  if (offsets.size() != ids.size() + 1) throw std::invalid_argument("one offset more than samples");
  offsets[0] = 0;
  if (ids.size() > 1) index_.request(ids);
  volatile std::size_t beyond = ids.size();  // the sample with which their sum exceeds any memory
  index_.read([&] {
    std::int64_t total = 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0) throw std::out_of_range("no such sample");
      if (i + entries_ahead < ids.size()) {
        index_.prefetch(static_cast<std::uint64_t>(ids[i + entries_ahead]));
      }
      const std::size_t length = checked_length(static_cast<std::uint64_t>(ids[i]));
      if (__builtin_add_overflow(total, length, &total)) {
        beyond = i;
        return;
      }
      offsets[i + 1] = total;
    }
  });
  if (beyond < ids.size()) {
    const std::int64_t claimed[] = {0, INT64_MAX};
    fail_memory(ids.subspan(beyond, 1), claimed, available_memory_bytes());
  }
  return static_cast<std::size_t>(offsets.back());
}

void PackReader::check_memory(std::span<const std::int64_t> ids,
                              std::span<const std::int64_t> offsets) const {
  if (offsets.back() < large_batch_bytes) return;
  const std::uint64_t free_bytes = available_memory_bytes();
  if (static_cast<std::uint64_t>(offsets.back()) > free_bytes) fail_memory(ids, offsets, free_bytes);
}

void PackReader::fail_memory(std::span<const std::int64_t> ids,
                             std::span<const std::int64_t> offsets,
                             std::uint64_t free_bytes) const {
  std::size_t largest = 0;
  const auto length = [&](std::size_t i) { return offsets[i + 1] - offsets[i]; };
  for (std::size_t i = 1; i < ids.size(); ++i) {
    if (length(i) > length(largest)) largest = i;
  }
  PackError problem(PackError::Kind::memory, index_.path(),
                    std::to_string(ids.size()) + " samples have " + std::to_string(offsets.back()) +
                        " bytes by the index, the largest of them " +
                        std::to_string(length(largest)));
  if (free_bytes != UINT64_MAX) {
    problem = PackError(problem.kind, problem.file,
                        problem.what() + ("; " + std::to_string(free_bytes) + " are free"));
  }
  problem.sample = static_cast<std::uint64_t>(ids[largest]);
  problem.shard = first_shard(problem.sample);
  problem.name = name_or_nothing(problem.sample);
  throw problem;
}

std::byte* PackReader::add_extents(std::vector<ExtentRead>& reads, std::uint64_t sample,
                                   std::byte* target) const {
  const auto [first, end] = index_.extents(sample);
  for (std::uint64_t i = first; i < end; ++i) {
    const Extent extent = index_.extent(i);
    // An empty file cannot be mapped, and there is nothing to read.
    if (extent.stored_length == 0 && index_.is_in_place()) continue;
    reads.push_back({sample, extent, /*shard=*/nullptr, /*stored=*/{}, target,
                     /*resident=*/false, /*trusted=*/false});
    if (target != nullptr) target += extent.length;
  }
  return target;
}

void PackReader::check_shard(Shard& shard, std::uint64_t now_ns) const {
  const std::uint64_t before_ns = shard.checked_ns.load(std::memory_order_relaxed);
  if (now_ns < before_ns + check_interval_ns) return;
  shard.checked_ns.store(now_ns, std::memory_order_relaxed);
  const FileState state = FileState::of(shard.mapping.path());
  const ForkGuard whole;
  const std::lock_guard lock(shard.mutex);
  if (now_ns >= shard.aged_ns + options_.trust_ns / 2) {
    // Not looked at for longer: nothing of it is trusted, as if it had aged all the while.
    if (now_ns >= shard.aged_ns + options_.trust_ns) shard.residency->age();
    shard.residency->age();
    shard.aged_ns = now_ns;
  }
  // Replaced or removed: the mapping still has the file that was there.
  if (state.inode != shard.state.inode || state.device != shard.state.device) return;
  if (state == shard.state && shard.state.is_settled) return;
  if (index_.is_in_place()) return note_write(shard, state);
  if (state.size != shard.state.size) {
    shard.checked_ns.store(0, std::memory_order_relaxed);
    fail_corrupt(shard.mapping.path(), "its length changed while it was open: " +
                                           std::to_string(shard.state.size) + " bytes, then " +
                                           std::to_string(state.size));
  }
  shard.state = state;  // rewritten, perhaps repaired: everything is verified again
  shard.residency->invalidate_all();
}

// A file in place was written to: its bytes can be handed out only where a checksum tells that they are
// still the same. Of an LMDB database, transactions tell (check_transaction).
void PackReader::note_write(Shard& shard, const FileState& state) const {
  const bool is_lmdb = index_.sources().kind == SourceKind::lmdb;
  const bool is_written = state.size != shard.state.size ||
                          state.written_ns != shard.state.written_ns;
  if (is_written && !is_lmdb && (!compares_ || state.size != shard.state.size)) {
    shard.checked_ns.store(0, std::memory_order_relaxed);
    fail_changed(shard.mapping.path(), "it was written to");
  }
  shard.state = state;
  shard.residency->invalidate_all();
}

bool PackReader::revalidates() const {
  const bool revalidate = revalidate_.load(std::memory_order_relaxed) > 0;
  if (revalidate) revalidate_.fetch_sub(1, std::memory_order_relaxed);
  return revalidate;
}

void PackReader::look_up(ExtentRead& read, bool revalidate, std::uint64_t now_ns) const {
  check_shard(*read.shard, now_ns);
  const Residency& known = *read.shard->residency;
  read.resident = known.resident(read.stored, revalidate);
  read.trusted = read.resident && compares_ && options_.verify == Verify::first &&
                 !read.extent.is_encoded() && known.trusted(read.stored);
}

void PackReader::look_up(std::vector<ExtentRead>& reads) const {
  const bool revalidate = revalidates();
  const std::uint64_t now_ns = coarse_ns();
  for (ExtentRead& read : reads) {
    if (read.shard != nullptr) look_up(read, revalidate, now_ns);
  }
}

void PackReader::request(std::vector<ExtentRead>& reads) const {
  // What is read from a file that is opened for it comes first, as if it were there.
  const auto is_resident = [](const ExtentRead& read) {
    return read.resident || read.shard == nullptr;
  };
  if (std::all_of(reads.begin(), reads.end(), is_resident)) return;
  const auto lies_before = [&](const ExtentRead& left, const ExtentRead& right) {
    if (is_resident(left) != is_resident(right)) return is_resident(left);
    return !is_resident(left) && left.stored.data() < right.stored.data();
  };
  std::stable_sort(reads.begin(), reads.end(), lies_before);
  auto read = std::find_if_not(reads.begin(), reads.end(), is_resident);
  while (read != reads.end()) {
    const std::byte* const begin = read->stored.data();
    const std::byte* end = begin + read->stored.size();
    const Shard* const shard = read->shard;
    for (++read; read != reads.end() && read->shard == shard &&
                  read->stored.data() <= end + gap_bytes;
         ++read) {
      end = std::max(end, read->stored.data() + read->stored.size());
    }
    read_ahead({begin, end}, &closing_);
  }
}

void PackReader::load(ExtentRead& read) const {
  if (read.resident) return;
  read.shard->residency->expect_faults(read.stored);
  if (!populate(read.stored)) fail_unreadable(read);
}

void PackReader::decode(ExtentRead& read) const {
  const std::span<std::byte> target(read.target, read.extent.length);
  const Encoding encoding = read.extent.encoding;
  if (!codec_available(encoding.codec)) {
    throw PackError(PackError::Kind::library, codec_library(encoding.codec), "");
  }
  std::string why;
  if (!paceline::decode(encoding, index_.dictionary(), read.stored, target, &why)) {
    fail_sample(read, why);
  }
  const std::uint32_t found = checksums_.crc(target.data(), target.size());
  if (found != read.extent.checksum) fail_sample(read, found);
}

// Whether the file's times tell of what is written to these bytes from now on. It is asked before
// they are verified: then what makes them untrue later invalidates the shard (check_shard). Where
// the system does not say, trust ages.
bool PackReader::times_show_writes(const ExtentRead& read) const {
  if (read.stored.size() < min_trusted_bytes || options_.verify != Verify::first) return true;
  return dirty_pages(read.shard->mapping.path(), read.shard->mapping.state().inode,
                     read.extent.offset, read.extent.stored_length) != DirtyPages::some;
}

// The bytes that become trusted when an extent was verified. A value of LMDB that has pages of its own
// shares them with nothing else but their header: by its bytes alone, it and the value before would
// for ever doubt each other's pages. Such a value begins right behind that header, and none in a leaf
// does.
std::span<const std::byte> PackReader::own_pages(const ExtentRead& read) const {
  if (!index_.is_in_place() || index_.sources().kind != SourceKind::lmdb) return read.stored;
  const std::uint64_t page_bytes = index_.sources().page_bytes;
  if (page_bytes < page_size || page_bytes % page_size != 0 ||
      read.extent.offset % page_bytes != lmdb_header_bytes ||
      read.stored.size() < min_trusted_bytes) {
    return read.stored;
  }
  const auto file = read.shard->mapping.bytes();
  const std::uint64_t begin = read.extent.offset / page_size * page_size;
  const std::uint64_t past = read.extent.offset + read.stored.size() + page_size - 1;
  const std::uint64_t end = past / page_size * page_size;
  return file.subspan(begin, std::min<std::uint64_t>(end, file.size()) - begin);
}

void PackReader::copy(ExtentRead& read) const {
  if (read.shard == nullptr) return read_file(read);
  if (options_.direct) return read_direct(read);
  load(read);
  if (read.extent.is_encoded()) {
    decode(read);
  } else if (read.trusted || !compares_) {
    std::memcpy(read.target, read.stored.data(), read.stored.size());
  } else {
    const bool may_trust = times_show_writes(read);
    const std::uint32_t found = copy_checked(read.target, read.stored, checksums_);
    if (found != read.extent.checksum) fail_sample(read, found);
    if (may_trust) read.shard->residency->trust(own_pages(read));
  }
  if (!read.resident) read.shard->residency->note_resident(read.stored);
}

void PackReader::read_direct(ExtentRead& read) const {
  thread_local Scratch scratch;
  int descriptor = read.shard->direct.load(std::memory_order_acquire);
  if (descriptor < 0) {
    const std::string& path = read.shard->mapping.path();
    descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (descriptor < 0) fail_io(path, errno, /*direct=*/true);
    if (index_.is_in_place()) {  // it may have been replaced since it was mapped
      Closed closed{descriptor};
      check_source(path, FileState::of(descriptor), read.extent.shard);
      closed.descriptor = -1;
    }
    int none = -1;
    if (!read.shard->direct.compare_exchange_strong(none, descriptor)) {
      close(descriptor);
      descriptor = none;
    }
  }
  const std::uint64_t begin = read.extent.offset & ~(direct_alignment - 1);
  const std::uint64_t end = read.extent.offset + read.extent.stored_length;
  const std::size_t size = (end - begin + direct_alignment - 1) & ~(direct_alignment - 1);
  std::byte* const memory = scratch.get(std::max(size, direct_alignment));
  for (std::size_t done = 0; begin + done < end;) {
    const ssize_t count = pread(descriptor, memory + done, size - done,
                                static_cast<off_t>(begin + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail_unreadable(read);
    done += static_cast<std::size_t>(count);
  }
  read.stored = {memory + (read.extent.offset - begin), read.extent.stored_length};
  if (read.extent.is_encoded()) return decode(read);
  const std::uint32_t found = copy_checked(read.target, read.stored, checksums_);
  if (compares_ && found != read.extent.checksum) fail_sample(read, found);
}

// One of more files in place than are kept open.
void PackReader::read_file(ExtentRead& read) const {
  const std::string path = shard_path(read.extent.shard);
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fail_io(path, errno);
  const Closed closed{descriptor};
  check_source(path, FileState::of(descriptor), read.extent.shard);
  if (read.extent.is_encoded()) fail_sample(read, "no file in place is compressed");
  for (std::uint64_t done = 0; done < read.extent.length;) {
    const ssize_t count = pread(descriptor, read.target + done, read.extent.length - done,
                                static_cast<off_t>(read.extent.offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail_unreadable(read);
    done += static_cast<std::uint64_t>(count);
  }
  if (!compares_) return;
  const std::uint32_t found = crc32c(read.target, read.extent.length);
  if (found != read.extent.checksum) fail_sample(read, found);
}

// Copies a slice; a file that shrinks meanwhile costs the samples that it held, and no more.
void PackReader::copy_guarded(std::span<ExtentRead> slice, Failure& failure) const {
  FaultRange range;
  volatile std::size_t at = 0;  // which of them: still known when a fault ends the work
  while (at < slice.size()) {
    const bool is_complete = completes(range, [&] {
      while (at < slice.size()) {
        ExtentRead& read = slice[at];
        if (read.shard != nullptr) range.watch(read.shard->mapping.bytes());
        // While this one is copied, the beginning of the next comes from memory.
        const ExtentRead* next = &read == &slice.back() ? nullptr : &read + 1;
        if (next != nullptr && next->shard == nullptr) next = nullptr;
        for (std::size_t byte = 0; next != nullptr && byte < prefetched_bytes; byte += cache_line) {
          __builtin_prefetch(next->stored.data() + byte);
        }
        try {
          copy(read);
        } catch (...) {
          failure.note(read);
        }
        at = at + 1;
      }
    });
    if (is_complete) return;
    ExtentRead& lost = slice[at];
    lost.trusted = false;
    try {
      fail_unreadable(lost);
    } catch (...) {
      failure.note(lost);
    }
    at = at + 1;
  }
}

void PackReader::copy_slice(std::span<ExtentRead> slice, Failure& failure) const {
  const FaultWatch faults;
  copy_guarded(slice, failure);
  if (!slice.front().resident || !faults.struck()) return;
  // Some page was no longer resident: nothing of this slice goes out unverified.
  revalidate_.store(revalidated_batches, std::memory_order_relaxed);
  for (ExtentRead& read : slice) read.shard->residency->invalidate_around(read.stored);
  for (ExtentRead& read : slice) {
    if (!read.trusted) continue;
    const std::uint32_t found = crc32c(read.target, read.extent.length);
    try {
      if (found != read.extent.checksum) fail_sample(read, found);
    } catch (...) {
      failure.note(read);
    }
  }
}

void PackReader::read_batch(std::span<const std::int64_t> ids,
                            std::span<const std::int64_t> offsets,
                            std::span<std::byte> target) const {
  if (offsets.size() != ids.size() + 1) throw std::invalid_argument("one offset more than samples");
  read_scattered(ids, offsets.first(ids.size()), offsets.subspan(1), target);
}

void PackReader::read_scattered(std::span<const std::int64_t> ids,
                                std::span<const std::int64_t> begins,
                                std::span<const std::int64_t> ends,
                                std::span<std::byte> target) const {
  if (begins.size() != ids.size() || ends.size() != ids.size()) {
    throw std::invalid_argument("one place for each sample");
  }
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (begins[i] < 0 || ends[i] < begins[i] || static_cast<std::size_t>(ends[i]) > target.size()) {
      throw std::length_error("the buffer is smaller than the samples");
    }
  }
  std::vector<ExtentRead> reads;
  reads.reserve(ids.size());
  index_.read([&] {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::byte* const end =
          add_extents(reads, static_cast<std::uint64_t>(ids[i]), target.data() + begins[i]);
      // Planned by what the index said a moment ago: nothing is written beyond that.
      if (end != target.data() + ends[i]) {
        fail_corrupt(index_.path(), "it was changed while it was open");
      }
    }
  });
  if (ids.size() > 1) index_.check_file(/*now=*/true);
  attach(reads);
  if (options_.direct) {
    check_sources(reads);
  } else {
    look_up(reads);
    request(reads);
  }
  const auto cost = [](const ExtentRead& read) {
    return read.extent.length * (read.extent.is_encoded() ? decoding_cost : 1);
  };
  std::size_t work_bytes = 0;
  for (const ExtentRead& read : reads) work_bytes += cost(read);
  const std::size_t slice_bytes = std::clamp(work_bytes / (pool_.threads() * slices_per_thread),
                                            min_slice_bytes, max_slice_bytes);
  // Parts of one kind: a fault among resident reads means something, among others it does not.
  std::vector<std::span<ExtentRead>> slices;
  for (std::size_t first = 0; first < reads.size();) {
    std::size_t end = first;
    for (std::size_t bytes = 0; end < reads.size() && bytes < slice_bytes &&
                                end - first < max_slice_extents &&
                                reads[end].resident == reads[first].resident;
         ++end) {
      bytes += cost(reads[end]);
    }
    slices.emplace_back(&reads[first], end - first);
    first = end;
  }
  Failure failure;
  const auto work = [&](std::size_t slice) {
    const auto began = std::chrono::steady_clock::now();
    copy_slice(slices[slice], failure);
    const auto took = std::chrono::steady_clock::now() - began;
    busy_ns_.fetch_add(static_cast<std::uint64_t>(
                           std::chrono::duration_cast<std::chrono::nanoseconds>(took).count()),
                       std::memory_order_relaxed);
  };
  if (options_.direct || work_bytes >= shared_bytes) {
    pool_.run(slices.size(), work);
  } else {
    for (std::size_t slice = 0; slice < slices.size(); ++slice) work(slice);
  }
  check_transaction();  // first: it explains a checksum that does not match
  failure.rethrow();
}

// Calls `work`, which reads the shard of `read`, outside of a slice.
template <class Work>
void PackReader::guarded(const ExtentRead& read, Work&& work) const {
  if (!completes(FaultRange(read.shard->mapping.bytes()), work)) fail_unreadable(read);
}

std::optional<PackReader::ExtentRead> PackReader::find_single(std::uint64_t sample,
                                                              bool only_mapped) const {
  if (options_.direct) return std::nullopt;
  Extent extent{};
  volatile bool is_single = true;
  index_.read([&] {
    const auto [first, end] = index_.extents(sample);
    is_single = end == first + 1;
    if (is_single) extent = index_.extent(first);
  });
  if (!is_single || extent.is_encoded() || extent.stored_length == 0) return std::nullopt;
  if (only_mapped && shards_[extent.shard].load(std::memory_order_acquire) == nullptr) {
    return std::nullopt;
  }
  ExtentRead read{sample, extent, /*shard=*/nullptr, /*stored=*/{}, /*target=*/nullptr,
                  /*resident=*/false, /*trusted=*/false};
  attach(read);
  if (read.shard == nullptr) return std::nullopt;
  return read;
}

void PackReader::read_single(ExtentRead& read) const {
  look_up(read, revalidates(), coarse_ns());
  if (!read.resident) read_ahead(read.stored);
  Failure failure;
  if (read.trusted) {
    copy_slice({&read, 1}, failure);
  } else {  // verified in any case: there is no need to know whether its pages stayed
    copy_guarded({&read, 1}, failure);
  }
  check_transaction();  // first: it explains a checksum that does not match
  failure.rethrow();
}

void PackReader::check_in_place(ExtentRead& read) const {
  load(read);
  const bool may_trust = times_show_writes(read);
  std::uint32_t found = 0;
  guarded(read, [&] { found = crc32c(read.stored.data(), read.stored.size()); });
  if (found != read.extent.checksum) fail_sample(read, found);
  if (may_trust) read.shard->residency->trust(own_pages(read));
  if (!read.resident) read.shard->residency->note_resident(read.stored);
}

std::vector<std::optional<std::span<const std::byte>>> PackReader::views(
    std::span<const std::int64_t> ids) const {
  std::vector<std::optional<std::span<const std::byte>>> found(ids.size());
  std::vector<ExtentRead> reads;
  std::vector<std::size_t> viewed;  // which of them each read is for
  reads.reserve(ids.size());
  viewed.reserve(ids.size());
  if (ids.size() > 1) index_.request(ids);
  index_.read([&] {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0) throw std::out_of_range("no such sample");
      const std::size_t before = reads.size();
      add_extents(reads, static_cast<std::uint64_t>(ids[i]), nullptr);
      if (reads.size() == before) {
        found[i].emplace();
      } else if (reads.size() == before + 1 && !reads[before].extent.is_encoded()) {
        viewed.push_back(i);
      } else {
        reads.erase(reads.begin() + static_cast<std::ptrdiff_t>(before), reads.end());
      }
    }
  });
  if (ids.size() > 1) index_.check_file(/*now=*/true);
  attach(reads);
  for (std::size_t k = 0; k < reads.size(); ++k) {
    if (reads[k].shard != nullptr) found[viewed[k]] = reads[k].stored;
  }
  std::erase_if(reads, [](const ExtentRead& read) { return read.shard == nullptr; });
  look_up(reads);
  request(reads);
  const FaultWatch faults;
  touch_resident(reads);
  const bool faulted = faults.struck();
  if (faulted) revalidate_.store(revalidated_batches, std::memory_order_relaxed);
  for (ExtentRead& read : reads) {
    if (faulted && read.resident) read.shard->residency->invalidate_around(read.stored);
    if (!compares_) {
      load(read);
      if (!read.resident) read.shard->residency->note_resident(read.stored);
    } else if (faulted || !read.trusted) {
      try {
        check_in_place(read);
      } catch (const PackError&) {
        check_transaction();
        throw;
      }
    }
  }
  check_transaction();
  return found;
}

// Has resident pages that are handed out as they are be touched: had one been dropped, this faults.
void PackReader::touch_resident(std::span<ExtentRead> reads) const {
  FaultRange range;
  volatile std::size_t at = 0;
  const bool is_complete = completes(range, [&] {
    while (at < reads.size() && reads[at].resident) {
      const ExtentRead& read = reads[at];
      range.watch(read.shard->mapping.bytes());
      if (read.trusted || !compares_) touch(read.stored);
      at = at + 1;
    }
  });
  if (!is_complete) fail_unreadable(reads[at]);
}

void PackReader::prefetch(std::span<const std::int64_t> ids) const {
  if (options_.direct) return;
  pool_.post([this, wanted = std::vector<std::int64_t>(ids.begin(), ids.end())] {
    try {
      std::vector<ExtentRead> reads;
      reads.reserve(wanted.size());
      index_.request(wanted);
      index_.read([&] {
        for (const std::int64_t id : wanted) {
          if (id >= 0) add_extents(reads, static_cast<std::uint64_t>(id), nullptr);
        }
      });
      attach(reads);
      std::erase_if(reads, [](const ExtentRead& read) { return read.shard == nullptr; });
      look_up(reads);
      request(reads);
    } catch (const std::exception&) {  // only a hint: reading the sample throws the error
    }
  });
}

std::vector<BadSample> PackReader::verify(std::uint64_t first, std::uint64_t end) const {
  std::vector<BadSample> bad;
  std::vector<std::byte> decoded;
  for (std::uint64_t sample = first; sample < std::min(end, index_.sample_count()); ++sample) {
    try {
      std::vector<ExtentRead> reads;
      index_.read([&] {
        static_cast<void>(index_.name(sample));
        add_extents(reads, sample, nullptr);
      });
      attach(reads);
      request(reads);
      for (ExtentRead& read : reads) {
        if (read.shard != nullptr) check_shard(*read.shard, coarse_ns());
        if (read.shard != nullptr && !read.extent.is_encoded() && index_.has_checksums()) {
          check_in_place(read);
          continue;
        }
        decoded.resize(read.extent.length);
        read.target = decoded.data();
        if (read.shard == nullptr) {
          read_file(read);
          continue;
        }
        load(read);
        guarded(read, [&] {
          if (!read.extent.is_encoded()) {
            std::memcpy(read.target, read.stored.data(), read.stored.size());
          } else {
            decode(read);
          }
        });
      }
    } catch (const PackError& problem) {
      if (problem.kind == PackError::Kind::changed || problem.kind == PackError::Kind::library) {
        throw;
      }
      check_transaction();
      bad.push_back({sample, first_shard(sample), name_or_nothing(sample), problem.what()});
    }
  }
  check_transaction();
  return bad;
}

std::vector<std::uint32_t> PackReader::checksums(std::uint64_t first, std::uint64_t end) const {
  end = std::min(end, index_.sample_count());
  std::vector<std::int64_t> ids(end - std::min(first, end));
  std::iota(ids.begin(), ids.end(), static_cast<std::int64_t>(first));
  index_.request(ids);
  std::vector<std::uint32_t> found;
  std::vector<std::byte> copy;
  std::vector<ExtentRead> reads;
  for (std::uint64_t sample = first; sample < end; ++sample) {
    reads.clear();
    index_.read([&] { add_extents(reads, sample, nullptr); });
    attach(reads);
    request(reads);
    std::uint32_t crc = 0;
    for (ExtentRead& read : reads) {
      if (read.shard == nullptr) {
        copy.resize(read.extent.length);
        read.target = copy.data();
        read_file(read);
        crc = crc32c(copy.data(), copy.size());
        continue;
      }
      check_shard(*read.shard, coarse_ns());
      load(read);
      guarded(read, [&] { crc = crc32c(read.stored.data(), read.stored.size()); });
    }
    found.push_back(crc);
  }
  check_transaction();
  return found;
}

void PackReader::evict() const {
  for (std::uint32_t number = 0; number < shards_.size(); ++number) {
    const Shard* const shard = shards_[number].load(std::memory_order_acquire);
    if (shard == nullptr) continue;
    const auto bytes = shard->mapping.bytes();
    madvise(const_cast<std::byte*>(bytes.data()), bytes.size(), MADV_DONTNEED);
    const int descriptor = open(shard->mapping.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor >= 0) {
      posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
      close(descriptor);
    }
    shard->residency->invalidate_all();
  }
}

void PackReader::evict_index() const {
  const auto bytes = index_.bytes();
  madvise(const_cast<std::byte*>(bytes.data()), bytes.size(), MADV_DONTNEED);
}

void PackReader::fail_unreadable(const ExtentRead& read) const {
  fail_sample(read, "its bytes cannot be read: the file was truncated, or the device failed");
}

void PackReader::fail_sample(const ExtentRead& read, std::uint32_t found) const {
  fail_sample(read, checksum_mismatch(read.extent.checksum, found));
}

void PackReader::fail_sample(const ExtentRead& read, const std::string& why) const {
  PackError problem(PackError::Kind::sample, shard_path(read.extent.shard), why);
  problem.sample = read.sample;
  problem.shard = read.extent.shard;
  problem.name = name_or_nothing(read.sample);
  throw problem;
}

std::string PackReader::name_or_nothing(std::uint64_t sample) const {
  std::string name;
  try {
    index_.read([&] { name = index_.name(sample); });
  } catch (const PackError&) {
    name.clear();
  }
  return name;
}

std::uint32_t PackReader::first_shard(std::uint64_t sample) const {
  try {
    std::uint32_t shard = 0;
    index_.read([&] { shard = index_.extent(index_.extents(sample).first).shard; });
    return shard;
  } catch (const std::exception&) {
    return 0;
  }
}

}  // namespace paceline
