// Counters of a node, and that one process of a node has the claim.
#include "paceline/node_counters.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>

#include "check.hpp"

using paceline::NodeClaim;
using paceline::NodeCounters;

namespace {

std::map<std::string, std::uint64_t> read(NodeCounters& counters) {
  std::map<std::string, std::uint64_t> found;
  counters.read([&](const std::string& name, std::uint64_t value) {
    CHECK(found.emplace(name, value).second);
  });
  return found;
}

void test_differences_come_with_the_second_reading() {
  NodeCounters counters;
  const auto first = read(counters);
  const auto second = read(counters);
  CHECK(!first.contains("node_busy_ns"));
  CHECK(!first.contains("node_received_bytes"));
  for (const auto& [name, value] : first) CHECK(second.contains(name));
  CHECK(second.at("node_memory_bytes") <= second.at("node_memory_total_bytes"));
  if (second.contains("node_busy_ns")) CHECK(second.at("node_cores") >= 1);
}

void test_one_process_has_the_claim_until_it_ends() {
  const std::string key = "paceline-test-" + std::to_string(getpid());
  int ready[2];
  int over[2];
  CHECK(pipe(ready) == 0 && pipe(over) == 0);
  const pid_t child = fork();
  char byte = 0;
  if (child == 0) {
    NodeClaim claim;
    byte = claim.take(key) && claim.take(key) ? 1 : 0;
    static_cast<void>(!write(ready[1], &byte, 1));
    close(over[1]);
    static_cast<void>(!::read(over[0], &byte, 1));  // ends when the parent closes it
    _exit(0);
  }
  CHECK(::read(ready[0], &byte, 1) == 1 && byte == 1);
  NodeClaim claim;
  CHECK(!claim.take(key));
  NodeClaim other;
  CHECK(other.take(key + "-other"));
  close(over[0]);
  close(over[1]);
  CHECK(waitpid(child, nullptr, 0) == child);
  CHECK(claim.take(key));
}

}  // namespace

int main() {
  test_differences_come_with_the_second_reading();
  test_one_process_has_the_claim_until_it_ends();
}
