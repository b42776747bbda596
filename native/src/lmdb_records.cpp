#include "paceline/lmdb_records.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "paceline/crc32c.hpp"
#include "paceline/fault_guard.hpp"
#include "paceline/page_cache.hpp"

namespace paceline {
namespace {

constexpr std::size_t header_bytes = lmdb_header_bytes;
constexpr std::size_t node_bytes = 8;     // of a node, before its key
constexpr std::uint32_t magic = 0xBEEFC0DE;
constexpr std::uint32_t data_version = 1;
constexpr std::uint64_t no_page = ~std::uint64_t{0};
constexpr std::uint32_t max_depth = 32;
constexpr std::uint32_t min_page_bytes = 256;
constexpr std::uint32_t max_page_bytes = 0x8000;

constexpr std::uint16_t branch_page = 0x01, leaf_page = 0x02, overflow_page = 0x04, meta_page = 0x08,
                        fixed_page = 0x20, sub_page = 0x40;
constexpr std::uint16_t page_kinds =
    branch_page | leaf_page | overflow_page | meta_page | fixed_page | sub_page;
constexpr std::uint16_t big_value = 0x01, sub_database = 0x02, duplicates = 0x04;
constexpr std::uint32_t reverse_key = 0x02, duplicate_keys = 0x04, integer_key = 0x08;

struct PageHeader {
  std::uint64_t number;
  std::uint16_t pad;
  std::uint16_t flags;
  std::uint16_t lower;  // where the free space within the page begins
  std::uint16_t upper;  // and where it ends
};
static_assert(sizeof(PageHeader) == header_bytes);

struct Tree {
  std::uint32_t pad;  // of the first tree: the page size
  std::uint16_t flags;
  std::uint16_t depth;
  std::uint64_t branch_pages;
  std::uint64_t leaf_pages;
  std::uint64_t overflow_pages;
  std::uint64_t entries;
  std::uint64_t root;
};
static_assert(sizeof(Tree) == 48);

struct Meta {
  std::uint32_t magic;
  std::uint32_t version;
  std::uint64_t address;
  std::uint64_t map_bytes;
  Tree free_pages;
  Tree main;
  std::uint64_t last_page;
  std::uint64_t transaction;
};
static_assert(sizeof(Meta) == 136);
// The part of a meta page that tells one commit from another.
constexpr std::size_t commit_offset = offsetof(Meta, main);
using CommitBytes = std::array<std::byte, sizeof(Meta) - commit_offset>;

LmdbCommit commit_of(const CommitBytes& bytes) {
  LmdbCommit commit;
  std::memcpy(&commit.transaction, bytes.data() + offsetof(Meta, transaction) - commit_offset,
              sizeof commit.transaction);
  commit.checksum = crc32c(bytes.data(), bytes.size());
  return commit;
}

[[noreturn]] void fail_source(const std::string& path, const std::string& why) {
  throw PackError(PackError::Kind::source, path, why);
}

// Copies bytes of the file; false if they are not there.
bool copy(std::span<const std::byte> file, std::uint64_t offset, std::span<std::byte> target) {
  if (offset > file.size() || target.size() > file.size() - offset) return false;
  return completes(FaultRange(file), [&] {
    std::memcpy(target.data(), file.data() + offset, target.size());
  });
}

template <class T>
bool copy_to(std::span<const std::byte> file, std::uint64_t offset, T& value) {
  return copy(file, offset, std::as_writable_bytes(std::span(&value, 1)));
}

template <class T>
T load(const std::vector<std::byte>& page, std::size_t at) {
  T value{};
  std::memcpy(&value, page.data() + at, sizeof value);
  return value;
}

Meta meta_at(const Mapping& file, std::uint64_t offset) {
  PageHeader header{};
  Meta meta{};
  if (!copy_to(file.bytes(), offset, header) ||
      !copy_to(file.bytes(), offset + header_bytes, meta)) {
    fail_source(file.path(), "it ends within its meta pages");
  }
  if ((header.flags & page_kinds) != meta_page || meta.magic != magic) {
    fail_source(file.path(), "not an LMDB database of a 64-bit machine");
  }
  if (meta.version != data_version) {
    throw PackError(PackError::Kind::unsupported, file.path(),
                    "its data version is " + std::to_string(meta.version) + ", and only version " +
                        std::to_string(data_version) + " is read in place");
  }
  return meta;
}

// Compares from the last byte to the first, as LMDB does with reverse keys, and with integers.
bool comes_before_reversed(std::string_view left, std::string_view right) {
  return std::lexicographical_compare(
      left.rbegin(), left.rend(), right.rbegin(), right.rend(),
      [](char a, char b) { return static_cast<unsigned char>(a) < static_cast<unsigned char>(b); });
}

// What a key is as a name: one pass, because it is made for each.
struct NameShape {
  bool is_path = false;
  bool has_folder = false;
};

NameShape shape_of(std::string_view name) {
  NameShape shape;
  std::size_t length = 0, dots = 0;  // of the component
  const auto is_component = [&] { return length > 2 || length > dots; };
  for (const char character : name) {
    if (character == '/') {
      if (!is_component()) return shape;
      shape.has_folder = true;
      length = dots = 0;
      continue;
    }
    if (character == '\0') return shape;
    ++length;
    dots += character == '.' ? 1 : 0;
  }
  shape.is_path = is_component() && name.size() <= max_name_bytes;
  return shape;
}

}  // namespace

LmdbMeta lmdb_meta(const Mapping& file) {
  Meta meta = meta_at(file, 0);
  const std::uint32_t page_bytes = meta.free_pages.pad;
  if (page_bytes < min_page_bytes || page_bytes > max_page_bytes || (page_bytes & (page_bytes - 1)) != 0) {
    fail_source(file.path(), "its page size is " + std::to_string(page_bytes));
  }
  const Meta other = meta_at(file, page_bytes);
  if (other.transaction > meta.transaction) meta = other;
  // The number of pages, and with it all that is computed from page numbers, is bounded by the file.
  const std::uint64_t pages = file.bytes().size() / page_bytes;
  LmdbMeta result;
  result.page_bytes = page_bytes;
  result.flags = meta.main.flags;
  result.has_reversed_order = (meta.main.flags & (reverse_key | integer_key)) != 0;
  result.depth = meta.main.depth;
  result.root = meta.main.root;
  result.entries = meta.main.entries;
  result.overflow_pages = meta.main.overflow_pages;
  result.last_page = std::min(meta.last_page, pages - 1);
  CommitBytes commit;
  std::memcpy(commit.data(), reinterpret_cast<const std::byte*>(&meta) + commit_offset, commit.size());
  result.transaction = meta.transaction;
  result.checksum = commit_of(commit).checksum;
  if (result.root == no_page ? result.entries != 0
                             : result.depth == 0 || result.depth > max_depth) {
    fail_source(file.path(), "its main database is " + std::to_string(result.depth) +
                                 " pages deep and has " + std::to_string(result.entries) +
                                 " records");
  }
  return result;
}

LmdbCommit lmdb_commit(std::span<const std::byte> file, std::uint32_t page_bytes) {
  CommitBytes first{}, second{};
  if (!copy(file, header_bytes + commit_offset, first) ||
      !copy(file, page_bytes + header_bytes + commit_offset, second)) {
    return {};
  }
  const LmdbCommit before = commit_of(first), after = commit_of(second);
  return after.transaction > before.transaction ? after : before;
}

void fail_committed(const std::string& path, std::uint64_t before, std::uint64_t now) {
  throw PackError(PackError::Kind::changed, path,
                  "transaction " + std::to_string(now) + " was committed after transaction " +
                      std::to_string(before));
}

LmdbRecords::LmdbRecords(std::string path, KeyNames names)
    : file_(std::move(path)), meta_(lmdb_meta(file_)), names_(names) {
  if ((meta_.flags & duplicate_keys) != 0) {
    throw PackError(PackError::Kind::unsupported, file_.path(),
                    "its keys may have several values (MDB_DUPSORT)");
  }
  // Where values have pages of their own, the others lie far apart: no reading ahead between them.
  if (meta_.overflow_pages > meta_.last_page / 2) {
    const auto bytes = file_.bytes();
    madvise(const_cast<std::byte*>(bytes.data()), bytes.size(), MADV_RANDOM);
  }
  levels_.resize(meta_.root == no_page ? 0 : meta_.depth);
  if (!levels_.empty()) enter(meta_.root, 0);
}

void LmdbRecords::fail(const std::string& why) const { fail_source(file_.path(), why); }

LmdbBlock LmdbRecords::next(std::size_t count) {
  LmdbBlock block;
  const auto newest = [this] { return lmdb_commit(file_.bytes(), meta_.page_bytes).transaction; };
  try {
    fill(block, count);
  } catch (const PackError&) {  // perhaps a page that was written again meanwhile
    if (newest() != meta_.transaction) fail_committed(file_.path(), meta_.transaction, newest());
    throw;
  }
  if (newest() != meta_.transaction) fail_committed(file_.path(), meta_.transaction, newest());
  return block;
}

void LmdbRecords::fill(LmdbBlock& block, std::size_t count) {
  const std::size_t expected = std::min<std::uint64_t>(count, meta_.entries - entries_seen_);
  block.offsets.reserve(expected);
  block.lengths.reserve(expected);
  block.name_offsets.reserve(expected + 1);
  block.names.reserve(8 * expected);
  while (block.offsets.size() < count) {
    if (height_ == 0) {
      if (entries_seen_ != meta_.entries) {
        fail("it has " + std::to_string(entries_seen_) + " records, and " +
             std::to_string(meta_.entries) + " by its meta page");
      }
      return;
    }
    Level& level = levels_[height_ - 1];
    if (level.next == level.count) {
      --height_;
      continue;
    }
    if (height_ == levels_.size()) {
      add_leaf(block, level, count);
      continue;
    }
    const Node below = node(level, level.next++);
    enter(std::uint64_t{below.size} | std::uint64_t{below.flags} << 32, height_);
  }
}

// Copies a page to its level. No page is in the tree twice, so there are no more than in the file.
void LmdbRecords::enter(std::uint64_t page, std::size_t depth) {
  Level& level = levels_[depth];
  const bool is_leaf = depth + 1 == levels_.size();
  const std::string label = "page " + std::to_string(page);
  if (page > meta_.last_page) fail(label + " lies beyond its last page");
  if (++pages_seen_ > meta_.last_page) fail("a page of it comes twice");
  level.page.resize(meta_.page_bytes);
  if (!copy(file_.bytes(), page * meta_.page_bytes, level.page)) fail(label + " cannot be read");
  const auto header = load<PageHeader>(level.page, 0);
  if (header.number != page ||
      (header.flags & page_kinds) != (is_leaf ? leaf_page : branch_page)) {
    fail(label + " is not the " + (is_leaf ? "leaf" : "branch") + " that should be there");
  }
  if (header.lower < header_bytes || header.lower % 2 != 0 || header.lower > header.upper ||
      header.upper > meta_.page_bytes) {
    fail(label + " has impossible bounds");
  }
  level.number = page;
  level.count = static_cast<std::uint32_t>((header.lower - header_bytes) / 2);
  level.next = 0;
  height_ = depth + 1;
  if (!is_leaf && depth + 2 == levels_.size()) request_below(level);
}

// Starts to read the leaves below a branch, unless they will come by reading ahead.
void LmdbRecords::request_below(const Level& branch) const {
  if (meta_.overflow_pages <= meta_.last_page / 2) return;
  for (std::uint32_t i = 0; i < branch.count; ++i) {
    const Node below = node(branch, i);
    const std::uint64_t page = std::uint64_t{below.size} | std::uint64_t{below.flags} << 32;
    if (page > meta_.last_page) continue;  // entering it says so
    read_ahead(file_.bytes().subspan(page * meta_.page_bytes, meta_.page_bytes));
  }
}

LmdbRecords::Node LmdbRecords::node(const Level& level, std::uint32_t index) const {
  const auto at = std::size_t{load<std::uint16_t>(level.page, header_bytes + 2 * index)};
  const std::size_t page_bytes = meta_.page_bytes;
  if (at < header_bytes + 2 * level.count || at > page_bytes - node_bytes) {
    fail("page " + std::to_string(level.number) + " has a node out of bounds");
  }
  const std::size_t key_size = load<std::uint16_t>(level.page, at + 6);
  if (key_size > page_bytes - node_bytes - at) {
    fail("page " + std::to_string(level.number) + " has a key out of bounds");
  }
  const auto* const key = reinterpret_cast<const char*>(level.page.data() + at + node_bytes);
  return {load<std::uint32_t>(level.page, at), load<std::uint16_t>(level.page, at + 4),
          {key, key_size}, at + node_bytes + key_size};
}

// Adds records of the leaf from its next on, until the block has `count`.
void LmdbRecords::add_leaf(LmdbBlock& block, Level& leaf, std::size_t count) {
  std::string_view last = last_key_;
  for (; leaf.next < leaf.count && block.offsets.size() < count; ++leaf.next) {
    const Node record = node(leaf, leaf.next);
    if (record.key.empty()) fail("page " + std::to_string(leaf.number) + " has an empty key");
    check_order(last, record.key);
    last = record.key;
    block.offsets.push_back(offset_of(leaf, record));
    block.lengths.push_back(record.size);
    add_name(block, record.key);
    ++entries_seen_;
  }
  last_key_ = std::string(last);  // the leaf's page goes
}

// Where the value of a record lies, known to be in the file.
std::uint64_t LmdbRecords::offset_of(const Level& leaf, const Node& record) const {
  const std::uint64_t page_bytes = meta_.page_bytes;
  if ((record.flags & (sub_database | duplicates)) != 0) {
    throw PackError(PackError::Kind::unsupported, file_.path(),
                    (record.flags & sub_database) != 0 ? "it holds named databases"
                                                       : "its keys have several values");
  }
  std::uint64_t offset = leaf.number * page_bytes + record.end;
  std::uint64_t end = (leaf.number + 1) * page_bytes;
  if ((record.flags & big_value) != 0) {
    std::uint64_t first = no_page;
    if (record.end + sizeof first <= page_bytes) first = load<std::uint64_t>(leaf.page, record.end);
    if (first < 2 || first > meta_.last_page) {
      fail("page " + std::to_string(leaf.number) + " has a value in a page that does not exist");
    }
    offset = first * page_bytes + header_bytes;
    end = (meta_.last_page + 1) * page_bytes;
  }
  if (offset > end || record.size > end - offset) {
    fail("page " + std::to_string(leaf.number) + " has a value out of bounds");
  }
  return offset;
}

// Keys ascend, so that no record comes twice, and names are in the order in which a pack has them.
void LmdbRecords::check_order(std::string_view last, std::string_view key) const {
  if (entries_seen_ > 0 && !(meta_.has_reversed_order ? comes_before_reversed(last, key) : last < key)) {
    fail("its keys are not in order");
  }
}

void LmdbRecords::add_name(LmdbBlock& block, std::string_view key) const {
  constexpr char digits[] = "0123456789abcdef";
  if (names_ == KeyNames::plain) {
    const NameShape shape = shape_of(key);
    block.are_paths = block.are_paths && shape.is_path;
    block.has_folders = block.has_folders || shape.has_folder;
    block.names += key;
  } else {
    const std::size_t begin = block.names.size();
    block.are_paths = block.are_paths && 2 * key.size() <= max_name_bytes;
    block.names.resize(begin + 2 * key.size());
    char* target = block.names.data() + begin;
    for (std::size_t i = 0; i < key.size(); ++i) {
      const std::size_t from = names_ == KeyNames::hex ? i : key.size() - 1 - i;
      const auto byte = static_cast<unsigned char>(key[from]);
      *target++ = digits[byte >> 4];
      *target++ = digits[byte & 15];
    }
  }
  block.name_offsets.push_back(block.names.size());
}

}  // namespace paceline
