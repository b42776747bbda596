#include "paceline/pack_writer.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "paceline/crc32c.hpp"

namespace paceline {
namespace {

constexpr std::size_t alignment = 64;
constexpr std::size_t max_read = std::size_t{1} << 30;

constexpr std::size_t small_alignment = 8;  // of samples that are smaller than `alignment`

std::size_t aligned(std::size_t position, std::size_t step) {
  return (position + step - 1) / step * step;
}

std::int64_t nanoseconds(const timespec& time) {
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// Calls work(k) for k in [0, count) on `threads` threads, the calling one included; the first
// exception ends it and is thrown here.
template <class Work>
void in_parallel(std::size_t count, int threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr problem;
  std::mutex mutex;
  const auto run = [&] {
    try {
      for (std::size_t k = next++; k < count; k = next++) work(k);
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      if (!problem) problem = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  const std::size_t wanted = std::min<std::size_t>(static_cast<std::size_t>(threads), count);
  try {
    while (helpers.size() + 1 < wanted) helpers.emplace_back(run);
  } catch (const std::system_error&) {  // the system gives no more threads: fewer suffice
  }
  run();
  for (auto& helper : helpers) helper.join();
  if (problem) std::rethrow_exception(problem);
}

// A file descriptor that is closed with its owner.
struct File {
  explicit File(int number) : descriptor(number) {}
  ~File() {
    if (descriptor >= 0) close(descriptor);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int descriptor;
};

FileRead unreadable(int error) {
  FileRead state;
  const bool gone = error == ENOENT || error == ENOTDIR || error == ELOOP;
  state.outcome = gone ? ReadOutcome::gone : ReadOutcome::unreadable;
  state.error = error;
  return state;
}

FileRead resized(std::uint64_t size) {
  FileRead state;
  state.outcome = ReadOutcome::resized;
  state.size = size;
  return state;
}

FileRead read_file(int folder, const std::string& name, std::uint64_t length,
                    std::int64_t mtime_ns, std::byte* target, bool follow) {
  // Not blocking: what was a file may be a fifo by now.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | (follow ? 0 : O_NOFOLLOW);
  int descriptor = -1;
  do {
    descriptor = openat(folder, name.c_str(), flags);
  } while (descriptor < 0 && errno == EINTR);
  if (descriptor < 0) return unreadable(errno);
  const File file(descriptor);
  FileRead state;
  struct stat before {};
  if (fstat(descriptor, &before) != 0) return unreadable(errno);
  if (!S_ISREG(before.st_mode)) {
    state.outcome = ReadOutcome::no_file;
    return state;
  }
  if (static_cast<std::uint64_t>(before.st_size) != length) {
    return resized(static_cast<std::uint64_t>(before.st_size));
  }
  std::uint64_t done = 0;
  while (done < length) {
    const ssize_t count = read(descriptor, target + done, std::min<std::size_t>(length - done, max_read));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return unreadable(errno);
    if (count == 0) return resized(done);
    state.checksum = crc32c(target + done, static_cast<std::size_t>(count), state.checksum);
    done += static_cast<std::uint64_t>(count);
  }
  struct stat after {};
  if (fstat(descriptor, &after) != 0) return unreadable(errno);
  if (after.st_size != before.st_size) return resized(static_cast<std::uint64_t>(after.st_size));
  if (nanoseconds(after.st_mtim) != mtime_ns) state.outcome = ReadOutcome::touched;
  return state;
}

double thread_time_s() noexcept {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void check_places(std::span<const std::byte> source, std::span<const std::uint64_t> positions,
                  std::span<const std::uint64_t> lengths) {
  if (positions.size() != lengths.size()) {
    throw std::invalid_argument("columns of different lengths");
  }
  for (std::size_t k = 0; k < lengths.size(); ++k) {
    if (positions[k] > source.size() || lengths[k] > source.size() - positions[k]) {
      throw std::invalid_argument("a sample does not lie within the batch");
    }
  }
}

struct Frame {  // no bytes: the sample stays as it is
  std::vector<std::byte> bytes;
  Encoding encoding;
};

Frame compressed(std::span<const std::byte> body, const EncodeOptions& options,
                 const ZstdDictionary& dictionary) {
  Frame best;
  if (body.empty()) return best;
  const double most = options.keep_ratio * static_cast<double>(body.size());
  const std::size_t room = compress_bound(options.codec, body.size());
  const auto target = std::make_unique_for_overwrite<std::byte[]>(room);
  const auto attempt = [&](std::span<const std::byte> source, std::uint8_t element_bits) {
    const std::size_t length =
        compress(options.codec, options.level, dictionary, source, {target.get(), room});
    const std::size_t limit = best.bytes.empty() ? body.size() : best.bytes.size();
    if (length == 0 || length >= limit || static_cast<double>(length) > most) return;
    best.bytes.assign(target.get(), target.get() + length);
    best.encoding = {options.codec, element_bits};
  };
  attempt(body, 0);
  const auto element_bits = options.element_bits == npy_elements
                                ? npy_element_bits(body)
                                : static_cast<std::uint8_t>(options.element_bits);
  if (element_bits == 0) return best;
  const auto shuffled = std::make_unique_for_overwrite<std::byte[]>(body.size());
  shuffle(body, {shuffled.get(), body.size()}, element_bits);
  attempt({shuffled.get(), body.size()}, element_bits);
  return best;
}

}  // namespace

bool NameList::valid() const noexcept {
  if (offsets.empty() || offsets.front() != 0 || offsets.back() > blob.size()) return false;
  return std::is_sorted(offsets.begin(), offsets.end());
}

std::vector<FolderEntry> list_folder(int descriptor, bool follow) {
  const int own = dup(descriptor);  // closedir closes it
  if (own < 0) throw std::system_error(errno, std::generic_category());
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(fdopendir(own), &closedir);
  if (!folder) {
    const int error = errno;
    close(own);
    throw std::system_error(error, std::generic_category());
  }
  rewinddir(folder.get());
  std::vector<FolderEntry> entries;
  for (;;) {
    errno = 0;
    const dirent* found = readdir(folder.get());
    if (found == nullptr) break;
    const std::string_view name(found->d_name);
    if (name == "." || name == "..") continue;
    FolderEntry entry{std::string(name), 0, 0, false, 0, 0, 0, 0};
    struct stat status {};
    int result = fstatat(descriptor, entry.name.c_str(), &status, AT_SYMLINK_NOFOLLOW);
    if (result == 0 && S_ISLNK(status.st_mode)) {
      entry.is_link = true;
      if (follow) result = fstatat(descriptor, entry.name.c_str(), &status, 0);
    }
    if (result != 0) {
      entry.error = errno;
    } else {
      entry.mode = status.st_mode;
      entry.size = static_cast<std::uint64_t>(status.st_size);
      entry.mtime_ns = nanoseconds(status.st_mtim);
      entry.device = status.st_dev;
      entry.inode = status.st_ino;
      if (S_ISDIR(status.st_mode)) entry.name += '/';
    }
    entries.push_back(std::move(entry));
  }
  if (errno != 0) throw std::system_error(errno, std::generic_category());
  std::sort(entries.begin(), entries.end(),
            [](const FolderEntry& left, const FolderEntry& right) { return left.name < right.name; });
  return entries;
}

std::vector<FileRead> read_files(int descriptor, const NameList& names,
                                  std::span<const std::uint64_t> lengths,
                                  std::span<const std::int64_t> mtimes_ns,
                                  std::span<const std::uint64_t> positions,
                                  std::span<std::byte> target, bool follow, int threads) {
  const std::size_t count = names.size();
  if (!names.valid() || lengths.size() != count || mtimes_ns.size() != count ||
      positions.size() != count) {
    throw std::invalid_argument("columns of different lengths");
  }
  for (std::size_t k = 0; k < count; ++k) {
    const std::size_t end = k + 1 < count ? positions[k + 1] : target.size();
    if (end > target.size() || positions[k] > end || lengths[k] > end - positions[k]) {
      throw std::invalid_argument("a file does not fit its place");
    }
  }
  std::vector<FileRead> states(count);
  in_parallel(count, threads, [&](std::size_t k) {
    std::byte* place = target.data() + positions[k];
    states[k] = read_file(descriptor, std::string(names[k]), lengths[k], mtimes_ns[k], place, follow);
    const std::size_t end = k + 1 < count ? positions[k + 1] : target.size();
    std::memset(place + lengths[k], 0, end - positions[k] - lengths[k]);
  });
  return states;
}

Encoded encode(std::span<const std::byte> source, std::span<const std::uint64_t> positions,
               std::span<const std::uint64_t> lengths, const EncodeOptions& options,
               std::span<const std::byte> dictionary) {
  const std::size_t count = lengths.size();
  check_places(source, positions, lengths);
  const ZstdDictionary own = options.codec == Codec::zstd_dictionary
                                 ? ZstdDictionary(dictionary, options.level)
                                 : ZstdDictionary();
  std::vector<Frame> frames(count);
  in_parallel(count, options.threads, [&](std::size_t k) {
    frames[k] = compressed(source.subspan(positions[k], lengths[k]), options, own);
  });
  Encoded result;
  result.positions.resize(count);
  result.lengths.resize(count);
  result.codecs.resize(count);
  std::size_t size = 0;
  for (std::size_t k = 0; k < count; ++k) {
    const bool encoded = !frames[k].bytes.empty();
    result.lengths[k] = encoded ? frames[k].bytes.size() : lengths[k];
    result.codecs[k] = frames[k].encoding.code();
    result.positions[k] =
        aligned(size, result.lengths[k] < alignment ? small_alignment : alignment);
    size = result.positions[k] + result.lengths[k];
  }
  result.bytes.resize(aligned(size, alignment));
  for (std::size_t k = 0; k < count; ++k) {
    const std::byte* from = result.codecs[k] != 0 ? frames[k].bytes.data() : source.data() + positions[k];
    if (result.lengths[k] > 0) {
      std::memcpy(result.bytes.data() + result.positions[k], from, result.lengths[k]);
    }
  }
  return result;
}

std::vector<std::byte> train_dictionary(std::span<const std::byte> source,
                                        std::span<const std::uint64_t> positions,
                                        std::span<const std::uint64_t> lengths,
                                        std::size_t capacity) {
  check_places(source, positions, lengths);
  std::vector<std::byte> samples;  // end to end
  std::vector<std::size_t> sizes;
  for (std::size_t k = 0; k < lengths.size(); ++k) {
    const auto sample = source.subspan(positions[k], lengths[k]);
    samples.insert(samples.end(), sample.begin(), sample.end());
    if (!sample.empty()) sizes.push_back(sample.size());
  }
  return zstd_train(samples, sizes, capacity);
}

double decode_s(std::span<const std::byte> stored, std::span<const std::uint64_t> positions,
                std::span<const std::uint64_t> stored_lengths,
                std::span<const std::uint64_t> lengths, std::span<const std::uint8_t> codes,
                std::span<const std::byte> dictionary) {
  check_places(stored, positions, stored_lengths);
  if (lengths.size() != positions.size() || codes.size() != positions.size()) {
    throw std::invalid_argument("columns of different lengths");
  }
  std::size_t total = 0;
  for (const std::uint64_t length : lengths) {
    if (length > max_encoded_length) throw std::invalid_argument("a sample is too long");
    total += length;
  }
  const ZstdDictionary own = dictionary.empty() ? ZstdDictionary() : ZstdDictionary(dictionary);
  std::vector<std::byte> target(total);  // as a batch is, and touched before
  const double begin_s = thread_time_s();
  std::size_t at = 0;
  std::uint32_t sums = 0;
  for (std::size_t k = 0; k < lengths.size(); ++k) {
    const auto source = stored.subspan(positions[k], stored_lengths[k]);
    const std::span<std::byte> place(target.data() + at, lengths[k]);
    const std::optional<Encoding> encoding = Encoding::of(codes[k]);
    if (!encoding) return -1;
    if (encoding->codec == Codec::none) {
      if (source.size() != place.size()) return -1;
      std::copy(source.begin(), source.end(), place.begin());
    } else if (!decode(*encoding, own, source, place)) {
      return -1;
    }
    sums ^= crc32c(place.data(), place.size());
    at += place.size();
  }
  // The sums are used, so that no compiler leaves them out.
  return thread_time_s() - begin_s + (sums == 1 ? 1e-12 : 0);
}

std::vector<std::uint64_t> sorted_order(const NameList& names) {
  if (!names.valid()) throw std::invalid_argument("names do not lie within their blob");
  bool sorted = true;
  for (std::size_t k = 1; k < names.size() && sorted; ++k) sorted = names[k - 1] <= names[k];
  std::vector<std::uint64_t> order;
  if (sorted) return order;
  order.resize(names.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](std::uint64_t left, std::uint64_t right) {
    return names[left] < names[right];
  });
  return order;
}

NameMerger::NameMerger(std::vector<NameList> lists)
    : lists_(std::move(lists)), positions_(lists_.size(), 0) {
  for (std::uint32_t k = 0; k < lists_.size(); ++k) {
    if (!lists_[k].valid()) throw std::invalid_argument("names do not lie within their blob");
    if (lists_[k].size() > 0) heads_.push({lists_[k][0], k});
  }
}

NameMerger::Piece NameMerger::next(std::size_t count) {
  Piece piece;
  while (piece.lists.size() < count && !heads_.empty()) {
    Head head = heads_.top();
    heads_.pop();
    // Stays with one list as long as its names come first: sources that are sorted cost no heap.
    for (;;) {
      piece.duplicate = begun_ && head.name <= std::string_view(last_);
      piece.lists.push_back(head.list);
      piece.lengths.push_back(head.name.size());
      piece.blob += head.name;
      if (piece.duplicate) return piece;
      last_ = head.name;
      begun_ = true;
      const NameList& list = lists_[head.list];
      if (++positions_[head.list] == list.size()) break;
      head.name = list[positions_[head.list]];
      if (piece.lists.size() == count || (!heads_.empty() && Later{}(head, heads_.top()))) {
        heads_.push(head);
        break;
      }
    }
  }
  return piece;
}

std::vector<std::uint64_t> lower_bounds(const NameList& names, const NameList& wanted) {
  if (!names.valid() || !wanted.valid()) {
    throw std::invalid_argument("names do not lie within their blob");
  }
  std::vector<std::uint64_t> found(wanted.size());
  for (std::size_t k = 0; k < wanted.size(); ++k) {
    std::size_t low = 0;
    std::size_t high = names.size();
    while (low < high) {
      const std::size_t middle = low + (high - low) / 2;
      if (names[middle] < wanted[k]) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    found[k] = low;
  }
  return found;
}

void start_writeback(int descriptor, std::int64_t offset, std::int64_t length) noexcept {
#ifdef SYNC_FILE_RANGE_WRITE
  sync_file_range(descriptor, offset, length, SYNC_FILE_RANGE_WRITE);
#else
  static_cast<void>(descriptor), static_cast<void>(offset), static_cast<void>(length);
#endif
}

}  // namespace paceline
