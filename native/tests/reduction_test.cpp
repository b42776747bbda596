// Every set of instructions that this CPU has gives the bits that the scalar kernels give, and these
// give what a plain loop gives.
#include "paceline/reduction.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"

using namespace paceline;

namespace {

constexpr std::size_t most = 300;
constexpr std::size_t margin = 64;
using Buffer = std::vector<std::byte>;

bool is_nan(DType dtype, std::uint64_t bits) {
  switch (dtype) {
    case DType::float32: return (bits & 0x7fffffffU) > 0x7f800000U;
    case DType::float64: return (bits & INT64_MAX) > 0x7ff0000000000000U;
    case DType::float16: return (bits & 0x7fffU) > 0x7c00U;
    case DType::bfloat16: return (bits & 0x7fffU) > 0x7f80U;
    default: return false;
  }
}

// Numbers of all magnitudes, infinities included; of two NaNs, either payload may be the result.
Buffer random_bits(std::mt19937_64& random, DType dtype, std::size_t offset) {
  Buffer buffer((most + 2 * margin) * size_bytes(dtype));
  for (auto& byte : buffer) byte = static_cast<std::byte>(random());
  const std::size_t size = size_bytes(dtype);
  for (std::size_t at = offset; at + size <= buffer.size(); at += size) {
    std::uint64_t bits = 0;
    std::memcpy(&bits, buffer.data() + at, size);
    if (is_nan(dtype, bits)) std::memset(buffer.data() + at, 0, size);
  }
  if (dtype == DType::boolean)
    for (auto& byte : buffer) byte &= std::byte{1};
  return buffer;
}

// Returns the targets after a reduction of `count` elements that begin `offset` bytes in.
std::vector<Buffer> reduced(ReductionKernel kernel, std::vector<Buffer> sources,
                            std::size_t target_count, std::size_t count, std::size_t offset) {
  std::vector<const std::byte*> from;
  std::vector<std::byte*> to;
  for (auto& source : sources) from.push_back(source.data() + offset);
  std::vector<Buffer> targets(target_count, Buffer(sources[0].size()));
  to.push_back(sources[0].data() + offset);  // in place
  for (auto& target : targets) to.push_back(target.data() + offset);
  kernel({from.data(), from.size(), to.data(), to.size(), count});
  targets.push_back(std::move(sources[0]));
  return targets;
}

void compare_sets(DType dtype, ReduceOp op) {
  std::mt19937_64 random(static_cast<unsigned>(dtype) * 8U + static_cast<unsigned>(op));
  const auto scalar = reduction_kernel(dtype, op, InstructionSet::scalar);
  for (const auto set : {InstructionSet::portable, InstructionSet::avx2, InstructionSet::avx512}) {
    if (!supported(set)) continue;
    const auto kernel = reduction_kernel(dtype, op, set);
    CHECK((kernel == nullptr) == (scalar == nullptr));
    if (kernel == nullptr) continue;
    for (std::size_t source_count = 1; source_count <= 5; ++source_count) {
      for (const std::size_t count : {0U, 1U, 2U, 3U, 15U, 16U, 17U, 63U, 64U, 65U, 255U, 300U}) {
        std::vector<Buffer> sources;
        const std::size_t offset = random() % margin;
        for (std::size_t i = 0; i < source_count; ++i)
          sources.push_back(random_bits(random, dtype, offset));
        const std::size_t targets = random() % 3;
        CHECK(reduced(kernel, sources, targets, count, offset) ==
              reduced(scalar, sources, targets, count, offset));
      }
    }
  }
}

float one_float16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// A sum of one source converts to float32 and back: every finite float16 and bfloat16 stays itself.
void every_half_stays_itself() {
  for (const auto dtype : {DType::float16, DType::bfloat16}) {
    std::vector<std::uint16_t> source(65536);
    std::vector<std::uint16_t> target(65536);
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::uint16_t>(i);
    const auto* from = reinterpret_cast<const std::byte*>(source.data());
    auto* to = reinterpret_cast<std::byte*>(target.data());
    reduction_kernel(dtype, ReduceOp::sum, InstructionSet::scalar)({&from, 1, &to, 1, 65536});
    const unsigned exponent = dtype == DType::float16 ? 0x7c00U : 0x7f80U;
    for (unsigned i = 0; i < 65536; ++i) {
      const bool finite_or_infinite = (i & exponent) != exponent || (i & ~exponent & 0x7fffU) == 0;
      CHECK(!finite_or_infinite || target[i] == i);
    }
  }
}

// Sums of two float16 numbers are exact in float32: the rounding of the store is what is tested.
void float16_rounds_to_nearest_even() {
  std::mt19937_64 random(7);
  for (int i = 0; i < 200'000; ++i) {
    const auto a = static_cast<std::uint16_t>(random() & 0xfbffU);
    const auto b = static_cast<std::uint16_t>(random() & 0xfbffU);
    if ((a & 0x7c00U) == 0x7c00U || (b & 0x7c00U) == 0x7c00U) continue;
    std::uint16_t result = 0;
    const std::byte* from[] = {reinterpret_cast<const std::byte*>(&a),
                               reinterpret_cast<const std::byte*>(&b)};
    auto* to = reinterpret_cast<std::byte*>(&result);
    reduction_kernel(DType::float16, ReduceOp::sum, InstructionSet::scalar)({from, 2, &to, 1, 1});
    const float sum = one_float16(a) + one_float16(b);
    if (std::fabs(sum) >= 65520.0F) {
      CHECK((result & 0x7fffU) == 0x7c00U);
      continue;
    }
    const auto next = static_cast<std::uint16_t>(result + 1);
    const auto previous = static_cast<std::uint16_t>(result - 1);
    const float error = std::fabs(one_float16(result) - sum);
    for (const std::uint16_t other : {next, previous}) {
      if ((other & 0x7c00U) == 0x7c00U || (result & 0x7fffU) == 0) continue;
      const float other_error = std::fabs(one_float16(other) - sum);
      CHECK(error < other_error || (error == other_error && (result & 1U) == 0));
    }
  }
}

template <class T, class Expected>
void check_values(DType dtype, ReduceOp op, Expected expected) {
  const T values[][3] = {{1, 2, 3}, {5, 1, 2}, {2, 7, 3}};
  const std::byte* from[3];
  for (int i = 0; i < 3; ++i) from[i] = reinterpret_cast<const std::byte*>(values[i]);
  T result[3];
  auto* to = reinterpret_cast<std::byte*>(result);
  reduction_kernel(dtype, op)({from, 3, &to, 1, 3});
  for (int i = 0; i < 3; ++i) CHECK(result[i] == expected(values[0][i], values[1][i], values[2][i]));
}

template <class T>
void check_operations(DType dtype) {
  check_values<T>(dtype, ReduceOp::sum, [](T a, T b, T c) { return static_cast<T>(a + b + c); });
  check_values<T>(dtype, ReduceOp::minimum, [](T a, T b, T c) { return std::min({a, b, c}); });
  check_values<T>(dtype, ReduceOp::maximum, [](T a, T b, T c) { return std::max({a, b, c}); });
  check_values<T>(dtype, ReduceOp::product, [](T a, T b, T c) { return static_cast<T>(a * b * c); });
  if constexpr (std::is_floating_point_v<T>) {
    check_values<T>(dtype, ReduceOp::average, [](T a, T b, T c) { return (a + b + c) / 3; });
  } else {
    check_values<T>(dtype, ReduceOp::band, [](T a, T b, T c) { return static_cast<T>(a & b & c); });
    check_values<T>(dtype, ReduceOp::bor, [](T a, T b, T c) { return static_cast<T>(a | b | c); });
    check_values<T>(dtype, ReduceOp::bxor, [](T a, T b, T c) { return static_cast<T>(a ^ b ^ c); });
  }
}

void a_nan_of_any_rank_is_the_minimum_and_maximum() {
  for (int nan_at = 0; nan_at < 3; ++nan_at) {
    float values[3] = {1.0F, 2.0F, 3.0F};
    values[nan_at] = NAN;
    const std::byte* from[3];
    for (int i = 0; i < 3; ++i) from[i] = reinterpret_cast<const std::byte*>(&values[i]);
    for (const auto op : {ReduceOp::minimum, ReduceOp::maximum}) {
      float result = 0;
      auto* to = reinterpret_cast<std::byte*>(&result);
      reduction_kernel(DType::float32, op)({from, 3, &to, 1, 1});
      CHECK(std::isnan(result));
    }
  }
}

// At every length and alignment: the bytes arrive, those around the target stay, and so does the source,
// which take kernels write.
template <class Kernel>
void copies_whole(Kernel kernel) {
  for (const std::size_t bytes : {0, 1, 7, 63, 64, 65, 300, 4096, 5000}) {
    for (const std::size_t from : {0, 1, 8, 16, 48, 63}) {
      for (const std::size_t to : {0, 3, 16, 32}) {
        Buffer source(bytes + 2 * margin + from);
        for (std::size_t at = 0; at < source.size(); ++at)
          source[at] = static_cast<std::byte>(at * 7 + at / 256);
        const Buffer before = source;
        Buffer target(bytes + 2 * margin + to, std::byte{0xee});
        Buffer expected = target;
        std::copy_n(source.data() + margin + from, bytes, expected.data() + to);
        kernel(target.data() + to, source.data() + margin + from, bytes);
        CHECK(target == expected);
        CHECK(source == before);
      }
    }
  }
}

void every_set_copies_whole() {
  for (const auto set : {InstructionSet::scalar, InstructionSet::portable, InstructionSet::avx2,
                         InstructionSet::avx512}) {
    if (!supported(set)) continue;
    copies_whole(copy_kernel(set));
    copies_whole(copy_kernel_past_cache(set));
    copies_whole(take_kernel(set));
    copies_whole(take_kernel_past_cache(set));
  }
}

}  // namespace

int main() {
  every_set_copies_whole();
  for (std::size_t dtype = 0; dtype < dtype_count; ++dtype)
    for (std::size_t op = 0; op < reduce_op_count; ++op)
      compare_sets(static_cast<DType>(dtype), static_cast<ReduceOp>(op));
  check_operations<float>(DType::float32);
  check_operations<double>(DType::float64);
  check_operations<std::int8_t>(DType::int8);
  check_operations<std::int16_t>(DType::int16);
  check_operations<std::int32_t>(DType::int32);
  check_operations<std::int64_t>(DType::int64);
  check_operations<std::uint8_t>(DType::uint8);
  every_half_stays_itself();
  float16_rounds_to_nearest_even();
  a_nan_of_any_rank_is_the_minimum_and_maximum();
}
