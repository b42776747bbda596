/* Two ranks send a message of 1 KiB to and fro, and say how long a round trip took, block by block; then
   each sends to itself, where no other rank hides what a call costs. mpi_pingpong BLOCKS ROUND_TRIPS */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { BYTES = 1024 };

int main(int argc, char** argv) {
  static char buffer[BYTES];
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const int blocks = argc > 1 ? atoi(argv[1]) : 10;
  const int trips = argc > 2 ? atoi(argv[2]) : 10000;
  for (int block = -1; block < blocks; ++block) { /* the first warms up */
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = MPI_Wtime();
    for (int trip = 0; trip < trips; ++trip) {
      if (rank == 0) {
        MPI_Send(buffer, BYTES, MPI_BYTE, 1, 0, MPI_COMM_WORLD);
        MPI_Recv(buffer, BYTES, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      } else if (rank == 1) {
        MPI_Recv(buffer, BYTES, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        MPI_Send(buffer, BYTES, MPI_BYTE, 0, 0, MPI_COMM_WORLD);
      }
    }
    const double seconds = MPI_Wtime() - begin;
    if (rank == 0 && block >= 0) printf("trip %.12g\n", seconds / trips);
  }
  for (int block = -1; block < blocks; ++block) {
    const double begin = MPI_Wtime();
    for (int call = 0; call < trips; ++call) {
      MPI_Send(buffer, BYTES, MPI_BYTE, rank, 1, MPI_COMM_SELF);
      MPI_Recv(buffer, BYTES, MPI_BYTE, rank, 1, MPI_COMM_SELF, MPI_STATUS_IGNORE);
    }
    const double seconds = MPI_Wtime() - begin;
    if (rank == 0 && block >= 0) printf("self %.12g\n", seconds / trips / 2);
  }
  MPI_Finalize();
  return 0;
}
