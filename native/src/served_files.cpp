#include "paceline/served_files.hpp"

#include <unistd.h>

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

void ServedFiles::read(const PackReader& reader, std::uint64_t sample, std::byte* target) {
  std::string why;
  for (int round = 0; round < 2; ++round) {
    std::uint32_t tried = 0;
    if (is_here(reader, sample)) {
      try {
        return read_sample(reader, sample, target);
      } catch (const PackError& problem) {  // damaged, or given to another node at this moment
        if (problem.kind == PackError::Kind::memory) throw;
        why = problem.what();
        tried = is_here(reader, sample) ? 1 : 0;
      }
    }
    const std::size_t size = reader.checked_length(sample);
    const Fetched fetched = fetch(reader, sample, {target, size}, tried, why);
    if (fetched == Fetched::yes) return;
    if (fetched == Fetched::no && (requests_ == nullptr || !requests_->has_ended())) break;
  }
  read_source(reader, sample, target, why);
}

ServedFiles::Fetched ServedFiles::fetch(const PackReader& reader, std::uint64_t sample,
                                        std::span<std::byte> target, std::uint32_t tried,
                                        std::string& why) {
  if (requests_ == nullptr || !requests_->await_serving(restart_ns)) {
    const std::string node = requests_ == nullptr ? "this node" : "node " + requests_->node();
    why = "the server of " + node + " has ended";
    say_once(why);
    return Fetched::no;
  }
  const std::int64_t ids[] = {static_cast<std::int64_t>(sample)};
  ExtentPlan plan(reader, ids);
  int restarts = 0;
  for (std::size_t item = 0; item < plan.items().size(); ++item) {
    const WantedRange wanted = plan.wanted(item, target);
    const std::span<std::byte> bytes(wanted.target, wanted.range.length);
    bool is_good = bytes.empty();
    for (std::uint32_t attempt = tried; attempt < max_attempts && !is_good; ++attempt) {
      const RequestOutcome outcome =
          requests_->fetch(wanted.shard, wanted.range.offset, bytes, attempt, wait_ns);
      if (outcome == RequestOutcome::here) return Fetched::is_here_now;
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
        return Fetched::no;
      }
      is_good = !wanted.is_checked || crc32c(bytes.data(), bytes.size()) == wanted.checksum;
      if (is_good) is_good = plan.finish(item, target, RangeOutcome::good) == RangeOutcome::good;
    }
    if (!is_good) {
      why = "what nodes sent is damaged";
      return Fetched::no;
    }
  }
  return Fetched::yes;
}

void ServedFiles::read_source(const PackReader& reader, std::uint64_t sample, std::byte* target,
                              const std::string& why) {
  try {
    read_sample(source(reader), sample, target);
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
