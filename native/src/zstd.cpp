#include "paceline/zstd.hpp"

#include <dlfcn.h>

#include <memory>

namespace paceline {
namespace {

// The part of zstd's interface that is stable since 1.0.
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
  bool loaded = false;

  Library() noexcept {
    void* handle = dlopen("libzstd.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed
    if (handle == nullptr) return;
    loaded = find(handle, "ZSTD_compressBound", compress_bound) &&
             find(handle, "ZSTD_isError", is_error) &&
             find(handle, "ZSTD_getErrorName", error_name) &&
             find(handle, "ZSTD_createCCtx", create_compressor) &&
             find(handle, "ZSTD_freeCCtx", free_compressor) &&
             find(handle, "ZSTD_compressCCtx", compress) &&
             find(handle, "ZSTD_createDCtx", create_decompressor) &&
             find(handle, "ZSTD_freeDCtx", free_decompressor) &&
             find(handle, "ZSTD_decompressDCtx", decompress);
  }

  template <class Function>
  static bool find(void* handle, const char* name, Function& function) noexcept {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    return function != nullptr;
  }
};

const Library& library() noexcept {
  static const Library one;
  return one;
}

// Contexts are costly to make, and one thread at a time may use one: each thread keeps its own.
using Context = std::unique_ptr<void, std::size_t (*)(void*)>;

void* compressor() noexcept {
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
  if (library().is_error(length) != 0) return refuse(why, library().error_name(length));
  return length == target.size() || refuse(why, "it decodes to fewer bytes than it should");
}

}  // namespace paceline
