// Selects the largest entries of accumulated gradients: Deep Gradient Compression (Lin, Han, Mao,
// Wang, Dally, ICLR 2018), in one pass over memory where the sampled threshold is good.
//
// Threads: no state; two calls may run at the same time on arrays that do not overlap.
#pragma once

#include <cstddef>
#include <cstdint>

#include "paceline/reduction.hpp"

namespace paceline {

// What a step adds. With g = scale * gradient:
//   momentum = factor * momentum + g;      residual = residual + momentum        (heavy ball)
//   momentum = (momentum + g) * factor;    residual = residual + momentum + g    (Nesterov)
// Each operation rounds once (no fused operations): every CPU gets the same bits.
struct Accumulation {
  const float* gradient;
  float* momentum;
  float* residual;
  std::size_t count;  // elements of each; less than 2^32
  float scale;
  float factor;
  bool nesterov;
};

// How many entries to take, and the sample that estimates the threshold: elements `start`,
// `start + stride` ... of which the `sample_wanted` largest lie above it.
struct SampledSelection {
  std::size_t wanted;
  std::size_t stride;
  std::size_t start;
  std::size_t sample_wanted;
  bool mask_momentum;  // clear the momentum of what is taken
};

// Accumulates; takes the entries of the residual with the largest magnitudes, at most `wanted`,
// never a zero; clears them there. `indices` (ascending) and `values` have room for `wanted`.
// Returns how many were taken: less than `wanted` where ten lower thresholds found no more.
std::size_t accumulate_and_select(const Accumulation& step, const SampledSelection& selection,
                                  std::uint32_t* indices, float* values,
                                  InstructionSet set = best_instruction_set());

// target[indices[i]] += scale * values[i], in order. Returns false, and changes nothing, where an
// index is not below target_count.
bool scatter_add(float* target, std::size_t target_count, const std::uint32_t* indices,
                 const float* values, std::size_t count, float scale) noexcept;

}  // namespace paceline
