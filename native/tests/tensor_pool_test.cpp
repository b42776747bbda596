// TensorPool: pages are used again, the cap holds for what is kept, nothing is lost.
#include "paceline/tensor_pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

using paceline::TensorPool;

namespace {

constexpr std::size_t page = 4096;
constexpr std::size_t range = std::size_t{1} << 30;

// Pages that the kernel has for these addresses.
std::size_t pages_of(void* begin, std::size_t bytes) {
  std::vector<unsigned char> found(bytes / page);
  CHECK(mincore(begin, bytes, found.data()) == 0);
  return static_cast<std::size_t>(
      std::count_if(found.begin(), found.end(), [](unsigned char p) { return (p & 1) != 0; }));
}

void reuses_pages() {
  TensorPool pool(range);
  pool.set_cap(64 * page);
  std::byte* const first = pool.allocate(32 * page);
  std::memset(first, 1, 32 * page);
  CHECK(pool.release(first));
  CHECK(pages_of(first, 32 * page) == 32);
  CHECK(pool.allocate(16 * page - 1) != nullptr);  // two smaller ones fit into its pages
  CHECK(pool.allocate(16 * page) != nullptr);
  CHECK(pool.counts().fresh_bytes == 32 * page);
  CHECK(pool.counts().peak_used_bytes == 32 * page);
  pool.restart_peak();
  CHECK(pool.allocate(page) != nullptr);
  CHECK(pool.counts().peak_used_bytes == 33 * page);
}

void gives_back_only_what_it_must() {
  TensorPool pool(range);
  pool.set_cap(32 * page);
  std::byte* const first = pool.allocate(16 * page);
  std::byte* const second = pool.allocate(16 * page);
  std::memset(first, 1, 16 * page);
  std::memset(second, 2, 16 * page);
  CHECK(pool.release(first));
  CHECK(pool.allocate(20 * page) != nullptr);  // does not fit into the first one's addresses
  CHECK(pages_of(first, 16 * page) == 0);
  CHECK(pool.counts().resident_bytes == 36 * page);  // in use: more than the cap
  CHECK(second[page] == std::byte{2});
}

void a_cap_of_nothing_keeps_nothing() {
  TensorPool pool(range);
  std::byte* const block = pool.allocate(8 * page);
  std::memset(block, 1, 8 * page);
  CHECK(pool.release(block));
  CHECK(pages_of(block, 8 * page) == 0);
  CHECK(pool.counts().resident_bytes == 0);
}

void refuses_what_it_did_not_hand_out() {
  TensorPool pool(4 * page);
  std::byte* const block = pool.allocate(page);
  int elsewhere = 0;
  CHECK(!pool.release(&elsewhere));
  CHECK(!pool.release(block + page));
  CHECK(pool.release(block));
  CHECK(!pool.release(block));
  CHECK(pool.allocate(5 * page) == nullptr);
}

void threads_share_it() {
  TensorPool pool(range);
  pool.set_cap(100 * page);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&pool, seed] {
      std::mt19937 random(seed);
      std::vector<std::pair<std::byte*, std::size_t>> mine;
      for (int i = 0; i < 2000; ++i) {
        if (mine.size() < 8) {
          const std::size_t bytes = (1 + random() % 20) * page;
          std::byte* const block = pool.allocate(bytes);
          std::memset(block, static_cast<int>(seed), bytes);
          mine.emplace_back(block, bytes);
        } else {
          const auto at = static_cast<std::ptrdiff_t>(random() % mine.size());
          const auto [block, bytes] = mine[static_cast<std::size_t>(at)];
          for (std::size_t p = 0; p < bytes; p += page) CHECK(block[p] == std::byte(seed));
          CHECK(pool.release(block));
          mine.erase(mine.begin() + at);
        }
      }
      for (const auto& [block, bytes] : mine) CHECK(pool.release(block));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(pool.counts().used_bytes == 0);
  CHECK(pool.counts().resident_bytes <= 100 * page);
}

}  // namespace

int main() {
  reuses_pages();
  gives_back_only_what_it_must();
  a_cap_of_nothing_keeps_nothing();
  refuses_what_it_did_not_hand_out();
  threads_share_it();
}
