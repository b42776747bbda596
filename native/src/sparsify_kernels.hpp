// The passes over memory of sparsify.hpp, compiled once per set of instructions: each sparsify_*.cpp
// defines SPARSIFY_TABLE, is compiled with flags of its own, and includes this file. As in
// reduction_kernels.hpp, nothing here calls an inline function of another header.
#include <cstddef>
#include <cstdint>

#include "sparsify_tables.hpp"

namespace paceline {
namespace {

// Few blocks have a candidate (6 % of them where 0.1 % of the elements are taken): the compiler makes
// vectors of the loop that every block needs, and the loop that finds the candidates has no branch.
constexpr std::size_t block = 64;

inline std::uint32_t magnitude_bits(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffffU;
}

inline std::size_t candidates_of(const float* residual, std::size_t begin, std::size_t end,
                                 std::uint32_t threshold_bits, std::uint32_t* candidates,
                                 std::size_t found) {
  for (std::size_t i = begin; i < end; ++i) {
    candidates[found] = static_cast<std::uint32_t>(i);
    found += magnitude_bits(residual[i]) >= threshold_bits;
  }
  return found;
}

template <bool nesterov>
inline std::uint32_t accumulate_block(const float* __restrict gradient, float* __restrict momentum,
                                      float* __restrict residual, std::size_t count, float scale,
                                      float factor, std::uint32_t threshold_bits) {
  std::uint32_t any = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const float g = scale * gradient[i];
    float u, v;
    if constexpr (nesterov) {
      u = (momentum[i] + g) * factor;
      v = (residual[i] + u) + g;
    } else {
      u = factor * momentum[i] + g;
      v = residual[i] + u;
    }
    momentum[i] = u;
    residual[i] = v;
    any |= magnitude_bits(v) >= threshold_bits ? 1U : 0U;
  }
  return any;
}

template <bool nesterov>
std::size_t accumulate_all(const Accumulation& step, std::uint32_t threshold_bits,
                           std::uint32_t* candidates) {
  const Accumulation s = step;  // a copy: stores through its pointers cannot change it
  std::size_t found = 0;
  for (std::size_t begin = 0; begin < s.count; begin += block) {
    std::uint32_t any;
    std::size_t end = begin + block;
    if (end <= s.count) {
      any = accumulate_block<nesterov>(s.gradient + begin, s.momentum + begin, s.residual + begin,
                                       block, s.scale, s.factor, threshold_bits);
    } else {
      end = s.count;
      any = accumulate_block<nesterov>(s.gradient + begin, s.momentum + begin, s.residual + begin,
                                       end - begin, s.scale, s.factor, threshold_bits);
    }
    if (any != 0)
      found = candidates_of(s.residual, begin, end, threshold_bits, candidates, found);
  }
  return found;
}

std::size_t accumulate(const Accumulation& step, std::uint32_t threshold_bits,
                       std::uint32_t* candidates) {
  return step.nesterov ? accumulate_all<true>(step, threshold_bits, candidates)
                       : accumulate_all<false>(step, threshold_bits, candidates);
}

std::size_t scan(const float* residual, std::size_t count, std::uint32_t threshold_bits,
                 std::uint32_t* candidates) {
  std::size_t found = 0;
  for (std::size_t begin = 0; begin < count; begin += block) {
    const std::size_t end = begin + block <= count ? begin + block : count;
    std::uint32_t any = 0;
    for (std::size_t i = begin; i < end; ++i)
      any |= magnitude_bits(residual[i]) >= threshold_bits ? 1U : 0U;
    if (any != 0) found = candidates_of(residual, begin, end, threshold_bits, candidates, found);
  }
  return found;
}

}  // namespace

extern const SparsifyKernels SPARSIFY_TABLE;
const SparsifyKernels SPARSIFY_TABLE = {accumulate, scan};

}  // namespace paceline
