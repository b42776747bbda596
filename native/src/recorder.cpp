#include "paceline/recorder.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <system_error>
#include <utility>

#include "paceline/crc32c.hpp"
#include "paceline/event_codec.hpp"
#include "paceline/fork.hpp"

namespace paceline {
namespace {

constexpr std::size_t page_bytes = 4096;
constexpr std::uint64_t block_bytes = 512;  // of getrusage
constexpr std::uint64_t node_interval_first_ns = 200'000'000;
constexpr std::uint64_t node_interval_ns = 1'000'000'000;
constexpr std::size_t table_limit = 65'536;  // an event refers to a table's entry by 16 bits

std::uint64_t clock_ns(clockid_t clock) noexcept {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(now.tv_nsec);
}

void sleep_until(std::uint64_t due_ns) noexcept {
  timespec due{};
  due.tv_sec = static_cast<time_t>(due_ns / 1'000'000'000U);
  due.tv_nsec = static_cast<long>(due_ns % 1'000'000'000U);
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, nullptr);
}

std::uint64_t peak_memory_bytes() {
  // VmHWM, not ru_maxrss: the latter survives exec and would show the launcher's peak.
  FILE* status = std::fopen("/proc/self/status", "re");
  if (status == nullptr) return 0;
  char line[256];
  std::uint64_t kilobytes = 0;
  while (std::fgets(line, sizeof line, status) != nullptr) {
    if (std::strncmp(line, "VmHWM:", 6) == 0) {
      kilobytes = std::strtoull(line + 6, nullptr, 10);
      break;
    }
  }
  std::fclose(status);
  return kilobytes * 1024;
}

void read_boot_id(char (&boot_id)[40]) {
  FILE* file = std::fopen("/proc/sys/kernel/random/boot_id", "re");
  if (file == nullptr) return;
  if (std::fgets(boot_id, sizeof boot_id, file) != nullptr) boot_id[std::strcspn(boot_id, "\n")] = 0;
  std::fclose(file);
}

template <class T>
void put(std::string& payload, T value) {
  payload.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::uint32_t fixed_checksum(const TraceHeader& header) {
  const auto* bytes = reinterpret_cast<const char*>(&header);
  constexpr std::size_t own = offsetof(TraceHeader, fixed_checksum);
  constexpr std::size_t after = own + sizeof header.fixed_checksum;
  return crc32c(bytes + after, offsetof(TraceHeader, step) - after, crc32c(bytes, own));
}

std::uint32_t live_checksum(const TraceHeader& header) {
  constexpr std::size_t begin = offsetof(TraceHeader, step);
  return crc32c(reinterpret_cast<const char*>(&header) + begin,
                offsetof(TraceHeader, live_checksum) - begin);
}

// Changes an entry that another process reads meanwhile: it takes none whose version is odd.
template <class Change>
void publish(GroupProgress& entry, Change&& change) {
  const std::uint32_t version = entry.version.load(std::memory_order_relaxed);
  entry.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  change();
  entry.version.store(version + 2, std::memory_order_release);
}

}  // namespace

std::uint64_t monotonic_ns() noexcept { return clock_ns(CLOCK_MONOTONIC); }

Recorder::Recorder(const std::string& path, const RecorderOptions& options)
    : options_(options), generation_(fork_generation()), shared_(std::make_unique<Shared>()) {
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC | (options.exclusive ? O_EXCL : O_TRUNC);
  descriptor_ = open(path.c_str(), flags, 0644);
  const auto fail = [&](const char* what) {
    const int error = errno;
    for (const int descriptor : {descriptor_, wake_, poll_}) {
      if (descriptor >= 0) ::close(descriptor);
    }
    throw std::system_error(error, std::generic_category(), std::string(what) + " " + path);
  };
  if (descriptor_ < 0) fail("open");
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  poll_ = epoll_create1(EPOLL_CLOEXEC);
  epoll_event woken{};
  woken.events = EPOLLIN;
  if (wake_ < 0 || poll_ < 0 || epoll_ctl(poll_, EPOLL_CTL_ADD, wake_, &woken) != 0) fail("watch");
  // Allocated, not sparse: a full disk must be an error here and not a SIGBUS at the mapping.
  const int allocated = posix_fallocate(descriptor_, 0, page_bytes);
  if (allocated != 0) {
    errno = allocated;
    fail("allocate");
  }
  void* mapped = mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (mapped == MAP_FAILED) fail("map");
  header_ = static_cast<TraceHeader*>(mapped);
  progress_ = reinterpret_cast<GroupProgress*>(static_cast<char*>(mapped) + progress_offset);
  header_->version = trace_format_version;
  header_->rank = options.rank;
  header_->world_size = options.world_size;
  header_->opened_monotonic_ns = monotonic_ns();
  header_->opened_realtime_ns = clock_ns(CLOCK_REALTIME);
  read_boot_id(header_->boot_id);
  header_->written_bytes = file_bytes_ = page_bytes;
  std::memcpy(header_->magic, "PACETRCE", sizeof header_->magic);
  header_->fixed_checksum = fixed_checksum(*header_);  // last: now it is a trace

  shared_->active.reserve(options.buffer_events);
  shared_->spare.reserve(options.buffer_events);
  intern("");  // name 0 means "none"
  step_name_ = intern("step");
  running_name_ = intern("running_ns");
  not_running_name_ = intern("not_running_ns");
  main_running_name_ = intern("main_running_ns");
  main_not_running_name_ = intern("main_not_running_ns");
  stopped_name_ = intern("stopped");
  major_faults_name_ = intern("major_faults");
  storage_bytes_name_ = intern("storage_bytes");
  define_group("", {});  // group 0 means "none"
  const auto process = static_cast<std::uint32_t>(getpid());
  main_tid_ = gettid();
  main_times_ = open_thread_times(main_tid_);
  if (pthread_getcpuclockid(pthread_self(), &main_clock_) != 0) main_clock_ = CLOCK_THREAD_CPUTIME_ID;
  define_location(LocationType::thread, "main", process, static_cast<std::uint32_t>(main_tid_));
  define_location(LocationType::communication, "communication", process, 0);
  // The writer must not take the script's signals.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  writer_started_ = pthread_create(&writer_, nullptr, write_loop_entry, this) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  // For people who look at threads, and for bench/record_overhead.py.
  if (writer_started_) pthread_setname_np(writer_, "paceline-writer");
}

Recorder::~Recorder() {
  if (!owned()) {  // a forked child shares nothing that it could release safely
    static_cast<void>(shared_.release());
    return;
  }
  close();
  munmap(header_, page_bytes);
  for (const int descriptor : {descriptor_, wake_, poll_}) ::close(descriptor);
  if (main_times_ >= 0) ::close(main_times_);
}

// A forked child inherits the buffers and the mapped header but not the writer: it must leave both
// alone.
bool Recorder::owned() const noexcept { return generation_ == fork_generation(); }

bool Recorder::recording() const noexcept {
  return owned() && !closed_.load(std::memory_order_relaxed);
}

std::uint16_t Recorder::intern(const std::string& name) {
  if (!owned()) return 0;
  const std::lock_guard lock(shared_->mutex);
  return intern_locked(name);
}

std::uint16_t Recorder::intern_locked(const std::string& name) {
  auto& names = shared_->names;
  const auto known = names.find(name);
  if (known != names.end()) return known->second;
  if (names.size() >= table_limit) return 0;
  const auto number = static_cast<std::uint16_t>(names.size());
  names.emplace(name, number);
  put(shared_->new_names.payload, static_cast<std::uint32_t>(name.size()));
  shared_->new_names.payload.append(name);
  ++shared_->new_names.count;
  wake_writer();  // the header may refer to it soon, and outlives a process that is aborted
  return number;
}

std::uint16_t Recorder::define_group(const std::string& name,
                                     const std::vector<std::uint32_t>& members) {
  if (!owned()) return 0;
  const std::lock_guard lock(shared_->mutex);
  std::string entry;
  put(entry, static_cast<std::uint32_t>(intern_locked(name)));
  put(entry, static_cast<std::uint32_t>(members.size()));
  for (const std::uint32_t member : members) put(entry, member);
  return define(shared_->groups, shared_->new_groups, entry);
}

std::uint16_t Recorder::define_location(LocationType type, const std::string& name,
                                        std::uint32_t process, std::uint32_t number) {
  if (!owned()) return main_location;
  const std::lock_guard lock(shared_->mutex);
  std::string entry;
  put(entry, static_cast<std::uint32_t>(type));
  put(entry, static_cast<std::uint32_t>(intern_locked(name)));
  put(entry, process);
  put(entry, number);
  return define(shared_->locations, shared_->new_locations, entry);
}

// The number of an entry of a table, which is added if it is new and there is room for it.
std::uint16_t Recorder::define(std::unordered_map<std::string, std::uint16_t>& table,
                               Definitions& fresh, const std::string& entry) {
  const auto known = table.find(entry);
  if (known != table.end()) return known->second;
  if (table.size() >= table_limit) return 0;
  const auto number = static_cast<std::uint16_t>(table.size());
  table.emplace(entry, number);
  fresh.payload.append(entry);
  ++fresh.count;
  wake_writer();  // who reads the header while this process runs, or is stopped, needs it
  return number;
}

void Recorder::append(const Event& event) {
  if (shared_->stopping) return;  // hooks outlive the recording: what comes then is not missing
  if (shared_->active.size() == shared_->active.capacity()) {
    header_->dropped_count.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  shared_->active.push_back(event);
  header_->recorded_count.fetch_add(1, std::memory_order_relaxed);
  if (shared_->active.size() == shared_->active.capacity() / 2) wake_writer();
}

void Recorder::mark(Phase phase) noexcept {
  if (recording()) {
    header_->phase.store(static_cast<std::uint32_t>(phase), std::memory_order_relaxed);
  }
}

std::uint64_t Recorder::begin(Phase phase) {
  const std::uint64_t now = monotonic_ns();
  if (!recording()) return now;
  header_->phase.store(static_cast<std::uint32_t>(phase), std::memory_order_relaxed);
  if (phase == phase_of(Kind::wait)) {
    open_wait(now);
  }
  if ((phase >= phase_of(Kind::input) && phase <= phase_of(Kind::optimizer) &&
       phase != phase_of(Kind::copy)) ||
      phase == phase_of(Kind::evaluation)) {
    start_steps(now);
  }
  return now;
}

void Recorder::open_wait(std::uint64_t now_ns) {
  const std::uint64_t runnable_ns = read_thread_times(main_times_).runnable_ns;
  const std::lock_guard lock(shared_->mutex);
  *std::ranges::min_element(open_waits_, {}, &OpenWait::begin_ns) = {now_ns, runnable_ns};
}

// The time without a core since the wait that began at `begin_ns` was opened, which closes it;
// `otherwise` if none was.
std::uint64_t Recorder::close_wait(std::uint64_t begin_ns, std::uint64_t otherwise) {
  OpenWait opened;
  {
    const std::lock_guard lock(shared_->mutex);
    const auto found = std::ranges::find(open_waits_, begin_ns, &OpenWait::begin_ns);
    if (begin_ns == 0 || found == open_waits_.end()) return otherwise;
    opened = std::exchange(*found, {});
  }
  return read_thread_times(main_times_).runnable_ns - opened.runnable_ns;
}

void Recorder::start_steps(std::uint64_t now_ns) {
  std::uint64_t unset = step_begin_ns_.load(std::memory_order_relaxed);
  if (unset == 0) step_begin_ns_.compare_exchange_strong(unset, now_ns, std::memory_order_relaxed);
}

std::uint64_t Recorder::end(Kind kind, std::uint16_t name, std::uint64_t begin_ns,
                            std::uint64_t amount, Phase outer, std::int32_t tag,
                            std::uint8_t flags) {
  const std::uint64_t now = monotonic_ns();
  if (!recording()) return now;
  header_->phase.store(static_cast<std::uint32_t>(outer), std::memory_order_relaxed);
  record({.begin_ns = begin_ns,
          .end_ns = now,
          .amount = amount,
          .step = step(),
          .tag = tag,
          .name = name,
          .kind = kind,
          .flags = flags});
  return now;
}

GroupProgress& Recorder::progress_of(std::uint16_t group) {
  GroupProgress* oldest = &progress_[1];
  for (std::size_t i = 1; i < progress_entries; ++i) {
    GroupProgress& entry = progress_[i];
    if (entry.group == group || entry.group == 0) return entry;
    if (entry.entered_ns < oldest->entered_ns) oldest = &entry;
  }
  publish(*oldest, [&] { oldest->entered = oldest->left = oldest->unseen = oldest->group = 0; });
  return *oldest;
}

void Recorder::enter(const Event& event) {
  if (!recording()) return;
  const std::uint64_t now = event.begin_ns != 0 ? event.begin_ns : monotonic_ns();
  const std::lock_guard lock(shared_->mutex);
  const bool is_collective = event.kind == Kind::collective;
  if (is_collective && event.group == 0) return;
  GroupProgress& entry = is_collective ? progress_of(event.group) : progress_[0];
  publish(entry, [&] {
    if (is_collective) {
      // Collectives that were not entered (their hooks failed, or were taken out) have ended.
      if (entry.left >= entry.entered) entry.left = event.sequence - 1;
      entry.entered = event.sequence;
      entry.operations[event.sequence % std::size(entry.operations)] = event.name;
      entry.amount = event.amount;
      entry.element = static_cast<std::uint16_t>(event.tag);  // a collective has no other use of it
    } else {
      entry.left = entry.entered++;
    }
    entry.group = event.group;
    entry.name = event.name;
    entry.peer = event.peer;
    entry.entered_ns = now;
  });
}

void Recorder::leave() {
  if (!recording()) return;
  const std::lock_guard lock(shared_->mutex);
  publish(progress_[0], [&] { progress_[0].left = progress_[0].entered; });
}

void Recorder::note_left(const Event& event) {
  for (std::size_t i = 1; i < progress_entries && progress_[i].group != 0; ++i) {
    GroupProgress& entry = progress_[i];
    if (entry.group != event.group) continue;
    publish(entry, [&] {
      if (entry.left < entry.entered) ++entry.left;
      if ((event.flags & completion_unknown) != 0) entry.unseen = event.sequence;
    });
    return;
  }
}

void Recorder::record(const Event& event) {
  if (!owned()) return;
  Event recorded = event;
  if (event.kind == Kind::wait && event.location == main_location) {
    recorded.amount = close_wait(event.begin_ns, event.amount);
  }
  const std::lock_guard lock(shared_->mutex);
  if (event.kind == Kind::collective && event.group != 0 && !shared_->stopping) note_left(event);
  append(recorded);
}

void Recorder::record(const Event* events, std::size_t count) {
  for (std::size_t done = 0; done < count;) {
    const std::size_t part = std::min<std::size_t>(count - done, options_.buffer_events / 4 + 1);
    for (std::size_t i = done; i < done + part; ++i) record(events[i]);
    done += part;
    flush();
  }
}

std::uint64_t Recorder::end_step(std::uint16_t name, std::int32_t tag) {
  const std::uint64_t now = monotonic_ns();
  if (!recording()) return now;
  start_steps(now);
  count_paging();
  ThreadTimes times = usage_.sample(now);
  ThreadTimes main = usage_.last_of(main_tid_);
  const std::uint64_t exact_ns = clock_ns(main_clock_);
  times.running_ns += exact_ns - main.running_ns;  // schedstat lags for the thread that runs now
  main.running_ns = exact_ns;
  const std::lock_guard lock(shared_->mutex);
  Event event{.begin_ns = step_begin_ns_.load(std::memory_order_relaxed),
              .end_ns = now,
              .step = step_.load(std::memory_order_relaxed),
              .tag = tag,
              .name = name != 0 ? name : step_name_,
              .kind = Kind::step};
  append(event);
  event.kind = Kind::counter;
  event.tag = 0;
  const auto count = [&](std::uint16_t counter, std::uint64_t amount) {
    event.name = counter;
    event.amount = amount;
    append(event);
  };
  count(running_name_, times.running_ns - before_.running_ns);
  count(not_running_name_, times.runnable_ns - before_.runnable_ns);
  count(main_running_name_, main.running_ns - main_before_.running_ns);
  count(main_not_running_name_, main.runnable_ns - main_before_.runnable_ns);
  before_ = times;
  main_before_ = main;
  step_begin_ns_.store(now, std::memory_order_relaxed);
  step_.store(event.step + 1, std::memory_order_relaxed);
  header_->step.store(event.step + 1, std::memory_order_relaxed);
  return now;
}

void Recorder::count_paging() {
  rusage usage{};
  if (!recording() || gettid() != main_tid_ || getrusage(RUSAGE_THREAD, &usage) != 0) return;
  const std::int64_t faults = usage.ru_majflt - std::exchange(major_faults_before_, usage.ru_majflt);
  const std::int64_t blocks = usage.ru_inblock - std::exchange(storage_blocks_before_, usage.ru_inblock);
  const std::uint64_t now = monotonic_ns();
  const auto count = [&](std::uint16_t name, std::int64_t amount, std::uint64_t unit) {
    if (amount <= 0) return;
    record({.begin_ns = now,
            .end_ns = now,
            .amount = static_cast<std::uint64_t>(amount) * unit,
            .step = step(),
            .name = name,
            .kind = Kind::counter});
  };
  count(major_faults_name_, faults, 1);
  count(storage_bytes_name_, blocks, block_bytes);
}

ThreadTimes Recorder::main_times() const noexcept {
  ThreadTimes times = read_thread_times(main_times_);
  times.running_ns = clock_ns(main_clock_);  // schedstat lags
  return times;
}

std::uint64_t Recorder::dropped_count() const noexcept {
  return header_->dropped_count.load(std::memory_order_relaxed);
}

void Recorder::flush() {
  if (!owned()) return;
  const std::lock_guard lock(writer_mutex_);
  write_pending();
}

void Recorder::close() {
  if (!owned()) return;
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->stopping) return;
    shared_->stopping = true;
  }
  wake_writer();
  if (writer_started_) pthread_join(writer_, nullptr);
  flush();
  closed_.store(true, std::memory_order_relaxed);
  header_->phase.store(static_cast<std::uint32_t>(Phase::idle));
  // A reader that finds the file closed checks the live part: its checksum must be there first.
  TraceHeader final{};
  std::memcpy(static_cast<void*>(&final), header_, sizeof final);
  final.closed.store(1);
  header_->live_checksum.store(live_checksum(final));
  header_->closed.store(1);
}

void* Recorder::write_loop_entry(void* self) {
  static_cast<Recorder*>(self)->write_loop();
  return nullptr;
}

void Recorder::wake_writer() noexcept {
  const std::uint64_t once = 1;
  // It can only fail when the counter is full: then the writer is being woken anyway.
  static_cast<void>(!write(wake_, &once, sizeof once));
}

void Recorder::write_loop() {
  const auto interval_ns = static_cast<std::uint64_t>(options_.flush_interval_s * 1e9);
  const auto stopping = [&] {
    const std::lock_guard lock(shared_->mutex);
    return shared_->stopping;
  };
  std::uint64_t due_ns = monotonic_ns() + interval_ns;
  while (!stopping()) {
    const std::uint64_t now = monotonic_ns();
    const std::uint64_t left_ms = now < due_ns ? (due_ns - now) / 1'000'000 + 1 : 0;
    epoll_event event{};
    const int woken = epoll_wait(poll_, &event, 1, static_cast<int>(left_ms));
    if (woken < 0 && errno == EINTR) {
      note_stop();
      if (monotonic_ns() < due_ns) continue;
    } else if (woken < 0) {  // the script closed descriptors that it did not open, as daemons do
      sleep_until(due_ns);
    }
    std::uint64_t count = 0;
    if (woken > 0) static_cast<void>(!read(wake_, &count, sizeof count));
    if (counts_node_.load(std::memory_order_acquire)) note_node();
    flush();
    due_ns = monotonic_ns() + interval_ns;
  }
}

void Recorder::count_node(const std::string& folder) {
  struct stat status {};
  if (!owned() || node_ != nullptr || stat(folder.c_str(), &status) != 0) return;
  node_ = std::make_unique<Node>();
  node_->key = "paceline-node-" + std::to_string(status.st_dev) + "-" +
               std::to_string(status.st_ino);
  std::array<char, 65> host{};
  gethostname(host.data(), host.size() - 1);
  node_->location = define_location(LocationType::process, std::string("node ") + host.data(), 0, 0);
  counts_node_.store(true, std::memory_order_release);
}

// Records what the node has done since the last time, if this process counts it and it is time.
void Recorder::note_node() {
  const std::uint64_t now = monotonic_ns();
  // A process without a phase is a parent of ranks, whose trace a rank's own will replace.
  if (step_begin_ns_.load(std::memory_order_relaxed) == 0 || now < node_->due_ns) return;
  if (!node_->claim.take(node_->key)) {
    node_->due_ns = now + node_interval_ns;
    return;
  }
  Event event{.begin_ns = node_->last_ns, .end_ns = now, .step = step(), .kind = Kind::counter};
  event.location = node_->location;
  const bool is_first = node_->last_ns == 0;
  node_->counters.read([&](const std::string& name, std::uint64_t value) {
    if (is_first) return;
    event.name = intern(name);
    event.amount = value;
    record(event);
  });
  node_->last_ns = now;
  node_->interval_ns = is_first ? node_interval_first_ns
                                : std::min(2 * node_->interval_ns, node_interval_ns);
  node_->due_ns = now + node_->interval_ns;
}

// Records, by the writer thread, that the process was stopped until now. All signals that have a
// handler are blocked in this thread, so that nothing else interrupts its wait; a debugger that
// attaches stops the process too.
void Recorder::note_stop() {
  const std::uint64_t now = monotonic_ns();
  record({.begin_ns = now,
          .end_ns = now,
          .amount = 1,
          .step = step(),
          .name = stopped_name_,
          .kind = Kind::counter});
}

void Recorder::write_pending() {
  Definitions names;
  Definitions groups;
  Definitions locations;
  std::vector<Event>& spare = shared_->spare;  // nobody else's while we hold writer_mutex_
  {
    const std::lock_guard lock(shared_->mutex);
    std::swap(shared_->active, spare);
    std::swap(shared_->new_names, names);
    std::swap(shared_->new_groups, groups);
    std::swap(shared_->new_locations, locations);
  }
  write_definitions(Block::names, names);  // before the groups, locations and events that use them
  write_definitions(Block::groups, groups);
  write_definitions(Block::locations, locations);
  if (!spare.empty()) {
    const std::string packed = pack_events(spare.data(), spare.size());
    write_block(Block::events, static_cast<std::uint32_t>(spare.size()), packed.data(),
                packed.size());
  }
  spare.clear();
  header_->peak_memory_bytes.store(peak_memory_bytes(), std::memory_order_relaxed);
}

void Recorder::write_definitions(Block type, const Definitions& definitions) {
  if (definitions.count == 0) return;
  write_block(type, definitions.count, definitions.payload.data(), definitions.payload.size());
}

void Recorder::write_block(Block type, std::uint32_t count, const void* payload,
                           std::size_t size) {
  if (header_->error.load() != 0) {
    if (type == Block::events) header_->dropped_count.fetch_add(count);
    return;
  }
  std::uint32_t head[4] = {static_cast<std::uint32_t>(type), count,
                           static_cast<std::uint32_t>(size), 0};
  head[3] = crc32c(payload, size, crc32c(head, 12));
  std::string block(reinterpret_cast<const char*>(head), sizeof head);
  block.append(static_cast<const char*>(payload), size);
  std::size_t done = 0;
  while (done < block.size()) {
    const ssize_t written = pwrite(descriptor_, block.data() + done, block.size() - done,
                                   static_cast<off_t>(file_bytes_ + done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      header_->error.store(static_cast<std::uint32_t>(written == 0 ? EIO : errno));
      if (type == Block::events) header_->dropped_count.fetch_add(count);
      return;
    }
    done += static_cast<std::size_t>(written);
  }
  file_bytes_ += block.size();
  header_->written_bytes.store(file_bytes_);
}

}  // namespace paceline
