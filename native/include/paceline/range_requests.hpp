// How programs on a node ask the node's server for bytes of shards that are not here: in memory that they
// share, without a socket in the program.
//
//     program                             server
//     claims a slot, writes (shard, offset, length), wakes it
//                                         takes it, fetches the bytes into the slot's room, from a node
//                                         that has them, wakes the program
//     copies the bytes, frees the slot
//
// The memory is a memfd of the launcher, which programs open as /proc/PID/fd/N and map: nothing is left
// of it when the processes are gone, however they ended. It also says which shards are here, so that these
// are read without asking. A program holds no descriptor of it: programs close descriptors that they do not
// know.
//
// A slot belongs to a process from its claim on. It comes back when the process frees it, or the server
// finds that the process has ended.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace paceline {

enum class ServerState : std::uint32_t { starting = 0, serving = 1, ended = 2 };

// What became of a request. `here`: the shard has come here meanwhile.
enum class RequestOutcome : std::uint32_t { good = 1, nobody = 2, here = 3, lost = 4, late = 5 };

// What programs and the servers of a node have done so far. The memory outlives a server that is killed, and so
// do these: the server that follows goes on counting. Reads are of whole files, or of pieces of large ones.
enum class ServedCount : std::uint32_t {
  local_reads,           // of programs, from files of this node
  local_bytes,
  remote_reads,          // of programs, through this node's server
  peer_bytes,            // of these, from other nodes
  request_source_bytes,  // of these, from the source
  program_source_bytes,  // read from the source by programs themselves
  read_ns,               // that programs spent in all of these, summed over their threads
  staged_source_bytes,   // copied to this node from the source
  staged_peer_bytes,     // copied from other nodes
  sent_bytes,            // to other nodes
  peak_queue,            // most requests that waited at a time
  peak_copies,           // most shards that this node still had to copy
  server_starts,
};
constexpr std::size_t served_counts = 13;

// Thread-safe, and safe to use in a forked child; between processes as well.
class RangeRequests {
 public:
  struct Request {
    std::uint32_t slot;
    std::uint32_t shard;
    std::uint64_t offset;
    std::uint64_t length;  // at most slot_bytes
    std::uint32_t attempt;  // what the program got before was damaged: from somebody else
  };

  // A new memory. `node` names the node in messages. Throws std::system_error.
  static std::unique_ptr<RangeRequests> create(std::uint32_t shards, std::uint32_t slots,
                                               std::uint32_t slot_bytes, const std::string& node);
  // Maps what a descriptor, or a path, leads to. Throws std::system_error, std::invalid_argument.
  static std::unique_ptr<RangeRequests> map(int descriptor);
  static std::unique_ptr<RangeRequests> open(const std::string& path);
  ~RangeRequests();
  RangeRequests(const RangeRequests&) = delete;
  RangeRequests& operator=(const RangeRequests&) = delete;

  int descriptor() const noexcept { return descriptor_; }  // of one that was created; else -1
  std::uint32_t shard_count() const noexcept;
  std::string node() const;

  // --- programs ---
  bool is_held(std::uint32_t shard) const noexcept;
  bool has_ended() const noexcept;
  bool is_serving() const noexcept;  // it has not ended, and was heard of a moment ago
  // Fills `target` with a range of a shard, in as many requests as it takes.
  RequestOutcome fetch(std::uint32_t shard, std::uint64_t offset, std::span<std::byte> target,
                       std::uint32_t attempt, std::uint64_t wait_ns);
  // Waits until the server serves; false: it ended, or the time is over.
  bool await_serving(std::uint64_t wait_ns) const;

  // --- all ---
  void count(ServedCount what, std::uint64_t amount) noexcept;
  void raise(ServedCount what, std::uint64_t least) noexcept;  // to at least this
  std::uint64_t counted(ServedCount what) const noexcept;

  // --- the server ---
  void set_state(ServerState state) noexcept;  // also wakes all that wait
  void set_held(std::uint32_t shard, bool is_held) noexcept;
  void beat() noexcept;  // to be called about every second: the server is there
  std::optional<Request> take(std::uint64_t wait_ns);
  std::span<std::byte> room(std::uint32_t slot) const noexcept;
  void finish(std::uint32_t slot, RequestOutcome outcome) noexcept;
  std::uint32_t queue_length() const noexcept;  // requests that were not answered yet
  void wake_server() noexcept;
  // Takes over from a server that was killed: what it had taken is asked for again.
  void recover() noexcept;
  // Frees the slots of processes that have ended; returns their number.
  unsigned reap() noexcept;

 private:
  struct Header;
  struct Slot;

  RangeRequests(std::byte* base, std::size_t size, int descriptor) noexcept;
  Header& header() const noexcept;
  std::atomic<std::uint8_t>& held(std::uint32_t shard) const noexcept;
  Slot& slot(std::uint32_t number) const noexcept;
  std::optional<std::uint32_t> claim(std::uint64_t deadline_ns) const;
  std::uint32_t ask(std::uint32_t number, std::uint32_t shard, std::uint64_t offset,
                    std::uint64_t length, std::uint32_t attempt) const noexcept;
  RequestOutcome await(std::uint32_t number, std::uint32_t owner,
                       std::uint64_t deadline_ns) const noexcept;
  void free_slot(std::uint32_t number) const noexcept;

  std::byte* base_;
  std::size_t size_;
  int descriptor_;
};

}  // namespace paceline
