#include "paceline/otf2_events.hpp"

#include <limits>
#include <vector>

#include "paceline/shared_library.hpp"

namespace paceline {
namespace {

constexpr std::uint8_t type_uint64 = 4;        // OTF2_TYPE_UINT64
constexpr std::uint8_t atomic_accumulate = 0;  // OTF2_RMA_ATOMIC_TYPE_ACCUMULATE
constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();

// The part of OTF2's interface that writes events, as it is since version 3.0. The second argument
// is a list of attributes, which events here do not have.
struct Library {
  using Writer = void*;
  using Time = std::uint64_t;
  using Id = std::uint32_t;
  using Size = std::uint64_t;

  int (*enter)(Writer, void*, Time, Id) = nullptr;
  int (*leave)(Writer, void*, Time, Id) = nullptr;
  int (*send)(Writer, void*, Time, Id, Id, Id, Size) = nullptr;
  int (*isend)(Writer, void*, Time, Id, Id, Id, Size, Size) = nullptr;
  int (*isend_complete)(Writer, void*, Time, Size) = nullptr;
  int (*irecv_request)(Writer, void*, Time, Size) = nullptr;
  int (*irecv)(Writer, void*, Time, Id, Id, Id, Size, Size) = nullptr;
  int (*recv)(Writer, void*, Time, Id, Id, Id, Size) = nullptr;
  int (*collective_begin)(Writer, void*, Time) = nullptr;
  int (*collective_end)(Writer, void*, Time, std::uint8_t, Id, Id, Size, Size) = nullptr;
  int (*collective_request)(Writer, void*, Time, Size) = nullptr;
  int (*collective_complete)(Writer, void*, Time, std::uint8_t, Id, Id, Size, Size, Size) = nullptr;
  int (*metric)(Writer, void*, Time, Id, std::uint8_t, const std::uint8_t*, const Size*) = nullptr;
  int (*put)(Writer, void*, Time, Id, Id, Size, Size) = nullptr;
  int (*get)(Writer, void*, Time, Id, Id, Size, Size) = nullptr;
  int (*atomic)(Writer, void*, Time, Id, Id, std::uint8_t, Size, Size, Size) = nullptr;
  int (*access_complete)(Writer, void*, Time, Id, Size) = nullptr;

  bool load(const char* path) noexcept {
    const SharedLibrary otf2(path);
    return otf2.find("OTF2_EvtWriter_Enter", enter) && otf2.find("OTF2_EvtWriter_Leave", leave) &&
           otf2.find("OTF2_EvtWriter_MpiSend", send) &&
           otf2.find("OTF2_EvtWriter_MpiIsend", isend) &&
           otf2.find("OTF2_EvtWriter_MpiIsendComplete", isend_complete) &&
           otf2.find("OTF2_EvtWriter_MpiIrecvRequest", irecv_request) &&
           otf2.find("OTF2_EvtWriter_MpiIrecv", irecv) &&
           otf2.find("OTF2_EvtWriter_MpiRecv", recv) &&
           otf2.find("OTF2_EvtWriter_MpiCollectiveBegin", collective_begin) &&
           otf2.find("OTF2_EvtWriter_MpiCollectiveEnd", collective_end) &&
           otf2.find("OTF2_EvtWriter_NonBlockingCollectiveRequest", collective_request) &&
           otf2.find("OTF2_EvtWriter_NonBlockingCollectiveComplete", collective_complete) &&
           otf2.find("OTF2_EvtWriter_Metric", metric) &&
           otf2.find("OTF2_EvtWriter_RmaPut", put) && otf2.find("OTF2_EvtWriter_RmaGet", get) &&
           otf2.find("OTF2_EvtWriter_RmaAtomic", atomic) &&
           otf2.find("OTF2_EvtWriter_RmaOpCompleteBlocking", access_complete);
  }

  int write(Writer to, const Otf2Record& r) const {
    switch (r.kind) {
      case Otf2Kind::send:
        return send(to, nullptr, r.time_ns, r.peer, r.object, r.tag, r.bytes);
      case Otf2Kind::isend:
        return isend(to, nullptr, r.time_ns, r.peer, r.object, r.tag, r.bytes, r.request);
      case Otf2Kind::isend_complete:
        return isend_complete(to, nullptr, r.time_ns, r.request);
      case Otf2Kind::irecv_request:
        return irecv_request(to, nullptr, r.time_ns, r.request);
      case Otf2Kind::irecv:
        return irecv(to, nullptr, r.time_ns, r.peer, r.object, r.tag, r.bytes, r.request);
      case Otf2Kind::recv:
        return recv(to, nullptr, r.time_ns, r.peer, r.object, r.tag, r.bytes);
      case Otf2Kind::collective_begin:
        return collective_begin(to, nullptr, r.time_ns);
      case Otf2Kind::collective_end:
        return collective_end(to, nullptr, r.time_ns, r.operation, r.object, r.peer, r.bytes,
                              r.received);
      case Otf2Kind::collective_request:
        return collective_request(to, nullptr, r.time_ns, r.request);
      case Otf2Kind::collective_complete:
        return collective_complete(to, nullptr, r.time_ns, r.operation, r.object, r.peer, r.bytes,
                                   r.received, r.request);
      case Otf2Kind::metric:
        return metric(to, nullptr, r.time_ns, r.object, 1, &type_uint64, &r.bytes);
      case Otf2Kind::put:
        return put(to, nullptr, r.time_ns, r.object, r.peer, r.bytes, r.request);
      case Otf2Kind::get:
        return get(to, nullptr, r.time_ns, r.object, r.peer, r.bytes, r.request);
      case Otf2Kind::accumulate:
        return atomic(to, nullptr, r.time_ns, r.object, r.peer, atomic_accumulate, r.bytes, 0,
                      r.request);
      case Otf2Kind::access_complete:
        return access_complete(to, nullptr, r.time_ns, r.object, r.request);
    }
    return -1;
  }
};

struct Open {
  std::uint64_t end_ns;
  std::uint32_t region;
};

}  // namespace

Otf2Written write_otf2_events(const char* library, void* writer, std::span<const Otf2Span> spans,
                              std::span<const Otf2Record> records) {
  Otf2Written written;
  Library otf2;
  written.loaded = otf2.load(library);
  if (!written.loaded) return written;
  std::vector<Open> open;
  std::size_t span = 0;
  std::size_t record = 0;
  while (span < spans.size() || record < records.size() || !open.empty()) {
    const std::uint64_t leaves = open.empty() ? never : open.back().end_ns;
    const std::uint64_t enters = span < spans.size() ? spans[span].begin_ns : never;
    const std::uint64_t moment = record < records.size() ? records[record].time_ns : never;
    int error = 0;
    if (record < records.size() && moment <= leaves && moment <= enters &&
        (records[record].at_end != 0 || (moment < leaves && moment < enters))) {
      error = otf2.write(writer, records[record++]);
    } else if (!open.empty() && leaves <= enters) {
      error = otf2.leave(writer, nullptr, leaves, open.back().region);
      open.pop_back();
    } else if (span < spans.size()) {
      const Otf2Span& next = spans[span++];
      const bool cut = next.end_ns > leaves;
      written.clipped += cut ? 1 : 0;
      written.clipped_ns += cut ? next.end_ns - leaves : 0;
      open.push_back({cut ? leaves : next.end_ns, next.region});
      error = otf2.enter(writer, nullptr, enters, next.region);
    } else {
      error = otf2.write(writer, records[record++]);
    }
    if (error != 0) {
      written.error = error;
      return written;
    }
    ++written.events;
  }
  return written;
}

}  // namespace paceline
