/* Hooks for C streams. The C library opens a stream's file, and reads it, by calls that no hook sees: so
   a stream gets a true descriptor. */
#include "shim.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "aliases.h"

/* The flags of open that a mode of fopen means; -1: none. */
static int flags_of(const char* mode) {
  const char* plus = strpbrk(mode, "+,");
  const bool updates = plus != NULL && *plus == '+';
  int flags = strchr(mode, 'e') != NULL ? O_CLOEXEC : 0;
  if (strchr(mode, 'x') != NULL) flags |= O_EXCL;
  switch (mode[0]) {
    case 'r':
      return flags | (updates ? O_RDWR : O_RDONLY);
    case 'w':
      return flags | O_CREAT | O_TRUNC | (updates ? O_RDWR : O_WRONLY);
    case 'a':
      return flags | O_CREAT | O_APPEND | (updates ? O_RDWR : O_WRONLY);
    default:
      return -1;
  }
}

/* One of the kernel's, for the same file. */
static int kernel_copy(int descriptor) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return fail(EBADF);
  const bool closes_on_exec = atomic_load(&file->closes_on_exec);
  int own;
  if (file->entry.kind == PACK_FOLDER) { /* any will do: it cannot be read through a stream */
    own = REAL(open)("/proc/self/fdinfo", O_RDONLY | O_DIRECTORY | (closes_on_exec ? O_CLOEXEC : 0));
  } else {
    const int kernel = promote(file);
    own = kernel < 0 ? -1 : REAL(fcntl)(kernel, closes_on_exec ? F_DUPFD_CLOEXEC : F_DUPFD, 0);
  }
  release(file);
  return own;
}

static int open_kernel(const Place* place, const char* mode) {
  const int flags = flags_of(mode);
  if (flags < 0) return fail(EINVAL);
  const int descriptor = open_entry(place, flags);
  const int kernel = descriptor < 0 ? -1 : kernel_copy(descriptor);
  const int problem = errno;
  if (descriptor >= 0) close(descriptor);
  errno = problem;
  return kernel;
}

static FILE* stream_of(int kernel, const char* mode) {
  if (kernel < 0) return NULL;
  FILE* stream = REAL(fdopen)(kernel, mode);
  const int problem = errno;
  if (stream == NULL) REAL(close)(kernel);
  errno = problem;
  return stream;
}

static FILE* output_stream(const Place* place, const char* path, const char* mode) {
  const int flags = flags_of(mode);
  const int descriptor = flags < 0 ? fail(EINVAL) : open_output(place, path, flags, 0666);
  if (descriptor < 0) return NULL;
  FILE* stream = REAL(fdopen)(descriptor, mode);
  const int problem = errno;
  if (stream == NULL) close(descriptor);
  errno = problem;
  return stream;
}

/* Publishes what a stream wrote to an output, before it is closed; 0 or an errno. */
static int closing_stream(FILE* stream) {
  const int descriptor = fileno(stream);
  if (!is_output(descriptor)) return 0;
  const int problem = fflush(stream) == 0 ? 0 : errno;
  const int published = output_closing(descriptor);
  return problem != 0 ? problem : published;
}

HOOK int fclose(FILE* stream) {
  const int before = errno;
  const int problem = closing_stream(stream);
  if (problem == 0) errno = before; /* of a stream without a descriptor */
  const int result = REAL(fclose)(stream);
  return problem == 0 ? result : fail(problem);
}

/* As freopen, with the file of a descriptor that the stream takes over. */
static FILE* take_over(int descriptor, const char* mode, FILE* stream) {
  FILE* opened = REAL(freopen)("/dev/null", mode, stream);
  const int closes_on_exec = strchr(mode, 'e') != NULL ? O_CLOEXEC : 0;
  const bool is_over = opened != NULL && dup3(descriptor, fileno(opened), closes_on_exec) >= 0;
  const int problem = errno;
  close(descriptor);
  if (!is_over && opened != NULL) fclose(opened);
  errno = problem;
  return is_over ? opened : NULL;
}

static FILE* reopen_in_output(const Place* place, const char* path, const char* mode, FILE* stream) {
  const int flags = flags_of(mode);
  const int descriptor = flags < 0 ? fail(EINVAL) : open_output(place, path, flags, 0666);
  if (descriptor >= 0) return take_over(descriptor, mode, stream);
  const int problem = errno;
  fclose(stream);
  errno = problem;
  return NULL;
}

HOOK FILE* fopen(const char* path, const char* mode) {
  Place place;
  if (!in_mount_here(&path, &place)) {
    return place.output != NULL ? output_stream(&place, path, mode) : REAL(fopen)(path, mode);
  }
  return stream_of(open_kernel(&place, mode), mode);
}

HOOK FILE* freopen(const char* path, const char* mode, FILE* stream) {
  Place place;
  if (path != NULL) closing_stream(stream);
  if (path == NULL || !in_mount_here(&path, &place)) {
    return path != NULL && place.output != NULL ? reopen_in_output(&place, path, mode, stream)
                                                : REAL(freopen)(path, mode, stream);
  }
  const int kernel = open_kernel(&place, mode);
  if (kernel < 0) {
    const int problem = errno;
    fclose(stream); /* as it does where it cannot open */
    errno = problem;
    return NULL;
  }
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", kernel);
  FILE* opened = REAL(freopen)(link, mode, stream);
  const int problem = errno;
  REAL(close)(kernel);
  errno = problem;
  return opened;
}

/* The stream owns the descriptor: the number that the program knew is closed. */
HOOK FILE* fdopen(int descriptor, const char* mode) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(fdopen)(descriptor, mode);
  release(file);
  FILE* stream = stream_of(kernel_copy(descriptor), mode);
  if (stream != NULL) close(descriptor);
  return stream;
}

ALIAS(fopen64, fopen)
ALIAS(_IO_fopen, fopen)
ALIAS(freopen64, freopen)
ALIAS(_IO_fdopen, fdopen)
