#include "paceline/codecs.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string_view>
#include <type_traits>

#include "paceline/lz4.hpp"

namespace paceline {
namespace {

constexpr unsigned codec_bits = 4;
constexpr std::uint8_t last_codec = static_cast<std::uint8_t>(Codec::zstd_dictionary);
// A zstd frame holds at most a block of 128 KiB for each 4 bytes.
constexpr std::uint64_t zstd_block_bytes = 128 * 1024;
constexpr std::uint64_t zstd_min_block = 4;
// Each byte that lengthens a match of LZ4 adds at most 255 bytes; the others add fewer.
constexpr std::uint64_t lz4_max_ratio = 255;
constexpr std::uint64_t lz4_min_room = 64;
constexpr std::size_t max_kept_scratch = std::size_t{8} << 20;

// Memory of a thread for what is decoded and still shuffled.
class Scratch {
 public:
  std::span<std::byte> get(std::size_t size) {
    if (size > size_) {
      memory_.reset();
      size_ = 0;
      memory_ = std::make_unique_for_overwrite<std::byte[]>(size);
      size_ = size;
    }
    return {memory_.get(), size};
  }
  void shrink() noexcept {
    if (size_ <= max_kept_scratch) return;
    memory_.reset();
    size_ = 0;
  }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::size_t size_ = 0;
};

bool refuse(std::string* why, std::string text) {
  if (why != nullptr) *why = std::move(text);
  return false;
}

// The element whose bytes lie at `at` in each plane. Shifts, and stores of whole elements: compilers make
// vector code of it.
template <class Element>
void join_planes(const std::byte* source, std::byte* target, std::size_t count) noexcept {
  for (std::size_t at = 0; at < count; ++at) {
    Element element = 0;
    for (std::size_t byte = 0; byte < sizeof(Element); ++byte) {
      const auto value = static_cast<Element>(std::to_integer<std::uint8_t>(source[byte * count + at]));
      element = static_cast<Element>(element | static_cast<Element>(value << (8 * byte)));
    }
    std::memcpy(target + at * sizeof element, &element, sizeof element);
  }
}

template <class Element>
void split_planes(const std::byte* source, std::byte* target, std::size_t count) noexcept {
  for (std::size_t byte = 0; byte < sizeof(Element); ++byte) {
    for (std::size_t at = 0; at < count; ++at) {
      target[byte * count + at] = source[at * sizeof(Element) + byte];
    }
  }
}

bool decompress(Codec codec, const ZstdDictionary& dictionary, std::span<const std::byte> source,
                std::span<std::byte> target, std::string* why) {
  std::string problem;
  bool is_complete = false;
  switch (codec) {
    case Codec::none:
      return refuse(why, "it is not compressed");
    case Codec::zstd:
      is_complete = zstd_decompress(source, target, &problem);
      break;
    case Codec::lz4:
      is_complete = lz4_decompress(source, target, &problem);
      break;
    case Codec::zstd_dictionary:
      is_complete = dictionary.decompress(source, target, &problem);
      break;
  }
  return is_complete || refuse(why, std::string(codec_name(codec)) + ": " + problem);
}

}  // namespace

std::optional<Encoding> Encoding::of(std::uint8_t code) noexcept {
  const std::uint8_t codec = code & ((1U << codec_bits) - 1);
  const auto element_bits = static_cast<std::uint8_t>(code >> codec_bits);
  if (codec > last_codec || element_bits > max_element_bits) return std::nullopt;
  if (codec == 0 && element_bits != 0) return std::nullopt;  // would cost time and save nothing
  return Encoding{static_cast<Codec>(codec), element_bits};
}

const char* codec_library(Codec codec) noexcept {
  constexpr std::array names = {"", "libzstd.so.1", "liblz4.so.1", "libzstd.so.1"};
  return names[static_cast<std::size_t>(codec)];
}

const char* codec_name(Codec codec) noexcept {
  constexpr std::array names = {"none", "zstd", "lz4", "zstd-dict"};
  return names[static_cast<std::size_t>(codec)];
}

Codec codec_of(std::string_view name) {
  for (std::uint8_t k = 0; k <= last_codec; ++k) {
    if (name == codec_name(static_cast<Codec>(k))) return static_cast<Codec>(k);
  }
  throw std::invalid_argument("no such codec");
}

bool codec_available(Codec codec) noexcept {
  return codec == Codec::none || (codec == Codec::lz4 ? lz4_available() : zstd_available());
}

std::uint64_t max_decoded_length(Codec codec, std::uint64_t stored) noexcept {
  if (codec == Codec::none) return stored;
  const bool is_lz4 = codec == Codec::lz4;
  const std::uint64_t times = is_lz4 ? lz4_max_ratio : zstd_block_bytes / zstd_min_block;
  const std::uint64_t most = std::min(stored, max_encoded_length) * times +
                             (is_lz4 ? lz4_min_room : zstd_block_bytes);
  return std::min(max_encoded_length, most);
}

std::size_t compress_bound(Codec codec, std::size_t size) noexcept {
  return codec == Codec::lz4 ? lz4_bound(size) : zstd_bound(size);
}

std::size_t compress(Codec codec, int level, const ZstdDictionary& dictionary,
                     std::span<const std::byte> source, std::span<std::byte> target) noexcept {
  switch (codec) {
    case Codec::none:
      return 0;
    case Codec::zstd:
      return zstd_compress(source, target, level);
    case Codec::lz4:
      return lz4_compress(source, target, level);
    case Codec::zstd_dictionary:
      return dictionary.compress(source, target);
  }
  return 0;
}

bool decode(Encoding encoding, const ZstdDictionary& dictionary, std::span<const std::byte> source,
            std::span<std::byte> target, std::string* why) {
  if (encoding.element_bits == 0) return decompress(encoding.codec, dictionary, source, target, why);
  thread_local Scratch scratch;
  try {
    const auto shuffled = scratch.get(target.size());
    const bool is_complete = decompress(encoding.codec, dictionary, source, shuffled, why);
    if (is_complete) unshuffle(shuffled, target, encoding.element_bits);
    scratch.shrink();
    return is_complete;
  } catch (const std::bad_alloc&) {
    return refuse(why, "out of memory");
  }
}

void shuffle(std::span<const std::byte> source, std::span<std::byte> target,
             std::uint8_t element_bits) noexcept {
  const std::size_t count = source.size() >> element_bits;
  switch (element_bits) {
    case 1: split_planes<std::uint16_t>(source.data(), target.data(), count); break;
    case 2: split_planes<std::uint32_t>(source.data(), target.data(), count); break;
    case 3: split_planes<std::uint64_t>(source.data(), target.data(), count); break;
    default: break;
  }
  const std::size_t done = element_bits == 0 ? 0 : count << element_bits;
  if (done < source.size()) std::memcpy(target.data() + done, source.data() + done, source.size() - done);
}

void unshuffle(std::span<const std::byte> source, std::span<std::byte> target,
               std::uint8_t element_bits) noexcept {
  const std::size_t count = source.size() >> element_bits;
  switch (element_bits) {
    case 1: join_planes<std::uint16_t>(source.data(), target.data(), count); break;
    case 2: join_planes<std::uint32_t>(source.data(), target.data(), count); break;
    case 3: join_planes<std::uint64_t>(source.data(), target.data(), count); break;
    default: break;
  }
  const std::size_t done = element_bits == 0 ? 0 : count << element_bits;
  if (done < source.size()) std::memcpy(target.data() + done, source.data() + done, source.size() - done);
}

std::uint8_t npy_element_bits(std::span<const std::byte> body) noexcept {
  constexpr std::string_view magic = "\x93NUMPY";
  constexpr std::string_view key = "'descr': '";
  constexpr std::size_t max_header = 4096;  // a type's name comes first, before the shape
  const std::string_view text(reinterpret_cast<const char*>(body.data()),
                              std::min(body.size(), max_header));
  if (!text.starts_with(magic)) return 0;
  const std::size_t found = text.find(key);
  if (found == std::string_view::npos) return 0;
  // Such as <f4: the order of the bytes, the kind of type, the bytes of an element.
  const std::string_view type = text.substr(found + key.size(), text.find('\'', found + key.size()) -
                                                                    (found + key.size()));
  if (type.size() < 3) return 0;
  const std::string_view size = type.substr(2);
  constexpr std::string_view kinds = "fiucV";  // V: bfloat16 and other types that NumPy does not know
  if (kinds.find(type[1]) == std::string_view::npos) return 0;
  const bool is_complex = type[1] == 'c';
  if (size == "2") return is_complex ? 0 : 1;
  if (size == "4") return is_complex ? 0 : 2;
  if (size == "8") return is_complex ? 2 : 3;
  return is_complex && size == "16" ? 3 : 0;
}

}  // namespace paceline
