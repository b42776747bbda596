#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "bindings.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/extent_plan.hpp"
#include "paceline/peer_link.hpp"
#include "paceline/peer_server.hpp"
#include "paceline/tls.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace paceline {
namespace {

using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Problem = nb::typed<nb::tuple, nb::str, nb::str>;

Digest digest_of(const nb::bytes& data) {
  Digest digest;
  if (data.size() != digest.size()) throw nb::value_error("a digest has 32 bytes");
  std::memcpy(digest.data(), data.c_str(), digest.size());
  return digest;
}

std::uint64_t ns_of(double seconds) {
  return static_cast<std::uint64_t>(std::clamp(seconds, 0.0, 1e6) * 1e9);
}

const char* name_of(PeerError::Kind kind) {
  constexpr const char* names[] = {"", "lost", "deadline", "token", "pack", "protocol", "interrupted", "tls"};
  return names[static_cast<int>(kind)];
}

void open_server(PeerServer* self, const std::string& host, std::uint16_t port,
                 const nb::bytes& token, const nb::bytes& pack, unsigned threads, int listener,
                 std::shared_ptr<TlsContext> tls) {
  PeerServerOptions options;
  options.host = host;
  options.port = port;
  options.token = digest_of(token);
  options.pack = digest_of(pack);
  options.threads = threads;
  options.listener = listener;
  options.tls = std::move(tls);
  new (self) PeerServer(options);
}

nb::typed<nb::tuple, int, int, int, int, int> stats(const PeerServer& server) {
  const PeerServerStats found = server.stats();
  return nb::make_tuple(found.connections, found.refused_connections, found.reads, found.ranges,
                        found.bytes);
}

// Kind of the problem ("" for none), why, and the node's card.
nb::typed<nb::tuple, nb::str, nb::str, nb::bytes> connect_link(PeerLink& link, const std::string& host,
                                                               std::uint16_t port,
                                                               const nb::bytes& token,
                                                               const nb::bytes& pack, double wait_s,
                                                               std::shared_ptr<TlsContext> tls) {
  const Digest token_digest = digest_of(token);
  const Digest pack_digest = digest_of(pack);
  std::string card;
  PeerError error;
  {
    nb::gil_scoped_release released;
    error = link.connect(host, port, token_digest, pack_digest, ns_of(wait_s), card, std::move(tls));
  }
  return nb::make_tuple(name_of(error.kind), error.why, to_bytes(card));
}

nb::typed<nb::tuple, nb::str, nb::str, nb::bytes> ask_card(PeerLink& link, double wait_s,
                                                           const nb::bytes& caller,
                                                           std::int64_t damaged) {
  const std::string name(caller.c_str(), caller.size());
  std::string card;
  PeerError error;
  {
    nb::gil_scoped_release released;
    error = link.ask_card(ns_of(wait_s), name, damaged, card);
  }
  return nb::make_tuple(name_of(error.kind), error.why, to_bytes(card));
}

std::span<std::byte> room_for(const ExtentPlan& plan, const Bytes& out) {
  if (static_cast<std::size_t>(out.view.len) < plan.size()) {
    throw std::length_error("the buffer has " + std::to_string(out.view.len) +
                            " bytes, the samples " + std::to_string(plan.size()));
  }
  return {static_cast<std::byte*>(out.view.buf), plan.size()};
}

// Checked, and in the order of their storage: neighbours of one shard travel in one request.
std::vector<std::size_t> in_storage_order(const ExtentPlan& plan, const Ids& items) {
  std::vector<std::size_t> order(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const std::int64_t item = items.data()[i];
    if (item < 0 || static_cast<std::size_t>(item) >= plan.items().size()) {
      throw std::out_of_range("no such extent in the plan");
    }
    order[i] = static_cast<std::size_t>(item);
  }
  const auto place = [&](std::size_t item) {
    const Extent& extent = plan.items()[item].extent;
    return std::pair(extent.shard, extent.offset);
  };
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return place(a) < place(b); });
  return order;
}

// True if Python wants the wait to end: Ctrl-C. Its error is set then.
bool wants_end() {
  nb::gil_scoped_acquire acquired;
  return PyErr_CheckSignals() != 0;
}

// Kind of the problem, why, and what became of each extent of the plan that was asked for.
nb::typed<nb::tuple, nb::str, nb::str, Array<std::uint8_t>> fetch(PeerLink& link, ExtentPlan& plan,
                                                                  const Ids& items, nb::handle out,
                                                                  double wait_s) {
  const Bytes target(out, PyBUF_WRITABLE);
  const auto buffer = room_for(plan, target);
  const auto order = in_storage_order(plan, items);
  std::vector<RangeOutcome> outcomes(order.size());
  std::vector<std::uint8_t> by_item(plan.items().size());
  PeerError error;
  {
    nb::gil_scoped_release released;
    std::vector<WantedRange> wanted;
    wanted.reserve(order.size());
    for (const std::size_t item : order) wanted.push_back(plan.wanted(item, buffer));
    error = link.fetch(wanted, outcomes, ns_of(wait_s), wants_end);
    for (std::size_t i = 0; i < order.size(); ++i) {
      by_item[order[i]] = static_cast<std::uint8_t>(plan.finish(order[i], buffer, outcomes[i]));
    }
  }
  if (error.kind == PeerError::Kind::interrupted) throw nb::python_error();
  return nb::make_tuple(name_of(error.kind), error.why, array(std::move(by_item)));
}

// Fetches one range of a shard's file, unchecked: kind of the problem, why, and what became of it.
nb::typed<nb::tuple, nb::str, nb::str, int> fetch_range(PeerLink& link, std::uint32_t shard,
                                                        std::uint64_t offset, nb::handle out,
                                                        double wait_s) {
  const Bytes target(out, PyBUF_WRITABLE);
  const WantedRange wanted{.shard = shard,
                           .range = {offset, static_cast<std::uint64_t>(target.view.len)},
                           .target = static_cast<std::byte*>(target.view.buf),
                           .checksum = 0,
                           .is_checked = false};
  RangeOutcome outcome = RangeOutcome::missing;
  PeerError error;
  {
    nb::gil_scoped_release released;
    error = link.fetch({&wanted, 1}, {&outcome, 1}, ns_of(wait_s), wants_end);
  }
  if (error.kind == PeerError::Kind::interrupted) throw nb::python_error();
  return nb::make_tuple(name_of(error.kind), error.why, static_cast<int>(outcome));
}

// Takes the stored bytes of one extent, however they came here; says what became of them.
int deliver(ExtentPlan& plan, std::size_t item, nb::handle data, nb::handle out) {
  const Bytes target(out, PyBUF_WRITABLE);
  const Bytes source(data);
  const auto buffer = room_for(plan, target);
  if (item >= plan.items().size()) throw std::out_of_range("no such extent in the plan");
  const WantedRange wanted = plan.wanted(item, buffer);
  if (static_cast<std::uint64_t>(source.view.len) != wanted.range.length) {
    return static_cast<int>(RangeOutcome::missing);
  }
  nb::gil_scoped_release released;
  std::memcpy(wanted.target, source.view.buf, wanted.range.length);
  const bool is_good =
      !wanted.is_checked || crc32c(wanted.target, wanted.range.length) == wanted.checksum;
  return static_cast<int>(
      plan.finish(item, buffer, is_good ? RangeOutcome::good : RangeOutcome::damaged));
}

// Reads samples from mapped files of another copy of the pack: what became of each extent of the plan.
Array<std::uint8_t> read_mapped(const ExtentPlan& plan, const PackReader& mapped, const Ids& items,
                                nb::handle out) {
  const Bytes target(out, PyBUF_WRITABLE);
  const auto buffer = room_for(plan, target);
  std::vector<std::uint8_t> by_item;
  {
    nb::gil_scoped_release released;
    const auto outcomes = plan.read_mapped(mapped, {items.data(), items.size()}, buffer);
    by_item.reserve(outcomes.size());
    for (const RangeOutcome outcome : outcomes) by_item.push_back(static_cast<std::uint8_t>(outcome));
  }
  return array(std::move(by_item));
}

template <class T, class Get>
Array<T> column(const ExtentPlan& plan, Get get) {
  std::vector<T> values;
  values.reserve(plan.items().size());
  for (const auto& item : plan.items()) values.push_back(static_cast<T>(get(item)));
  return array(std::move(values));
}

}  // namespace

void bind_peers(nb::module_& module) {
  nb::class_<TlsContext>(module, "TlsContext")
      .def("__init__",
           [](TlsContext* self, const nb::bytes& token) { new (self) TlsContext(digest_of(token)); },
           "token"_a);
  nb::class_<PeerServer>(module, "PeerServer")
      .def("__init__", &open_server, "host"_a, "port"_a, "token"_a, "pack"_a, "threads"_a = 1,
           "listener"_a = -1, "tls"_a = nb::none())
      .def_prop_ro("port", &PeerServer::port)
      .def(
          "set_card",
          [](PeerServer& self, const nb::bytes& card) {
            self.set_card(std::string(card.c_str(), card.size()));
          },
          "card"_a)
      .def(
          "hold",
          [](PeerServer& self, std::uint32_t shard, const nb::bytes& path) {
            self.hold(shard, std::string(path.c_str(), path.size()));
          },
          "shard"_a, "path"_a)
      .def("drop", &PeerServer::drop, "shard"_a)
      .def("take_missed",
           [](PeerServer& self) {
             nb::list missed;
             for (const std::uint32_t shard : self.take_missed()) missed.append(shard);
             return nb::typed<nb::list, int>(missed);
           })
      .def("take_damaged",
           [](PeerServer& self) {
             nb::list damaged;
             for (const std::uint32_t shard : self.take_damaged()) damaged.append(shard);
             return nb::typed<nb::list, int>(damaged);
           })
      .def("take_callers",
           [](PeerServer& self) {
             nb::list callers;
             for (const std::string& name : self.take_callers()) {
               callers.append(nb::bytes(name.data(), name.size()));
             }
             return nb::typed<nb::list, nb::bytes>(callers);
           })
      .def("stats", &stats)
      .def("stop", &PeerServer::stop, nb::call_guard<nb::gil_scoped_release>());
  using Plan = ExtentPlan;
  nb::class_<Plan>(module, "ExtentPlan")
      .def(
          "__init__",
          [](Plan* self, const PackReader& reader, const Ids& ids) {
            const std::span<const std::int64_t> numbers(ids.data(), ids.size());
            nb::gil_scoped_release released;
            new (self) Plan(reader, numbers);
          },
          "reader"_a, "ids"_a, nb::keep_alive<1, 2>())
      .def_prop_ro("size", &Plan::size)
      .def_prop_ro("offsets",
                   [](const Plan& self) {
                     const auto offsets = self.offsets();
                     return array(std::vector<std::int64_t>(offsets.begin(), offsets.end()));
                   },
                   nb::rv_policy::automatic)
      .def_prop_ro("numbers",
                   [](const Plan& self) {
                     return column<std::int64_t>(self, [](const auto& item) { return item.number; });
                   },
                   nb::rv_policy::automatic)
      .def_prop_ro("shards",
                   [](const Plan& self) {
                     return column<std::uint32_t>(
                         self, [](const auto& item) { return item.extent.shard; });
                   },
                   nb::rv_policy::automatic)
      .def_prop_ro("shard_offsets",
                   [](const Plan& self) {
                     return column<std::uint64_t>(
                         self, [](const auto& item) { return item.extent.offset; });
                   },
                   nb::rv_policy::automatic)
      .def_prop_ro("stored_lengths",
                   [](const Plan& self) {
                     return column<std::uint64_t>(
                         self, [](const auto& item) { return item.extent.stored_length; });
                   },
                   nb::rv_policy::automatic)
      .def("deliver", &deliver, "item"_a, "data"_a, "out"_a)
      .def("read_mapped", &read_mapped, "reader"_a, "items"_a, "out"_a);
  nb::class_<PeerLink>(module, "PeerLink")
      .def(nb::init<>())
      .def_prop_ro("is_open", &PeerLink::is_open)
      .def("connect", &connect_link, "host"_a, "port"_a, "token"_a, "pack"_a, "wait_s"_a,
           "tls"_a = nb::none())
      .def("ask_card", &ask_card, "wait_s"_a, "caller"_a = nb::bytes(""),
           "damaged"_a = -1)
      .def("fetch", &fetch, "plan"_a, "items"_a, "out"_a, "wait_s"_a)
      .def("fetch_range", &fetch_range, "shard"_a, "offset"_a, "out"_a, "wait_s"_a)
      .def("close", &PeerLink::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace paceline
