// Feeds the pack reader what nobody would write: the outcome is an answer or a PackError, without a
// crash, and no allocation is larger than what the format bounds.
//
// LLVMFuzzerTestOneInput is what libFuzzer wants:
//   clang++ -std=c++20 -g -DPACELINE_LIBFUZZER -fsanitize=fuzzer,address,undefined -Inative/include
//     native/tests/fuzz_pack_reader.cpp native/src/{pack_*,sorted_reader,lmdb_records,crc32c}.cpp
//     native/src/{buffer_pool,codecs,fault_guard,fork,lz4,page_*,residency,worker_pool,zstd}.cpp
// With other compilers a small driver mutates good packs: a case is a pure function of (seed, number),
// so that a crash can be seen again.
//   fuzz_pack_reader SECONDS [SEED [CASE]]
//
// An input is  how (1 byte) | length of the index (4) | length of shard 0 (4) | index | shards 0, 1.
// Most bits of `how` put checksums and lengths in order again, since what a checksum stops gets nowhere.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "check.hpp"
#include "pack_builder.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/pack_reader.hpp"
#include "paceline/sorted_reader.hpp"
#include "paceline/codecs.hpp"

using paceline::Codec;
using paceline::PackError;
using paceline::PackReader;
using paceline::ReadOptions;
using paceline::Section;
using paceline::SectionEntry;
using paceline::Verify;

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
extern "C" const char* __asan_default_options() {
  // Larger than anything that a small file may make the reader ask for.
  return "max_allocation_size_mb=64:allocator_may_return_null=0:detect_leaks=1";
}
#endif

namespace {

constexpr std::size_t prefix_bytes = 9;
constexpr std::uint64_t max_sample_bytes = 1 << 22;  // what this caller is willing to allocate
constexpr std::uint8_t reseal_bit = 1, lengths_bit = 2, contents_bit = 4, direct_bit = 8;
// Without it, the sums of blocks stay as they are: what they stop is found where it is touched.
constexpr std::uint8_t sums_bit = 64;

template <class T>
T get(std::string_view bytes, std::size_t at) {
  T value{};
  if (at + sizeof value <= bytes.size()) std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

template <class T>
void put(std::string& bytes, std::size_t at, T value) {
  if (at + sizeof value <= bytes.size()) std::memcpy(bytes.data() + at, &value, sizeof value);
}

struct Input {
  std::uint8_t how = 0;
  std::string index;
  std::string shards[2];

  static Input of(std::span<const std::uint8_t> data) {
    const std::string_view bytes(reinterpret_cast<const char*>(data.data()), data.size());
    Input input;
    if (bytes.size() < prefix_bytes) return input;
    input.how = get<std::uint8_t>(bytes, 0);
    std::string_view rest = bytes.substr(prefix_bytes);
    const auto take = [&](std::size_t length) {
      const auto part = rest.substr(0, length);
      rest = rest.substr(part.size());
      return std::string(part);
    };
    input.index = take(get<std::uint32_t>(bytes, 1));
    input.shards[0] = take(get<std::uint32_t>(bytes, 5));
    input.shards[1] = std::string(rest);
    return input;
  }

  std::string bytes() const {
    std::string result(prefix_bytes, '\0');
    put(result, 0, how);
    put(result, 1, static_cast<std::uint32_t>(index.size()));
    put(result, 5, static_cast<std::uint32_t>(shards[0].size()));
    return result + index + shards[0] + shards[1];
  }
};

// The place of a section that lies within the index, if there is one.
SectionEntry section_of(const std::string& index, Section id) {
  const auto count = get<std::uint32_t>(index, 12);
  for (std::size_t i = 0; i < std::min<std::size_t>(count, 64); ++i) {
    const auto entry = get<SectionEntry>(index, 64 + 32 * i);
    if (entry.id == static_cast<std::uint32_t>(id) && entry.offset <= index.size() &&
        entry.length <= index.size() - entry.offset) {
      return entry;
    }
  }
  return {};
}

// An entry of a column, of whatever width, and where it is.
struct Cell {
  std::size_t at = 0;
  std::size_t width = 0;
};

Cell cell_of(const SectionEntry& entry, std::size_t i, std::size_t full_width) {
  const bool has_width = entry.width == 1 || entry.width == 2 || entry.width == 4 || entry.width == 8;
  const std::size_t width = has_width ? std::min<std::size_t>(entry.width, full_width) : full_width;
  return {entry.offset + (has_width && entry.length == width ? 0 : i * width), width};
}

std::uint64_t value_of(const std::string& index, const Cell& cell) {
  std::uint64_t value = 0;
  if (cell.at + cell.width <= index.size()) std::memcpy(&value, index.data() + cell.at, cell.width);
  return value;
}

// Makes the index say how long the shards are.
void put_lengths(Input& input) {
  const auto lengths = section_of(input.index, Section::shard_lengths);
  for (std::size_t i = 0; i < 2 && 8 * (i + 1) <= lengths.length; ++i) {
    put<std::uint64_t>(input.index, lengths.offset + 8 * i, input.shards[i].size());
  }
}

// Makes an index of data in place say what the files are: else none of them would be opened.
void put_states(Input& input, const std::string& folder) {
  const auto sources = section_of(input.index, Section::sources);
  for (std::size_t i = 0; i < 2 && 32 + 24 * (i + 1) <= sources.length; ++i) {
    const auto state = paceline::FileState::of(folder + "/shard-0000" + std::to_string(i) + ".pace");
    const std::size_t at = sources.offset + 32 + 24 * i;
    put(input.index, at, state.size);
    put(input.index, at + 8, state.written_ns);
    put(input.index, at + 16, state.inode);
  }
}

// Makes the checksums those of what lies where the index says, so that reading gets past them.
void put_contents(Input& input) {
  const auto offsets = section_of(input.index, Section::offsets);
  const auto lengths = section_of(input.index, Section::lengths);
  const auto shards = section_of(input.index, Section::shards);
  const auto sums = section_of(input.index, Section::checksums);
  for (std::size_t i = 0; i < sums.length / 4; ++i) {
    const auto offset = value_of(input.index, cell_of(offsets, i, 8));
    const auto length = value_of(input.index, cell_of(lengths, i, 8));
    const std::string& shard =
        input.shards[value_of(input.index, cell_of(shards, i, 4)) % 2];
    if (offset > shard.size() || length > shard.size() - offset) continue;
    put(input.index, sums.offset + 4 * i, paceline::crc32c(shard.data() + offset, length));
  }
}

// Makes the sums of blocks right, as many as there is room for.
void put_sums(std::string& index) {
  const auto sums = section_of(index, Section::block_sums);
  const auto count = get<std::uint32_t>(index, 12);
  std::string right;
  for (std::size_t i = 0; i < std::min<std::size_t>(count, 64); ++i) {
    const auto entry = get<SectionEntry>(index, 64 + 32 * i);
    if (entry.id == static_cast<std::uint32_t>(Section::block_sums)) continue;
    if (entry.offset > index.size() || entry.length > index.size() - entry.offset) continue;
    PackBuilder::add_sums(right, index.substr(entry.offset, entry.length));
  }
  const std::size_t size = std::min<std::size_t>(right.size(), sums.length);
  index.replace(sums.offset, size, right, 0, size);
}

void reseal_index(Input& input) {
  std::string& index = input.index;
  put<std::uint64_t>(index, 16, index.size());
  if ((input.how & sums_bit) == 0) put_sums(index);
  const auto count = get<std::uint32_t>(index, 12);
  const std::size_t table_bytes = 32 * std::min<std::size_t>(count, index.size() / 32);
  for (std::size_t at = 64; at + 32 <= std::min(64 + table_bytes, index.size()); at += 32) {
    const auto entry = get<SectionEntry>(index, at);
    if (entry.offset > index.size() || entry.length > index.size() - entry.offset) continue;
    put(index, at + 24, paceline::crc32c(index.data() + entry.offset, entry.length));
  }
  if (index.size() >= 64 + table_bytes) {
    put(index, 56, paceline::crc32c(index.data() + 64, table_bytes));
  }
  if (index.size() >= 64) put(index, 60, paceline::crc32c(index.data(), 60));
}

void reseal_shards(Input& input) {
  for (std::string& shard : input.shards) {
    if (shard.size() >= 64) put(shard, 60, paceline::crc32c(shard.data(), 60));
  }
}

void write_file(const std::string& path, const std::string& bytes) {
  // Not O_TRUNC: ext4 would write the file to disk when it is closed.
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  CHECK(descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(bytes.size())) == 0);
  CHECK(write(descriptor, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  close(descriptor);
}

// Calls `work`, which may end in an answer or in one of the errors that a reader may raise.
template <class Work>
void attempt(const Work& work) {
  try {
    work();
  } catch (const PackError&) {
  } catch (const std::out_of_range&) {
  }
}

void use_names(const paceline::PackIndex& index) {
  for (const char* name : {"", "class", "class/0", "class/3", "zzz"}) {
    attempt([&] { index.find(name); });
    attempt([&] { index.find_folder(name); });
  }
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(index.sample_count(), 64); ++i) {
    attempt([&] { index.find(std::string(index.name(i))); });
  }
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(index.folder_count(), 64); ++i) {
    attempt([&] { index.find_folder(std::string(index.folder(i))); });
    attempt([&] { index.folder_samples(i); });
    attempt([&] { index.folder_end(i); });
  }
  for (std::uint64_t i = 0; i < std::min<std::uint32_t>(index.class_count(), 64); ++i) {
    attempt([&] { index.class_name(i); });
  }
}

// Whether no sample is larger than what this caller allocates: an encoded one may claim 1 GiB, which
// verifying it would take, too much for a machine that does so thousands of times a second.
bool is_small(const PackReader& pack) {
  std::uint64_t largest = 0;
  for (std::uint64_t i = 0; i < pack.index().sample_count(); ++i) {
    attempt([&] { largest = std::max<std::uint64_t>(largest, pack.checked_length(i)); });
  }
  return largest <= max_sample_bytes;
}

void read_samples(const PackReader& pack) {
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> offsets(2);
  std::string buffer;
  const auto count = static_cast<std::int64_t>(std::min<std::uint64_t>(pack.index().sample_count(), 64));
  for (std::int64_t id = 0; id <= count; ++id) {  // one too many as well
    ids.push_back(id);
    attempt([&] {
      const std::size_t size = pack.plan_batch({&id, 1}, offsets);
      if (size > max_sample_bytes) return;
      buffer.resize(size);
      pack.read_batch({&id, 1}, offsets, std::as_writable_bytes(std::span(buffer)));
    });
    attempt([&] {
      for (const auto& view : pack.views({&id, 1})) {
        if (view) static_cast<void>(paceline::crc32c(view->data(), view->size()));  // reads it all
      }
    });
  }
  ids.pop_back();
  attempt([&] {
    offsets.resize(ids.size() + 1);
    const std::size_t size = pack.plan_batch(ids, offsets);
    if (size > max_sample_bytes) return;
    buffer.resize(size);
    pack.read_batch(ids, offsets, std::as_writable_bytes(std::span(buffer)));
  });
  attempt([&] {
    const paceline::SortedReader sorted(pack, {.threads = 1, .direct = false});
    paceline::SortedPlan plan = sorted.plan(ids);
    if (plan.target_bytes > max_sample_bytes) return;
    buffer.resize(plan.target_bytes);
    sorted.read(plan, std::as_writable_bytes(std::span(buffer)));
  });
}

unsigned long long opened = 0;  // packs that were not refused at once

void use_pack(const Input& input, const std::string& place) {
  ReadOptions options;
  options.verify = static_cast<Verify>((input.how >> 4) % 3);
  options.direct = (input.how & direct_bit) != 0;
  const PackReader pack(place, options);
  ++opened;
  use_names(pack.index());
  const auto count = std::min<std::uint64_t>(pack.index().sample_count(), 64);
  for (std::uint64_t i = 0; i < count; ++i) {
    attempt([&] { static_cast<void>(pack.index().labels()[i]); });
    attempt([&] { static_cast<void>(pack.index().modes()[i]); });
    attempt([&] { static_cast<void>(pack.index().mtimes()[i]); });
  }
  attempt([&] { pack.index().check_content(); });
  if (!is_small(pack)) return;
  attempt([&] { pack.verify(0, std::min<std::uint64_t>(pack.index().sample_count(), 64)); });
  read_samples(pack);
  pack.evict();
  read_samples(pack);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const TemporaryFolder folder;
  Input input = Input::of({data, size});
  if ((input.how & lengths_bit) != 0) put_lengths(input);
  if ((input.how & contents_bit) != 0) put_contents(input);
  if ((input.how & reseal_bit) != 0) reseal_shards(input);
  write_file(folder / "shard-00000.pace", input.shards[0]);
  write_file(folder / "shard-00001.pace", input.shards[1]);
  if ((input.how & lengths_bit) != 0) put_states(input, folder.path());
  if ((input.how & reseal_bit) != 0) reseal_index(input);
  write_file(folder / "index.pace", input.index);
  const bool is_in_place = section_of(input.index, Section::sources).length > 0;
  attempt([&] { use_pack(input, is_in_place ? folder / "index.pace" : folder.path()); });
  return 0;
}

#ifndef PACELINE_LIBFUZZER

namespace {

unsigned long long running_seed = 0, running_case = 0;

void name_case() {
  std::fprintf(stderr, "fuzz_pack_reader 0 %llu %llu shows it again\n", running_seed, running_case);
}

Input seed_of(const PackBuilder& pack) {
  Input input;
  input.index = pack.index();
  for (std::size_t i = 0; i < std::min<std::size_t>(pack.shards.size(), 2); ++i) {
    input.shards[i] = pack.shards[i];
  }
  return input;
}

// A pack whose samples are stored in each way that makes them smaller, one after the other.
PackBuilder encoded_pack(const std::vector<std::string>& bodies) {
  std::string common;
  std::vector<std::size_t> lengths;
  for (int k = 0; k < 400; ++k) {
    const std::string sample = "a sample numbered " + std::to_string(k * 7919) + " of many alike ones";
    common += sample;
    lengths.push_back(sample.size());
  }
  const auto content = paceline::zstd_train(
      {reinterpret_cast<const std::byte*>(common.data()), common.size()}, lengths, 1024);
  const paceline::ZstdDictionary dictionary(content, 3);
  PackBuilder encoded = PackBuilder(bodies, 3).version3();
  std::vector<std::uint64_t> stored;
  std::vector<std::uint8_t> codes;
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    const auto codec = static_cast<Codec>(1 + i % 3);
    const auto bits = static_cast<std::uint8_t>(i % 4);
    const std::span body(reinterpret_cast<const std::byte*>(bodies[i].data()), bodies[i].size());
    std::vector<std::byte> shuffled(body.size());
    paceline::shuffle(body, shuffled, bits);
    std::vector<std::byte> frame(paceline::compress_bound(codec, body.size()));
    const std::size_t length = paceline::compress(codec, 3, dictionary, shuffled, frame);
    const bool smaller = length > 0 && length < body.size();
    stored.push_back(smaller ? length : body.size());
    codes.push_back(smaller ? paceline::Encoding{codec, bits}.code() : 0);
    const auto at = get<std::uint32_t>(encoded[Section::offsets], 4 * i);  // narrow
    if (!smaller) continue;
    encoded.shards[i / 3].replace(at, length, reinterpret_cast<const char*>(frame.data()), length);
  }
  encoded.set(Section::stored_lengths, stored);
  encoded.set(Section::codecs, codes);
  if (content.empty()) return encoded;
  encoded.set(Section::dictionary,
              std::vector<std::uint8_t>(reinterpret_cast<const std::uint8_t*>(content.data()),
                                        reinterpret_cast<const std::uint8_t*>(content.data()) +
                                            content.size()));
  return encoded;
}

// Good packs of all kinds: all versions, chunks, codecs.
std::vector<Input> seeds() {
  const std::vector<std::string> bodies = {"first", "", std::string(20'000, 'x'), "fourth",
                                           std::string(64, 'y'), std::string(9'000, 'z')};
  std::vector<Input> result;
  result.push_back(seed_of(PackBuilder(bodies, 3)));
  result.push_back(seed_of(PackBuilder(bodies, 3).version2()));
  result.push_back(seed_of(PackBuilder(bodies, 3).version3()));
  PackBuilder chunked = PackBuilder(bodies, 3).version2();
  chunked.header.sample_count = 3;
  chunked.set(Section::first_extents, std::vector<std::uint64_t>{0, 2, 5, 6});
  for (const Section id : {Section::labels, Section::modes, Section::mtimes}) {
    chunked[id].resize(chunked[id].size() / 2);
  }
  chunked.set(Section::name_offsets, std::vector<std::uint64_t>{0, 7, 14, 21});
  chunked.set(Section::folder_samples, std::vector<std::uint64_t>{0, 3});
  result.push_back(seed_of(chunked));
  for (const auto kind : {paceline::SourceKind::files, paceline::SourceKind::lmdb}) {
    // The transaction that the third body has where meta pages have theirs.
    constexpr std::uint64_t transaction = 0x7878787878787878;
    for (const auto& pack : {PackBuilder(bodies, 3).version2(), PackBuilder(bodies, 3).version3()}) {
      result.push_back(seed_of(PackBuilder(pack).in_place(kind, transaction)));
      result.back().how = lengths_bit | reseal_bit;
    }
  }
  std::vector<std::string> many;  // of which some columns have several blocks
  for (std::size_t i = 0; i < 9'000; ++i) many.push_back(std::string(i % 3, 'm'));
  const Input large = seed_of(PackBuilder(many, 5'000).version3());
  if (!paceline::zstd_available()) {
    result.push_back(large);
    return result;
  }
  PackBuilder encoded = PackBuilder(bodies, 3).version2();
  std::vector<std::uint64_t> stored;
  std::vector<std::uint8_t> codecs;
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    std::string frame(paceline::zstd_bound(bodies[i].size()), '\0');
    const std::size_t length = paceline::zstd_compress(
        {reinterpret_cast<const std::byte*>(bodies[i].data()), bodies[i].size()},
        {reinterpret_cast<std::byte*>(frame.data()), frame.size()}, 3);
    const bool smaller = length > 0 && length < bodies[i].size();
    stored.push_back(smaller ? length : bodies[i].size());
    codecs.push_back(smaller ? 1 : 0);
    const auto at = get<std::uint64_t>(encoded[Section::offsets], 8 * i);
    if (smaller) encoded.shards[i / 3].replace(at, length, frame.data(), length);
  }
  encoded.set(Section::stored_lengths, stored);
  encoded.set(Section::codecs, codecs);
  result.push_back(seed_of(encoded));
  std::vector<std::string> alike;
  for (int k = 0; k < 6; ++k) alike.push_back("a sample numbered 7919 of many alike ones" + std::string(k * 40U, 'x'));
  for (const auto& content : {alike, bodies}) result.push_back(seed_of(encoded_pack(content)));
  result.push_back(large);
  return result;
}

class Mutator {
 public:
  Mutator(unsigned long long seed, unsigned long long number)
      : random_(seed * 0x9e3779b97f4a7c15ULL + number) {}

  std::uint64_t below(std::uint64_t end) { return end == 0 ? 0 : random_() % end; }

  void mutate(Input& input, const std::vector<Input>& others) {
    input.how = static_cast<std::uint8_t>(random_());
    if (below(8) != 0) input.how |= reseal_bit | lengths_bit;
    if (below(4) != 0) input.how = static_cast<std::uint8_t>(input.how & ~direct_bit);
    for (std::uint64_t left = 1 + below(6); left > 0; --left) {
      switch (below(10)) {
        case 0: flip(input.index); break;
        case 1: put_number(input.index, 8); break;
        case 2: put_number(input.index, 4); break;
        case 3: header_field(input.index); break;
        case 4: table_entry(input.index); break;
        case 5: section_number(input.index); break;
        case 6: flip(input.shards[below(2)]); break;
        case 7: resize(below(2) == 0 ? input.index : input.shards[below(2)]); break;
        case 8: splice(input.index, others[below(others.size())].index); break;
        default: section_number(input.index); break;
      }
    }
  }

 private:
  std::uint64_t number(std::size_t size) {
    const std::uint64_t values[] = {0, 1, 2, 63, 64, 65, size, size - 1, size + 1, 4096, 0x7fffffff,
                                    0xffffffff, 1ULL << 32, 1ULL << 40, ~0ULL, ~0ULL - 63,
                                    1ULL << 63, random_(), random_() % 1024, 1ULL << 30};
    return values[below(std::size(values))];
  }
  void flip(std::string& bytes) {
    if (bytes.empty()) return;
    char& one = bytes[below(bytes.size())];
    one = static_cast<char>(one ^ (1 << below(8)));
  }
  void put_number(std::string& bytes, std::size_t width) {
    const std::size_t at = below(bytes.size() / width + 1) * width;
    if (width == 8) put<std::uint64_t>(bytes, at, number(bytes.size()));
    if (width == 4) put<std::uint32_t>(bytes, at, static_cast<std::uint32_t>(number(bytes.size())));
  }
  void header_field(std::string& index) {
    static constexpr std::size_t places[] = {8, 12, 16, 24, 28, 32, 40, 44};
    const std::size_t at = places[below(std::size(places))];
    const auto old = get<std::uint32_t>(index, at);
    const auto near = static_cast<std::uint32_t>(old + below(5) - 2);
    put(index, at, below(2) == 0 ? near : static_cast<std::uint32_t>(number(index.size())));
  }
  void table_entry(std::string& index) {
    const std::size_t count = get<std::uint32_t>(index, 12);
    const std::size_t at = 64 + 32 * below(count), other = 64 + 32 * below(count);
    if (std::max(at, other) + 32 > index.size()) return;
    switch (below(5)) {
      case 4: put<std::uint32_t>(index, at + 28, 1U << below(5)); break;
      case 0: put<std::uint32_t>(index, at, static_cast<std::uint32_t>(below(29))); break;
      case 1: put<std::uint64_t>(index, at + 8, number(index.size()) & ~63ULL); break;
      case 2: put<std::uint64_t>(index, at + 16, number(index.size())); break;
      default: std::memcpy(index.data() + at + 4, index.data() + other + 4, 28); break;
    }
  }
  void section_number(std::string& index) {
    const auto entry = section_of(index, static_cast<Section>(1 + below(paceline::last_section)));
    if (entry.length < 4) return;
    const std::size_t at = entry.offset + below(entry.length / 8 + 1) * 8;
    put<std::uint64_t>(index, at, number(index.size()));
  }
  void resize(std::string& bytes) { bytes.resize(below(2 * bytes.size() + 1)); }
  void splice(std::string& bytes, const std::string& other) {
    if (bytes.empty() || other.empty()) return;
    const std::size_t at = below(bytes.size()), from = below(other.size());
    const std::size_t size = std::min({bytes.size() - at, other.size() - from, below(256) + 1});
    bytes.replace(at, size, other, from, size);
  }

  std::mt19937_64 random_;
};

void run_case(unsigned long long seed, unsigned long long number, const std::vector<Input>& good) {
  running_case = number;
  Mutator mutator(seed, number);
  // The last is large, and so slow: it is for what only several blocks show.
  Input input = mutator.below(32) == 0 ? good.back() : good[mutator.below(good.size() - 1)];
  mutator.mutate(input, good);
  const std::string bytes = input.bytes();
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
}

}  // namespace

int main(int count, char** words) {
  const double seconds = count > 1 ? std::atof(words[1]) : 2;
  running_seed = count > 2 ? std::strtoull(words[2], nullptr, 10) : 1;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(name_case);
#else
  std::signal(SIGABRT, [](int) { name_case(); });
#endif
  const auto good = seeds();
  for (const Input& one : good) {
    const std::string bytes = one.bytes();
    LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
  }
  CHECK(opened == good.size());  // they are what they are meant to be
  if (count > 3) {
    run_case(running_seed, std::strtoull(words[3], nullptr, 10), good);
    return 0;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  unsigned long long number = 0;
  for (; std::chrono::steady_clock::now() < end; ++number) run_case(running_seed, number, good);
  std::printf("%llu malformed packs of seed %llu, %llu refused when they were opened: no crash\n",
              number, running_seed, number - (opened - good.size()));
  return 0;
}

#endif
