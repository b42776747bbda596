// One-sided communication. A put, get or accumulate is an event of its origin alone: from the call
// to its return, since nothing tells when its bytes have moved.
#include "interpose.hpp"

namespace paceline::mpi {
namespace {

template <class Real>
int make_window(Comm comm, Win* window, Real&& real) {
  Call call;
  if (!call.recorded()) return real();
  const CommunicatorPointer from = communicator_of(comm);
  const Event event = collective_event(*from, Operation::make_window, no_root, 0);
  call.begin();
  call.enter(event);
  const int result = real();
  call.end_blocking(event);
  if (result == success) made_window(comm, *window);
  return result;
}

template <class Bytes, class Real>
int access(Access kind, Win window, int target, Bytes&& bytes, Real&& real) {
  Call call;
  if (!call.recorded() || target == proc_null) return real();
  const CommunicatorPointer on = window_of(window);
  if (on == nullptr) return real();  // made by a call that this library does not see
  std::vector<Issued> issued;
  issued.push_back({.event = access_event(*on, kind, target, bytes()), .wildcard = nullptr});
  issued.front().event.begin_ns = call.begin();
  issued.front().event.flags |= completion_unknown;
  const int result = real();
  Call::end_test(issued);
  call.end_issue();
  return result;
}

}  // namespace
}  // namespace paceline::mpi

#define COUNT int
#define UNIT int
#define NAME(name) name
#include "windows.inc"
#undef COUNT
#undef UNIT
#undef NAME

#if PACELINE_MPI_ABI != PACELINE_OPENMPI  // whose libraries do not have them
#define COUNT Count
#define UNIT Aint
#define NAME(name) name##_c
#include "windows.inc"
#endif

namespace paceline::mpi {

INTERPOSE(MPI_Win_create_dynamic, (Info info, Comm comm, Win* window), (info, comm, window),
          return make_window(comm, window, real);)

INTERPOSE(MPI_Win_fence, (int assertion, Win window), (assertion, window),
          Call call;
          const CommunicatorPointer on = call.recorded() ? window_of(window) : nullptr;
          if (on == nullptr) return real();
          // A fence that nothing precedes need not wait for the others.
          const bool opens = (assertion & no_precede) != 0;
          const Event event = collective_event(
              *on, opens ? Operation::open_fence : Operation::fence, no_root, 0);
          call.begin();
          call.enter(event);
          const int result = real();
          call.end_blocking(event);
          return result;)

// What waits for bytes to have moved, or for the other side.
#define LIKE_FLUSH(name, parameters, arguments)           \
  INTERPOSE(name, parameters, arguments, Call call;       \
            if (!call.recorded()) return real();          \
            call.begin();                                 \
            const int result = real();                    \
            call.end_wait(unnamed_wait());                \
            return result;)
LIKE_FLUSH(MPI_Win_flush, (int target, Win window), (target, window))
LIKE_FLUSH(MPI_Win_flush_all, (Win window), (window))
LIKE_FLUSH(MPI_Win_unlock, (int target, Win window), (target, window))
LIKE_FLUSH(MPI_Win_unlock_all, (Win window), (window))
LIKE_FLUSH(MPI_Win_complete, (Win window), (window))
LIKE_FLUSH(MPI_Win_wait, (Win window), (window))
#undef LIKE_FLUSH

INTERPOSE(MPI_Win_free, (Win * window), (window),
          Call call;
          if (call.recorded()) forget_window(*window);
          return real();)

}  // namespace paceline::mpi
