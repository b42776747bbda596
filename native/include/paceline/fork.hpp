// How often this process came about by fork: what threads and descriptors belong to changes then.
#pragma once

#include <cstdint>

namespace paceline {

// getpid() would cost a system call each time, so fork itself counts.
std::uint64_t fork_generation() noexcept;

}  // namespace paceline
