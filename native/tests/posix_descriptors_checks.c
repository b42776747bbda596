/* The table of user-level descriptors (native/posix/descriptors.c) without the hooks, among threads. What the
   test in C++ calls; it has made the pack. */
#include "../posix/shim.h"

#include <dlfcn.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK(condition)                                                                  \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);           \
      abort();                                                                            \
    }                                                                                     \
  } while (false)

enum { samples = 4, sample_bytes = 5000, rounds = 2000, threads = 4 };

static Mount mount;
static PackStatus statuses[samples];
static PackEntry entries[samples];
static atomic_int latest; /* a number that some thread has opened, and may have closed */

/* What the table needs of the other files. */
uintptr_t next_function(const char* name) { return (uintptr_t)dlsym(RTLD_DEFAULT, name); }
PackFiles* mount_pack(Mount* which) { return atomic_load(&which->pack); }
void free_mount_locks(void) {}
void fill_stat(const Mount* which, const PackStatus* from, struct stat* to) {
  (void)which;
  memset(to, 0, sizeof *to);
  to->st_mtim.tv_sec = from->mtime_ns / 1000000000;
}

static void check_bytes(const unsigned char* bytes, size_t count, uint64_t sample, size_t from) {
  for (size_t i = 0; i < count; ++i) CHECK(bytes[i] == (sample * 31 + from + i) % 251);
}

static void check_part(OpenFile* file, unsigned round) {
  unsigned char bytes[200];
  const size_t from = round * 37 % (sample_bytes - sizeof bytes);
  CHECK(read_file(file, bytes, sizeof bytes, (int64_t)from) == (ssize_t)sizeof bytes);
  check_bytes(bytes, sizeof bytes, file->entry.number, from);
}

/* Opens, reads and closes; looks at a file of another thread, which may close it meanwhile. */
static void* use_files(void* argument) {
  for (unsigned round = 0; round < rounds; ++round) {
    const unsigned which = (round + (unsigned)(uintptr_t)argument) % samples;
    const int number = new_descriptor(&mount, entries[which], &statuses[which], O_RDONLY);
    CHECK(number >= first_descriptor);
    atomic_store(&latest, number);
    OpenFile* file = acquire(number);
    CHECK(file != NULL && file->entry.number == entries[which].number);
    check_part(file, round);
    if (round % 16 == 0) {
      const int kernel = promote(file);
      CHECK(kernel >= 0 && is_hidden(kernel));
      check_part(file, round + 1);
    }
    CHECK(close_descriptor(file) == 0);
    OpenFile* other = acquire(atomic_load(&latest));
    if (other == NULL) continue;
    check_part(other, round);
    release(other);
  }
  return NULL;
}

static OpenFile* shared;

static void* read_to_the_end(void* total) {
  unsigned char bytes[7];
  ssize_t length;
  while ((length = read_file(shared, bytes, sizeof bytes, -1)) > 0) *(size_t*)total += (size_t)length;
  CHECK(length == 0);
  return NULL;
}

static void* promote_shared(void* unused) {
  CHECK(promote(shared) >= 0);
  return unused;
}

/* Each byte is read once, by whichever thread, whether the position is still ours or the kernel's. */
static void check_one_position(void) {
  for (int round = 0; round < 50; ++round) {
    const int number = new_descriptor(&mount, entries[0], &statuses[0], O_RDONLY);
    size_t totals[2] = {0, 0};
    pthread_t running[3];
    shared = acquire(number);
    CHECK(shared != NULL && pthread_create(&running[0], NULL, read_to_the_end, &totals[0]) == 0 &&
          pthread_create(&running[1], NULL, read_to_the_end, &totals[1]) == 0 &&
          pthread_create(&running[2], NULL, promote_shared, NULL) == 0);
    for (int i = 0; i < 3; ++i) pthread_join(running[i], NULL);
    CHECK(totals[0] + totals[1] == sample_bytes);
    CHECK(move_position(shared, 0, SEEK_CUR) == sample_bytes);
    CHECK(close_descriptor(shared) == 0);
  }
}

static void check_hidden_numbers(void) {
  const int number = new_descriptor(&mount, entries[1], &statuses[1], O_RDONLY);
  OpenFile* file = acquire(number);
  CHECK(file != NULL && move_position(file, 11, SEEK_SET) == 11);
  const int kernel = promote(file);
  CHECK(is_hidden(kernel) && next_hidden(0) == kernel && next_hidden(kernel + 1) == -1);
  CHECK(vacate(kernel) == 0 && !is_hidden(kernel) && kernel_of(file) != kernel);
  close(kernel); /* it is the program's now */
  CHECK(is_hidden(kernel_of(file)) && move_position(file, 0, SEEK_CUR) == 11);
  check_part(file, 3);
  CHECK(close_descriptor(file) == 0 && next_hidden(0) == -1);
  CHECK(!is_hidden(-1) && !is_hidden(INT_MAX) && acquire(number) == NULL);
}

static void check_exhaustion(void) {
  int last = -1;
  int count = 0;
  while ((last = new_descriptor(&mount, entries[0], &statuses[0], O_RDONLY)) >= 0) ++count;
  CHECK(errno == EMFILE && count == max_descriptors);
  CHECK(acquire(first_descriptor + max_descriptors) == NULL && acquire(INT_MAX) == NULL);
  for (int i = 0; i < max_descriptors; ++i) {
    OpenFile* file = acquire(first_descriptor + i);
    CHECK(file != NULL && close_descriptor(file) == 0);
  }
  /* No descriptor of the kernel's: promote fails, reading goes on. */
  const int number = new_descriptor(&mount, entries[0], &statuses[0], O_RDONLY);
  OpenFile* file = acquire(number);
  struct rlimit before;
  CHECK(file != NULL && getrlimit(RLIMIT_NOFILE, &before) == 0);
  const struct rlimit none = {0, before.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  CHECK(promote(file) == -1 && errno == EMFILE);
  check_part(file, 1);
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0 && promote(file) >= 0);
  check_part(file, 2);
  CHECK(close_descriptor(file) == 0);
}

void check_descriptors(const char* place);
void check_descriptors(const char* place) {
  atomic_store(&mount.pack, pack_files_open(place, NULL, NULL));
  CHECK(atomic_load(&mount.pack) != NULL);
  for (unsigned i = 0; i < samples; ++i) {
    char name[16];
    const int length = snprintf(name, sizeof name, "class/%u", i);
    CHECK(pack_files_find(mount.pack, name, (size_t)length, &entries[i], &statuses[i]) == 0);
    CHECK(statuses[i].size == sample_bytes);
  }
  const PackEntry wrong = {PACK_FILE, 1000};
  char name[PATH_MAX];
  size_t length;
  CHECK(pack_files_name(mount.pack, wrong, name, &length) == ENOENT);
  check_hidden_numbers();
  check_one_position();
  pthread_t running[threads];
  for (uintptr_t i = 0; i < threads; ++i) {
    CHECK(pthread_create(&running[i], NULL, use_files, (void*)i) == 0);
  }
  for (int i = 0; i < threads; ++i) pthread_join(running[i], NULL);
  check_exhaustion();
}
