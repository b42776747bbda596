// Records events of one rank. The hot path appends to a preallocated buffer: no allocation, no
// system call but the clock. A thread of its own writes full or aged buffers to the file, so that
// a crash loses at most one flush interval; what is lost is the tail, never the middle.
// The layout of the file: docs/reference/trace-format.md.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "paceline/thread_usage.hpp"

namespace paceline {

constexpr std::uint32_t trace_format_version = 1;

enum class Kind : std::uint8_t {
  step = 0,
  input = 1,
  copy = 2,
  forward = 3,
  backward = 4,
  optimizer = 5,
  collective = 6,
  wait = 7,
  checkpoint = 8,
  counter = 9,
};

struct Event {  // little-endian on disk, 48 bytes
  std::uint64_t begin_ns;
  std::uint64_t end_ns;
  std::uint64_t amount;    // bytes moved; a counter's value
  std::uint32_t step;
  std::uint32_t name;      // index into the names, in order of their first use
  std::uint32_t group;     // name index of the process group; 0 = none
  std::uint32_t sequence;  // of the collective within its group, from 1; 0 = none
  std::int32_t peer;       // rank of the other side or root; -1 = none
  Kind kind;
  std::uint8_t lane;
  std::uint16_t reserved;
};
static_assert(sizeof(Event) == 48);

// The first page of the file, mapped: the live part is updated in place, so that whoever outlives
// this process can say in which step and phase it ended.
struct TraceHeader {
  char magic[8];  // "PACETRCE"
  std::uint32_t version;
  std::uint32_t rank;
  std::uint32_t world_size;
  std::uint32_t reserved;
  std::uint64_t opened_monotonic_ns;
  std::uint64_t opened_realtime_ns;
  char boot_id[40];  // equal on ranks that share one monotonic clock
  // live from here on
  std::atomic<std::uint32_t> step;
  std::atomic<std::uint32_t> phase;   // a Kind; Kind::step stands for "between phases"
  std::atomic<std::uint32_t> closed;  // 1 once the file is complete
  std::atomic<std::uint32_t> error;   // errno of the first failed write, or 0
  std::atomic<std::uint64_t> recorded_count;
  std::atomic<std::uint64_t> dropped_count;
  std::atomic<std::uint64_t> peak_memory_bytes;
  std::atomic<std::uint64_t> written_bytes;  // the file's length up to the last whole block
};
static_assert(sizeof(TraceHeader) <= 4096);

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

  // The number that stands for `name` from now on.
  std::uint32_t intern(const std::string& name);

  // Marks the phase that this rank is in and returns now.
  std::uint64_t begin(Kind kind);
  // Records [begin_ns, now] and goes back to the phase `outer`. Returns now.
  std::uint64_t end(Kind kind, std::uint32_t name, std::uint64_t begin_ns, std::uint64_t amount,
                    Kind outer);
  void record(const Event& event);
  // Ends the current step now: records it with the time its threads ran and waited for a core.
  std::uint64_t end_step();
  // Starts the first step now, if no phase has done so yet.
  void start_steps(std::uint64_t now_ns);

  std::uint32_t step() const noexcept { return step_.load(std::memory_order_relaxed); }
  std::uint64_t dropped_count() const noexcept;

  void flush();
  // Writes what is left and marks the file complete. Idempotent.
  void close();

 private:
  enum class Block : std::uint32_t { events = 1, names = 2 };

  bool owned() const noexcept;
  void append(const Event& event);                // with shared_->mutex held
  void write_pending();                           // with writer_mutex_ held
  void write_block(Block type, std::uint32_t count, const void* payload, std::size_t size);
  void write_loop();
  static void* write_loop_entry(void* self);

  RecorderOptions options_;
  int descriptor_ = -1;
  TraceHeader* header_ = nullptr;
  std::uint64_t generation_;

  // What the writer thread shares with the others. A child forked while they hold it must not even
  // destroy it (a condition variable waits for its waiters, and there they do not exist): it leaks.
  struct Shared {
    std::mutex mutex;  // guards the rest; held for nanoseconds
    std::vector<Event> active;
    std::vector<Event> spare;
    std::unordered_map<std::string, std::uint32_t> names;
    std::vector<std::string> new_names;
    std::condition_variable wake;
    bool stopping = false;
  };
  std::unique_ptr<Shared> shared_;

  std::mutex writer_mutex_;
  std::uint64_t file_bytes_ = 0;
  pthread_t writer_{};  // not std::thread: its destructor would end a forked child
  bool writer_started_ = false;

  std::atomic<std::uint32_t> step_ = 0;           // only the training loop's thread moves these two,
  std::atomic<std::uint64_t> step_begin_ns_ = 0;  // but backward's threads read them
  std::uint32_t step_name_ = 0;
  std::uint32_t running_name_ = 0;
  std::uint32_t not_running_name_ = 0;
  ThreadUsage usage_;
  ThreadTimes before_;  // at the end of the previous step
};

}  // namespace paceline
