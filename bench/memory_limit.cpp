// The memory limit of an all-reduce of two ranks: how fast processes that run at once can do
// a = b = a + b, which each has to do with its half of the message. Several kernels, because none is
// best everywhere: plain stores, stores past the cache, and prefetching.
//     memory_limit PROCESSES BYTES BATCHES
// prints for each kernel the median over batches of the slowest process's seconds per pass; BYTES is
// the length of a, and of b. Compile it with -O3 -march=native.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int most_processes = 64;
constexpr int most_batches = 64;
constexpr std::size_t lanes = 16;
typedef float Vector __attribute__((vector_size(lanes * sizeof(float))));

enum class Kernel { plain, prefetching, past_cache };
constexpr const char* names[] = {"plain", "prefetching", "past_cache"};
constexpr int kernel_count = 3;

struct Shared {
  std::atomic<int> arrived;
  double seconds[most_processes][most_batches];
};

void store(float* to, Vector values, bool past_cache) {
#if defined(__AVX512F__)
  if (past_cache) return _mm512_stream_ps(to, (__m512)values);
#else
  static_cast<void>(past_cache);
#endif
  __builtin_memcpy(to, &values, sizeof values);
}

template <Kernel kernel>
void add_both(float* a, float* b, std::size_t count) {
  for (std::size_t i = 0; i < count; i += lanes) {
    if constexpr (kernel == Kernel::prefetching) {
      __builtin_prefetch(a + i + 24 * lanes, 1);
      __builtin_prefetch(b + i + 24 * lanes, 1);
    }
    Vector x, y;
    __builtin_memcpy(&x, a + i, sizeof x);
    __builtin_memcpy(&y, b + i, sizeof y);
    store(a + i, x + y, kernel == Kernel::past_cache);
    store(b + i, x + y, kernel == Kernel::past_cache);
  }
}

void pass(Kernel kernel, float* a, float* b, std::size_t count) {
  if (kernel == Kernel::plain) return add_both<Kernel::plain>(a, b, count);
  if (kernel == Kernel::prefetching) return add_both<Kernel::prefetching>(a, b, count);
  add_both<Kernel::past_cache>(a, b, count);
}

float* allocate(std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::fill_n(static_cast<char*>(memory), bytes, '\0');
  return static_cast<float*>(memory);
}

void meet(Shared& shared, int processes, int round) {
  shared.arrived.fetch_add(1);
  while (shared.arrived.load() < processes * (round + 1)) {
  }
}

void measure(Shared& shared, Kernel kernel, int process, int processes, std::size_t bytes,
             int batches) {
  using Clock = std::chrono::steady_clock;
  float* a = allocate(bytes);
  float* b = allocate(bytes);
  const auto passes = static_cast<int>(std::max<std::size_t>(1, (std::size_t{64} << 20) / bytes));
  pass(kernel, a, b, bytes / sizeof(float));
  for (int batch = 0; batch < batches; ++batch) {
    meet(shared, processes, batch);
    const auto begin = Clock::now();
    for (int i = 0; i < passes; ++i) pass(kernel, a, b, bytes / sizeof(float));
    const std::chrono::duration<double> taken = Clock::now() - begin;
    shared.seconds[process][batch] = taken.count() / passes;
  }
  _exit(0);
}

double median_of_slowest(const Shared& shared, int processes, int batches) {
  std::vector<double> slowest;
  for (int batch = 0; batch < batches; ++batch) {
    double most = 0;
    for (int process = 0; process < processes; ++process)
      most = std::max(most, shared.seconds[process][batch]);
    slowest.push_back(most);
  }
  std::sort(slowest.begin(), slowest.end());
  return slowest[slowest.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int processes = std::min(std::atoi(argv[1]), most_processes);
  const std::size_t bytes = std::max<std::size_t>(std::strtoull(argv[2], nullptr, 10) / 64, 1) * 64;
  const int batches = std::min(std::atoi(argv[3]), most_batches);
  for (int kernel = 0; kernel < kernel_count; ++kernel) {
    auto* shared = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                                             MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    for (int process = 0; process < processes; ++process)
      if (fork() == 0)
        measure(*shared, static_cast<Kernel>(kernel), process, processes, bytes, batches);
    while (wait(nullptr) > 0) {
    }
    std::printf("%s %.9f\n", names[kernel], median_of_slowest(*shared, processes, batches));
  }
}
