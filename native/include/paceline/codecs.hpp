// How the bytes of an extent are stored: compressed by a codec, its elements perhaps shuffled before.
//
// The byte of an extent in the index:
//
//     bits  7 6 | 5 4                                      | 3 2 1 0
//           0 0 | log2 of an element's bytes: 0 = unshuffled | codec
//
// Shuffled means that the first bytes of all elements come first, then all second bytes, and so on: the
// exponents of neighbouring floats are alike, and lie together then. Bytes behind the last whole
// element stay at the end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "paceline/zstd.hpp"

namespace paceline {

enum class Codec : std::uint8_t { none = 0, zstd = 1, lz4 = 2, zstd_dictionary = 3 };

struct Encoding {
  Codec codec = Codec::none;
  std::uint8_t element_bits = 0;  // log2 of the bytes of an element; 0 = not shuffled

  // Of the byte in the index; none if no version so far has it.
  static std::optional<Encoding> of(std::uint8_t code) noexcept;
  std::uint8_t code() const noexcept {
    return static_cast<std::uint8_t>(static_cast<unsigned>(codec) | element_bits << 4U);
  }
};

constexpr std::uint8_t max_element_bits = 3;

// Memory to decompress into is allocated before the bytes can be checked: this bounds it.
constexpr std::uint64_t max_encoded_length = std::uint64_t{64} << 20;
// Of a dictionary, which every reader copies.
constexpr std::uint64_t max_dictionary_bytes = std::uint64_t{1} << 20;

// The library that a codec needs, as the system names it; "" for none.
const char* codec_library(Codec codec) noexcept;
bool codec_available(Codec codec) noexcept;
const char* codec_name(Codec codec) noexcept;
Codec codec_of(std::string_view name);  // throws std::invalid_argument

// The most bytes for which `stored` bytes can stand.
std::uint64_t max_decoded_length(Codec codec, std::uint64_t stored) noexcept;

// Room for what `compress` writes; 0 when `size` is beyond what the codec takes.
std::size_t compress_bound(Codec codec, std::size_t size) noexcept;
// Writes `source` compressed to `target`; returns its length, or 0 on error.
std::size_t compress(Codec codec, int level, const ZstdDictionary& dictionary,
                     std::span<const std::byte> source, std::span<std::byte> target) noexcept;

// Decodes `source`, which is not trusted, into `target`, of at most max_encoded_length bytes. Returns true
// when it filled `target` exactly; otherwise `why` says what is wrong. Keeps memory for elements that
// are shuffled with its thread; what is interrupted by a fault leaks nothing.
bool decode(Encoding encoding, const ZstdDictionary& dictionary, std::span<const std::byte> source,
            std::span<std::byte> target, std::string* why = nullptr);

// Both ranges are of one size and do not overlap.
void shuffle(std::span<const std::byte> source, std::span<std::byte> target,
             std::uint8_t element_bits) noexcept;
void unshuffle(std::span<const std::byte> source, std::span<std::byte> target,
               std::uint8_t element_bits) noexcept;

// log2 of the bytes of an element of an array in NumPy's .npy format, of a complex number its parts'; 0 if
// `body` is none, or its elements do not have 2, 4 or 8 bytes.
std::uint8_t npy_element_bits(std::span<const std::byte> body) noexcept;

}  // namespace paceline
