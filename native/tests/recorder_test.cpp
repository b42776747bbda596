// The recorder: what is written can be read back, from many threads, and a forked child is mute.
#include "paceline/recorder.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <system_error>
#include <thread>

#include "check.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/event_codec.hpp"

using paceline::Event;
using paceline::Kind;
using paceline::LocationType;
using paceline::Phase;
using paceline::phase_of;
using paceline::Recorder;
using paceline::RecorderOptions;
using paceline::TraceHeader;

namespace {

struct Group {
  std::string name;
  std::vector<std::uint32_t> members;
};

struct Location {
  LocationType type;
  std::string name;
  std::uint32_t process;
  std::uint32_t number;
};

constexpr std::size_t own_names = 11;  // that a recorder defines for itself

struct Parsed {
  std::vector<std::string> names;
  std::vector<Group> groups;
  std::vector<Location> locations;
  std::vector<Event> events;  // without the counters of paging
  std::size_t paging = 0;     // such counters: how many depends on what the machine has in memory
  std::size_t bytes = 0;
};

template <class T>
T load(const std::string& bytes, std::size_t at) {
  CHECK(at + sizeof(T) <= bytes.size());
  T value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

Parsed parse(const std::string& path) {
  const std::string bytes = slurp(path);
  CHECK(bytes.size() >= 4096 && std::memcmp(bytes.data(), "PACETRCE", 8) == 0);
  Parsed parsed;
  std::size_t at = 4096;
  while (at < bytes.size()) {
    const auto type = load<std::uint32_t>(bytes, at);
    const auto count = load<std::uint32_t>(bytes, at + 4);
    const auto size = load<std::uint32_t>(bytes, at + 8);
    const auto checksum = load<std::uint32_t>(bytes, at + 12);
    CHECK(at + 16 + size <= bytes.size());
    const std::uint32_t head = paceline::crc32c(bytes.data() + at, 12);
    CHECK(paceline::crc32c(bytes.data() + at + 16, size, head) == checksum);
    at += 16;
    const std::size_t end = at + size;
    if (type == 5) {
      std::vector<Event> events(count);
      CHECK(paceline::unpack_events(bytes.data() + at, size, events.data(), count));
      parsed.events.insert(parsed.events.end(), events.begin(), events.end());
      at = end;
    } else if (type == 2) {
      while (at < end) {
        const auto length = load<std::uint32_t>(bytes, at);
        parsed.names.push_back(bytes.substr(at + 4, length));
        at += 4 + length;
      }
    } else if (type == 3) {
      while (at < end) {
        Group group{parsed.names.at(load<std::uint32_t>(bytes, at)), {}};
        const auto members = load<std::uint32_t>(bytes, at + 4);
        at += 8;
        for (std::uint32_t i = 0; i < members; ++i, at += 4) {
          group.members.push_back(load<std::uint32_t>(bytes, at));
        }
        parsed.groups.push_back(group);
      }
    } else {
      CHECK(type == 4 && size == count * 16);
      for (; at < end; at += 16) {
        parsed.locations.push_back({static_cast<LocationType>(load<std::uint32_t>(bytes, at)),
                                    parsed.names.at(load<std::uint32_t>(bytes, at + 4)),
                                    load<std::uint32_t>(bytes, at + 8),
                                    load<std::uint32_t>(bytes, at + 12)});
      }
    }
    CHECK(at == end);
  }
  parsed.bytes = bytes.size();
  const auto is_paging = [&](const Event& event) {
    const std::string& name = parsed.names.at(event.name);
    return event.kind == Kind::counter && (name == "major_faults" || name == "storage_bytes");
  };
  parsed.paging = std::erase_if(parsed.events, is_paging);
  return parsed;
}

RecorderOptions options() {
  RecorderOptions result;
  result.rank = 3;
  result.world_size = 8;
  result.buffer_events = 1U << 14;
  return result;
}

void writes_what_was_recorded() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  {
    Recorder recorder(path, options());
    const std::uint16_t name = recorder.intern("all_reduce");
    CHECK(recorder.intern("all_reduce") == name);
    CHECK(recorder.intern("") == 0);
    const std::uint64_t begin = recorder.begin(phase_of(Kind::forward));
    CHECK(recorder.end(Kind::forward, 0, begin, 5, Phase::idle) >= begin);
    recorder.record({.begin_ns = 1,
                     .end_ns = 2,
                     .amount = 3,
                     .sequence = 9,
                     .tag = 7,
                     .name = name,
                     .location = paceline::communication_location,
                     .kind = Kind::collective,
                     .flags = paceline::completion_unknown});
    const std::uint64_t wait = recorder.begin(phase_of(Kind::wait));
    recorder.record({.begin_ns = wait, .end_ns = wait, .amount = ~0ULL, .kind = Kind::wait});
    recorder.flush();
    CHECK(parse(path).events.size() == 3);  // readable up to the last flush, before it is closed
    CHECK(parse(path).events[2].amount < 60'000'000'000U);  // time without a core in the wait
    recorder.end_step();
    CHECK(recorder.step() == 1);
    recorder.close();
    recorder.close();
    recorder.record(Event{});
    CHECK(recorder.dropped_count() == 0);
  }
  const Parsed parsed = parse(path);
  CHECK(parsed.names.size() == own_names + 1 && parsed.names[0].empty());
  CHECK(parsed.names[own_names] == "all_reduce");
  CHECK(parsed.events.size() == 8);
  CHECK(parsed.events[0].kind == Kind::forward && parsed.events[0].amount == 5);
  CHECK(parsed.events[1].kind == Kind::collective && parsed.events[1].sequence == 9);
  CHECK(parsed.events[1].location == 1 && parsed.events[1].peer == -1);
  CHECK(parsed.events[1].tag == 7 && parsed.events[1].flags == 1);
  CHECK(parsed.events[3].kind == Kind::step && parsed.events[4].kind == Kind::counter);
  CHECK(parsed.names[parsed.events[4].name] == "running_ns" && parsed.events[4].amount > 0);
  CHECK(parsed.names[parsed.events[5].name] == "not_running_ns");
  CHECK(parsed.names[parsed.events[6].name] == "main_running_ns" && parsed.events[6].amount > 0);
  CHECK(parsed.names[parsed.events[7].name] == "main_not_running_ns");
  const std::string bytes = slurp(path);
  TraceHeader header;
  std::memcpy(static_cast<void*>(&header), bytes.data(), sizeof header);
  CHECK(header.version == paceline::trace_format_version && header.rank == 3);
  CHECK(header.world_size == 8 && header.step == 1 && header.closed == 1 && header.error == 0);
  CHECK(header.recorded_count == 8 + parsed.paging && header.dropped_count == 0);
  CHECK(header.written_bytes == parsed.bytes);
  CHECK(header.peak_memory_bytes > 0);
}

void defines_groups_and_locations() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  {
    Recorder recorder(path, options());
    const std::uint16_t world = recorder.define_group("group 0", {0, 1, 2});
    const std::uint16_t part = recorder.define_group("group 1", {2, 0});
    CHECK(world == 1 && part == 2);
    CHECK(recorder.define_group("group 0", {0, 1, 2}) == world);
    CHECK(recorder.define_group("group 1", {0, 2}) == 3);  // the order of members is their rank
    recorder.flush();
    CHECK(recorder.define_group("group 0", {}) == 4);  // members that are not known
    const std::uint16_t stream = recorder.define_location(LocationType::stream, "copies", 11, 7);
    CHECK(stream == 2);
    CHECK(recorder.define_location(LocationType::stream, "copies", 11, 7) == stream);
  }
  const Parsed parsed = parse(path);
  CHECK(parsed.groups.size() == 5 && parsed.groups[0].name.empty());
  CHECK(parsed.groups[2].name == "group 1");
  CHECK((parsed.groups[2].members == std::vector<std::uint32_t>{2, 0}));
  CHECK(parsed.groups[4].name == "group 0" && parsed.groups[4].members.empty());
  CHECK(parsed.locations.size() == 3);
  CHECK(parsed.locations[0].type == LocationType::thread && parsed.locations[0].name == "main");
  CHECK(parsed.locations[0].process == static_cast<std::uint32_t>(getpid()));
  CHECK(parsed.locations[1].type == LocationType::communication);
  CHECK(parsed.locations[2].name == "copies" && parsed.locations[2].number == 7);
}

void keeps_its_tables_bounded() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  Recorder recorder(path, options());
  for (std::uint32_t i = 0; i < 66'000; ++i) {
    const std::uint16_t name = recorder.intern("name " + std::to_string(i));
    CHECK((name == 0) == (i >= 65'536 - own_names));
  }
  CHECK(recorder.intern("name 5") == own_names + 5);
}

void protects_its_header_by_checksums() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  const auto checked = [&path](std::size_t begin, std::size_t end) {
    return paceline::crc32c(slurp(path).data() + begin, end - begin);
  };
  Recorder recorder(path, options());
  const std::string bytes = slurp(path);
  const std::uint32_t before = paceline::crc32c(bytes.data(), 20);
  CHECK(load<std::uint32_t>(bytes, 20) == paceline::crc32c(bytes.data() + 24, 56, before));
  CHECK(load<std::uint32_t>(bytes, 128) == 0);
  recorder.begin(phase_of(Kind::backward));
  recorder.close();
  CHECK(load<std::uint32_t>(slurp(path), 128) == checked(80, 128));
  recorder.end(Kind::backward, 0, recorder.begin(phase_of(Kind::forward)), 0, Phase::idle);
  recorder.end_step();  // hooks outlive the recording: they leave the header alone
  CHECK(load<std::uint32_t>(slurp(path), 128) == checked(80, 128));
}

void refuses_an_existing_file() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  Recorder(path, options()).close();
  CHECK_THROWS(Recorder(path, options()), std::system_error);
  CHECK_THROWS(Recorder(folder / "no/such/folder", options()), std::system_error);
}

void loses_nothing_between_threads() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  constexpr std::uint64_t each = 3000;
  constexpr std::uint32_t thread_count = 4;
  RecorderOptions chosen = options();
  chosen.flush_interval_s = 0.001;  // so that the writer swaps buffers all the time
  {
    Recorder recorder(path, chosen);
    std::vector<std::thread> threads;
    for (std::uint32_t thread = 0; thread < thread_count; ++thread) {
      threads.emplace_back([&recorder, thread] {
        const std::uint16_t name = recorder.intern("thread " + std::to_string(thread));
        for (std::uint64_t i = 0; i < each; ++i) {
          recorder.record({.begin_ns = i,
                           .end_ns = i,
                           .amount = i,
                           .step = recorder.step(),
                           .sequence = thread,
                           .name = name,
                           .kind = Kind::copy});
          if (i % 500 == 0) recorder.flush();
        }
      });
    }
    for (int step = 0; step < 50; ++step) {
      const std::uint64_t begin = recorder.begin(phase_of(Kind::backward));
      recorder.end(Kind::backward, 0, begin, 0, Phase::idle);
      recorder.end_step();
    }
    for (auto& thread : threads) thread.join();
    CHECK(recorder.dropped_count() == 0);
  }
  const Parsed parsed = parse(path);
  std::vector<std::uint64_t> next(thread_count, 0);
  for (const Event& event : parsed.events) {
    if (event.kind != Kind::copy) continue;
    CHECK(event.amount == next[event.sequence]++);  // in order within each thread
    CHECK(parsed.names.at(event.name) == "thread " + std::to_string(event.sequence));
  }
  for (const std::uint64_t count : next) CHECK(count == each);
  CHECK(parsed.events.size() == thread_count * each + 50 * 6);
}

void counts_what_does_not_fit() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  RecorderOptions chosen = options();
  chosen.buffer_events = 16;
  chosen.flush_interval_s = 3600;
  constexpr std::uint64_t recorded = 10'000;
  std::uint64_t dropped = 0;
  {
    Recorder recorder(path, chosen);
    for (std::uint64_t i = 0; i < recorded; ++i) recorder.record(Event{});
    recorder.close();
    dropped = recorder.dropped_count();
  }
  CHECK(parse(path).events.size() + dropped == recorded);
}

void does_nothing_in_a_forked_child() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  RecorderOptions chosen = options();
  chosen.flush_interval_s = 0.05;
  auto* recorder = new Recorder(path, chosen);
  recorder->record(Event{});
  // Again and again, because most of the time, not always, the writer waits when we fork.
  for (int round = 0; round < 10; ++round) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      alarm(60);  // rather dead than hanging
      recorder->record(Event{});
      recorder->end(Kind::copy, 0, recorder->begin(phase_of(Kind::copy)), 0, Phase::idle);
      recorder->end_step();
      recorder->flush();
      recorder->close();
      const bool mute = recorder->intern("child") == 0 && recorder->step() == 0 &&
                        recorder->define_group("child", {0}) == 0;
      delete recorder;  // the writer thread is not here
      _exit(mute ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  recorder->record(Event{});
  delete recorder;
  const Parsed parsed = parse(path);
  CHECK(parsed.events.size() == 2 && parsed.names.size() == own_names);
}

// A stopped process can not say so itself; the writer's wait ends when the process continues.
void notes_that_the_process_was_stopped() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  int ready[2];
  CHECK(pipe(ready) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(60);  // rather dead than hanging
    Recorder recorder(path, {.flush_interval_s = 30.0});
    CHECK(write(ready[1], "r", 1) == 1);
    while (true) {  // until the writer thread has noted the stop
      recorder.flush();
      if (!parse(path).events.empty()) break;
      usleep(1000);
    }
    recorder.close();
    _exit(0);
  }
  char byte = 0;
  CHECK(read(ready[0], &byte, 1) == 1);
  int status = 0;
  while (true) {  // again while the writer has not come to its wait
    CHECK(kill(child, SIGSTOP) == 0);
    CHECK(waitpid(child, &status, WUNTRACED) == child);
    if (WIFEXITED(status)) break;
    CHECK(kill(child, SIGCONT) == 0);
    usleep(20000);
    if (waitpid(child, &status, WNOHANG) == child) break;
  }
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  const Parsed parsed = parse(path);
  CHECK(!parsed.events.empty() && parsed.events[0].kind == Kind::counter);
  CHECK(parsed.names[parsed.events[0].name] == "stopped" && parsed.events[0].amount == 1);
  close(ready[0]);
  close(ready[1]);
}

std::int64_t cpu_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// As daemons do, and scripts that start programs of their own.
void does_not_spin_when_the_script_closes_its_descriptors() {
  const TemporaryFolder folder;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(60);  // rather dead than hanging
    const Recorder recorder(folder / "rank.trace", {.flush_interval_s = 0.01});
    // Past the thread sanitizer, which calls this a race with the writer: it is, and it is the point.
    for (int descriptor = 3; descriptor < 64; ++descriptor) syscall(SYS_close, descriptor);
    while (cpu_ns(CLOCK_THREAD_CPUTIME_ID) < 200'000'000) {
    }
    const std::int64_t own_ns = cpu_ns(CLOCK_THREAD_CPUTIME_ID);
    _exit(cpu_ns(CLOCK_PROCESS_CPUTIME_ID) - own_ns < own_ns / 4 ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// The end of a backward pass is a wait within which the script may wait for others.
void waits_may_be_nested_and_left_open() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  const auto record = [](Recorder& recorder, std::uint64_t begin_ns) {
    recorder.record(
        {.begin_ns = begin_ns, .end_ns = begin_ns, .amount = ~0ULL, .kind = Kind::wait});
  };
  {
    Recorder recorder(path, options());
    const std::uint64_t drain = recorder.begin(phase_of(Kind::wait));
    for (int i = 0; i < 20; ++i) record(recorder, recorder.begin(phase_of(Kind::wait)));
    record(recorder, drain);
    recorder.begin(phase_of(Kind::wait));  // its hook fails: no event
    record(recorder, 1);                   // another wait, whose begin nobody reported
  }
  const auto events = parse(path).events;
  CHECK(events.size() == 22);
  for (std::size_t i = 0; i < 21; ++i) CHECK(events[i].amount < 60'000'000'000U);
  CHECK(events[21].amount == ~0ULL);
}

void keeps_a_readable_file_when_writing_fails() {
  const TemporaryFolder folder;
  const std::string path = folder / "rank.trace";
  const pid_t child = fork();  // the limit on file sizes holds for a whole process
  CHECK(child >= 0);
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    Recorder recorder(path, options());
    recorder.record(Event{});
    recorder.flush();
    const auto size = static_cast<rlim_t>(std::filesystem::file_size(path));
    const rlimit limit{size + 20, size + 20};  // the next block does not fit, but its head does
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    for (int i = 0; i < 3; ++i) recorder.record(Event{});
    recorder.close();
    CHECK(recorder.dropped_count() == 3);
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  std::string bytes = slurp(path);
  TraceHeader header;
  std::memcpy(static_cast<void*>(&header), bytes.data(), sizeof header);
  CHECK(header.error == EFBIG && header.dropped_count == 3);
  std::filesystem::resize_file(path, header.written_bytes);  // as far as the header vouches for
  CHECK(parse(path).events.size() == 1);
}

}  // namespace

int main() {
  writes_what_was_recorded();
  defines_groups_and_locations();
  keeps_its_tables_bounded();
  protects_its_header_by_checksums();
  refuses_an_existing_file();
  loses_nothing_between_threads();
  counts_what_does_not_fit();
  notes_that_the_process_was_stopped();
  does_nothing_in_a_forked_child();
  waits_may_be_nested_and_left_open();
  does_not_spin_when_the_script_closes_its_descriptors();
  keeps_a_readable_file_when_writing_fails();
}
