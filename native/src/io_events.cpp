#include "paceline/io_events.hpp"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "paceline/io_calls.h"

namespace paceline {
namespace {

constexpr std::size_t most_counted_files = 500;
constexpr const char* rest_of_files = "(files of short time)";
constexpr std::array<const char*, IO_OPERATIONS> operation_words = {
    "open", "stat", "list", "read", "write", "sync", "map", "close",
};

std::atomic<Recorder*> attached = nullptr;
bool (*is_wanted)() = nullptr;
std::array<std::uint16_t, IO_OPERATIONS> names{};
int main_thread = 0;

template <class Function>
Function* found(const char* name) noexcept {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

bool writes(IoOperation operation) noexcept {
  return operation == IO_WRITE || operation == IO_SYNC || operation == IO_CLOSE;
}

void record_call(const IoCall* call) {
  Recorder* recorder = attached.load(std::memory_order_acquire);
  if (recorder == nullptr || !is_wanted() || gettid() != main_thread) return;
  recorder->record({.begin_ns = call->begin_ns,
                    .end_ns = call->end_ns,
                    .amount = call->operation == IO_MAP ? 0 : call->bytes,
                    .step = recorder->step(),
                    .tag = recorder->intern(call->path),
                    .name = names[call->operation],
                    .kind = writes(call->operation) ? Kind::write : Kind::read});
}

struct FileCounts {
  std::string path;
  IoFile counts;

  std::uint64_t ns() const {
    return std::accumulate(std::begin(counts.ns), std::end(counts.ns), std::uint64_t{0});
  }
};

void add_file(const IoFile* file, void* files) {
  static_cast<std::vector<FileCounts>*>(files)->push_back({file->path, *file});
}

// The files of the longest time, the rest together.
std::vector<FileCounts> longest(std::vector<FileCounts> files) {
  std::ranges::sort(files, std::greater<>{}, &FileCounts::ns);
  if (files.size() <= most_counted_files) return files;
  FileCounts rest{rest_of_files, {}};
  for (std::size_t i = most_counted_files; i < files.size(); ++i) {
    const IoFile& file = files[i].counts;
    for (int operation = 0; operation < IO_OPERATIONS; ++operation) {
      rest.counts.count[operation] += file.count[operation];
      rest.counts.ns[operation] += file.ns[operation];
      rest.counts.bytes[operation] += file.bytes[operation];
    }
    rest.counts.most_at_once = std::max(rest.counts.most_at_once, file.most_at_once);
  }
  files.resize(most_counted_files);
  files.push_back(std::move(rest));
  return files;
}

}  // namespace

bool sees_io() noexcept { return dlsym(RTLD_DEFAULT, "paceline_io_attach") != nullptr; }

bool attach_io(Recorder& recorder, bool (*is_recorded)()) {
  const auto attach = found<decltype(paceline_io_attach)>("paceline_io_attach");
  if (attach == nullptr) return false;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = recorder.intern(operation_words[i]);
  is_wanted = is_recorded;
  main_thread = gettid();
  attached.store(&recorder, std::memory_order_release);
  attach(record_call, least_io_ns);
  return true;
}

void detach_io(Recorder& recorder) {
  const auto attach = found<decltype(paceline_io_attach)>("paceline_io_attach");
  const auto each_file = found<decltype(paceline_io_files)>("paceline_io_files");
  if (attach == nullptr || each_file == nullptr || attached.exchange(nullptr) != &recorder) return;
  attach(nullptr, 0);
  std::vector<FileCounts> files;
  each_file(add_file, &files);
  const std::uint64_t now = monotonic_ns();
  for (const FileCounts& file : longest(std::move(files))) {
    const std::int32_t path = recorder.intern(file.path);
    const auto count = [&](const std::string& name, std::uint64_t amount) {
      if (amount == 0) return;
      recorder.record({.begin_ns = now,
                       .end_ns = now,
                       .amount = amount,
                       .step = recorder.step(),
                       .tag = path,
                       .name = recorder.intern(name),
                       .kind = Kind::counter});
    };
    for (std::size_t i = 0; i < operation_words.size(); ++i) {
      const std::string word = std::string("io_") + operation_words[i];
      count(word, file.counts.count[i]);
      count(word + "_ns", file.counts.ns[i]);
      count(word + "_bytes", file.counts.bytes[i]);
    }
    count("io_at_once", file.counts.most_at_once);
  }
}

}  // namespace paceline
