// Writes LMDB databases as one bulk load would leave them, for tests that need no LMDB, and wrong ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "check.hpp"

struct LmdbBuilder {
  static constexpr std::size_t header_bytes = 16, node_bytes = 8;
  static constexpr std::size_t meta_main = 16 + 72;  // where the main database stands in a meta page

  std::string bytes;  // of the file
  std::size_t page_bytes;

  // Records in the order of their keys.
  explicit LmdbBuilder(const std::vector<std::pair<std::string, std::string>>& records,
                       std::size_t page = 4096, std::uint16_t flags = 0)
      : bytes(2 * page, '\0'), page_bytes(page) {
    std::vector<std::pair<std::string, std::uint64_t>> below;  // first key and number of each page
    std::vector<std::string> nodes;
    std::string first_key;
    std::uint64_t overflow_pages = 0, branch_pages = 0;
    const auto close = [&](std::uint16_t kind) {
      if (nodes.empty()) return;
      below.emplace_back(first_key, add_page(kind, nodes));
      nodes.clear();
    };
    for (const auto& [key, value] : records) {
      std::string node = head(static_cast<std::uint32_t>(value.size()), 0, key);
      if (node.size() + value.size() > page_bytes / 4) {
        node[4] = 1;  // the value has pages of its own
        const std::uint64_t page_number = add_value(value);
        overflow_pages += (header_bytes + value.size() + page_bytes - 1) / page_bytes;
        node.append(reinterpret_cast<const char*>(&page_number), sizeof page_number);
      } else {
        node += value;
      }
      if (!fits(nodes, node)) close(2);
      if (nodes.empty()) first_key = key;
      nodes.push_back(node);
    }
    close(2);
    std::uint64_t depth = below.empty() ? 0 : 1;
    const std::uint64_t leaf_pages = below.size();
    while (below.size() > 1) {
      const auto pages = std::exchange(below, {});
      for (const auto& [key, number] : pages) {
        // The first key of a branch is empty, as LMDB has it.
        std::string node = head(static_cast<std::uint32_t>(number),
                                static_cast<std::uint16_t>(number >> 32), nodes.empty() ? "" : key);
        if (!fits(nodes, node)) {
          close(1);
          node = head(static_cast<std::uint32_t>(number), 0, "");
        }
        if (nodes.empty()) first_key = key;
        nodes.push_back(node);
      }
      close(1);
      branch_pages += below.size();
      ++depth;
    }
    const std::uint64_t root = below.empty() ? ~std::uint64_t{0} : below.front().second;
    for (const std::uint64_t which : {0, 1}) {
      const std::size_t at = which * page_bytes;
      put<std::uint64_t>(at, which);
      put<std::uint16_t>(at + 10, 8);
      put<std::uint32_t>(at + 16, 0xBEEFC0DE);
      put<std::uint32_t>(at + 20, 1);
      put(at + 40, static_cast<std::uint32_t>(page_bytes));
      put(at + meta_main + 4, flags);
      put(at + meta_main + 6, static_cast<std::uint16_t>(depth));
      put(at + meta_main + 8, branch_pages);
      put(at + meta_main + 16, leaf_pages);
      put(at + meta_main + 24, overflow_pages);
      put<std::uint64_t>(at + meta_main + 32, records.size());
      put(at + meta_main + 40, root);
      put<std::uint64_t>(at + 136, bytes.size() / page_bytes - 1);
      put<std::uint64_t>(at + 144, 5 + which);
    }
  }

  template <class T>
  void put(std::size_t at, T value) {
    CHECK(at + sizeof value <= bytes.size());
    std::memcpy(bytes.data() + at, &value, sizeof value);
  }

  template <class T>
  T get(std::size_t at) const {
    T value{};
    CHECK(at + sizeof value <= bytes.size());
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
  }

  // The field of both meta pages, at its place in the main database's description.
  template <class T>
  void put_main(std::size_t at, T value) {
    put(meta_main + at, value);
    put(page_bytes + meta_main + at, value);
  }

  std::size_t root() const { return get<std::uint64_t>(page_bytes + meta_main + 40) * page_bytes; }

  void write(const std::string& path) const { std::ofstream(path, std::ios::binary) << bytes; }

 private:
  static std::string head(std::uint32_t low, std::uint16_t flags, std::string_view key) {
    const auto size = static_cast<std::uint16_t>(key.size());
    std::string node(node_bytes, '\0');
    std::memcpy(node.data(), &low, 4);
    std::memcpy(node.data() + 4, &flags, 2);
    std::memcpy(node.data() + 6, &size, 2);
    return node.append(key);
  }

  bool fits(const std::vector<std::string>& nodes, const std::string& node) const {
    std::size_t used = header_bytes;
    for (const auto& other : nodes) used += 2 + (other.size() + 1) / 2 * 2;
    return used + 2 + (node.size() + 1) / 2 * 2 <= page_bytes;
  }

  std::uint64_t add_page(std::uint16_t kind, const std::vector<std::string>& nodes) {
    const std::uint64_t number = bytes.size() / page_bytes;
    const std::size_t at = bytes.size();
    bytes.resize(at + page_bytes);
    std::size_t upper = page_bytes;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      upper -= (nodes[i].size() + 1) / 2 * 2;
      std::memcpy(bytes.data() + at + upper, nodes[i].data(), nodes[i].size());
      put(at + header_bytes + 2 * i, static_cast<std::uint16_t>(upper));
    }
    put(at, number);
    put(at + 10, kind);
    put(at + 12, static_cast<std::uint16_t>(header_bytes + 2 * nodes.size()));
    put(at + 14, static_cast<std::uint16_t>(upper));
    return number;
  }

  std::uint64_t add_value(const std::string& value) {
    const std::uint64_t number = bytes.size() / page_bytes;
    const std::size_t at = bytes.size();
    const std::size_t pages = (header_bytes + value.size() + page_bytes - 1) / page_bytes;
    bytes.resize(at + pages * page_bytes);
    put(at, number);
    put<std::uint16_t>(at + 10, 4);
    put(at + 12, static_cast<std::uint32_t>(pages));
    std::memcpy(bytes.data() + at + header_bytes, value.data(), value.size());
    return number;
  }
};
