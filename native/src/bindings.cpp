// The one file that knows Python. Calls are coarse or tiny, and no Python object outlives a call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>

#include "paceline/crc32c.hpp"
#include "paceline/pack_reader.hpp"
#include "paceline/recorder.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using paceline::Event;
using paceline::Kind;
using paceline::PackError;
using paceline::PackReader;
using paceline::Recorder;

namespace {

struct Bytes {  // a view of any object with the buffer protocol, for the length of a call
  explicit Bytes(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  ~Bytes() { PyBuffer_Release(&view); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  Py_buffer view{};
};

std::uint32_t crc32c(nb::handle data, std::uint32_t crc) {
  const Bytes bytes(data);
  const auto size = static_cast<std::size_t>(bytes.view.len);
  if (size < 4096) return paceline::crc32c(bytes.view.buf, size, crc);
  nb::gil_scoped_release released;
  return paceline::crc32c(bytes.view.buf, size, crc);
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
      .def(
          "begin", [](Recorder& self, int kind) { return self.begin(static_cast<Kind>(kind)); },
          "kind"_a)
      .def(
          "end",
          [](Recorder& self, int kind, std::uint32_t name, std::uint64_t begin_ns,
             std::uint64_t amount, int outer) {
            return self.end(static_cast<Kind>(kind), name, begin_ns, amount,
                            static_cast<Kind>(outer));
          },
          "kind"_a, "name"_a, "begin_ns"_a, "amount"_a = 0, "outer"_a = 0)
      .def(
          "record",
          [](Recorder& self, int kind, int lane, std::uint32_t name, std::uint64_t begin_ns,
             std::uint64_t end_ns, std::uint64_t amount, std::uint32_t group,
             std::uint32_t sequence, std::int32_t peer, std::int64_t step) {
            const auto of_step = step < 0 ? self.step() : static_cast<std::uint32_t>(step);
            self.record(Event{begin_ns, end_ns, amount, of_step, name, group, sequence, peer,
                              static_cast<Kind>(kind), static_cast<std::uint8_t>(lane), 0});
          },
          "kind"_a, "lane"_a, "name"_a, "begin_ns"_a, "end_ns"_a, "amount"_a = 0, "group"_a = 0,
          "sequence"_a = 0, "peer"_a = -1, "step"_a = -1)
      .def("end_step", &Recorder::end_step)
      .def("flush", &Recorder::flush, nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Recorder::close, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("step", &Recorder::step)
      .def_prop_ro("dropped_count", &Recorder::dropped_count);
}

nb::bytes to_bytes(std::string_view text) { return nb::bytes(text.data(), text.size()); }

template <class T>
using View = nb::ndarray<nb::numpy, const T, nb::ndim<1>>;

// An array in the mapped index; it keeps the reader alive.
template <class T>
View<T> view(nb::handle self, std::span<const T> array) {
  return View<T>(array.data(), {array.size()}, self);
}

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> own(std::unique_ptr<T[]> data, std::size_t size) {
  nb::capsule owner(data.get(), [](void* pointer) noexcept { delete[] static_cast<T*>(pointer); });
  return {data.release(), {size}, owner};
}

nb::object read_sample(const PackReader& reader, std::uint64_t sample) {
  const std::size_t size = reader.checked_length(sample);
  PyObject* result = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (result == nullptr) throw nb::python_error();
  const nb::object owner = nb::steal(result);
  auto* target = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(result));  // nobody sees it yet
  nb::gil_scoped_release released;
  reader.read(sample, target);
  return owner;
}

using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::tuple read_batch(const PackReader& reader, const Ids& array) {
  const std::span<const std::int64_t> ids(array.data(), array.size());
  std::unique_ptr<std::int64_t[]> offsets(new std::int64_t[ids.size() + 1]);
  std::unique_ptr<std::uint8_t[]> buffer;
  std::size_t size = 0;
  {
    nb::gil_scoped_release released;
    size = reader.plan_batch(ids, offsets.get());
    buffer.reset(new std::uint8_t[size]);
    reader.read_batch(ids, offsets.get(), reinterpret_cast<std::byte*>(buffer.get()));
  }
  return nb::make_tuple(own(std::move(buffer), size), own(std::move(offsets), ids.size() + 1));
}

nb::list verify(const PackReader& reader, std::uint64_t first, std::uint64_t end) {
  std::vector<paceline::BadSample> bad;
  {
    nb::gil_scoped_release released;
    bad = reader.verify(first, end);
  }
  nb::list result;
  for (const auto& one : bad) result.append(nb::make_tuple(one.sample, one.why));
  return result;
}

void bind_pack_reader(nb::module_& module) {
  nb::class_<PackReader>(module, "PackReader")
      .def(
          "__init__",
          [](PackReader* self, const nb::bytes& folder) {
            const std::string path(folder.c_str(), folder.size());
            nb::gil_scoped_release released;
            new (self) PackReader(path);
          },
          "folder"_a)
      .def_prop_ro("sample_count", &PackReader::sample_count)
      .def_prop_ro("folder_count", &PackReader::folder_count)
      .def_prop_ro("class_count", &PackReader::class_count)
      .def_prop_ro("shard_count", &PackReader::shard_count)
      .def_prop_ro("identity", &PackReader::identity)
      .def_prop_ro("lengths",
                   [](nb::handle_t<PackReader> self) {
                     return view(self, nb::cast<PackReader&>(self).lengths());
                   })
      .def_prop_ro("labels",
                   [](nb::handle_t<PackReader> self) {
                     return view(self, nb::cast<PackReader&>(self).labels());
                   })
      .def_prop_ro("modes",
                   [](nb::handle_t<PackReader> self) {
                     return view(self, nb::cast<PackReader&>(self).modes());
                   })
      .def_prop_ro("mtimes",
                   [](nb::handle_t<PackReader> self) {
                     return view(self, nb::cast<PackReader&>(self).mtimes());
                   })
      .def_prop_ro("shards",
                   [](nb::handle_t<PackReader> self) {
                     return view(self, nb::cast<PackReader&>(self).shards());
                   })
      .def(
          "name", [](const PackReader& self, std::uint64_t i) { return to_bytes(self.name(i)); },
          "sample"_a)
      .def(
          "folder",
          [](const PackReader& self, std::uint64_t i) { return to_bytes(self.folder(i)); },
          "index"_a)
      .def(
          "class_name",
          [](const PackReader& self, std::uint64_t i) { return to_bytes(self.class_name(i)); },
          "index"_a)
      .def(
          "find",
          [](const PackReader& self, const nb::bytes& name) {
            return self.find({name.c_str(), name.size()});
          },
          "name"_a)
      .def("read", &read_sample, "sample"_a)
      .def("read_batch", &read_batch, "ids"_a)
      .def("verify", &verify, "first"_a, "end"_a);
}

// Raised as PackError(kind, file, why, errno, sample, shard, expected, found, version).
PyObject* pack_error_type = nullptr;

void raise_pack_error(const PackError& error) {
  constexpr const char* kinds[] = {"io", "corrupt", "sample", "version"};
  const nb::object arguments = nb::make_tuple(
      kinds[static_cast<int>(error.kind)], to_bytes(error.file), error.what(), error.error,
      error.sample, error.shard, error.expected, error.found, error.version);
  PyErr_SetObject(pack_error_type, arguments.ptr());
}

}  // namespace

NB_MODULE(_native, module) {
  // The recorder is in hooks that live as long as the process: no leak that one could mend.
  nb::set_leak_warnings(false);
  module.doc() = "Paceline's C++ core; use it through paceline.native.";
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const PackError& error) {
      raise_pack_error(error);
    } catch (const std::system_error& error) {
      nb::object exception = nb::handle(PyExc_OSError)(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, exception.ptr());
    }
  });
  module.def("crc32c", &crc32c, "data"_a, "crc"_a = 0);
  module.def("monotonic_ns", &paceline::monotonic_ns);
  bind_recorder(module);
  pack_error_type = PyErr_NewException("paceline._native.PackError", PyExc_ValueError, nullptr);
  module.attr("PackError") = nb::handle(pack_error_type);
  bind_pack_reader(module);
}
