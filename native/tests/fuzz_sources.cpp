// Feeds the parsers of data in place what nobody would write: the outcome is records that lie within
// the file, or a PackError, without a crash.
//
//   fuzz_sources lmdb|tfrecord SECONDS [SEED [CASE]]
//
// A case is a pure function of (seed, number), so that a crash can be seen again. With libFuzzer, for
// LMDB (-DPACELINE_TFRECORD for the other): clang++ -std=c++20 -g -DPACELINE_LIBFUZZER
//   -fsanitize=fuzzer,address,undefined -Inative/include native/tests/fuzz_sources.cpp native/src/{crc32c,
//   fault_guard,fork,lmdb_records,pack_index,page_cache,tfrecord_records}.cpp
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
#include <string>
#include <vector>

#include "check.hpp"
#include "lmdb_builder.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/lmdb_records.hpp"
#include "paceline/tfrecord_records.hpp"

using paceline::KeyNames;
using paceline::LmdbRecords;
using paceline::PackError;
using paceline::TfRecords;

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
extern "C" const char* __asan_default_options() {
  // Larger than anything that a small file may make a parser ask for.
  return "max_allocation_size_mb=64:allocator_may_return_null=0:detect_leaks=1";
}
#endif

namespace {

unsigned long long accepted = 0;  // files of which every record was found

void write_file(const std::string& path, std::string_view bytes) {
  // Not O_TRUNC: ext4 would write the file to disk when it is closed.
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  CHECK(descriptor >= 0 && ftruncate(descriptor, static_cast<off_t>(bytes.size())) == 0);
  CHECK(write(descriptor, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  close(descriptor);
}

void check_extents(const std::vector<std::uint64_t>& offsets,
                   const std::vector<std::uint64_t>& lengths, std::size_t size) {
  CHECK(offsets.size() == lengths.size());
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    CHECK(offsets[i] <= size && lengths[i] <= size - offsets[i]);
  }
}

void use_lmdb(const std::string& path, std::size_t size) {
  for (const KeyNames names : {KeyNames::plain, KeyNames::hex, KeyNames::reversed_hex}) {
    LmdbRecords records(path, names);
    for (;;) {
      const auto block = records.next(50);
      if (block.offsets.empty()) break;
      check_extents(block.offsets, block.lengths, size);
      CHECK(block.name_offsets.size() == block.offsets.size() + 1);
      CHECK(block.name_offsets.back() == block.names.size());
    }
  }
  ++accepted;
}

void use_tfrecord(const std::string& path, std::size_t size) {
  for (const bool to_cut : {true, false}) {
    TfRecords records(path, to_cut);
    for (;;) {
      const auto block = records.next(50);
      if (block.offsets.empty()) break;
      check_extents(block.offsets, block.lengths, size);
      CHECK(block.checksums.size() == block.offsets.size());
    }
  }
  ++accepted;
}

void use(bool is_lmdb, std::string_view bytes) {
  static const TemporaryFolder folder;
  const std::string path = folder / "x";
  write_file(path, bytes);
  try {
    is_lmdb ? use_lmdb(path, bytes.size()) : use_tfrecord(path, bytes.size());
  } catch (const PackError&) {
  }
}

}  // namespace

#ifdef PACELINE_LIBFUZZER

#ifdef PACELINE_TFRECORD
constexpr bool fuzzes_lmdb = false;
#else
constexpr bool fuzzes_lmdb = true;
#endif

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  use(fuzzes_lmdb, {reinterpret_cast<const char*>(data), size});
  return 0;
}

#else

namespace {

const char* running_format = "lmdb";
unsigned long long running_seed = 0, running_case = 0;

void name_case() {
  std::fprintf(stderr, "fuzz_sources %s 0 %llu %llu shows it again\n", running_format, running_seed,
               running_case);
}

std::string tfrecords(const std::vector<std::size_t>& lengths) {
  const auto masked = [](const std::string& data) {
    const std::uint32_t crc = paceline::crc32c(data.data(), data.size());
    const std::uint32_t value = ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
    return std::string(reinterpret_cast<const char*>(&value), sizeof value);
  };
  std::string file;
  for (const std::uint64_t length : lengths) {
    const std::string head(reinterpret_cast<const char*>(&length), sizeof length);
    const std::string body(length, static_cast<char>('a' + length % 26));
    file += head + masked(head) + body + masked(body);
  }
  return file;
}

std::vector<std::string> seeds(bool is_lmdb) {
  if (!is_lmdb) return {tfrecords({0, 5, 300, 4'000, 1}), tfrecords({70'000}), tfrecords({1, 2, 3})};
  std::vector<std::string> result;
  for (const std::size_t page : {std::size_t{256}, std::size_t{512}, std::size_t{4096}}) {
    for (const int count : {0, 3, 60, 400}) {
      std::vector<std::pair<std::string, std::string>> records;
      for (int i = 0; i < count; ++i) {
        char key[16];
        std::snprintf(key, sizeof key, i % 3 == 0 ? "a/%05d" : "b%05d", i);
        records.emplace_back(key, std::string(i % 5 == 0 ? 700 : static_cast<std::size_t>(i % 9), 'v'));
      }
      std::sort(records.begin(), records.end());
      result.push_back(LmdbBuilder(records, page).bytes);
    }
  }
  return result;
}

// Mutates a good file, mostly where structure lies: the beginnings of pages and of records.
std::string mutated(bool is_lmdb, unsigned long long seed, unsigned long long number,
                    const std::vector<std::string>& good) {
  std::mt19937_64 random(seed * 0x9e3779b97f4a7c15ULL + number);
  const auto below = [&](std::uint64_t end) { return end == 0 ? 0 : random() % end; };
  std::string bytes = good[below(good.size())];
  for (std::uint64_t left = 1 + below(5); left > 0 && bytes.size() > 8; --left) {
    const std::uint64_t page = std::uint64_t{256} << (4 * below(2));
    const std::uint64_t begin = below(bytes.size() / page + 1) * page;
    const std::uint64_t at = std::min<std::uint64_t>(begin + below(below(2) == 0 ? 40 : page),
                                                     bytes.size() - 8);
    const std::uint64_t wild[] = {0, 1, 2, 3, 0xff, 0xffff, 0xffffffff, ~std::uint64_t{0},
                                  bytes.size(), below(bytes.size() / page + 2), random()};
    const std::uint64_t value = wild[below(std::size(wild))];
    switch (below(7)) {
      case 0: bytes[at] = static_cast<char>(random()); break;
      case 1: bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8))); break;
      case 2: std::memcpy(&bytes[at], &value, 2); break;
      case 3: std::memcpy(&bytes[at], &value, 4); break;
      case 4: std::memcpy(&bytes[at], &value, 8); break;
      case 5: bytes.resize(below(bytes.size() + page)); break;
      default: {  // a part of a good file, at another place
        const std::string& other = good[below(good.size())];
        const std::uint64_t from = below(other.size() / page + 1) * page;
        if (from >= other.size()) break;
        const std::uint64_t size = std::min<std::uint64_t>(
            {page, other.size() - from, bytes.size() - std::min<std::uint64_t>(begin, bytes.size())});
        bytes.replace(std::min<std::uint64_t>(begin, bytes.size()), size, other, from, size);
      }
    }
  }
  // So that what follows a length is reached: its checksum in order, now and then.
  if (!is_lmdb && bytes.size() >= 12 && below(2) == 0) {
    const std::uint32_t crc = paceline::crc32c(bytes.data(), 8);
    const std::uint32_t masked = ((crc >> 15) | (crc << 17)) + 0xa282ead8U;
    std::memcpy(&bytes[8], &masked, sizeof masked);
  }
  return bytes;
}

}  // namespace

int main(int count, char** words) {
  running_format = count > 1 ? words[1] : "lmdb";
  const bool is_lmdb = std::strcmp(running_format, "lmdb") == 0;
  const double seconds = count > 2 ? std::atof(words[2]) : 2;
  running_seed = count > 3 ? std::strtoull(words[3], nullptr, 10) : 1;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(name_case);
#else
  std::signal(SIGABRT, [](int) { name_case(); });
#endif
  const auto good = seeds(is_lmdb);
  for (const std::string& bytes : good) use(is_lmdb, bytes);
  CHECK(accepted == good.size());  // they are what they are meant to be
  if (count > 4) {
    running_case = std::strtoull(words[4], nullptr, 10);
    use(is_lmdb, mutated(is_lmdb, running_seed, running_case, good));
    return 0;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  unsigned long long number = 0;
  for (; std::chrono::steady_clock::now() < end; ++number) {
    running_case = number;
    use(is_lmdb, mutated(is_lmdb, running_seed, number, good));
  }
  std::printf("%llu malformed %s files of seed %llu, %llu refused: no crash\n", number,
              running_format, running_seed, number - (accepted - good.size()));
  return 0;
}

#endif
