// The function that a program would have called without this library: of the next preloaded library
// that has it, else the MPI's own. Other tools stay in the chain.
#pragma once

#include <atomic>

namespace paceline::mpi {

// The address of a symbol behind this library; null if no MPI that is loaded has it. A library that
// was loaded by dlopen, as mpi4py does, is not in the global scope: it is looked for by its name.
void* find_next(const char* name) noexcept;

// Ends the process: it called a function that its MPI does not have.
[[noreturn]] void fail_missing(const char* name) noexcept;

template <class Signature>
class Next {
 public:
  constexpr explicit Next(const char* name) noexcept : name_(name) {}

  Signature* get() noexcept {
    void* found = address_.load(std::memory_order_relaxed);
    if (found == nullptr) {
      found = find_next(name_);
      if (found == nullptr) fail_missing(name_);
      address_.store(found, std::memory_order_relaxed);
    }
    return reinterpret_cast<Signature*>(found);
  }

 private:
  const char* name_;
  std::atomic<void*> address_ = nullptr;
};

}  // namespace paceline::mpi
