/* Many processes that ask a file system about many paths at once, as the ranks of a job do at its start.

     cc -O2 posix_storm.c -o posix_storm
     posix_storm stat|open|list NAMES PROCESSES CALLS SEED

   NAMES is a file with a path a line; of `list`, of folders. Each process does CALLS calls with paths that
   it draws: stat; open and close; or opendir, readdir to the end, closedir. Prints the seconds from when
   all may begin until the last one has ended. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static int call(const char* what, const char* path) {
  struct stat status;
  if (what[0] == 's') return stat(path, &status);
  if (what[0] == 'o') {
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    return file < 0 ? -1 : close(file);
  }
  DIR* folder = opendir(path);
  if (folder == NULL) return -1;
  int entries = 0;
  while (readdir(folder) != NULL) ++entries;
  closedir(folder);
  return entries > 2 ? 0 : -1;
}

int main(int count, char** words) {
  if (count != 6) return 2;
  FILE* file = fopen(words[2], "r");
  const size_t most = 1 << 20;
  char** paths = malloc(most * sizeof *paths);
  size_t known = 0;
  size_t room = 0;
  char* line = NULL;
  if (file == NULL || paths == NULL) return 2;
  while (known < most && getline(&line, &room, file) > 0) {
    line[strcspn(line, "\n")] = '\0';
    paths[known++] = strdup(line);
  }
  fclose(file);
  const int processes = atoi(words[3]);
  const int calls = atoi(words[4]);
  uint64_t seed = strtoull(words[5], NULL, 10);
  int gate[2];
  if (known == 0 || pipe(gate) != 0) return 2;
  for (int i = 0; i < processes; ++i) {
    const pid_t child = fork();
    if (child < 0) return 2;
    if (child > 0) continue;
    close(gate[1]);
    char byte;
    if (read(gate[0], &byte, 1) != 0) _exit(2); /* opens for all at once */
    uint64_t state = seed * 1000003 + (uint64_t)i;
    for (int k = 0; k < calls; ++k) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const char* path = paths[(state >> 33) % known];
      if (call(words[1], path) == 0) continue;
      perror(path);
      _exit(1);
    }
    _exit(0);
  }
  close(gate[0]);
  usleep(50000); /* until all wait */
  const double begin = now_s();
  close(gate[1]);
  int failed = 0;
  for (int status = 0; wait(&status) > 0;) failed |= status;
  printf("%.9f\n", now_s() - begin);
  return failed != 0;
}
