// Packs events into a block of a trace file: about ten bytes each instead of 48 in memory. Events of
// a loop repeat, so an event is written as its difference from earlier ones; each block can be
// unpacked by itself. The bytes: docs/reference/trace-format.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace paceline {

struct Event;

// The fewest bytes that an event takes: a reader refuses a count of more events than fit before it
// makes room for them.
constexpr std::size_t packed_event_bytes_min = 3;

// Returns the packed events. May throw std::bad_alloc.
std::string pack_events(const Event* events, std::size_t count);

// Unpacks exactly `count` events into `events`, which has room for them; false if the bytes are not
// those of `count` events.
bool unpack_events(const void* data, std::size_t size, Event* events, std::size_t count);

}  // namespace paceline
