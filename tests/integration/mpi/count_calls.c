/* Another tool in the same process, as Score-P is: it wraps some calls of MPI by the profiling
   interface, and says at the end how often it was called. Preloaded, or linked into the program. */
#include <stdio.h>

#define WRAP(name, parameters, arguments) \
  int P##name parameters;                 \
  int name parameters {                   \
    ++calls;                              \
    return P##name arguments;             \
  }

static long calls;

#ifdef OPEN_MPI_HANDLES
typedef void* Handle;
#else
typedef int Handle;
#endif

WRAP(MPI_Allreduce, (const void* in, void* out, int n, Handle type, Handle op, Handle comm),
     (in, out, n, type, op, comm))
WRAP(MPI_Isend, (const void* in, int n, Handle type, int to, int tag, Handle comm, void* request),
     (in, n, type, to, tag, comm, request))
WRAP(MPI_Waitall, (int n, void* requests, void* statuses), (n, requests, statuses))

int PMPI_Finalize(void);
int MPI_Finalize(void) {
  fprintf(stderr, "tool: %ld calls\n", calls);
  return PMPI_Finalize();
}
