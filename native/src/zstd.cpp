#include "paceline/zstd.hpp"

#include <array>
#include <cstring>
#include <memory>
#include <new>

#include "paceline/fork.hpp"
#include "paceline/shared_library.hpp"

namespace paceline {
namespace {

// Of ZSTD_cParameter, which is part of the stable interface.
constexpr int content_size_flag = 200;
constexpr int dictionary_id_flag = 202;
constexpr int reset_session = 1;  // of ZSTD_ResetDirective

constexpr std::array magic = {std::byte{0x28}, std::byte{0xB5}, std::byte{0x2F}, std::byte{0xFD}};
constexpr std::size_t max_kept_frame = std::size_t{1} << 20;

// The part of zstd's interface that is stable since 1.4.
struct Library {
  std::size_t (*compress_bound)(std::size_t) = nullptr;
  unsigned (*is_error)(std::size_t) = nullptr;
  const char* (*error_name)(std::size_t) = nullptr;
  void* (*create_compressor)() = nullptr;
  std::size_t (*free_compressor)(void*) = nullptr;
  std::size_t (*compress)(void*, void*, std::size_t, const void*, std::size_t, int) = nullptr;
  void* (*create_decompressor)() = nullptr;
  std::size_t (*free_decompressor)(void*) = nullptr;
  std::size_t (*decompress)(void*, void*, std::size_t, const void*, std::size_t) = nullptr;
  void* (*create_encoder)(const void*, std::size_t, int) = nullptr;
  std::size_t (*free_encoder)(void*) = nullptr;
  std::size_t (*reset)(void*, int) = nullptr;
  std::size_t (*refer_to_encoder)(void*, const void*) = nullptr;
  std::size_t (*set_parameter)(void*, int, int) = nullptr;
  std::size_t (*compress_by_parameters)(void*, void*, std::size_t, const void*,
                                        std::size_t) = nullptr;
  void* (*create_decoder)(const void*, std::size_t) = nullptr;
  std::size_t (*free_decoder)(void*) = nullptr;
  std::size_t (*decompress_with)(void*, void*, std::size_t, const void*, std::size_t,
                                 const void*) = nullptr;
  std::size_t (*train)(void*, std::size_t, const void*, const std::size_t*, unsigned) = nullptr;
  unsigned (*is_training_error)(std::size_t) = nullptr;
  bool loaded = false;

  Library() noexcept {
    const SharedLibrary zstd("libzstd.so.1");
    loaded = zstd.find("ZSTD_compressBound", compress_bound) &&
             zstd.find("ZSTD_isError", is_error) && zstd.find("ZSTD_getErrorName", error_name) &&
             zstd.find("ZSTD_createCCtx", create_compressor) &&
             zstd.find("ZSTD_freeCCtx", free_compressor) &&
             zstd.find("ZSTD_compressCCtx", compress) &&
             zstd.find("ZSTD_createDCtx", create_decompressor) &&
             zstd.find("ZSTD_freeDCtx", free_decompressor) &&
             zstd.find("ZSTD_decompressDCtx", decompress) &&
             zstd.find("ZSTD_createCDict", create_encoder) &&
             zstd.find("ZSTD_freeCDict", free_encoder) &&
             zstd.find("ZSTD_CCtx_reset", reset) &&
             zstd.find("ZSTD_CCtx_refCDict", refer_to_encoder) &&
             zstd.find("ZSTD_CCtx_setParameter", set_parameter) &&
             zstd.find("ZSTD_compress2", compress_by_parameters) &&
             zstd.find("ZSTD_createDDict", create_decoder) &&
             zstd.find("ZSTD_freeDDict", free_decoder) &&
             zstd.find("ZSTD_decompress_usingDDict", decompress_with) &&
             zstd.find("ZDICT_trainFromBuffer", train) &&
             zstd.find("ZDICT_isError", is_training_error);
  }
};

const Library& library() noexcept { return made_once<Library>(); }

// Contexts are costly to make, and one thread at a time may use one: each thread keeps its own.
using Context = std::unique_ptr<void, std::size_t (*)(void*)>;

void* compressor() noexcept {
  thread_local const Context own(library().create_compressor(), library().free_compressor);
  return own.get();
}

// Of its own: its parameters stay set.
void* dictionary_compressor() noexcept {
  thread_local const Context own(library().create_compressor(), library().free_compressor);
  return own.get();
}

void* decompressor() noexcept {
  thread_local const Context own(library().create_decompressor(), library().free_decompressor);
  return own.get();
}

bool refuse(std::string* why, const char* text) {
  if (why != nullptr) *why = text;
  return false;
}

bool is_whole(std::size_t length, std::size_t expected, std::string* why) {
  if (library().is_error(length) != 0) return refuse(why, library().error_name(length));
  return length == expected || refuse(why, "it decodes to fewer bytes than it should");
}

}  // namespace

bool zstd_available() noexcept { return library().loaded; }

std::size_t zstd_bound(std::size_t size) noexcept {
  if (!zstd_available()) return 0;
  const std::size_t bound = library().compress_bound(size);
  return library().is_error(bound) != 0 ? 0 : bound;
}

std::size_t zstd_compress(std::span<const std::byte> source, std::span<std::byte> target,
                          int level) noexcept {
  if (!zstd_available() || compressor() == nullptr) return 0;
  const std::size_t length = library().compress(compressor(), target.data(), target.size(),
                                                source.data(), source.size(), level);
  return library().is_error(length) != 0 ? 0 : length;
}

bool zstd_decompress(std::span<const std::byte> source, std::span<std::byte> target,
                     std::string* why) {
  if (!zstd_available()) return refuse(why, "libzstd.so.1 is not on this machine");
  if (decompressor() == nullptr) return refuse(why, "out of memory");
  const std::size_t length = library().decompress(decompressor(), target.data(), target.size(),
                                                  source.data(), source.size());
  return is_whole(length, target.size(), why);
}

ZstdDictionary::ZstdDictionary(std::span<const std::byte> content, int level) {
  if (!zstd_available()) return;
  decoder_ = {library().create_decoder(content.data(), content.size()), library().free_decoder};
  if (level == 0) return;
  encoder_ = {library().create_encoder(content.data(), content.size(), level),
              library().free_encoder};
}

std::size_t ZstdDictionary::compress(std::span<const std::byte> source,
                                     std::span<std::byte> target) const noexcept {
  if (encoder_ == nullptr || dictionary_compressor() == nullptr) return 0;
  void* const context = dictionary_compressor();
  const auto is_error = [](std::size_t code) { return library().is_error(code) != 0; };
  // A frame that had too little room was not ended: it would be in the way.
  if (is_error(library().reset(context, reset_session)) ||
      is_error(library().refer_to_encoder(context, encoder_.get())) ||
      is_error(library().set_parameter(context, content_size_flag, 0)) ||
      is_error(library().set_parameter(context, dictionary_id_flag, 0))) {
    return 0;
  }
  const std::size_t length = library().compress_by_parameters(
      context, target.data(), target.size(), source.data(), source.size());
  static_cast<void>(library().reset(context, reset_session));
  static_cast<void>(library().refer_to_encoder(context, nullptr));  // it may be gone by the next time
  if (is_error(length) || length <= magic.size()) return 0;
  std::memmove(target.data(), target.data() + magic.size(), length - magic.size());
  return length - magic.size();
}

bool ZstdDictionary::decompress(std::span<const std::byte> source, std::span<std::byte> target,
                                std::string* why) const {
  if (decoder_ == nullptr) return refuse(why, "there is no dictionary");
  if (decompressor() == nullptr) return refuse(why, "out of memory");
  if (source.size() > zstd_bound(target.size())) return refuse(why, "the frame is too long");
  thread_local std::vector<std::byte> frame;  // of the thread: a fault in `source` leaks nothing
  try {
    frame.resize(magic.size() + source.size());
  } catch (const std::bad_alloc&) {
    return refuse(why, "out of memory");
  }
  std::memcpy(frame.data(), magic.data(), magic.size());
  if (!source.empty()) std::memcpy(frame.data() + magic.size(), source.data(), source.size());
  const std::size_t length =
      library().decompress_with(decompressor(), target.data(), target.size(), frame.data(),
                                frame.size(), decoder_.get());
  if (frame.capacity() > max_kept_frame) std::vector<std::byte>().swap(frame);
  return is_whole(length, target.size(), why);
}

std::vector<std::byte> zstd_train(std::span<const std::byte> samples,
                                  const std::vector<std::size_t>& lengths, std::size_t capacity) {
  std::vector<std::byte> dictionary;
  if (!zstd_available() || lengths.empty()) return dictionary;
  dictionary.resize(capacity);
  const std::size_t length =
      library().train(dictionary.data(), capacity, samples.data(), lengths.data(),
                      static_cast<unsigned>(lengths.size()));
  dictionary.resize(library().is_training_error(length) != 0 ? 0 : length);
  return dictionary;
}

}  // namespace paceline
