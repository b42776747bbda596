// Records events of one rank. The hot path appends to a preallocated buffer: no allocation, no
// system call but the clock. A thread of its own writes full or aged buffers to the file, so that
// a crash loses at most the events since the last flush, never earlier ones.
// The layout of the file: docs/reference/trace-format.md.
#pragma once

#include <pthread.h>
#include <time.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "paceline/node_counters.hpp"
#include "paceline/thread_usage.hpp"

namespace paceline {

constexpr std::uint32_t trace_format_version = 3;

// The kind of an event. No kind has number 0, which means "idle" in a header.
enum class Kind : std::uint8_t {
  input = 1,
  copy = 2,
  forward = 3,
  backward = 4,
  optimizer = 5,
  collective = 6,
  wait = 7,
  checkpoint = 8,
  counter = 9,
  step = 10,
  send = 11,
  recv = 12,
  evaluation = 13,
  host = 14,
  sample = 15,
  stage = 16,
  read = 17,
  write = 18,
  layer = 19,
  gradient = 20,
  op = 21,
  kernel = 22,
};

// The state of a rank: idle, or the number of the Kind that it is in.
enum class Phase : std::uint32_t { idle = 0 };

constexpr Phase phase_of(Kind kind) noexcept { return static_cast<Phase>(kind); }

// Where events happen. Events of a communication lane overlap, those of other locations are nested.
enum class LocationType : std::uint32_t { process = 1, thread = 2, stream = 3, communication = 4 };

// Two locations are in every file: the thread of the training loop, and a lane of collectives.
constexpr std::uint16_t main_location = 0;
constexpr std::uint16_t communication_location = 1;

// Flags of an event. The end of a call without a known completion is the moment when it returned.
constexpr std::uint8_t completion_unknown = 1;
// Flags of a forward pass.
constexpr std::uint8_t without_gradients = 2;
constexpr std::uint8_t evaluation_mode = 4;
// A flag of a collective or message: the main thread waited for it all the time. Readers add the wait.
constexpr std::uint8_t blocking = 8;

struct Event {  // 48 bytes; packed on disk (event_codec.hpp)
  std::uint64_t begin_ns = 0;
  std::uint64_t end_ns = 0;
  std::uint64_t amount = 0;    // bytes of this rank's tensors; a counter's value; ns of a wait
  std::uint32_t step = 0;
  std::uint32_t sequence = 0;  // collective: of its group; send, recv: of (group, peer, tag); from 1
  std::int32_t peer = -1;      // global rank of the root or of the other side; -1 = none
  std::int32_t tag = 0;        // of a send or recv; else the number of the object that is used
  std::uint16_t name = 0;      // index into the names
  std::uint16_t group = 0;     // index into the groups
  std::uint16_t location = main_location;  // index into the locations
  Kind kind = Kind::step;
  std::uint8_t flags = 0;
};
static_assert(sizeof(Event) == 48);

// The first page of the file, mapped: the live part is updated in place, so that a process that
// outlives this one can read in which step and phase it ended.
struct TraceHeader {
  char magic[8];  // "PACETRCE"
  std::uint32_t version;
  std::uint32_t rank;
  std::uint32_t world_size;
  std::uint32_t fixed_checksum;  // of all fixed fields but itself
  std::uint64_t opened_monotonic_ns;
  std::uint64_t opened_realtime_ns;
  char boot_id[40];  // equal on ranks that share one monotonic clock
  // live from here on
  std::atomic<std::uint32_t> step;
  std::atomic<std::uint32_t> phase;   // a Phase
  std::atomic<std::uint32_t> closed;  // 1 once the file is complete
  std::atomic<std::uint32_t> error;   // errno of the first failed write, or 0
  std::atomic<std::uint64_t> recorded_count;
  std::atomic<std::uint64_t> dropped_count;
  std::atomic<std::uint64_t> peak_memory_bytes;
  std::atomic<std::uint64_t> written_bytes;  // the file's length up to the last whole block
  std::atomic<std::uint32_t> live_checksum;  // of the live fields before it; 0 until closed
};
static_assert(sizeof(TraceHeader) <= 4096);

// How far the rank has come with the collectives of one group: from byte 1024 on of the same page,
// so that its launcher sees which rank the others wait for. The first entry is not of a group but of
// the message that the rank waits for.
constexpr std::size_t progress_offset = 1024;
constexpr std::size_t progress_entries = 48;
struct GroupProgress {
  std::atomic<std::uint32_t> version;  // odd while the entry changes
  std::uint16_t group;                 // number of the group; 0: the entry is not used
  std::uint16_t name;                  // of the last collective or message that was entered
  std::uint32_t entered;               // its sequence; of messages, how many were waited for
  std::uint32_t left;                  // number of collectives, or messages, that have ended
  std::uint32_t unseen;                // sequence of the last one whose completion is not seen
  std::int32_t peer;                   // its root or other side
  std::uint64_t entered_ns;
  std::uint16_t operations[8];  // names of the last collectives, by their sequence modulo 8
  std::uint64_t amount;         // bytes that the rank gave to the last collective; 0: not known
  std::uint16_t element;        // name of their type; 0: not known
  std::uint16_t reserved[3];
};
static_assert(sizeof(GroupProgress) == 64);
static_assert(progress_offset + progress_entries * sizeof(GroupProgress) == 4096);

std::uint64_t monotonic_ns() noexcept;

struct RecorderOptions {
  std::uint32_t rank = 0;
  std::uint32_t world_size = 1;
  std::uint32_t buffer_events = 1U << 16;
  double flush_interval_s = 0.2;
  bool exclusive = true;  // refuse to overwrite an existing file
};

// Thread-safe. In a process forked from the owner every call does nothing.
class Recorder {
 public:
  // Throws std::system_error when the file cannot be made.
  Recorder(const std::string& path, const RecorderOptions& options);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // The number that stands for `name` from now on; 0, which means "none", once 65,535 are taken.
  std::uint16_t intern(const std::string& name);
  // The number of the group of this name and these members, global ranks in order of their rank in
  // the group; no members: not known. 0 once 65,535 groups are taken.
  std::uint16_t define_group(const std::string& name, const std::vector<std::uint32_t>& members);
  // The number of a location: `number` is a thread's id or a stream's number in its process. Once
  // 65,535 locations are taken, that of the main thread.
  std::uint16_t define_location(LocationType type, const std::string& name, std::uint32_t process,
                                std::uint32_t number);

  // Marks the phase that this rank is in and returns now. A wait of the main location that is
  // recorded with what `begin(wait)` returned as its begin gets the time without a core since then
  // as its amount. Waits may be nested.
  std::uint64_t begin(Phase phase);
  // Marks the phase and does no more, not even look at the time.
  void mark(Phase phase) noexcept;
  // Records [begin_ns, now] on the main location and goes back to `outer`. Returns now.
  std::uint64_t end(Kind kind, std::uint16_t name, std::uint64_t begin_ns, std::uint64_t amount,
                    Phase outer, std::int32_t tag = 0, std::uint8_t flags = 0);
  // Publishes in the header that this rank has entered a collective of a group, which `record` of it
  // takes to be left; or that it waits for a message, until `leave`.
  void enter(const Event& event);
  void leave();
  void record(const Event& event);
  // Records events that are known already, and writes them at once if they fill the buffer.
  void record(const Event* events, std::size_t count);
  // Ends the current step now: records it with the time that the process's threads, and the main
  // thread by itself, ran and waited for a core. `name` says what ended it (0: an optimizer's step),
  // `tag` which one.
  std::uint64_t end_step(std::uint16_t name = 0, std::int32_t tag = 0);
  // Starts the first step now, if no phase has done so yet.
  void start_steps(std::uint64_t now_ns);

  // Records, if there were any since the last call, the major page faults of the main thread and the
  // bytes that it had fetched from storage, by faults and by calls. Called by that thread; `end_step`
  // does it, too.
  void count_paging();
  // The main thread's times until now, exact for that thread itself.
  ThreadTimes main_times() const noexcept;

  // From the first phase on, the writer thread records the counters of this node: first after 0.2 s,
  // then once a second. Of all recorders of a node that are given the same folder, one does, and
  // another when that one ends.
  void count_node(const std::string& folder);

  std::uint32_t step() const noexcept { return step_.load(std::memory_order_relaxed); }
  std::uint64_t dropped_count() const noexcept;

  void flush();
  // Writes what is left and marks the file complete. Idempotent. Calls that come later do nothing;
  // none but `record` may run at the same time.
  void close();

 private:
  enum class Block : std::uint32_t { names = 2, groups = 3, locations = 4, events = 5 };

  // Definitions that wait to be written, in the layout of the file.
  struct Definitions {
    std::string payload;
    std::uint32_t count = 0;
  };

  bool owned() const noexcept;
  bool recording() const noexcept;  // in the owner's process, before `close`
  std::uint16_t intern_locked(const std::string& name);  // with shared_->mutex held
  std::uint16_t define(std::unordered_map<std::string, std::uint16_t>& table, Definitions& fresh,
                       const std::string& entry);
  void append(const Event& event);                       // with shared_->mutex held
  GroupProgress& progress_of(std::uint16_t group);            // likewise
  void note_left(const Event& event);                    // likewise
  void open_wait(std::uint64_t now_ns);
  std::uint64_t close_wait(std::uint64_t begin_ns, std::uint64_t otherwise);
  void write_pending();                                  // with writer_mutex_ held
  void write_definitions(Block type, const Definitions& definitions);
  void write_block(Block type, std::uint32_t count, const void* payload, std::size_t size);
  void write_loop();
  void note_stop();
  void note_node();
  void wake_writer() noexcept;
  static void* write_loop_entry(void* self);

  RecorderOptions options_;
  int descriptor_ = -1;
  TraceHeader* header_ = nullptr;
  GroupProgress* progress_ = nullptr;  // changed with shared_->mutex held
  std::uint64_t generation_;
  std::atomic<bool> closed_ = false;

  // What the writer thread shares with the others. A child forked while they hold it must not even
  // destroy it: it leaks.
  struct Shared {
    std::mutex mutex;  // guards the rest; held for nanoseconds
    std::vector<Event> active;
    std::vector<Event> spare;
    std::unordered_map<std::string, std::uint16_t> names;
    std::unordered_map<std::string, std::uint16_t> groups;     // by name and members, as written
    std::unordered_map<std::string, std::uint16_t> locations;  // by all fields, as written
    Definitions new_names;
    Definitions new_groups;
    Definitions new_locations;
    bool stopping = false;
  };
  std::unique_ptr<Shared> shared_;

  // The writer sleeps in epoll_wait on the event descriptor `wake_`: of all waits it is the one
  // that ends with EINTR when the whole process was stopped and continued (signal(7)).
  int wake_ = -1;
  int poll_ = -1;

  // Of the writer thread, once `counts_node_` is set.
  struct Node {
    std::string key;  // of the claim
    NodeClaim claim;
    NodeCounters counters;
    std::uint16_t location = main_location;
    std::uint64_t last_ns = 0;
    std::uint64_t due_ns = 0;
    std::uint64_t interval_ns = 0;
  };
  std::unique_ptr<Node> node_;
  std::atomic<bool> counts_node_ = false;

  std::mutex writer_mutex_;
  std::uint64_t file_bytes_ = 0;
  pthread_t writer_{};  // not std::thread: its destructor would end a forked child
  bool writer_started_ = false;

  std::atomic<std::uint32_t> step_ = 0;           // only the training loop's thread moves these two,
  std::atomic<std::uint64_t> step_begin_ns_ = 0;  // but backward's threads read them
  std::uint16_t step_name_ = 0;
  std::uint16_t running_name_ = 0;
  std::uint16_t not_running_name_ = 0;
  std::uint16_t main_running_name_ = 0;
  std::uint16_t main_not_running_name_ = 0;
  std::uint16_t stopped_name_ = 0;
  std::uint16_t major_faults_name_ = 0;
  std::uint16_t storage_bytes_name_ = 0;
  int main_tid_ = 0;        // the thread that made the recorder runs the training loop
  int main_times_ = -1;     // its schedstat
  struct OpenWait {
    std::uint64_t begin_ns = 0;  // 0: none
    std::uint64_t runnable_ns = 0;  // how long the main thread had been without a core by then
  };
  // With the mutex. One that is never recorded, as its hook failed, stays until room is needed.
  std::array<OpenWait, 8> open_waits_{};
  clockid_t main_clock_{};  // its time on a core, exact where schedstat lags
  ThreadUsage usage_;
  ThreadTimes before_;       // at the end of the previous step
  ThreadTimes main_before_;  // of the main thread
  std::int64_t major_faults_before_ = 0;
  std::int64_t storage_blocks_before_ = 0;
};

}  // namespace paceline
