#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>

#include "bindings.hpp"
#include "paceline/fuse_server.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

std::string path_of(const nb::bytes& path) { return {path.c_str(), path.size()}; }

nb::typed<nb::tuple, int, int, int, int> stats(const FuseServer& server) {
  const FuseStats found = server.stats();
  return nb::make_tuple(found.requests, found.reads, found.bytes, found.errors);
}

}  // namespace

void bind_fuse(nb::module_& module) {
  nb::class_<FuseServer>(module, "FuseServer")
      .def(
          "__init__",
          [](FuseServer* self, const nb::bytes& place) { new (self) FuseServer(path_of(place)); },
          "place"_a)
      .def("start", &FuseServer::start, "device"_a, "threads"_a)
      .def(
          "wait_ready",
          [](const FuseServer& self, double wait_s) {
            nb::gil_scoped_release released;
            return self.wait_ready(static_cast<std::uint64_t>(std::clamp(wait_s, 0.0, 1e6) * 1e9));
          },
          "wait_s"_a)
      .def_prop_ro("ended", &FuseServer::ended)
      .def("stats", &stats);
  module.def(
      "mount_fuse",
      [](int device, const nb::bytes& source, const nb::bytes& point) {
        mount_fuse(device, path_of(source), path_of(point));
      },
      "device"_a, "source"_a, "point"_a);
  module.def(
      "unmount",
      [](const nb::bytes& point, bool lazy) {
        const std::string path = path_of(point);
        nb::gil_scoped_release released;
        unmount(path, lazy);
      },
      "point"_a, "lazy"_a);
}

}  // namespace paceline
