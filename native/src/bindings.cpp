// The compiled module. Files named bind_* and this one know Python; the rest is plain C++.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/event_codec.hpp"
#include "paceline/host_group.hpp"
#include "paceline/io_events.hpp"
#include "paceline/pack_index.hpp"
#include "paceline/recorder.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using paceline::Kind;
using paceline::LocationType;
using paceline::PackError;
using paceline::Phase;
using paceline::Bytes;
using paceline::Event;
using paceline::to_bytes;
using paceline::Recorder;

namespace {

std::uint32_t crc32c(nb::handle data, std::uint32_t crc) {
  const Bytes bytes(data);
  const auto size = static_cast<std::size_t>(bytes.view.len);
  if (size < 4096) return paceline::crc32c(bytes.view.buf, size, crc);
  nb::gil_scoped_release released;
  return paceline::crc32c(bytes.view.buf, size, crc);
}

std::size_t event_count(const Bytes& events) {
  const auto size = static_cast<std::size_t>(events.view.len);
  if (size % sizeof(Event) != 0) throw nb::value_error("not a whole number of events");
  return size / sizeof(Event);
}

nb::bytes pack_events(nb::handle data) {
  const Bytes events(data);
  const std::size_t count = event_count(events);
  std::string packed;
  {
    nb::gil_scoped_release released;
    packed = paceline::pack_events(static_cast<const Event*>(events.view.buf), count);
  }
  return to_bytes(packed);
}

nb::bytes unpack_events(nb::handle data, std::size_t count) {
  const Bytes packed(data);
  const auto size = static_cast<std::size_t>(packed.view.len);
  bool whole = count <= size / paceline::packed_event_bytes_min;
  nb::bytes events(nullptr, whole ? count * sizeof(Event) : 0);
  if (whole) {
    auto* into = reinterpret_cast<Event*>(PyBytes_AS_STRING(events.ptr()));
    nb::gil_scoped_release released;
    whole = paceline::unpack_events(packed.view.buf, size, into, count);
  }
  if (!whole) throw nb::value_error("these bytes are not that many events");
  return events;
}

void bind_recorder(nb::module_& module) {
  nb::class_<Recorder>(module, "Recorder")
      .def(
          "__init__",
          [](Recorder* self, const std::string& path, std::uint32_t rank, std::uint32_t world_size,
             std::uint32_t buffer_events, double flush_interval_s) {
            new (self) Recorder(
                path, {rank, world_size, buffer_events, flush_interval_s, /*exclusive=*/true});
          },
          "path"_a, "rank"_a, "world_size"_a, "buffer_events"_a = 1U << 16,
          "flush_interval_s"_a = 0.2)
      .def("intern", &Recorder::intern, "name"_a)
      .def("define_group", &Recorder::define_group, "name"_a, "members"_a)
      .def(
          "define_location",
          [](Recorder& self, int type, const std::string& name, std::uint32_t process,
             std::uint32_t number) {
            return self.define_location(static_cast<LocationType>(type), name, process, number);
          },
          "location_type"_a, "name"_a, "process"_a, "number"_a = 0)
      .def(
          "begin", [](Recorder& self, int phase) { return self.begin(static_cast<Phase>(phase)); },
          "phase"_a)
      .def(
          "end",
          [](Recorder& self, int kind, std::uint16_t name, std::uint64_t begin_ns,
             std::uint64_t amount, int outer, std::int32_t tag, std::uint8_t flags) {
            return self.end(static_cast<Kind>(kind), name, begin_ns, amount,
                            static_cast<Phase>(outer), tag, flags);
          },
          "kind"_a, "name"_a, "begin_ns"_a, "amount"_a = 0, "outer"_a = 0, "tag"_a = 0,
          "flags"_a = 0)
      .def(
          "record",
          [](Recorder& self, int kind, std::uint16_t location, std::uint16_t name,
             std::uint64_t begin_ns, std::uint64_t end_ns, std::uint64_t amount,
             std::uint16_t group, std::uint32_t sequence, std::int32_t peer, std::int32_t tag,
             std::int64_t step, std::uint8_t flags) {
            self.record({.begin_ns = begin_ns,
                         .end_ns = end_ns,
                         .amount = amount,
                         .step = step < 0 ? self.step() : static_cast<std::uint32_t>(step),
                         .sequence = sequence,
                         .peer = peer,
                         .tag = tag,
                         .name = name,
                         .group = group,
                         .location = location,
                         .kind = static_cast<Kind>(kind),
                         .flags = flags});
          },
          "kind"_a, "location"_a, "name"_a, "begin_ns"_a, "end_ns"_a, "amount"_a = 0,
          "group"_a = 0, "sequence"_a = 0, "peer"_a = -1, "tag"_a = 0, "step"_a = -1,
          "flags"_a = 0)
      .def(
          "record_events",
          [](Recorder& self, nb::handle data) {
            const Bytes events(data);
            const std::size_t count = event_count(events);
            nb::gil_scoped_release released;
            self.record(static_cast<const Event*>(events.view.buf), count);
          },
          "data"_a)
      .def(
          "enter",
          [](Recorder& self, int kind, std::uint16_t name, std::uint16_t group,
             std::uint32_t sequence, std::int32_t peer, std::uint64_t amount,
             std::uint16_t element) {
            self.enter({.amount = amount,
                        .sequence = sequence,
                        .peer = peer,
                        .tag = element,
                        .name = name,
                        .group = group,
                        .kind = static_cast<Kind>(kind)});
          },
          "kind"_a, "name"_a, "group"_a, "sequence"_a = 0, "peer"_a = -1, "amount"_a = 0,
          "element"_a = 0)
      .def("leave", &Recorder::leave)
      .def("end_step", &Recorder::end_step, "name"_a = 0, "tag"_a = 0)
      .def("attach_io", [](Recorder& self) { return attach_io(self, [] { return true; }); })
      .def("detach_io", [](Recorder& self) { detach_io(self); })
      .def(
          "count_node",
          [](Recorder& self, const nb::bytes& folder) { self.count_node({folder.c_str(), folder.size()}); },
          "folder"_a)
      .def("flush", &Recorder::flush, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Recorder::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("step", &Recorder::step)
      .def_prop_ro("dropped_count", &Recorder::dropped_count);
}

}  // namespace

NB_MODULE(_native, module) {
  // The recorder is in hooks that live as long as the process: nothing is leaked that could be freed.
  nb::set_leak_warnings(false);
  module.doc() = "Paceline's C++ core; use it through paceline.native.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const PackError& error) {
      paceline::raise_pack_error(error);
    } catch (const paceline::GroupError& error) {
      paceline::raise_group_error(error);
    } catch (const std::system_error& error) {
      nb::object exception = nb::handle(PyExc_OSError)(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, exception.ptr());
    }
  });
  module.def("crc32c", &crc32c, "data"_a, "crc"_a = 0);
  module.def("monotonic_ns", &paceline::monotonic_ns);
  module.def("pack_events", &pack_events, "data"_a);
  module.def("unpack_events", &unpack_events, "data"_a, "count"_a);
  bind_recorder(module);
  paceline::bind_collectives(module);
  paceline::bind_fuse(module);
  paceline::bind_in_place(module);
  paceline::bind_jpeg(module);
  paceline::bind_otf2(module);
  paceline::bind_pack_reader(module);
  paceline::bind_node_reader(module);
  paceline::bind_pack_writer(module);
  paceline::bind_peers(module);
  paceline::bind_requests(module);
  paceline::bind_sparsify(module);
  paceline::bind_tensor_pool(module);
}
