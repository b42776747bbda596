/* Two ranks send a message of 1 KiB to and fro, and say how long half a round trip took, block by
   block. A rank by itself sends to itself, where no other rank hides what a call costs, and says
   how long the thread ran for a call. mpi_pingpong BLOCKS ROUND_TRIPS */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { BYTES = 1024 };

static double thread_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int main(int argc, char** argv) {
  static char buffer[2 * BYTES];
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int blocks = argc > 1 ? atoi(argv[1]) : 10;
  const int trips = argc > 2 ? atoi(argv[2]) : 10000;
  for (int block = -1; block < blocks; ++block) { /* the first warms up */
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = size == 1 ? thread_s() : MPI_Wtime();
    for (int trip = 0; trip < trips; ++trip) {
      if (size == 1) {
        MPI_Request request;
        MPI_Irecv(buffer, BYTES, MPI_BYTE, 0, 0, MPI_COMM_WORLD, &request);
        MPI_Send(buffer + BYTES, BYTES, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
      } else if (rank == 0) {
        MPI_Send(buffer, BYTES, MPI_BYTE, size - 1, 0, MPI_COMM_WORLD);
        MPI_Recv(buffer, BYTES, MPI_BYTE, size - 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      } else if (rank == size - 1) {
        MPI_Recv(buffer, BYTES, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(buffer, BYTES, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
      }
    }
    const double seconds = (size == 1 ? thread_s() : MPI_Wtime()) - begin;
    if (rank == 0 && block >= 0) printf("call %.12g\n", seconds / trips / (size == 1 ? 3 : 2));
  }
  MPI_Finalize();
  return 0;
}
