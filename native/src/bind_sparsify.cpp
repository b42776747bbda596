// Gradient sparsification for Python. Arrays are buffers of float32 and uint32; calls release the GIL.
#include <nanobind/nanobind.h>

#include "bindings.hpp"
#include "paceline/sparsify.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

template <class T>
struct Array : Bytes {
  explicit Array(nb::handle object, int flags = PyBUF_WRITABLE)
      : Bytes(object, PyBUF_C_CONTIGUOUS | flags) {
    if (view.itemsize != sizeof(T)) throw nb::type_error("elements must have 4 bytes");
  }
  T* data() const { return static_cast<T*>(view.buf); }
  std::size_t count() const { return static_cast<std::size_t>(view.len) / sizeof(T); }
};

std::size_t select(nb::handle gradient, nb::handle momentum, nb::handle residual,
                   nb::handle indices, nb::handle values, std::size_t stride, std::size_t start,
                   std::size_t sample_wanted, float scale, float factor, bool nesterov,
                   bool mask_momentum) {
  const Array<float> g(gradient, PyBUF_SIMPLE), u(momentum), v(residual), taken(values);
  const Array<std::uint32_t> places(indices);
  if (u.count() != g.count() || v.count() != g.count() || g.count() >> 32 != 0)
    throw nb::value_error("gradient, momentum and residual must have one length, below 2^32");
  const std::size_t wanted = places.count();
  if (taken.count() != wanted || wanted == 0 || wanted > g.count() || stride == 0 ||
      start >= g.count() || sample_wanted == 0)
    throw nb::value_error("no such selection");
  nb::gil_scoped_release released;
  return accumulate_and_select(
      {g.data(), u.data(), v.data(), g.count(), scale, factor, nesterov},
      {wanted, stride, start, sample_wanted, mask_momentum}, places.data(), taken.data());
}

void add(nb::handle target, nb::handle indices, nb::handle values, float scale) {
  const Array<float> to(target), taken(values, PyBUF_SIMPLE);
  const Array<std::uint32_t> places(indices, PyBUF_SIMPLE);
  if (places.count() != taken.count())
    throw nb::value_error("indices and values must have one length");
  bool done;
  {
    nb::gil_scoped_release released;
    done = scatter_add(to.data(), to.count(), places.data(), taken.data(), taken.count(), scale);
  }
  if (!done) throw nb::index_error("an index is beyond the end of the target");
}

}  // namespace

void bind_sparsify(nb::module_& module) {
  module.def("accumulate_and_select", &select, "gradient"_a, "momentum"_a, "residual"_a, "indices"_a,
             "values"_a, "stride"_a, "start"_a, "sample_wanted"_a, "scale"_a, "factor"_a,
             "nesterov"_a, "mask_momentum"_a);
  module.def("scatter_add", &add, "target"_a, "indices"_a, "values"_a, "scale"_a = 1.0F);
}

}  // namespace paceline
