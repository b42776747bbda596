#include "paceline/pack_reader.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "paceline/crc32c.hpp"

namespace paceline {
namespace {

static_assert(std::endian::native == std::endian::little, "packs are mapped as they lie on disk");

constexpr std::uint64_t alignment = 64;
constexpr std::size_t piece_bytes = 64 * 1024;  // copied, then checked while still in the cache

[[noreturn]] void fail_io(const std::string& path, int error) {
  PackError problem(PackError::Kind::io, path, std::strerror(error));
  problem.error = error;
  throw problem;
}

[[noreturn]] void fail_corrupt(const std::string& path, const std::string& why) {
  throw PackError(PackError::Kind::corrupt, path, why);
}

[[noreturn]] void fail_version(const std::string& path, std::uint32_t version,
                               const std::string& why) {
  PackError problem(PackError::Kind::version, path, why);
  problem.version = version;
  throw problem;
}

std::string hex(std::uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

std::string mismatch(std::uint32_t expected, std::uint32_t found) {
  return "checksum " + hex(expected) + " expected, " + hex(found) + " found";
}

}  // namespace

Mapping::Mapping(std::string path) : path_(std::move(path)) {
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
  close(descriptor);
  if (address == MAP_FAILED) fail_io(path_, error);
  bytes_ = {static_cast<const std::byte*>(address), size};
}

Mapping::Mapping(Mapping&& other) noexcept
    : path_(std::move(other.path_)), bytes_(std::exchange(other.bytes_, {})) {}

Mapping::~Mapping() {
  if (!bytes_.empty()) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

PackReader::PackReader(const std::string& folder) : index_(folder + "/index.pace") {
  read_header();
  read_sections();
  const std::uint64_t samples = header_.sample_count;
  offsets_ = array<std::uint64_t>(Section::offsets, samples);
  lengths_ = array<std::uint64_t>(Section::lengths, samples);
  shards_ = array<std::uint32_t>(Section::shards, samples);
  checksums_ = array<std::uint32_t>(Section::checksums, samples);
  labels_ = array<std::int32_t>(Section::labels, samples);
  modes_ = array<std::uint32_t>(Section::modes, samples);
  mtimes_ = array<std::int64_t>(Section::mtimes, samples);
  samples_ = strings(Section::name_offsets, Section::names, samples);
  folders_ = strings(Section::folder_offsets, Section::folders, header_.folder_count);
  classes_ = strings(Section::class_offsets, Section::classes, header_.class_count);
  open_shards(folder);
}

void PackReader::read_header() {
  const auto bytes = index_.bytes();
  const std::string& path = index_.path();
  if (bytes.size() < sizeof header_) fail_corrupt(path, "the file is shorter than its header");
  std::memcpy(&header_, bytes.data(), sizeof header_);
  if (std::memcmp(header_.magic, "PACEPACK", sizeof header_.magic) != 0) {
    fail_corrupt(path, "not the index of a pack");
  }
  const std::uint32_t found = crc32c(&header_, sizeof header_ - sizeof header_.header_checksum);
  if (found != header_.header_checksum) {
    fail_corrupt(path, "header: " + mismatch(header_.header_checksum, found));
  }
  if (header_.version > pack_format_version) {
    fail_version(path, header_.version,
                 "format version " + std::to_string(header_.version) + " is newer than " +
                     std::to_string(pack_format_version));
  }
  if (header_.version == 0) fail_corrupt(path, "format version 0 does not exist");
  if (header_.index_bytes != bytes.size()) {
    fail_corrupt(path, std::to_string(header_.index_bytes) + " bytes expected, " +
                           std::to_string(bytes.size()) + " found");
  }
}

void PackReader::read_sections() {
  const auto bytes = index_.bytes();
  const std::string& path = index_.path();
  const std::size_t room = (bytes.size() - sizeof header_) / sizeof(SectionEntry);
  if (header_.section_count > room) fail_corrupt(path, "the section table is cut off");
  const auto table = bytes.subspan(sizeof header_, header_.section_count * sizeof(SectionEntry));
  const std::uint32_t found = crc32c(table.data(), table.size());
  if (found != header_.table_checksum) {
    fail_corrupt(path, "section table: " + mismatch(header_.table_checksum, found));
  }
  sections_.resize(last_section + 1);
  for (std::uint32_t i = 0; i < header_.section_count; ++i) {
    SectionEntry entry{};
    std::memcpy(&entry, table.data() + i * sizeof entry, sizeof entry);
    const std::string label = "section " + std::to_string(entry.id);
    if (entry.id == 0 || entry.id > last_section) {
      if ((entry.flags & section_required) == 0) continue;
      fail_version(path, 0, label + " is unknown to format version " +
                                std::to_string(pack_format_version) + " and required");
    }
    if (entry.offset % alignment != 0 || entry.offset > bytes.size() ||
        entry.length > bytes.size() - entry.offset) {
      fail_corrupt(path, label + " does not lie within the file");
    }
    if (sections_[entry.id].data() != nullptr) fail_corrupt(path, label + " appears twice");
    const auto section = bytes.subspan(entry.offset, entry.length);
    const std::uint32_t checksum = crc32c(section.data(), section.size());
    if (checksum != entry.checksum) {
      fail_corrupt(path, label + ": " + mismatch(entry.checksum, checksum));
    }
    sections_[entry.id] = section;
  }
}

template <class T>
std::span<const T> PackReader::array(Section id, std::uint64_t count) const {
  const auto section = sections_[static_cast<std::uint32_t>(id)];
  // Dividing, because count * sizeof(T) may overflow.
  if (section.data() == nullptr || section.size() % sizeof(T) != 0 ||
      section.size() / sizeof(T) != count) {
    fail_corrupt(index_.path(), "section " + std::to_string(static_cast<std::uint32_t>(id)) +
                                    " is missing or has the wrong length");
  }
  return {reinterpret_cast<const T*>(section.data()), static_cast<std::size_t>(count)};
}

PackReader::Strings PackReader::strings(Section offsets, Section blob, std::uint64_t count) const {
  if (count == UINT64_MAX) fail_corrupt(index_.path(), "impossible count");
  const auto bytes = sections_[static_cast<std::uint32_t>(blob)];
  if (bytes.data() == nullptr) fail_corrupt(index_.path(), "names are missing");
  return {array<std::uint64_t>(offsets, count + 1),
          {reinterpret_cast<const char*>(bytes.data()), bytes.size()},
          &index_.path()};
}

std::string_view PackReader::Strings::at(std::uint64_t index) const {
  if (index >= offsets.size() - 1) throw std::out_of_range("no such index");
  const std::uint64_t begin = offsets[index];
  const std::uint64_t end = offsets[index + 1];
  if (begin > end || end > blob.size()) {
    fail_corrupt(*file, "name " + std::to_string(index) + " does not lie within the names");
  }
  return blob.substr(begin, end - begin);
}

void PackReader::open_shards(const std::string& folder) {
  const auto expected = array<std::uint64_t>(Section::shard_lengths, header_.shard_count);
  for (std::uint32_t shard = 0; shard < header_.shard_count; ++shard) {
    char name[32];
    std::snprintf(name, sizeof name, "/shard-%05u.pace", shard);
    Mapping mapping(folder + name);
    const auto bytes = mapping.bytes();
    // Exactly: a sample beyond the end of a mapped file would be a SIGBUS.
    if (bytes.size() != expected[shard]) {
      fail_corrupt(mapping.path(), std::to_string(expected[shard]) + " bytes expected, " +
                                       std::to_string(bytes.size()) + " found");
    }
    ShardHeader header{};
    if (bytes.size() < sizeof header) fail_corrupt(mapping.path(), "shorter than its header");
    std::memcpy(&header, bytes.data(), sizeof header);
    if (std::memcmp(header.magic, "PACESHRD", sizeof header.magic) != 0 ||
        crc32c(&header, sizeof header - sizeof header.checksum) != header.checksum ||
        header.shard != shard) {
      fail_corrupt(mapping.path(), "not shard " + std::to_string(shard) + " of a pack");
    }
    if (header.version > pack_format_version) {
      fail_version(mapping.path(), header.version,
                   "format version " + std::to_string(header.version) + " is newer than " +
                       std::to_string(pack_format_version));
    }
    mapped_.push_back(std::move(mapping));
  }
}

std::int64_t PackReader::find(std::string_view wanted) const {
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

std::span<const std::byte> PackReader::locate(std::uint64_t sample) const {
  if (sample >= sample_count()) throw std::out_of_range("no such sample");
  const std::uint32_t shard = shards_[sample];
  if (shard >= mapped_.size()) {
    fail_corrupt(index_.path(), "sample " + std::to_string(sample) + " lies in shard " +
                                    std::to_string(shard) + ", which does not exist");
  }
  const auto bytes = mapped_[shard].bytes();
  const std::uint64_t offset = offsets_[sample];
  const std::uint64_t length = lengths_[sample];
  if (offset > bytes.size() || length > bytes.size() - offset) {
    fail_corrupt(index_.path(),
                 "sample " + std::to_string(sample) + " does not lie within its shard");
  }
  return bytes.subspan(offset, length);
}

void PackReader::fail_sample(std::uint64_t sample, std::uint32_t found) const {
  const std::uint32_t shard = shards_[sample];
  const std::uint32_t expected = checksums_[sample];
  PackError problem(PackError::Kind::sample, mapped_[shard].path(), mismatch(expected, found));
  problem.sample = sample;
  problem.shard = shard;
  problem.expected = expected;
  problem.found = found;
  throw problem;
}

void PackReader::read(std::uint64_t sample, std::byte* target) const {
  const auto source = locate(sample);
  std::uint32_t crc = 0;
  // The copy is what is checked: the caller gets the very bytes that matched.
  for (std::size_t done = 0; done < source.size();) {
    const std::size_t size = std::min(piece_bytes, source.size() - done);
    std::memcpy(target + done, source.data() + done, size);
    crc = crc32c(target + done, size, crc);
    done += size;
  }
  if (crc != checksums_[sample]) fail_sample(sample, crc);
}

std::size_t PackReader::plan_batch(std::span<const std::int64_t> ids,
                                   std::int64_t* offsets) const {
  std::int64_t total = 0;
  offsets[0] = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0) throw std::out_of_range("no such sample");
    const auto length = static_cast<std::int64_t>(checked_length(static_cast<std::uint64_t>(ids[i])));
    if (__builtin_add_overflow(total, length, &total)) throw std::bad_alloc();
    offsets[i + 1] = total;
  }
  return static_cast<std::size_t>(total);
}

void PackReader::read_batch(std::span<const std::int64_t> ids, const std::int64_t* offsets,
                            std::byte* target) const {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    read(static_cast<std::uint64_t>(ids[i]), target + offsets[i]);
  }
}

std::vector<BadSample> PackReader::verify(std::uint64_t first, std::uint64_t end) const {
  std::vector<BadSample> bad;
  for (std::uint64_t sample = first; sample < std::min(end, sample_count()); ++sample) {
    try {
      const auto bytes = locate(sample);
      const std::uint32_t found = crc32c(bytes.data(), bytes.size());
      if (found != checksums_[sample]) {
        bad.push_back({sample, mismatch(checksums_[sample], found)});
      }
      static_cast<void>(name(sample));
    } catch (const PackError& problem) {
      bad.push_back({sample, problem.what()});
    }
  }
  return bad;
}

}  // namespace paceline
