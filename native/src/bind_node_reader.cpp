// For Python: reads of many samples in the order of storage, and words of memory that processes share.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "futex.hpp"
#include "paceline/sorted_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Ids = nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<nb::numpy, const std::int64_t, nb::ndim<1>, nb::c_contig>;

Numbers view_of(const std::vector<std::int64_t>& values, nb::handle owner) {
  return Numbers(values.data(), {values.size()}, owner);
}

// Unsigned words of 64 bits in memory that processes share, read and written atomically: stores
// release, loads acquire.
class SharedWords {
 public:
  explicit SharedWords(nb::handle memory) : bytes_(memory, PyBUF_WRITABLE) {
    if (reinterpret_cast<std::uintptr_t>(bytes_.view.buf) % sizeof(std::uint64_t) != 0) {
      throw std::invalid_argument("the memory is not aligned");
    }
  }

  std::uint64_t load(std::size_t index) const { return word(index).load(); }
  void store(std::size_t index, std::uint64_t value) const { word(index).store(value); }
  std::uint64_t add(std::size_t index, std::uint64_t value) const {
    return word(index).fetch_add(value) + value;
  }
  bool exchange(std::size_t index, std::uint64_t expected, std::uint64_t value) const {
    return word(index).compare_exchange_strong(expected, value);
  }
  // Sleeps until the word's lower half differs from that of `seen`, at most this long.
  void wait(std::size_t index, std::uint64_t seen, double timeout_s) const {
    const auto& half = lower_half(index);
    const auto duration_ns = static_cast<std::uint64_t>(timeout_s * 1e9);
    nb::gil_scoped_release released;
    if (half.load() == static_cast<std::uint32_t>(seen)) {
      futex_wait(half, static_cast<std::uint32_t>(seen), duration_ns);
    }
  }
  // Adds 1 and wakes all that wait for a change.
  void notify(std::size_t index) const {
    word(index).fetch_add(1);
    futex_wake(lower_half(index));
  }

 private:
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

  std::atomic<std::uint64_t>& word(std::size_t index) const {
    if (index >= static_cast<std::size_t>(bytes_.view.len) / sizeof(std::uint64_t)) {
      throw std::out_of_range("no such word");
    }
    return static_cast<std::atomic<std::uint64_t>*>(bytes_.view.buf)[index];
  }
  std::atomic<std::uint32_t>& lower_half(std::size_t index) const {
    static_assert(std::endian::native == std::endian::little);
    return reinterpret_cast<std::atomic<std::uint32_t>&>(word(index));
  }

  Bytes bytes_;
};

}  // namespace

void bind_node_reader(nb::module_& module) {
  nb::class_<SortedPlan>(module, "SortedPlan")
      .def_ro("target_bytes", &SortedPlan::target_bytes)
      .def_ro("storage_bytes", &SortedPlan::storage_bytes)
      .def_ro("reads", &SortedPlan::reads)
      .def_prop_ro("range_count", [](const SortedPlan& self) { return self.ranges.size(); })
      .def_prop_ro("begins",
                   [](nb::handle_t<SortedPlan> self) {
                     return view_of(nb::cast<SortedPlan&>(self).begins, self);
                   })
      .def_prop_ro("lengths", [](nb::handle_t<SortedPlan> self) {
        return view_of(nb::cast<SortedPlan&>(self).lengths, self);
      });
  nb::class_<SortedReader>(module, "SortedReader")
      .def(
          "__init__",
          [](SortedReader* self, const PackReader& reader, std::size_t gap_bytes,
             std::size_t read_bytes, unsigned threads, unsigned cores, bool direct) {
            new (self) SortedReader(reader, {gap_bytes, read_bytes, threads, cores, direct});
          },
          "reader"_a, "gap_bytes"_a, "read_bytes"_a, "threads"_a, "cores"_a, "direct"_a,
          nb::keep_alive<1, 2>())
      .def(
          "plan",
          [](const SortedReader& self, const Ids& ids) {
            return self.plan({ids.data(), ids.size()});
          },
          "ids"_a)
      .def(
          "read",
          [](const SortedReader& self, SortedPlan& plan, nb::handle out, unsigned depth) {
            const Bytes target(out, PyBUF_WRITABLE);
            nb::gil_scoped_release released;
            self.read(plan, {static_cast<std::byte*>(target.view.buf),
                             static_cast<std::size_t>(target.view.len)},
                      depth);
          },
          "plan"_a, "out"_a, "depth"_a = 0);
  nb::class_<SharedWords>(module, "SharedWords")
      .def(nb::init<nb::handle>(), "memory"_a)
      .def("load", &SharedWords::load, "index"_a)
      .def("store", &SharedWords::store, "index"_a, "value"_a)
      .def("add", &SharedWords::add, "index"_a, "value"_a)
      .def("exchange", &SharedWords::exchange, "index"_a, "expected"_a, "value"_a)
      .def("wait", &SharedWords::wait, "index"_a, "seen"_a, "timeout_s"_a)
      .def("notify", &SharedWords::notify, "index"_a);
}

}  // namespace paceline
