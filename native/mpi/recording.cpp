#include "recording.hpp"

#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>
#include <tuple>
#include <utility>

#include "next.hpp"
#include "paceline/io_events.hpp"

namespace paceline::mpi {
namespace {

constexpr const char* folder_variable = "_PACELINE_MPI";  // launch/mpi.py
// Room for 0.2 s of the fastest messages; the pages of a buffer come when they are first written.
constexpr std::uint32_t buffer_events = 1U << 18;
// From this time without a call on, a call may well wait for long: a microsecond does not count.
constexpr std::uint64_t long_pause_ns = 1'000'000;
// From this length on a pause, or a call, is worth the microsecond that looking at the thread's times takes.
constexpr std::uint64_t timed_ns = 50'000;

constexpr std::array<const char*, static_cast<std::size_t>(Operation::count)> operation_words = {
    "all_reduce",       "all_gather",          "reduce_scatter",      "all_to_all",
    "barrier",          "broadcast",           "reduce",              "gather",
    "scatter",          "scan",                "neighbor_all_gather", "neighbor_all_to_all",
    "make_communicator", "make_window",        "fence",               "open_fence",
    "open_file",
};

struct State {
  std::unique_ptr<Recorder> recorder;
  std::int32_t rank = 0;
  std::array<std::uint16_t, operation_words.size()> operations{};
  std::uint16_t send = 0;
  std::uint16_t recv = 0;
  std::uint16_t wait_all = 0;
  std::uint16_t put = 0;
  std::uint16_t get = 0;
  std::uint16_t accumulate = 0;
  std::uint16_t accesses = 0;
  std::uint16_t step = 0;
  std::uint16_t run = 0;
  std::uint16_t program_running = 0;
  std::uint16_t program_not_running = 0;
  Group world_group{};

  // Of the main thread alone, which may spin within MPI: its times outside of it.
  ThreadTimes since;   // when it was last known to be outside
  ThreadTimes program;  // not recorded yet

  std::mutex mutex;  // guards what follows; held for less than a microsecond but where one is made
  std::unordered_map<std::uintptr_t, CommunicatorPointer> communicators;
  std::uintptr_t last_key = 0;
  CommunicatorPointer last;
  std::map<std::tuple<std::string, int, std::vector<std::int32_t>>, std::uint32_t> made_by_members;
  // A library may give one handle to several messages that were complete when they were issued.
  std::unordered_multimap<std::uintptr_t, Issued> pending;
  std::unordered_map<std::uintptr_t, Envelope> templates;
  std::unordered_map<std::uintptr_t, Envelope> matched;  // messages that a probe has matched
  std::unordered_map<std::uintptr_t, CommunicatorPointer> windows;
};

State* state = nullptr;             // from `start` on; never destroyed: threads outlive the end
std::atomic<bool> recording = false;
thread_local int depth __attribute__((tls_model("initial-exec"))) = 0;
thread_local bool is_main __attribute__((tls_model("initial-exec"))) = false;
// When the main thread's last call ended.
thread_local std::uint64_t last_end_ns __attribute__((tls_model("initial-exec"))) = 0;

Next<int(Comm, int*)> comm_rank("PMPI_Comm_rank");
Next<int(Comm, int*)> comm_size("PMPI_Comm_size");
Next<int(Comm, Group*)> comm_group("PMPI_Comm_group");
Next<int(Comm, Group*)> comm_remote_group("PMPI_Comm_remote_group");
Next<int(Comm, int*)> comm_test_inter("PMPI_Comm_test_inter");
Next<int(Group, int*)> group_size("PMPI_Group_size");
Next<int(Group, int, const int*, Group, int*)> translate("PMPI_Group_translate_ranks");
Next<int(Group*)> group_free("PMPI_Group_free");
Next<int(Datatype, int*)> type_size("PMPI_Type_size");
Next<int(char*, int*)> library_version("PMPI_Get_library_version");

// Global ranks of a group's members, in order; those of another world are -1.
std::vector<std::int32_t> global_ranks(Group group) {
  int size = 0;
  group_size.get()(group, &size);
  std::vector<int> own(static_cast<std::size_t>(size));
  std::vector<int> global(static_cast<std::size_t>(size));
  for (int i = 0; i < size; ++i) own[static_cast<std::size_t>(i)] = i;
  if (size > 0) translate.get()(group, size, own.data(), state->world_group, global.data());
  for (int& rank : global) rank = rank == undefined ? -1 : rank;
  return {global.begin(), global.end()};
}

std::vector<std::int32_t> members_of(Comm comm, bool remote) {
  Group group{};
  (remote ? comm_remote_group : comm_group).get()(comm, &group);
  std::vector<std::int32_t> ranks = global_ranks(group);
  group_free.get()(&group);
  return ranks;
}

std::uint16_t define(const std::string& name, const std::vector<std::int32_t>& ranks) {
  std::vector<std::uint32_t> members;
  for (const std::int32_t rank : ranks) {
    if (rank >= 0) members.push_back(static_cast<std::uint32_t>(rank));
  }
  return state->recorder->define_group(name, members);
}

bool is_between_groups(Comm comm) {
  int inter = 0;
  comm_test_inter.get()(comm, &inter);
  return inter != 0;
}

// Both sides of an intercommunicator are one group of the trace.
std::vector<std::int32_t> all_members(Comm comm) {
  std::vector<std::int32_t> members = members_of(comm, false);
  if (is_between_groups(comm)) {
    const std::vector<std::int32_t> others = members_of(comm, true);
    members.insert(members.end(), others.begin(), others.end());
    std::ranges::sort(members);
  }
  return members;
}

CommunicatorPointer describe(Comm comm, std::string name) {
  auto found = std::make_shared<Communicator>();
  int size = 0;
  int rank = 0;
  comm_size.get()(comm, &size);
  comm_rank.get()(comm, &rank);
  found->size = static_cast<std::uint32_t>(size);
  found->rank = static_cast<std::uint32_t>(rank);
  found->peers = members_of(comm, is_between_groups(comm));
  found->group = define(name, all_members(comm));
  found->name = std::move(name);
  return found;
}

void add(Comm comm, CommunicatorPointer made_one) {
  const std::lock_guard lock(state->mutex);
  state->last.reset();
  state->communicators[key_of(comm)] = std::move(made_one);
}

bool is_none(Comm comm) { return key_of(comm) == key_of(no_comm()); }

// Whether the library that answers is of the binary interface that this one was built for.
bool is_expected_library() {
#if PACELINE_MPI_ABI == PACELINE_STANDARD
  return true;
#else
  std::array<char, 8192> text{};
  int length = 0;
  library_version.get()(text.data(), &length);
  const bool is_open_mpi = std::strstr(text.data(), "Open MPI") != nullptr;
  if (is_open_mpi == (PACELINE_MPI_ABI == PACELINE_OPENMPI)) return true;
  text[std::min<std::size_t>(std::strcspn(text.data(), "\n"), 60)] = '\0';
  std::fprintf(stderr,
               "paceline: this program uses %s, and was taken for one of another MPI: record it "
               "with the mpirun of its own MPI\n",
               text.data());
  return false;
#endif
}

int stacks = -1;  // the descriptor to which `write_stack` writes

void write_stack(int) {
  const int error = errno;
  std::array<void*, 64> frames{};
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  backtrace_symbols_fd(frames.data(), count, stacks);
  errno = error;
}

// Answers the launcher's signal (launch/hangs/stacks.py) with this process's stack, unless Python,
// whose stacks say more, has come first.
void offer_stack() {
  const int number = SIGRTMAX - 3;
  struct sigaction action{};
  if (sigaction(number, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  stacks = memfd_create("paceline-stacks", MFD_CLOEXEC);
  if (stacks < 0) return;
  void* frame = nullptr;
  backtrace(&frame, 1);  // loads what it needs now, not in the handler
  action.sa_handler = write_stack;
  action.sa_flags = SA_RESTART;
  sigaction(number, &action, nullptr);
}

}  // namespace

namespace {

// The main thread's program ran, or had no core, until now.
void end_pause() noexcept {
  const ThreadTimes now = state->recorder->main_times();
  state->program.running_ns += now.running_ns - state->since.running_ns;
  state->program.runnable_ns += now.runnable_ns - state->since.runnable_ns;
  state->since = now;
}

// Records what `end_pause` has found since the last time.
void count_program() {
  Recorder& recorder = *state->recorder;
  Event event{.begin_ns = monotonic_ns(), .step = recorder.step(), .kind = Kind::counter};
  event.end_ns = event.begin_ns;
  event.name = state->program_running;
  event.amount = state->program.running_ns;
  recorder.record(event);
  event.name = state->program_not_running;
  event.amount = state->program.runnable_ns;
  recorder.record(event);
  recorder.count_paging();
  state->program = {};
}

}  // namespace

Call::Call() noexcept : recorded_(++depth == 1 && recording.load(std::memory_order_relaxed)) {}

Call::~Call() {
  --depth;
  if (entered_) state->recorder->leave();
}

void Call::enter(const Event& event) {
  if (!is_main && event.kind != Kind::collective) return;  // the entry of messages is that thread's
  Event entered = event;
  entered.begin_ns = begin_ns_;
  state->recorder->enter(entered);
  entered_ = event.kind != Kind::collective;
}

bool Call::enter_pending(Request request) {
  Event event;
  {
    const std::lock_guard lock(state->mutex);
    const auto found = state->pending.find(key_of(request));
    if (found == state->pending.end()) return false;
    event = found->second.event;
  }
  if (event.kind != Kind::collective) enter(event);  // a collective was entered when it was issued
  return true;
}

bool Call::is_outermost() noexcept { return depth == 1; }

std::uint64_t Call::begin() noexcept {
  Recorder& recorder = *state->recorder;
  const std::uint64_t now = monotonic_ns();
  opened_ = is_main && now - last_end_ns > long_pause_ns;
  if (is_main && now - last_end_ns > timed_ns) end_pause();
  if (opened_) count_program();
  recorder.mark(phase_of(Kind::wait));
  begin_ns_ = opened_ ? recorder.begin(phase_of(Kind::wait)) : now;
  return begin_ns_;
}

void Call::ended(std::uint64_t end_ns) noexcept {
  last_end_ns = end_ns;
  if (is_main && end_ns - begin_ns_ > timed_ns) state->since = state->recorder->main_times();
}

void Call::end_blocking(Event event) {
  event.begin_ns = begin_ns_;
  event.end_ns = monotonic_ns();
  event.location = communication_location;
  if (is_main && !opened_) event.flags |= blocking;
  Recorder& recorder = *state->recorder;
  recorder.mark(Phase::idle);
  event.step = recorder.step();
  recorder.record(event);
  if (opened_) {
    event.kind = Kind::wait;
    event.location = main_location;
    event.amount = 0;
    recorder.record(event);
  }
  ended(event.end_ns);
}

void Call::end_waiting(std::vector<Issued>& completed) {
  Recorder& recorder = *state->recorder;
  const std::uint64_t now = monotonic_ns();
  recorder.mark(Phase::idle);
  for (Issued& issued : completed) {
    issued.event.end_ns = now;
    recorder.record(issued.event);
  }
  if (is_main && (opened_ || !completed.empty())) {
    Event wait = completed.size() == 1 ? completed.front().event : Event{.name = state->wait_all};
    wait.kind = Kind::wait;
    wait.location = main_location;
    wait.begin_ns = begin_ns_;
    wait.end_ns = now;
    wait.amount = 0;
    wait.flags = 0;
    wait.step = recorder.step();
    recorder.record(wait);
  }
  ended(now);
}

void Call::end_wait(const Event& wait) {
  Recorder& recorder = *state->recorder;
  Event event = wait;
  event.kind = Kind::wait;
  event.location = main_location;
  event.begin_ns = begin_ns_;
  event.end_ns = monotonic_ns();
  event.step = recorder.step();
  event.amount = 0;
  recorder.mark(Phase::idle);
  if (is_main) recorder.record(event);
  ended(event.end_ns);
}

void Call::end_local(Event event) {
  Recorder& recorder = *state->recorder;
  event.begin_ns = begin_ns_;
  event.end_ns = monotonic_ns();
  event.step = recorder.step();
  recorder.mark(Phase::idle);
  event.location = is_main ? main_location : communication_location;
  recorder.record(event);
  ended(event.end_ns);
}

void Call::end_issue() noexcept {
  state->recorder->mark(Phase::idle);
  last_end_ns = begin_ns_;
}

void Call::end_test(std::vector<Issued>& completed) {
  if (completed.empty()) return;
  Recorder& recorder = *state->recorder;
  const std::uint64_t now = monotonic_ns();
  for (Issued& issued : completed) {
    issued.event.end_ns = now;
    recorder.record(issued.event);
  }
}

void start() {
  const char* folder = std::getenv(folder_variable);
  if (folder == nullptr || *folder == '\0' || state != nullptr) return;
  if (!is_expected_library()) std::_Exit(3);
  int rank = 0;
  int size = 1;
  comm_rank.get()(world(), &rank);
  comm_size.get()(world(), &size);
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "/rank-%05d.trace", rank);
  auto made_state = std::make_unique<State>();
  try {
    made_state->recorder = std::make_unique<Recorder>(
        folder + std::string(name.data()),
        RecorderOptions{.rank = static_cast<std::uint32_t>(rank),
                        .world_size = static_cast<std::uint32_t>(size),
                        .buffer_events = buffer_events});
  } catch (const std::system_error& problem) {  // a full disk, or another process is this rank
    std::fprintf(stderr, "paceline: rank %d is not recorded: %s\n", rank, problem.what());
    return;
  }
  state = made_state.release();
  Recorder& recorder = *state->recorder;
  state->rank = rank;
  for (std::size_t i = 0; i < operation_words.size(); ++i) {
    state->operations[i] = recorder.intern(operation_words[i]);
  }
  state->send = recorder.intern("send");
  state->recv = recorder.intern("recv");
  state->wait_all = recorder.intern("wait_all");
  state->put = recorder.intern("put");
  state->get = recorder.intern("get");
  state->accumulate = recorder.intern("accumulate");
  state->accesses = recorder.intern("one-sided");
  state->step = recorder.intern("MPI_Pcontrol");
  state->run = recorder.intern("MPI_Finalize");
  state->program_running = recorder.intern("program_running_ns");
  state->program_not_running = recorder.intern("program_not_running_ns");
  state->since = recorder.main_times();
  comm_group.get()(world(), &state->world_group);
  add(world(), describe(world(), "MPI_COMM_WORLD"));
  add(self(), describe(self(), "MPI_COMM_SELF"));
  offer_stack();
  is_main = true;
  last_end_ns = monotonic_ns();
  recorder.start_steps(last_end_ns);
  // What MPI itself does with files is not the program's input.
  attach_io(recorder, [] { return depth == 0; });
  recorder.count_node(folder);
  recording.store(true, std::memory_order_release);
}

namespace {

void end_step_as(std::uint16_t name) {
  if (is_main) {
    end_pause();
    count_program();
  }
  state->recorder->end_step(name);
}

}  // namespace

void end_step() { end_step_as(state->step); }

void end_run() { end_step_as(state->run); }

void stop() {
  if (state == nullptr || !recording.exchange(false)) return;
  detach_io(*state->recorder);
  state->recorder->close();
}

CommunicatorPointer communicator_of(Comm comm) {
  {
    const std::lock_guard lock(state->mutex);
    const std::uintptr_t key = key_of(comm);
    if (state->last != nullptr && state->last_key == key) return state->last;
    const auto found = state->communicators.find(key);
    if (found != state->communicators.end()) {
      state->last_key = key;
      state->last = found->second;
      return found->second;
    }
  }
  // Made by a call that this library does not see: its members name it.
  CommunicatorPointer unseen = describe(comm, "MPI communicator");
  add(comm, unseen);
  return unseen;
}

void made(Comm parent, Comm child, const char* word) {
  const CommunicatorPointer from = communicator_of(parent);
  std::uint32_t number = 0;
  {
    const std::lock_guard lock(state->mutex);
    number = ++from->children;
  }
  if (is_none(child)) return;  // this rank is not in it, and has counted it
  add(child, describe(child, from->name + " " + word + " " + std::to_string(number)));
}

void made_by_members(const std::string& name, Comm child, int tag) {
  if (is_none(child)) return;
  std::uint32_t number = 0;
  std::vector<std::int32_t> members = all_members(child);
  {
    const std::lock_guard lock(state->mutex);
    number = ++state->made_by_members[{name, tag, std::move(members)}];
  }
  add(child, describe(child, name + " " + std::to_string(tag) + "." + std::to_string(number)));
}

void count_child(Comm parent) {
  const CommunicatorPointer from = communicator_of(parent);
  const std::lock_guard lock(state->mutex);
  ++from->children;
}

void forget(Comm comm) {
  const std::lock_guard lock(state->mutex);
  state->last.reset();
  state->communicators.erase(key_of(comm));
}

Event collective_event(Communicator& communicator, Operation operation, int root,
                       std::uint64_t bytes) {
  Event event;
  event.kind = Kind::collective;
  event.name = state->operations[static_cast<std::size_t>(operation)];
  event.group = communicator.group;
  event.location = communication_location;
  event.amount = bytes;
  // Of an intercommunicator, the root names itself by MPI_ROOT.
  event.peer = root == root_here ? state->rank : communicator.peer(root);
  const std::lock_guard lock(state->mutex);
  event.sequence = ++communicator.collectives;
  return event;
}

Event message_event(Communicator& communicator, std::int32_t peer, std::int32_t tag, bool sends,
                    std::uint64_t bytes) {
  Event event;
  event.kind = sends ? Kind::send : Kind::recv;
  event.name = sends ? state->send : state->recv;
  event.group = communicator.group;
  event.location = communication_location;
  event.amount = bytes;
  event.peer = peer;
  event.tag = tag;
  if (peer == any_peer || tag == any_tag) return event;  // `received` numbers it
  const std::lock_guard lock(state->mutex);
  event.sequence = communicator.next_message(peer, tag, sends);
  return event;
}

Event coming_event(Comm comm, int source, int tag) {
  const CommunicatorPointer communicator = communicator_of(comm);
  Event event;
  event.name = state->recv;
  event.group = communicator->group;
  event.peer = communicator->peer(source);
  event.tag = tag;
  const std::lock_guard lock(state->mutex);
  event.sequence = communicator->coming_message(event.peer, tag);
  return event;
}

bool received(Issued& issued, const Status* status) {
  Event& event = issued.event;
  if (event.kind != Kind::recv || is_ignored(status)) return true;
  if (was_cancelled(*status)) return false;
  event.amount = byte_count(*status);
  if (issued.wildcard == nullptr) return true;
  if (status->source == proc_null) return false;
  event.peer = issued.wildcard->peer(status->source);
  event.tag = status->tag;
  const std::lock_guard lock(state->mutex);
  event.sequence = issued.wildcard->next_message(event.peer, event.tag, false);
  return true;
}

void issue(Request request, Issued issued) {
  const std::lock_guard lock(state->mutex);
  state->pending.emplace(key_of(request), std::move(issued));
}

bool is_pending(Request request) {
  const std::lock_guard lock(state->mutex);
  return state->pending.contains(key_of(request));
}

bool take(Request request, Issued& issued) {
  const std::lock_guard lock(state->mutex);
  const auto found = state->pending.find(key_of(request));
  if (found == state->pending.end()) return false;
  issued = std::move(found->second);
  state->pending.erase(found);
  return true;
}

void keep_template(Request request, Envelope envelope) {
  const std::lock_guard lock(state->mutex);
  state->templates[key_of(request)] = std::move(envelope);
}

void start_template(Request request) {
  Envelope envelope;
  {
    const std::lock_guard lock(state->mutex);
    const auto found = state->templates.find(key_of(request));
    if (found == state->templates.end()) return;
    envelope = found->second;
  }
  Issued issued{.event = message_event(*envelope.communicator, envelope.peer, envelope.tag,
                                       envelope.sends, envelope.bytes),
                .wildcard = nullptr};
  if (envelope.peer == any_peer || envelope.tag == any_tag) issued.wildcard = envelope.communicator;
  issued.event.begin_ns = monotonic_ns();
  issued.event.step = state->recorder->step();
  issue(request, std::move(issued));
}

void drop_template(Request request) {
  const std::lock_guard lock(state->mutex);
  state->templates.erase(key_of(request));
}

void keep_probed(Comm comm, Message message, int source, int tag) {
  CommunicatorPointer communicator = communicator_of(comm);
  const std::int32_t peer = communicator->peer(source);
  const std::lock_guard lock(state->mutex);
  state->matched[key_of(message)] = {std::move(communicator), peer, tag, 0, false};
}

bool take_message(Message message, Envelope& envelope) {
  const std::lock_guard lock(state->mutex);
  const auto found = state->matched.find(key_of(message));
  if (found == state->matched.end()) return false;
  envelope = std::move(found->second);
  state->matched.erase(found);
  return true;
}

void made_window(Comm comm, Win window) {
  const CommunicatorPointer from = communicator_of(comm);
  auto opened = std::make_shared<Communicator>();
  {
    const std::lock_guard lock(state->mutex);
    opened->name = from->name + " window " + std::to_string(++from->children);
  }
  opened->peers = from->peers;
  opened->size = from->size;
  opened->group = define(opened->name, opened->peers);
  const std::lock_guard lock(state->mutex);
  state->windows[key_of(window)] = std::move(opened);
}

CommunicatorPointer window_of(Win window) {
  const std::lock_guard lock(state->mutex);
  const auto found = state->windows.find(key_of(window));
  return found == state->windows.end() ? nullptr : found->second;
}

void forget_window(Win window) {
  const std::lock_guard lock(state->mutex);
  state->windows.erase(key_of(window));
}

Event access_event(Communicator& window, Access access, int target, std::uint64_t bytes) {
  // The tag keeps a put of one side from being taken for the other side of a get.
  Event event = message_event(window, window.peer(target), static_cast<std::int32_t>(access),
                              access != Access::get, bytes);
  event.name = access == Access::put ? state->put
               : access == Access::get ? state->get
                                       : state->accumulate;
  return event;
}

Event unnamed_wait() {
  Event event;
  event.name = state->accesses;
  return event;
}

Event file_event(const char* name, bool writes, std::uint64_t bytes) {
  Event event;
  event.kind = writes ? Kind::checkpoint : Kind::input;
  event.name = state->recorder->intern(name);
  event.amount = bytes;
  return event;
}

std::uint64_t type_bytes(Datatype type) {
  int size = 0;
  return type_size.get()(type, &size) == success && size > 0 ? static_cast<std::uint64_t>(size) : 0;
}

namespace {

// A process that ends without MPI_Finalize, by exit, leaves all that it recorded.
__attribute__((destructor)) void stop_at_exit() { stop(); }

}  // namespace

}  // namespace paceline::mpi
