#include "bindings.hpp"
#include "paceline/jpeg.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

bool decode_part(nb::handle data, std::uint32_t top, std::uint32_t left, std::uint32_t height,
                 std::uint32_t width, std::uint32_t denominator, nb::handle out) {
  const Bytes body(data);
  const Bytes target(out, PyBUF_WRITABLE);
  const JpegPart part{top, left, height, width, denominator};
  nb::gil_scoped_release released;
  return decode_jpeg_part(
      {static_cast<const std::byte*>(body.view.buf), static_cast<std::size_t>(body.view.len)}, part,
      {static_cast<std::byte*>(target.view.buf), static_cast<std::size_t>(target.view.len)});
}

}  // namespace

void bind_jpeg(nb::module_& module) {
  module.def("jpeg_available", &jpeg_available);
  module.def("decode_jpeg_part", &decode_part, "data"_a, "top"_a, "left"_a, "height"_a, "width"_a,
             "denominator"_a, "out"_a);
}

}  // namespace paceline
