#include "paceline/reduction.hpp"

#include "reduction_tables.hpp"

namespace paceline {
namespace {

const KernelTable& table_of(InstructionSet set) noexcept {
  switch (set) {
#if defined(__x86_64__)
    case InstructionSet::avx2: return avx2_kernels;
    case InstructionSet::avx512: return avx512_kernels;
#endif
    case InstructionSet::scalar: return scalar_kernels;
    default: return portable_kernels;
  }
}

InstructionSet find_best() noexcept {
  if (supported(InstructionSet::avx512)) return InstructionSet::avx512;
  if (supported(InstructionSet::avx2)) return InstructionSet::avx2;
  return InstructionSet::portable;
}

}  // namespace

std::size_t size_bytes(DType dtype) noexcept {
  constexpr std::size_t sizes[dtype_count] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1};
  return sizes[static_cast<std::size_t>(dtype)];
}

std::string_view name_of(DType dtype) noexcept {
  constexpr std::string_view names[dtype_count] = {"float32", "float64", "float16", "bfloat16",
                                                   "int8",    "int16",   "int32",   "int64",
                                                   "uint8",   "bool"};
  return names[static_cast<std::size_t>(dtype)];
}

std::string_view name_of(ReduceOp op) noexcept {
  constexpr std::string_view names[reduce_op_count] = {"sum",     "average", "minimum", "maximum",
                                                       "product", "band",    "bor",     "bxor"};
  return names[static_cast<std::size_t>(op)];
}

std::string_view name_of(InstructionSet set) noexcept {
  constexpr std::string_view names[] = {"scalar", "portable", "avx2", "avx512"};
  return names[static_cast<std::size_t>(set)];
}

bool supported(InstructionSet set) noexcept {
  if (set == InstructionSet::scalar || set == InstructionSet::portable) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (set == InstructionSet::avx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

InstructionSet best_instruction_set() noexcept {
  static const InstructionSet best = find_best();
  return best;
}

ReductionKernel reduction_kernel(DType dtype, ReduceOp op, InstructionSet set) noexcept {
  return table_of(set).kernels[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
}

CopyKernel copy_kernel(InstructionSet set) noexcept { return table_of(set).copy; }

// By the maker, not by a measurement at the group's start: where the cores of a virtual machine share a
// cache in some seconds and none in others (bench/LOG.md), that would hold for its own second only.
bool taking_pays() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return !__builtin_cpu_is("intel");
#else
  return true;
#endif
}

TakeKernel take_kernel(InstructionSet set) noexcept { return table_of(set).take; }

TakeKernel take_kernel_past_cache(InstructionSet set) noexcept {
  return table_of(set).take_past_cache;
}

CopyKernel copy_kernel_past_cache(InstructionSet set) noexcept {
  return table_of(set).copy_past_cache;
}

}  // namespace paceline
