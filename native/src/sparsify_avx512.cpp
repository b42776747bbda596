#define SPARSIFY_TABLE avx512_sparsify
#include "sparsify_kernels.hpp"
