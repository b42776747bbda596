#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "paceline/buffer_pool.hpp"
#include "paceline/codecs.hpp"
#include "paceline/pack_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

// A memoryview, in signatures.
struct MemoryView : nb::object {
  static constexpr auto Name = nb::detail::const_name("memoryview");
};

template <class T>
using View = nb::ndarray<nb::numpy, const T, nb::ndim<1>>;
using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::int64_t> span_of(const Ids& array) { return {array.data(), array.size()}; }

// Steals `item`; a failure has set Python's error.
void append(nb::list& list, PyObject* item) {
  if (item == nullptr) throw nb::python_error();
  list.append(nb::steal(item));
}

// Of what the index says: copied out, because a file that shrinks ends what reads it (PackIndex::read).
template <class Get>
nb::bytes name_of(const PackReader& reader, Get get) {
  std::string name;
  reader.index().read([&] { name = get(reader.index()); });
  return to_bytes(name);
}

nb::bytes read_sample(const PackReader& reader, std::int64_t number) {
  if (number < 0) throw std::out_of_range("no such sample");
  const auto sample = static_cast<std::uint64_t>(number);
  auto single = reader.find_single(sample);
  std::size_t size = 0;
  if (single) {
    size = single->extent.length;
  } else {
    reader.index().read([&] { size = reader.checked_length(sample); });
  }
  const auto id = static_cast<std::int64_t>(sample);
  const std::int64_t offsets[] = {0, static_cast<std::int64_t>(size)};
  reader.check_memory({&id, 1}, offsets);
  PyObject* result = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (result == nullptr) {
    PyErr_Clear();  // it says no more than MemoryError
    reader.fail_memory({&id, 1}, offsets, UINT64_MAX);
  }
  const nb::bytes owner = nb::steal<nb::bytes>(result);
  auto* target = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(result));  // not yet handed out
  nb::gil_scoped_release released;
  if (single) {
    single->target = target;
    reader.read_single(*single);
  } else {
    reader.read_batch({&id, 1}, offsets, {target, size});
  }
  return owner;
}

// Of n + 1 offsets. Not a vector: zeroing what plan_batch fills costs as much as filling it.
struct OwnOffsets {
  explicit OwnOffsets(std::size_t count) : size(count + 1), data(new std::int64_t[size]) {}
  std::span<std::int64_t> span() const { return {data.get(), size}; }
  std::size_t size;
  std::unique_ptr<std::int64_t[]> data;
};

Array<std::int64_t> array_of_offsets(OwnOffsets offsets) {
  nb::capsule owner(offsets.data.get(),
                    [](void* p) noexcept { delete[] static_cast<std::int64_t*>(p); });
  return {offsets.data.release(), {offsets.size}, owner};
}

struct Lease {  // of a recycled buffer; the array that shows it gives it back
  explicit Lease(std::size_t size) : buffer(acquire_buffer(size)) {}
  ~Lease() { release_buffer(buffer); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  std::span<std::byte> buffer;
};

Array<std::uint8_t> acquire(std::size_t size) {
  auto lease = std::make_unique<Lease>(size);
  auto* const data = reinterpret_cast<std::uint8_t*>(lease->buffer.data());
  nb::capsule owner(lease.get(), [](void* p) noexcept { delete static_cast<Lease*>(p); });
  static_cast<void>(lease.release());
  return {data, {size}, owner};
}

nb::typed<nb::tuple, Array<std::uint8_t>, Array<std::int64_t>> read_batch(const PackReader& reader,
                                                                          const Ids& array) {
  const auto ids = span_of(array);
  OwnOffsets offsets(ids.size());
  std::unique_ptr<Lease> lease;
  std::size_t size = 0;
  {
    nb::gil_scoped_release released;
    size = reader.plan_batch(ids, offsets.span());
    reader.check_memory(ids, offsets.span());
    try {
      lease = std::make_unique<Lease>(size);
    } catch (const std::bad_alloc&) {
      reader.fail_memory(ids, offsets.span(), UINT64_MAX);
    }
    reader.read_batch(ids, offsets.span(), lease->buffer);
  }
  auto* const data = reinterpret_cast<std::uint8_t*>(lease->buffer.data());
  nb::capsule owner(lease.get(), [](void* p) noexcept { delete static_cast<Lease*>(p); });
  static_cast<void>(lease.release());
  const Array<std::uint8_t> buffer(data, {size}, owner);
  return nb::make_tuple(buffer, array_of_offsets(std::move(offsets)));
}

Array<std::int64_t> read_batch_into(const PackReader& reader, const Ids& array, nb::handle out) {
  const Bytes target(out, PyBUF_WRITABLE);
  const auto ids = span_of(array);
  OwnOffsets offsets(ids.size());
  {
    nb::gil_scoped_release released;
    const std::size_t size = reader.plan_batch(ids, offsets.span());
    const auto room = static_cast<std::size_t>(target.view.len);
    if (size > room) {
      throw std::length_error("the buffer has " + std::to_string(room) + " bytes, the samples " +
                              std::to_string(size));
    }
    const std::span<std::byte> buffer(static_cast<std::byte*>(target.view.buf), size);
    if (size > 0) populate_for_writing(buffer);
    reader.read_batch(ids, offsets.span(), buffer);
  }
  return array_of_offsets(std::move(offsets));
}

nb::typed<nb::list, MemoryView> views(nb::handle_t<PackReader> self, const Ids& array) {
  const auto& reader = nb::cast<PackReader&>(self);
  const auto ids = span_of(array);
  std::vector<std::optional<std::span<const std::byte>>> found;
  {
    nb::gil_scoped_release released;
    found = reader.views(ids);
  }
  nb::list result;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (!found[i]) {  // encoded, or in several extents
      const auto body = read_sample(reader, ids[i]);
      append(result, PyMemoryView_FromObject(body.ptr()));
      continue;
    }
    const auto* const data = reinterpret_cast<const std::uint8_t*>(found[i]->data());
    const View<std::uint8_t> bytes(data, {found[i]->size()}, self);
    append(result, PyMemoryView_FromObject(nb::cast(bytes).ptr()));
  }
  return result;
}

// Sample, shard, name ("" if unknown) and what is wrong.
using BadSampleFields = nb::typed<nb::tuple, int, int, nb::bytes, nb::str>;

nb::typed<nb::list, BadSampleFields> verify(const PackReader& reader, std::uint64_t first,
                                            std::uint64_t end) {
  std::vector<BadSample> bad;
  {
    nb::gil_scoped_release released;
    bad = reader.verify(first, end);
  }
  nb::list result;
  for (const auto& sample : bad) {
    result.append(nb::make_tuple(sample.sample, sample.shard, to_bytes(sample.name), sample.why));
  }
  return result;
}

Array<std::uint32_t> checksums(const PackReader& reader, std::uint64_t first, std::uint64_t end) {
  std::vector<std::uint32_t> found;
  {
    nb::gil_scoped_release released;
    found = reader.checksums(first, end);
  }
  return array(std::move(found));
}

// Shard, offset, stored length, length, checksum and codec.
using ExtentFields = nb::typed<nb::tuple, int, int, int, int, int, int>;

nb::typed<nb::list, ExtentFields> extents(const PackReader& reader, std::uint64_t sample) {
  std::vector<Extent> found;
  reader.index().read([&] {
    const auto [first, end] = reader.index().extents(sample);
    for (std::uint64_t i = first; i < end; ++i) found.push_back(reader.index().extent(i));
  });
  nb::list result;
  for (const Extent& extent : found) {
    result.append(nb::make_tuple(extent.shard, extent.offset, extent.stored_length, extent.length,
                                 extent.checksum, static_cast<int>(extent.encoding.code())));
  }
  return result;
}

// The `length` bytes that an extent stands for, or None: for repairing packs, extent by extent.
std::optional<nb::bytes> decoded(const PackReader& reader, nb::handle data, std::uint8_t code,
                                 std::size_t length) {
  const std::optional<Encoding> encoding = Encoding::of(code);
  if (!encoding || length > max_encoded_length) return std::nullopt;
  if (!codec_available(encoding->codec)) {
    throw PackError(PackError::Kind::library, codec_library(encoding->codec), "");
  }
  const Bytes source(data);
  PyObject* const result = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(length));
  if (result == nullptr) throw nb::python_error();
  const nb::bytes owner = nb::steal<nb::bytes>(result);
  const auto* frame = static_cast<const std::byte*>(source.view.buf);
  auto* target = reinterpret_cast<std::byte*>(PyBytes_AS_STRING(result));  // not yet handed out
  bool is_complete = false;
  {
    nb::gil_scoped_release released;
    is_complete = decode(*encoding, reader.index().dictionary(),
                         {frame, static_cast<std::size_t>(source.view.len)}, {target, length});
  }
  if (!is_complete) return std::nullopt;
  return owner;
}

PyObject* text(std::string_view name) {
  const auto is_ascii = [](char one) { return static_cast<unsigned char>(one) < 128; };
  const auto size = static_cast<Py_ssize_t>(name.size());
  if (!std::all_of(name.begin(), name.end(), is_ascii)) {
    return PyUnicode_DecodeFSDefaultAndSize(name.data(), size);
  }
  PyObject* const result = PyUnicode_New(size, 127);  // no codec to ask: half of an entry's cost
  if (result != nullptr && size > 0) {
    std::memcpy(PyUnicode_1BYTE_DATA(result), name.data(), name.size());
  }
  return result;
}

// Makes the entries of one folder, of a NamedTuple's type. Neighbours mostly have one mode.
class EntryMaker {
 public:
  explicit EntryMaker(nb::handle type) : type_(reinterpret_cast<PyTypeObject*>(type.ptr())) {
    if (!PyType_Check(type.ptr()) || PyType_IsSubtype(type_, &PyTuple_Type) == 0) {
      throw nb::type_error("entries are made of a type of tuples");
    }
  }

  PyObject* operator()(std::string_view path, bool is_folder, std::uint64_t number,
                       std::uint64_t size, std::uint32_t mode, std::int64_t mtime_ns) {
    if (!mode_object_ || mode != mode_) {
      mode_object_ = nb::steal(PyLong_FromUnsignedLong(mode));
      mode_ = mode;
    }
    PyObject* const result = type_->tp_alloc(type_, 6);
    if (result == nullptr) throw nb::python_error();
    PyObject* const values[] = {text(path.substr(path.rfind('/') + 1)),  // npos + 1 is 0
                                PyBool_FromLong(is_folder),
                                PyLong_FromUnsignedLongLong(number),
                                PyLong_FromUnsignedLongLong(size),
                                nb::object(mode_object_).release().ptr(),
                                PyLong_FromLongLong(mtime_ns)};
    for (int i = 0; i < 6; ++i) PyTuple_SET_ITEM(result, i, values[i]);
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    // It holds no container: nothing for the garbage collector to look at again and again.
    PyObject_GC_UnTrack(result);
    return result;
  }

 private:
  PyTypeObject* type_;
  nb::object mode_object_;
  std::uint32_t mode_ = 0;
};

void add_entries(const PackReader& reader, std::int64_t folder, EntryMaker& make, nb::list& result,
                 std::vector<std::pair<std::uint64_t, std::uint64_t>>& ranges) {
  const PackIndex& index = reader.index();
  const bool root = folder < 0;
  const auto at = static_cast<std::uint64_t>(folder);
  std::pair<std::uint64_t, std::uint64_t> samples{0, index.sample_count()};
  if (!root) samples = index.folder_samples(at);
  const std::uint64_t last = root ? index.folder_count() : index.folder_end(at);
  std::uint64_t next = samples.first;
  for (std::uint64_t below = root ? 0 : at + 1; below < last; below = index.folder_end(below)) {
    const auto [first, end] = index.folder_samples(below);
    // Were they not nested, a walk could come by the same entries again and again.
    if (index.folder_end(below) > last || first < next || end > samples.second) {
      fail_corrupt(index.path(), "folders do not lie within each other");
    }
    append(result, make(index.folder(below), true, below, 0, 0, 0));
    if (next < first) ranges.emplace_back(next, first);
    next = end;
  }
  if (next < samples.second) ranges.emplace_back(next, samples.second);
  for (const auto& [first, end] : ranges) {
    for (std::uint64_t i = first; i < end; ++i) {
      append(result, make(index.name(i), false, i, reader.checked_length(i), index.modes()[i],
                          index.mtimes()[i]));
    }
  }
}

// The entries of a folder, first its folders and then its samples, sorted; -1 is the root of the
// pack. Takes time proportional to the entries, not to those of sub-folders.
nb::typed<nb::list, nb::object> entries(const PackReader& reader, std::int64_t folder, nb::handle type) {
  nb::list result;
  EntryMaker make(type);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;  // samples between the folders
  // Should the index shrink meanwhile, the one entry that is being made is lost.
  reader.index().read([&] { add_entries(reader, folder, make, result, ranges); });
  return result;
}

// What `get` returns for each of these samples.
template <class T, class Get>
Array<T> values_of(const PackReader& reader, const Ids& array, Get get) {
  const auto ids = span_of(array);
  std::unique_ptr<T[]> result(new T[ids.size()]);
  T* const target = result.get();
  reader.index().read([&] {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || static_cast<std::uint64_t>(ids[i]) >= reader.index().sample_count()) {
        throw std::out_of_range("no such sample");
      }
      target[i] = get(static_cast<std::uint64_t>(ids[i]));
    }
  });
  nb::capsule owner(target, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  static_cast<void>(result.release());
  return {target, {ids.size()}, owner};
}

void open(PackReader* self, const nb::bytes& place, const std::string& policy, unsigned threads,
          bool direct, bool index_only, bool lazy) {
  ReadOptions options;
  options.verify = policy == "always"  ? Verify::always
                   : policy == "never" ? Verify::never
                                       : Verify::first;
  options.threads = threads;
  options.direct = direct;
  options.index_only = index_only;
  options.lazy = lazy;
  const std::string path(place.c_str(), place.size());
  nb::gil_scoped_release released;
  new (self) PackReader(path, options);
}

// Given by paceline.native when it is imported: makes one of our errors of what a PackError says.
PyObject* pack_error_maker = nullptr;

}  // namespace

void raise_pack_error(const PackError& error) noexcept {
  constexpr const char* kinds[] = {"io",     "corrupt", "sample",  "version",
                                   "memory", "source",  "changed", "unsupported", "library"};
  try {
    const nb::object problem = nb::borrow(pack_error_maker)(
        "kind"_a = kinds[static_cast<int>(error.kind)], "file"_a = to_bytes(error.file),
        "why"_a = error.what(), "error"_a = error.error, "direct"_a = error.direct,
        "sample"_a = error.sample, "shard"_a = error.shard, "name"_a = to_bytes(error.name),
        "version"_a = error.version);
    PyErr_SetObject(problem.type().ptr(), problem.ptr());
  } catch (nb::python_error& failed) {
    failed.restore();
  } catch (const std::exception& failed) {
    PyErr_SetString(PyExc_RuntimeError, failed.what());
  }
}

void bind_pack_reader(nb::module_& module) {
  module.attr("PACK_FORMAT_VERSION") = pack_format_version;
  // Kept as long as the process lives: see raise_pack_error.
  module.def("set_pack_error_maker", [](const nb::callable& make) {
    Py_XDECREF(pack_error_maker);
    pack_error_maker = nb::object(make).release().ptr();
  }, "make"_a);
  module.def("acquire_buffer", &acquire, "size"_a);
  const auto count = [](auto get) {
    return [get](const PackReader& self) { return (self.index().*get)(); };
  };
  nb::class_<PackReader>(module, "PackReader")
      .def("__init__", &open, "place"_a, "verify"_a = "first", "threads"_a = 1,
           "direct"_a = false, "index_only"_a = false, "lazy"_a = false)
      .def_prop_ro("version", count(&PackIndex::version))
      .def_prop_ro("sample_count", count(&PackIndex::sample_count))
      .def_prop_ro("extent_count", count(&PackIndex::extent_count))
      .def_prop_ro("folder_count", count(&PackIndex::folder_count))
      .def_prop_ro("class_count", count(&PackIndex::class_count))
      .def_prop_ro("shard_count", count(&PackIndex::shard_count))
      .def_prop_ro("is_in_place", count(&PackIndex::is_in_place))
      .def_prop_ro("has_checksums", count(&PackIndex::has_checksums))
      .def(
          "shard_path",
          [](const PackReader& self, std::uint32_t shard) {
            return name_of(self, [shard](const PackIndex& index) { return index.shard_path(shard); });
          },
          "shard"_a)
      .def_prop_ro("head",
                   [](const PackReader& self) {
                     const auto head = self.index().head();
                     return nb::bytes(head.data(), head.size());
                   })
      .def(
          "section",
          [](nb::handle_t<PackReader> self, std::uint32_t id) {
            const auto& reader = nb::cast<PackReader&>(self);
            if (!is_known_section(id)) throw std::out_of_range("no such section");
            const auto section = static_cast<Section>(id);
            const auto content = reader.index().section(section);
            {
              nb::gil_scoped_release released;
              reader.index().read([&] { reader.index().verify_section(section); });
            }
            const auto* data = reinterpret_cast<const std::uint8_t*>(content.data());
            return View<std::uint8_t>(data, {content.size()}, self);
          },
          "number"_a)
      .def(
          "name",
          [](const PackReader& self, std::uint64_t i) {
            return name_of(self, [i](const PackIndex& index) { return index.name(i); });
          },
          "sample"_a)
      .def(
          "folder",
          [](const PackReader& self, std::uint64_t i) {
            return name_of(self, [i](const PackIndex& index) { return index.folder(i); });
          },
          "index"_a)
      .def(
          "class_name",
          [](const PackReader& self, std::uint64_t i) {
            return name_of(self, [i](const PackIndex& index) { return index.class_name(i); });
          },
          "index"_a)
      .def(
          "find",
          [](const PackReader& self, const nb::bytes& name) {
            std::int64_t found = -1;
            self.index().read([&] { found = self.index().find({name.c_str(), name.size()}); });
            return found;
          },
          "name"_a)
      .def(
          "find_folder",
          [](const PackReader& self, const nb::bytes& name) {
            std::int64_t found = -1;
            self.index().read(
                [&] { found = self.index().find_folder({name.c_str(), name.size()}); });
            return found;
          },
          "name"_a)
      .def(
          "labels",
          [](const PackReader& self, const Ids& ids) {
            const auto& labels = self.index().labels();
            return values_of<std::int32_t>(self, ids, [&](std::uint64_t i) { return labels[i]; });
          },
          "ids"_a)
      .def(
          "lengths",
          [](const PackReader& self, const Ids& ids) {
            return values_of<std::int64_t>(self, ids, [&](std::uint64_t i) {
              return static_cast<std::int64_t>(self.index().claimed_length(i));
            });
          },
          "ids"_a)
      .def(
          "verify_index",
          [](const PackReader& self) { self.index().read([&] { self.index().verify_sections(); }); },
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "check_content", [](const PackReader& self) { self.index().check_content(); },
          nb::call_guard<nb::gil_scoped_release>())
      .def("entries", &entries, "folder"_a, "kind"_a)
      .def("extents", &extents, "sample"_a)
      .def("decode", &decoded, "data"_a, "code"_a, "length"_a)
      .def("read", &read_sample, "sample"_a)
      .def("read_batch", &read_batch, "ids"_a)
      .def("read_batch_into", &read_batch_into, "ids"_a, "out"_a)
      .def("views", &views, "ids"_a)
      .def(
          "prefetch",
          [](const PackReader& self, const Ids& ids) { self.prefetch(span_of(ids)); }, "ids"_a)
      .def("verify", &verify, "first"_a, "end"_a)
      .def("checksums", &checksums, "first"_a, "end"_a)
      .def("evict", &PackReader::evict, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("busy_ns", &PackReader::busy_ns)
      .def_prop_ro("verify_ns", &PackReader::verify_ns)
      .def("evict_index", &PackReader::evict_index, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace paceline
