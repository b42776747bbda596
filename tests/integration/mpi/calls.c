/* One of each: messages of all kinds, communicators, windows, files. Two ranks or more; rank r
   sends to r + 1. What each call moves stands beside it, for the test that reads the trace. calls FILE */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { N = 4 };

static int rank, size, next, previous;
static int in[64], out[64];

static void messages(void) {
  MPI_Request requests[2];
  MPI_Status status;
  int flag = 0, index;
  MPI_Message message;
  /* tag 1: 16 bytes by Send and a receive of any source and tag, larger than the message */
  if (rank % 2 == 0) {
    MPI_Send(out, N, MPI_INT, next, 1, MPI_COMM_WORLD);
    MPI_Recv(in, 64, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  } else {
    MPI_Recv(in, 64, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
    MPI_Send(out, N, MPI_INT, next, 1, MPI_COMM_WORLD);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  /* tag 2: 8 bytes by Sendrecv */
  MPI_Sendrecv(out, 2, MPI_INT, next, 2, in, 2, MPI_INT, previous, 2, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
  /* tag 3: 24 bytes by Isend and Irecv, completed by Waitany and Test */
  MPI_Irecv(in, 6, MPI_INT, previous, 3, MPI_COMM_WORLD, &requests[0]);
  MPI_Isend(out, 6, MPI_INT, next, 3, MPI_COMM_WORLD, &requests[1]);
  MPI_Waitany(2, requests, &index, MPI_STATUS_IGNORE);
  while (!flag) MPI_Test(&requests[1 - index], &flag, MPI_STATUS_IGNORE);
  /* tag 4: 4 bytes, twice, by persistent requests */
  MPI_Recv_init(in, 1, MPI_INT, previous, 4, MPI_COMM_WORLD, &requests[0]);
  MPI_Send_init(out, 1, MPI_INT, next, 4, MPI_COMM_WORLD, &requests[1]);
  for (int i = 0; i < 2; ++i) {
    MPI_Startall(2, requests);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
  }
  MPI_Request_free(&requests[0]);
  MPI_Request_free(&requests[1]);
  /* tag 5: 12 bytes, matched by a probe */
  MPI_Isend(out, 3, MPI_INT, next, 5, MPI_COMM_WORLD, &requests[0]);
  MPI_Mprobe(previous, 5, MPI_COMM_WORLD, &message, &status);
  MPI_Mrecv(in, 3, MPI_INT, &message, MPI_STATUS_IGNORE);
  MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
  /* nobody */
  MPI_Send(out, 1, MPI_INT, MPI_PROC_NULL, 6, MPI_COMM_WORLD);
#if MPI_VERSION >= 4 && !defined(OPEN_MPI)
  /* tag 7: 20 bytes by the names with large counts */
  MPI_Irecv_c(in, 5, MPI_INT, previous, 7, MPI_COMM_WORLD, &requests[0]);
  MPI_Send_c(out, 5, MPI_INT, next, 7, MPI_COMM_WORLD);
  MPI_Wait(&requests[0], MPI_STATUS_IGNORE);
#endif
}

static void collectives(MPI_Comm comm) {
  int counts[64], at[64], members;
  MPI_Comm_size(comm, &members);
  for (int i = 0; i < members; ++i) counts[i] = 1, at[i] = i;
  MPI_Bcast(in, N, MPI_INT, members - 1, comm);
  MPI_Reduce(out, in, N, MPI_INT, MPI_SUM, 0, comm);
  MPI_Allreduce(MPI_IN_PLACE, in, N, MPI_INT, MPI_SUM, comm);
  MPI_Gather(out, 1, MPI_INT, in, 1, MPI_INT, 0, comm);
  MPI_Gatherv(out, 1, MPI_INT, in, counts, at, MPI_INT, 0, comm);
  MPI_Scatter(out, 1, MPI_INT, in, 1, MPI_INT, 0, comm);
  MPI_Scatterv(out, counts, at, MPI_INT, in, 1, MPI_INT, 0, comm);
  MPI_Allgather(out, 1, MPI_INT, in, 1, MPI_INT, comm);
  MPI_Allgatherv(out, 1, MPI_INT, in, counts, at, MPI_INT, comm);
  MPI_Alltoall(out, 1, MPI_INT, in, 1, MPI_INT, comm);
  MPI_Alltoallv(out, counts, at, MPI_INT, in, counts, at, MPI_INT, comm);
  MPI_Reduce_scatter(out, in, counts, MPI_INT, MPI_SUM, comm);
  MPI_Reduce_scatter_block(out, in, 1, MPI_INT, MPI_SUM, comm);
  MPI_Scan(out, in, 1, MPI_INT, MPI_SUM, comm);
  MPI_Request request;
  MPI_Iallreduce(out, in, 2, MPI_INT, MPI_SUM, comm, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  MPI_Ibarrier(comm, &request);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
}

static void windows(void) {
  MPI_Win window;
  int* memory;
  MPI_Win_allocate(64 * sizeof(int), sizeof(int), MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &window);
  MPI_Win_fence(0, window);
  MPI_Put(out, 10, MPI_INT, next, 0, 10, MPI_INT, window);
  MPI_Win_fence(0, window);
  MPI_Get(in, 11, MPI_INT, next, 0, 11, MPI_INT, window);
  MPI_Accumulate(out, 12, MPI_INT, next, 16, 12, MPI_INT, MPI_SUM, window);
  MPI_Win_fence(0, window);
  MPI_Win_free(&window);
}

static void files(const char* name) {
  MPI_File file;
  MPI_File_open(MPI_COMM_WORLD, name, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file);
  MPI_File_write_at_all(file, rank * 64, out, 16, MPI_INT, MPI_STATUS_IGNORE);
  MPI_File_read_at(file, rank * 64, in, 8, MPI_INT, MPI_STATUS_IGNORE);
  MPI_File_close(&file);
}

int main(int argc, char** argv) {
  int provided;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  next = (rank + 1) % size, previous = (rank + size - 1) % size;
  for (int i = 0; i < 64; ++i) out[i] = 100 * rank + i;
  messages();
  collectives(MPI_COMM_WORLD);
  MPI_Comm copy, half, none;
  MPI_Comm_dup(MPI_COMM_WORLD, &copy);
  MPI_Barrier(copy);
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  MPI_Allreduce(out, in, 1, MPI_INT, MPI_SUM, half);
  MPI_Comm_split(MPI_COMM_WORLD, rank == 0 ? MPI_UNDEFINED : 0, 0, &none);
  if (none != MPI_COMM_NULL) {
    MPI_Barrier(none);
    MPI_Comm_free(&none);
  }
  MPI_Comm_free(&half);
  MPI_Comm_free(&copy);
  MPI_Comm_dup(MPI_COMM_WORLD, &copy); /* may have the handle of one that is gone */
  MPI_Barrier(copy);
  MPI_Comm_free(&copy);
  windows();
  if (argc > 1) files(argv[1]);
  long sum = 0;
  for (int i = 0; i < 64; ++i) sum = sum * 31 + in[i];
  MPI_Finalize();
  if (rank == 0) printf("sum %ld\n", sum);
  return 0;
}
