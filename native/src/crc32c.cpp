#include "paceline/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace paceline {
namespace {

constexpr std::uint32_t polynomial = 0x82F63B78U;  // reflected

constexpr std::array<std::uint32_t, 256> make_byte_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) != 0 ? polynomial : 0U);
    table[byte] = crc;
  }
  return table;
}

constexpr auto byte_table = make_byte_table();

#if defined(__x86_64__)

// The crc32 instruction has a latency of three cycles and a throughput of one, so three
// independent streams run at once; a stream's result is then moved past the bytes that follow it
// by multiplying with x^(8 * lane) mod P, which four table look-ups do. Short lanes for what long
// ones leave over: 2 KiB would otherwise run in one stream, at a third of the speed.
constexpr std::size_t long_lane = 1024;
constexpr std::size_t short_lane = 128;

using ShiftTable = std::array<std::array<std::uint32_t, 256>, 4>;

constexpr ShiftTable make_shift_table(std::size_t zero_bytes) {
  // Shifting is linear over GF(2): the image of each single bit gives the whole operator.
  std::array<std::uint32_t, 32> image{};
  for (std::size_t bit = 0; bit < 32; ++bit) {
    std::uint32_t crc = 1U << bit;
    for (std::size_t i = 0; i < zero_bytes; ++i) crc = byte_table[crc & 0xFFU] ^ (crc >> 8);
    image[bit] = crc;
  }
  ShiftTable table{};
  for (std::size_t position = 0; position < 4; ++position) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      std::uint32_t crc = 0;
      for (std::size_t bit = 0; bit < 8; ++bit) {
        if (((byte >> bit) & 1U) != 0) crc ^= image[8 * position + bit];
      }
      table[position][byte] = crc;
    }
  }
  return table;
}

// By the compiler: at run time it would cost each process, as each that a job starts, 60 us.
template <std::size_t lane>
constexpr ShiftTable past_lane = make_shift_table(lane);

inline std::uint32_t shift(const ShiftTable& table, std::uint32_t crc) {
  return table[0][crc & 0xFFU] ^ table[1][(crc >> 8) & 0xFFU] ^ table[2][(crc >> 16) & 0xFFU] ^
         table[3][crc >> 24];
}

inline std::uint64_t load(const unsigned char* at) {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Takes whole triples of lanes off the front of the data.
template <std::size_t lane>
__attribute__((target("sse4.2"))) std::uint64_t take_lanes(const unsigned char*& at,
                                                           std::size_t& size, std::uint64_t crc) {
  for (; size >= 3 * lane; at += 3 * lane, size -= 3 * lane) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < lane; i += 8) {
      crc = _mm_crc32_u64(crc, load(at + i));
      second = _mm_crc32_u64(second, load(at + lane + i));
      third = _mm_crc32_u64(third, load(at + 2 * lane + i));
    }
    crc = shift(past_lane<lane>, static_cast<std::uint32_t>(crc)) ^ second;
    crc = shift(past_lane<lane>, static_cast<std::uint32_t>(crc)) ^ third;
  }
  return crc;
}

__attribute__((target("sse4.2"))) std::uint32_t crc32c_hardware(const unsigned char* at,
                                                                std::size_t size,
                                                                std::uint32_t seed) {
  std::uint64_t crc = ~seed;
  crc = take_lanes<long_lane>(at, size, crc);
  crc = take_lanes<short_lane>(at, size, crc);
  for (; size >= 8; at += 8, size -= 8) crc = _mm_crc32_u64(crc, load(at));
  for (; size > 0; ++at, --size) crc = _mm_crc32_u8(static_cast<std::uint32_t>(crc), *at);
  return ~static_cast<std::uint32_t>(crc);
}

#endif

}  // namespace

std::uint32_t crc32c_portable(const void* data, std::size_t size, std::uint32_t crc) noexcept {
  const auto* at = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (std::size_t i = 0; i < size; ++i) crc = byte_table[(crc ^ at[i]) & 0xFFU] ^ (crc >> 8);
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t size, std::uint32_t crc) noexcept {
#if defined(__x86_64__)
  static const bool hardware = __builtin_cpu_supports("sse4.2") != 0;
  if (hardware) return crc32c_hardware(static_cast<const unsigned char*>(data), size, crc);
#endif
  return crc32c_portable(data, size, crc);
}

}  // namespace paceline
