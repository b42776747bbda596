// The kernels of sparsify.hpp, one table per set of instructions.
#pragma once

#include "paceline/sparsify.hpp"

namespace paceline {

// Magnitudes are compared as the bits of their absolute values, which have the order of the numbers.
struct SparsifyKernels {
  // Accumulates, and writes the indices of the residuals at or above the threshold; returns how many.
  std::size_t (*accumulate)(const Accumulation& step, std::uint32_t threshold_bits,
                            std::uint32_t* candidates);
  std::size_t (*scan)(const float* residual, std::size_t count, std::uint32_t threshold_bits,
                      std::uint32_t* candidates);
};

extern const SparsifyKernels portable_sparsify;
#if defined(__x86_64__)
extern const SparsifyKernels avx2_sparsify;
extern const SparsifyKernels avx512_sparsify;
#endif

}  // namespace paceline
