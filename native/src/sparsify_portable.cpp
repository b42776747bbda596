#define SPARSIFY_TABLE portable_sparsify
#include "sparsify_kernels.hpp"
