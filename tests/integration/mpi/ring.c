/* A ring: each rank sends to the next (8 * (rank + 1) bytes a message), then all add up. The bytes
   of each pair are known, so that a trace can be checked exactly. ring ROUNDS [LATE_RANK LATE_US] */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void compute(double seconds) {
  const double end = now_s() + seconds;
  while (now_s() < end) continue;
}

int main(int argc, char** argv) {
  int rank, size;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const int rounds = argc > 1 ? atoi(argv[1]) : 10;
  const int late = argc > 3 ? atoi(argv[2]) : -1;
  const double late_s = argc > 3 ? atof(argv[3]) / 1e6 : 0;
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  double* in = calloc((size_t)size + 1, sizeof *in);
  double* out = calloc((size_t)size + 1, sizeof *out);
  double sum = 0;
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  for (int round = 0; round < rounds; ++round) {
    MPI_Request requests[2];
    MPI_Irecv(in, size, MPI_DOUBLE, previous, 7, MPI_COMM_WORLD, &requests[0]);
    out[0] = rank + round;
    MPI_Isend(out, rank + 1, MPI_DOUBLE, next, 7, MPI_COMM_WORLD, &requests[1]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    if (late_s > 0) compute(rank == late ? 0.002 + late_s : 0.002);
    double part = in[0];
    MPI_Allreduce(&part, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Bcast(&sum, 1, MPI_DOUBLE, 0, half);
  }
  MPI_Comm_free(&half);
  if (rank == 0) printf("sum %.17g\n", sum);
  MPI_Finalize();
  return 0;
}
