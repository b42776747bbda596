// Reads of a mapping survive when its file shrinks, and every other SIGBUS goes where it went before.
#include "paceline/fault_guard.hpp"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "paceline/page_cache.hpp"

using paceline::completes;
using paceline::FaultRange;

namespace {

constexpr std::size_t mapped_bytes = 16 * paceline::page_size;

// A mapped file of which only the first page is left.
class CutOff {
 public:
  CutOff() {
    const int descriptor = open((folder_ / "file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(descriptor >= 0 && ftruncate(descriptor, mapped_bytes) == 0);
    void* address = mmap(nullptr, mapped_bytes, PROT_READ, MAP_SHARED, descriptor, 0);
    CHECK(address != MAP_FAILED && ftruncate(descriptor, paceline::page_size) == 0);
    close(descriptor);
    bytes = {static_cast<const std::byte*>(address), mapped_bytes};
  }
  ~CutOff() { munmap(const_cast<std::byte*>(bytes.data()), bytes.size()); }
  CutOff(const CutOff&) = delete;
  CutOff& operator=(const CutOff&) = delete;

  // Touches a page that is gone.
  void touch() const {
    static_cast<void>(*const_cast<const volatile std::byte*>(&bytes[mapped_bytes - 1]));
  }

  std::span<const std::byte> bytes;

 private:
  TemporaryFolder folder_;
};

// Whether a guarded read of the file returns, and says that it is cut off.
bool survives(const CutOff& file) {
  std::vector<std::byte> target(mapped_bytes);
  const bool is_complete = completes(FaultRange(file.bytes), [&] {
    std::memcpy(target.data(), file.bytes.data(), mapped_bytes);
  });
  return !is_complete;
}

// What a process that does `work` ends with: its exit code, or minus its signal.
int end_of(const std::function<void()>& work) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(20);  // what hangs ends with SIGALRM
    work();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void install(void (*handler)(int), struct sigaction* before = nullptr) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_NODEFER;
  CHECK(sigaction(SIGBUS, &action, before) == 0);
}

// Reads until the guard has found out that another handler was installed.
void read_until_guarded_again(const CutOff& file) {
  struct sigaction before {};
  struct sigaction now {};
  CHECK(sigaction(SIGBUS, nullptr, &before) == 0);
  do {
    const auto whole = file.bytes.first(paceline::page_size);
    CHECK(completes(FaultRange(whole), [] {}));
    CHECK(sigaction(SIGBUS, nullptr, &now) == 0);
  } while (now.sa_handler == before.sa_handler);  // end_of ends what takes 20 s
}

void a_guarded_read_ends_where_the_file_does() {
  const CutOff file;
  for (int round = 0; round < 100; ++round) CHECK(survives(file));
  const auto whole = file.bytes.first(paceline::page_size);
  CHECK(completes(FaultRange(whole), [&] { CHECK(whole[0] == std::byte{0}); }));
}

void errors_and_inner_guards_pass_through() {
  const CutOff file;
  const auto throwing = [] { throw std::runtime_error("mine"); };
  CHECK_THROWS(completes(FaultRange(file.bytes), throwing), std::runtime_error);
  const CutOff other;
  bool inner = true;
  CHECK(completes(FaultRange(file.bytes), [&] { inner = !survives(other); }));
  CHECK(!inner && survives(file));
  CHECK(!completes(FaultRange(file.bytes), [&] {
    CHECK(survives(other));
    file.touch();  // the outer guard holds again
  }));
}

void threads_survive_at_the_same_time_and_with_the_signal_blocked() {
  const CutOff file;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, nullptr);
      for (int round = 0; round < 50; ++round) CHECK(survives(file));
    });
  }
  for (auto& thread : threads) thread.join();
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // they handle the signal, too

sigjmp_buf repaired;
volatile int calls = 0;
struct sigaction found {};

void jump(int) {
  calls = calls + 1;
  siglongjmp(repaired, 1);
}

void come_back(int) { calls = calls + 1; }

// As Python's faulthandler: says something, reinstates what it found, and raises the signal again.
void say_and_raise(int signal) {
  calls = calls + 1;
  if (calls > 1) _exit(9);  // asked twice
  sigaction(signal, &found, nullptr);
  raise(signal);
}

void a_fault_of_anyone_else_ends_the_process() {
  const CutOff file;
  const CutOff other;
  CHECK(end_of([&] { file.touch(); }) == -SIGBUS);
  CHECK(end_of([&] {
          CHECK(survives(file));
          file.touch();
        }) == -SIGBUS);
  CHECK(end_of([&] {
          static_cast<void>(completes(FaultRange(file.bytes), [&] { other.touch(); }));
        }) == -SIGBUS);
  CHECK(end_of([&] {
          CHECK(survives(file));
          raise(SIGBUS);
        }) == -SIGBUS);
}

void a_handler_of_before_or_after_has_what_is_not_ours() {
  const CutOff file;
  for (const bool before : {true, false}) {
    CHECK(end_of([&] {
            if (before) install(&jump);
            CHECK(survives(file));
            if (!before) {
              install(&jump);
              read_until_guarded_again(file);
            }
            for (int round = 1; round <= 3; ++round) {
              CHECK(survives(file) && calls == round - 1);
              if (sigsetjmp(repaired, 0) == 0) file.touch();
              CHECK(calls == round);
            }
            _exit(7);
          }) == 7);
  }
}

void a_handler_that_raises_again_is_asked_once() {
  const CutOff file;
  for (const bool before : {true, false}) {
    CHECK(end_of([&] {
            if (before) install(&say_and_raise, &found);
            CHECK(survives(file));
            if (!before) {
              install(&say_and_raise, &found);
              read_until_guarded_again(file);
            }
            CHECK(survives(file) && calls == 0);
            file.touch();
          }) == -SIGBUS);
  }
}

void a_handler_that_repairs_nothing_does_not_hang() {
  const CutOff file;
  CHECK(end_of([&] {
          install(&come_back);
          CHECK(survives(file));
          raise(SIGBUS);  // sent, so that returning is fine
          CHECK(calls == 1);
          file.touch();
        }) == -SIGBUS);
}

#endif

}  // namespace

int main() {
  a_guarded_read_ends_where_the_file_does();
  errors_and_inner_guards_pass_through();
  threads_survive_at_the_same_time_and_with_the_signal_blocked();
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  a_fault_of_anyone_else_ends_the_process();
  a_handler_of_before_or_after_has_what_is_not_ours();
  a_handler_that_raises_again_is_asked_once();
  a_handler_that_repairs_nothing_does_not_hang();
#endif
}
