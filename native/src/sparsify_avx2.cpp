#define SPARSIFY_TABLE avx2_sparsify
#include "sparsify_kernels.hpp"
