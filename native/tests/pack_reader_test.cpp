// The pack reader: good packs are read back, and no file, however hostile, gets past a PackError.
#include "paceline/pack_reader.hpp"

#include <random>
#include <thread>

#include "check.hpp"
#include "pack_builder.hpp"

using paceline::PackError;
using paceline::PackReader;
using paceline::Section;

namespace {

std::vector<std::string> bodies() {
  return {"first", "", std::string(200'000, 'x'), "fourth", std::string(64, 'y')};
}

std::string read(const PackReader& pack, std::uint64_t sample) {
  std::string body(pack.checked_length(sample), '\0');
  pack.read(sample, reinterpret_cast<std::byte*>(body.data()));
  return body;
}

std::vector<std::string> read_batch(const PackReader& pack, const std::vector<std::int64_t>& ids) {
  std::vector<std::int64_t> offsets(ids.size() + 1);
  std::string buffer(pack.plan_batch(ids, offsets.data()), '\0');
  pack.read_batch(ids, offsets.data(), reinterpret_cast<std::byte*>(buffer.data()));
  std::vector<std::string> result;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto begin = static_cast<std::size_t>(offsets[i]);
    result.push_back(buffer.substr(begin, static_cast<std::size_t>(offsets[i + 1]) - begin));
  }
  return result;
}

// Does all that a reader can do; the only way out but success is a PackError.
bool survives_everything(const std::string& folder) {
  try {
    const PackReader pack(folder);
    for (const char* name : {"", "class/0", "class/3", "class/9", "zzz"}) pack.find(name);
    static_cast<void>(pack.verify(0, pack.sample_count()));
    for (std::uint64_t i = 0; i < pack.sample_count(); ++i) read(pack, i);
    for (std::uint64_t i = 0; i < pack.folder_count(); ++i) static_cast<void>(pack.folder(i));
    for (std::uint64_t i = 0; i < pack.class_count(); ++i) static_cast<void>(pack.class_name(i));
    for (const std::int32_t label : pack.labels()) static_cast<void>(label);
    return true;
  } catch (const PackError&) {
    return false;
  }
}

PackError::Kind failure(const std::string& folder) {
  try {
    const PackReader pack(folder);
    for (std::uint64_t i = 0; i < pack.sample_count(); ++i) {
      read(pack, i);
      static_cast<void>(pack.name(i));
    }
  } catch (const PackError& problem) {
    CHECK(!std::string(problem.what()).empty() && !problem.file.empty());
    return problem.kind;
  }
  CHECK(false && "the pack was read");
  return {};
}

void reads_what_was_written() {
  const TemporaryFolder folder;
  PackBuilder(bodies()).write(folder / "pack");
  const PackReader pack(folder / "pack");
  const auto expected = bodies();
  CHECK(pack.sample_count() == 5 && pack.shard_count() == 3);
  CHECK(pack.class_name(0) == "class" && pack.folder(0) == "class");
  CHECK(pack.mtimes()[4] == 4 && pack.modes()[0] == 0100644 && pack.labels()[2] == 0);
  for (std::uint64_t i = 0; i < expected.size(); ++i) {
    CHECK(read(pack, i) == expected[i]);
    CHECK(pack.find("class/" + std::to_string(i)) == static_cast<std::int64_t>(i));
  }
  CHECK(pack.find("class") == -1 && pack.find("class/5") == -1 && pack.find("") == -1);
  CHECK((read_batch(pack, {4, 0, 0, 2}) ==
         std::vector{expected[4], expected[0], expected[0], expected[2]}));
  CHECK(read_batch(pack, {}).empty());
  CHECK(pack.verify(0, 1000).empty());
  CHECK_THROWS(read(pack, 5), std::out_of_range);
  CHECK_THROWS(read_batch(pack, {0, -1}), std::out_of_range);
  CHECK_THROWS(pack.name(5), std::out_of_range);
}

void reads_an_empty_pack() {
  const TemporaryFolder folder;
  PackBuilder({}).write(folder / "pack");
  const PackReader pack(folder / "pack");
  CHECK(pack.sample_count() == 0 && pack.find("x") == -1 && pack.verify(0, 10).empty());
}

void threads_share_a_reader() {
  const TemporaryFolder folder;
  PackBuilder(bodies()).write(folder / "pack");
  const PackReader pack(folder / "pack");
  const auto expected = bodies();
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        CHECK(read_batch(pack, {0, 1, 2, 3, 4}) == expected);
        CHECK(pack.find("class/3") == 3);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

void names_the_damaged_sample() {
  const TemporaryFolder folder;
  PackBuilder builder(bodies());
  builder.shards[1][64 + 150'000] ^= 1;
  builder.write(folder / "pack");
  const PackReader pack(folder / "pack");
  CHECK(read(pack, 0) == "first");
  try {
    read_batch(pack, {0, 2});
    CHECK(false && "a damaged sample was returned");
  } catch (const PackError& problem) {
    CHECK(problem.kind == PackError::Kind::sample && problem.sample == 2 && problem.shard == 1);
    CHECK(problem.expected != problem.found);
  }
  const auto bad = pack.verify(0, 5);
  CHECK(bad.size() == 1 && bad[0].sample == 2);
}

void refuses_newer_formats() {
  const TemporaryFolder folder;
  PackBuilder newer(bodies());
  newer.header.version = 2;
  newer.write(folder / "newer");
  CHECK(failure(folder / "newer") == PackError::Kind::version);
  PackBuilder required(bodies());
  required.extras = {{77, paceline::section_required}};
  required.write(folder / "required");
  CHECK(failure(folder / "required") == PackError::Kind::version);
  PackBuilder optional(bodies());
  optional.extras = {{77, 0}, {78, 0}};
  optional.write(folder / "optional");
  CHECK(survives_everything(folder / "optional"));
}

void refuses_what_does_not_fit() {
  const TemporaryFolder folder;
  constexpr std::uint64_t huge = UINT64_MAX;
  int count = 0;
  const auto refused = [&](PackBuilder& builder) {
    const std::string path = folder / std::to_string(count++);
    builder.write(path);
    CHECK(failure(path) == PackError::Kind::corrupt);
    CHECK(!survives_everything(path));
  };
  const auto poked = [&](Section id, std::size_t index, auto value) {
    PackBuilder builder(bodies());
    builder.poke(id, index, value);
    refused(builder);
  };
  for (const std::uint64_t value : {huge, huge - 63, std::uint64_t{1} << 63, std::uint64_t{1} << 32}) {
    poked(Section::offsets, 2, value);
    poked(Section::lengths, 2, value);
    poked(Section::name_offsets, 3, value);
    poked(Section::name_offsets, 5, value);
    poked(Section::shard_lengths, 1, value);
  }
  poked(Section::shards, 0, std::uint32_t{3});
  poked(Section::shards, 0, UINT32_MAX);
  poked(Section::lengths, 4, std::uint64_t{65});  // one byte beyond its shard
  const auto counted = [&](auto set) {
    PackBuilder builder(bodies());
    set(builder.header);
    refused(builder);
  };
  for (const std::uint64_t value : {huge, huge / 8, huge / 8 + 2, std::uint64_t{6}, std::uint64_t{4}}) {
    counted([&](auto& header) { header.sample_count = value; });
    counted([&](auto& header) { header.folder_count = value; });
  }
  counted([](auto& header) { header.class_count = UINT32_MAX; });
  counted([](auto& header) { header.shard_count = UINT32_MAX; });
  counted([](auto& header) { header.shard_count = 2; });
  counted([](auto& header) { header.version = 0; });
  for (std::uint32_t id = 1; id <= paceline::last_section; ++id) {
    PackBuilder builder(bodies());
    builder.sections.erase(id);
    refused(builder);
  }
  PackBuilder swapped(bodies());
  std::swap(swapped.shards[0], swapped.shards[2]);
  refused(swapped);
}

void refuses_files_that_are_cut_off() {
  const TemporaryFolder folder;
  const PackBuilder builder(bodies());
  const std::string index = builder.index();
  for (std::size_t size = 0; size < index.size(); size += size < 600 ? 1 : 37) {
    builder.write(folder / "pack");
    PackBuilder::write(folder / "pack/index.pace", index.substr(0, size));
    CHECK(failure(folder / "pack") == PackError::Kind::corrupt);
  }
  for (const std::size_t size : {0U, 1U, 63U, 64U, 4096U, 200'063U}) {
    builder.write(folder / "pack");
    std::filesystem::resize_file(folder / "pack/shard-00001.pace", size);
    CHECK(failure(folder / "pack") == PackError::Kind::corrupt);
  }
  std::filesystem::remove(folder / "pack/shard-00001.pace");
  CHECK(failure(folder / "pack") == PackError::Kind::io);
  CHECK(mkfifo((folder / "pack/shard-00001.pace").c_str(), 0600) == 0);
  CHECK(failure(folder / "pack") == PackError::Kind::corrupt);  // and does not wait for a writer
  CHECK(failure(folder / "none") == PackError::Kind::io);
}

void flipped_bytes_do_no_harm() {
  const TemporaryFolder folder;
  const PackBuilder builder({"first", "", "third"});
  builder.write(folder / "pack");
  const std::string index = builder.index();
  for (std::size_t at = 0; at < index.size(); ++at) {
    std::string flipped = index;
    flipped[at] = static_cast<char>(flipped[at] ^ 0x10);
    PackBuilder::write(folder / "pack/index.pace", flipped);
    survives_everything(folder / "pack");
  }
}

// Random damage under correct checksums: what a hostile author would send.
void hostile_indices_do_no_harm() {
  const TemporaryFolder folder;
  std::mt19937 random(1955);
  int refused = 0;
  for (int round = 0; round < 600; ++round) {
    PackBuilder builder({"first", "", "third", std::string(300, 'z')});
    for (auto changes = 1 + random() % 3; changes > 0; --changes) {
      const auto id = static_cast<std::uint32_t>(1 + random() % paceline::last_section);
      std::string& section = builder.sections[id];
      switch (random() % 4) {
        case 0:
          section.resize(random() % (2 * section.size() + 1));
          break;
        case 1:
          if (section.size() >= 8) {
            const std::uint64_t wild = std::uint64_t{random()} << (random() % 33);
            std::memcpy(section.data() + random() % (section.size() - 7), &wild, sizeof wild);
          }
          break;
        case 2:
          if (!section.empty()) section[random() % section.size()] = static_cast<char>(random());
          break;
        default:
          reinterpret_cast<char*>(&builder.header)[12 + random() % 36] =
              static_cast<char>(random());
      }
    }
    builder.write(folder / "pack");
    refused += survives_everything(folder / "pack") ? 0 : 1;
  }
  CHECK(refused > 300);
}

void hostile_tables_do_no_harm() {
  const TemporaryFolder folder;
  const PackBuilder builder({"first", "second"});
  builder.write(folder / "pack");
  const std::string good = builder.index();
  std::mt19937 random(1977);
  for (int round = 0; round < 600; ++round) {
    std::string bytes = good;
    const std::size_t at = 64 + random() % (14 * 32);
    const std::uint64_t wild = round % 2 == 0 ? random() % 4096 : std::uint64_t{random()} << 32;
    std::memcpy(bytes.data() + at / 8 * 8, &wild, sizeof wild);
    const std::uint32_t table = paceline::crc32c(bytes.data() + 64, 14 * 32);
    std::memcpy(bytes.data() + 56, &table, sizeof table);
    const std::uint32_t head = paceline::crc32c(bytes.data(), 60);
    std::memcpy(bytes.data() + 60, &head, sizeof head);
    PackBuilder::write(folder / "pack/index.pace", bytes);
    survives_everything(folder / "pack");
  }
}

}  // namespace

int main() {
  reads_what_was_written();
  reads_an_empty_pack();
  threads_share_a_reader();
  names_the_damaged_sample();
  refuses_newer_formats();
  refuses_what_does_not_fit();
  refuses_files_that_are_cut_off();
  flipped_bytes_do_no_harm();
  hostile_indices_do_no_harm();
  hostile_tables_do_no_harm();
}
