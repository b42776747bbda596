// Collectives on communicators, blocking and not.
#include "interpose.hpp"

#define COUNT int
#define DISPLACEMENT int
#define NAME(name) name
#include "collectives.inc"
#undef COUNT
#undef DISPLACEMENT
#undef NAME

#if PACELINE_MPI_ABI != PACELINE_OPENMPI  // whose libraries do not have them
#define COUNT Count
#define DISPLACEMENT Aint
#define NAME(name) name##_c
#include "collectives.inc"
#endif

namespace paceline::mpi {

INTERPOSE(MPI_Barrier, (Comm comm), (comm),
          return collective(Operation::barrier, comm, no_root,
                            [](const Communicator&) { return 0U; }, real);)
INTERPOSE(MPI_Ibarrier, (Comm comm, Request* request), (comm, request),
          return issue_collective(Operation::barrier, comm, no_root, request,
                                  [](const Communicator&) { return 0U; }, real);)

}  // namespace paceline::mpi
