// The memory that the ranks of one host share: a segment per rank, mapped by all ranks of a group.
//
// A segment is a memfd that peers open through /proc/PID/fd/N. No file has a name, so nothing is left
// behind however a process ends. Memory is taken page by page as it is first touched, by the rank
// that owns it: ring, channels and heap lie on its NUMA node.
//
//     offset             bytes
//     0                  4096                          SegmentHeader
//     4096               ring_bytes                    ring: chunks on their way to peers
//     channels_offset    ranks * channel_bytes         messages to each rank: ChannelHeader, packets
//     heap_offset        heap_bytes                    symmetric heap: tensors that peers read in place
//
// A counter in a header is written by one rank only; `arrivals` and the counters of waiters by all.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace paceline {

constexpr std::size_t page_bytes = 4096;
constexpr std::size_t cache_line_bytes = 64;
// How many chunks a rank may be ahead of another: of a ring, this and two more chunks are in use.
constexpr std::uint32_t window_chunks = 4;
constexpr std::size_t fingerprint_count = 16;  // more calls than a rank can be ahead of another
constexpr std::size_t call_count = 16;
constexpr std::size_t compared_back = 8;  // calls; peers are ahead by fewer than the other 8

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// What a rank does in a call, for messages and for the comparison between ranks.
struct SharedCall {
  std::atomic<std::uint64_t> sequence;
  std::atomic<std::uint64_t> amount;  // elements, or bytes where there is no dtype
  std::atomic<std::int32_t> root;     // -1: none
  std::atomic<std::uint8_t> operation;
  std::atomic<std::uint8_t> dtype;
  std::atomic<std::uint8_t> op;
  std::atomic<std::uint8_t> running;
  std::atomic<std::uint64_t> reserved;
};
static_assert(sizeof(SharedCall) == 32);

// The line that peers poll; everything that a call needs of a peer is on it.
struct alignas(2 * cache_line_bytes) Progress {
  std::atomic<std::uint32_t> staged;    // chunks whose data peers may read
  std::atomic<std::uint32_t> reduced;   // chunks of which this rank reduced its share
  std::atomic<std::uint32_t> finished;  // chunks of which this rank reads nothing any more
  std::atomic<std::uint32_t> waiters;   // ranks that sleep until one of the three changes
  std::atomic<std::uint16_t> fingerprints[fingerprint_count];  // of calls, by sequence number
  std::atomic<std::uint64_t> announced[2];  // an argument that peers need, by announcement
  std::atomic<std::int32_t> core;  // where this rank was last seen to run, on a line of its own
};
static_assert(offsetof(Progress, core) == cache_line_bytes);

struct SegmentHeader {
  char magic[8];  // "PACEHOST"
  std::uint32_t version;
  std::uint32_t rank;
  std::uint32_t ranks;
  std::uint32_t reserved;
  std::uint64_t ring_bytes;
  std::uint64_t channel_bytes;
  std::uint64_t heap_bytes;
  std::uint64_t nonce[2];   // random: tells this segment from any other that a descriptor may lead to
  std::int64_t process;     // of the owner, in its own namespace
  std::uint64_t cores[16];  // on which the owner may run, a bit each

  Progress progress;

  // Set once, by the owner, when the group is unusable for it; `failure_kind` last.
  alignas(2 * cache_line_bytes) std::atomic<std::uint32_t> failure_kind;
  std::atomic<std::int32_t> failure_rank;  // that is to blame
  std::atomic<std::uint32_t> closed;       // the owner left the group
  // What the owner sleeps for: a rank (-1: none), a counter and its value. The counter is that rank's
  // (0 staged, 1 reduced, 2 finished), or for a message the owner's own (3 arrivals). A rank that is
  // stopped in its sleep leaves them as they were.
  std::atomic<std::int32_t> waits_for;
  std::atomic<std::uint32_t> waits_counter;
  std::atomic<std::uint32_t> waits_value;
  std::atomic<char> failure_text[232];

  alignas(2 * cache_line_bytes) SharedCall calls[call_count];  // by sequence number

  // Counts what peers do to the channels from and to the owner: a packet written, a packet read.
  alignas(2 * cache_line_bytes) std::atomic<std::uint32_t> arrivals;
  std::atomic<std::uint32_t> arrival_waiters;  // threads of the owner that sleep until it changes
};
static_assert(sizeof(SegmentHeader) <= page_bytes);
// As docs/guides/collectives.md has them.
static_assert(offsetof(SegmentHeader, progress) == 256);
static_assert(offsetof(SegmentHeader, failure_kind) == 384);
static_assert(offsetof(SegmentHeader, calls) == 640);
static_assert(offsetof(SegmentHeader, arrivals) == 1152);

// Messages from the owner to one peer: a ring of packets, one writer and one reader.
struct ChannelHeader {
  alignas(2 * cache_line_bytes) std::atomic<std::uint32_t> written;  // packets, by the owner
  alignas(2 * cache_line_bytes) std::atomic<std::uint32_t> read;     // packets, by the peer
};

struct PacketHeader {  // in the first packet of a message
  std::uint64_t message_bytes;
  std::int64_t tag;
};
constexpr std::size_t packet_header_bytes = cache_line_bytes;
constexpr std::size_t packet_count = 4;

struct SegmentOptions {
  // Larger than a level 2 cache: what a rank writes must not be in its peer's cache any more, and a
  // line that is modified in the cache of another core takes longest to read (bench/LOG.md).
  std::size_t ring_bytes = std::size_t{2} << 20;
  std::size_t packet_bytes = std::size_t{64} << 10;
  std::size_t heap_bytes = 0;
};

// A mapped segment; thread-safe as far as its atomics are.
class HostSegment {
 public:
  // Makes the segment of a rank. Throws std::system_error.
  static std::shared_ptr<HostSegment> create(std::uint32_t rank, std::uint32_t ranks,
                                             const SegmentOptions& options);
  // Maps a peer's segment. Throws std::system_error, or std::invalid_argument if the file is not the
  // segment with this nonce.
  static std::shared_ptr<HostSegment> open(const std::string& path, const std::string& nonce);
  static std::shared_ptr<HostSegment> open(int descriptor, const std::string& nonce);
  ~HostSegment();
  HostSegment(const HostSegment&) = delete;
  HostSegment& operator=(const HostSegment&) = delete;

  SegmentHeader& header() const noexcept { return *reinterpret_cast<SegmentHeader*>(base_); }
  std::span<std::byte> ring() const noexcept { return {base_ + page_bytes, ring_bytes_}; }
  ChannelHeader& channel(std::uint32_t peer) const noexcept {
    return *reinterpret_cast<ChannelHeader*>(channels_ + peer * channel_bytes_);
  }
  std::byte* packet(std::uint32_t peer, std::uint32_t number) const noexcept {
    return channels_ + peer * channel_bytes_ + page_bytes +
           (number & (packet_count - 1)) * packet_bytes();
  }
  std::size_t packet_bytes() const noexcept {
    return (channel_bytes_ - page_bytes) / packet_count;
  }
  std::span<std::byte> heap() const noexcept { return {heap_, heap_bytes_}; }

  int descriptor() const noexcept { return descriptor_; }  // -1 once closed
  // No more peers will open it.
  void close_descriptor() noexcept;
  std::string nonce() const;

 private:
  HostSegment(int descriptor, std::byte* base, std::size_t mapped_bytes);
  static std::shared_ptr<HostSegment> map(int descriptor, std::size_t bytes);
  void read_layout();

  int descriptor_;
  std::byte* base_;
  std::size_t mapped_bytes_;
  std::size_t ring_bytes_ = 0;
  std::size_t channel_bytes_ = 0;
  std::byte* channels_ = nullptr;
  std::byte* heap_ = nullptr;
  std::size_t heap_bytes_ = 0;
};

}  // namespace paceline
