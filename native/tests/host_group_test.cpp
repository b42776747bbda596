// Collectives of ranks that are threads (of which the thread sanitizer sees every access to shared
// memory) and of ranks that are forked processes.
#include "paceline/host_group.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace paceline;

namespace {

constexpr double timeout_s = 60;

std::vector<std::shared_ptr<HostSegment>> make_segments(std::uint32_t ranks,
                                                        const SegmentOptions& options) {
  std::vector<std::shared_ptr<HostSegment>> segments;
  for (std::uint32_t rank = 0; rank < ranks; ++rank)
    segments.push_back(HostSegment::create(rank, ranks, options));
  return segments;
}

// Runs `work` as each rank, in a thread each; all threads see one mapping of each segment.
void run_threads(int ranks, const std::function<void(HostGroup&)>& work,
                 const SegmentOptions& segment_options = {}, const GroupOptions& options = {}) {
  const auto segments = make_segments(static_cast<std::uint32_t>(ranks), segment_options);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      HostGroup group(rank, segments, options);
      work(group);
    });
  }
  for (auto& thread : threads) thread.join();
}

template <class T>
std::byte* bytes_of(T& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

using Floats = std::vector<float>;

Floats values_of(int rank, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank) + 1);
  Floats values(count);
  for (auto& value : values) value = static_cast<float>(random()) * 0x1p-32F;
  return values;
}

Floats sum_of(int ranks, std::size_t count) {
  Floats sum = values_of(0, count);
  for (int rank = 1; rank < ranks; ++rank) {
    const Floats values = values_of(rank, count);
    for (std::size_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  return sum;
}

// Around the eager limit and the chunk (16 KiB in these tests).
const std::size_t counts[] = {0, 1, 3, 17, 1000, 1025, 4096, 5001, 20000};
const SegmentOptions small_segments{
    .ring_bytes = 6 * 16384, .packet_bytes = 8192, .heap_bytes = 1 << 20};
GroupOptions small_options(bool take_lines) {
  GroupOptions options;
  options.eager_bytes = 4096;
  options.take_lines = take_lines;  // whatever pays here
  return options;
}
const GroupOptions small_chunks = small_options(true);

void check_reductions(HostGroup& group) {
  const int ranks = group.ranks();
  for (const std::size_t count : counts) {
    const Floats expected = sum_of(ranks, count);
    Floats values = values_of(group.rank(), count);
    group.all_reduce(bytes_of(values), count, DType::float32, ReduceOp::sum, timeout_s);
    CHECK(values == expected);
    for (int root = 0; root < ranks; ++root) {
      values = values_of(group.rank(), count);
      group.reduce(bytes_of(values), count, DType::float32, ReduceOp::sum, root, timeout_s);
      CHECK(values == (group.rank() == root ? expected : values_of(group.rank(), count)));
    }
    const auto all = static_cast<std::size_t>(ranks) * count;
    const Floats expected_all = sum_of(ranks, all);
    const Floats source = values_of(group.rank(), all);
    Floats target(count);
    group.reduce_scatter(reinterpret_cast<const std::byte*>(source.data()), bytes_of(target), count,
                         DType::float32, ReduceOp::sum, timeout_s);
    const auto from = static_cast<std::size_t>(group.rank()) * count;
    CHECK(std::equal(target.begin(), target.end(),
                     expected_all.begin() + static_cast<std::ptrdiff_t>(from)));
  }
}

// In the symmetric heap, at offsets that differ between ranks.
void check_heap(HostGroup& group) {
  for (int i = 0; i < group.rank(); ++i) CHECK(group.allocate(1) != nullptr);
  for (const std::size_t count : counts) {
    auto* data = group.allocate(count * 4);
    CHECK(data != nullptr);
    const Floats values = values_of(group.rank(), count);
    const Floats expected = sum_of(group.ranks(), count);
    if (count != 0) std::memcpy(data, values.data(), count * 4);
    group.all_reduce(data, count, DType::float32, ReduceOp::sum, timeout_s);
    CHECK(count == 0 || std::memcmp(data, expected.data(), count * 4) == 0);
    if (group.rank() == 0 && count != 0) std::memcpy(data, values.data(), count * 4);
    group.broadcast(data, count * 4, 0, timeout_s);
    CHECK(count == 0 || std::memcmp(data, values_of(0, count).data(), count * 4) == 0);
    group.barrier(timeout_s);
    group.release(data);
  }
}

// Parts and roots, of data that the other ranks leave as it is.
void check_reductions_in_heap(HostGroup& group) {
  const auto ranks = static_cast<std::size_t>(group.ranks());
  const auto rank = static_cast<std::size_t>(group.rank());
  for (int i = 0; i < group.rank(); ++i) CHECK(group.allocate(1) != nullptr);
  for (const std::size_t count : counts) {
    const std::size_t all = count * ranks;
    auto* data = group.allocate(all * 4);
    CHECK(data != nullptr);
    const Floats values = values_of(group.rank(), all);
    const Floats sum = sum_of(group.ranks(), all);
    Floats expected = values;
    for (std::size_t i = rank * count; i < (rank + 1) * count; ++i) expected[i] = sum[i];
    if (all != 0) std::memcpy(data, values.data(), all * 4);
    group.reduce_scatter_in_place(data, all, DType::float32, ReduceOp::sum, timeout_s);
    CHECK(all == 0 || std::memcmp(data, expected.data(), all * 4) == 0);
    if (all != 0) std::memcpy(data, values.data(), all * 4);
    for (std::size_t root = 0; root < ranks; ++root) {
      group.reduce_in_place(data, all, DType::float32, ReduceOp::sum, static_cast<int>(root),
                            timeout_s);
      const Floats& now = rank == root ? sum : values;
      CHECK(all == 0 || std::memcmp(data, now.data(), all * 4) == 0);
      group.barrier(timeout_s);
      if (all != 0) std::memcpy(data, values.data(), all * 4);
    }
    group.barrier(timeout_s);
    group.release(data);
  }
}

// What a rank writes where another has its heap is there.
void check_peers_heap(HostGroup& group) {
  const int ranks = group.ranks();
  auto* own = group.allocate(8);
  CHECK(own == group.heap_of(group.rank()));
  std::byte* const next = group.heap_of((group.rank() + 1) % ranks);
  std::memset(next, group.rank() + 1, 8);
  group.barrier(timeout_s);
  CHECK(own[7] == static_cast<std::byte>((group.rank() + ranks - 1) % ranks + 1));
  CHECK_THROWS(group.heap_of(ranks), GroupError);
}

void check_copies(HostGroup& group) {
  const auto ranks = static_cast<std::size_t>(group.ranks());
  const auto rank = static_cast<std::size_t>(group.rank());
  for (const std::size_t count : counts) {
    Floats own = values_of(group.rank(), count);
    Floats expected;
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      const Floats values = values_of(static_cast<int>(peer), count);
      expected.insert(expected.end(), values.begin(), values.end());
    }
    const auto* source = reinterpret_cast<const std::byte*>(own.data());
    Floats all(ranks * count);
    group.all_gather(source, bytes_of(all), count * 4, timeout_s);
    CHECK(all == expected);
    for (std::size_t root = 0; root < ranks; ++root) {
      Floats values = own;
      group.broadcast(bytes_of(values), count * 4, static_cast<int>(root), timeout_s);
      CHECK(values == values_of(static_cast<int>(root), count));
      Floats gathered(rank == root ? ranks * count : 0);
      group.gather(source, bytes_of(gathered), count * 4, static_cast<int>(root), timeout_s);
      CHECK(rank != root || gathered == expected);
      group.scatter(rank == root ? bytes_of(gathered) : nullptr, bytes_of(values), count * 4,
                    static_cast<int>(root), timeout_s);
      CHECK(values == own);
    }
  }
}

// Rank r sends (r + 1) * (peer + 1) * scale bytes of value r to each peer.
void check_all_to_all(HostGroup& group) {
  const auto ranks = static_cast<std::size_t>(group.ranks());
  const auto rank = static_cast<std::size_t>(group.rank());
  for (const std::size_t scale : {0U, 1U, 777U, 20'000U}) {
    std::vector<std::size_t> send_bytes;
    std::vector<std::size_t> receive_bytes;
    std::vector<std::byte> expected;
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      send_bytes.push_back((rank + 1) * (peer + 1) * scale);
      receive_bytes.push_back((rank + 1) * (peer + 1) * scale);
      expected.insert(expected.end(), receive_bytes.back(), static_cast<std::byte>(peer));
    }
    const std::vector<std::byte> source(expected.size(), static_cast<std::byte>(rank));
    std::vector<std::byte> target(expected.size());
    group.all_to_all(source.data(), target.data(), send_bytes, receive_bytes, timeout_s);
    CHECK(target == expected);
  }
}

// Everyone sends to its right neighbour, large and small messages, received in the other order.
void check_messages(HostGroup& group) {
  const int ranks = group.ranks();
  if (ranks == 1) return;
  const int right = (group.rank() + 1) % ranks;
  const int left = (group.rank() + ranks - 1) % ranks;
  for (const std::size_t count : {0U, 1U, 1000U, 4000U}) {
    Floats first = values_of(group.rank(), count);
    Floats second = values_of(group.rank() + 100, count);
    Floats from_left(count);
    std::thread sender([&] {
      group.send(bytes_of(first), count * 4, right, 1, timeout_s);
      group.send(bytes_of(second), count * 4, right, 2, timeout_s);
    });
    group.receive(bytes_of(from_left), count * 4, left, 2, timeout_s);
    CHECK(from_left == values_of(left + 100, count));
    group.receive(bytes_of(from_left), count * 4, left, 1, timeout_s);
    CHECK(from_left == values_of(left, count));
    sender.join();
  }
}

// Everyone sends to everyone, posts receives in another order, and looks at them in a third; sends of
// several packets only end when their receiver reads, here while it is in a collective.
void check_posted_messages(HostGroup& group) {
  const int ranks = group.ranks();
  constexpr std::size_t count = 9000;
  std::map<int, Floats> received;
  std::vector<std::shared_ptr<Message>> posted;
  Floats own = values_of(group.rank(), count);
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == group.rank()) continue;
    received[peer] = Floats(count);
    posted.push_back(group.post_receive(bytes_of(received[peer]), count * 4, peer, 3));
    posted.push_back(group.post_send(bytes_of(own), count * 4, peer, 3));
  }
  group.barrier(timeout_s);
  for (const auto& message : posted)
    while (!group.test(*message)) std::this_thread::yield();
  for (const auto& [peer, values] : received) CHECK(values == values_of(peer, count));
}

// The last rank's sends end without it: it enters the barrier with the receives still to come.
void check_messages_from_any_rank(HostGroup& group) {
  constexpr std::size_t count = 9000;
  Floats own = values_of(group.rank(), count);
  if (group.rank() == 0) {
    std::set<int> sources;
    for (int turn = 1; turn < group.ranks(); ++turn) {
      Floats values(count);
      const auto message = group.post_receive(bytes_of(values), count * 4, any_rank, 5);
      group.wait(*message, timeout_s);
      CHECK(values == values_of(message->peer, count));
      sources.insert(message->peer);
    }
    CHECK(sources.size() + 1 == static_cast<std::size_t>(group.ranks()));
    group.barrier(timeout_s);
  } else {
    const auto message = group.post_send(bytes_of(own), count * 4, 0, 5);
    group.barrier(timeout_s);  // the group's thread sends what is left
    group.wait(*message, timeout_s);
  }
}

// Mixed operations without a pause, so that ranks run ahead of each other as far as they may.
void check_mixture(HostGroup& group) {
  std::mt19937 random(5);  // equal on all ranks
  for (int call = 0; call < 300; ++call) {
    const std::size_t count = random() % 3 == 0 ? random() % 9000 : random() % 40;
    const int root = static_cast<int>(random() % static_cast<unsigned>(group.ranks()));
    Floats values = values_of(group.rank(), count);
    switch (random() % 4) {
      case 0:
        group.all_reduce(bytes_of(values), count, DType::float32, ReduceOp::sum, timeout_s);
        CHECK(values == sum_of(group.ranks(), count));
        break;
      case 1:
        group.broadcast(bytes_of(values), count * 4, root, timeout_s);
        CHECK(values == values_of(root, count));
        break;
      case 2:
        group.reduce(bytes_of(values), count, DType::float32, ReduceOp::sum, root, timeout_s);
        CHECK(group.rank() != root || values == sum_of(group.ranks(), count));
        break;
      default:
        group.barrier(timeout_s);
    }
  }
}

template <class Work>
GroupError failure_of(Work work) {
  try {
    work();
  } catch (const GroupError& error) {
    return error;
  }
  CHECK(false && "a call failed");
  std::abort();
}

void a_late_rank_is_named() {
  run_threads(3, [](HostGroup& group) {
    static std::atomic<int> failed;
    if (group.rank() == 0) failed = 0;
    group.barrier(timeout_s);
    if (group.rank() == 2) {  // comes when the others have given up
      while (failed.load() < 2) std::this_thread::yield();
    } else {
      const auto error = failure_of([&] { group.barrier(0.05); });
      CHECK(error.kind == GroupFailure::deadline);
      CHECK(error.rank == 2);
      CHECK(std::string(error.what()).find("rank 2") != std::string::npos);
      failure_of([&] { group.barrier(timeout_s); });  // unusable from now on
      ++failed;
    }
  });
}

void differing_calls_are_shown() {
  run_threads(2, [](HostGroup& group) {
    Floats values(8);
    const auto error = failure_of([&] {
      group.all_reduce(bytes_of(values), group.rank() == 0 ? 8 : 7, DType::float32, ReduceOp::sum,
                       timeout_s);
      group.barrier(timeout_s);  // where the rank notices that was not the first to notice
    });
    CHECK(error.kind == GroupFailure::mismatch);
    const std::string what = error.what();
    CHECK(what.find("all_reduce of 8 float32") != std::string::npos);
    CHECK(what.find("all_reduce of 7 float32") != std::string::npos);
  });
}

void an_abort_reaches_all() {
  run_threads(3, [](HostGroup& group) {
    if (group.rank() == 1) {
      group.abort("out of patience");
    } else {
      const auto error = failure_of([&] { group.barrier(timeout_s); });
      CHECK(error.kind == GroupFailure::aborted && error.rank == 1);
      CHECK(std::string(error.what()).find("out of patience") != std::string::npos);
    }
  });
}

void what_a_rank_sent_before_it_left_is_received() {
  run_threads(2, [](HostGroup& group) {
    Floats values = values_of(1, 8);
    if (group.rank() == 1) {
      group.send(bytes_of(values), 32, 0, 0, timeout_s);
      group.close();
      return;
    }
    Floats received(8);
    group.receive(bytes_of(received), 32, 1, 0, timeout_s);
    CHECK(received == values);
    const auto posted = group.post_receive(bytes_of(received), 32, any_rank, 0);
    const auto error = failure_of([&] { group.wait(*posted, timeout_s); });
    CHECK(error.kind == GroupFailure::lost);
    CHECK(std::string(error.what()).find("all other ranks are gone") != std::string::npos);
  });
}

void a_receive_that_nobody_answers_ends_by_its_deadline() {
  run_threads(2, [](HostGroup& group) {
    static std::atomic<bool> failed;
    if (group.rank() == 0) failed = false;
    group.barrier(timeout_s);
    if (group.rank() == 1) {
      while (!failed) std::this_thread::yield();
      return;
    }
    Floats received(8);
    const auto error = failure_of([&] { group.receive(bytes_of(received), 32, 1, 0, 0.05); });
    CHECK(error.kind == GroupFailure::deadline && error.rank == 1);
    failed = true;
  });
}

void a_message_of_another_size_is_shown() {
  run_threads(2, [](HostGroup& group) {
    Floats values(8);
    if (group.rank() == 1) {
      group.send(bytes_of(values), 32, 0, 6, timeout_s);
      failure_of([&] { group.barrier(timeout_s); });  // until the other has noticed
      return;
    }
    const auto error = failure_of([&] { group.receive(bytes_of(values), 28, 1, 6, timeout_s); });
    CHECK(error.kind == GroupFailure::mismatch && error.rank == 1);
    CHECK(std::string(error.what()).find("32 bytes with tag 6") != std::string::npos);
  });
}

void impossible_calls_leave_the_group_usable() {
  run_threads(2, [](HostGroup& group) {
    Floats values(8);
    CHECK_THROWS(group.broadcast(bytes_of(values), 32, 2, timeout_s), GroupError);
    CHECK_THROWS(group.all_reduce(bytes_of(values), 8, DType::int32, ReduceOp::average, timeout_s),
                 GroupError);
    CHECK_THROWS(group.send(bytes_of(values), 32, group.rank(), 0, timeout_s), GroupError);
    CHECK_THROWS(group.reduce_scatter_in_place(bytes_of(values), 7, DType::float32, ReduceOp::sum,
                                               timeout_s),
                 GroupError);
    CHECK_THROWS(group.reduce_scatter_in_place(bytes_of(values), 8, DType::float32, ReduceOp::sum,
                                               timeout_s),
                 GroupError);
    CHECK_THROWS(group.reduce_in_place(bytes_of(values), 8, DType::float32, ReduceOp::sum, 0,
                                       timeout_s),
                 GroupError);
    group.barrier(timeout_s);
  });
}

// Runs `work` as each rank, in a process each; returns their wait statuses.
std::vector<int> run_processes(int ranks, const std::function<void(HostGroup&)>& work) {
  const auto segments = make_segments(static_cast<std::uint32_t>(ranks), small_segments);
  std::vector<pid_t> processes;
  int gate[2];  // closed when the segments say whose they are: a group asks when it is made
  CHECK(pipe(gate) == 0);
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t process = fork();
    CHECK(process >= 0);
    if (process == 0) {
      close(gate[1]);
      char none = 0;
      if (read(gate[0], &none, 1) != 0) _exit(2);
      try {
        HostGroup group(rank, segments, small_chunks);
        work(group);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        _exit(1);
      }
      _exit(0);
    }
    segments[static_cast<std::size_t>(rank)]->header().process = process;
    processes.push_back(process);
  }
  close(gate[0]);
  close(gate[1]);
  std::vector<int> statuses;
  for (const pid_t process : processes) {
    int status = 0;
    CHECK(waitpid(process, &status, 0) == process);
    statuses.push_back(status);
  }
  return statuses;
}

void check_processes(int ranks) {
  const auto statuses = run_processes(ranks, [](HostGroup& group) {
    check_reductions(group);
    check_copies(group);
    check_mixture(group);
    group.barrier(timeout_s);
  });
  for (const int status : statuses) CHECK(status == 0);
}

void a_killed_rank_is_named() {
  const auto statuses = run_processes(3, [](HostGroup& group) {
    Floats values(100'000);
    if (group.rank() == 1) {
      group.all_reduce(bytes_of(values), values.size(), DType::float32, ReduceOp::sum, timeout_s);
      raise(SIGKILL);
    }
    const auto error = failure_of([&] {
      while (true)
        group.all_reduce(bytes_of(values), values.size(), DType::float32, ReduceOp::sum, timeout_s);
    });
    CHECK(error.kind == GroupFailure::lost && error.rank == 1);
  });
  CHECK(statuses[0] == 0 && WIFSIGNALED(statuses[1]) && statuses[2] == 0);
}

}  // namespace

int main() {
  for (int ranks = 1; ranks <= 5; ++ranks) {
    run_threads(ranks, check_reductions, small_segments, small_chunks);
    run_threads(ranks, check_copies, small_segments, small_chunks);
    run_threads(ranks, check_heap, small_segments, small_chunks);
    run_threads(ranks, check_reductions_in_heap, small_segments, small_chunks);
    run_threads(ranks, check_peers_heap, small_segments, small_chunks);
    run_threads(ranks, check_all_to_all, small_segments, small_chunks);
    run_threads(ranks, check_messages, small_segments, small_chunks);
    run_threads(ranks, check_posted_messages, small_segments, small_chunks);
    run_threads(ranks, check_messages_from_any_rank, small_segments, small_chunks);
    run_threads(ranks, check_mixture, small_segments, small_chunks);
  }
  for (const int ranks : {2, 3})
    for (const auto& check : {check_reductions, check_copies, check_all_to_all, check_mixture})
      run_threads(ranks, check, small_segments, small_options(false));
  a_late_rank_is_named();
  differing_calls_are_shown();
  an_abort_reaches_all();
  what_a_rank_sent_before_it_left_is_received();
  a_receive_that_nobody_answers_ends_by_its_deadline();
  a_message_of_another_size_is_shown();
  impossible_calls_leave_the_group_usable();
  check_processes(3);
  a_killed_rank_is_named();
}
