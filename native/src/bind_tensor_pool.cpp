// The pool of tensors for Python. Blocks cross as addresses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <new>
#include <string>

#include "bindings.hpp"
#include "paceline/tensor_pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

nb::tuple counts(const TensorPool& pool) {
  const TensorPoolCounts all = pool.counts();
  return nb::make_tuple(all.used_bytes, all.resident_bytes, all.cap_bytes, all.fresh_bytes,
                        all.evicted_bytes, all.peak_used_bytes);
}

}  // namespace

void bind_tensor_pool(nb::module_& module) {
  nb::class_<TensorPool>(module, "TensorPool")
      .def(nb::init<std::size_t>(), "range_bytes"_a)
      .def(
          "allocate",
          [](TensorPool& pool, std::size_t size) {
            std::byte* const block = pool.allocate(size);
            if (block == nullptr) throw std::bad_alloc();
            return reinterpret_cast<std::uintptr_t>(block);
          },
          "size"_a)
      .def(
          "release",
          [](TensorPool& pool, std::uintptr_t block) {
            return pool.release(reinterpret_cast<void*>(block));
          },
          "block"_a)
      .def("set_cap", &TensorPool::set_cap, "cap_bytes"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("restart_peak", &TensorPool::restart_peak)
      .def("counts", &counts, nb::sig("def counts(self) -> tuple[int, int, int, int, int, int]"));
  module.def(
      "redirect_allocations",
      [](const std::string& library) { return redirect_allocations(library.c_str()); },
      "library"_a, nb::rv_policy::reference,
      nb::sig("def redirect_allocations(library: str) -> TensorPool | None"));
  module.def("use_pool", &use_pool, "is_used"_a);
}

}  // namespace paceline
