#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <system_error>

#include "bindings.hpp"
#include "paceline/range_requests.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

std::uint64_t ns_of(double seconds) {
  return static_cast<std::uint64_t>(std::clamp(seconds, 0.0, 1e6) * 1e9);
}

template <class Make>
std::unique_ptr<RangeRequests> made(Make&& make) {
  try {
    return make();
  } catch (const std::system_error& problem) {
    errno = problem.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

// Slot, shard, offset, length, attempt; None: nobody asked within the time.
using Taken = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t, std::uint32_t>;

std::optional<Taken> take(RangeRequests& self, double wait_s) {
  nb::gil_scoped_release released;
  const auto request = self.take(ns_of(wait_s));
  if (!request) return std::nullopt;
  return Taken(request->slot, request->shard, request->offset, request->length, request->attempt);
}

int fetch(RangeRequests& self, std::uint32_t shard, std::uint64_t offset, nb::handle out,
          std::uint32_t attempt, double wait_s) {
  const Bytes target(out, PyBUF_WRITABLE);
  nb::gil_scoped_release released;
  const std::span<std::byte> bytes(static_cast<std::byte*>(target.view.buf),
                                   static_cast<std::size_t>(target.view.len));
  return static_cast<int>(self.fetch(shard, offset, bytes, attempt, ns_of(wait_s)));
}

ServedCount count_of(std::uint32_t what) {
  if (what >= served_counts) throw nb::index_error("no such count");
  return static_cast<ServedCount>(what);
}

}  // namespace

void bind_requests(nb::module_& module) {
  nb::class_<RangeRequests>(module, "RangeRequests")
      .def_static(
          "create",
          [](std::uint32_t shards, std::uint32_t slots, std::uint32_t slot_bytes,
             const std::string& node) {
            return made([&] { return RangeRequests::create(shards, slots, slot_bytes, node); });
          },
          "shards"_a, "slots"_a, "slot_bytes"_a, "node"_a)
      .def_static(
          "map", [](int fd) { return made([&] { return RangeRequests::map(fd); }); },
          "descriptor"_a)
      .def_static(
          "open",
          [](const nb::bytes& path) {
            const std::string text(path.c_str(), path.size());
            return made([&] { return RangeRequests::open(text); });
          },
          "path"_a)
      .def_prop_ro("descriptor", &RangeRequests::descriptor)
      .def_prop_ro("node", &RangeRequests::node)
      .def_prop_ro("has_ended", &RangeRequests::has_ended)
      .def_prop_ro("is_serving", &RangeRequests::is_serving)
      .def("is_held", &RangeRequests::is_held, "shard"_a)
      .def("fetch", &fetch, "shard"_a, "offset"_a, "out"_a, "attempt"_a, "wait_s"_a)
      .def(
          "await_serving",
          [](const RangeRequests& self, double wait_s) {
            nb::gil_scoped_release released;
            return self.await_serving(ns_of(wait_s));
          },
          "wait_s"_a)
      .def(
          "set_state",
          [](RangeRequests& self, int state) { self.set_state(static_cast<ServerState>(state)); },
          "state"_a)
      .def("set_held", &RangeRequests::set_held, "shard"_a, "is_held"_a)
      .def("beat", &RangeRequests::beat)
      .def("take", &take, "wait_s"_a)
      .def(
          "room",
          [](RangeRequests& self, std::uint32_t slot, std::size_t length) {
            const auto room = self.room(slot);
            const auto* bytes = reinterpret_cast<const std::uint8_t*>(room.data());
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(
                const_cast<std::uint8_t*>(bytes), {std::min(length, room.size())},
                nb::find(&self));
          },
          "slot"_a, "length"_a)
      .def(
          "finish",
          [](RangeRequests& self, std::uint32_t slot, int outcome) {
            self.finish(slot, static_cast<RequestOutcome>(outcome));
          },
          "slot"_a, "outcome"_a)
      .def("queue_length", &RangeRequests::queue_length)
      .def(
          "count",
          [](RangeRequests& self, std::uint32_t what, std::uint64_t amount) {
            self.count(count_of(what), amount);
          },
          "what"_a, "amount"_a)
      .def(
          "raise_to",
          [](RangeRequests& self, std::uint32_t what, std::uint64_t least) {
            self.raise(count_of(what), least);
          },
          "what"_a, "least"_a)
      .def("counts",
           [](const RangeRequests& self) {
             nb::list counts;
             for (std::uint32_t what = 0; what < served_counts; ++what) {
               counts.append(self.counted(static_cast<ServedCount>(what)));
             }
             return nb::typed<nb::list, int>(counts);
           })
      .def("recover", &RangeRequests::recover)
      .def("reap", &RangeRequests::reap);
}

}  // namespace paceline
