// Zstandard, from the system's libzstd.so.1, which every distribution's base has: loaded when it is
// first asked for, so that neither a header nor the library is needed to build, or to read packs
// that hold no compressed sample. All functions are thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

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

// What many small samples have in common, so that the frame of each need not say it. Nor do its frames
// say what the pack's index knows: they carry neither their length, nor the number of the dictionary,
// nor the magic number, the first 4 bytes of any other frame. Immutable.
class ZstdDictionary {
 public:
  ZstdDictionary() noexcept = default;  // there is none
  // Copies `content`. With a level it compresses, too. Without the library it does neither.
  explicit ZstdDictionary(std::span<const std::byte> content, int level = 0);

  // Whether there is one; of what is no dictionary of zstd's, and without the library, there is none.
  explicit operator bool() const noexcept { return decoder_ != nullptr; }
  // As zstd_compress and zstd_decompress.
  std::size_t compress(std::span<const std::byte> source, std::span<std::byte> target) const noexcept;
  bool decompress(std::span<const std::byte> source, std::span<std::byte> target,
                  std::string* why = nullptr) const;

 private:
  using Handle = std::unique_ptr<void, std::size_t (*)(void*)>;
  Handle encoder_{nullptr, nullptr};
  Handle decoder_{nullptr, nullptr};
};

// A dictionary of at most `capacity` bytes of samples that lie end to end in `samples`. Empty where they
// are too few, or have nothing in common.
std::vector<std::byte> zstd_train(std::span<const std::byte> samples,
                                  const std::vector<std::size_t>& lengths, std::size_t capacity);

}  // namespace paceline
