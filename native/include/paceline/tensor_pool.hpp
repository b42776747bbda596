// Memory for the tensors of a training step: a freed block is used again without the kernel.
//
// The pool hands out parts of one reserved range of addresses. The pages of a freed block stay in
// memory while all that the pool has in memory is below the cap, and serve the next blocks, whatever
// their size. Beyond the cap pages go back, and only as many as must:
//
//   range   |used ....|free, resident ..|used .|free, resident|free, without pages ..........|
//                      `-- taken first                          `-- costs a page fault per page
//
// Blocks in use are never refused for the cap: it bounds what is kept beyond them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

namespace paceline {

struct TensorPoolCounts {
  std::size_t used_bytes = 0;      // of blocks
  std::size_t resident_bytes = 0;  // of blocks, and of freed memory whose pages are kept
  std::size_t cap_bytes = 0;
  std::uint64_t fresh_bytes = 0;    // handed out without pages, since the beginning
  std::uint64_t evicted_bytes = 0;  // whose pages went back, since the beginning
  std::size_t peak_used_bytes = 0;  // the most of blocks, since `restart_peak`
};

// Thread-safe. Owns its range, and all blocks are gone with it.
class TensorPool {
 public:
  // Reserves addresses, and no memory. Throws std::bad_alloc.
  explicit TensorPool(std::size_t range_bytes);
  ~TensorPool();
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;

  // A block of whole pages, with what it last had in it; null where the range has no room.
  std::byte* allocate(std::size_t bytes);
  // Whether `block` was one that `allocate` returned; it is free afterwards.
  bool release(void* block);
  bool contains(const void* address) const noexcept {
    const auto* const at = static_cast<const std::byte*>(address);
    return at >= range_ && at < range_ + range_bytes_;
  }
  // Gives pages of free memory back until the cap holds.
  void set_cap(std::size_t bytes);
  TensorPoolCounts counts() const;
  void restart_peak();

  // Around a fork: the child would find the lock taken for ever.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  using Extents = std::map<std::size_t, std::size_t>;  // bytes by offset, neighbours joined
  struct Place {
    std::size_t offset, resident_bytes, hole_bytes;
  };

  Place find_place(std::size_t bytes) const;
  void consider(std::size_t begin, std::size_t run_end, std::size_t bytes, std::size_t hole_bytes,
                Place& best) const;
  std::size_t resident_in(std::size_t begin, std::size_t end) const;
  void evict(std::size_t bytes);

  std::byte* range_ = nullptr;
  std::size_t range_bytes_;
  mutable std::mutex mutex_;
  std::unordered_map<std::size_t, std::size_t> used_;
  Extents free_;           // addresses without a block
  Extents free_resident_;  // the parts of them that have pages
  TensorPoolCounts counts_;
};

// The pool of this process for what `library` ("libc10.so") allocates from now on: its calls of
// posix_memalign and free come here, for blocks of at least `pooled_bytes` and at most the machine's
// memory, while the pool is used; whatever is smaller or larger is the C library's.
// Null where the library is not loaded or its calls cannot be redirected. Never destroyed: tensors
// outlive everything.
constexpr std::size_t pooled_bytes = std::size_t{64} << 10;
TensorPool* redirect_allocations(const char* library);
// Whether new blocks come from the pool; those that are there stay.
void use_pool(bool is_used) noexcept;

}  // namespace paceline
