#include "paceline/range_requests.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "futex.hpp"

namespace paceline {
namespace {

constexpr std::uint32_t memory_magic = 0x52524350;  // "PCRR"
constexpr std::uint32_t memory_version = 2;
constexpr std::size_t page_bytes = 4096;
constexpr std::size_t node_bytes = 256;
constexpr std::uint32_t max_slots = 4096;
constexpr std::uint32_t most_shards = 1U << 28;
constexpr std::uint64_t silence_ns = 10'000'000'000;  // after which a server is not waited for
constexpr std::uint64_t look_ns = 100'000'000;        // between two looks whether it is still there
constexpr std::size_t max_in_flight = 4;              // of one fetch: the link is never idle

// A slot's state and the process that it belongs to, in the word that they wait on.
enum : std::uint32_t { slot_free, slot_claimed, slot_asked, slot_taken, slot_done, slot_given_up };
constexpr unsigned state_bits = 3;
constexpr std::uint32_t state_mask = (1U << state_bits) - 1;
constexpr std::uint32_t owned(std::uint32_t state, std::uint32_t owner) {
  return (owner << state_bits) | state;
}

std::uint64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

std::uint64_t left_ns(std::uint64_t deadline_ns) noexcept {
  const std::uint64_t now = now_ns();
  return deadline_ns > now ? deadline_ns - now : 0;
}

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

constexpr std::size_t whole_pages(std::size_t size) {
  return (size + page_bytes - 1) / page_bytes * page_bytes;
}

}  // namespace

struct RangeRequests::Header {
  std::uint32_t magic;
  std::uint32_t version;
  std::uint32_t shards;
  std::uint32_t slots;
  std::uint32_t slot_bytes;
  std::atomic<std::uint32_t> state;
  std::atomic<std::uint64_t> beat_ns;
  std::atomic<std::uint32_t> asked;  // requests so far: the server sleeps on it
  std::atomic<std::uint32_t> freed;  // slots so far: who finds none free sleeps on it
  std::atomic<std::uint64_t> counts[served_counts];
  char node[node_bytes];
};

struct alignas(64) RangeRequests::Slot {
  std::atomic<std::uint32_t> word;
  std::uint32_t shard;
  std::uint64_t offset;
  std::uint64_t length;
  std::uint32_t attempt;
  RequestOutcome outcome;
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

namespace {

struct Layout {
  std::size_t slots, rooms, end;
};

Layout layout(std::uint32_t shards, std::uint32_t slots, std::uint32_t slot_bytes) {
  const std::size_t at = whole_pages(page_bytes + shards);
  const std::size_t rooms = whole_pages(at + std::size_t{64} * slots);
  return {at, rooms, rooms + std::size_t{slots} * slot_bytes};
}

}  // namespace

RangeRequests::RangeRequests(std::byte* base, std::size_t size, int descriptor) noexcept
    : base_(base), size_(size), descriptor_(descriptor) {}

RangeRequests::~RangeRequests() {
  munmap(base_, size_);
  if (descriptor_ >= 0) close(descriptor_);
}

std::unique_ptr<RangeRequests> RangeRequests::create(std::uint32_t shards, std::uint32_t slots,
                                                     std::uint32_t slot_bytes,
                                                     const std::string& node) {
  static_assert(sizeof(Header) <= page_bytes && sizeof(Slot) == 64);
  const int memory = memfd_create("paceline-requests", MFD_CLOEXEC);
  if (memory < 0) fail("memfd_create");
  const std::size_t size = layout(shards, slots, slot_bytes).end;
  void* const base = ftruncate(memory, static_cast<off_t>(size)) == 0
                         ? mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0)
                         : MAP_FAILED;
  if (base == MAP_FAILED) {
    const int problem = errno;
    close(memory);
    errno = problem;
    fail("memory for requests");
  }
  std::unique_ptr<RangeRequests> made(
      new RangeRequests(static_cast<std::byte*>(base), size, memory));
  Header& header = made->header();
  header.version = memory_version;
  header.shards = shards;
  header.slots = slots;
  header.slot_bytes = slot_bytes;
  std::memcpy(header.node, node.data(), std::min(node.size(), node_bytes - 1));
  header.magic = memory_magic;
  return made;
}

std::unique_ptr<RangeRequests> RangeRequests::map(int descriptor) {
  struct stat status {};
  if (fstat(descriptor, &status) != 0) fail("fstat");
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size < page_bytes) throw std::invalid_argument("it is no memory of requests");
  void* const base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) fail("mmap");
  std::unique_ptr<RangeRequests> made(new RangeRequests(static_cast<std::byte*>(base), size, -1));
  const Header& header = made->header();
  const bool is_one = header.magic == memory_magic && header.version == memory_version &&
                      header.shards <= most_shards && header.slots <= max_slots &&
                      layout(header.shards, header.slots, header.slot_bytes).end == size;
  if (!is_one) throw std::invalid_argument("it is no memory of requests of this version");
  return made;
}

std::unique_ptr<RangeRequests> RangeRequests::open(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) fail("open");
  try {
    auto made = map(descriptor);
    close(descriptor);
    return made;
  } catch (...) {
    close(descriptor);
    throw;
  }
}

RangeRequests::Header& RangeRequests::header() const noexcept {
  return *reinterpret_cast<Header*>(base_);
}

std::atomic<std::uint8_t>& RangeRequests::held(std::uint32_t shard) const noexcept {
  return reinterpret_cast<std::atomic<std::uint8_t>*>(base_ + page_bytes)[shard];
}

RangeRequests::Slot& RangeRequests::slot(std::uint32_t number) const noexcept {
  const Header& it = header();
  return reinterpret_cast<Slot*>(base_ + layout(it.shards, it.slots, it.slot_bytes).slots)[number];
}

std::span<std::byte> RangeRequests::room(std::uint32_t slot) const noexcept {
  const Header& it = header();
  std::byte* const rooms = base_ + layout(it.shards, it.slots, it.slot_bytes).rooms;
  return {rooms + std::size_t{slot} * it.slot_bytes, it.slot_bytes};
}

std::uint32_t RangeRequests::shard_count() const noexcept { return header().shards; }

std::string RangeRequests::node() const {
  const char* const name = header().node;
  return {name, strnlen(name, node_bytes)};
}

void RangeRequests::count(ServedCount what, std::uint64_t amount) noexcept {
  header().counts[static_cast<std::size_t>(what)].fetch_add(amount, std::memory_order_relaxed);
}

void RangeRequests::raise(ServedCount what, std::uint64_t least) noexcept {
  auto& count = header().counts[static_cast<std::size_t>(what)];
  std::uint64_t now = count.load(std::memory_order_relaxed);
  while (now < least && !count.compare_exchange_weak(now, least, std::memory_order_relaxed)) continue;
}

std::uint64_t RangeRequests::counted(ServedCount what) const noexcept {
  return header().counts[static_cast<std::size_t>(what)].load(std::memory_order_relaxed);
}

std::uint32_t RangeRequests::queue_length() const noexcept {
  std::uint32_t length = 0;
  for (std::uint32_t i = 0; i < header().slots; ++i) {
    const std::uint32_t state = slot(i).word.load(std::memory_order_relaxed) & state_mask;
    if (state == slot_asked || state == slot_taken) ++length;
  }
  return length;
}

bool RangeRequests::is_held(std::uint32_t shard) const noexcept {
  return shard < header().shards && held(shard).load(std::memory_order_acquire) != 0;
}

bool RangeRequests::has_ended() const noexcept {
  return header().state.load(std::memory_order_acquire) ==
         static_cast<std::uint32_t>(ServerState::ended);
}

bool RangeRequests::is_serving() const noexcept {
  const auto state = static_cast<ServerState>(header().state.load(std::memory_order_acquire));
  const std::uint64_t heard_ns = header().beat_ns.load(std::memory_order_relaxed);
  return state == ServerState::serving && now_ns() < heard_ns + silence_ns;
}

bool RangeRequests::await_serving(std::uint64_t wait_ns) const {
  const std::uint64_t deadline_ns = now_ns() + wait_ns;
  for (;;) {
    const std::uint32_t state = header().state.load(std::memory_order_acquire);
    if (state != static_cast<std::uint32_t>(ServerState::starting)) return is_serving();
    const std::uint64_t left = left_ns(deadline_ns);
    if (left == 0) return false;
    futex_wait(header().state, state, std::min(left, look_ns));
  }
}

std::optional<std::uint32_t> RangeRequests::claim(std::uint64_t deadline_ns) const {
  const auto owner = static_cast<std::uint32_t>(getpid());
  const std::uint32_t slots = header().slots;
  for (;;) {
    const std::uint32_t freed = header().freed.load(std::memory_order_acquire);
    for (std::uint32_t i = 0; i < slots; ++i) {
      const std::uint32_t number = (owner + i) % slots;
      std::uint32_t expected = slot_free;
      if (slot(number).word.compare_exchange_strong(expected, owned(slot_claimed, owner),
                                                    std::memory_order_acquire)) {
        return number;
      }
    }
    const std::uint64_t left = left_ns(deadline_ns);
    if (left == 0 || !is_serving()) return std::nullopt;
    futex_wait(header().freed, freed, std::min(left, look_ns));
  }
}

std::uint32_t RangeRequests::ask(std::uint32_t number, std::uint32_t shard, std::uint64_t offset,
                                 std::uint64_t length, std::uint32_t attempt) const noexcept {
  Slot& it = slot(number);
  const std::uint32_t owner = it.word.load(std::memory_order_relaxed) >> state_bits;
  it.shard = shard;
  it.offset = offset;
  it.length = length;
  it.attempt = attempt;
  it.word.store(owned(slot_asked, owner), std::memory_order_release);
  header().asked.fetch_add(1, std::memory_order_release);
  futex_wake(header().asked, 1);
  auto& peak = header().counts[static_cast<std::size_t>(ServedCount::peak_queue)];
  const std::uint64_t queued = queue_length();  // a race loses a peak, no more
  if (queued > peak.load(std::memory_order_relaxed)) peak.store(queued, std::memory_order_relaxed);
  return owner;
}

// The slot is given up if its outcome is `lost` or `late`, else it is still the caller's.
RequestOutcome RangeRequests::await(std::uint32_t number, std::uint32_t owner,
                                    std::uint64_t deadline_ns) const noexcept {
  Slot& it = slot(number);
  for (;;) {
    std::uint32_t word = it.word.load(std::memory_order_acquire);
    if (word == owned(slot_done, owner)) return it.outcome;
    const std::uint64_t left = left_ns(deadline_ns);
    const bool is_there = is_serving();
    if (left > 0 && is_there) {
      futex_wait(it.word, word, std::min(left, look_ns));
      continue;
    }
    // Nobody has taken it, then it is free again; else the server frees it, if it ever goes on.
    const bool is_taken = word == owned(slot_taken, owner);
    const std::uint32_t next = is_taken ? owned(slot_given_up, owner) : slot_free;
    if (it.word.compare_exchange_strong(word, next, std::memory_order_acq_rel)) {
      return is_there ? RequestOutcome::late : RequestOutcome::lost;
    }
  }
}

void RangeRequests::free_slot(std::uint32_t number) const noexcept {
  slot(number).word.store(slot_free, std::memory_order_release);
  header().freed.fetch_add(1, std::memory_order_release);
  futex_wake(header().freed, 1);
}

RequestOutcome RangeRequests::fetch(std::uint32_t shard, std::uint64_t offset,
                                    std::span<std::byte> target, std::uint32_t attempt,
                                    std::uint64_t wait_ns) {
  struct Piece {
    std::uint32_t slot, owner;
    std::span<std::byte> target;
  };
  Piece pieces[max_in_flight];
  std::size_t first = 0, count = 0;
  RequestOutcome outcome = RequestOutcome::good;
  std::uint64_t deadline_ns = now_ns() + wait_ns;
  while ((outcome == RequestOutcome::good && !target.empty()) || count > 0) {
    const bool asks = outcome == RequestOutcome::good && !target.empty() && count < max_in_flight;
    if (asks) {
      // Others wait as well: beside the first slot, only what is free at this moment is taken.
      const auto number = claim(count == 0 ? deadline_ns : 0);
      if (number) {
        const std::size_t length = std::min<std::size_t>(target.size(), header().slot_bytes);
        const std::uint32_t owner = ask(*number, shard, offset, length, attempt);
        pieces[(first + count++) % max_in_flight] = {*number, owner, target.first(length)};
        target = target.subspan(length);
        offset += length;
        continue;
      }
      if (count == 0) return is_serving() ? RequestOutcome::late : RequestOutcome::lost;
    }
    const Piece piece = pieces[first];
    first = (first + 1) % max_in_flight;
    --count;
    const RequestOutcome found = await(piece.slot, piece.owner, deadline_ns);
    if (found == RequestOutcome::good) {
      std::memcpy(piece.target.data(), room(piece.slot).data(), piece.target.size());
      deadline_ns = now_ns() + wait_ns;  // of each piece: a large file may take its time
    } else if (outcome == RequestOutcome::good) {
      outcome = found;
    }
    if (found != RequestOutcome::lost && found != RequestOutcome::late) free_slot(piece.slot);
  }
  return outcome;
}

void RangeRequests::set_state(ServerState state) noexcept {
  beat();
  header().state.store(static_cast<std::uint32_t>(state), std::memory_order_release);
  futex_wake(header().state);
  if (state != ServerState::ended) return;
  for (std::uint32_t i = 0; i < header().slots; ++i) futex_wake(slot(i).word);
  futex_wake(header().freed);
  wake_server();
}

void RangeRequests::set_held(std::uint32_t shard, bool is_held) noexcept {
  held(shard).store(is_held ? 1 : 0, std::memory_order_release);
}

void RangeRequests::beat() noexcept {
  header().beat_ns.store(now_ns(), std::memory_order_relaxed);
}

std::optional<RangeRequests::Request> RangeRequests::take(std::uint64_t wait_ns) {
  const std::uint64_t deadline_ns = now_ns() + wait_ns;
  for (;;) {
    const std::uint32_t asked = header().asked.load(std::memory_order_acquire);
    for (std::uint32_t i = 0; i < header().slots; ++i) {
      Slot& it = slot(i);
      std::uint32_t word = it.word.load(std::memory_order_relaxed);
      if ((word & state_mask) != slot_asked) continue;
      const std::uint32_t taken = owned(slot_taken, word >> state_bits);
      if (!it.word.compare_exchange_strong(word, taken, std::memory_order_acq_rel)) continue;
      const Request request{i, it.shard, it.offset, it.length, it.attempt};
      // Programs write here what they like: nothing beyond the room is written for it.
      if (request.shard < header().shards && request.length <= header().slot_bytes) return request;
      finish(i, RequestOutcome::nobody);
    }
    const std::uint64_t left = left_ns(deadline_ns);
    if (left == 0 || has_ended()) return std::nullopt;
    futex_wait(header().asked, asked, left);
  }
}

void RangeRequests::finish(std::uint32_t number, RequestOutcome outcome) noexcept {
  Slot& it = slot(number);
  it.outcome = outcome;
  std::uint32_t word = it.word.load(std::memory_order_relaxed);
  const std::uint32_t owner = word >> state_bits;
  if (word == owned(slot_taken, owner) &&
      it.word.compare_exchange_strong(word, owned(slot_done, owner), std::memory_order_acq_rel)) {
    futex_wake(it.word);
    return;
  }
  free_slot(number);  // the program does not wait any longer
}

void RangeRequests::wake_server() noexcept {
  header().asked.fetch_add(1, std::memory_order_release);
  futex_wake(header().asked);
}

void RangeRequests::recover() noexcept {
  for (std::uint32_t i = 0; i < header().slots; ++i) {
    std::uint32_t word = slot(i).word.load(std::memory_order_acquire);
    const std::uint32_t state = word & state_mask;
    if (state == slot_taken) {
      const std::uint32_t asked = owned(slot_asked, word >> state_bits);
      if (slot(i).word.compare_exchange_strong(word, asked, std::memory_order_acq_rel)) continue;
    }
    if ((word & state_mask) == slot_given_up) free_slot(i);
  }
  wake_server();
}

unsigned RangeRequests::reap() noexcept {
  unsigned freed = 0;
  for (std::uint32_t i = 0; i < header().slots; ++i) {
    std::uint32_t word = slot(i).word.load(std::memory_order_acquire);
    const std::uint32_t state = word & state_mask;
    // What is taken is written to at the moment: it is freed later, when it is done.
    if (state == slot_free || state == slot_taken || state == slot_given_up) continue;
    const auto owner = static_cast<pid_t>(word >> state_bits);
    if (kill(owner, 0) == 0 || errno != ESRCH) continue;
    if (!slot(i).word.compare_exchange_strong(word, slot_free, std::memory_order_acq_rel)) continue;
    header().freed.fetch_add(1, std::memory_order_release);
    futex_wake(header().freed, 1);
    ++freed;
  }
  return freed;
}

}  // namespace paceline
