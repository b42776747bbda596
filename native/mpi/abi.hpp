// The binary interfaces of MPI libraries: what their handles, constants and statuses are. One
// library is built for each, by PACELINE_MPI_ABI. No header of an MPI is needed: these values
// cannot change without breaking every program that was built with that MPI.
//
//   mpich      libmpi.so.12, libmpich.so.12: MPICH, Intel MPI, MVAPICH, Cray
//   openmpi    libmpi.so.40: Open MPI 4 and 5
//   standard   libmpi_abi.so: the ABI of the standard itself, from MPI 5.0 on
#pragma once

#include <cstddef>
#include <cstdint>

#define PACELINE_MPICH 1
#define PACELINE_OPENMPI 2
#define PACELINE_STANDARD 3

#ifndef PACELINE_MPI_ABI
#error "PACELINE_MPI_ABI names the binary interface"
#endif

namespace paceline::mpi {

using Aint = std::intptr_t;
using Count = std::int64_t;
using Offset = std::int64_t;

#if PACELINE_MPI_ABI == PACELINE_MPICH
using Handle = int;
#else
using Handle = void*;
#endif
using Comm = Handle;
using Datatype = Handle;
using Group = Handle;
using Info = Handle;
using Message = Handle;
using Op = Handle;
using Request = Handle;
using Win = Handle;
using File = void*;

constexpr int success = 0;
constexpr int undefined = -32766;

#if PACELINE_MPI_ABI == PACELINE_MPICH

struct Status {
  int count_low;
  int count_high_and_cancelled;
  int source;
  int tag;
  int error;
};

constexpr bool has_large_counts = true;
constexpr int any_source = -2;
constexpr int any_tag = -1;
constexpr int proc_null = -1;
constexpr int root_here = -3;  // MPI_ROOT, of an intercommunicator
constexpr int no_precede = 8192;
constexpr std::intptr_t in_place = -1;
constexpr std::intptr_t ignored_status = 1;
inline Comm world() noexcept { return 0x44000000; }
inline Comm self() noexcept { return 0x44000001; }
inline Comm no_comm() noexcept { return 0x04000000; }
inline Request no_request() noexcept { return 0x2c000000; }
inline bool was_cancelled(const Status& status) noexcept {
  return (status.count_high_and_cancelled & 1) != 0;
}
inline std::uint64_t byte_count(const Status& status) noexcept {
  const auto high = static_cast<unsigned>(status.count_high_and_cancelled) >> 1;
  return static_cast<std::uint64_t>(high) << 32 | static_cast<unsigned>(status.count_low);
}

#elif PACELINE_MPI_ABI == PACELINE_OPENMPI

// Objects of the library, whose addresses are the handles.
void* object(const char* name) noexcept;

struct Status {
  int source;
  int tag;
  int error;
  int cancelled;
  std::size_t bytes;
};

constexpr bool has_large_counts = false;
constexpr int any_source = -1;
constexpr int any_tag = -1;
constexpr int proc_null = -2;
constexpr int root_here = -4;
constexpr int no_precede = 2;
constexpr std::intptr_t in_place = 1;
constexpr std::intptr_t ignored_status = 0;
inline Comm world() noexcept {
  static Comm const handle = object("ompi_mpi_comm_world");
  return handle;
}
inline Comm self() noexcept {
  static Comm const handle = object("ompi_mpi_comm_self");
  return handle;
}
inline Comm no_comm() noexcept {
  static Comm const handle = object("ompi_mpi_comm_null");
  return handle;
}
inline Request no_request() noexcept {
  static Request const handle = object("ompi_request_null");
  return handle;
}
inline bool was_cancelled(const Status& status) noexcept { return status.cancelled != 0; }
inline std::uint64_t byte_count(const Status& status) noexcept { return status.bytes; }

#elif PACELINE_MPI_ABI == PACELINE_STANDARD

struct Status {
  int source;
  int tag;
  int error;
  int reserved[5];  // the library's own
};

constexpr bool has_large_counts = true;
constexpr int any_source = -1;
constexpr int any_tag = -2;
constexpr int proc_null = -3;
constexpr int root_here = -4;
constexpr int no_precede = 2048;
constexpr std::intptr_t in_place = 1;
constexpr std::intptr_t ignored_status = 0;
inline void* handle(std::intptr_t value) noexcept { return reinterpret_cast<void*>(value); }
inline Comm world() noexcept { return handle(0x101); }
inline Comm self() noexcept { return handle(0x102); }
inline Comm no_comm() noexcept { return handle(0x100); }
inline Request no_request() noexcept { return handle(0x180); }
// A status is opaque here: the library is asked.
bool was_cancelled(const Status& status) noexcept;
std::uint64_t byte_count(const Status& status) noexcept;

#endif

inline bool is_in_place(const void* buffer) noexcept {
  return reinterpret_cast<std::intptr_t>(buffer) == in_place;
}
inline bool is_ignored(const Status* status) noexcept {
  return reinterpret_cast<std::intptr_t>(status) == ignored_status;
}

// A handle as a key of a table.
template <class Any>
std::uintptr_t key_of(Any handle) noexcept {
  if constexpr (sizeof(Any) == sizeof(int)) {
    return static_cast<unsigned>(handle);
  } else {
    return reinterpret_cast<std::uintptr_t>(handle);
  }
}

}  // namespace paceline::mpi
