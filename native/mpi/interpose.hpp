// How a function of MPI is put in front of the MPI's own.
//
// Each is exported by both of its names: programs call MPI_Send; Fortran bindings, and other tools
// that were linked into the program, call PMPI_Send. The one that comes first is recorded.
// Files *.inc are compiled twice, with int and with MPI_Count as the type of counts (MPI_Send_c).
#pragma once

#include "abi.hpp"
#include "next.hpp"
#include "recording.hpp"

#define PACELINE_TEXT_OF(name) #name
#define PACELINE_TEXT(name) PACELINE_TEXT_OF(name)
#define PACELINE_EXPORT extern "C" __attribute__((visibility("default")))

// `real()` calls what comes next with the program's own arguments, but for `told`, which may be
// another status than the program's: a receive tells by it how many bytes came, and from where.
#define PACELINE_INTERPOSE_AS(name, parameters, arguments, ...)                \
  PACELINE_EXPORT int name parameters {                                        \
    static Next<int parameters> next(PACELINE_TEXT(name));                     \
    [[maybe_unused]] Status* told = nullptr;                                   \
    [[maybe_unused]] const auto real = [&] { return next.get() arguments; };   \
    __VA_ARGS__                                                                \
  }

#define PACELINE_JOIN_OF(left, right) left##right
#define PACELINE_JOIN(left, right) PACELINE_JOIN_OF(left, right)

// INTERPOSE(MPI_Barrier, (Comm comm), (comm), body)
#define INTERPOSE(name, parameters, arguments, ...)                       \
  PACELINE_INTERPOSE_AS(name, parameters, arguments, __VA_ARGS__)         \
  PACELINE_INTERPOSE_AS(PACELINE_JOIN(P, name), parameters, arguments, __VA_ARGS__)

namespace paceline::mpi {

constexpr int no_root = -1000;

// Calls a collective that blocks. `bytes` is given the communicator.
template <class Bytes, class Real>
int collective(Operation operation, Comm comm, int root, Bytes&& bytes, Real&& real) {
  Call call;
  if (!call.recorded()) return real();
  const CommunicatorPointer communicator = communicator_of(comm);
  const Event event = collective_event(*communicator, operation, root, bytes(*communicator));
  call.begin();
  call.enter(event);
  const int result = real();
  call.end_blocking(event);
  return result;
}

// Calls a collective that completes at a later wait for its request.
template <class Bytes, class Real>
int issue_collective(Operation operation, Comm comm, int root, Request* request, Bytes&& bytes,
                     Real&& real) {
  Call call;
  if (!call.recorded()) return real();
  const CommunicatorPointer communicator = communicator_of(comm);
  Event event = collective_event(*communicator, operation, root, bytes(*communicator));
  event.begin_ns = call.begin();
  call.enter(event);
  const int result = real();
  if (result == success) issue(*request, {.event = event, .wildcard = nullptr});
  call.end_issue();
  return result;
}

}  // namespace paceline::mpi
