#include "paceline/jpeg.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <csetjmp>
#include <cstdio>  // before jpeglib.h, which needs FILE
#include <cstdlib>
#include <cstring>

#if __has_include(<jpeglib.h>)
#include <jpeglib.h>
#endif

#include "paceline/fork.hpp"

namespace paceline {

unsigned libjpeg_turbo_year(const char* text) noexcept {
  unsigned first = 0, last = 0;
  int length = 0;
  const int count = std::sscanf(text, "Copyright (C) %4u-%4u The libjpeg-turbo Project%n", &first,
                                &last, &length);
  return count == 2 && length > 0 ? last : 0;
}

}  // namespace paceline

// Before 2.1 it upsampled 4:4:0 in another way than the versions that Python's wheels contain.
#if defined(LIBJPEG_TURBO_VERSION_NUMBER) && LIBJPEG_TURBO_VERSION_NUMBER >= 2001000

namespace paceline {
namespace {

constexpr unsigned first_year = 2021;  // of libjpeg-turbo 2.1; the last 2.0 is of 2020

// The C interface of libjpeg-turbo; the last two are its own, since 1.5.
struct Library {
  decltype(&jpeg_std_error) std_error = nullptr;
  decltype(&jpeg_CreateDecompress) create = nullptr;
  decltype(&jpeg_destroy_decompress) destroy = nullptr;
  decltype(&jpeg_mem_src) mem_src = nullptr;
  decltype(&jpeg_read_header) read_header = nullptr;
  decltype(&jpeg_start_decompress) start = nullptr;
  decltype(&jpeg_read_scanlines) read_scanlines = nullptr;
  decltype(&jpeg_crop_scanline) crop_scanline = nullptr;
  decltype(&jpeg_skip_scanlines) skip_scanlines = nullptr;
  bool loaded = false;

  Library() noexcept {
    // The number is that of the structures' layout, which the header has, too.
    const char* const name = JPEG_LIB_VERSION >= 80 ? "libjpeg.so.8" : "libjpeg.so.62";
    void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);  // never closed
    if (handle == nullptr) return;
    loaded = find(handle, "jpeg_std_error", std_error) &&
             find(handle, "jpeg_CreateDecompress", create) &&
             find(handle, "jpeg_destroy_decompress", destroy) &&
             find(handle, "jpeg_mem_src", mem_src) &&
             find(handle, "jpeg_read_header", read_header) &&
             find(handle, "jpeg_start_decompress", start) &&
             find(handle, "jpeg_read_scanlines", read_scanlines) &&
             find(handle, "jpeg_crop_scanline", crop_scanline) &&
             find(handle, "jpeg_skip_scanlines", skip_scanlines) && is_new_enough();
  }

  // Of the header that this was built with, the library at run time may be an older version.
  bool is_new_enough() const noexcept {
    jpeg_error_mgr messages{};
    std_error(&messages);
    for (int k = 0; k <= messages.last_jpeg_message; ++k) {
      const char* const text = messages.jpeg_message_table[k];
      if (text != nullptr && libjpeg_turbo_year(text) >= first_year) return true;
    }
    return false;
  }

  template <class Function>
  static bool find(void* handle, const char* name, Function& function) noexcept {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    return function != nullptr;
  }
};

const Library& library() noexcept { return made_once<Library>(); }

struct Errors {
  jpeg_error_mgr manager;  // first: libjpeg hands out a pointer to it
  std::jmp_buf escape;
};

[[noreturn]] void fail(j_common_ptr decoder) {
  std::longjmp(reinterpret_cast<Errors*>(decoder->err)->escape, 1);
}

// A warning means damage, of which the pixels must not be trusted; other messages are not shown.
void refuse_warnings(j_common_ptr decoder, int level) {
  if (level < 0) fail(decoder);
}

void stay_silent(j_common_ptr) {}

// Whether the end of the image is there: what lies below the part is not looked at otherwise.
bool ends_complete(std::span<const std::byte> body) noexcept {
  return body.size() > 4 && body[body.size() - 2] == std::byte{0xff} &&
         body[body.size() - 1] == std::byte{0xd9};
}

constexpr JDIMENSION rows_at_once = 16;

// What must be given back, also after an error.
struct Work {
  jpeg_decompress_struct decoder{};
  Errors errors{};
  unsigned char* rows = nullptr;
};

// Runs libjpeg, which leaves by longjmp on an error: nothing in here has a destructor.
bool decode(Work& work, std::span<const std::byte> body, const JpegPart& part,
            std::byte* target) noexcept {
  const Library& jpeg = library();
  jpeg_decompress_struct* const decoder = &work.decoder;
  decoder->err = jpeg.std_error(&work.errors.manager);
  work.errors.manager.error_exit = fail;
  work.errors.manager.emit_message = refuse_warnings;
  work.errors.manager.output_message = stay_silent;
  if (setjmp(work.errors.escape) != 0) return false;
  // Fails if the library's structures are not those of the header.
  jpeg.create(decoder, JPEG_LIB_VERSION, sizeof *decoder);
  jpeg.mem_src(decoder, reinterpret_cast<const unsigned char*>(body.data()), body.size());
  if (jpeg.read_header(decoder, TRUE) != JPEG_HEADER_OK) return false;
  if (decoder->jpeg_color_space != JCS_GRAYSCALE && decoder->jpeg_color_space != JCS_YCbCr &&
      decoder->jpeg_color_space != JCS_RGB) {
    return false;
  }
  decoder->out_color_space = JCS_RGB;
  decoder->dct_method = JDCT_ISLOW;
  decoder->do_fancy_upsampling = TRUE;
  decoder->scale_num = 1;
  decoder->scale_denom = part.denominator;
  jpeg.start(decoder);
  const JDIMENSION height = decoder->output_height, width = decoder->output_width;
  if (part.top > height || part.height > height - part.top || part.left > width ||
      part.width > width - part.left || decoder->output_components != 3) {
    return false;
  }
  // A column of blocks more on each side: smooth upsampling looks at the neighbours.
  const auto margin =
      static_cast<JDIMENSION>(decoder->max_h_samp_factor) * DCTSIZE / part.denominator;
  JDIMENSION first = part.left > margin ? part.left - margin : 0;
  const JDIMENSION end = margin < width - part.left - part.width ? part.left + part.width + margin
                                                                 : width;
  JDIMENSION row_width = end - first;
  if (row_width < width) jpeg.crop_scanline(decoder, &first, &row_width);  // to whole blocks
  const std::size_t row_bytes = std::size_t{row_width} * 3;
  work.rows = static_cast<unsigned char*>(std::malloc(row_bytes * rows_at_once));
  if (work.rows == nullptr) return false;
  JSAMPROW pointers[rows_at_once];
  for (JDIMENSION row = 0; row < rows_at_once; ++row) pointers[row] = work.rows + row * row_bytes;
  if (part.top > 0 && jpeg.skip_scanlines(decoder, part.top) != part.top) return false;
  const std::size_t part_bytes = std::size_t{part.width} * 3;
  const std::size_t begin = std::size_t{part.left - first} * 3;
  for (JDIMENSION done = 0; done < part.height;) {
    const JDIMENSION wanted = std::min(rows_at_once, part.height - done);
    const JDIMENSION count = jpeg.read_scanlines(decoder, pointers, wanted);
    if (count == 0) return false;
    for (JDIMENSION row = 0; row < count; ++row) {
      std::memcpy(target + (done + row) * part_bytes, pointers[row] + begin, part_bytes);
    }
    done += count;
  }
  return true;
}

}  // namespace

bool jpeg_available() noexcept { return library().loaded; }

bool decode_jpeg_part(std::span<const std::byte> body, const JpegPart& part,
                      std::span<std::byte> target) noexcept {
  if (!jpeg_available() || !ends_complete(body)) return false;
  if (part.height == 0 || part.width == 0 || part.denominator == 0 || part.denominator > DCTSIZE) {
    return false;
  }
  if (target.size() != std::size_t{part.height} * part.width * 3) return false;
  Work work;
  const bool is_decoded = decode(work, body, part, target.data());
  std::free(work.rows);
  if (work.decoder.mem != nullptr) library().destroy(&work.decoder);
  return is_decoded;
}

}  // namespace paceline

#else

namespace paceline {

bool jpeg_available() noexcept { return false; }

bool decode_jpeg_part(std::span<const std::byte>, const JpegPart&, std::span<std::byte>) noexcept {
  return false;
}

}  // namespace paceline

#endif
