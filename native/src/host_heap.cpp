// The symmetric heap: memory in a rank's segment, first fit, in pages.
#include <algorithm>
#include <iterator>

#include "paceline/host_group.hpp"

namespace paceline {

std::byte* HostGroup::allocate(std::size_t bytes) {
  const std::lock_guard lock(heap_mutex_);
  const std::size_t needed = std::max<std::size_t>((bytes + page_bytes - 1) / page_bytes, 1) *
                             page_bytes;
  const auto fits = std::find_if(heap_free_.begin(), heap_free_.end(),
                                 [&](const auto& range) { return range.second >= needed; });
  if (fits == heap_free_.end()) return nullptr;
  const auto [offset, free_bytes] = *fits;
  heap_free_.erase(fits);
  if (free_bytes > needed) heap_free_[offset + needed] = free_bytes - needed;
  heap_used_[offset] = needed;
  return peers_[index_].segment->heap().data() + offset;
}

void HostGroup::release(std::byte* data) {
  const std::lock_guard lock(heap_mutex_);
  const auto used =
      heap_used_.find(static_cast<std::size_t>(data - peers_[index_].segment->heap().data()));
  if (used == heap_used_.end())
    throw GroupError(GroupFailure::usage, -1, "the address is not of an allocated buffer");
  auto [offset, bytes] = *used;
  heap_used_.erase(used);
  const auto next = heap_free_.find(offset + bytes);
  if (next != heap_free_.end()) {
    bytes += next->second;
    heap_free_.erase(next);
  }
  const auto after = heap_free_.lower_bound(offset);
  if (after != heap_free_.begin() && std::prev(after)->first + std::prev(after)->second == offset)
    std::prev(after)->second += bytes;
  else
    heap_free_[offset] = bytes;
}

std::byte* HostGroup::heap_of(int rank) const {
  need_root(rank);
  return peers_[static_cast<std::size_t>(rank)].segment->heap().data();
}

}  // namespace paceline
