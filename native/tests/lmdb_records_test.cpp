// The records of LMDB databases: good ones are found, and no file, however hostile, gets past a
// PackError. Databases that LMDB itself wrote: tests/integration/test_in_place_lmdb.py.
#include "paceline/lmdb_records.hpp"

#include <fcntl.h>
#include <unistd.h>

#include "check.hpp"
#include "lmdb_builder.hpp"

using paceline::KeyNames;
using paceline::LmdbBlock;
using paceline::LmdbRecords;
using paceline::PackError;
using Records = std::vector<std::pair<std::string, std::string>>;

namespace {

Records some_records(int count) {
  Records records;
  for (int i = 0; i < count; ++i) {
    char key[16];
    std::snprintf(key, sizeof key, "key%07d", i);
    const auto length = static_cast<std::size_t>(i % 7 == 0 ? 5000 : i % 50);
    records.emplace_back(key, std::string(length, static_cast<char>('a' + i % 26)));
  }
  return records;
}

// Names and values as the records say where they lie.
Records found(const std::string& path, const LmdbBuilder& database, KeyNames names,
              std::size_t block_records = 1000) {
  LmdbRecords records(path, names);
  Records result;
  for (;;) {
    const LmdbBlock block = records.next(block_records);
    if (block.offsets.empty()) return result;
    for (std::size_t i = 0; i < block.offsets.size(); ++i) {
      const auto begin = block.name_offsets[i];
      result.emplace_back(block.names.substr(begin, block.name_offsets[i + 1] - begin),
                          database.bytes.substr(block.offsets[i], block.lengths[i]));
    }
  }
}

std::string refusal(const std::string& path) {
  try {
    LmdbRecords records(path, KeyNames::plain);
    while (!records.next(100).offsets.empty()) {
    }
  } catch (const PackError& problem) {
    return problem.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

void test_records_of_trees_of_each_depth(const TemporaryFolder& folder) {
  for (const int count : {0, 1, 50, 5'000}) {
    for (const std::size_t page : {std::size_t{512}, std::size_t{4096}, std::size_t{16384}}) {
      const Records records = some_records(count);
      const LmdbBuilder database(records, page);
      database.write(folder / "x.mdb");
      CHECK(found(folder / "x.mdb", database, KeyNames::plain) == records);
      CHECK(found(folder / "x.mdb", database, KeyNames::plain, 7) == records);
    }
  }
}

void test_names_of_keys(const TemporaryFolder& folder) {
  const Records records = {{std::string("\0\1", 2), "a"}, {"\x7f/", "b"}, {"\xff", "c"}};
  const LmdbBuilder database(records);
  database.write(folder / "x.mdb");
  CHECK(!LmdbRecords(folder / "x.mdb", KeyNames::plain).next(10).are_paths);
  CHECK(found(folder / "x.mdb", database, KeyNames::hex) ==
        (Records{{"0001", "a"}, {"7f2f", "b"}, {"ff", "c"}}));
  for (const char* path : {"a", "a/b", "..a", "a.", ".a/..b"}) {
    LmdbBuilder(Records{{path, ""}}).write(folder / "x.mdb");
    CHECK(LmdbRecords(folder / "x.mdb", KeyNames::plain).next(1).are_paths);
  }
  for (const char* path : {"/a", "a/", "a//b", ".", "..", "a/../b", "a/."}) {
    LmdbBuilder(Records{{path, ""}}).write(folder / "x.mdb");
    CHECK(!LmdbRecords(folder / "x.mdb", KeyNames::plain).next(1).are_paths);
  }
  constexpr std::uint16_t integer_keys = 8;
  const Records integers = {{std::string("\2\1\0\0", 4), "258"}, {std::string("\0\0\1\0", 4), "65536"}};
  const LmdbBuilder numbered(integers, 4096, integer_keys);
  numbered.write(folder / "x.mdb");
  CHECK(found(folder / "x.mdb", numbered, KeyNames::reversed_hex) ==
        (Records{{"00000102", "258"}, {"00010000", "65536"}}));
}

void test_the_newer_meta_page_counts_and_a_commit_is_noticed(const TemporaryFolder& folder) {
  LmdbBuilder database(some_records(3'000));
  const std::string path = folder / "x.mdb";
  database.put<std::uint64_t>(LmdbBuilder::meta_main + 40, 77'777);  // the root of the older
  database.write(path);
  LmdbRecords records(path, KeyNames::plain);
  CHECK(records.meta().transaction == 6);
  CHECK(records.next(10).offsets.size() == 10);
  const int descriptor = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  const std::uint64_t next = 7;
  CHECK(pwrite(descriptor, &next, sizeof next, 144) == sizeof next);
  close(descriptor);
  try {
    static_cast<void>(records.next(10));
    CHECK(false);
  } catch (const PackError& problem) {
    CHECK(problem.kind == PackError::Kind::changed);
    CHECK(contains(problem.what(), "transaction 7 was committed after transaction 6"));
  }
}

// One change each; what the refusal must say.
void test_damage_is_refused(const TemporaryFolder& folder) {
  const std::string path = folder / "x.mdb";
  const LmdbBuilder good(some_records(3'000));
  const auto expect = [&](const char* what, const auto& change) {
    LmdbBuilder bad = good;
    change(bad);
    bad.write(path);
    const std::string why = refusal(path);
    if (!contains(why, what)) std::fprintf(stderr, "'%s', not '%s'\n", why.c_str(), what);
    CHECK(contains(why, what));
  };
  const std::size_t root = good.root();
  expect("ends within", [](LmdbBuilder& bad) { bad.bytes.resize(4096); });
  expect("not an LMDB", [](LmdbBuilder& bad) { bad.put<std::uint32_t>(16, 1); });
  expect("data version is 2", [](LmdbBuilder& bad) { bad.put<std::uint32_t>(20, 2); });
  expect("page size is 4095", [](LmdbBuilder& bad) { bad.put<std::uint32_t>(40, 4095); });
  expect("lies beyond", [](LmdbBuilder& bad) { bad.put_main<std::uint64_t>(40, 1U << 30); });
  expect("33 pages deep", [](LmdbBuilder& bad) { bad.put_main<std::uint16_t>(6, 33); });
  expect("is not the branch", [](LmdbBuilder& bad) { bad.put_main<std::uint16_t>(6, 9); });
  expect("by its meta page", [](LmdbBuilder& bad) { bad.put_main<std::uint64_t>(32, 2'999); });
  expect("several values", [](LmdbBuilder& bad) { bad.put_main<std::uint16_t>(4, 4); });
  expect("lies beyond", [](LmdbBuilder& bad) { bad.bytes.resize(bad.bytes.size() / 2); });
  expect("is not the branch", [&](LmdbBuilder& bad) { bad.put<std::uint64_t>(root, 3); });
  expect("impossible bounds", [&](LmdbBuilder& bad) { bad.put<std::uint16_t>(root + 12, 4097); });
  expect("node out of bounds", [&](LmdbBuilder& bad) { bad.put<std::uint16_t>(root + 16, 4090); });
  const std::size_t node = root + good.get<std::uint16_t>(root + 16);
  expect("key out of bounds", [&](LmdbBuilder& bad) { bad.put<std::uint16_t>(node + 6, 65535); });
  const std::size_t leaf = good.get<std::uint32_t>(node) * std::size_t{4096};
  // The second child is the first once more: its keys do not follow.
  const std::size_t second = root + good.get<std::uint16_t>(root + 18);
  expect("not in order", [&](LmdbBuilder& bad) {
    bad.put(second, good.get<std::uint32_t>(node));
  });
  const std::size_t big = leaf + good.get<std::uint16_t>(leaf + 16);
  CHECK(good.get<std::uint16_t>(big + 4) == 1);
  expect("value out of bounds", [&](LmdbBuilder& bad) { bad.put<std::uint32_t>(big, ~0U); });
  expect("page that does not exist", [&](LmdbBuilder& bad) {
    bad.put<std::uint64_t>(big + 8 + good.get<std::uint16_t>(big + 6), 1);
  });
  expect("named databases", [&](LmdbBuilder& bad) { bad.put<std::uint16_t>(big + 4, 2); });
}

}  // namespace

int main() {
  const TemporaryFolder folder;
  test_records_of_trees_of_each_depth(folder);
  test_names_of_keys(folder);
  test_the_newer_meta_page_counts_and_a_commit_is_noticed(folder);
  test_damage_is_refused(folder);
  return 0;
}
