#include "paceline/served_files.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <exception>

#include "paceline/crc32c.hpp"
#include "paceline/extent_plan.hpp"

namespace paceline {
namespace {

// For one piece of a file. The server has deadlines of its own for peers, which are shorter.
constexpr std::uint64_t wait_ns = 120'000'000'000;
constexpr std::uint64_t restart_ns = 5'000'000'000;  // for a server that is started again
constexpr int max_restarts = 3;                      // in one read
// Nodes that are asked for bytes which arrived damaged, before the source is read from here.
constexpr std::uint32_t max_attempts = 4;

std::uint64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

// Fills `target` from a shard that is here. False: it is not, or not any more.
bool read_range(const std::string& path, std::uint64_t offset, std::span<std::byte> target) noexcept {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  while (!target.empty()) {
    const ssize_t got = pread(fd, target.data(), target.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    offset += static_cast<std::uint64_t>(got);
    target = target.subspan(static_cast<std::size_t>(got));
  }
  close(fd);
  return target.empty();
}

}  // namespace

void read_sample(const PackReader& reader, std::uint64_t sample, std::byte* target) {
  if (auto single = reader.find_single(sample)) {
    single->target = target;
    reader.read_single(*single);
    return;
  }
  const std::int64_t ids[] = {static_cast<std::int64_t>(sample)};
  std::int64_t offsets[2] = {};
  const std::size_t size = reader.plan_batch(ids, offsets);
  reader.check_memory(ids, offsets);
  reader.read_batch(ids, offsets, {target, size});
}

ServedFiles::ServedFiles(const std::string& requests, std::string source)
    : source_path_(std::move(source)) {
  try {
    requests_ = RangeRequests::open(requests);
  } catch (const std::exception& problem) {
    say_once(std::string("the server of this node cannot be reached (") + problem.what() + ")");
  }
}

ServedFiles::~ServedFiles() { delete source_.load(); }

bool ServedFiles::is_here(const PackReader& reader, std::uint64_t sample) const {
  const PackIndex& index = reader.index();
  // A server that has ended may not have said all that it had copied: a shard has its name once it is whole.
  const bool is_said = requests_ != nullptr && !requests_->has_ended();
  volatile bool is_here = true;
  index.read([&] {
    const auto [first, end] = index.extents(sample);
    is_here = true;
    for (std::uint64_t i = first; i < end && is_here; ++i) {
      const std::uint32_t shard = index.extent(i).shard;
      is_here = (requests_ != nullptr && requests_->is_held(shard)) ||
                (!is_said && access(index.shard_path(shard).c_str(), R_OK) == 0);
    }
  });
  return is_here;
}

ServedFiles::Timed::Timed(const ServedFiles* files) noexcept
    : files_(files), begin_ns_(files == nullptr ? 0 : now_ns()) {}

ServedFiles::Timed::~Timed() {
  if (files_ != nullptr) files_->count(ServedCount::read_ns, now_ns() - begin_ns_);
}

void ServedFiles::note_local(std::uint64_t bytes) noexcept {
  count(ServedCount::local_reads, 1);
  count(ServedCount::local_bytes, bytes);
}

void ServedFiles::count(ServedCount what, std::uint64_t amount) const noexcept {
  if (requests_ != nullptr) requests_->count(what, amount);
}

void ServedFiles::read(const PackReader& reader, std::uint64_t sample, std::byte* target) {
  const Timed timed(this);
  read_anywhere(reader, sample, target);
}

void ServedFiles::read_anywhere(const PackReader& reader, std::uint64_t sample, std::byte* target) {
  std::string why;
  for (int round = 0; round < 2; ++round) {
    std::uint32_t tried = 0;
    if (is_here(reader, sample)) {
      try {
        read_sample(reader, sample, target);
        return note_local(reader.checked_length(sample));
      } catch (const PackError& problem) {  // damaged, or given to another node at this moment
        if (problem.kind == PackError::Kind::memory) throw;
        why = problem.what();
        tried = is_here(reader, sample) ? 1 : 0;
      }
    }
    const std::size_t size = reader.checked_length(sample);
    if (fetch(reader, sample, {target, size}, tried, why)) return count(ServedCount::remote_reads, 1);
    if (requests_ == nullptr || !requests_->has_ended()) break;
  }
  read_source(reader, sample, target, why);
}

bool ServedFiles::fetch(const PackReader& reader, std::uint64_t sample,
                                        std::span<std::byte> target, std::uint32_t tried,
                                        std::string& why) {
  if (requests_ == nullptr || !requests_->await_serving(restart_ns)) {
    const std::string node = requests_ == nullptr ? "this node" : "node " + requests_->node();
    why = "the server of " + node + " has ended";
    say_once(why);
    return false;
  }
  const std::int64_t ids[] = {static_cast<std::int64_t>(sample)};
  ExtentPlan plan(reader, ids);
  int restarts = 0;
  std::uint64_t local_bytes = 0;
  for (std::size_t item = 0; item < plan.items().size(); ++item) {
    const WantedRange wanted = plan.wanted(item, target);
    const std::span<std::byte> bytes(wanted.target, wanted.range.length);
    bool is_good = bytes.empty();
    for (std::uint32_t attempt = tried; attempt < max_attempts && !is_good; ++attempt) {
      RequestOutcome outcome = RequestOutcome::here;
      if (attempt > 0 || !requests_->is_held(wanted.shard)) {
        outcome = requests_->fetch(wanted.shard, wanted.range.offset, bytes, attempt, wait_ns);
      }
      if (outcome == RequestOutcome::here) {
        if (!read_range(reader.index().shard_path(wanted.shard), wanted.range.offset, bytes)) continue;
        local_bytes += bytes.size();
        outcome = RequestOutcome::good;
      }
      if (outcome == RequestOutcome::lost && restarts++ < max_restarts &&
          requests_->await_serving(restart_ns)) {
        --attempt;  // by the server that was started again
        continue;
      }
      if (outcome != RequestOutcome::good) {
        why = outcome == RequestOutcome::nobody ? "no node has it" : "the server of node " +
              requests_->node() + (outcome == RequestOutcome::lost ? " has ended"
                                                                   : " did not answer in time");
        if (outcome != RequestOutcome::nobody) say_once(why);
        return false;
      }
      is_good = !wanted.is_checked || crc32c(bytes.data(), bytes.size()) == wanted.checksum;
      if (is_good) is_good = plan.finish(item, target, RangeOutcome::good) == RangeOutcome::good;
    }
    if (!is_good) {
      why = "what nodes sent is damaged";
      return false;
    }
  }
  if (local_bytes > 0) count(ServedCount::local_bytes, local_bytes);
  return true;
}

void ServedFiles::read_source(const PackReader& reader, std::uint64_t sample, std::byte* target,
                              const std::string& why) {
  try {
    read_sample(source(reader), sample, target);
    count(ServedCount::program_source_bytes, reader.checked_length(sample));
  } catch (PackError& problem) {
    if (problem.kind == PackError::Kind::memory) throw;
    std::string name;
    reader.index().read([&] { name = reader.index().name(sample); });
    PackError both(problem.kind, problem.file, why + "; in the source: " + problem.what());
    both.name = name;
    throw both;
  }
}

const PackReader& ServedFiles::source(const PackReader& reader) {
  const PackReader* known = source_.load(std::memory_order_acquire);
  if (known != nullptr) return *known;
  auto opened = std::make_unique<const PackReader>(source_path_, ReadOptions{.lazy = true});
  if (opened->index().sample_count() != reader.index().sample_count()) {
    fail_corrupt(opened->index().path(), "it is another pack than the nodes serve");
  }
  const PackReader* none = nullptr;  // unless another thread was faster
  if (source_.compare_exchange_strong(none, opened.get(), std::memory_order_acq_rel)) {
    return *opened.release();
  }
  return *none;
}

void ServedFiles::say_once(const std::string& what) noexcept {
  if (has_said_.exchange(true)) return;
  report(source_path_, what + "; what is not on this node is read from here");
}

}  // namespace paceline
