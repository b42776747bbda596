// A call of a HostGroup, from its entry to its return or failure.
#pragma once

#include <string>

#include "paceline/host_group.hpp"

namespace paceline {

// "all_reduce of 1024 float32 (sum, call 7)".
std::string describe(const SharedCall& call);
std::string seconds_text(double seconds);

struct CallFields {
  Operation operation;
  std::uint64_t amount = 0;
  int root = -1;
  DType dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
};

// Writes `fields` where peers read what this rank does.
void write_call(SharedCall& shared, const CallFields& fields, std::uint64_t sequence) noexcept;

// A collective: serialises calls, publishes what the rank does, ends chunks that it has read.
class HostGroup::Call {
 public:
  Call(HostGroup& group, const CallFields& fields, double timeout_s);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

 private:
  std::lock_guard<std::mutex> lock_;
  HostGroup& group_;
};

}  // namespace paceline
