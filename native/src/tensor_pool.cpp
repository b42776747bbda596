#include "paceline/tensor_pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <new>

namespace paceline {
namespace {

constexpr std::size_t page = 4096;

std::size_t whole_pages(std::size_t bytes) { return (bytes + page - 1) / page * page; }

void add(std::map<std::size_t, std::size_t>& extents, std::size_t offset, std::size_t bytes) {
  const auto next = extents.lower_bound(offset);
  if (next != extents.end() && next->first == offset + bytes) {
    bytes += next->second;
    extents.erase(next);
  }
  const auto after = extents.lower_bound(offset);
  if (after != extents.begin() && std::prev(after)->first + std::prev(after)->second == offset)
    std::prev(after)->second += bytes;
  else
    extents.emplace_hint(after, offset, bytes);
}

// Removes what lies in [begin, end); returns the bytes that were there.
std::size_t remove(std::map<std::size_t, std::size_t>& extents, std::size_t begin,
                   std::size_t end) {
  std::size_t removed = 0;
  auto at = extents.upper_bound(begin);
  if (at != extents.begin()) --at;
  while (at != extents.end() && at->first < end) {
    const auto [offset, bytes] = *at;
    const std::size_t from = std::max(offset, begin), to = std::min(offset + bytes, end);
    if (from >= to) {
      ++at;
      continue;
    }
    at = extents.erase(at);
    if (offset < from) extents.emplace(offset, from - offset);
    if (to < offset + bytes) extents.emplace(to, offset + bytes - to);
    removed += to - from;
  }
  return removed;
}

}  // namespace

TensorPool::TensorPool(std::size_t range_bytes) : range_bytes_(whole_pages(range_bytes)) {
  void* const memory = mmap(nullptr, range_bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  // A huge page would bring in memory that belongs to no block, and is not counted.
  static_cast<void>(madvise(memory, range_bytes_, MADV_NOHUGEPAGE));
  range_ = static_cast<std::byte*>(memory);
  free_[0] = range_bytes_;
}

TensorPool::~TensorPool() { munmap(range_, range_bytes_); }

std::byte* TensorPool::allocate(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes > range_bytes_) return nullptr;
  bytes = std::max(whole_pages(bytes), page);
  const Place place = find_place(bytes);
  if (place.offset == SIZE_MAX) return nullptr;
  remove(free_, place.offset, place.offset + bytes);
  remove(free_resident_, place.offset, place.offset + bytes);
  const std::size_t fresh = bytes - place.resident_bytes;
  const std::size_t resident = counts_.resident_bytes + fresh;
  if (resident > counts_.cap_bytes) evict(resident - counts_.cap_bytes);
  used_[place.offset] = bytes;
  counts_.used_bytes += bytes;
  counts_.peak_used_bytes = std::max(counts_.peak_used_bytes, counts_.used_bytes);
  counts_.resident_bytes += fresh;
  counts_.fresh_bytes += fresh;
  return range_ + place.offset;
}

bool TensorPool::release(void* block) {
  const std::lock_guard lock(mutex_);
  if (!contains(block)) return false;
  const auto used = used_.find(static_cast<std::size_t>(static_cast<std::byte*>(block) - range_));
  if (used == used_.end()) return false;
  const auto [offset, bytes] = *used;
  used_.erase(used);
  counts_.used_bytes -= bytes;
  add(free_, offset, bytes);
  add(free_resident_, offset, bytes);
  if (counts_.resident_bytes > counts_.cap_bytes) evict(counts_.resident_bytes - counts_.cap_bytes);
  return true;
}

void TensorPool::set_cap(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  counts_.cap_bytes = bytes;
  if (counts_.resident_bytes > bytes) evict(counts_.resident_bytes - bytes);
}

TensorPoolCounts TensorPool::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void TensorPool::restart_peak() {
  const std::lock_guard lock(mutex_);
  counts_.peak_used_bytes = counts_.used_bytes;
}

// The place with the most pages; of equal ones that in the smallest hole.
TensorPool::Place TensorPool::find_place(std::size_t bytes) const {
  Place best{SIZE_MAX, 0, SIZE_MAX};
  for (const auto& [begin, size] : free_) {
    if (size < bytes) continue;
    const std::size_t end = begin + size;
    consider(begin, end, bytes, size, best);
    for (auto hole = free_resident_.lower_bound(begin);
         hole != free_resident_.end() && hole->first < end; ++hole) {
      consider(hole->first, end, bytes, hole->second, best);
      const std::size_t hole_end = hole->first + hole->second;
      if (hole_end >= begin + bytes) consider(hole_end - bytes, end, bytes, hole->second, best);
      if (best.resident_bytes == bytes && best.hole_bytes == bytes) return best;
    }
  }
  return best;
}

void TensorPool::consider(std::size_t begin, std::size_t run_end, std::size_t bytes,
                          std::size_t hole_bytes, Place& best) const {
  begin = std::min(begin, run_end - bytes);
  const std::size_t resident = resident_in(begin, begin + bytes);
  const bool is_better = best.offset == SIZE_MAX || resident > best.resident_bytes ||
                         (resident == best.resident_bytes && hole_bytes < best.hole_bytes);
  if (is_better) best = {begin, resident, hole_bytes};
}

std::size_t TensorPool::resident_in(std::size_t begin, std::size_t end) const {
  std::size_t bytes = 0;
  auto at = free_resident_.upper_bound(begin);
  if (at != free_resident_.begin()) --at;
  for (; at != free_resident_.end() && at->first < end; ++at) {
    const std::size_t from = std::max(at->first, begin);
    const std::size_t to = std::min(at->first + at->second, end);
    if (from < to) bytes += to - from;
  }
  return bytes;
}

// Gives at most so many bytes back, from the end of the range: blocks gather at its beginning.
void TensorPool::evict(std::size_t bytes) {
  while (bytes > 0 && !free_resident_.empty()) {
    const auto last = std::prev(free_resident_.end());
    const std::size_t count = std::min(whole_pages(bytes), last->second);
    const std::size_t begin = last->first + last->second - count;
    static_cast<void>(madvise(range_ + begin, count, MADV_DONTNEED));
    last->second -= count;
    if (last->second == 0) free_resident_.erase(last);
    counts_.resident_bytes -= count;
    counts_.evicted_bytes += count;
    bytes -= std::min(bytes, count);
  }
}

}  // namespace paceline
