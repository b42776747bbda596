// Has a library's calls of posix_memalign and free come to the pool.
//
// A library reaches functions of others through a table of addresses, which the loader fills and
// which can be written to (ELF, "global offset table"). Only this library's own calls change; what
// the pool did not hand out goes on to the C library. Torch's CPU allocator (c10::alloc_cpu and
// c10::free_cpu) is a pair of such calls, so that no interface of torch is needed.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string_view>

#include "paceline/tensor_pool.hpp"

namespace paceline {
namespace {

constexpr std::size_t page = 4096;
// Of addresses, not of memory; fewer where a process may not have so many (RLIMIT_AS).
constexpr std::size_t most_range_bytes = std::size_t{1} << 42;
constexpr std::size_t least_range_bytes = std::size_t{1} << 36;

// Addresses cost nothing, so that the pool would hand out blocks that no machine has memory for: the
// process would be killed where it writes to them. The C library refuses them, and torch says so.
std::size_t machine_bytes() {
  static const std::size_t bytes = [] {
    const long pages = sysconf(_SC_PHYS_PAGES);
    return pages > 0 ? static_cast<std::size_t>(pages) * page : most_range_bytes;
  }();
  return bytes;
}

std::atomic<TensorPool*> pool{nullptr};
std::atomic<bool> is_pool_used{false};

int pooled_memalign(void** out, std::size_t alignment, std::size_t bytes) {
  if (bytes >= pooled_bytes && bytes <= machine_bytes() && alignment <= page &&
      is_pool_used.load(std::memory_order_acquire)) {
    if (std::byte* const block = pool.load(std::memory_order_acquire)->allocate(bytes)) {
      *out = block;
      return 0;
    }
  }
  return posix_memalign(out, alignment, bytes);
}

void pooled_free(void* block) {
  TensorPool* const tensor_pool = pool.load(std::memory_order_acquire);
  if (tensor_pool == nullptr || !tensor_pool->contains(block)) return std::free(block);
  if (!tensor_pool->release(block)) std::abort();  // freed twice, as the C library's free aborts
}

struct Redirection {
  const char* library;
  int memalign_slots = 0;
  int free_slots = 0;
  bool is_failed = false;
};

void write_slot(void** slot, void* function, Redirection& redirection) {
  const auto address = reinterpret_cast<std::uintptr_t>(slot);
  auto* const begin = reinterpret_cast<void*>(address & ~(page - 1));
  // The loader may have made the table read-only (RELRO); it is left writable.
  if (mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) {
    redirection.is_failed = true;
    return;
  }
  std::atomic_ref<void*>(*slot).store(function);
}

void redirect_table(const dl_phdr_info& info, const ElfW(Rela) * relocations, std::size_t bytes,
                    const ElfW(Sym) * symbols, const char* names, bool is_free,
                    Redirection& redirection) {
  for (std::size_t i = 0; i < bytes / sizeof(ElfW(Rela)); ++i) {
    const std::string_view name = names + symbols[ELF64_R_SYM(relocations[i].r_info)].st_name;
    auto** const slot = reinterpret_cast<void**>(info.dlpi_addr + relocations[i].r_offset);
    if (is_free && name == "free") {
      write_slot(slot, reinterpret_cast<void*>(&pooled_free), redirection);
      ++redirection.free_slots;
    } else if (!is_free && name == "posix_memalign") {
      write_slot(slot, reinterpret_cast<void*>(&pooled_memalign), redirection);
      ++redirection.memalign_slots;
    }
  }
}

int redirect_library(dl_phdr_info* info, std::size_t, void* data) {
  auto& redirection = *static_cast<Redirection*>(data);
  const std::string_view path = info->dlpi_name;
  const std::size_t slash = path.rfind('/');
  if (path.substr(slash == path.npos ? 0 : slash + 1) != redirection.library) return 0;
  const ElfW(Rela)* tables[2] = {};
  std::size_t sizes[2] = {};
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_DYNAMIC) continue;
    const auto* entry =
        reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    for (; entry->d_tag != DT_NULL; ++entry) {
      // glibc has made addresses of these already.
      if (entry->d_tag == DT_JMPREL)
        tables[0] = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_RELA)
        tables[1] = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_PLTRELSZ) sizes[0] = entry->d_un.d_val;
      if (entry->d_tag == DT_RELASZ) sizes[1] = entry->d_un.d_val;
      if (entry->d_tag == DT_SYMTAB)
        symbols = reinterpret_cast<const ElfW(Sym)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
    }
  }
  if (symbols == nullptr || names == nullptr) return 1;
  for (const bool is_free : {true, false}) {  // no block of the pool before `free` knows it
    for (int i = 0; i < 2 && !redirection.is_failed; ++i)
      if (tables[i] != nullptr)
        redirect_table(*info, tables[i], sizes[i], symbols, names, is_free, redirection);
  }
  return 1;
}

TensorPool* new_pool() {
  if (sysconf(_SC_PAGESIZE) != page) return nullptr;
  for (std::size_t bytes = most_range_bytes; bytes >= least_range_bytes; bytes /= 2) {
    try {
      return new TensorPool(bytes);
    } catch (const std::bad_alloc&) {  // the next one is smaller
    }
  }
  return nullptr;
}

}  // namespace

TensorPool* redirect_allocations(const char* library) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (TensorPool* const tensor_pool = pool.load()) return tensor_pool;
  TensorPool* const tensor_pool = new_pool();
  if (tensor_pool == nullptr) return nullptr;
  pool.store(tensor_pool);
  Redirection redirection{library};
  dl_iterate_phdr(&redirect_library, &redirection);
  if (redirection.memalign_slots == 0 || redirection.free_slots == 0 || redirection.is_failed) {
    pool.store(nullptr);  // no block was handed out: is_pool_used is false
    delete tensor_pool;
    return nullptr;
  }
  pthread_atfork([] { pool.load()->lock(); }, [] { pool.load()->unlock(); },
                 [] {
                   pool.load()->unlock();
                   use_pool(false);  // a worker of a loader has no budget
                 });
  return tensor_pool;
}

void use_pool(bool is_used) noexcept { is_pool_used.store(is_used && pool.load() != nullptr); }

}  // namespace paceline
