// Finds the records of an LMDB database (https://www.symas.com/lmdb, data version 1, 64-bit) from the
// pages of its B+tree, without reading the values.
//
//     page 0, 1   meta pages: page size, root of the main database, transaction; the newer one counts
//     branch      header | keys with the number of a page below | ...
//     leaf        header | keys with their values, or with the number of the first overflow page
//     overflow    header | value, over as many contiguous pages as it takes
//
// A page is copied before it is parsed, and every number in it is compared with what bounds it: a
// database that is damaged, hostile, or written to meanwhile ends in a PackError. The layout is that of
// `mdb.c` of LMDB 0.9.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "paceline/pack_index.hpp"

namespace paceline {

constexpr std::uint64_t lmdb_header_bytes = 16;  // of a page

struct LmdbMeta {
  std::uint32_t page_bytes = 0;
  std::uint32_t flags = 0;  // of the main database
  // Whether keys are compared from the last byte to the first: reverse keys, and integers.
  bool has_reversed_order = false;
  std::uint32_t depth = 0;
  std::uint64_t root = 0;
  std::uint64_t entries = 0;
  std::uint64_t overflow_pages = 0;
  std::uint64_t last_page = 0;
  std::uint64_t transaction = 0;
  std::uint32_t checksum = 0;  // LmdbCommit::checksum
};

// What tells one state of a database from another: databases that one program makes often end with
// the same transaction number.
struct LmdbCommit {
  std::uint64_t transaction = 0;
  std::uint32_t checksum = 0;  // CRC-32C of the main tree, the last page and the transaction
};

// The newer of the two meta pages. Throws PackError.
LmdbMeta lmdb_meta(const Mapping& file);
// The newest commit to a database of that page size; of transaction 0 if its bytes are gone.
LmdbCommit lmdb_commit(std::span<const std::byte> file, std::uint32_t page_bytes);
// Throws the PackError of Kind::changed for a database at `path` with a later transaction.
[[noreturn]] void fail_committed(const std::string& path, std::uint64_t before, std::uint64_t now);

// How a key becomes the name of a sample. Each keeps the order of keys and can be reversed.
enum class KeyNames : std::uint32_t {
  plain = 0,         // as it is
  hex = 1,           // two hexadecimal digits for each byte
  reversed_hex = 2,  // of the bytes from last to first, by which such keys are compared
};

struct LmdbBlock {  // some records, in the order of their keys
  std::vector<std::uint64_t> offsets;  // of values in the file
  std::vector<std::uint64_t> lengths;
  std::vector<std::uint64_t> name_offsets{0};
  std::string names;
  bool are_paths = true;   // whether every name may name a sample
  bool has_folders = false;  // whether some name has a slash
};

// One pass over the main database. Not thread-safe.
class LmdbRecords {
 public:
  // Throws PackError, also for named databases and for duplicate keys, which it does not read.
  LmdbRecords(std::string path, KeyNames names);

  const LmdbMeta& meta() const noexcept { return meta_; }
  // The next records, at most `count`; none at the end. Throws PackError: Kind::changed if a
  // transaction was committed since the pass began, for then pages may have been written again.
  LmdbBlock next(std::size_t count);

 private:
  struct Level {  // of the way from the root to a leaf
    std::vector<std::byte> page;
    std::uint64_t number = 0;
    std::uint32_t count = 0;
    std::uint32_t next = 0;
  };
  struct Node {
    std::uint32_t size;  // of the value, or the low bits of a page's number
    std::uint16_t flags;
    std::string_view key;
    std::size_t end;  // where the key ends, in the page
  };

  void enter(std::uint64_t page, std::size_t depth);
  Node node(const Level& level, std::uint32_t index) const;
  void request_below(const Level& branch) const;
  void fill(LmdbBlock& block, std::size_t count);
  void add_leaf(LmdbBlock& block, Level& leaf, std::size_t count);
  std::uint64_t offset_of(const Level& leaf, const Node& record) const;
  void add_name(LmdbBlock& block, std::string_view key) const;
  void check_order(std::string_view last, std::string_view key) const;
  [[noreturn]] void fail(const std::string& why) const;

  Mapping file_;
  LmdbMeta meta_;
  KeyNames names_;
  std::vector<Level> levels_;
  std::size_t height_ = 0;  // levels in use
  std::uint64_t pages_seen_ = 0;
  std::uint64_t entries_seen_ = 0;
  std::string last_key_;
};

}  // namespace paceline
