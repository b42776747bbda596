#include "paceline/buffer_pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <iterator>
#include <mutex>
#include <new>
#include <vector>

#include "paceline/fork.hpp"
#include "paceline/page_cache.hpp"

namespace paceline {
namespace {

constexpr std::size_t max_kept_bytes = std::size_t{256} << 20;
constexpr std::size_t min_bytes = 64 * 1024;

struct Free {
  std::mutex mutex;
  std::vector<std::span<std::byte>> buffers;
  std::size_t bytes = 0;
};

Free& free_buffers() {
  static auto* const all = new Free;  // never destroyed: arrays may outlive everything
  return *all;
}

// Few sizes, at most an eighth too large: batches differ a little, and buffers should be reused.
std::size_t rounded(std::size_t size) {
  const std::size_t step = std::max(min_bytes, std::bit_floor(size) / 8);
  return (size + step - 1) / step * step;
}

}  // namespace

std::span<std::byte> acquire_buffer(std::size_t size) {
  if (size == 0) return {};
  if (size > SIZE_MAX / 2) throw std::bad_alloc();
  const std::size_t wanted = rounded(size);
  {
    const ForkGuard whole;
    Free& all = free_buffers();
    const std::lock_guard lock(all.mutex);
    // The last one that came back, which is still in the CPU's cache: batches differ a little, and one
    // buffer for each size would be more than the cache holds.
    const auto kept = std::find_if(all.buffers.rbegin(), all.buffers.rend(), [&](const auto& buffer) {
      return buffer.size() >= wanted && buffer.size() <= 2 * wanted;
    });
    if (kept != all.buffers.rend()) {
      const auto buffer = *kept;
      all.buffers.erase(std::next(kept).base());
      all.bytes -= buffer.size();
      return buffer;
    }
  }
  void* memory = mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  static_cast<void>(madvise(memory, wanted, MADV_HUGEPAGE));
  const std::span<std::byte> buffer(static_cast<std::byte*>(memory), wanted);
  populate_for_writing(buffer);
  return buffer;
}

void release_buffer(std::span<std::byte> buffer) noexcept {
  if (buffer.empty()) return;
  const ForkGuard whole;
  Free& all = free_buffers();
  const std::lock_guard lock(all.mutex);
  all.bytes += buffer.size();
  all.buffers.push_back(buffer);
  while (all.bytes > max_kept_bytes) {  // the oldest goes: it has been unused for longest
    const auto oldest = all.buffers.front();
    all.buffers.erase(all.buffers.begin());
    all.bytes -= oldest.size();
    munmap(oldest.data(), oldest.size());
  }
}

std::uint64_t available_memory_bytes() noexcept {
  std::FILE* const file = std::fopen("/proc/meminfo", "re");
  if (file == nullptr) return UINT64_MAX;
  char line[128];
  unsigned long long kibibytes = 0;
  bool found = false;
  while (!found && std::fgets(line, sizeof line, file) != nullptr) {
    found = std::sscanf(line, "MemAvailable: %llu kB", &kibibytes) == 1;
  }
  std::fclose(file);
  return found ? kibibytes * 1024 : UINT64_MAX;
}

}  // namespace paceline
