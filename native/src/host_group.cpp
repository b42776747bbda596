// How ranks wait for each other, and how they fail together.
#include "paceline/host_group.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>

#include "futex.hpp"
#include "host_call.hpp"
#include "paceline/fork.hpp"

namespace paceline {
namespace {

constexpr std::uint64_t look_interval_ns = 100'000'000;
// About 0.1 ms where every rank has a core: longer than a sleeping rank takes to wake up (30 to 50 us
// in a virtual machine). With less, a rank that wakes up late might make its peer fall asleep in its
// turn; not shown by a measurement (bench/LOG.md). Next to nothing where ranks share cores, because a
// rank that polls keeps its peer from running.
constexpr unsigned spin_own_core = 4000;
constexpr unsigned spin_shared_core = 30;
// A peer that is known to be in the same call answers soon.
constexpr unsigned spin_factor_in_call = 4;
// Turns between two looks at whether the peer has this core: after 2 us, then every 6.
constexpr unsigned core_look_turns = 256;
constexpr unsigned first_core_look = 64;
constexpr unsigned most_yields = 100;  // at each look: the peer may compute for long

std::uint64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Counters wrap around: the difference says which is ahead.
bool reached(std::uint32_t counter, std::uint32_t value) noexcept {
  return static_cast<std::int32_t>(counter - value) >= 0;
}

int open_process(std::int64_t process) noexcept {
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(process), 0));
}

std::string read_text(const std::atomic<char>* text, std::size_t capacity) {
  std::string result;
  for (std::size_t i = 0; i < capacity; ++i) {
    const char next = text[i].load(std::memory_order_relaxed);
    if (next == '\0') break;
    result += next;
  }
  return result;
}

}  // namespace

std::string_view name_of(Operation operation) noexcept {
  constexpr std::string_view names[] = {"none",       "all_reduce", "reduce",  "broadcast",
                                        "reduce_scatter", "all_gather", "all_to_all", "gather",
                                        "scatter",    "barrier",    "send",    "receive",
                                        "reduce_scatter_in_place", "reduce_in_place"};
  return names[static_cast<std::size_t>(operation)];
}

HostGroup::HostGroup(int rank, std::vector<std::shared_ptr<HostSegment>> segments,
                     const GroupOptions& options)
    : index_(static_cast<std::size_t>(rank)), rank_(rank), options_(options),
      fork_generation_(fork_generation()) {
  std::size_t cores = 0;
  for (std::size_t word = 0; word < 16; ++word) {
    std::uint64_t bits = 0;
    for (const auto& segment : segments) bits |= segment->header().cores[word];
    cores += static_cast<std::size_t>(std::popcount(bits));
  }
  spin_ = segments.size() <= cores ? spin_own_core : spin_shared_core;
  if (options.spin != 0) spin_ = options.spin;
  for (auto& segment : segments) {
    Peer peer;
    peer.progress = &segment->header().progress;
    if (peers_.size() != index_) peer.process_descriptor = open_process(segment->header().process);
    peer.segment = std::move(segment);
    peers_.push_back(std::move(peer));
  }
  channels_.resize(peers_.size());
  const std::size_t heap_bytes = peers_[index_].segment->heap().size();
  if (heap_bytes > 0) heap_free_[0] = heap_bytes;
}

HostGroup::~HostGroup() {
  close();
  if (forked()) static_cast<void>(progress_thread_.release());
  for (const Peer& peer : peers_)
    if (peer.process_descriptor >= 0) ::close(peer.process_descriptor);
}

// Waiting

void HostGroup::await(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                      std::size_t peer, std::atomic<std::uint32_t>& waiters, Wait& wait) {
  if (reached(word.load(std::memory_order_acquire), value)) return;
  const bool in_call = &wait == &wait_ && spin_ > spin_shared_core &&
                       peers_[peer].compared == sequence_;
  const unsigned turns = in_call ? spin_ * spin_factor_in_call : spin_;
  for (unsigned turn = 0; turn < turns; ++turn) {
    relax();
    if (reached(word.load(std::memory_order_acquire), value)) return;
    if (turn % core_look_turns != first_core_look) continue;
    for (unsigned yields = 0; yields < most_yields && shares_core(peer); ++yields) {
      sched_yield();
      if (reached(word.load(std::memory_order_acquire), value)) return;
    }
  }
  sleep(word, value, peer, waiters, wait);
}

int HostGroup::publish_core() noexcept {
  const int core = sched_getcpu();
  std::atomic<std::int32_t>& own_core = own().progress.core;
  if (own_core.load(std::memory_order_relaxed) != core)
    own_core.store(core, std::memory_order_relaxed);
  return core;
}

// Where another process keeps a core busy, two ranks may find themselves on one: then the peer gets
// on only when this rank lets it. A rank that yields stays runnable, so that the system moves one of
// the two when a core becomes idle; one that sleeps is woken on the core of its peer, again and again.
bool HostGroup::shares_core(std::size_t peer) noexcept {
  const int core = publish_core();
  return peer != any_peer && core >= 0 &&
         peers_[peer].progress->core.load(std::memory_order_relaxed) == core;
}

void HostGroup::sleep(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                      std::size_t peer, std::atomic<std::uint32_t>& waiters, Wait& wait) {
  struct Announced {  // as a waiter, for as long as it sleeps
    explicit Announced(std::atomic<std::uint32_t>& count) : waiters(count) {
      waiters.fetch_add(1, std::memory_order_seq_cst);
    }
    ~Announced() { waiters.fetch_sub(1, std::memory_order_relaxed); }
    std::atomic<std::uint32_t>& waiters;
  };
  const Announced announced_here(waiters);
  const bool is_known = peer != any_peer;
  if (is_known) publish_wait(word, value, peer);
  sleep_until(word, value, peer, wait);
  if (is_known) own().waits_for.store(-1, std::memory_order_relaxed);
}

// For peers whose deadline passes while they wait for this rank.
void HostGroup::publish_wait(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                             std::size_t peer) noexcept {
  const Progress& progress = *peers_[peer].progress;
  SegmentHeader& header = own();
  const std::uint32_t counter = &word == &progress.staged    ? 0
                                : &word == &progress.reduced ? 1
                                : &word == &header.arrivals  ? 3
                                                             : 2;
  header.waits_counter.store(counter, std::memory_order_relaxed);
  header.waits_value.store(value, std::memory_order_relaxed);
  header.waits_for.store(static_cast<std::int32_t>(peer), std::memory_order_release);
}

// The rank that a peer waits for, if it does: not one that was stopped when its wait was over.
std::optional<std::size_t> HostGroup::awaited_by(std::size_t peer) const noexcept {
  const SegmentHeader& header = peers_[peer].segment->header();
  const std::int32_t awaited = header.waits_for.load(std::memory_order_acquire);
  if (awaited < 0 || awaited >= ranks()) return std::nullopt;
  const Progress& progress = *peers_[static_cast<std::size_t>(awaited)].progress;
  const std::atomic<std::uint32_t>* counters[] = {&progress.staged, &progress.reduced,
                                                  &progress.finished, &header.arrivals};
  const std::uint32_t counter = header.waits_counter.load(std::memory_order_relaxed);
  const std::uint32_t value = header.waits_value.load(std::memory_order_relaxed);
  if (counter > 3 || reached(counters[counter]->load(std::memory_order_acquire), value))
    return std::nullopt;
  return static_cast<std::size_t>(awaited);
}

void HostGroup::sleep_until(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                            std::size_t peer, Wait& wait) {
  if (wait.deadline_ns == 0)
    wait.deadline_ns = now_ns() + static_cast<std::uint64_t>(std::max(wait.timeout_s, 0.0) * 1e9);
  std::uint64_t look_ns = now_ns() + look_interval_ns;
  while (true) {
    const std::uint32_t counter = word.load(std::memory_order_seq_cst);
    if (reached(counter, value)) return;
    const std::uint64_t now = now_ns();
    if (now >= look_ns || now >= wait.deadline_ns || own().failure_kind.load() != 0) {
      look_around();
      const bool lost = gone(peer);  // first: a rank may leave when it has done what is awaited
      if (reached(word.load(std::memory_order_acquire), value)) return;
      if (lost) fail_lost(peer, wait);
      if (now >= wait.deadline_ns) fail_deadline(peer, wait);
      look_ns = now + look_interval_ns;
    }
    futex_wait(word, counter, std::min(look_ns, wait.deadline_ns) - now);
  }
}

void HostGroup::look_around() {
  if (options_.check_signals) {
    try {
      options_.check_signals();
    } catch (...) {
      publish_failure(GroupFailure::aborted, rank_,
                      "rank " + std::to_string(rank_) + " was interrupted");
      throw;
    }
  }
  check_failures();
}

void HostGroup::fail_lost(std::size_t peer, const Wait& wait) {
  check_failures();  // a rank that has failed and ended since the last look says whose fault it was
  if (peer == any_peer)
    fail(GroupFailure::lost, any_rank,
         "all other ranks are gone, while rank " + std::to_string(rank_) + " waited in " +
             describe(*wait.call));
  fail(GroupFailure::lost, static_cast<int>(peer),
       "rank " + std::to_string(peer) + " is gone, while rank " + std::to_string(rank_) +
           " waited for it in " + describe(*wait.call) + "; " + state_of(peer));
}

// The rank to blame is at the end of the chain: rank 0 waits for rank 1, which waits for rank 2.
void HostGroup::fail_deadline(std::size_t peer, const Wait& wait) {
  if (peer == any_peer)
    fail(GroupFailure::deadline, any_rank,
         "no rank answered within " + seconds_text(wait.timeout_s) + ": rank " +
             std::to_string(rank_) + " waited in " + describe(*wait.call));
  std::size_t culprit = peer;
  for (std::size_t step = 0; step < peers_.size(); ++step) {
    const std::optional<std::size_t> next = awaited_by(culprit);
    if (!next || *next == index_) break;
    culprit = *next;
  }
  std::string what = "rank " + std::to_string(culprit) + " did not answer within " +
                     seconds_text(wait.timeout_s) + ": rank " + std::to_string(rank_) +
                     " waited in " + describe(*wait.call);
  if (culprit != peer)
    what += " for rank " + std::to_string(peer) + ", which waited for rank " +
            std::to_string(culprit);
  fail(GroupFailure::deadline, static_cast<int>(culprit), what + "; " + state_of(culprit));
}

bool HostGroup::gone(std::size_t peer) const {
  if (peer == any_peer) {
    for (std::size_t other = 0; other < peers_.size(); ++other)
      if (other != index_ && !gone(other)) return false;
    return true;
  }
  if (peers_[peer].segment->header().closed.load() != 0) return true;
  const int descriptor = peers_[peer].process_descriptor;
  if (descriptor < 0) return false;  // an old kernel: the deadline decides
  pollfd process{descriptor, POLLIN, 0};
  return poll(&process, 1, 0) > 0;
}

std::string HostGroup::state_of(std::size_t peer) const {
  const SegmentHeader& header = peers_[peer].segment->header();
  std::string text = "rank " + std::to_string(peer);
  if (header.closed.load() != 0) text += " left the group;";
  std::uint64_t latest = 0;
  for (const SharedCall& call : header.calls) latest = std::max(latest, call.sequence.load());
  if (latest == 0) return text + " has called no collective";
  const SharedCall& call = header.calls[latest % call_count];
  return text + (call.running.load() != 0 ? " is in " : " has finished ") + describe(call);
}

// Failing

void HostGroup::check_failures() {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    const SegmentHeader& header = peers_[peer].segment->header();
    const std::uint32_t kind = header.failure_kind.load(std::memory_order_acquire);
    if (kind == 0) continue;
    fail(static_cast<GroupFailure>(kind), header.failure_rank.load(),
         read_text(header.failure_text, sizeof header.failure_text));
  }
}

void HostGroup::check_usable() {
  if (forked())
    throw GroupError(GroupFailure::usage, rank_, "the group belongs to the parent of this process");
  if (own().closed.load(std::memory_order_relaxed) != 0)
    throw GroupError(GroupFailure::usage, rank_, "the group is closed");
  if (usable_.load(std::memory_order_relaxed)) return;
  const std::lock_guard lock(failure_mutex_);
  throw GroupError(failure_kind_, failure_rank_, "the group is unusable since: " + failure_);
}

void HostGroup::fail(GroupFailure kind, int culprit, const std::string& what) {
  publish_failure(kind, culprit, what);
  throw GroupError(kind, culprit, what);
}

void HostGroup::publish_failure(GroupFailure kind, int culprit, const std::string& what) noexcept {
  const std::lock_guard lock(failure_mutex_);
  if (!usable_.exchange(false)) return;
  failure_ = what;
  failure_kind_ = kind;
  failure_rank_ = culprit;
  SegmentHeader& header = own();
  const std::size_t length = std::min(what.size(), sizeof header.failure_text - 1);
  for (std::size_t i = 0; i < length; ++i)
    header.failure_text[i].store(what[i], std::memory_order_relaxed);
  header.failure_rank.store(culprit, std::memory_order_relaxed);
  header.failure_kind.store(static_cast<std::uint32_t>(kind), std::memory_order_release);
  wake_all();
}

// A rank that sleeps on any counter of any rank looks at the failures when it wakes.
void HostGroup::wake_all() noexcept {
  for (const Peer& peer : peers_) {
    futex_wake(peer.progress->staged);
    futex_wake(peer.progress->reduced);
    futex_wake(peer.progress->finished);
    futex_wake(peer.segment->header().arrivals);
  }
}

void HostGroup::abort(const std::string& reason) noexcept {
  if (forked()) return;
  publish_failure(GroupFailure::aborted, rank_,
                  "rank " + std::to_string(rank_) + " aborted the group: " + reason);
}

bool HostGroup::forked() const noexcept { return fork_generation() != fork_generation_; }

void HostGroup::close() noexcept {
  if (forked()) return;  // the segment is the parent's, which goes on
  if (own().closed.exchange(1) != 0) return;
  wake_all();
  {
    const std::lock_guard lock(messages_mutex_);
    stopping_ = true;
  }
  if (!progress_thread_) return;
  wake_ups_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(wake_ups_);
  signal(index_);
  progress_thread_->join();
  progress_thread_.reset();
}

// Chunks

void HostGroup::publish(std::atomic<std::uint32_t>& word, std::uint32_t value) noexcept {
  advance(word, value, own().progress.waiters);
}

// Store, then look for sleepers; a sleeper announces itself, then looks at the word.
void HostGroup::advance(std::atomic<std::uint32_t>& word, std::uint32_t value,
                        std::atomic<std::uint32_t>& waiters) noexcept {
  word.store(value, std::memory_order_seq_cst);
  if (waiters.load(std::memory_order_seq_cst) != 0) futex_wake(word);
}

// Takes the next place in the rings; returns when this rank may write there. `bytes` is equal on all
// ranks.
HostGroup::Chunk HostGroup::next_chunk(std::size_t bytes) {
  const std::size_t room = (bytes + cache_line_bytes - 1) / cache_line_bytes * cache_line_bytes;
  if (ring_offset_ + room > peers_[index_].segment->ring().size()) ring_offset_ = 0;
  const Chunk chunk{chunk_count_++, ring_offset_};
  ring_offset_ += room;
  await_window(chunk.number);
  return chunk;
}

void HostGroup::await_window(std::uint32_t chunk) {
  const std::uint32_t needed = chunk + 1 - window_chunks;
  if (reached(all_finished_, needed)) return;
  std::uint32_t least = chunk;
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peer == index_) continue;
    Progress& progress = *peers_[peer].progress;
    await(progress.finished, needed, peer, progress.waiters, wait_);
    const std::uint32_t finished = progress.finished.load(std::memory_order_acquire);
    if (reached(least, finished)) least = finished;
  }
  all_finished_ = least;
}

void HostGroup::publish_staged(const Chunk& chunk) noexcept {
  publish(own().progress.staged, chunk.number + 1);
}

void HostGroup::finish(const Chunk& chunk) {
  publish(own().progress.finished, chunk.number + 1);
}

void HostGroup::await_staged(std::size_t peer, const Chunk& chunk) {
  Progress& progress = *peers_[peer].progress;
  await(progress.staged, chunk.number + 1, peer, progress.waiters, wait_);
  if (peers_[peer].compared != sequence_) compare_call(peer);
}

void HostGroup::await_reduced(std::size_t peer, const Chunk& chunk) {
  Progress& progress = *peers_[peer].progress;
  await(progress.reduced, chunk.number + 1, peer, progress.waiters, wait_);
}

void HostGroup::await_all_staged(const Chunk& chunk) {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer)
    if (peer != index_) await_staged(peer, chunk);
}

// Compares this call, and those before it in which this rank did not wait for the peer, as the root
// of a broadcast does not: two ranks that each take themselves for the root are found here. A peer
// is ahead by less than compared_back calls, so that it has not overwritten what is read.
void HostGroup::compare_call(std::size_t peer) {
  const std::uint64_t first =
      std::max(peers_[peer].compared + 1,
               sequence_ > compared_back ? sequence_ - compared_back : std::uint64_t{1});
  peers_[peer].compared = sequence_;
  const SegmentHeader& header = peers_[peer].segment->header();
  for (std::uint64_t sequence = first; sequence <= sequence_; ++sequence) {
    const std::size_t slot = sequence % fingerprint_count;
    if (header.progress.fingerprints[slot].load(std::memory_order_relaxed) ==
        own().progress.fingerprints[slot].load(std::memory_order_relaxed))
      continue;
    fail(GroupFailure::mismatch, static_cast<int>(peer),
         "the ranks called different collectives: rank " + std::to_string(rank_) + " called " +
             describe(own().calls[sequence % call_count]) + ", rank " + std::to_string(peer) +
             " called " + describe(header.calls[sequence % call_count]));
  }
}

// A chunk without data: no rank leaves before all have come.
void HostGroup::synchronise() {
  const Chunk chunk = next_chunk(0);
  publish_staged(chunk);
  await_all_staged(chunk);
}

std::uint64_t HostGroup::announce(std::uint64_t value) {
  const std::uint64_t number = announcements_++;
  own().progress.announced[number & 1].store(value, std::memory_order_relaxed);
  synchronise();
  return number;
}

std::uint64_t HostGroup::announced(std::size_t peer, std::uint64_t number) const {
  return peers_[peer].progress->announced[number & 1].load(std::memory_order_relaxed);
}

void HostGroup::need_root(int root) const {
  if (root < 0 || root >= ranks())
    throw GroupError(GroupFailure::usage, root,
                     "root " + std::to_string(root) + " is not a rank of the group: it has " +
                         std::to_string(ranks()));
}

ReductionKernel HostGroup::kernel(DType dtype, ReduceOp op) const {
  if (const ReductionKernel found = reduction_kernel(dtype, op)) return found;
  throw GroupError(GroupFailure::usage, -1,
                   "there is no " + std::string(name_of(op)) + " of " +
                       std::string(name_of(dtype)) + " values");
}

}  // namespace paceline
