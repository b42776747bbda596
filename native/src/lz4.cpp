#include "paceline/lz4.hpp"

#include <algorithm>

#include "paceline/fork.hpp"
#include "paceline/shared_library.hpp"

namespace paceline {
namespace {

constexpr int first_slow_level = 3;
constexpr int last_level = 12;
constexpr std::size_t max_input = 0x7E000000;  // LZ4_MAX_INPUT_SIZE

// The part of LZ4's interface that is stable since 1.7.
struct Library {
  int (*compress_bound)(int) = nullptr;
  int (*compress)(const char*, char*, int, int) = nullptr;
  int (*compress_slowly)(const char*, char*, int, int, int) = nullptr;
  int (*decompress)(const char*, char*, int, int) = nullptr;
  bool loaded = false;

  Library() noexcept {
    const SharedLibrary lz4("liblz4.so.1");
    loaded = lz4.find("LZ4_compressBound", compress_bound) &&
             lz4.find("LZ4_compress_default", compress) &&
             lz4.find("LZ4_compress_HC", compress_slowly) &&
             lz4.find("LZ4_decompress_safe", decompress);
  }
};

const Library& library() noexcept { return made_once<Library>(); }

bool refuse(std::string* why, const char* text) {
  if (why != nullptr) *why = text;
  return false;
}

}  // namespace

bool lz4_available() noexcept { return library().loaded; }

std::size_t lz4_bound(std::size_t size) noexcept {
  if (!lz4_available() || size > max_input) return 0;
  return static_cast<std::size_t>(library().compress_bound(static_cast<int>(size)));
}

std::size_t lz4_compress(std::span<const std::byte> source, std::span<std::byte> target,
                         int level) noexcept {
  if (!lz4_available() || source.size() > max_input) return 0;
  const auto* const from = reinterpret_cast<const char*>(source.data());
  auto* const to = reinterpret_cast<char*>(target.data());
  const auto size = static_cast<int>(source.size());
  const auto room = static_cast<int>(std::min(target.size(), max_input));
  const int length = level < first_slow_level
                         ? library().compress(from, to, size, room)
                         : library().compress_slowly(from, to, size, room,
                                                     std::min(level, last_level));
  return length > 0 ? static_cast<std::size_t>(length) : 0;
}

bool lz4_decompress(std::span<const std::byte> source, std::span<std::byte> target,
                    std::string* why) {
  if (!lz4_available()) return refuse(why, "liblz4.so.1 is not on this machine");
  if (source.size() > max_input || target.size() > max_input) return refuse(why, "it is too long");
  const int length = library().decompress(reinterpret_cast<const char*>(source.data()),
                                          reinterpret_cast<char*>(target.data()),
                                          static_cast<int>(source.size()),
                                          static_cast<int>(target.size()));
  if (length < 0) return refuse(why, "the block is malformed");
  return static_cast<std::size_t>(length) == target.size() ||
         refuse(why, "it decodes to fewer bytes than it should");
}

}  // namespace paceline
