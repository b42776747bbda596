// Decodes a part of a JPEG with the libjpeg-turbo of the system (libjpeg.so), which is loaded when it
// is first asked for. What lies below the part is not decoded at all, what lies beside or above it
// only as far as finding the part takes. No Python binding offers this.
//
// libjpeg's structures are its interface, so the header is needed to build this. Without it, without
// the library, or with one that is not libjpeg-turbo 2.1 or newer, it is not available.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline {

struct JpegPart {  // in pixels of the image that is decoded to 1 / denominator of its size
  std::uint32_t top;
  std::uint32_t left;
  std::uint32_t height;
  std::uint32_t width;
  std::uint32_t denominator;  // 1, 2, 4 or 8
};

bool jpeg_available() noexcept;

// The last year in the copyright of libjpeg-turbo, as its messages have it ("Copyright (C) 1991-2023
// The libjpeg-turbo Project"); 0 of another text. It is what a library says of its age: 2.1 is of 2021.
unsigned libjpeg_turbo_year(const char* text) noexcept;

// Writes the RGB pixels of a part to `target` (height * width * 3 bytes): the same as those of the
// full decode, with the accurate inverse DCT and smooth upsampling. Returns false, and leaves in
// `target` what it may, if the part is not inside the image, or the image is anything but a complete
// JPEG in grey, YCbCr or RGB that the library decodes without a warning. `body` is not trusted.
// Thread-safe.
bool decode_jpeg_part(std::span<const std::byte> body, const JpegPart& part,
                      std::span<std::byte> target) noexcept;

}  // namespace paceline
