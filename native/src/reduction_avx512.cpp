#define VECTOR_BYTES 64
#define KERNEL_TABLE avx512_kernels
#include "reduction_kernels.hpp"
