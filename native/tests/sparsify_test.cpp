// accumulate_and_select: every set of instructions gives the same bits as a plain loop and a sort.
#include "paceline/sparsify.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"

using paceline::InstructionSet;

namespace {

struct State {
  std::vector<float> gradient, momentum, residual;
};

State random_state(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  State state{std::vector<float>(count), std::vector<float>(count), std::vector<float>(count)};
  for (auto* values : {&state.gradient, &state.momentum, &state.residual})
    for (float& value : *values) value = normal(random);
  return state;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Takes the largest entries by a sort of all of them.
void by_sort(State& state, bool nesterov, std::size_t wanted, std::vector<std::uint32_t>& indices,
             std::vector<float>& values) {
  const std::size_t count = state.gradient.size();
  for (std::size_t i = 0; i < count; ++i) {
    volatile float product = 0.9F * state.momentum[i];  // volatile: never a fused operation
    volatile float u = product + state.gradient[i];
    if (nesterov) {
      product = state.momentum[i] + state.gradient[i];
      u = product * 0.9F;
    }
    volatile float v = state.residual[i] + u;
    if (nesterov) v = v + state.gradient[i];
    state.momentum[i] = u;
    state.residual[i] = v;
  }
  std::vector<std::uint32_t> order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = static_cast<std::uint32_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
    return std::fabs(state.residual[a]) > std::fabs(state.residual[b]);
  });
  order.resize(wanted);
  std::sort(order.begin(), order.end());
  indices = order;
  values.clear();
  for (const std::uint32_t index : order) {
    values.push_back(state.residual[index]);
    state.residual[index] = state.momentum[index] = 0;
  }
}

void same_as_a_sort(std::size_t count, std::size_t wanted, bool nesterov) {
  for (const auto set : {InstructionSet::portable, InstructionSet::avx2, InstructionSet::avx512}) {
    if (!paceline::supported(set)) continue;
    State state = random_state(count, static_cast<unsigned>(count)), reference = state;
    std::vector<std::uint32_t> indices(wanted), expected_indices;
    std::vector<float> values(wanted), expected_values;
    by_sort(reference, nesterov, wanted, expected_indices, expected_values);
    const std::size_t found = paceline::accumulate_and_select(
        {state.gradient.data(), state.momentum.data(), state.residual.data(), count, 1.0F, 0.9F,
         nesterov},
        {wanted, 1, 0, wanted, true}, indices.data(), values.data(), set);
    CHECK(found == wanted);
    CHECK(indices == expected_indices);
    CHECK(same_bits(values, expected_values));
    CHECK(same_bits(state.momentum, reference.momentum));
    CHECK(same_bits(state.residual, reference.residual));
  }
}

void zeros_are_never_taken() {
  State state{std::vector<float>(200), std::vector<float>(200), std::vector<float>(200)};
  state.gradient[17] = -2;
  std::vector<std::uint32_t> indices(50);
  std::vector<float> values(50);
  const std::size_t found = paceline::accumulate_and_select(
      {state.gradient.data(), state.momentum.data(), state.residual.data(), 200, 1, 0.9F, false},
      {50, 1, 0, 50, true}, indices.data(), values.data());
  CHECK(found == 1 && indices[0] == 17 && values[0] == -2);
}

void a_wrong_index_changes_nothing() {
  std::vector<float> target(4, 1), values{5, 5};
  const std::vector<std::uint32_t> wrong{0, 4}, right{0, 3};
  CHECK(!paceline::scatter_add(target.data(), 4, wrong.data(), values.data(), 2, 1));
  CHECK(target == std::vector<float>(4, 1));
  CHECK(paceline::scatter_add(target.data(), 4, right.data(), values.data(), 2, 0.5F));
  CHECK((target == std::vector<float>{3.5F, 1, 1, 3.5F}));
}

}  // namespace

int main() {
  for (const bool nesterov : {false, true})
    for (const std::size_t count : {1, 63, 64, 65, 1000, 4097})
      same_as_a_sort(count, std::max<std::size_t>(1, count / 7), nesterov);
  zeros_are_never_taken();
  a_wrong_index_changes_nothing();
  return 0;
}
