// What the collector knows of an MPI process: its recorder, communicators, pending requests and
// windows. All functions may be called by any thread; calls that wait are recorded as waits where
// the thread that initialised MPI makes them.
//
// A communicator is known to all its ranks by one name: its parent's name and which of the parent's
// children it is, counted alike on all ranks, since making one is collective. Communicators of one
// split share that name and differ in their members.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "abi.hpp"
#include "paceline/recorder.hpp"

namespace paceline::mpi {

// Collectives, by the names that all frameworks' events have (src/paceline/trace/format/events.py).
enum class Operation : std::uint8_t {
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all,
  barrier,
  broadcast,
  reduce,
  gather,
  scatter,
  scan,
  neighbor_all_gather,
  neighbor_all_to_all,
  make_communicator,
  make_window,
  fence,
  open_fence,
  open_file,
  count
};

struct Communicator {
  std::string name;
  std::uint16_t group = 0;           // number in the trace
  std::vector<std::int32_t> peers;   // global ranks that calls name by their index; -1: not known
  std::uint32_t size = 0;            // of the local group
  std::uint32_t rank = 0;            // in it
  std::uint32_t collectives = 0;     // so far
  std::uint32_t children = 0;        // communicators, windows and files made of it
  std::unordered_map<std::uint64_t, std::uint32_t> messages;  // so far, by peer, tag and direction

  std::int32_t peer(int index) const noexcept {
    const bool known = index >= 0 && static_cast<std::size_t>(index) < peers.size();
    return known ? peers[static_cast<std::size_t>(index)] : -1;
  }
  // The number of the next message of a direction, from 1.
  std::uint32_t next_message(std::int32_t peer, std::int32_t tag, bool sends) {
    return ++messages[message_key(peer, tag, sends)];
  }
  std::uint32_t coming_message(std::int32_t peer, std::int32_t tag) const {
    const auto found = messages.find(message_key(peer, tag, false));
    return found == messages.end() ? 1 : found->second + 1;
  }

 private:
  static std::uint64_t message_key(std::int32_t peer, std::int32_t tag, bool sends) noexcept {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(peer)) << 32 |
           static_cast<std::uint64_t>(static_cast<std::uint32_t>(tag)) << 1 | (sends ? 1U : 0U);
  }
};

using CommunicatorPointer = std::shared_ptr<Communicator>;

// A collective or message that was issued and may complete later.
struct Issued {
  Event event;                   // without its end
  CommunicatorPointer wildcard;  // of a receive whose source or tag the status will tell
};

// A message that was matched by a probe, or that a persistent request sends again and again.
struct Envelope {
  CommunicatorPointer communicator;
  std::int32_t peer = -1;  // global; -2: any
  std::int32_t tag = 0;
  std::uint64_t bytes = 0;
  bool sends = false;
};

constexpr std::int32_t any_peer = -2;

// One call of the program: the outermost of a thread is recorded, not those that it calls in turn
// (a tool's PMPI call, a Fortran binding, a library that builds one call on others).
class Call {
 public:
  Call() noexcept;
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bool recorded() const noexcept { return recorded_; }
  static bool is_outermost() noexcept;
  // The time now, where the call begins to do its work. After a longer time without a call it also
  // notes the time that the thread had been without a core: a wait then tells how much of it that
  // was.
  std::uint64_t begin() noexcept;
  std::uint64_t begin_ns() const noexcept { return begin_ns_; }
  // Publishes what the call is about to wait for, until it ends.
  void enter(const Event& event);
  // The same of a request, if it is of a message or collective that is pending; whether it is.
  bool enter_pending(Request request);
  // Records what this call itself completed, and that it waited for that.
  void end_blocking(Event event);
  // As `end_blocking`, of a receive that `status` describes.
  void end_receive(Issued& issued, const Status* status, int result);
  // Records what the call completed, and one wait for all of it.
  void end_waiting(std::vector<Issued>& completed);
  // Records a wait without a message or collective of its own.
  void end_wait(const Event& wait);
  // Records an event on the thread's own location: input and output.
  void end_local(Event event);
  // The call issued what will complete later.
  void end_issue() noexcept;
  // Records what a test found complete: it waited for nothing.
  static void end_test(std::vector<Issued>& completed);

 private:
  void ended(std::uint64_t end_ns) noexcept;

  bool recorded_ = false;
  bool opened_ = false;
  bool entered_ = false;  // a message: a collective is left when it is recorded
  std::uint64_t begin_ns_ = 0;
};

// The recording of this process, from MPI_Init to MPI_Finalize.

void start();                      // after MPI_Init
void end_step();                   // MPI_Pcontrol(1)
void end_run();                    // before MPI_Finalize: the last step ends
void stop();                       // after it, before an abort, and at the end of the process

CommunicatorPointer communicator_of(Comm comm);
// Names a communicator that its parent has made; `word` says how.
void made(Comm parent, Comm child, const char* word);
// As `made`, of a call in which only the members of `child` take part: they count.
void made_by_members(const std::string& name, Comm child, int tag);
// A child that is not known yet.
void count_child(Comm parent);
void forget(Comm comm);

Event collective_event(Communicator& communicator, Operation operation, int root,
                       std::uint64_t bytes);
Event message_event(Communicator& communicator, std::int32_t peer, std::int32_t tag, bool sends,
                    std::uint64_t bytes);
// Fills in what a status tells of a receive; false if it was cancelled.
bool received(Issued& issued, const Status* status);

// A wait for the message that the next receive from there will take.
Event coming_event(Comm comm, int source, int tag);
void keep_probed(Comm comm, Message message, int source, int tag);

void issue(Request request, Issued issued);
bool is_pending(Request request);
// Takes what is pending; false if nothing is.
bool take(Request request, Issued& issued);
void keep_template(Request request, Envelope envelope);
void start_template(Request request);
void drop_template(Request request);
bool take_message(Message message, Envelope& envelope);

enum class Access : std::uint8_t { put = 1, get = 2, accumulate = 3 };
void made_window(Comm comm, Win window);
CommunicatorPointer window_of(Win window);
void forget_window(Win window);
Event access_event(Communicator& window, Access access, int target, std::uint64_t bytes);

// Of a wait that is for no message or collective of which the trace knows.
Event unnamed_wait();
Event file_event(const char* name, bool writes, std::uint64_t bytes);

std::uint64_t type_bytes(Datatype type);

template <class Number>
std::uint64_t bytes_of(Number count, Datatype type) {
  return count > 0 ? static_cast<std::uint64_t>(count) * type_bytes(type) : 0;
}
template <class Number>
std::uint64_t bytes_of(const Number* counts, std::size_t size, Datatype type) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < size; ++i) {
    if (counts[i] > 0) sum += static_cast<std::uint64_t>(counts[i]);
  }
  return sum == 0 ? 0 : sum * type_bytes(type);
}
template <class Number>
std::uint64_t bytes_of(const Number* counts, std::size_t size, const Datatype* types) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < size; ++i) sum += bytes_of(counts[i], types[i]);
  return sum;
}

}  // namespace paceline::mpi
