// What the files that know Python share. Calls are coarse or tiny, and no Python object outlives a
// call.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string_view>
#include <utility>
#include <vector>

namespace paceline {

struct Bytes {  // a view of any object with the buffer protocol, for the length of a call
  explicit Bytes(nanobind::handle object, int flags = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &view, flags) != 0) throw nanobind::python_error();
  }
  ~Bytes() { PyBuffer_Release(&view); }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  Py_buffer view{};
};

inline nanobind::bytes to_bytes(std::string_view text) {
  return nanobind::bytes(text.data(), text.size());
}

template <class T>
using Array = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;

// An array that owns the values.
template <class T>
Array<T> array(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  const nanobind::capsule owner(kept,
                                [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return {kept->data(), {kept->size()}, owner};
}

struct PackError;

// Sets Python's error to what paceline.native makes of `error`.
void raise_pack_error(const PackError& error) noexcept;

struct GroupError;

// Sets Python's error to what paceline.native makes of `error`.
void raise_group_error(const GroupError& error) noexcept;

void bind_collectives(nanobind::module_& module);
void bind_fuse(nanobind::module_& module);
void bind_in_place(nanobind::module_& module);
void bind_jpeg(nanobind::module_& module);
void bind_node_reader(nanobind::module_& module);
void bind_otf2(nanobind::module_& module);
void bind_pack_reader(nanobind::module_& module);
void bind_pack_writer(nanobind::module_& module);
void bind_peers(nanobind::module_& module);
void bind_requests(nanobind::module_& module);
void bind_sparsify(nanobind::module_& module);
void bind_tensor_pool(nanobind::module_& module);

}  // namespace paceline
