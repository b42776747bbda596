// Large buffers that are handed out again: a fresh one costs a page fault every 4 KiB, which takes
// longer than the copy that fills it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace paceline {

// Returns at least `size` bytes (0 for 0) whose pages exist. Throws std::bad_alloc.
std::span<std::byte> acquire_buffer(std::size_t size);
// Takes back exactly what acquire_buffer returned.
void release_buffer(std::span<std::byte> buffer) noexcept;

// Memory that can be had without swapping, as the system estimates it; UINT64_MAX if it does not say.
std::uint64_t available_memory_bytes() noexcept;

}  // namespace paceline
