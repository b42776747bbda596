// The pack reader: good packs are read back, and no file, however hostile, gets past a PackError.
#include "paceline/pack_reader.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <chrono>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <thread>

#include "check.hpp"
#include "pack_builder.hpp"
#include "paceline/codecs.hpp"

using paceline::PackError;
using paceline::PackReader;
using paceline::ReadOptions;
using paceline::Section;
using paceline::Verify;

namespace {

std::vector<std::string> bodies() {
  return {"first", "", std::string(200'000, 'x'), "fourth", std::string(64, 'y')};
}

std::vector<std::string> read_batch(const PackReader& pack, const std::vector<std::int64_t>& ids) {
  std::vector<std::int64_t> offsets(ids.size() + 1);
  std::string buffer(pack.plan_batch(ids, offsets), '\0');
  pack.read_batch(ids, offsets, std::as_writable_bytes(std::span(buffer)));
  std::vector<std::string> result;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto begin = static_cast<std::size_t>(offsets[i]);
    result.push_back(buffer.substr(begin, static_cast<std::size_t>(offsets[i + 1]) - begin));
  }
  return result;
}

std::string read(const PackReader& pack, std::uint64_t sample) {
  return read_batch(pack, {static_cast<std::int64_t>(sample)})[0];
}

// Does all that a reader can do; the only way out but success is a PackError.
bool survives_everything(const std::string& folder) {
  try {
    const PackReader pack(folder);
    const auto& index = pack.index();
    for (const char* name : {"", "class/0", "class/3", "class/9", "zzz"}) index.find(name);
    for (const char* name : {"", "class", "zzz"}) index.find_folder(name);
    static_cast<void>(pack.verify(0, index.sample_count()));
    for (std::uint64_t i = 0; i < index.sample_count(); ++i) {
      const auto id = static_cast<std::int64_t>(i);
      read(pack, i);
      static_cast<void>(pack.views({&id, 1}));
    }
    for (std::uint64_t i = 0; i < index.folder_count(); ++i) {
      static_cast<void>(index.folder(i));
      static_cast<void>(index.folder_samples(i));
      static_cast<void>(index.folder_end(i));
    }
    for (std::uint64_t i = 0; i < index.class_count(); ++i) static_cast<void>(index.class_name(i));
    for (std::uint64_t i = 0; i < index.sample_count(); ++i) {
      static_cast<void>(index.labels()[i] + index.modes()[i] + index.mtimes()[i]);
    }
    index.check_content();
    return true;
  } catch (const PackError&) {
    return false;
  }
}

PackError::Kind failure(const std::string& folder) {
  try {
    const PackReader pack(folder);
    for (std::uint64_t i = 0; i < pack.index().sample_count(); ++i) {
      read(pack, i);
      static_cast<void>(pack.index().name(i));
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
  CHECK(pack.index().sample_count() == 5 && pack.index().shard_count() == 3);
  CHECK(pack.index().class_name(0) == "class" && pack.index().folder(0) == "class");
  CHECK(pack.index().mtimes()[4] == 4 && pack.index().modes()[0] == 0100644 && pack.index().labels()[2] == 0);
  for (std::uint64_t i = 0; i < expected.size(); ++i) {
    CHECK(read(pack, i) == expected[i]);
    CHECK(pack.index().find("class/" + std::to_string(i)) == static_cast<std::int64_t>(i));
  }
  CHECK(pack.index().find("class") == -1 && pack.index().find("class/5") == -1 && pack.index().find("") == -1);
  CHECK((read_batch(pack, {4, 0, 0, 2}) ==
         std::vector{expected[4], expected[0], expected[0], expected[2]}));
  CHECK(read_batch(pack, {}).empty());
  CHECK(pack.verify(0, 1000).empty());
  CHECK_THROWS(read(pack, 5), std::out_of_range);
  CHECK_THROWS(read_batch(pack, {0, -1}), std::out_of_range);
  CHECK_THROWS(pack.index().name(5), std::out_of_range);
}

void reads_an_empty_pack() {
  const TemporaryFolder folder;
  PackBuilder({}).write(folder / "pack");
  const PackReader pack(folder / "pack");
  CHECK(pack.index().sample_count() == 0 && pack.index().find("x") == -1 && pack.verify(0, 10).empty());
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
        CHECK(pack.index().find("class/3") == 3);
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
    CHECK(problem.name == "class/2");
  }
  const auto bad = pack.verify(0, 5);
  CHECK(bad.size() == 1 && bad[0].sample == 2 && bad[0].shard == 1 && bad[0].name == "class/2");
}

void refuses_newer_formats() {
  const TemporaryFolder folder;
  PackBuilder newer(bodies());
  newer.header.version = 4;
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
  for (std::uint32_t id = 1; id <= 14; ++id) {  // all that version 1 has
    PackBuilder builder(bodies());
    builder.sections.erase(id);
    refused(builder);
  }
  PackBuilder swapped(bodies());
  std::swap(swapped.shards[0], swapped.shards[2]);
  refused(swapped);
}

void refuses_truncated_files() {
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

void flipped_bytes_do_no_harm(PackBuilder builder) {
  const TemporaryFolder folder;
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
    if (round % 3 == 1) builder.version2();
    if (round % 3 == 2) builder.version3();
    for (auto changes = 1 + random() % 3; changes > 0; --changes) {
      const auto id = static_cast<std::uint32_t>(1 + random() % paceline::last_section);
      std::string& section = builder.sections[id];
      switch (random() % 5) {
        case 4:
          builder.widths[id] = static_cast<std::uint32_t>(random() % 10);
          break;
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
  CHECK(refused > 200);
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

void reads_version_2() {
  const TemporaryFolder folder;
  std::vector<std::string> many;
  for (int i = 0; i < 300; ++i) many.push_back(std::string(static_cast<std::size_t>(i) * 7, 'q'));
  PackBuilder(many, 50).version2().write(folder / "pack");
  const PackReader pack(folder / "pack");
  for (std::size_t i = 0; i < many.size(); ++i) {
    CHECK(read(pack, i) == many[i]);
    CHECK(pack.index().find("class/" + std::to_string(i)) == static_cast<std::int64_t>(i));
  }
  CHECK(pack.index().find("class/300") == -1 && pack.index().find("") == -1);
  CHECK(pack.index().find_folder("class") == 0 && pack.index().find_folder("clas") == -1);
  CHECK((pack.index().folder_samples(0) == std::pair<std::uint64_t, std::uint64_t>(0, 300)));
  CHECK(pack.index().folder_end(0) == 1);
}

PackBuilder many_samples(std::size_t count) {
  std::vector<std::string> many;
  for (std::size_t i = 0; i < count; ++i) many.push_back(std::string(i % 90, static_cast<char>(i)));
  return PackBuilder(many, count / 3 + 1);
}

void versions_2_and_3_read_the_same() {
  const TemporaryFolder folder;
  constexpr std::size_t count = 20'000;  // several blocks of each column
  many_samples(count).version2().write(folder / "2");
  many_samples(count).version3().write(folder / "3");
  const PackReader old(folder / "2");
  const PackReader pack(folder / "3");
  CHECK(pack.index().version() == 3 && pack.index().bytes().size() < old.index().bytes().size());
  std::vector<std::int64_t> ids;
  for (std::size_t i = 0; i < count; ++i) ids.push_back(static_cast<std::int64_t>(i * 7 % count));
  CHECK(read_batch(pack, ids) == read_batch(old, ids));
  for (std::uint64_t i = 0; i < count; ++i) {
    CHECK(pack.index().name(i) == old.index().name(i) && pack.index().labels()[i] == 0);
    CHECK(pack.index().modes()[i] == 0100644);
    // Of 2 bytes, and signed: it goes round.
    CHECK(pack.index().mtimes()[i] == static_cast<std::int16_t>(i));
    CHECK(pack.index().find(old.index().name(i)) == static_cast<std::int64_t>(i));
  }
  pack.index().verify_sections();
  old.index().verify_sections();
}

std::size_t offset_of(const std::string& index, Section id) {
  paceline::SectionEntry entry{};
  for (std::size_t at = 64; entry.id != static_cast<std::uint32_t>(id); at += 32) {
    std::memcpy(&entry, index.data() + at, sizeof entry);
  }
  return entry.offset;
}

// What a block holds is verified when it is first touched, and not before.
void damage_of_the_index_is_found_where_it_is_touched() {
  const TemporaryFolder folder;
  constexpr std::size_t count = 40'000;
  const PackBuilder builder = many_samples(count).version3();
  builder.write(folder / "pack");
  std::string index = builder.index();
  // An entry of the second block.
  constexpr std::uint64_t damaged = paceline::sum_block_bytes / 4 + 5;
  index[offset_of(index, Section::checksums) + 4 * damaged] ^= 1;
  PackBuilder::write(folder / "pack/index.pace", index);
  const PackReader pack(folder / "pack");
  CHECK(read(pack, 0).empty() && read(pack, 89) == std::string(89, static_cast<char>(89)));
  for (int round = 0; round < 2; ++round) {
    for (const std::uint64_t sample : {damaged, damaged + 1000}) {
      try {
        read(pack, sample);
        CHECK(false && "an entry of a damaged block was used");
      } catch (const PackError& problem) {
        CHECK(problem.kind == PackError::Kind::corrupt && problem.file == folder / "pack/index.pace");
        CHECK(std::string(problem.what()).starts_with("section 4, bytes 65536 to 131071: checksum"));
      }
    }
  }
  CHECK(read(pack, 2 * paceline::sum_block_bytes / 4).size() == 2 * paceline::sum_block_bytes / 4 % 90);
  CHECK_THROWS(pack.index().check_content(), PackError);
  CHECK_THROWS(pack.index().verify_sections(), PackError);
  const auto bad = pack.verify(damaged - 1, damaged + 1);
  CHECK(bad.size() == 2 && bad[0].name == "class/" + std::to_string(damaged - 1));
}

// What an index of data in place says of its files is verified as its columns are.
void damage_is_found_where_a_file_in_place_is_named() {
  const TemporaryFolder folder;
  constexpr std::uint32_t count = 6'000, last = count - 1;
  PackBuilder builder = PackBuilder(std::vector<std::string>(count, "body"), 1).version2();
  builder.header.version = 3;
  builder.has_sums = true;
  builder.in_place(paceline::SourceKind::files);
  const std::string index = builder.index();
  const auto opened = [&](Section section, std::size_t damaged) {
    std::string bytes = index;
    bytes[offset_of(index, section) + damaged] ^= 1;
    PackBuilder::write(folder / "side", bytes);
    return std::make_unique<paceline::PackIndex>(folder / "side");
  };
  const auto names = opened(Section::files, builder[Section::files].size() - 5);
  CHECK(names->shard_path(0) == folder / "shard-00000.pace" && names->source_state(last).size == 0);
  CHECK_THROWS(names->shard_path(last), PackError);
  const auto states = opened(Section::sources, builder[Section::sources].size() - 5);
  CHECK(states->source_state(0).size == 0 && states->shard_path(last) == folder / "shard-00005999.pace");
  CHECK_THROWS(states->source_state(last), PackError);
  const auto bounds = opened(Section::files, 8 * last);
  CHECK_THROWS(bounds->shard_path(0), PackError);  // the same block
  CHECK_THROWS(opened(Section::sources, 20), PackError);  // what all the files are
}

// Where there are no checksums, the last sample's end tells the number of extents.
void extents_in_place_are_counted_without_checksums() {
  const TemporaryFolder folder;
  const auto write = [&](std::uint64_t end) {
    PackBuilder builder = PackBuilder({"first", "second", "third", "last"}, 4).version3();
    builder.set(Section::first_extents, std::vector<std::uint64_t>{0, 1, 3, end});
    builder.header.sample_count = 3;
    builder.narrow<std::int16_t, std::int16_t>(Section::mtimes, /*constant=*/true);
    builder[Section::name_offsets].resize(4 * 8);
    builder.in_place(paceline::SourceKind::files);
    PackBuilder::write(folder / "side", builder.index());
    return paceline::PackIndex(folder / "side").extent_count();
  };
  CHECK(write(4) == 4);
  for (const std::uint64_t end : {std::uint64_t{3}, std::uint64_t{5}, std::uint64_t{1} << 40}) {
    CHECK_THROWS(write(end), PackError);
  }
}

// Threads that touch the same blocks first all get what is right.
void threads_verify_blocks_side_by_side() {
  const TemporaryFolder folder;
  constexpr std::size_t count = 60'000;
  many_samples(count).version3().write(folder / "pack");
  for (int round = 0; round < 5; ++round) {
    const PackReader pack(folder / "pack");
    std::vector<std::thread> threads;
    for (std::uint64_t thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        std::vector<std::int64_t> ids;
        for (std::uint64_t i = 0; i < 2000; ++i) {
          ids.push_back(static_cast<std::int64_t>((i * 7919 + thread * 31) % count));
        }
        const auto found = read_batch(pack, ids);
        for (std::size_t i = 0; i < ids.size(); ++i) {
          const auto sample = static_cast<std::size_t>(ids[i]);
          CHECK(found[i] == std::string(sample % 90, static_cast<char>(sample)));
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

void refuses_sums_and_widths_that_do_not_fit() {
  const TemporaryFolder folder;
  int count = 0;
  const auto refused = [&](auto change) {
    PackBuilder builder = PackBuilder(bodies()).version3();
    change(builder);
    const std::string path = folder / std::to_string(count++);
    builder.write(path);
    CHECK(failure(path) == PackError::Kind::corrupt);
  };
  for (const std::size_t size : {0U, 3U, 4U, 1000U}) {
    refused([&](PackBuilder& builder) { builder[Section::block_sums] = std::string(size, 'x'); });
  }
  for (const std::uint32_t width : {3U, 5U, 8U, 16U, UINT32_MAX}) {
    refused([&](PackBuilder& builder) {
      builder.widths[static_cast<std::uint32_t>(Section::shards)] = width;
    });
  }
  for (const Section id : {Section::checksums, Section::name_offsets, Section::folder_ends}) {
    refused([&](PackBuilder& builder) {  // these are as wide as their types
      builder.widths[static_cast<std::uint32_t>(id)] = 4;
    });
  }
  refused([](PackBuilder& builder) { builder[Section::labels] += std::string(2, '\0'); });  // neither one nor all
  refused([](PackBuilder& builder) { builder[Section::labels].clear(); });
  PackBuilder unknown = PackBuilder(bodies()).version3();
  unknown.extras = {{77, 0}};
  unknown.write(folder / "unknown");  // has a sum all the same
  CHECK(survives_everything(folder / "unknown"));
}

void a_batch_beyond_any_memory_is_an_error_that_names_a_sample() {
  const TemporaryFolder folder;
  PackBuilder builder({std::string(100, 'a'), std::string(100, 'b')}, 2);
  const auto end = std::uint64_t{1} << 62;
  builder.set(Section::lengths, std::vector<std::uint64_t>{end, end});
  builder.set(Section::shard_lengths, std::vector<std::uint64_t>{end + 4096});
  builder.write(folder / "pack");
  // No file is so long: the index alone is asked.
  const PackReader pack(folder / "pack", {.index_only = true});
  std::vector<std::int64_t> offsets(4);
  try {
    pack.plan_batch(std::vector<std::int64_t>{1, 0, 1}, offsets);
    CHECK(false && "the sum of the lengths went round");
  } catch (const PackError& problem) {
    CHECK(problem.kind == PackError::Kind::memory && problem.sample == 0 && problem.name == "class/0");
  }
}

// Three extents become samples of two pieces, none, and one that is compressed.
void reads_chunks_and_codecs() {
  const TemporaryFolder folder;
  const std::string plain(100'000, 'z');
  std::string frame(paceline::zstd_bound(plain.size()), '\0');
  const auto* source = reinterpret_cast<const std::byte*>(plain.data());
  auto* target = reinterpret_cast<std::byte*>(frame.data());
  frame.resize(paceline::zstd_compress({source, plain.size()}, {target, frame.size()}, 3));
  PackBuilder builder({"first, ", "second", frame}, 1);
  builder.version2();
  builder.poke(Section::lengths, 2, std::uint64_t{plain.size()});
  builder.poke(Section::checksums, 2, paceline::crc32c(plain.data(), plain.size()));
  builder.set(Section::stored_lengths, std::vector<std::uint64_t>{7, 6, frame.size()});
  builder.set(Section::codecs, std::vector<std::uint8_t>{0, 0, 1});
  builder.set(Section::first_extents, std::vector<std::uint64_t>{0, 2, 2, 3});
  builder.write(folder / "pack");
  for (const bool direct : {false, true}) {
    ReadOptions options;
    options.direct = direct;
    const PackReader pack(folder / "pack", options);
    try {
      CHECK((read_batch(pack, {2, 0, 1}) == std::vector<std::string>{plain, "first, second", ""}));
    } catch (const PackError& problem) {  // a file system without O_DIRECT
      CHECK(direct && problem.error == EINVAL);
    }
    CHECK(pack.verify(0, 3).empty());
    const std::int64_t ids[] = {0, 1, 2};
    const auto views = pack.views(ids);
    CHECK(!views[0] && views[1] && views[1]->empty() && !views[2]);
  }
  PackBuilder pieces = builder;  // of which one is encoded
  pieces.set(Section::first_extents, std::vector<std::uint64_t>{0, 3, 3, 3});
  pieces.write(folder / "pack");
  CHECK(failure(folder / "pack") == PackError::Kind::corrupt);
  builder.shards[2][70] ^= 1;
  builder.write(folder / "pack");
  CHECK(failure(folder / "pack") == PackError::Kind::sample);
  builder.poke(Section::codecs, 2, std::uint8_t{9});
  builder.write(folder / "pack");
  CHECK(failure(folder / "pack") == PackError::Kind::version);
  builder.poke(Section::codecs, 2, std::uint8_t{1});
  // Would be allocated: more than the format allows, or than so few bytes can stand for.
  for (const std::uint64_t claimed : {std::uint64_t{1} << 40, paceline::max_encoded_length}) {
    builder.poke(Section::lengths, 2, claimed);
    builder.write(folder / "pack");
    CHECK(failure(folder / "pack") == PackError::Kind::sample);
    CHECK(PackReader(folder / "pack").verify(0, 3).at(0).name == "class/2");
  }
}

// Flips a byte of the file as another process would, through the page cache or not.
void flip(const std::string& path, std::size_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(file.get() ^ 0x20);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

// Takes the pages of a mapped file out of the page table, as the kernel does to drop them.
void unmap_pages(const std::string& path, std::size_t first = 0, std::size_t last = SIZE_MAX) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (!line.ends_with(path)) continue;
    unsigned long begin = 0;
    unsigned long end = 0;
    CHECK(std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) == 2);
    if (last < SIZE_MAX) end = begin + (last + 1) * paceline::page_size;
    begin += first * paceline::page_size;
    CHECK(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED) == 0);
  }
}

void sync(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  CHECK(descriptor >= 0 && fsync(descriptor) == 0);
  close(descriptor);
}

void what_left_memory_is_verified_again() {
  const TemporaryFolder folder;
  const std::string shard = folder / "pack/shard-00000.pace";
  for (const bool evict : {true, false}) {
    for (const bool view : {true, false}) {
      PackBuilder({std::string(100'000, 'a'), std::string(100'000, 'b')}).write(folder / "pack");
      const PackReader pack(folder / "pack");
      const std::int64_t ids[] = {0, 1};
      for (int round = 0; round < 3; ++round) {
        CHECK(read(pack, 0)[99'999] == 'a' && read(pack, 1)[0] == 'b');
        CHECK(pack.views(ids)[1].has_value());
      }
      if (evict) {
        pack.evict();
      } else {
        unmap_pages(shard);  // behind the reader's back
      }
      flip(shard, 64 + 100'000 - 1);
      const auto use = [&] { return view ? pack.views(ids).size() : read(pack, 0).size(); };
      CHECK_THROWS(use(), PackError);
      CHECK(read(pack, 1)[0] == 'b');
      CHECK_THROWS(use(), PackError);
    }
  }
}

// A sample that shares a page with one that is brought back is verified again, too.
void neighbours_of_what_came_back_are_verified_again() {
  const TemporaryFolder folder;
  const std::string shard = folder / "pack/shard-00000.pace";
  PackBuilder({std::string(10'000, 'a'), std::string(10'000, 'b')}).write(folder / "pack");
  const PackReader pack(folder / "pack");
  for (int round = 0; round < 3; ++round) read_batch(pack, {0, 1});
  unmap_pages(shard);
  flip(shard, 64 + 9'999);  // the end of the first, in the page where the second begins
  CHECK(read(pack, 1)[0] == 'b');
  CHECK_THROWS(read(pack, 0), PackError);
}

// Also if they are large values in a leaf of LMDB: only those in pages of their own share none.
void neighbours_in_a_leaf_of_lmdb_are_verified_again() {
  const TemporaryFolder folder;
  const std::string shard = folder / "pack/shard-00000.pace";
  PackBuilder builder = PackBuilder({std::string(10'000, 'a'), std::string(10'000, 'b')}).version2();
  const std::string checksums = builder[Section::checksums];
  builder.in_place(paceline::SourceKind::lmdb, /*transaction=*/0x6262626262626262);
  builder.poke<std::uint32_t>(Section::sources, 4, 16'384);  // the page size
  builder[Section::checksums] = checksums;
  builder.write(folder / "pack");
  sync(shard);  // pages that are dirty are not trusted
  const PackReader pack(folder / "pack/index.pace");
  read_batch(pack, {0, 1});
  unmap_pages(shard);  // from the faults on, the reader asks which pages are there
  for (int round = 0; round < 3; ++round) read_batch(pack, {0, 1});
  flip(shard, 64 + 9'999);  // the end of the first, in the page where the second begins
  sync(shard);
  unmap_pages(shard, 2, 2);
  CHECK(read(pack, 1)[0] == 'b');
  CHECK_THROWS(read(pack, 0), PackError);
}

// The seam of decision 0002: a reader that trusts no page gives the same bytes and sees the same.
void reads_the_same_when_no_page_is_trusted() {
  for (const auto residency : {&paceline::trust_page_table, &paceline::verify_always}) {
    const TemporaryFolder folder;
    const std::string shard = folder / "pack/shard-00000.pace";
    PackBuilder({std::string(100'000, 'a'), std::string(300, 'b')}).write(folder / "pack");
    ReadOptions options;
    options.residency = residency;
    const PackReader pack(folder / "pack", options);
    const std::vector<std::string> expected{std::string(100'000, 'a'), std::string(300, 'b')};
    for (int round = 0; round < 3; ++round) CHECK(read_batch(pack, {0, 1}) == expected);
    const std::vector<std::int64_t> ids{0, 1};
    CHECK(pack.views(ids)[0].value().size() == 100'000);
    unmap_pages(shard);
    flip(shard, 64 + 50'000);
    CHECK_THROWS(read(pack, 0), PackError);
    CHECK_THROWS(pack.views(ids), PackError);
    CHECK(read(pack, 1) == expected[1] && pack.verify(0, 2).size() == 1);
  }
}

void notices_files_that_are_truncated_later() {
  const TemporaryFolder folder;
  PackBuilder({std::string(100'000, 'a')}).write(folder / "pack");
  const PackReader pack(folder / "pack");
  CHECK(read(pack, 0).size() == 100'000);
  pack.evict();
  std::filesystem::resize_file(folder / "pack/shard-00000.pace", 5'000);
  CHECK_THROWS(read(pack, 0), PackError);  // and no SIGBUS
  CHECK(pack.verify(0, 1).size() == 1);
}

// Right behind a good read, when all that is known says that the pages are there.
void a_file_that_shrinks_under_a_read_is_an_error_and_no_signal() {
  const std::vector<std::int64_t> ids{0, 1};
  for (const char* name : {"pack/shard-00000.pace", "pack/index.pace"}) {
    for (const auto policy : {Verify::first, Verify::always, Verify::never}) {
      const TemporaryFolder folder;
      PackBuilder({std::string(100'000, 'a'), std::string(100'000, 'b')}).write(folder / "pack");
      ReadOptions options;
      options.verify = policy;
      const PackReader pack(folder / "pack", options);
      for (int round = 0; round < 3; ++round) CHECK(read_batch(pack, ids).size() == 2);
      CHECK(pack.views(ids).size() == 2);
      std::filesystem::resize_file(folder / name, 50);
      CHECK_THROWS(read_batch(pack, ids), PackError);
      CHECK_THROWS(pack.views(ids), PackError);
      pack.prefetch(ids);
      CHECK(pack.verify(0, 2).size() == 2);
    }
  }
}

void threads_survive_a_shard_that_shrinks_and_grows() {
  const TemporaryFolder folder;
  const std::string shard = folder / "pack/shard-00000.pace";
  std::vector<std::string> large;
  for (char letter = 'a'; letter < 'i'; ++letter) large.emplace_back(30'000, letter);
  PackBuilder builder(large, large.size());
  builder.write(folder / "pack");
  ReadOptions options;
  options.threads = 3;
  const PackReader pack(folder / "pack", options);
  std::vector<std::int64_t> ids(large.size());
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  std::atomic<bool> is_over{false};
  std::thread vandal([&] {
    for (int round = 0; round < 20; ++round) {
      std::filesystem::resize_file(shard, 64 + 8192 * static_cast<std::size_t>(round));
      std::this_thread::yield();
      const int descriptor = open(shard.c_str(), O_WRONLY | O_CLOEXEC);
      const std::string& whole = builder.shards[0];
      CHECK(pwrite(descriptor, whole.data(), whole.size(), 0) ==
            static_cast<ssize_t>(whole.size()));
      close(descriptor);
    }
    is_over = true;
  });
  do {  // the vandal may be through before the first read
    try {
      CHECK(read_batch(pack, ids) == large);
    } catch (const PackError&) {
    }
  } while (!is_over);
  vandal.join();
}

// Swaps two entries of the index in place: each is consistent by itself.
void notices_an_index_that_is_changed_later() {
  const TemporaryFolder folder;
  PackBuilder builder({std::string(20'000, 'a'), std::string(20'000, 'b')});
  builder.write(folder / "pack");
  const PackReader pack(folder / "pack");
  CHECK(read(pack, 0)[0] == 'a');
  for (const Section id : {Section::offsets, Section::checksums}) {
    const std::string& column = builder[id];
    const std::size_t size = column.size() / 2;
    const std::string swapped = column.substr(size) + column.substr(0, size);
    std::fstream file(folder / "pack/index.pace", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(builder.index().find(column)));
    file << swapped;
  }
  CHECK_THROWS(read_batch(pack, {0, 1}), PackError);  // a batch looks at the file
  CHECK_THROWS(read(pack, 1), PackError);             // and what was found stays found
}

// A writer that has mapped a page which is dirty already: the file's times stay as they are.
void notices_what_a_writer_does_through_a_mapping() {
  const TemporaryFolder folder;
  const std::string shard = folder / "pack/shard-00000.pace";
  PackBuilder({std::string(100'000, 'a')}).write(folder / "pack");
  const int descriptor = open(shard.c_str(), O_RDWR | O_CLOEXEC);
  CHECK(descriptor >= 0 && fsync(descriptor) == 0);
  auto* const bytes = static_cast<char*>(
      mmap(nullptr, 100'064, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0));
  CHECK(bytes != MAP_FAILED);
  std::memset(bytes + 64, 'a', 100'000);  // what is there: from now on the pages are dirty
  ReadOptions options;
  const bool says_so = paceline::dirty_pages(shard, paceline::FileState::of(shard).inode, 0, 0) !=
                       paceline::DirtyPages::unknown;
  if (!says_so) options.trust_ns = 1;  // then trust ages
  const PackReader pack(folder / "pack", options);
  for (int round = 0; round < 3; ++round) CHECK(read(pack, 0).size() == 100'000);
  const auto before = paceline::FileState::of(shard);
  bytes[50'000] = 'b';
  CHECK(paceline::FileState::of(shard) == before);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(says_so ? 0 : 20);
  const auto read_until = [&] {
    do {
      static_cast<void>(read(pack, 0));
    } while (std::chrono::steady_clock::now() < deadline);
    return true;
  };
  CHECK_THROWS(read_until(), PackError);
  bytes[50'000] = 'a';
  CHECK(read(pack, 0).size() == 100'000);
  munmap(bytes, 100'064);
  close(descriptor);
}

// Where the times of the file say nothing at all.
void trust_ages() {
  const TemporaryFolder folder;
  const std::string shard = folder / "pack/shard-00000.pace";
  PackBuilder({std::string(100'000, 'a')}).write(folder / "pack");
  const auto residency = paceline::trust_page_table;
  const paceline::Mapping mapping(shard);
  const auto pages = residency(mapping.bytes());
  const auto sample = mapping.bytes().subspan(64, 100'000);
  pages->trust(sample);
  CHECK(pages->trusted(sample));
  pages->age();
  CHECK(pages->trusted(sample));
  pages->age();
  CHECK(!pages->trusted(sample));
  pages->trust(sample);
  pages->age();
  pages->trust(sample.first(50'000));  // half of it, and the page in the middle
  pages->age();
  CHECK(!pages->trusted(sample) && pages->trusted(sample.first(50'000)));
}

void policies_differ_in_what_they_check() {
  const TemporaryFolder folder;
  PackBuilder builder({std::string(100'000, 'a')});
  builder.shards[0][70] ^= 1;
  builder.write(folder / "pack");
  for (const auto policy : {Verify::first, Verify::always, Verify::never}) {
    ReadOptions options;
    options.verify = policy;
    const PackReader pack(folder / "pack", options);
    if (policy == Verify::never) {
      CHECK(read(pack, 0).size() == 100'000);
    } else {
      CHECK_THROWS(read(pack, 0), PackError);
    }
  }
}

// It would go on for some 20 minutes, and did: the limit of `ctest` is two.
void closing_a_pack_ends_a_prefetch_that_is_under_way() {
#if defined(__SANITIZE_THREAD__)  // whose address space for mappings is 1.5 TiB
  constexpr std::uint64_t hole = std::uint64_t{1} << 38;
#else
  constexpr std::uint64_t hole = std::uint64_t{1} << 41;
#endif
  const TemporaryFolder folder;
  PackBuilder builder({std::string(1000, 'a')});
  builder.set(Section::lengths, std::vector<std::uint64_t>{hole - 4096});
  builder.set(Section::shard_lengths, std::vector<std::uint64_t>{hole});
  builder.write(folder / "pack");
  std::filesystem::resize_file(folder / "pack/shard-00000.pace", hole);
  const PackReader pack(folder / "pack");
  const std::vector<std::int64_t> ids{0};
  for (int times = 0; times < 3; ++times) pack.prefetch(ids);
}

void threads_and_forks_share_large_batches() {
  const TemporaryFolder folder;
  std::vector<std::string> large;
  for (char one = 'a'; one < 'q'; ++one) large.emplace_back(400'000, one);
  PackBuilder(large, 3).version2().write(folder / "pack");
  ReadOptions options;
  options.threads = 4;
  const PackReader pack(folder / "pack", options);
  std::vector<std::int64_t> ids(large.size());
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  pack.prefetch(ids);
  for (int round = 0; round < 3; ++round) CHECK(read_batch(pack, ids) == large);
#if !defined(__SANITIZE_THREAD__)  // which cannot follow a fork of several threads
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    _exit(read_batch(pack, ids) == large && read_batch(pack, ids) == large ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

}  // namespace

int main() {
  reads_version_2();
  versions_2_and_3_read_the_same();
  damage_of_the_index_is_found_where_it_is_touched();
  damage_is_found_where_a_file_in_place_is_named();
  extents_in_place_are_counted_without_checksums();
  threads_verify_blocks_side_by_side();
  refuses_sums_and_widths_that_do_not_fit();
  a_batch_beyond_any_memory_is_an_error_that_names_a_sample();
  reads_chunks_and_codecs();
  what_left_memory_is_verified_again();
  neighbours_of_what_came_back_are_verified_again();
  neighbours_in_a_leaf_of_lmdb_are_verified_again();
  reads_the_same_when_no_page_is_trusted();
  notices_files_that_are_truncated_later();
  a_file_that_shrinks_under_a_read_is_an_error_and_no_signal();
  closing_a_pack_ends_a_prefetch_that_is_under_way();
  threads_survive_a_shard_that_shrinks_and_grows();
  notices_an_index_that_is_changed_later();
  notices_what_a_writer_does_through_a_mapping();
  trust_ages();
  policies_differ_in_what_they_check();
  threads_and_forks_share_large_batches();
  reads_what_was_written();
  reads_an_empty_pack();
  threads_share_a_reader();
  names_the_damaged_sample();
  refuses_newer_formats();
  refuses_what_does_not_fit();
  refuses_truncated_files();
  flipped_bytes_do_no_harm(PackBuilder({"first", "", "third"}));
  flipped_bytes_do_no_harm(PackBuilder({"first", "", "third"}).version3());
  hostile_indices_do_no_harm();
  hostile_tables_do_no_harm();
}
