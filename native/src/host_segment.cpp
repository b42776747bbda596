#include "paceline/host_segment.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

namespace paceline {
namespace {

constexpr char segment_magic[8] = {'P', 'A', 'C', 'E', 'H', 'O', 'S', 'T'};
constexpr std::uint32_t segment_version = 2;
constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::size_t rounded_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::size_t heap_offset(const SegmentHeader& header) {
  const std::size_t front =
      page_bytes + header.ring_bytes + header.ranks * header.channel_bytes;
  return rounded_up(front, huge_page_bytes);
}

void set_cores(SegmentHeader& header) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (sched_getaffinity(0, sizeof cores, &cores) != 0) return;
  std::memcpy(header.cores, &cores, sizeof header.cores);
}

bool plausible(const SegmentHeader& header, std::size_t bytes) {
  return std::memcmp(header.magic, segment_magic, sizeof segment_magic) == 0 &&
         header.version == segment_version && header.channel_bytes > page_bytes &&
         heap_offset(header) + header.heap_bytes == bytes;
}

}  // namespace

HostSegment::HostSegment(int descriptor, std::byte* base, std::size_t mapped_bytes)
    : descriptor_(descriptor), base_(base), mapped_bytes_(mapped_bytes) {}

HostSegment::~HostSegment() {
  munmap(base_, mapped_bytes_);
  close_descriptor();
}

void HostSegment::close_descriptor() noexcept {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

std::shared_ptr<HostSegment> HostSegment::map(int descriptor, std::size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (base == MAP_FAILED) {
    const int error = errno;
    close(descriptor);
    errno = error;
    fail("cannot map the segment");
  }
  madvise(base, bytes, MADV_HUGEPAGE);  // only a hint: where shared memory has huge pages on advice
  return std::shared_ptr<HostSegment>(
      new HostSegment(descriptor, static_cast<std::byte*>(base), bytes));
}

void HostSegment::read_layout() {
  const SegmentHeader& found = header();
  ring_bytes_ = found.ring_bytes;
  channel_bytes_ = found.channel_bytes;
  channels_ = base_ + page_bytes + ring_bytes_;
  heap_ = base_ + heap_offset(found);
  heap_bytes_ = found.heap_bytes;
}

std::shared_ptr<HostSegment> HostSegment::create(std::uint32_t rank, std::uint32_t ranks,
                                                 const SegmentOptions& options) {
  SegmentHeader layout{};
  std::memcpy(layout.magic, segment_magic, sizeof segment_magic);
  layout.version = segment_version;
  layout.rank = rank;
  layout.ranks = ranks;
  layout.ring_bytes = rounded_up(options.ring_bytes, page_bytes);
  layout.channel_bytes = page_bytes + packet_count * rounded_up(options.packet_bytes, page_bytes);
  layout.heap_bytes = rounded_up(options.heap_bytes, page_bytes);
  layout.process = getpid();
  set_cores(layout);
  if (getrandom(layout.nonce, sizeof layout.nonce, 0) != sizeof layout.nonce)
    fail("cannot get random bytes");

  const int descriptor = memfd_create("paceline", MFD_CLOEXEC);
  if (descriptor < 0) fail("cannot create the segment");
  const std::size_t bytes = heap_offset(layout) + layout.heap_bytes;
  if (ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    close(descriptor);
    errno = error;
    fail("cannot size the segment");
  }
  auto segment = map(descriptor, bytes);
  // The plain fields; the atomics behind them are zero as the file is.
  std::memcpy(static_cast<void*>(segment->base_), static_cast<const void*>(&layout),
              offsetof(SegmentHeader, progress));
  segment->header().waits_for.store(-1);
  segment->header().progress.core.store(-1);
  segment->read_layout();
  return segment;
}

std::shared_ptr<HostSegment> HostSegment::open(const std::string& path, const std::string& nonce) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) fail("cannot open the segment");
  return open(descriptor, nonce);
}

std::shared_ptr<HostSegment> HostSegment::open(int descriptor, const std::string& nonce) {
  struct stat status{};
  if (fstat(descriptor, &status) != 0 ||
      static_cast<std::size_t>(status.st_size) < sizeof(SegmentHeader)) {
    close(descriptor);
    throw std::invalid_argument("the descriptor leads to another file");
  }
  auto segment = map(descriptor, static_cast<std::size_t>(status.st_size));
  segment->close_descriptor();
  if (!plausible(segment->header(), segment->mapped_bytes_) || segment->nonce() != nonce)
    throw std::invalid_argument("the descriptor leads to another file");
  segment->read_layout();
  return segment;
}

std::string HostSegment::nonce() const {
  return {reinterpret_cast<const char*>(header().nonce), sizeof header().nonce};
}

}  // namespace paceline
