#define VECTOR_BYTES 32
#define KERNEL_TABLE avx2_kernels
#include "reduction_kernels.hpp"
