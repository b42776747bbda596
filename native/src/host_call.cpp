#include "host_call.hpp"

#include <cstdio>

namespace paceline {
namespace {

bool reduces(Operation operation) noexcept {
  return operation == Operation::all_reduce || operation == Operation::reduce ||
         operation == Operation::reduce_scatter ||
         operation == Operation::reduce_scatter_in_place || operation == Operation::reduce_in_place;
}

// Equal for equal calls; two different calls have one fingerprint with a chance of 2^-16.
std::uint16_t fingerprint_of(const CallFields& fields, std::uint64_t sequence) noexcept {
  std::uint64_t mixed = sequence * 0x9e3779b97f4a7c15U ^ fields.amount;
  mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93U;
  mixed ^= static_cast<std::uint64_t>(fields.operation) |
           static_cast<std::uint64_t>(fields.dtype) << 8 |
           static_cast<std::uint64_t>(fields.op) << 16 |
           static_cast<std::uint64_t>(static_cast<std::uint32_t>(fields.root)) << 24;
  mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93U;
  return static_cast<std::uint16_t>(mixed >> 48);
}

}  // namespace

std::string describe(const SharedCall& call) {
  const auto operation = static_cast<Operation>(call.operation.load(std::memory_order_relaxed));
  const std::uint64_t amount = call.amount.load(std::memory_order_relaxed);
  std::string text(name_of(operation));
  if (reduces(operation)) {
    text += " of " + std::to_string(amount) + " ";
    text += name_of(static_cast<DType>(call.dtype.load(std::memory_order_relaxed)));
    text += " (";
    text += name_of(static_cast<ReduceOp>(call.op.load(std::memory_order_relaxed)));
    text += ", ";
  } else if (operation == Operation::barrier || operation == Operation::all_to_all) {
    text += " (";
  } else {
    text += " of " + std::to_string(amount) + " bytes (";
  }
  const std::int32_t root = call.root.load(std::memory_order_relaxed);
  if (root >= 0) {
    const bool message = operation == Operation::send || operation == Operation::receive;
    text += (message ? "peer " : "root ") + std::to_string(root) + ", ";
  }
  return text + "call " + std::to_string(call.sequence.load(std::memory_order_relaxed)) + ")";
}

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

void write_call(SharedCall& shared, const CallFields& fields, std::uint64_t sequence) noexcept {
  shared.sequence.store(sequence, std::memory_order_relaxed);
  shared.amount.store(fields.amount, std::memory_order_relaxed);
  shared.root.store(fields.root, std::memory_order_relaxed);
  shared.operation.store(static_cast<std::uint8_t>(fields.operation), std::memory_order_relaxed);
  shared.dtype.store(static_cast<std::uint8_t>(fields.dtype), std::memory_order_relaxed);
  shared.op.store(static_cast<std::uint8_t>(fields.op), std::memory_order_relaxed);
  shared.running.store(1, std::memory_order_relaxed);
}

HostGroup::Call::Call(HostGroup& group, const CallFields& fields, double timeout_s)
    : lock_(group.collective_mutex_), group_(group) {
  group.check_usable();
  const std::uint64_t sequence = ++group.sequence_;
  SharedCall& shared = group.own().calls[sequence % call_count];
  write_call(shared, fields, sequence);
  group.wait_ = {timeout_s, 0, &shared};
  group.own().progress.fingerprints[sequence % fingerprint_count].store(
      fingerprint_of(fields, sequence), std::memory_order_relaxed);
  group.publish_core();
}

HostGroup::Call::~Call() {
  if (!group_.usable_.load(std::memory_order_relaxed)) return;
  // Everything of this call was read.
  group_.publish(group_.own().progress.finished, group_.chunk_count_);
  group_.own().calls[group_.sequence_ % call_count].running.store(0, std::memory_order_relaxed);
}

}  // namespace paceline
