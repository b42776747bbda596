#include "paceline/fault_guard.hpp"

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>

#include "paceline/fork.hpp"
#include "paceline/page_cache.hpp"

namespace paceline {
namespace {

constexpr std::uint64_t check_interval_ns = 20'000'000;
// A handler that returns from the same fault so often has not repaired what it was called for.
constexpr int max_repeats = 1000;

struct Guard {
  const FaultRange* range;
  Guard* outer;
  sigjmp_buf place;
  sigset_t mask;  // of the thread when the fault came
};

// What the handler needs of its thread. Initial-exec: the first access to another kind of
// thread-local variable may allocate memory, which a signal handler must not.
struct ThreadState {
  Guard* guard = nullptr;
  bool unblocked = false;       // SIGBUS, in this thread
  std::uintptr_t passing = 0;   // frame of the handler that is calling the one before us
  const void* faulted = nullptr;
  int repeats = 0;
};
constinit thread_local ThreadState state [[gnu::tls_model("initial-exec")]];

// What was installed when we came. Never freed: another thread's handler may be reading it.
std::atomic<const struct sigaction*> previous{nullptr};
std::atomic<std::uint64_t> next_check_ns{0};
std::atomic<std::uint64_t> checked_generation{0};

void handle(int signal, siginfo_t* info, void* context);

bool is_fault(const siginfo_t* info) noexcept { return info->si_code > 0; }  // and was not sent

bool is_unreadable_page(const siginfo_t* info) noexcept {
  return info->si_code == BUS_ADRERR || info->si_code == BUS_OBJERR ||
         info->si_code == BUS_MCEERR_AR;
}

// Whether a handler returns from one and the same fault again and again: it would never end.
bool repeats_for_ever(const siginfo_t* info) noexcept {
  if (!is_fault(info)) return false;
  state.repeats = info->si_addr == state.faulted ? state.repeats + 1 : 0;
  state.faulted = info->si_addr;
  return state.repeats > max_repeats;
}

// Does what happens without any handler, once this one returns.
void end_process(int signal, const siginfo_t* info) noexcept {
  struct sigaction usual {};
  usual.sa_handler = SIG_DFL;
  sigaction(signal, &usual, nullptr);
  if (!is_fault(info)) raise(signal);  // a fault comes again by itself
}

// Lets the handler that was there before us have the signal.
void pass_on(int signal, siginfo_t* info, void* context) noexcept {
  const auto frame = reinterpret_cast<std::uintptr_t>(__builtin_frame_address(0));
  // faulthandler reinstates what it found, perhaps us, and raises the signal again: we must not ask
  // it twice. A handler that jumped away left `passing` set; our frame then lies above that one's.
  const bool comes_back = state.passing != 0 && frame < state.passing;
  const struct sigaction* const before = previous.load(std::memory_order_acquire);
  const bool has_none = before == nullptr || before->sa_handler == SIG_DFL ||
                        (before->sa_handler == SIG_IGN && is_fault(info));
  if (comes_back || has_none || repeats_for_ever(info)) return end_process(signal, info);
  if (before->sa_handler == SIG_IGN) return;
  state.passing = frame;
  if ((before->sa_flags & SA_SIGINFO) != 0) {
    before->sa_sigaction(signal, info, context);
  } else {
    before->sa_handler(signal);
  }
  state.passing = 0;
}

void handle(int signal, siginfo_t* info, void* context) {
  Guard* const guard = state.guard;
  if (guard != nullptr && is_unreadable_page(info) && guard->range->contains(info->si_addr)) {
    // Saving the mask with `place` would cost a system call each time; the kernel has saved it.
    guard->mask = static_cast<const ucontext_t*>(context)->uc_sigmask;
    siglongjmp(guard->place, 1);
  }
  pass_on(signal, info, context);
}

// Without a lock, which a fork could leave held: two threads that find the same handler note the same.
void install() noexcept {
  struct sigaction found {};
  sigaction(SIGBUS, nullptr, &found);
  if ((found.sa_flags & SA_SIGINFO) != 0 && found.sa_sigaction == &handle) return;
  const struct sigaction* const known = previous.load(std::memory_order_acquire);
  const bool is_known = known != nullptr && known->sa_sigaction == found.sa_sigaction &&
                        known->sa_flags == found.sa_flags;
  if (!is_known) previous.store(new struct sigaction(found), std::memory_order_release);
  struct sigaction ours {};
  ours.sa_sigaction = &handle;
  // Not blocked while it runs: the handler of before may raise it again. On the other stack, if the
  // thread has one, as for faulthandler.
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGBUS, &ours, nullptr);
}

// Sees to it that the signal reaches us.
void prepare() noexcept {
  if (!state.unblocked) {
    // Blocking a fault's signal does not hold it back: the kernel ends the process.
    sigset_t bus;
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &bus, nullptr);
    state.unblocked = true;
  }
  const std::uint64_t now_ns = coarse_ns();
  const std::uint64_t generation = fork_generation();
  if (now_ns < next_check_ns.load(std::memory_order_relaxed) &&
      generation == checked_generation.load(std::memory_order_relaxed)) {
    return;
  }
  install();
  next_check_ns.store(now_ns + check_interval_ns, std::memory_order_relaxed);
  checked_generation.store(generation, std::memory_order_relaxed);
}

struct Disarmed {  // when it goes out of scope, also by an exception
  explicit Disarmed(Guard* guard) noexcept : outer(guard) {}
  ~Disarmed() { state.guard = outer; }
  Disarmed(const Disarmed&) = delete;
  Disarmed& operator=(const Disarmed&) = delete;
  Guard* outer;
};

}  // namespace

bool run_guarded(const FaultRange& range, void (*work)(void*), void* argument) {
  prepare();
  Guard guard{&range, state.guard, {}, {}};
  const Disarmed disarmed(guard.outer);
  if (sigsetjmp(guard.place, 0) != 0) {
    pthread_sigmask(SIG_SETMASK, &guard.mask, nullptr);
    return false;
  }
  state.guard = &guard;
  work(argument);
  return true;
}

}  // namespace paceline
