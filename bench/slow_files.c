/* A disk that takes its time: preloaded behind what records calls for files. The next open, read or write of
   the thread that armed it lasts as much longer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <time.h>
#include <unistd.h>

static _Thread_local double armed_s[3]; /* of the next open, read, write */

void slow_files_arm(int call, double seconds) { armed_s[call] = seconds; }

static void pass_time(int call) {
  const double seconds = armed_s[call];
  if (seconds <= 0) return;
  armed_s[call] = 0;
  struct timespec rest = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
  nanosleep(&rest, NULL);
}

int openat(int folder, const char* path, int flags, ...) {
  static int (*next)(int, const char*, int, ...);
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if (next == NULL) next = (int (*)(int, const char*, int, ...))dlsym(RTLD_NEXT, "openat");
  pass_time(0);
  return next(folder, path, flags, mode);
}

int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return openat(AT_FDCWD, path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return openat(AT_FDCWD, path, flags, mode);
}

ssize_t read(int descriptor, void* target, size_t count) {
  static ssize_t (*next)(int, void*, size_t);
  if (next == NULL) next = (ssize_t(*)(int, void*, size_t))dlsym(RTLD_NEXT, "read");
  pass_time(1);
  return next(descriptor, target, count);
}

ssize_t write(int descriptor, const void* source, size_t count) {
  static ssize_t (*next)(int, const void*, size_t);
  if (next == NULL) next = (ssize_t(*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write");
  pass_time(2);
  return next(descriptor, source, count);
}
