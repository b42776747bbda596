#define VECTOR_BYTES 8
#define KERNEL_TABLE scalar_kernels
#include "reduction_kernels.hpp"
