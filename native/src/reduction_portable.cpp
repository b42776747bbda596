#define VECTOR_BYTES 16
#define KERNEL_TABLE portable_kernels
#include "reduction_kernels.hpp"
