#include "paceline/pack_index.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "paceline/crc32c.hpp"
#include "paceline/page_cache.hpp"

namespace paceline {
namespace {

static_assert(std::endian::native == std::endian::little, "packs are mapped as they lie on disk");

constexpr std::uint64_t alignment = 64;
constexpr std::uint32_t first_narrow_version = 3;
constexpr std::uint64_t file_header_bytes = 64;  // of shards and parity files
using Digest = std::array<std::byte, 32>;        // SHA-256

constexpr std::uint64_t look_interval_ns = 20'000'000;
// How often the index is verified again where a write may leave the file's times as they are.
constexpr std::uint64_t verify_interval_ns = 15'000'000'000;

std::int64_t nanoseconds(const timespec& time) noexcept {
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

FileState state_of(const struct stat& status) noexcept {
  constexpr std::int64_t step_ns = 20'000'000;  // more than any kernel's tick
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  const std::int64_t age_ns = nanoseconds(now) - nanoseconds(status.st_mtim);
  return {status.st_dev, status.st_ino, status.st_size, nanoseconds(status.st_mtim),
          nanoseconds(status.st_ctim), age_ns < -step_ns || age_ns > step_ns};
}

// Orders folders as if each ended in a slash: then a folder comes right before all below it.
bool comes_before(std::string_view left, std::string_view right) {
  const std::size_t common = std::min(left.size(), right.size());
  const int order = left.substr(0, common).compare(right.substr(0, common));
  if (order != 0) return order < 0;
  if (left.size() == right.size()) return false;
  return left.size() < right.size() ? '/' <= static_cast<unsigned char>(right[common])
                                    : static_cast<unsigned char>(left[common]) < '/';
}

bool is_file(const std::string& path) noexcept {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

// Whether reading a sample takes an entry of this column.
constexpr bool is_read_for_samples(std::uint32_t section) noexcept {
  switch (static_cast<Section>(section)) {
    case Section::offsets:
    case Section::lengths:
    case Section::shards:
    case Section::checksums:
    case Section::labels:
    case Section::stored_lengths:
    case Section::codecs:
      return true;
    default:
      return false;
  }
}

constexpr bool may_be_narrow(std::uint32_t section) noexcept {
  const auto id = static_cast<Section>(section);
  return (is_read_for_samples(section) && id != Section::checksums) || id == Section::modes ||
         id == Section::mtimes;
}

bool lies_below(std::string_view name, std::string_view folder) {
  return name.size() > folder.size() && name.starts_with(folder) && name[folder.size()] == '/';
}

}  // namespace

void fail_io(const std::string& path, int error, bool direct) {
  PackError problem(PackError::Kind::io, path, std::strerror(error));
  problem.error = error;
  problem.direct = direct;
  throw problem;
}

void fail_corrupt(const std::string& path, const std::string& why) {
  throw PackError(PackError::Kind::corrupt, path, why);
}

void fail_version(const std::string& path, std::uint32_t version, const std::string& why) {
  PackError problem(PackError::Kind::version, path, why);
  problem.version = version;
  throw problem;
}

std::string checksum_mismatch(std::uint32_t expected, std::uint32_t found) {
  char text[80];
  std::snprintf(text, sizeof text, "checksum 0x%08x expected, 0x%08x found", expected, found);
  return text;
}

Mapping::Mapping(std::string path, DirtyPages* dirty) : path_(std::move(path)) {
  // Not blocking: what should be a file may be a fifo.
  const int descriptor = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) fail_io(path_, errno);
  struct stat status {};
  if (fstat(descriptor, &status) != 0) {
    const int error = errno;
    close(descriptor);
    fail_io(path_, error);
  }
  if (!S_ISREG(status.st_mode) || status.st_size == 0) {
    close(descriptor);
    fail_corrupt(path_, S_ISREG(status.st_mode) ? "the file is empty" : "not a regular file");
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  void* address = mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, 0);
  const int error = errno;
  if (dirty != nullptr) *dirty = dirty_pages(descriptor, status.st_ino, 0, size);
  close(descriptor);
  if (address == MAP_FAILED) fail_io(path_, error);
  bytes_ = {static_cast<const std::byte*>(address), size};
  state_ = state_of(status);
}

Mapping::Mapping(Mapping&& other) noexcept
    : path_(std::move(other.path_)),
      bytes_(std::exchange(other.bytes_, {})),
      state_(other.state_) {}

Mapping::~Mapping() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

FileState FileState::of(const std::string& path) noexcept {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 ? state_of(status) : FileState{};
}

FileState FileState::of(int descriptor) noexcept {
  struct stat status {};
  return fstat(descriptor, &status) == 0 ? state_of(status) : FileState{};
}

LatestState::~LatestState() {
  for (const Node* node = latest_.load(); node != nullptr;) delete std::exchange(node, node->older);
}

void LatestState::set(const FileState& state) {
  if (get() == state && get().is_settled == state.is_settled) return;
  auto* const node = new Node{state, latest_.load()};
  while (!latest_.compare_exchange_weak(node->older, node)) {
  }
}

std::uint64_t name_hash(std::string_view name) noexcept {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char one : name) hash = (hash ^ static_cast<unsigned char>(one)) * 0x100000001b3U;
  hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccdU;
  hash = (hash ^ (hash >> 33)) * 0xc4ceb9fe1a85ec53U;
  return hash ^ (hash >> 33);
}

PackIndex::PackIndex(const std::string& place)
    : file_(is_file(place) ? place : place + "/index.pace", &first_pages_),
      folder_(path().substr(0, path().rfind('/') + 1)),
      verified_ns_(coarse_ns()),
      shows_writes_(first_pages_ == DirtyPages::none),
      state_(file_.state()) {
  const bool is_complete = completes(FaultRange(file_.bytes()), [this] {
    read_header();
    read_sections();
    read_columns();
  });
  if (!is_complete) fail_unreadable();
  // A pack may come from anybody: only an index that was asked for by its own name may name files.
  const bool is_side_file = path() == place;
  if (is_in_place_ != is_side_file) {
    fail_corrupt(path(), is_side_file ? "it is the index of a pack, and not of data in place"
                                      : "the index of a pack names files elsewhere");
  }
  if (dictionary_bytes_.empty() || !zstd_available()) return;
  dictionary_ = ZstdDictionary(dictionary_bytes_);
  if (!dictionary_) fail_corrupt(path(), "section 27 is not a dictionary of zstd");
}

void PackIndex::fail_unreadable() const {
  fail_corrupt(path(), "its bytes cannot be read: the file was truncated, or the device failed");
}

void PackIndex::check_file(bool now) const {
  const std::uint64_t now_ns = coarse_ns();
  if (!now && now_ns < next_look_ns_.load(std::memory_order_relaxed)) return;
  try {
    look_at_file(now_ns);
  } catch (...) {
    next_look_ns_.store(0, std::memory_order_relaxed);  // the next reader is to find the same
    throw;
  }
  next_look_ns_.store(now_ns + look_interval_ns, std::memory_order_relaxed);
}

// Appending and repairing replace the index: whatever happens to the file itself is damage.
void PackIndex::look_at_file(std::uint64_t now_ns) const {
  const FileState found = FileState::of(path());
  const FileState& before = state_.get();
  if (found.inode != before.inode || found.device != before.device) return;  // it was replaced
  if (found.size != before.size) {
    fail_corrupt(path(), "its length changed while it was open: " + std::to_string(before.size) +
                             " bytes, then " + std::to_string(found.size));
  }
  const bool is_due = !shows_writes_.load(std::memory_order_relaxed) &&
                      now_ns >= verified_ns_.load(std::memory_order_relaxed) + verify_interval_ns;
  if (found == before && before.is_settled && !is_due) return;
  // Before the blocks are verified: of what is written later, the times will tell.
  shows_writes_.store(
      dirty_pages(path(), before.inode, 0, header_.index_bytes) == DirtyPages::none,
      std::memory_order_relaxed);
  if (!completes(FaultRange(file_.bytes()), [this] { check_touched_blocks(); })) fail_unreadable();
  state_.set(found);
  verified_ns_.store(now_ns, std::memory_order_relaxed);
}

// What was read of the file so far is what it was: blocks that nobody touched are verified when they
// are.
void PackIndex::check_touched_blocks() const {
  const auto bytes = file_.bytes();
  if (std::memcmp(bytes.data(), head_.data(), head_.size()) != 0) {
    fail_corrupt(path(), "its header was changed while it was open");
  }
  for (const Place& place : places_) {
    for (std::uint64_t i = 0; i < place.block_count; ++i) {
      if (!blocks_.touched(place.first_block + i)) continue;
      const auto content = block(place, i);
      const std::uint32_t found = crc32c(content.data(), content.size());
      const std::uint32_t expected = sums_[place.first_block + i];
      if (found == expected) continue;
      if (blocks_.refute(place.first_block + i)) {
        fail_corrupt(path(), "section " + std::to_string(place.number) +
                                 " was changed while it was open: " +
                                 checksum_mismatch(expected, found));
      }
    }
  }
}

std::span<const std::byte> PackIndex::block(const Place& place, std::uint64_t number) const noexcept {
  const std::uint64_t begin = number << place.block_bits;
  const std::uint64_t left = place.bytes.size() - begin;
  return place.bytes.subspan(
      begin, place.block_count == 1 ? left : std::min(left, sum_block_bytes));
}

void PackIndex::verify_block(const Place& place, std::uint64_t number) const {
  const std::uint64_t bit = place.first_block + number;
  const auto content = block(place, number);
  // In one request, where touching would read page by page. An index without sums is requested as a whole.
  if (has(Section::block_sums)) read_ahead(content);
  blocks_.begin(bit);
  const std::uint32_t found = crc32c(content.data(), content.size());
  const bool is_right = found == sums_[bit];
  if (blocks_.end(bit, is_right) && is_read_for_samples(place.number)) {
    unverified_.fetch_sub(1, std::memory_order_relaxed);
  }
  if (!is_right || !blocks_.verified(bit)) {
    std::string where = "section " + std::to_string(place.number);
    if (place.block_count > 1) {
      const std::uint64_t begin = number << place.block_bits;
      where += ", bytes " + std::to_string(begin) + " to " +
               std::to_string(begin + content.size() - 1);
    }
    fail_corrupt(path(), where + (is_right ? " was changed while it was read"
                                           : ": " + checksum_mismatch(sums_[bit], found)));
  }
}

void PackIndex::verify_bytes(const Place& place, std::uint64_t begin, std::uint64_t end) const {
  if (begin == end) return;
  const std::uint64_t last = (end - 1) >> place.block_bits;
  for (std::uint64_t i = begin >> place.block_bits; i <= last; ++i) {
    if (!blocks_.verified(place.first_block + i)) verify_block(place, i);
  }
}

void PackIndex::verify_section(Section id) const {
  const Place& wanted = place(id);
  for (std::uint64_t i = 0; i < wanted.block_count; ++i) {
    if (!blocks_.verified(wanted.first_block + i)) verify_block(wanted, i);
  }
}

void PackIndex::verify_sections() const {
  for (const Place& place : places_) {
    if (place.bytes.data() != nullptr) verify_section(static_cast<Section>(place.number));
  }
}

void PackIndex::request(std::span<const std::int64_t> samples) const {
  // In chunked packs a sample is large, and so its entries are few.
  if (unverified_.load(std::memory_order_relaxed) == 0 || !first_extents_.empty()) return;
  std::vector<std::uint64_t> blocks;
  const auto request_of = [&](const auto& column) {
    if (column.is_constant_ || column.empty()) return;
    blocks.clear();
    for (const std::int64_t sample : samples) {
      const auto i = static_cast<std::uint64_t>(sample);
      if (i >= column.size()) continue;
      const std::uint64_t number = (i << column.width_bits_) >> column.block_bits_;
      if (!blocks_.verified(column.first_block_ + number)) blocks.push_back(number);
    }
    std::sort(blocks.begin(), blocks.end());
    blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
    for (const std::uint64_t number : blocks) read_ahead(block(places_[column.section_], number));
  };
  request_of(offsets_);
  request_of(lengths_);
  request_of(shards_);
  request_of(checksums_);
  request_of(labels_);
  if (has(Section::stored_lengths)) request_of(stored_lengths_);
  request_of(codecs_);
}

void PackIndex::read_columns() {
  read_extents();
  const std::uint64_t samples = header_.sample_count;
  labels_ = column<std::int32_t>(Section::labels, samples);
  modes_ = column<std::uint32_t>(Section::modes, samples);
  mtimes_ = column<std::int64_t>(Section::mtimes, samples);
  const auto shard_lengths = array<std::uint64_t>(Section::shard_lengths, header_.shard_count);
  shard_lengths_.assign(shard_lengths.begin(), shard_lengths.end());
  for (const std::uint64_t length : shard_lengths_) {
    if (__builtin_add_overflow(shard_bytes_, length, &shard_bytes_)) shard_bytes_ = UINT64_MAX;
  }
  samples_ = strings(Section::name_offsets, Section::names, samples);
  classes_ = strings(Section::class_offsets, Section::classes, header_.class_count);
  if (has(Section::name_table)) {
    const std::uint64_t slots = section(Section::name_table).size() / sizeof(std::uint64_t);
    name_table_ = column<std::uint64_t>(Section::name_table, slots);
    if (slots < std::bit_ceil(std::max<std::uint64_t>(2 * samples, 2))) {
      fail_corrupt(path(), "the name table is too short");
    }
  }
  read_folders();
  read_files();
  read_dictionary();
}

void PackIndex::read_dictionary() {
  if (!has(Section::dictionary)) return;
  const auto bytes = section(Section::dictionary);
  if (bytes.empty() || bytes.size() > max_dictionary_bytes) fail_section(Section::dictionary);
  const auto content = array<std::byte>(Section::dictionary, bytes.size());
  dictionary_bytes_.assign(content.begin(), content.end());
}

void PackIndex::read_header() {
  const auto bytes = file_.bytes();
  if (bytes.size() < sizeof header_) fail_corrupt(path(), "the file is shorter than its header");
  std::memcpy(&header_, bytes.data(), sizeof header_);
  if (std::memcmp(header_.magic, "PACEPACK", sizeof header_.magic) != 0) {
    fail_corrupt(path(), "not the index of a pack");
  }
  const std::uint32_t found = crc32c(&header_, sizeof header_ - sizeof header_.header_checksum);
  if (found != header_.header_checksum) {
    fail_corrupt(path(), "header: " + checksum_mismatch(header_.header_checksum, found));
  }
  if (header_.version > pack_format_version) {
    fail_version(path(), header_.version,
                 "format version " + std::to_string(header_.version) + " is newer than " +
                     std::to_string(pack_format_version));
  }
  if (header_.version == 0) fail_corrupt(path(), "format version 0 does not exist");
  if (header_.index_bytes != bytes.size()) {
    fail_corrupt(path(), std::to_string(header_.index_bytes) + " bytes expected, " +
                             std::to_string(bytes.size()) + " found");
  }
  // Each takes bytes of the file; larger counts would overflow what is computed from them.
  if (header_.sample_count > bytes.size() || header_.folder_count > bytes.size()) {
    fail_corrupt(path(), "impossible count");
  }
}

void PackIndex::read_sections() {
  const auto bytes = file_.bytes();
  const std::size_t room = (bytes.size() - sizeof header_) / sizeof(SectionEntry);
  if (header_.section_count > room) fail_corrupt(path(), "the section table is truncated");
  const auto table = bytes.subspan(sizeof header_, header_.section_count * sizeof(SectionEntry));
  const std::uint32_t found = crc32c(table.data(), table.size());
  if (found != header_.table_checksum) {
    fail_corrupt(path(), "section table: " + checksum_mismatch(header_.table_checksum, found));
  }
  const auto head = bytes.first(sizeof header_ + table.size());
  head_.assign(head.begin(), head.end());
  places_.resize(last_section + 1);
  for (std::uint32_t i = 0; i < header_.section_count; ++i) {
    SectionEntry entry{};
    std::memcpy(&entry, table.data() + i * sizeof entry, sizeof entry);
    const std::string label = "section " + std::to_string(entry.id);
    if (!is_known_section(entry.id)) {
      if ((entry.flags & section_required) == 0) continue;
      fail_version(path(), 0, label + " is unknown to format version " +
                                  std::to_string(pack_format_version) + " and required");
    }
    if (entry.offset % alignment != 0 || entry.offset > bytes.size() ||
        entry.length > bytes.size() - entry.offset) {
      fail_corrupt(path(), label + " does not lie within the file");
    }
    Place& place = places_[entry.id];
    if (place.bytes.data() != nullptr) fail_corrupt(path(), label + " appears twice");
    place.bytes = bytes.subspan(entry.offset, entry.length);
    place.number = entry.id;
    place.checksum = entry.checksum;
    place.width = header_.version < first_narrow_version ? 0 : entry.width;
    if (place.width != 0 && !may_be_narrow(entry.id)) {
      fail_corrupt(path(), label + " has a width, and is no column that may be narrow");
    }
  }
  read_sums();
}

// Gives each block its expected sum: from the section of sums, which is verified at once, or, where the
// index has none, from the section table. Then everything is verified at once.
void PackIndex::read_sums() {
  const auto add_whole = [this](Place& place) {
    place.block_bits = 63;
    place.first_block = sums_.size();
    place.block_count = 1;
    sums_.push_back(place.checksum);
    if (is_read_for_samples(place.number)) ++unverified_;
  };
  Place& sums = places_[static_cast<std::uint32_t>(Section::block_sums)];
  if (sums.bytes.data() == nullptr) {
    for (Place& place : places_) {
      if (place.bytes.data() != nullptr) add_whole(place);
    }
    blocks_ = Blocks(sums_.size());
    read_ahead(file_.bytes());
    return verify_sections();
  }
  // Sums are in the order of the section table, and unknown sections have theirs as well.
  std::uint64_t next = 0;
  const std::uint64_t count = sums.bytes.size() / sizeof(std::uint32_t);
  for (std::uint32_t i = 0; i < header_.section_count; ++i) {
    SectionEntry entry{};
    std::memcpy(&entry, head_.data() + sizeof header_ + i * sizeof entry, sizeof entry);
    if (entry.id == static_cast<std::uint32_t>(Section::block_sums)) continue;
    const std::uint64_t blocks =
        entry.length / sum_block_bytes + (entry.length % sum_block_bytes > 0 ? 1 : 0);
    if (blocks > count - next) fail_section(Section::block_sums);
    if (is_known_section(entry.id)) {
      Place& place = places_[entry.id];
      place.block_bits = sum_block_bits;
      place.first_block = next;
      place.block_count = blocks;
      if (is_read_for_samples(entry.id)) unverified_ += blocks;
    }
    next += blocks;
  }
  if (next != count || sums.bytes.size() % sizeof(std::uint32_t) != 0) {
    fail_section(Section::block_sums);
  }
  sums_.resize(count);
  add_whole(sums);
  blocks_ = Blocks(sums_.size());
  verify_section(Section::block_sums);
  if (count > 0) std::memcpy(sums_.data(), sums.bytes.data(), count * sizeof(std::uint32_t));
}

void PackIndex::fail_section(Section id) const {
  fail_corrupt(path(), "section " + std::to_string(static_cast<std::uint32_t>(id)) +
                           " is missing or has the wrong length");
}

void PackIndex::read_extents() {
  std::uint64_t count = header_.sample_count;
  if (has(Section::first_extents)) {
    first_extents_ = column<std::uint64_t>(Section::first_extents, count + 1);
    // Checksums are never narrow. Of data in place, which may have none, the end of the last sample
    // tells; each extent takes bytes of the file, too.
    count = has(Section::checksums) ? section(Section::checksums).size() / sizeof(std::uint32_t)
                                    : first_extents_[count];
    if (count > header_.index_bytes) fail_section(Section::first_extents);
  }
  offsets_ = column<std::uint64_t>(Section::offsets, count);
  lengths_ = column<std::uint64_t>(Section::lengths, count);
  shards_ = column<std::uint32_t>(Section::shards, count);
  if (has(Section::checksums) || !has(Section::files)) {
    checksums_ = column<std::uint32_t>(Section::checksums, count);
  }
  stored_lengths_ = has(Section::stored_lengths)
                        ? column<std::uint64_t>(Section::stored_lengths, count)
                        : lengths_;
  if (has(Section::codecs)) codecs_ = column<std::uint8_t>(Section::codecs, count);
}

void PackIndex::read_folders() {
  const std::uint64_t count = header_.folder_count;
  folders_ = strings(Section::folder_offsets, Section::folders, count);
  if (has(Section::folder_samples) && has(Section::folder_ends)) {
    folder_samples_ = column<std::uint64_t>(Section::folder_samples, 2 * count);
    folder_ends_ = column<std::uint64_t>(Section::folder_ends, count);
  } else {
    order_folders();
  }
}

void PackIndex::read_files() {
  if (!has(Section::files) && !has(Section::sources)) return;
  const std::uint64_t count = header_.shard_count;
  const Place& states = place(Section::sources);
  if (section(Section::files).size() / sizeof(std::uint64_t) < count + 1 ||
      states.bytes.size() != sizeof sources_ + count * sizeof(SourceState)) {
    fail_corrupt(path(), "what it says of the files in place has the wrong length");
  }
  read_verified(states, 0, sources_);
  is_in_place_ = true;
}

template <class T>
void PackIndex::read_verified(const Place& place, std::uint64_t at, T& target) const {
  verify_bytes(place, at, at + sizeof target);
  std::memcpy(&target, place.bytes.data() + at, sizeof target);
}

SourceState PackIndex::source_state(std::uint32_t shard) const {
  SourceState state{};
  if (shard >= shard_count()) throw std::out_of_range("no such shard");
  read_verified(place(Section::sources), sizeof sources_ + shard * sizeof state, state);
  return state;
}

std::string PackIndex::shard_path(std::uint32_t shard) const {
  if (shard >= shard_count()) throw std::out_of_range("no such shard");
  if (!is_in_place()) {
    char name[32];
    std::snprintf(name, sizeof name, "shard-%05u.pace", shard);
    return folder_ + name;
  }
  const Place& files = place(Section::files);
  const std::uint64_t names = (std::uint64_t{shard_count()} + 1) * sizeof(std::uint64_t);
  std::uint64_t bounds[2] = {};  // of the name, among the names
  read_verified(files, shard * sizeof bounds[0], bounds);
  if (bounds[0] >= bounds[1] || bounds[1] > files.bytes.size() - names) {
    fail_corrupt(path(), "a file in place has no name");
  }
  verify_bytes(files, names + bounds[0], names + bounds[1]);
  const auto* const begin = reinterpret_cast<const char*>(files.bytes.data() + names);
  const std::string name(begin + bounds[0], begin + bounds[1]);
  if (name.find('\0') != name.npos) fail_corrupt(path(), "a file in place has an impossible name");
  return name.front() == '/' ? name : folder_ + name;
}

void PackIndex::order_folders() {
  const std::uint64_t count = header_.folder_count;
  folder_order_.resize(count);
  std::iota(folder_order_.begin(), folder_order_.end(), 0U);
  std::sort(folder_order_.begin(), folder_order_.end(), [&](std::uint64_t left, std::uint64_t right) {
    return comes_before(folders_.at(left), folders_.at(right));
  });
  own_folder_samples_.resize(2 * count);
  own_folder_ends_.resize(count);
  const auto first_from = [&](std::string_view prefix, char last) {
    std::uint64_t low = 0;
    std::uint64_t high = sample_count();
    const std::string wanted = std::string(prefix) + last;
    while (low < high) {
      const std::uint64_t middle = low + (high - low) / 2;
      if (name(middle).compare(wanted) < 0) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  };
  std::vector<std::uint64_t> open;  // the folders that the present one lies below
  for (std::uint64_t i = 0; i <= count; ++i) {
    while (!open.empty() && (i == count || !lies_below(folder(i), folder(open.back())))) {
      own_folder_ends_[open.back()] = i;
      open.pop_back();
    }
    if (i == count) break;
    open.push_back(i);
    own_folder_samples_[2 * i] = first_from(folder(i), '/');
    own_folder_samples_[2 * i + 1] = first_from(folder(i), '/' + 1);
  }
}

template <class T>
std::span<const T> PackIndex::array(Section id, std::uint64_t count) const {
  const auto content = section(id);
  // Dividing, because count * sizeof(T) may overflow.
  if (content.data() == nullptr || content.size() % sizeof(T) != 0 ||
      content.size() / sizeof(T) != count) {
    fail_section(id);
  }
  verify_section(id);
  return {reinterpret_cast<const T*>(content.data()), static_cast<std::size_t>(count)};
}

template <class T>
Column<T> PackIndex::column(Section id, std::uint64_t count) const {
  const Place& at = place(id);
  const std::uint64_t width = at.width == 0 ? sizeof(T) : at.width;
  const std::uint64_t size = at.bytes.size();
  if (at.bytes.data() == nullptr || !std::has_single_bit(width) || width > sizeof(T)) {
    fail_section(id);
  }
  Column<T> column;
  column.index_ = this;
  column.section_ = at.number;
  column.data_ = at.bytes.data();
  column.size_ = count;
  column.first_block_ = at.first_block;
  column.block_bits_ = at.block_bits;
  column.width_bits_ = static_cast<std::uint8_t>(std::countr_zero(width));
  if (at.width != 0 && size == width && count > 0) {
    column.constant_ = column[0];
    column.is_constant_ = true;
  } else if (size % width != 0 || size / width != count) {
    fail_section(id);
  }
  return column;
}

PackIndex::Strings PackIndex::strings(Section offsets, Section blob, std::uint64_t count) const {
  if (!has(blob)) fail_corrupt(path(), "names are missing");
  return {column<std::uint64_t>(offsets, count + 1), &place(blob), this};
}

std::string_view PackIndex::Strings::at(std::uint64_t number) const {
  if (number >= offsets.size() - 1) throw std::out_of_range("no such index");
  const std::uint64_t begin = offsets[number];
  const std::uint64_t end = offsets[number + 1];
  if (begin > end || end > blob->bytes.size()) {
    fail_corrupt(index->path(), "name " + std::to_string(number) + " does not lie within the names");
  }
  index->verify_bytes(*blob, begin, end);
  return {reinterpret_cast<const char*>(blob->bytes.data()) + begin, end - begin};
}

std::int64_t PackIndex::find(std::string_view wanted) const {
  if (!name_table_.empty()) return find_in_table(wanted);
  std::uint64_t low = 0;
  std::uint64_t high = sample_count();
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    const int order = name(middle).compare(wanted);
    if (order == 0) return static_cast<std::int64_t>(middle);
    if (order < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return -1;
}

std::int64_t PackIndex::find_in_table(std::string_view wanted) const {
  constexpr int sample_bits = 40;
  constexpr std::uint64_t mark = 0xFFFFFF;
  const std::uint64_t hash = name_hash(wanted);
  const int bits = std::countr_zero(std::bit_ceil(std::max<std::uint64_t>(2 * sample_count(), 2)));
  for (std::uint64_t slot = hash >> (64 - bits); slot < name_table_.size(); ++slot) {
    const std::uint64_t entry = name_table_[slot];
    if (entry == 0) break;
    if ((entry >> sample_bits) != (hash & mark)) continue;
    const std::uint64_t sample = (entry & ((std::uint64_t{1} << sample_bits) - 1)) - 1;
    if (sample < sample_count() && name(sample) == wanted) return static_cast<std::int64_t>(sample);
  }
  return -1;
}

std::string_view PackIndex::folder(std::uint64_t index) const {
  if (index >= folder_count()) throw std::out_of_range("no such folder");
  return folders_.at(folder_order_.empty() ? index : folder_order_[index]);
}

std::int64_t PackIndex::find_folder(std::string_view wanted) const {
  std::uint64_t low = 0;
  std::uint64_t high = folder_count();
  while (low < high) {
    const std::uint64_t middle = low + (high - low) / 2;
    if (comes_before(folder(middle), wanted)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < folder_count() && folder(low) == wanted ? static_cast<std::int64_t>(low) : -1;
}

std::pair<std::uint64_t, std::uint64_t> PackIndex::folder_samples(std::uint64_t index) const {
  if (index >= folder_count()) throw std::out_of_range("no such folder");
  const bool is_own = !own_folder_samples_.empty();
  const auto bound = [&](std::uint64_t i) {
    return is_own ? own_folder_samples_[i] : folder_samples_[i];
  };
  const std::uint64_t first = bound(2 * index);
  const std::uint64_t end = bound(2 * index + 1);
  if (first > end || end > sample_count()) fail_corrupt(path(), "a folder has impossible samples");
  return {first, end};
}

std::uint64_t PackIndex::folder_end(std::uint64_t index) const {
  if (index >= folder_count()) throw std::out_of_range("no such folder");
  const std::uint64_t end =
      own_folder_ends_.empty() ? folder_ends_[index] : own_folder_ends_[index];
  if (end <= index || end > folder_count()) fail_corrupt(path(), "a folder has an impossible end");
  return end;
}

std::pair<std::uint64_t, std::uint64_t> PackIndex::extents(std::uint64_t sample) const {
  if (sample >= sample_count()) throw std::out_of_range("no such sample");
  if (first_extents_.empty()) return {sample, sample + 1};
  const std::uint64_t first = first_extents_[sample];
  const std::uint64_t end = first_extents_[sample + 1];
  if (first > end || end > extent_count()) {
    fail_corrupt(path(), "sample " + std::to_string(sample) + " has impossible extents");
  }
  return {first, end};
}

std::uint64_t PackIndex::claimed_length(std::uint64_t sample) const {
  constexpr std::uint64_t most = std::uint64_t{1} << 42;
  const auto [first, end] = extents(sample);
  std::uint64_t length = 0;
  for (std::uint64_t i = first; i < end; ++i) length = std::min(length + std::min(lengths_[i], most), most);
  return length;
}

Extent PackIndex::extent(std::uint64_t index) const {
  if (index >= extent_count()) throw std::out_of_range("no such extent");
  const std::uint8_t code = codecs_.empty() ? 0 : codecs_[index];
  const std::optional<Encoding> encoding = Encoding::of(code);
  const Extent extent{offsets_[index], stored_lengths_[index],  lengths_[index],
                      shards_[index],  checksums_.empty() ? 0 : checksums_[index],
                      encoding.value_or(Encoding{})};
  if (extent.shard >= shard_count()) {
    fail_extent(index, "lies in shard " + std::to_string(extent.shard) + ", which does not exist");
  }
  const std::uint64_t room = shard_lengths_[extent.shard];
  if (extent.offset > room || extent.stored_length > room - extent.offset) {
    fail_extent(index, "does not lie within its shard");
  }
  if (!encoding) {
    fail_version(path(), 0, "extent " + std::to_string(index) + " has codec " +
                                std::to_string(code) + ", which is unknown");
  }
  if (!extent.is_encoded() && extent.length != extent.stored_length) {
    fail_extent(index, "has an impossible length");
  }
  if (encoding->codec == Codec::zstd_dictionary && dictionary_bytes_.empty()) {
    fail_extent(index, "needs a dictionary, and the index has none");
  }
  if (extent.is_encoded()) check_claim(index, extent);
  return extent;
}

// What is decoded is allocated first, on the word of the index.
void PackIndex::check_claim(std::uint64_t index, const Extent& extent) const {
  const std::uint64_t limit = max_decoded_length(extent.encoding.codec, extent.stored_length);
  if (extent.length <= limit) return;
  PackError problem(PackError::Kind::sample, path(),
                    "it claims " + std::to_string(extent.length) + " bytes, and the " +
                        std::to_string(extent.stored_length) + " stored ones decode to at most " +
                        std::to_string(limit));
  problem.sample = sample_of(index);
  problem.shard = extent.shard;
  if (problem.sample < sample_count()) problem.name = std::string(name(problem.sample));
  throw problem;
}

void PackIndex::fail_extent(std::uint64_t index, const std::string& why) const {
  fail_corrupt(path(), "extent " + std::to_string(index) + " " + why);
}

std::uint64_t PackIndex::sample_of(std::uint64_t extent) const {
  if (first_extents_.empty()) return extent;
  std::uint64_t low = 0;  // the last sample that begins at or before the extent
  std::uint64_t high = sample_count();
  while (high - low > 1) {
    const std::uint64_t middle = low + (high - low) / 2;
    (first_extents_[middle] <= extent ? low : high) = middle;
  }
  return low;
}

void PackIndex::check_content() const {
  read([this] {
    verify_sections();
    check_names();
    check_extents();
    check_folders();
    check_digests();
  });
}

void PackIndex::check_names() const {
  for (std::uint64_t i = 0; i < sample_count(); ++i) {
    const std::string_view name = samples_.at(i);
    if (name.empty() || name.size() > max_name_bytes) {
      fail_corrupt(path(), "sample " + std::to_string(i) + " has an impossible name");
    }
    if (i > 0 && samples_.at(i - 1) >= name) {
      fail_corrupt(path(), "the names of samples " + std::to_string(i - 1) + " and " +
                               std::to_string(i) + " are not in order");
    }
    if (labels_[i] < -1 || labels_[i] >= std::int64_t{class_count()}) {
      fail_corrupt(path(), "sample " + std::to_string(i) + " has label " +
                               std::to_string(labels_[i]) + ", of " +
                               std::to_string(class_count()) + " classes");
    }
  }
  for (std::uint64_t i = 0; i < class_count(); ++i) static_cast<void>(class_name(i));
}

void PackIndex::check_extents() const {
  std::uint64_t next = 0;
  for (std::uint64_t i = 0; i < sample_count(); ++i) {
    const auto [first, end] = extents(i);
    if (first != next) break;
    next = end;
    for (std::uint64_t k = first; k < end; ++k) {
      if (extent(k).is_encoded() && end - first > 1) fail_extent(k, "is an encoded chunk");
    }
  }
  if (next != extent_count()) fail_corrupt(path(), "the samples do not add up to the extents");
}

void PackIndex::check_folders() const {
  for (std::uint64_t i = 0; i < folder_count(); ++i) {
    const std::string_view name = folder(i);
    if (name.empty() || name.size() > max_name_bytes) {
      fail_corrupt(path(), "folder " + std::to_string(i) + " has an impossible name");
    }
    if (i > 0 && !comes_before(folder(i - 1), name)) {
      fail_corrupt(path(), "the names of the folders are not in order");
    }
    const auto [first, end] = folder_samples(i);
    for (std::uint64_t below = i + 1; below < folder_end(i); below = folder_end(below)) {
      const auto inner = folder_samples(below);
      if (folder_end(below) > folder_end(i) || inner.first < first || inner.second > end) {
        fail_corrupt(path(), "folders do not lie within each other");
      }
    }
  }
}

void PackIndex::check_digests() const {
  const std::uint64_t shards = shard_count();
  if (has(Section::shard_digests)) array<Digest>(Section::shard_digests, shards);
  for (const std::uint64_t length : shard_lengths_) {
    if (length < file_header_bytes && !is_in_place()) fail_corrupt(path(), "a shard is shorter than its header");
  }
  std::uint64_t files = 0;
  if (has(Section::parity)) {
    files = section(Section::parity).size() / sizeof(std::uint64_t);
    const auto parity = array<std::uint64_t>(Section::parity, files);
    files = files == 0 ? 0 : files - 1;
    const std::uint64_t group = files == 0 ? 0 : parity[0];
    const std::uint64_t groups = group == 0 ? 0 : shards / group + (shards % group > 0 ? 1 : 0);
    if (files != groups) {
      fail_corrupt(path(), "the parity files are not those of the shards");
    }
    for (std::uint64_t i = 0; i < files; ++i) {
      const auto begin = shard_lengths_.begin() + static_cast<std::ptrdiff_t>(i * group);
      const auto end = begin + static_cast<std::ptrdiff_t>(std::min(group, shards - i * group));
      if (parity[i + 1] != *std::max_element(begin, end) + file_header_bytes) {
        fail_corrupt(path(), "parity file " + std::to_string(i) + " has an impossible length");
      }
    }
  }
  if (has(Section::parity_digests)) array<Digest>(Section::parity_digests, files);
}

}  // namespace paceline
