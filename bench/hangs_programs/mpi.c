/* The same in C: FAULT RANK STEP. */
#include <fcntl.h>
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

void hold_lock(void) {
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  pthread_mutex_lock(&lock);
}

void read_fifo(void) {
  char path[] = "/tmp/fifo-XXXXXX", byte;
  if (mkdtemp(path) == NULL || chdir(path) != 0 || mkfifo("fifo", 0600) != 0) exit(1);
  const int file = open("fifo", O_RDONLY);
  if (read(file, &byte, 1) != 1) exit(1);
}

void compute(double seconds) {
  struct timespec begin, now;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  do {
    clock_gettime(CLOCK_MONOTONIC, &now);
  } while ((double)(now.tv_sec - begin.tv_sec) < seconds);
}

int main(int count, char** words) {
  MPI_Init(&count, &words);
  int rank, size;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  double values[1000] = {0}, sums[1000];
  const char* fault = words[1];
  for (int step = 0; step < 12; ++step) {
    if (step == atoi(words[3]) && rank == atoi(words[2])) {
      struct timespec now;
      clock_gettime(CLOCK_REALTIME, &now);
      printf("FAULT %ld.%09ld\n", (long)now.tv_sec, now.tv_nsec);
      fflush(stdout);
      if (strcmp(fault, "lock") == 0) hold_lock();
      if (strcmp(fault, "fifo") == 0) read_fifo();
      if (strcmp(fault, "stop") == 0) kill(getpid(), SIGSTOP);
      if (strcmp(fault, "die") == 0) _exit(0);
      if (strncmp(fault, "slow-compile-", 13) == 0) compute(atof(fault + 13));
      if (strcmp(fault, "skip") == 0) continue;
      if (strcmp(fault, "order") == 0) MPI_Bcast(values, 1000, MPI_DOUBLE, 0, MPI_COMM_WORLD);
      if (strcmp(fault, "message") == 0) {
        MPI_Recv(sums, 1000, MPI_DOUBLE, (rank + 1) % size, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      }
    }
    MPI_Allreduce(values, sums, 1000, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Bcast(sums, 1000, MPI_DOUBLE, 0, MPI_COMM_WORLD);
  }
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  return 0;
}
