// OTF2 for Python: one call per location. Spans and records are buffers of the structs of
// otf2_events.hpp; the writer is the address of an OTF2_EvtWriter.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>

#include "bindings.hpp"
#include "paceline/otf2_events.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

template <class T>
std::span<const T> rows(const Bytes& bytes) {
  const auto length = static_cast<std::size_t>(bytes.view.len);
  if (length % sizeof(T) != 0) throw nb::value_error("a buffer ends within a row");
  return {static_cast<const T*>(bytes.view.buf), length / sizeof(T)};
}

// Returns events written, spans cut, by how many ns in all, OTF2's error (0: none), and whether the library could be used.
std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, int, bool> write_events(
    const std::string& library, std::uintptr_t writer, nb::handle spans, nb::handle records) {
  const Bytes intervals(spans, PyBUF_C_CONTIGUOUS);
  const Bytes moments(records, PyBUF_C_CONTIGUOUS);
  const auto all_spans = rows<Otf2Span>(intervals);
  const auto all_records = rows<Otf2Record>(moments);
  nb::gil_scoped_release released;
  const Otf2Written done =
      write_otf2_events(library.c_str(), reinterpret_cast<void*>(writer), all_spans, all_records);
  return {done.events, done.clipped, done.clipped_ns, done.error, done.loaded};
}

}  // namespace

void bind_otf2(nb::module_& module) {
  module.def("write_otf2_events", &write_events, "library"_a, "writer"_a, "spans"_a, "records"_a);
}

}  // namespace paceline
