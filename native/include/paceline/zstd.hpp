// Zstandard, from the system's libzstd.so.1, which every distribution's base has: loaded when it is
// first asked for, so that neither a header nor the library is needed to build, or to read packs
// that hold no compressed sample. All functions are thread-safe.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace paceline {

// Whether the library is there. The functions below need it; without it they return 0.
bool zstd_available() noexcept;

// Room that a compressed frame of `size` bytes may take; 0 when `size` is beyond what zstd takes.
std::size_t zstd_bound(std::size_t size) noexcept;

// Writes `source` as one frame into `target`; returns its length, which is never 0, or 0 on error
// (for example too little room).
std::size_t zstd_compress(std::span<const std::byte> source, std::span<std::byte> target,
                          int level) noexcept;

// Decodes `source`, which is not trusted, into `target`. Returns true when it filled `target`
// exactly. Allocates nothing that depends on `source`; otherwise `why`, if given, says what is wrong.
bool zstd_decompress(std::span<const std::byte> source, std::span<std::byte> target,
                     std::string* why = nullptr);

}  // namespace paceline
