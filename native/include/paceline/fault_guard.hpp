// Reads mapped files that may shrink under the reader.
//
// Touching a page behind the end of a mapped file, or one that its device cannot deliver, raises
// SIGBUS in the thread that touches it, and by default that ends the process. No check beforehand
// helps: the file may shrink right after it. So reads of a mapping run under a guard, which turns the
// signal into a return value.
//
//     thread --completes(range, work)--> touches a page that is gone --SIGBUS--> our handler
//        ^                                                                          |
//        +--- returns false <--- siglongjmp, if the address lies in `range` <-------+
//                                else: what was installed before us handles it, as if we were not here
//
// The handler is the process's, the guard is the thread's. Another handler that is installed later
// (faulthandler, a DataLoader's worker, the user's own) is found within 20 ms and becomes the one that
// ours passes everything else on to.
#pragma once

#include <cstddef>
#include <span>

namespace paceline {

// The bytes of a mapping that the guarded work touches at the moment.
class FaultRange {
 public:
  FaultRange() = default;
  explicit FaultRange(std::span<const std::byte> mapping) noexcept { watch(mapping); }
  // Called by the guarded work itself when it goes on to another mapping.
  void watch(std::span<const std::byte> mapping) noexcept {
    begin_ = mapping.data();
    end_ = mapping.data() + mapping.size();
  }
  bool contains(const void* address) const noexcept {
    return address >= begin_ && address < end_;
  }

 private:
  const std::byte* volatile begin_ = nullptr;
  const std::byte* volatile end_ = nullptr;
};

// Calls `work(argument)`; false if a fault within `range` ended it.
bool run_guarded(const FaultRange& range, void (*work)(void*), void* argument);

// Calls `work()`; returns false if a fault within `range` ended it. Then nothing that `work` had on
// its stack is destroyed: while it touches the mapping it must own nothing but plain values, and what
// it changes outside must be volatile, or unused afterwards. It may throw.
template <class Work>
[[nodiscard]] bool completes(const FaultRange& range, Work&& work) {
  auto* own = &work;
  return run_guarded(
      range, [](void* argument) { (**static_cast<decltype(own)*>(argument))(); }, &own);
}

}  // namespace paceline
