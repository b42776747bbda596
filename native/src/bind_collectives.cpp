// HostGroup for Python. All calls release the GIL; addresses come as integers, arrays as buffers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.hpp"
#include "paceline/host_group.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Address = std::uintptr_t;

std::byte* at(Address address) { return reinterpret_cast<std::byte*>(address); }

DType dtype_of(int number) {
  if (number < 0 || number >= static_cast<int>(dtype_count))
    throw nb::value_error("no such dtype");
  return static_cast<DType>(number);
}

ReduceOp op_of(int number) {
  if (number < 0 || number >= static_cast<int>(reduce_op_count))
    throw nb::value_error("no such operation of a reduction");
  return static_cast<ReduceOp>(number);
}

PyObject* group_error_maker = nullptr;

void check_python_signals() {
  nb::gil_scoped_acquire acquired;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

// Buffer formats of the types that a buffer can have; bfloat16 has none.
DType dtype_of_format(const Py_buffer& view) {
  const char* format = view.format == nullptr ? "B" : view.format;
  if (*format == '<' || *format == '=' || *format == '@') ++format;
  switch (*format) {
    case 'f': return DType::float32;
    case 'd': return DType::float64;
    case 'e': return DType::float16;
    case '?': return DType::boolean;
    case 'b': return DType::int8;
    case 'h': return DType::int16;
    case 'B': return DType::uint8;
    case 'i':
    case 'l':
    case 'q': return view.itemsize == 8 ? DType::int64 : DType::int32;
    default: throw nb::type_error("arrays of this dtype cannot be reduced; give dtype");
  }
}

struct ArrayView : Bytes {
  explicit ArrayView(nb::handle array)
      : Bytes(array, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT) {}
  std::byte* data() const { return static_cast<std::byte*>(view.buf); }
  std::size_t bytes() const { return static_cast<std::size_t>(view.len); }
  DType dtype(int given) const { return given < 0 ? dtype_of_format(view) : dtype_of(given); }
};

void all_reduce_array(HostGroup& group, nb::handle array, int op, int dtype, double timeout_s) {
  const ArrayView view(array);
  const DType type = view.dtype(dtype);
  nb::gil_scoped_release released;
  group.all_reduce(view.data(), view.bytes() / size_bytes(type), type, op_of(op), timeout_s);
}

void reduce_array(HostGroup& group, nb::handle array, int root, int op, int dtype,
                  double timeout_s) {
  const ArrayView view(array);
  const DType type = view.dtype(dtype);
  nb::gil_scoped_release released;
  group.reduce(view.data(), view.bytes() / size_bytes(type), type, op_of(op), root, timeout_s);
}

void broadcast_array(HostGroup& group, nb::handle array, int root, double timeout_s) {
  const ArrayView view(array);
  nb::gil_scoped_release released;
  group.broadcast(view.data(), view.bytes(), root, timeout_s);
}

nb::object allocated(HostGroup& group, std::size_t size) {
  std::byte* data = group.allocate(size);
  if (data == nullptr) return nb::none();
  return nb::int_(reinterpret_cast<Address>(data));
}

void bind_segment(nb::module_& module) {
  nb::class_<HostSegment>(module, "HostSegment")
      .def_static(
          "create",
          [](std::uint32_t rank, std::uint32_t ranks, std::size_t ring_bytes,
             std::size_t packet_bytes, std::size_t heap_bytes) {
            return HostSegment::create(rank, ranks, {ring_bytes, packet_bytes, heap_bytes});
          },
          "rank"_a, "ranks"_a, "ring_bytes"_a = SegmentOptions{}.ring_bytes,
          "packet_bytes"_a = SegmentOptions{}.packet_bytes, "heap_bytes"_a = 0)
      .def_static(
          "open",
          [](const std::string& path, const nb::bytes& nonce) {
            return HostSegment::open(path, std::string(nonce.c_str(), nonce.size()));
          },
          "path"_a, "nonce"_a)
      .def_static(
          "open_descriptor",
          [](int descriptor, const nb::bytes& nonce) {
            return HostSegment::open(descriptor, std::string(nonce.c_str(), nonce.size()));
          },
          "descriptor"_a, "nonce"_a)
      .def_prop_ro("nonce", [](const HostSegment& self) { return to_bytes(self.nonce()); })
      .def_prop_ro("descriptor", &HostSegment::descriptor)
      .def("close_descriptor", &HostSegment::close_descriptor);
}

void bind_message(nb::module_& module) {
  nb::class_<Message>(module, "HostMessage")
      .def_prop_ro("over", [](const Message& self) { return self.over.load(); })
      .def_prop_ro("peer", [](const Message& self) { return self.peer; });
}

void bind_group(nb::module_& module) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<HostGroup>(module, "HostGroup")
      .def(
          "__init__",
          [](HostGroup* self, int rank, std::vector<std::shared_ptr<HostSegment>> segments,
             unsigned spin, std::size_t eager_bytes, std::size_t chunk_bytes,
             std::size_t past_cache_bytes) {
            GroupOptions options;
            options.spin = spin;
            options.eager_bytes = eager_bytes;
            options.chunk_bytes = chunk_bytes;
            options.past_cache_bytes = past_cache_bytes;
            options.check_signals = &check_python_signals;
            new (self) HostGroup(rank, std::move(segments), options);
          },
          "rank"_a, "segments"_a, "spin"_a = 0, "eager_bytes"_a = GroupOptions{}.eager_bytes,
          "chunk_bytes"_a = GroupOptions{}.chunk_bytes,
          "past_cache_bytes"_a = GroupOptions{}.past_cache_bytes)
      .def_prop_ro("rank", &HostGroup::rank)
      .def_prop_ro("ranks", &HostGroup::ranks)
      .def(
          "all_reduce",
          [](HostGroup& self, Address address, std::size_t count, int dtype, int op,
             double timeout_s) {
            self.all_reduce(at(address), count, dtype_of(dtype), op_of(op), timeout_s);
          },
          "address"_a, "count"_a, "dtype"_a, "op"_a, "timeout_s"_a, Released())
      .def(
          "reduce",
          [](HostGroup& self, Address address, std::size_t count, int dtype, int op, int root,
             double timeout_s) {
            self.reduce(at(address), count, dtype_of(dtype), op_of(op), root, timeout_s);
          },
          "address"_a, "count"_a, "dtype"_a, "op"_a, "root"_a, "timeout_s"_a, Released())
      .def(
          "broadcast",
          [](HostGroup& self, Address address, std::size_t size_bytes, int root, double timeout_s) {
            self.broadcast(at(address), size_bytes, root, timeout_s);
          },
          "address"_a, "size_bytes"_a, "root"_a, "timeout_s"_a, Released())
      .def(
          "reduce_scatter",
          [](HostGroup& self, Address source, Address target, std::size_t count_per_rank, int dtype,
             int op, double timeout_s) {
            self.reduce_scatter(at(source), at(target), count_per_rank, dtype_of(dtype), op_of(op),
                                timeout_s);
          },
          "source"_a, "target"_a, "count_per_rank"_a, "dtype"_a, "op"_a, "timeout_s"_a, Released())
      .def(
          "all_gather",
          [](HostGroup& self, Address source, Address target, std::size_t bytes_per_rank,
             double timeout_s) {
            self.all_gather(at(source), at(target), bytes_per_rank, timeout_s);
          },
          "source"_a, "target"_a, "bytes_per_rank"_a, "timeout_s"_a, Released())
      .def(
          "all_to_all",
          [](HostGroup& self, Address source, Address target,
             const std::vector<std::size_t>& send_bytes,
             const std::vector<std::size_t>& receive_bytes, double timeout_s) {
            self.all_to_all(at(source), at(target), send_bytes, receive_bytes, timeout_s);
          },
          "source"_a, "target"_a, "send_bytes"_a, "receive_bytes"_a, "timeout_s"_a, Released())
      .def(
          "gather",
          [](HostGroup& self, Address source, Address target, std::size_t size_bytes, int root,
             double timeout_s) {
            self.gather(at(source), at(target), size_bytes, root, timeout_s);
          },
          "source"_a, "target"_a, "size_bytes"_a, "root"_a, "timeout_s"_a, Released())
      .def(
          "scatter",
          [](HostGroup& self, Address source, Address target, std::size_t size_bytes, int root,
             double timeout_s) {
            self.scatter(at(source), at(target), size_bytes, root, timeout_s);
          },
          "source"_a, "target"_a, "size_bytes"_a, "root"_a, "timeout_s"_a, Released())
      .def("barrier", &HostGroup::barrier, "timeout_s"_a, Released())
      .def(
          "reduce_scatter_in_place",
          [](HostGroup& self, Address address, std::size_t count, int dtype, int op,
             double timeout_s) {
            self.reduce_scatter_in_place(at(address), count, dtype_of(dtype), op_of(op), timeout_s);
          },
          "address"_a, "count"_a, "dtype"_a, "op"_a, "timeout_s"_a, Released())
      .def(
          "reduce_in_place",
          [](HostGroup& self, Address address, std::size_t count, int dtype, int op, int root,
             double timeout_s) {
            self.reduce_in_place(at(address), count, dtype_of(dtype), op_of(op), root, timeout_s);
          },
          "address"_a, "count"_a, "dtype"_a, "op"_a, "root"_a, "timeout_s"_a, Released())
      .def(
          "post_send",
          [](HostGroup& self, Address address, std::size_t size_bytes, int peer,
             std::int64_t tag) { return self.post_send(at(address), size_bytes, peer, tag); },
          "address"_a, "size_bytes"_a, "peer"_a, "tag"_a, Released())
      .def(
          "post_receive",
          [](HostGroup& self, Address address, std::size_t size_bytes, int peer,
             std::int64_t tag) { return self.post_receive(at(address), size_bytes, peer, tag); },
          "address"_a, "size_bytes"_a, "peer"_a, "tag"_a, Released())
      .def("wait", &HostGroup::wait, "message"_a, "timeout_s"_a, Released())
      .def("test", &HostGroup::test, "message"_a, Released())
      .def(
          "send",
          [](HostGroup& self, Address address, std::size_t size_bytes, int peer, std::int64_t tag,
             double timeout_s) { self.send(at(address), size_bytes, peer, tag, timeout_s); },
          "address"_a, "size_bytes"_a, "peer"_a, "tag"_a, "timeout_s"_a, Released())
      .def(
          "receive",
          [](HostGroup& self, Address address, std::size_t size_bytes, int peer, std::int64_t tag,
             double timeout_s) { self.receive(at(address), size_bytes, peer, tag, timeout_s); },
          "address"_a, "size_bytes"_a, "peer"_a, "tag"_a, "timeout_s"_a, Released())
      .def("all_reduce_array", &all_reduce_array, "array"_a, "op"_a = 0, "dtype"_a = -1,
           "timeout_s"_a = 300.0)
      .def("reduce_array", &reduce_array, "array"_a, "root"_a, "op"_a = 0, "dtype"_a = -1,
           "timeout_s"_a = 300.0)
      .def("broadcast_array", &broadcast_array, "array"_a, "root"_a, "timeout_s"_a = 300.0)
      .def("allocate", &allocated, "size_bytes"_a)
      .def(
          "release", [](HostGroup& self, Address address) { self.release(at(address)); },
          "address"_a)
      .def(
          "heap_of",
          [](const HostGroup& self, int rank) {
            return reinterpret_cast<Address>(self.heap_of(rank));
          },
          "rank"_a)
      .def("abort", &HostGroup::abort, "reason"_a, Released())
      .def("close", &HostGroup::close, Released());
}

}  // namespace

void raise_group_error(const GroupError& error) noexcept {
  try {
    constexpr const char* kinds[] = {"none", "lost", "deadline", "mismatch", "aborted", "usage"};
    const nb::object problem = nb::borrow(group_error_maker)(
        kinds[static_cast<std::size_t>(error.kind)], error.rank, std::string(error.what()));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(problem.ptr())), problem.ptr());
  } catch (nb::python_error& failed) {
    failed.restore();
  }
}

void bind_collectives(nb::module_& module) {
  // Kept as long as the process lives: see raise_group_error.
  module.def("set_group_error_maker", [](const nb::callable& make) {
    Py_XDECREF(group_error_maker);
    group_error_maker = nb::object(make).release().ptr();
  }, "make"_a);
  bind_segment(module);
  bind_message(module);
  bind_group(module);
}

}  // namespace paceline
