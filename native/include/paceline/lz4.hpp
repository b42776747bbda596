// LZ4, from the system's liblz4.so.1, loaded when it is first asked for as zstd is. A block, without a
// frame: its lengths are known from the index. All functions are thread-safe.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace paceline {

// Whether the library is there. The functions below need it; without it they return 0.
bool lz4_available() noexcept;

// Room that a compressed block of `size` bytes may take; 0 when `size` is beyond what LZ4 takes.
std::size_t lz4_bound(std::size_t size) noexcept;

// Writes `source` as one block into `target`; returns its length, or 0 on error. Levels 1 and 2 are
// LZ4's fast form; from 3 to 12 its slower one, which is decoded as fast.
std::size_t lz4_compress(std::span<const std::byte> source, std::span<std::byte> target,
                         int level) noexcept;

// Decodes `source`, which is not trusted, into `target`. Returns true when it filled `target`
// exactly. Allocates nothing; otherwise `why`, if given, says what is wrong.
bool lz4_decompress(std::span<const std::byte> source, std::span<std::byte> target,
                    std::string* why = nullptr);

}  // namespace paceline
