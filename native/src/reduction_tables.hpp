// The tables of kernels, one per set of instructions.
#pragma once

#include "paceline/reduction.hpp"

namespace paceline {

struct KernelTable {
  ReductionKernel kernels[dtype_count][reduce_op_count];
  CopyKernel copy;
  CopyKernel copy_past_cache;
  TakeKernel take;
  TakeKernel take_past_cache;
};

extern const KernelTable scalar_kernels;
extern const KernelTable portable_kernels;
#if defined(__x86_64__)
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;
#endif

}  // namespace paceline
