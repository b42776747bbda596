// MPI-IO. Reads are input and writes are checkpoints, on the location of the thread: input and
// output stand beside communication in every analysis.
#include "interpose.hpp"

namespace paceline::mpi {
namespace {

template <class Bytes, class Real>
int transfer(const char* name, bool writes, Bytes&& bytes, Real&& real) {
  Call call;
  if (!call.recorded()) return real();
  const Event event = file_event(name, writes, bytes());
  call.begin();
  const int result = real();
  call.end_local(event);
  return result;
}

}  // namespace

// Each of these names exists with _at, which gives the place, and with _all, for all ranks at once.
#define TRANSFER(name, large, writes, buffer_type)                                               \
  INTERPOSE(name##large,                                                                         \
            (File file, buffer_type buffer, COUNT n, Datatype type, Status* status),             \
            (file, buffer, n, type, status),                                                     \
            return transfer(#name, writes, [&] { return bytes_of(n, type); }, real);)
#define TRANSFER_AT(name, large, writes, buffer_type)                                            \
  INTERPOSE(name##large,                                                                         \
            (File file, Offset at, buffer_type buffer, COUNT n, Datatype type, Status* status),  \
            (file, at, buffer, n, type, status),                                                 \
            return transfer(#name, writes, [&] { return bytes_of(n, type); }, real);)
#define ALL_TRANSFERS(large)                                   \
  TRANSFER(MPI_File_read, large, false, void*)                 \
  TRANSFER(MPI_File_read_all, large, false, void*)             \
  TRANSFER(MPI_File_read_shared, large, false, void*)          \
  TRANSFER(MPI_File_read_ordered, large, false, void*)         \
  TRANSFER_AT(MPI_File_read_at, large, false, void*)           \
  TRANSFER_AT(MPI_File_read_at_all, large, false, void*)       \
  TRANSFER(MPI_File_write, large, true, const void*)           \
  TRANSFER(MPI_File_write_all, large, true, const void*)       \
  TRANSFER(MPI_File_write_shared, large, true, const void*)    \
  TRANSFER(MPI_File_write_ordered, large, true, const void*)   \
  TRANSFER_AT(MPI_File_write_at, large, true, const void*)     \
  TRANSFER_AT(MPI_File_write_at_all, large, true, const void*)

#define COUNT int
ALL_TRANSFERS()
#undef COUNT
#if PACELINE_MPI_ABI != PACELINE_OPENMPI  // whose libraries do not have them
#define COUNT Count
ALL_TRANSFERS(_c)
#undef COUNT
#endif

INTERPOSE(MPI_File_open, (Comm comm, const char* name, int mode, Info info, File* file),
          (comm, name, mode, info, file),
          return collective(Operation::open_file, comm, no_root,
                            [](const Communicator&) { return std::uint64_t{0}; }, real);)
INTERPOSE(MPI_File_close, (File * file), (file),
          return transfer("MPI_File_close", true, [] { return std::uint64_t{0}; }, real);)
INTERPOSE(MPI_File_sync, (File file), (file),
          return transfer("MPI_File_sync", true, [] { return std::uint64_t{0}; }, real);)

}  // namespace paceline::mpi
