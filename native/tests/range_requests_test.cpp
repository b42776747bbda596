// RangeRequests: ranges arrive whole for any process, slots come back, nobody waits for what has ended.
#include "paceline/range_requests.hpp"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"

using paceline::RangeRequests;
using paceline::RequestOutcome;
using paceline::ServerState;

namespace {

constexpr std::uint32_t slot_bytes = 4096;
constexpr std::uint64_t minute_ns = 60'000'000'000;

std::byte content(std::uint64_t shard, std::uint64_t at) {
  return static_cast<std::byte>((at * 31 + shard * 7 + at / 4096) & 0xff);
}

void answer(RangeRequests& requests) {
  while (const auto request = requests.take(minute_ns)) {
    const auto room = requests.room(request->slot);
    for (std::uint64_t i = 0; i < request->length; ++i) {
      room[i] = content(request->shard, request->offset + i);
    }
    requests.finish(request->slot, RequestOutcome::good);
  }
}

void many_ask_and_many_answer() {
  const auto requests = RangeRequests::create(4, 3, slot_bytes, "node");
  requests->set_state(ServerState::serving);
  std::vector<std::thread> servers, programs;
  for (int i = 0; i < 2; ++i) servers.emplace_back([&] { answer(*requests); });
  for (std::uint32_t shard = 0; shard < 4; ++shard) {
    programs.emplace_back([&, shard] {
      for (std::uint64_t begin = 0; begin < 60; ++begin) {
        std::vector<std::byte> bytes(begin * 331);
        CHECK(requests->fetch(shard, begin, bytes, 0, minute_ns) == RequestOutcome::good);
        for (std::uint64_t i = 0; i < bytes.size(); ++i) {
          CHECK(bytes[i] == content(shard, begin + i));
        }
      }
    });
  }
  for (std::thread& thread : programs) thread.join();
  requests->set_state(ServerState::ended);
  for (std::thread& thread : servers) thread.join();
}

void what_is_given_up_is_free_when_it_is_done() {
  const auto requests = RangeRequests::create(1, 1, slot_bytes, "node");
  requests->set_state(ServerState::serving);
  std::vector<std::byte> bytes(10);
  std::optional<RangeRequests::Request> taken;
  std::thread server([&] { taken = requests->take(minute_ns); });
  CHECK(requests->fetch(0, 0, bytes, 0, 300'000'000) == RequestOutcome::late);
  server.join();
  if (!taken) return;  // the program gave up first, on a machine that is busy
  CHECK(requests->fetch(0, 0, bytes, 0, 1'000'000) == RequestOutcome::late);  // no slot is free
  requests->finish(taken->slot, RequestOutcome::good);
  std::thread other([&] { answer(*requests); });
  CHECK(requests->fetch(0, 0, bytes, 0, minute_ns) == RequestOutcome::good);
  requests->set_state(ServerState::ended);
  other.join();
}

void requests_that_are_too_long_are_refused() {
  const auto requests = RangeRequests::create(2, 2, slot_bytes, "node");
  requests->set_state(ServerState::serving);
  std::thread server([&] { answer(*requests); });
  std::vector<std::byte> bytes(10);
  CHECK(requests->fetch(2, 0, bytes, 0, minute_ns) == RequestOutcome::nobody);  // no such shard
  CHECK(!requests->is_held(2));
  requests->set_state(ServerState::ended);
  server.join();
  CHECK(requests->fetch(0, 0, bytes, 0, minute_ns) == RequestOutcome::lost);
}

}  // namespace

int main() {
  many_ask_and_many_answer();
  what_is_given_up_is_free_when_it_is_done();
  requests_that_are_too_long_are_refused();
}
