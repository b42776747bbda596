#include "paceline/recorder.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "paceline/crc32c.hpp"
#include "paceline/fork.hpp"

namespace paceline {
namespace {

constexpr std::size_t page_bytes = 4096;

std::uint64_t clock_ns(clockid_t clock) noexcept {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
         static_cast<std::uint64_t>(now.tv_nsec);
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

}  // namespace

std::uint64_t monotonic_ns() noexcept { return clock_ns(CLOCK_MONOTONIC); }

Recorder::Recorder(const std::string& path, const RecorderOptions& options)
    : options_(options), generation_(fork_generation()), shared_(std::make_unique<Shared>()) {
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC | (options.exclusive ? O_EXCL : O_TRUNC);
  descriptor_ = open(path.c_str(), flags, 0644);
  const auto fail = [&](const char* what) {
    const int error = errno;
    if (descriptor_ >= 0) ::close(descriptor_);
    throw std::system_error(error, std::generic_category(), std::string(what) + " " + path);
  };
  if (descriptor_ < 0) fail("open");
  // Allocated, not sparse: a full disk must be an error here and not a SIGBUS at the mapping.
  const int allocated = posix_fallocate(descriptor_, 0, page_bytes);
  if (allocated != 0) {
    errno = allocated;
    fail("allocate");
  }
  void* mapped = mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (mapped == MAP_FAILED) fail("map");
  header_ = static_cast<TraceHeader*>(mapped);
  header_->version = trace_format_version;
  header_->rank = options.rank;
  header_->world_size = options.world_size;
  header_->opened_monotonic_ns = monotonic_ns();
  header_->opened_realtime_ns = clock_ns(CLOCK_REALTIME);
  read_boot_id(header_->boot_id);
  header_->written_bytes = file_bytes_ = page_bytes;
  std::memcpy(header_->magic, "PACETRCE", sizeof header_->magic);  // last: now it is a trace

  shared_->active.reserve(options.buffer_events);
  shared_->spare.reserve(options.buffer_events);
  intern("");  // name 0 means "none"
  step_name_ = intern("step");
  running_name_ = intern("running_ns");
  not_running_name_ = intern("not_running_ns");
  // The writer must not take the script's signals.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  writer_started_ = pthread_create(&writer_, nullptr, write_loop_entry, this) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Recorder::~Recorder() {
  if (!owned()) {  // a forked child shares nothing that it could release safely
    static_cast<void>(shared_.release());
    return;
  }
  close();
  munmap(header_, page_bytes);
  ::close(descriptor_);
}

// A forked child inherits the buffers and the mapped header but not the writer: it must leave both
// alone.
bool Recorder::owned() const noexcept { return generation_ == fork_generation(); }

std::uint32_t Recorder::intern(const std::string& name) {
  if (!owned()) return 0;
  const std::lock_guard lock(shared_->mutex);
  auto& names = shared_->names;
  const auto [entry, added] = names.emplace(name, static_cast<std::uint32_t>(names.size()));
  if (added) shared_->new_names.push_back(name);
  return entry->second;
}

void Recorder::append(const Event& event) {
  if (shared_->stopping) return;  // hooks outlive the recording: what comes then is not missing
  if (shared_->active.size() == shared_->active.capacity()) {
    header_->dropped_count.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  shared_->active.push_back(event);
  header_->recorded_count.fetch_add(1, std::memory_order_relaxed);
  if (shared_->active.size() == shared_->active.capacity() / 2) shared_->wake.notify_one();
}

std::uint64_t Recorder::begin(Kind kind) {
  const std::uint64_t now = monotonic_ns();
  if (!owned()) return now;
  header_->phase.store(static_cast<std::uint32_t>(kind), std::memory_order_relaxed);
  if (kind >= Kind::input && kind <= Kind::optimizer && kind != Kind::copy) start_steps(now);
  return now;
}

void Recorder::start_steps(std::uint64_t now_ns) {
  std::uint64_t unset = step_begin_ns_.load(std::memory_order_relaxed);
  if (unset == 0) step_begin_ns_.compare_exchange_strong(unset, now_ns, std::memory_order_relaxed);
}

std::uint64_t Recorder::end(Kind kind, std::uint32_t name, std::uint64_t begin_ns,
                            std::uint64_t amount, Kind outer) {
  const std::uint64_t now = monotonic_ns();
  if (!owned()) return now;
  header_->phase.store(static_cast<std::uint32_t>(outer), std::memory_order_relaxed);
  record(Event{begin_ns, now, amount, step(), name, 0, 0, -1, kind, 0, 0});
  return now;
}

void Recorder::record(const Event& event) {
  if (!owned()) return;
  const std::lock_guard lock(shared_->mutex);
  append(event);
}

std::uint64_t Recorder::end_step() {
  const std::uint64_t now = monotonic_ns();
  if (!owned()) return now;
  start_steps(now);
  const ThreadTimes times = usage_.sample(now);
  const std::lock_guard lock(shared_->mutex);
  const std::uint64_t begin_ns = step_begin_ns_.load(std::memory_order_relaxed);
  const std::uint32_t step = step_.load(std::memory_order_relaxed);
  append(Event{begin_ns, now, 0, step, step_name_, 0, 0, -1, Kind::step, 0, 0});
  append(Event{begin_ns, now, times.running_ns - before_.running_ns, step, running_name_, 0, 0, -1,
               Kind::counter, 0, 0});
  append(Event{begin_ns, now, times.runnable_ns - before_.runnable_ns, step, not_running_name_, 0,
               0, -1, Kind::counter, 0, 0});
  before_ = times;
  step_begin_ns_.store(now, std::memory_order_relaxed);
  step_.store(step + 1, std::memory_order_relaxed);
  header_->step.store(step + 1, std::memory_order_relaxed);
  return now;
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
  shared_->wake.notify_one();
  if (writer_started_) pthread_join(writer_, nullptr);
  flush();
  header_->phase.store(static_cast<std::uint32_t>(Kind::step));
  header_->closed.store(1);
}

void* Recorder::write_loop_entry(void* self) {
  static_cast<Recorder*>(self)->write_loop();
  return nullptr;
}

void Recorder::write_loop() {
  const auto interval = std::chrono::duration<double>(options_.flush_interval_s);
  std::unique_lock lock(shared_->mutex);
  while (!shared_->stopping) {
    shared_->wake.wait_for(lock, interval);
    lock.unlock();
    flush();
    lock.lock();
  }
}

void Recorder::write_pending() {
  std::vector<std::string> names;
  std::vector<Event>& spare = shared_->spare;  // nobody else's while we hold writer_mutex_
  {
    const std::lock_guard lock(shared_->mutex);
    std::swap(shared_->active, spare);
    names.swap(shared_->new_names);
  }
  if (!names.empty()) {  // before the events that use them
    std::string payload;
    for (const std::string& name : names) {
      const auto length = static_cast<std::uint32_t>(name.size());
      payload.append(reinterpret_cast<const char*>(&length), sizeof length);
      payload.append(name);
    }
    write_block(Block::names, static_cast<std::uint32_t>(names.size()), payload.data(),
                payload.size());
  }
  if (!spare.empty()) {
    write_block(Block::events, static_cast<std::uint32_t>(spare.size()), spare.data(),
                spare.size() * sizeof(Event));
  }
  spare.clear();
  header_->peak_memory_bytes.store(peak_memory_bytes(), std::memory_order_relaxed);
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
  std::vector<char> block(sizeof head + size);
  std::memcpy(block.data(), head, sizeof head);
  std::memcpy(block.data() + sizeof head, payload, size);
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
