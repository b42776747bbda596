// What packing calls from Python; see pack_writer.hpp.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "bindings.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/pack_index.hpp"
#include "paceline/pack_writer.hpp"

namespace nb = nanobind;
using namespace nb::literals;
namespace paceline {
namespace {

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = Column<std::uint64_t>;
using Buffer = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<const T> span(const Column<T>& array) {
  return {array.data(), array.size()};
}

std::span<const std::byte> bytes_of(const Column<std::uint8_t>& array) {
  return {reinterpret_cast<const std::byte*>(array.data()), array.size()};
}

std::span<const std::byte> bytes_of(const nb::bytes& content) {
  return {reinterpret_cast<const std::byte*>(content.c_str()), content.size()};
}

NameList names(const Offsets& offsets, const Column<std::uint8_t>& blob) {
  return {span(offsets), {reinterpret_cast<const char*>(blob.data()), blob.size()}};
}

// Names, their offsets, modes, sizes, mtimes, devices, inodes, errnos and whether each is a link.
using FolderFields =
    nb::typed<nb::tuple, nb::bytes, Array<std::uint64_t>, Array<std::uint32_t>,
              Array<std::uint64_t>, Array<std::int64_t>, Array<std::uint64_t>,
              Array<std::uint64_t>, Array<std::int32_t>, Array<std::uint8_t>>;

FolderFields listed(int descriptor, const nb::bytes& prefix, bool follow) {
  std::vector<paceline::FolderEntry> entries;
  {
    nb::gil_scoped_release released;
    entries = paceline::list_folder(descriptor, follow);
  }
  const std::size_t count = entries.size();
  const std::string_view above(prefix.c_str(), prefix.size());
  std::string blob;
  std::vector<std::uint64_t> offsets{0};
  std::vector<std::uint64_t> sizes(count), devices(count), inodes(count);
  std::vector<std::uint32_t> modes(count);
  std::vector<std::int64_t> mtimes(count);
  std::vector<std::int32_t> errors(count);
  std::vector<std::uint8_t> links(count);
  for (std::size_t k = 0; k < count; ++k) {
    blob += above;
    blob += entries[k].name;
    offsets.push_back(blob.size());
    sizes[k] = entries[k].size;
    devices[k] = entries[k].device;
    inodes[k] = entries[k].inode;
    modes[k] = entries[k].mode;
    mtimes[k] = entries[k].mtime_ns;
    errors[k] = entries[k].error;
    links[k] = entries[k].is_link ? 1 : 0;
  }
  return nb::make_tuple(to_bytes(blob), array(std::move(offsets)), array(std::move(modes)),
                        array(std::move(sizes)), array(std::move(mtimes)), array(std::move(devices)),
                        array(std::move(inodes)), array(std::move(errors)), array(std::move(links)));
}

// Sample, outcome, errno and the size found.
using ProblemFields = nb::typed<nb::tuple, int, nb::str, int, int>;
using ReadFields = nb::typed<nb::tuple, Array<std::uint32_t>, std::optional<ProblemFields>>;

ReadFields read(int descriptor, const Offsets& offsets, const Column<std::uint8_t>& blob,
                     const Column<std::uint64_t>& lengths, const Column<std::int64_t>& mtimes,
                     const Column<std::uint64_t>& positions, const Buffer& target, bool follow,
                     int threads) {
  std::vector<paceline::FileRead> states;
  {
    nb::gil_scoped_release released;
    states = paceline::read_files(
        descriptor, names(offsets, blob), span(lengths), span(mtimes), span(positions),
        {reinterpret_cast<std::byte*>(target.data()), target.size()}, follow, threads);
  }
  std::vector<std::uint32_t> checksums;
  nb::object problem = nb::none();
  for (std::size_t k = 0; k < states.size(); ++k) {
    const auto& state = states[k];
    if (state.outcome != paceline::ReadOutcome::complete) {
      constexpr const char* outcomes[] = {"complete", "unreadable", "gone",
                                          "no_file", "resized",    "touched"};
      problem = nb::make_tuple(k, outcomes[static_cast<int>(state.outcome)], state.error, state.size);
      break;
    }
    checksums.push_back(state.checksum);
  }
  return nb::make_tuple(array(std::move(checksums)), problem);
}

// Copies samples to their places in a batch, zeroes what lies between, and returns checksums.
Array<std::uint32_t> gather(const nb::list& bodies, const Column<std::uint64_t>& positions,
                  const Buffer& target) {
  const std::size_t count = nb::len(bodies);
  if (positions.size() != count) throw nb::value_error("one position a sample");
  std::vector<std::uint32_t> checksums(count);
  for (std::size_t k = 0; k < count; ++k) {
    const Bytes body(bodies[k]);
    const auto length = static_cast<std::size_t>(body.view.len);
    const std::size_t begin = positions.data()[k];
    const std::size_t end = k + 1 < count ? positions.data()[k + 1] : target.size();
    if (end > target.size() || begin > end || length > end - begin) {
      throw nb::value_error("a sample does not fit its place");
    }
    if (length > 0) std::memcpy(target.data() + begin, body.view.buf, length);
    std::memset(target.data() + begin + length, 0, end - begin - length);
    checksums[k] = paceline::crc32c(target.data() + begin, length);
  }
  return array(std::move(checksums));
}

// Bytes, positions, lengths and codecs.
using EncodedFields = nb::typed<nb::tuple, Array<std::uint8_t>, Array<std::uint64_t>,
                                Array<std::uint64_t>, Array<std::uint8_t>>;

EncodedFields encoded(const Column<std::uint8_t>& source, const Column<std::uint64_t>& positions,
                 const Column<std::uint64_t>& lengths, const std::string& codec, int level,
                 int element_bits, double keep_ratio, const nb::bytes& dictionary,
                 int threads) {
  if (element_bits < paceline::npy_elements || element_bits > paceline::max_element_bits) {
    throw nb::value_error("no such elements");
  }
  const paceline::EncodeOptions options{paceline::codec_of(codec), level, element_bits, keep_ratio,
                                        threads};
  const auto common = bytes_of(dictionary);
  paceline::Encoded result;
  {
    nb::gil_scoped_release released;
    result = paceline::encode(
        bytes_of(source), span(positions), span(lengths), options, common);
  }
  auto* kept = new std::vector<std::byte>(std::move(result.bytes));
  const nb::capsule owner(kept,
                          [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
  const Array<std::uint8_t> stored(
      reinterpret_cast<std::uint8_t*>(kept->data()), {kept->size()}, owner);
  return nb::make_tuple(stored, array(std::move(result.positions)), array(std::move(result.lengths)),
                        array(std::move(result.codecs)));
}

Array<std::uint64_t> order(const Offsets& offsets, const Column<std::uint8_t>& blob) {
  std::vector<std::uint64_t> order;
  {
    nb::gil_scoped_release released;
    order = paceline::sorted_order(names(offsets, blob));
  }
  return array(std::move(order));
}

Array<std::uint64_t> name_hashes(const Offsets& offsets, const Column<std::uint8_t>& blob) {
  const NameList list = names(offsets, blob);
  if (!list.valid()) throw nb::value_error("names do not lie within their blob");
  std::vector<std::uint64_t> hashes(list.size());
  {
    nb::gil_scoped_release released;
    for (std::size_t k = 0; k < hashes.size(); ++k) hashes[k] = paceline::name_hash(list[k]);
  }
  return array(std::move(hashes));
}

Array<std::uint64_t> bounds(const Offsets& offsets, const Column<std::uint8_t>& blob,
                        const Offsets& wanted_offsets, const Column<std::uint8_t>& wanted_blob) {
  std::vector<std::uint64_t> found;
  {
    nb::gil_scoped_release released;
    found = paceline::lower_bounds(names(offsets, blob), names(wanted_offsets, wanted_blob));
  }
  return array(std::move(found));
}

using NameLists = nb::typed<nb::list, nb::typed<nb::tuple, Offsets, Column<std::uint8_t>>>;
// The list of each name, the lengths of the names, the names, whether the last one came before.
using MergedFields =
    nb::typed<nb::tuple, Array<std::uint32_t>, Array<std::uint64_t>, nb::bytes, bool>;

// Holds the arrays whose memory it reads.
struct Merger {
  explicit Merger(const NameLists& lists) {
    std::vector<NameList> views;
    for (const nb::handle list : lists) {
      const auto pair = nb::cast<nb::tuple>(list);
      offsets.push_back(nb::cast<Offsets>(pair[0]));
      blobs.push_back(nb::cast<Column<std::uint8_t>>(pair[1]));
      views.push_back(names(offsets.back(), blobs.back()));
    }
    nb::gil_scoped_release released;
    merger = std::make_unique<NameMerger>(std::move(views));
  }

  MergedFields next(std::size_t count) {
    NameMerger::Piece piece;
    {
      nb::gil_scoped_release released;
      piece = merger->next(count);
    }
    return nb::make_tuple(array(std::move(piece.lists)), array(std::move(piece.lengths)),
                          to_bytes(piece.blob), piece.duplicate);
  }

  std::vector<Offsets> offsets;
  std::vector<Column<std::uint8_t>> blobs;
  std::unique_ptr<NameMerger> merger;
};

nb::bytes trained(const Column<std::uint8_t>& source, const Column<std::uint64_t>& positions,
                  const Column<std::uint64_t>& lengths, std::size_t capacity) {
  std::vector<std::byte> dictionary;
  {
    nb::gil_scoped_release released;
    dictionary =
        paceline::train_dictionary(bytes_of(source), span(positions), span(lengths), capacity);
  }
  return to_bytes({reinterpret_cast<const char*>(dictionary.data()), dictionary.size()});
}

// A codec, and the log2 of the bytes of an element; None: no version so far has it.
std::optional<nb::typed<nb::tuple, nb::str, int>> encoding_of(std::uint8_t code) {
  const auto encoding = paceline::Encoding::of(code);
  if (!encoding) return std::nullopt;
  return nb::make_tuple(paceline::codec_name(encoding->codec), int{encoding->element_bits});
}

// Seconds that decoding the samples of a batch takes on one thread; negative: one cannot be decoded.
double measured(const Column<std::uint8_t>& source, const Column<std::uint64_t>& positions,
                const Column<std::uint64_t>& stored_lengths,
                const Column<std::uint64_t>& lengths, const Column<std::uint8_t>& codes,
                const nb::bytes& dictionary) {
  const auto common = bytes_of(dictionary);
  nb::gil_scoped_release released;
  return paceline::decode_s(bytes_of(source), span(positions), span(stored_lengths), span(lengths),
                            span(codes), common);
}

}  // namespace

void bind_pack_writer(nb::module_& module) {
  module.def("list_folder", &listed, "descriptor"_a, "prefix"_a, "follow"_a);
  module.def("read_files", &read, "descriptor"_a, "offsets"_a, "names"_a, "lengths"_a,
             "mtimes_ns"_a, "positions"_a, "target"_a, "follow"_a, "threads"_a);
  module.def("gather", &gather, "bodies"_a, "positions"_a, "target"_a);
  module.def("encode", &encoded, "source"_a, "positions"_a, "lengths"_a, "codec"_a, "level"_a,
             "element_bits"_a, "keep_ratio"_a, "dictionary"_a, "threads"_a);
  module.def("sorted_order", &order, "offsets"_a, "names"_a);
  module.def("name_hashes", &name_hashes, "offsets"_a, "names"_a);
  module.def("lower_bounds", &bounds, "offsets"_a, "names"_a, "wanted_offsets"_a,
             "wanted_names"_a);
  nb::class_<Merger>(module, "NameMerger")
      .def(nb::init<const NameLists&>(), "lists"_a)
      .def("next", &Merger::next, "count"_a);
  module.def("start_writeback", &paceline::start_writeback, "descriptor"_a, "offset"_a, "length"_a,
             nb::call_guard<nb::gil_scoped_release>());
  module.def("codec_library", [](const std::string& name) {
    return std::string(paceline::codec_library(paceline::codec_of(name)));
  }, "codec"_a);
  module.def("codec_available", [](const std::string& name) {
    return paceline::codec_available(paceline::codec_of(name));
  }, "codec"_a);
  module.def("encoding_of", &encoding_of, "code"_a);
  module.def("train_dictionary", &trained, "source"_a, "positions"_a, "lengths"_a, "capacity"_a);
  module.def("decode_s", &measured, "source"_a, "positions"_a, "stored_lengths"_a, "lengths"_a,
             "codes"_a, "dictionary"_a);
}

}  // namespace paceline
