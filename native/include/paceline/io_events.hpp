// Records what the preloaded library native/io sees of files: as events where a call of the main
// thread took long, and as counters of each file at the end.
//
// An event is a read (open, stat, list, read, map) or a write (write, sync, close), named by its
// call; its tag is the number of the name that is the file's path. So are counters: "io_read" counts
// calls, "io_read_ns" and "io_read_bytes" are theirs, "io_at_once" is how many were under way at once.
#pragma once

#include "paceline/recorder.hpp"

namespace paceline {

// From this length on a call is an event: shorter ones cost more to record than they tell.
constexpr std::uint64_t least_io_ns = 20'000;

// Whether the library is preloaded into this process.
bool sees_io() noexcept;
// Has calls of the recorder's main thread recorded while `is_recorded()`, which the calling thread
// asks; one recorder at a time. False without the library.
bool attach_io(Recorder& recorder, bool (*is_recorded)());
// Ends that, and records the counters of each file. Of many files those with the longest time have
// counters of their own. Before the recorder is closed.
void detach_io(Recorder& recorder);

}  // namespace paceline
