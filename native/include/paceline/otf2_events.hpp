// Writes the events of one location of an OTF2 archive, through OTF2's own C library.
//
// The library is loaded when it is first asked for, by the path that the caller found; the archive
// and its definitions are the caller's. What is written here are the millions of events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline {

// What the location does in an interval. Spans are nested; see `write_otf2_events` for others.
struct Otf2Span {
  std::uint64_t begin_ns;
  std::uint64_t end_ns;
  std::uint32_t region;
  std::uint32_t reserved;
};
static_assert(sizeof(Otf2Span) == 24);

// The kinds of records at a moment; the numbers are those of trace/export/otf2_events.py.
enum class Otf2Kind : std::uint8_t {
  send = 1,
  isend = 2,
  isend_complete = 3,
  irecv_request = 4,
  irecv = 5,
  recv = 6,
  collective_begin = 7,
  collective_end = 8,
  collective_request = 9,
  collective_complete = 10,
  metric = 11,
  put = 12,
  get = 13,
  accumulate = 14,
  access_complete = 15,
};

// A record at a moment. What a kind has no use for is not read.
struct Otf2Record {
  std::uint64_t time_ns;
  std::uint64_t bytes;     // of a message or access; that a collective gives; value of a metric
  std::uint64_t received;  // bytes that a collective returns
  std::uint64_t request;   // joins the records of one operation
  std::uint32_t object;    // communicator, window or metric
  std::uint32_t peer;      // rank in the communicator; root of a collective
  std::uint32_t tag;
  Otf2Kind kind;
  std::uint8_t at_end;     // whether it ends an activity: it then comes before the region's end
  std::uint8_t operation;  // of a collective
  std::uint8_t reserved;
};
static_assert(sizeof(Otf2Record) == 48);

struct Otf2Written {
  std::uint64_t events = 0;   // of OTF2
  std::uint64_t clipped = 0;  // spans that ended after the span around them, and were cut there
  std::uint64_t clipped_ns = 0;  // by so much in all
  int error = 0;              // the first error of OTF2; 0 for none. The rest was not written
  bool loaded = false;        // whether the library has what is needed
};

// Writes spans and records in order of time to the event writer `writer` (OTF2_EvtWriter*).
//
// Spans are ordered by (begin, -end), records by (time, at_end first). At one moment the records that
// end an activity come first, then ends of regions, then begins, then other records: a message lies
// within the call that made it. A span that ends after the one around it is cut.
//
// Not thread safe for one archive.
Otf2Written write_otf2_events(const char* library, void* writer, std::span<const Otf2Span> spans,
                              std::span<const Otf2Record> records);

}  // namespace paceline
