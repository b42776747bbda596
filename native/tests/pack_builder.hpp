// Writes packs, good ones and any wrong one that a test asks for, with all checksums in order.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "check.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/pack_reader.hpp"

struct PackBuilder {
  struct Extra {
    std::uint32_t id;
    std::uint32_t flags;
  };

  paceline::PackHeader header{};
  std::map<std::uint32_t, std::string> sections;
  std::vector<std::string> shards;
  std::map<std::uint32_t, std::uint32_t> widths;  // of narrow columns
  std::vector<Extra> extras;  // sections of one byte that version 1 does not know
  bool has_sums = false;      // of blocks; a section of them that is there is left as it is
  bool seal = true;           // recompute the checksums of the header and the table

  // Samples "class/0", "class/1"... with these bodies, `per_shard` in each shard.
  explicit PackBuilder(const std::vector<std::string>& bodies, std::size_t per_shard = 2) {
    std::vector<std::uint64_t> offsets, lengths, name_offsets{0}, shard_lengths;
    std::vector<std::uint32_t> shard_of, checksums, modes;
    std::vector<std::int32_t> labels;
    std::vector<std::int64_t> mtimes;
    std::string names;
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      if (i % per_shard == 0) shards.push_back(shard_header(shards.size()));
      std::string& shard = shards.back();
      offsets.push_back(shard.size());
      lengths.push_back(bodies[i].size());
      shard_of.push_back(static_cast<std::uint32_t>(shards.size() - 1));
      checksums.push_back(paceline::crc32c(bodies[i].data(), bodies[i].size()));
      labels.push_back(0);
      modes.push_back(0100644);
      mtimes.push_back(static_cast<std::int64_t>(i));
      names += "class/" + std::to_string(i);
      name_offsets.push_back(names.size());
      shard += bodies[i];
      shard.resize((shard.size() + 63) / 64 * 64);
    }
    for (const std::string& shard : shards) shard_lengths.push_back(shard.size());
    std::memcpy(header.magic, "PACEPACK", 8);
    header.version = 1;
    header.sample_count = bodies.size();
    header.folder_count = header.class_count = 1;
    header.shard_count = static_cast<std::uint32_t>(shards.size());
    using paceline::Section;
    set(Section::offsets, offsets);
    set(Section::lengths, lengths);
    set(Section::shards, shard_of);
    set(Section::checksums, checksums);
    set(Section::labels, labels);
    set(Section::modes, modes);
    set(Section::mtimes, mtimes);
    set(Section::name_offsets, name_offsets);
    (*this)[Section::names] = names;
    set(Section::folder_offsets, std::vector<std::uint64_t>{0, 5});
    (*this)[Section::folders] = "class";
    set(Section::class_offsets, std::vector<std::uint64_t>{0, 5});
    (*this)[Section::classes] = "class";
    set(Section::shard_lengths, shard_lengths);
  }

  // Adds what format version 2 stores beside.
  PackBuilder& version2() {
    using paceline::Section;
    header.version = 2;
    const std::uint64_t count = header.sample_count;
    set(Section::folder_samples, std::vector<std::uint64_t>{0, count});
    set(Section::folder_ends, std::vector<std::uint64_t>{1});
    std::vector<std::pair<std::uint64_t, std::uint64_t>> hashes;  // with the sample
    for (std::uint64_t i = 0; i < count; ++i) {
      hashes.emplace_back(paceline::name_hash("class/" + std::to_string(i)), i);
    }
    std::sort(hashes.begin(), hashes.end());
    const auto slots = std::bit_ceil(std::max<std::uint64_t>(2 * count, 2));
    std::vector<std::uint64_t> table(slots, 0);
    std::uint64_t next = 0;
    for (const auto& [hash, sample] : hashes) {
      next = std::max(next, hash >> (64 - std::countr_zero(slots)));
      if (next >= table.size()) table.resize(next + 1);
      table[next++] = (hash & 0xFFFFFF) << 40 | (sample + 1);
    }
    set(Section::name_table, table);
    return *this;
  }

  // Adds to what version 2 stores what version 3 has beside: narrow columns, and sums of blocks.
  PackBuilder& version3() {
    using paceline::Section;
    version2();
    header.version = 3;
    has_sums = true;
    narrow<std::uint64_t, std::uint32_t>(Section::offsets);
    narrow<std::uint64_t, std::uint32_t>(Section::lengths);
    narrow<std::uint32_t, std::uint8_t>(Section::shards);
    narrow<std::int64_t, std::int16_t>(Section::mtimes);
    narrow<std::int32_t, std::int8_t>(Section::labels, /*constant=*/true);
    narrow<std::uint32_t, std::uint16_t>(Section::modes, /*constant=*/true);
    return *this;
  }

  template <class Wide, class Narrow>
  void narrow(paceline::Section id, bool constant = false) {
    const std::string wide = (*this)[id];
    std::vector<Narrow> values;
    for (std::size_t at = 0; at < wide.size() && !(constant && at > 0); at += sizeof(Wide)) {
      Wide value{};
      std::memcpy(&value, wide.data() + at, sizeof value);
      values.push_back(static_cast<Narrow>(value));
    }
    set(id, values);
    widths[static_cast<std::uint32_t>(id)] = sizeof(Narrow);
  }

  static void add_sums(std::string& sums, const std::string& section) {
    for (std::size_t at = 0; at < section.size(); at += paceline::sum_block_bytes) {
      const std::size_t size = std::min<std::size_t>(section.size() - at, paceline::sum_block_bytes);
      const std::uint32_t sum = paceline::crc32c(section.data() + at, size);
      sums.append(reinterpret_cast<const char*>(&sum), sizeof sum);
    }
  }

  // Makes the shards files of the user's own, of which there are no checksums; what the files are,
  // `put_states` and tests fill in.
  PackBuilder& in_place(paceline::SourceKind kind, std::uint64_t transaction = 0) {
    using paceline::Section;
    std::string names;
    std::vector<std::uint64_t> name_offsets{0};
    for (std::size_t i = 0; i < shards.size(); ++i) {
      names += "shard-0000" + std::to_string(i) + ".pace";
      name_offsets.push_back(names.size());
    }
    set(Section::files, name_offsets);
    (*this)[Section::files] += names;
    const paceline::SourcesHeader sources{kind, 0, transaction, 256, 0, 0};
    (*this)[Section::sources].assign(reinterpret_cast<const char*>(&sources), sizeof sources);
    (*this)[Section::sources].resize(sizeof sources + shards.size() * sizeof(paceline::SourceState));
    sections.erase(static_cast<std::uint32_t>(Section::checksums));
    return *this;
  }

  std::string& operator[](paceline::Section id) {
    return sections[static_cast<std::uint32_t>(id)];
  }

  template <class T>
  void set(paceline::Section id, const std::vector<T>& values) {
    (*this)[id].assign(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }

  template <class T>
  void poke(paceline::Section id, std::size_t index, T value) {
    std::string& section = (*this)[id];
    CHECK((index + 1) * sizeof(T) <= section.size());
    std::memcpy(section.data() + index * sizeof(T), &value, sizeof value);
  }

  static std::string shard_header(std::size_t shard) {
    paceline::ShardHeader head{};
    std::memcpy(head.magic, "PACESHRD", 8);
    head.version = 1;
    head.shard = static_cast<std::uint32_t>(shard);
    head.checksum = paceline::crc32c(&head, 60);
    return {reinterpret_cast<const char*>(&head), sizeof head};
  }

  std::string index() const {
    std::vector<paceline::SectionEntry> table;
    std::string body;
    auto all = sections;
    if (has_sums && !all.contains(26)) {
      std::string sums;
      for (const auto& [id, content] : sections) add_sums(sums, content);
      for (std::size_t i = 0; i < extras.size(); ++i) add_sums(sums, "?");
      all[26] = sums;
    }
    const std::size_t start = (64 + 32 * (all.size() + extras.size()) + 63) / 64 * 64;
    const auto width_of = [&](std::uint32_t id) {
      const auto found = widths.find(id);
      return found == widths.end() ? 0 : found->second;
    };
    const auto add = [&](std::uint32_t id, std::uint32_t flags, const std::string& content) {
      table.push_back({id, flags, start + body.size(), content.size(),
                       paceline::crc32c(content.data(), content.size()), width_of(id)});
      body += content;
      body.resize((body.size() + 63) / 64 * 64);
    };
    for (const auto& [id, content] : all) add(id, paceline::section_required, content);
    for (const Extra& extra : extras) add(extra.id, extra.flags, "?");
    const std::size_t table_bytes = table.size() * sizeof(paceline::SectionEntry);
    paceline::PackHeader head = header;
    if (seal) {
      head.section_count = static_cast<std::uint32_t>(table.size());
      head.index_bytes = start + body.size();
      head.table_checksum = paceline::crc32c(table.data(), table_bytes);
      head.header_checksum = paceline::crc32c(&head, 60);
    }
    std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
    bytes.append(reinterpret_cast<const char*>(table.data()), table_bytes);
    bytes.resize(start);
    return bytes + body;
  }

  static void write(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
  }

  void write(const std::string& folder) const {
    mkdir(folder.c_str(), 0755);
    write(folder + "/index.pace", index());
    for (std::size_t i = 0; i < shards.size(); ++i) {
      char name[32];
      std::snprintf(name, sizeof name, "/shard-%05u.pace", static_cast<unsigned>(i));
      write(folder + name, shards[i]);
    }
  }
};
