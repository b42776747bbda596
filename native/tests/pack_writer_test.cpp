// Listing and reading folders, and sorting, merging and searching names.
#include "paceline/pack_writer.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <stdexcept>
#include <system_error>

#include "check.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/zstd.hpp"

using namespace paceline;

namespace {

struct Names {  // owns what a NameList views
  explicit Names(const std::vector<std::string>& all) {
    for (const auto& one : all) {
      blob += one;
      offsets.push_back(blob.size());
    }
  }
  NameList list() const { return {offsets, blob}; }
  std::string blob;
  std::vector<std::uint64_t> offsets{0};
};

void write_file(const std::string& path, const std::string& body) {
  std::ofstream(path, std::ios::binary) << body;
}

void test_folders() {
  const TemporaryFolder folder;
  const std::string root = folder.path();
  CHECK(mkdir((root + "/b").c_str(), 0755) == 0);
  write_file(root + "/b-", "12345");
  write_file(root + "/a", "");
  write_file(root + "/c", std::string(5000, 'x'));
  CHECK(symlink("c", (root + "/link").c_str()) == 0);
  CHECK(symlink("nowhere", (root + "/broken").c_str()) == 0);
  const int descriptor = open(root.c_str(), O_RDONLY | O_DIRECTORY);
  CHECK(descriptor >= 0);
  const auto plain = list_folder(descriptor, false);
  std::vector<std::string> found;
  for (const auto& one : plain) found.push_back(one.name);
  CHECK((found == std::vector<std::string>{"a", "b-", "b/", "broken", "c", "link"}));
  CHECK(S_ISLNK(plain[5].mode) && plain[5].is_link);
  const auto followed = list_folder(descriptor, true);
  CHECK(followed[3].error == ENOENT && followed[3].is_link);
  CHECK(S_ISREG(followed[5].mode) && followed[5].size == 5000);
  CHECK_THROWS(list_folder(-1, false), std::system_error);

  const Names names({"b-", "c", "gone", "b", "a", "link"});
  std::vector<std::uint64_t> lengths{5, 5000, 1, 0, 7, 5000};
  std::vector<std::int64_t> mtimes{plain[1].mtime_ns, 1, 0, 0, 0, 0};
  std::vector<std::uint64_t> positions{0, 64, 5120, 5184, 5248, 5312};
  std::vector<std::byte> target(10368, std::byte{7});
  const auto states =
      read_files(descriptor, names.list(), lengths, mtimes, positions, target, false, 4);
  CHECK(states[0].outcome == ReadOutcome::complete);
  CHECK(states[0].checksum == crc32c("12345", 5));
  CHECK(std::memcmp(target.data(), "12345\0\0\0", 8) == 0);
  CHECK(states[1].outcome == ReadOutcome::touched);
  CHECK(states[2].outcome == ReadOutcome::gone);
  CHECK(states[3].outcome == ReadOutcome::no_file);
  CHECK(states[4].outcome == ReadOutcome::resized && states[4].size == 0);
  CHECK(states[5].outcome == ReadOutcome::gone);  // a link, which was not asked for
  positions[5] = 9000;
  CHECK_THROWS(read_files(descriptor, names.list(), lengths, mtimes, positions, target, false, 1),
               std::invalid_argument);
  lengths.pop_back();
  CHECK_THROWS(read_files(descriptor, names.list(), lengths, mtimes, positions, target, false, 1),
               std::invalid_argument);
  close(descriptor);
}

void test_names() {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::vector<std::string>> parts(random() % 5 + 1);
    std::vector<std::string> all;
    for (std::size_t k = 0, count = random() % 40; k < count; ++k) {
      std::string name = std::to_string(k * 7919 % 1000);
      name += std::string(random() % 3, static_cast<char>(random() % 256));
      if (std::find(all.begin(), all.end(), name) != all.end()) continue;
      all.push_back(name);
      parts[random() % parts.size()].push_back(name);
    }
    const Names mixed(all);
    const auto order = sorted_order(mixed.list());
    auto sorted = all;
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t k = 0; k < order.size(); ++k) CHECK(all[order[k]] == sorted[k]);
    CHECK(!order.empty() || sorted == all);

    std::vector<Names> owned;
    for (auto& part : parts) {
      std::sort(part.begin(), part.end());
      owned.emplace_back(part);
    }
    std::vector<NameList> lists;
    for (const auto& one : owned) lists.push_back(one.list());
    NameMerger merger(lists);
    std::vector<std::string> merged;
    for (;;) {
      const auto piece = merger.next(random() % 7 + 1);
      if (piece.lists.empty()) break;
      CHECK(!piece.duplicate);
      std::size_t at = 0;
      for (const auto length : piece.lengths) {
        merged.push_back(piece.blob.substr(at, length));
        at += length;
      }
    }
    CHECK(merged == sorted);

    const Names known(sorted);
    const Names wanted({"", "5", "zz"});
    const auto found = lower_bounds(known.list(), wanted.list());
    for (std::size_t k = 0; k < 3; ++k) {
      const auto place = std::lower_bound(sorted.begin(), sorted.end(), wanted.list()[k]);
      CHECK(found[k] == static_cast<std::size_t>(place - sorted.begin()));
    }
  }
  const Names twice({"a", "b"});
  NameMerger merger({twice.list(), twice.list()});
  const auto piece = merger.next(10);
  CHECK(piece.duplicate && piece.lists.size() == 2);
  Names broken({"a", "b"});
  broken.offsets[1] = 5;
  CHECK(!broken.list().valid());
  CHECK_THROWS(NameMerger({broken.list()}), std::invalid_argument);
  CHECK_THROWS(sorted_order(broken.list()), std::invalid_argument);
}

void test_encoding() {
  if (!zstd_available()) return;
  std::mt19937 random(5);
  std::vector<std::byte> source(64 * 40);
  for (std::size_t k = 0; k < source.size() / 2; ++k) source[k] = static_cast<std::byte>(random());
  const std::vector<std::uint64_t> positions{0, 640, 1280, 1280};
  const std::vector<std::uint64_t> lengths{640, 600, 0, 1280};
  const auto encoded = encode(source, positions, lengths,
                              {.level = 3, .keep_ratio = 0.9, .threads = 3});
  CHECK((encoded.codecs == std::vector<std::uint8_t>{0, 0, 0, 1}));
  for (std::size_t k = 0; k < 4; ++k) {
    CHECK(encoded.positions[k] % (encoded.lengths[k] < 64 ? 8 : 64) == 0);
    const auto stored = std::span(encoded.bytes).subspan(encoded.positions[k], encoded.lengths[k]);
    std::vector<std::byte> body(lengths[k]);
    if (encoded.codecs[k] == 1) {
      CHECK(zstd_decompress(stored, body));
    } else {
      std::copy(stored.begin(), stored.end(), body.begin());
    }
    CHECK(std::equal(body.begin(), body.end(),
                     source.begin() + static_cast<std::ptrdiff_t>(positions[k])));
  }
  CHECK(encoded.bytes.size() % 64 == 0 && encoded.lengths[3] < 64);
  CHECK(encoded.positions[2] == 1240);  // right behind what lies before
  const std::vector<std::uint64_t> beyond{640, 600, 0, 1281};
  CHECK_THROWS(encode(source, positions, beyond, EncodeOptions{}), std::invalid_argument);
}

}  // namespace

int main() {
  test_folders();
  test_names();
  test_encoding();
  return 0;
}
