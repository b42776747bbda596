// CRC-32C (Castagnoli): detects every single-bit error and every burst of up to 32 bits.
// Chosen because x86-64 and AArch64 compute it in hardware, so that checking a sample costs
// about as much as copying it.
// Source: G. Castagnoli, S. Braeuer, M. Herrmann, IEEE Transactions on Communications 41 (1993).
#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline {

// Continues `crc` (0 to start) over `size` bytes at `data`. Thread-safe.
std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc = 0) noexcept;

// The same by table, one byte at a time: what the hardware path is tested against.
std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t crc = 0) noexcept;

}  // namespace paceline
