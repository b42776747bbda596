#include "paceline/sparsify.hpp"

#include <algorithm>
#include <bit>
#include <memory>
#include <vector>

#include "sparsify_tables.hpp"

namespace paceline {
namespace {

constexpr int adaptations = 10;         // of a threshold that finds too few entries
constexpr float lowering = 0.8F;        // by which each adaptation multiplies it
constexpr double enough = 0.8;          // of the wanted entries

const SparsifyKernels& kernels_of(InstructionSet set) noexcept {
  switch (set) {
#if defined(__x86_64__)
    case InstructionSet::avx2: return avx2_sparsify;
    case InstructionSet::avx512: return avx512_sparsify;
#endif
    default: return portable_sparsify;
  }
}

std::uint32_t magnitude_bits(float value) noexcept {
  return std::bit_cast<std::uint32_t>(value) & 0x7fffffffU;
}

// The residual of an element after the step, which has not been taken yet.
float residual_after(const Accumulation& step, std::size_t i) noexcept {
  const float g = step.scale * step.gradient[i];
  if (step.nesterov) return (step.residual[i] + (step.momentum[i] + g) * step.factor) + g;
  return step.residual[i] + (step.factor * step.momentum[i] + g);
}

// The wanted-th largest of some magnitudes; at least 1, so that a zero is never at the threshold.
std::uint32_t nth_largest(std::vector<std::uint32_t>& magnitudes, std::size_t wanted) {
  const auto nth = magnitudes.begin() + static_cast<std::ptrdiff_t>(wanted - 1);
  std::nth_element(magnitudes.begin(), nth, magnitudes.end(), std::greater<>());
  return std::max(*nth, 1U);
}

std::uint32_t sampled_threshold(const Accumulation& step, const SampledSelection& selection) {
  std::vector<std::uint32_t> sample;
  sample.reserve(step.count / selection.stride + 1);
  for (std::size_t i = selection.start; i < step.count; i += selection.stride)
    sample.push_back(magnitude_bits(residual_after(step, i)));
  return nth_largest(sample, std::min(selection.sample_wanted, sample.size()));
}

// Keeps the `wanted` largest candidates in order; of equal ones, the first.
std::size_t keep_largest(const float* residual, std::uint32_t* candidates, std::size_t found,
                         std::size_t wanted) {
  std::vector<std::uint32_t> magnitudes(found);
  for (std::size_t i = 0; i < found; ++i) magnitudes[i] = magnitude_bits(residual[candidates[i]]);
  const std::uint32_t least = nth_largest(magnitudes, wanted);
  const auto above = static_cast<std::size_t>(std::count_if(
      magnitudes.begin(), magnitudes.end(), [least](std::uint32_t bits) { return bits > least; }));
  std::size_t equal = wanted - above, kept = 0;
  for (std::size_t i = 0; i < found; ++i) {
    const std::uint32_t bits = magnitude_bits(residual[candidates[i]]);
    if (bits < least || (bits == least && equal == 0)) continue;
    if (bits == least) --equal;
    candidates[kept++] = candidates[i];
  }
  return kept;
}

}  // namespace

std::size_t accumulate_and_select(const Accumulation& step, const SampledSelection& selection,
                                  std::uint32_t* indices, float* values, InstructionSet set) {
  if (step.count == 0) return 0;
  const SparsifyKernels& kernels = kernels_of(set);
  const auto enough_count = static_cast<std::size_t>(
      enough * static_cast<double>(selection.wanted));
  std::uint32_t threshold = sampled_threshold(step, selection);
  // Not initialized: only the pages that candidates are written to become memory. One more element,
  // since a candidate is written before it is counted.
  const std::unique_ptr<std::uint32_t[]> candidates(new std::uint32_t[step.count + 1]);
  std::size_t found = kernels.accumulate(step, threshold, candidates.get());
  for (int i = 0; i < adaptations && found < enough_count && threshold > 1; ++i) {
    threshold = std::max(magnitude_bits(lowering * std::bit_cast<float>(threshold)), 1U);
    found = kernels.scan(step.residual, step.count, threshold, candidates.get());
  }
  if (found > selection.wanted)
    found = keep_largest(step.residual, candidates.get(), found, selection.wanted);
  for (std::size_t i = 0; i < found; ++i) {
    const std::uint32_t index = candidates[i];
    indices[i] = index;
    values[i] = step.residual[index];
    step.residual[index] = 0;
    if (selection.mask_momentum) step.momentum[index] = 0;
  }
  return found;
}

bool scatter_add(float* target, std::size_t target_count, const std::uint32_t* indices,
                 const float* values, std::size_t count, float scale) noexcept {
  for (std::size_t i = 0; i < count; ++i)
    if (indices[i] >= target_count) return false;
  for (std::size_t i = 0; i < count; ++i) target[indices[i]] += scale * values[i];
  return true;
}

}  // namespace paceline
