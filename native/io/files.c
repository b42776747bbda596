#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { path_room = 256, other_files = 1, program_files = 2, first_file = 3 };
enum { row_free, row_filling, row_full };

typedef struct {
  atomic_int state;
  uint32_t hash;
  char path[path_room]; /* of a longer one the end */
  atomic_uint at_once;
  atomic_uint most_at_once;
  atomic_uint_fast64_t count[IO_OPERATIONS];
  atomic_uint_fast64_t ns[IO_OPERATIONS];
  atomic_uint_fast64_t bytes[IO_OPERATIONS];
} Row;

/* launch/io.py: the run's folder, whose files are not recorded. */
static const char folder_variable[] = "_PACELINE_IO";

static Row* rows; /* NULL: nothing is recorded */
static const char* run_folder;
static size_t run_folder_length;
static _Atomic uint16_t descriptors[most_descriptors];
static void (*_Atomic attached)(const IoCall*);
static atomic_uint_fast64_t long_ns;

__attribute__((constructor)) static void start(void) {
  const char* folder = getenv(folder_variable);
  if (folder == NULL || *folder != '/') return;
  void* memory = mmap(NULL, most_files * sizeof(Row), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return;
  Row* made = memory;
  strcpy(made[other_files].path, "(other files)");
  strcpy(made[program_files].path, "(program files)");
  run_folder = folder;
  run_folder_length = strlen(folder);
  rows = made;
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static bool begins_with(const char* path, const char* start, size_t length) {
  return strncmp(path, start, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

static bool is_recorded(const char* path) {
  return !begins_with(path, "/proc", 5) && !begins_with(path, "/sys", 4) &&
         !begins_with(path, "/dev", 4) && !begins_with(path, run_folder, run_folder_length);
}

/* Modules and libraries: a program that starts looks at thousands. */
static bool is_of_program(const char* path) {
  const char* dot = strrchr(path, '.');
  if (dot != NULL && (strcmp(dot, ".py") == 0 || strcmp(dot, ".pyc") == 0 || strcmp(dot, ".so") == 0 ||
                      strcmp(dot, ".pth") == 0)) {
    return true;
  }
  return strstr(path, "/site-packages") != NULL || strstr(path, "/dist-packages") != NULL ||
         strstr(path, "/lib/python") != NULL || strstr(path, ".so.") != NULL ||
         begins_with(path, "/usr/lib", 8) || begins_with(path, "/lib", 4) || begins_with(path, "/etc", 4);
}

static uint32_t hash_of(const char* path) { /* FNV-1a */
  uint32_t hash = 2166136261u;
  for (; *path != '\0'; ++path) hash = (hash ^ (unsigned char)*path) * 16777619u;
  return hash;
}

/* Another process that fills a row may be killed meanwhile: its row is passed over. */
static unsigned row_of(const char* path) {
  const uint32_t hash = hash_of(path);
  const size_t length = strlen(path);
  const char* kept = length < path_room ? path : path + length - path_room + 1;
  for (unsigned probe = 0; probe < 64; ++probe) {
    const unsigned number = first_file + (hash + probe) % (most_files - first_file);
    Row* row = &rows[number];
    int state = row_free;
    if (atomic_compare_exchange_strong(&row->state, &state, row_filling)) {
      row->hash = hash;
      strcpy(row->path, kept);
      atomic_store_explicit(&row->state, row_full, memory_order_release);
      return number;
    }
    if (state == row_full && row->hash == hash && strcmp(row->path, kept) == 0) return number;
  }
  return other_files;
}

/* Writes the absolute path to `out` of PATH_MAX bytes; false if it is too long or the folder is not known. */
static bool make_absolute(int folder, const char* path, char* out) {
  size_t length = 0;
  if (*path != '/') {
    char name[64] = "/proc/self/cwd";
    if (folder != AT_FDCWD) snprintf(name, sizeof name, "/proc/self/fd/%d", folder);
    const long found = syscall(SYS_readlinkat, AT_FDCWD, name, out, PATH_MAX - 2);
    if (found <= 0 || *out != '/') return false;
    length = (size_t)found;
    if (*path != '\0') out[length++] = '/';
    while (path[0] == '.' && path[1] == '/') path += 2;
  }
  const size_t rest = strlen(path);
  if (length + rest >= PATH_MAX) return false;
  memcpy(out + length, path, rest + 1);
  return true;
}

unsigned file_of_path(int folder, const char* path) {
  if (rows == NULL || path == NULL) return 0;
  const int problem = errno;
  char absolute[PATH_MAX];
  const bool known = make_absolute(folder, path, absolute);
  errno = problem;
  if (!known || !is_recorded(absolute)) return 0;
  return is_of_program(absolute) ? program_files : row_of(absolute);
}

unsigned file_of(int descriptor) {
  if (rows == NULL || descriptor < 0 || descriptor >= most_descriptors) return 0;
  return atomic_load_explicit(&descriptors[descriptor], memory_order_relaxed);
}

void descriptor_opened(int descriptor, unsigned file) {
  if (rows == NULL || descriptor < 0 || descriptor >= most_descriptors) return;
  atomic_store_explicit(&descriptors[descriptor], (uint16_t)file, memory_order_relaxed);
}

void descriptor_closed(int descriptor) { descriptor_opened(descriptor, 0); }

static _Thread_local uint64_t fetch_ns;

__attribute__((visibility("default"))) uint64_t paceline_io_fetch_ns(void) { return fetch_ns; }

Use use_begins(unsigned file) {
  if (file == 0) return (Use){0, 0};
  Row* row = &rows[file];
  const unsigned at_once = atomic_fetch_add_explicit(&row->at_once, 1, memory_order_relaxed) + 1;
  unsigned most = atomic_load_explicit(&row->most_at_once, memory_order_relaxed);
  while (at_once > most &&
         !atomic_compare_exchange_weak_explicit(&row->most_at_once, &most, at_once, memory_order_relaxed,
                                                memory_order_relaxed)) {
  }
  return (Use){file, now_ns()};
}

void use_ends(Use use, IoOperation operation, ssize_t bytes) {
  if (use.file == 0) return;
  const int problem = errno;
  const uint64_t end_ns = now_ns();
  const uint64_t moved = bytes > 0 ? (uint64_t)bytes : 0;
  Row* row = &rows[use.file];
  atomic_fetch_sub_explicit(&row->at_once, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&row->count[operation], 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&row->ns[operation], end_ns - use.begin_ns, memory_order_relaxed);
  if (moved != 0) atomic_fetch_add_explicit(&row->bytes[operation], moved, memory_order_relaxed);
  if (operation <= IO_READ || operation == IO_MAP) fetch_ns += end_ns - use.begin_ns;
  void (*const sink)(const IoCall*) = atomic_load_explicit(&attached, memory_order_acquire);
  if (sink != NULL && end_ns - use.begin_ns >= atomic_load_explicit(&long_ns, memory_order_relaxed)) {
    sink(&(IoCall){operation, row->path, use.begin_ns, end_ns, moved});
  }
  errno = problem;
}

__attribute__((visibility("default"))) void paceline_io_attach(void (*sink)(const IoCall* call),
                                                               uint64_t least_ns) {
  atomic_store(&long_ns, least_ns);
  atomic_store(&attached, sink);
}

__attribute__((visibility("default"))) void paceline_io_files(void (*each)(const IoFile* file, void* context),
                                                              void* context) {
  if (rows == NULL) return;
  for (unsigned number = other_files; number < most_files; ++number) {
    Row* row = &rows[number];
    if (number >= first_file && atomic_load_explicit(&row->state, memory_order_acquire) != row_full) continue;
    IoFile file = {.path = row->path, .most_at_once = atomic_load(&row->most_at_once)};
    uint64_t calls = 0;
    for (int operation = 0; operation < IO_OPERATIONS; ++operation) {
      file.count[operation] = atomic_load(&row->count[operation]);
      file.ns[operation] = atomic_load(&row->ns[operation]);
      file.bytes[operation] = atomic_load(&row->bytes[operation]);
      calls += file.count[operation];
    }
    if (calls != 0) each(&file, context);
  }
}
