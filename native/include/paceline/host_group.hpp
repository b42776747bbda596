// Collectives of ranks that share memory (host_segment.hpp).
//
// Every rank calls the same collectives in the same order. A collective moves its data in chunks; all
// ranks count the chunks alike, and a chunk has one place in the rings of all ranks. A rank publishes
// three counters: chunks staged in its ring, chunks of which it reduced its share, chunks that it
// reads no more. It writes chunk t when all peers have finished chunk t - window_chunks, and what was
// at that place of the ring is older. So there is no barrier. What one peer alone reads in a ring, that
// peer writes as well (take_kernel in reduction.hpp says why), before it has finished the chunk.
//
// The order of a sum is that of the ranks, whatever path the data takes and in whatever order they
// come: the result has the same bits in every run and on every rank.
//
// Waiting: a rank polls its peer's counter for `spin` turns, then sleeps on it (futex), and wakes ten
// times a second to look whether a peer is dead, has failed, or the deadline has passed. After a
// failure the group is unusable, and all peers that wait are woken and told the reason.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "paceline/host_segment.hpp"
#include "paceline/reduction.hpp"

namespace paceline {

enum class Operation : std::uint8_t {
  none, all_reduce, reduce, broadcast, reduce_scatter, all_gather, all_to_all, gather, scatter,
  barrier, send, receive, reduce_scatter_in_place, reduce_in_place
};
std::string_view name_of(Operation operation) noexcept;

enum class GroupFailure : std::uint8_t { none, lost, deadline, mismatch, aborted, usage };

struct GroupError : std::runtime_error {
  GroupError(GroupFailure failure, int culprit, const std::string& what)
      : std::runtime_error(what), kind(failure), rank(culprit) {}
  GroupFailure kind;
  int rank;  // that is to blame; -1: none
};

struct GroupOptions {
  unsigned spin = 0;                 // turns of polling before a rank sleeps; 0: by ranks and cores
  std::size_t eager_bytes = 16384;   // up to here every rank reduces everything
  std::size_t chunk_bytes = std::size_t{256} << 10;  // at most
  std::size_t past_cache_bytes = std::size_t{8} << 20;  // from here on targets are not cached
  bool take_lines = taking_pays();  // whether the only reader of a slot writes to it (take_kernel)
  std::function<void()> check_signals;  // called ten times a second while waiting; may throw
};

// A send or receive that was posted. Its memory stays until it is over, or the group is closed.
struct Message {
  const std::byte* source = nullptr;  // of a send
  std::byte* target = nullptr;        // of a receive
  std::size_t bytes = 0;
  std::size_t moved = 0;
  std::int64_t tag = 0;
  int peer = 0;  // of a receive from any rank: any_rank until a message is found for it
  std::atomic<bool> over{false};
  SharedCall call{};
};
constexpr int any_rank = -1;

// Collectives may be called by one thread at a time (a mutex sees to it); messages by any thread, at
// the same time as collectives. In a forked child every call throws, and the end of the group does
// nothing: it is the parent's.
class HostGroup {
 public:
  // segments: of all ranks, by rank; this rank's own included.
  HostGroup(int rank, std::vector<std::shared_ptr<HostSegment>> segments,
            const GroupOptions& options = {});
  ~HostGroup();
  HostGroup(const HostGroup&) = delete;
  HostGroup& operator=(const HostGroup&) = delete;

  int rank() const noexcept { return rank_; }
  int ranks() const noexcept { return static_cast<int>(peers_.size()); }
  unsigned spin() const noexcept { return spin_; }

  // Collectives. Each throws GroupError; `timeout_s` is the longest wait for other ranks.
  void all_reduce(std::byte* data, std::size_t count, DType dtype, ReduceOp op, double timeout_s);
  void reduce(std::byte* data, std::size_t count, DType dtype, ReduceOp op, int root,
              double timeout_s);
  void broadcast(std::byte* data, std::size_t bytes, int root, double timeout_s);
  void reduce_scatter(const std::byte* source, std::byte* target, std::size_t count_per_rank,
                      DType dtype, ReduceOp op, double timeout_s);
  void all_gather(const std::byte* source, std::byte* target, std::size_t bytes_per_rank,
                  double timeout_s);
  void all_to_all(const std::byte* source, std::byte* target,
                  std::span<const std::size_t> send_bytes,
                  std::span<const std::size_t> receive_bytes, double timeout_s);
  void gather(const std::byte* source, std::byte* target, std::size_t bytes, int root,
              double timeout_s);
  void scatter(const std::byte* source, std::byte* target, std::size_t bytes, int root,
               double timeout_s);
  void barrier(double timeout_s);

  // Reductions of `count` elements that each rank has in its heap, at any offset: nothing is copied.
  // Scattered, each rank's part is replaced by its reduction, and all ranks wait until all have read.
  // At a root, its data is replaced; other ranks return at once, and leave theirs as it is until a
  // barrier of all ranks. A rank that has its data elsewhere throws, if scattered all ranks.
  void reduce_scatter_in_place(std::byte* data, std::size_t count, DType dtype, ReduceOp op,
                               double timeout_s);
  void reduce_in_place(std::byte* data, std::size_t count, DType dtype, ReduceOp op, int root,
                       double timeout_s);

  // Messages (host_messages.cpp). A send is over when its last packet is in the channel. Messages of
  // a peer with one tag arrive in their order; one with a tag that no receive wants is kept until a
  // receive wants it. What was posted makes progress in every call here, and in a thread of the group.
  std::shared_ptr<Message> post_send(const std::byte* data, std::size_t bytes, int peer,
                                     std::int64_t tag);
  std::shared_ptr<Message> post_receive(std::byte* data, std::size_t bytes, int peer,
                                        std::int64_t tag);  // peer: may be any_rank
  void wait(const Message& message, double timeout_s);
  bool test(const Message& message);
  void send(const std::byte* data, std::size_t bytes, int peer, std::int64_t tag, double timeout_s);
  void receive(std::byte* data, std::size_t bytes, int peer, std::int64_t tag, double timeout_s);

  // Makes the group unusable for all ranks. Thread-safe.
  void abort(const std::string& reason) noexcept;
  // Leaves the group: peers that wait for this rank fail.
  void close() noexcept;

  // Memory in this rank's segment, which peers read in place; nullptr if the heap is full. Aligned to
  // pages; thread-safe.
  std::byte* allocate(std::size_t bytes);
  void release(std::byte* data);
  // Where this process has mapped the heap of a rank. What lies there is the rank's: who reads or
  // writes it agrees with that rank on when, and on how long it stays allocated.
  std::byte* heap_of(int rank) const;

 private:
  struct Peer {
    std::shared_ptr<HostSegment> segment;
    Progress* progress = nullptr;
    std::uint64_t compared = 0;  // the call up to which its fingerprint was compared
    int process_descriptor = -1;
  };
  struct Wait {  // for one deadline
    double timeout_s;
    std::uint64_t deadline_ns = 0;  // set when the rank first sleeps
    const SharedCall* call;
  };
  struct Share {  // of a chunk that a rank reduces, in bytes
    std::size_t offset;
    std::size_t bytes;
  };
  struct Chunk {
    std::uint32_t number;
    std::size_t offset;  // in the ring of each rank
  };
  struct StagedPart {  // of the data of an all-reduce
    std::byte* data;
    std::size_t bytes;
    std::size_t total;  // of all parts
    Chunk chunk;
  };
  struct Incoming {  // a message of which packets have come
    PacketHeader header;
    std::shared_ptr<Message> receive;  // that gets it; nullptr: none so far, it is kept
    std::vector<std::byte> kept;
    std::size_t moved = 0;
    bool complete = false;
  };
  struct Channel {  // with messages_mutex_
    std::deque<std::shared_ptr<Message>> sends;  // in their order
    std::deque<Incoming> arrived;  // in their order; only the last may be incomplete
  };
  class Call;
  class Attendance;
  static constexpr std::size_t any_peer = static_cast<std::size_t>(-1);

  SegmentHeader& own() const noexcept { return peers_[index_].segment->header(); }
  std::byte* slot(std::size_t peer, const Chunk& chunk) const noexcept {
    return peers_[peer].segment->ring().data() + chunk.offset;
  }
  std::byte* own_slot(const Chunk& chunk) const noexcept { return slot(index_, chunk); }

  // Waiting (host_group.cpp)
  void await(const std::atomic<std::uint32_t>& word, std::uint32_t value, std::size_t peer,
             std::atomic<std::uint32_t>& waiters, Wait& wait);
  int publish_core() noexcept;
  bool shares_core(std::size_t peer) noexcept;
  void sleep(const std::atomic<std::uint32_t>& word, std::uint32_t value, std::size_t peer,
             std::atomic<std::uint32_t>& waiters, Wait& wait);
  void sleep_until(const std::atomic<std::uint32_t>& word, std::uint32_t value, std::size_t peer,
                   Wait& wait);
  void publish_wait(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                    std::size_t peer) noexcept;
  std::optional<std::size_t> awaited_by(std::size_t peer) const noexcept;
  void look_around();
  [[noreturn]] void fail_lost(std::size_t peer, const Wait& wait);
  [[noreturn]] void fail_deadline(std::size_t peer, const Wait& wait);
  void check_failures();
  void check_usable();
  [[noreturn]] void fail(GroupFailure kind, int culprit, const std::string& what);
  void publish_failure(GroupFailure kind, int culprit, const std::string& what) noexcept;
  void wake_all() noexcept;
  std::string state_of(std::size_t peer) const;
  bool gone(std::size_t peer) const;
  bool forked() const noexcept;

  // Chunks
  Chunk next_chunk(std::size_t bytes);
  void await_window(std::uint32_t chunk);
  void publish(std::atomic<std::uint32_t>& word, std::uint32_t value) noexcept;
  static void advance(std::atomic<std::uint32_t>& word, std::uint32_t value,
                      std::atomic<std::uint32_t>& waiters) noexcept;
  void publish_staged(const Chunk& chunk) noexcept;
  void await_staged(std::size_t peer, const Chunk& chunk);
  void await_reduced(std::size_t peer, const Chunk& chunk);
  void await_all_staged(const Chunk& chunk);
  void finish(const Chunk& chunk);
  void compare_call(std::size_t peer);
  void synchronise();
  std::uint64_t announce(std::uint64_t value);
  std::uint64_t announced(std::size_t peer, std::uint64_t number) const;
  void need_root(int root) const;
  ReductionKernel kernel(DType dtype, ReduceOp op) const;

  // All-reduce by size and path (host_collectives.cpp)
  void all_reduce_eager(std::byte* data, std::size_t count, DType dtype, ReductionKernel kernel);
  void all_reduce_staged(std::byte* data, std::size_t count, DType dtype, ReductionKernel kernel);
  void all_reduce_in_place(std::byte* data, std::size_t count, DType dtype, ReductionKernel kernel);
  void reduce_block(std::byte* data, std::size_t offset, std::size_t bytes, bool into_all,
                    DType dtype, ReductionKernel kernel);
  void read_heap_offsets(std::uint64_t announcement);
  void need_in_heaps() const;
  StagedPart stage_for_all(std::byte* data, std::size_t bytes, std::size_t at);
  void reduce_share(const StagedPart& part, DType dtype, ReductionKernel kernel);
  void collect_shares(const StagedPart& part);
  std::byte* reduced_share(std::size_t peer, const StagedPart& part) const noexcept;
  Share share_of(std::size_t peer, std::size_t chunk_bytes) const;
  std::uint64_t heap_offset_of(const std::byte* data, std::size_t bytes) const noexcept;
  std::size_t chunk_limit() const;
  void copy_out(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t total) const;
  void take_out(std::byte* to, std::byte* from, std::size_t bytes, std::size_t total = 0) const;
  void copy_from(std::size_t peer, const Chunk& chunk, std::byte* to, std::size_t bytes,
                 std::size_t total) const;
  void reduce_slots(const std::byte* source, std::byte* target, const Chunk& chunk,
                    std::size_t offset, std::size_t count, ReductionKernel reduction);
  void copy_part(std::byte* to, const std::byte* from, std::size_t bytes, std::size_t total) const;
  std::size_t lane_bytes(std::size_t bytes) const;

  // Messages (host_messages.cpp); all but the last two with messages_mutex_.
  void make_progress();
  void write_packets(std::size_t peer);
  void read_packets(std::size_t peer);
  bool begin_message(std::size_t peer, const PacketHeader& header);
  void read_packet(std::size_t peer, Incoming& incoming, std::byte* packet);
  void give(Incoming& incoming, std::shared_ptr<Message> receive, std::size_t peer);
  bool take_arrived(std::size_t peer, const std::shared_ptr<Message>& receive);
  bool has_receive_for(std::size_t peer) const;
  void finish(Message& message);
  void check_length(const PacketHeader& header, const Message& receive, std::size_t peer);
  void watch_in_background();
  void signal(std::size_t peer) noexcept;
  void attend_messages() noexcept;  // what the thread of the group runs
  void need_peer(int peer) const;

  std::size_t index_;
  int rank_;
  std::vector<Peer> peers_;
  GroupOptions options_;
  unsigned spin_ = 0;
  std::uint64_t fork_generation_;
  std::atomic<bool> usable_{true};

  std::mutex collective_mutex_;
  // With the mutex: what the running collective counts.
  std::uint64_t sequence_ = 0;
  std::uint32_t chunk_count_ = 0;
  std::size_t ring_offset_ = 0;
  std::uint32_t all_finished_ = 0;  // chunks that all peers are known to have finished
  std::uint64_t announcements_ = 0;
  std::vector<const std::byte*> sources_;  // of the running reduction
  std::vector<std::byte*> targets_;
  std::vector<std::uint64_t> heap_offsets_;  // of the ranks' data
  Wait wait_{};

  std::mutex failure_mutex_;
  std::string failure_;
  GroupFailure failure_kind_ = GroupFailure::none;
  int failure_rank_ = -1;

  std::mutex messages_mutex_;
  // With the mutex: what was posted, what has come, and who makes progress.
  std::vector<Channel> channels_;
  std::deque<std::shared_ptr<Message>> receives_;  // in the order in which they were posted
  std::uint64_t message_count_ = 0;
  std::size_t under_way_ = 0;  // messages that are not over
  unsigned attending_ = 0;     // threads that wait, and so make progress
  bool watching_ = false;      // the thread looks at the messages by itself
  bool stopping_ = false;
  std::unique_ptr<std::thread> progress_thread_;  // a forked child has none, and must not join it
  std::atomic<std::uint32_t> wake_ups_{0};  // of that thread

  std::mutex heap_mutex_;
  std::map<std::size_t, std::size_t> heap_free_;  // offset -> bytes
  std::map<std::size_t, std::size_t> heap_used_;
};

}  // namespace paceline
