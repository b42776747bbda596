// What indexing data in place calls from Python; see lmdb_records.hpp and tfrecord_records.hpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "paceline/lmdb_records.hpp"
#include "paceline/tfrecord_records.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

std::string path_of(const nb::bytes& path) { return {path.c_str(), path.size()}; }

// Page size, whether keys are compared from their end, last page, transaction and checksum.
using MetaFields = nb::typed<nb::tuple, int, bool, int, int, int>;

MetaFields fields_of(const LmdbMeta& meta) {
  return nb::make_tuple(meta.page_bytes, meta.has_reversed_order, meta.last_page, meta.transaction,
                        meta.checksum);
}

// Offsets and lengths of values, offsets and bytes of names, whether all are paths, whether some have
// folders.
using LmdbFields = nb::typed<nb::tuple, Array<std::uint64_t>, Array<std::uint64_t>,
                             Array<std::uint64_t>, nb::bytes, bool, bool>;

LmdbFields next_records(LmdbRecords& records, std::size_t count) {
  LmdbBlock block;
  {
    nb::gil_scoped_release released;
    block = records.next(count);
  }
  return nb::make_tuple(array(std::move(block.offsets)), array(std::move(block.lengths)),
                        array(std::move(block.name_offsets)), to_bytes(block.names),
                        block.are_paths, block.has_folders);
}

// Offsets, lengths and checksums of the data.
using TfRecordFields = nb::typed<nb::tuple, Array<std::uint64_t>, Array<std::uint64_t>,
                                 Array<std::uint32_t>>;

TfRecordFields next_tfrecords(TfRecords& records, std::size_t count) {
  TfRecordBlock block;
  {
    nb::gil_scoped_release released;
    block = records.next(count);
  }
  return nb::make_tuple(array(std::move(block.offsets)), array(std::move(block.lengths)),
                        array(std::move(block.checksums)));
}

}  // namespace

void bind_in_place(nb::module_& module) {
  module.def(
      "lmdb_meta", [](const nb::bytes& path) { return fields_of(lmdb_meta(Mapping(path_of(path)))); },
      "path"_a);
  nb::class_<LmdbRecords>(module, "LmdbRecords")
      .def(
          "__init__",
          [](LmdbRecords* self, const nb::bytes& path, std::uint32_t key_names) {
            new (self) LmdbRecords(path_of(path), static_cast<KeyNames>(key_names));
          },
          "path"_a, "key_names"_a)
      .def("next", &next_records, "count"_a);
  nb::class_<TfRecords>(module, "TfRecords")
      .def(
          "__init__",
          [](TfRecords* self, const nb::bytes& path, bool to_cut) {
            new (self) TfRecords(path_of(path), to_cut);
          },
          "path"_a, "to_cut"_a)
      .def("next", &next_tfrecords, "count"_a)
      .def_prop_ro("cut_bytes", &TfRecords::cut_bytes);
}

}  // namespace paceline
