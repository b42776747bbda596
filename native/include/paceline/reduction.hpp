// Sums (minima, products ...) of arrays element by element, with the instructions that this CPU has.
//
// The result of an element depends on nothing but the values of that element and the order of the
// sources: not on the CPU, the length, the alignment or the number of targets. 16-bit floating-point
// numbers are added up in float32 and rounded once, to nearest even.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace paceline {

enum class DType : std::uint8_t {
  float32, float64, float16, bfloat16, int8, int16, int32, int64, uint8, boolean
};
constexpr std::size_t dtype_count = 10;

enum class ReduceOp : std::uint8_t { sum, average, minimum, maximum, product, band, bor, bxor };
constexpr std::size_t reduce_op_count = 8;

std::size_t size_bytes(DType dtype) noexcept;
std::string_view name_of(DType dtype) noexcept;
std::string_view name_of(ReduceOp op) noexcept;

// The sets of instructions that the kernels were compiled for; `portable` is what every CPU of the
// architecture has (SSE2 on x86-64, NEON on AArch64), `scalar` the reference that tests compare with.
enum class InstructionSet : std::uint8_t { scalar, portable, avx2, avx512 };
std::string_view name_of(InstructionSet set) noexcept;
bool supported(InstructionSet set) noexcept;
InstructionSet best_instruction_set() noexcept;

// One reduction: every target gets the reduction of all sources, in the order of the sources. A
// target may be one of the sources, but must not overlap one otherwise.
struct Reduction {
  const std::byte* const* sources;
  std::size_t source_count;
  std::byte* const* targets;
  std::size_t target_count;
  std::size_t count;  // elements
};

using ReductionKernel = void (*)(const Reduction&);

// Returns nullptr where the operation is not defined: averages of integers, bits of floating-point
// numbers. Of booleans, sums are logical or, products logical and.
ReductionKernel reduction_kernel(DType dtype, ReduceOp op,
                                 InstructionSet set = best_instruction_set()) noexcept;

// Copies like memcpy, for data that another core wrote: asks for lines ahead, across pages.
using CopyKernel = void (*)(std::byte* to, const std::byte* from, std::size_t bytes);
CopyKernel copy_kernel(InstructionSet set = best_instruction_set()) noexcept;
// The same with stores past the cache: for targets that are too large to stay there, and of which
// nothing is in the cache yet.
CopyKernel copy_kernel_past_cache(InstructionSet set = best_instruction_set()) noexcept;

// The same two, for data that another core wrote and will write again: they also store what they read
// where they read it, so that the lines become this core's own. Writing to lines that one has itself
// modified and others have read takes 25 to 31 ns a line between cores without a shared cache, to
// lines that another core has modified 6 (bench/LOG.md).
using TakeKernel = void (*)(std::byte* to, std::byte* from, std::size_t bytes);
// Not so on Intel's CPUs, where both take 5 to 8 and the additional stores cost a copy a third.
bool taking_pays() noexcept;
TakeKernel take_kernel(InstructionSet set = best_instruction_set()) noexcept;
TakeKernel take_kernel_past_cache(InstructionSet set = best_instruction_set()) noexcept;

}  // namespace paceline
