/* Hooks for C streams. The C library opens a stream's file, and fills its buffer, by calls that no hook sees:
   so the calls of the program count, with the bytes that it asked for. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "../posix/aliases.h"
#include "files.h"
#include "paceline/hook.h"

uintptr_t next_function(const char* name) {
  void* function = dlsym(RTLD_NEXT, name);
  if (function != NULL) return (uintptr_t)function;
  dprintf(STDERR_FILENO, "paceline: the C library has no function %s\n", name);
  abort();
}

HOOK FILE* fopen(const char* restrict path, const char* restrict mode) {
  const unsigned file = file_of_path(AT_FDCWD, path);
  const Use use = use_begins(file);
  FILE* stream = REAL(fopen)(path, mode);
  use_ends(use, IO_OPEN, 0);
  if (stream != NULL) descriptor_opened(fileno(stream), file);
  return stream;
}

HOOK int fclose(FILE* stream) {
  const int descriptor = fileno(stream);
  const unsigned file = file_of(descriptor);
  if (file != 0) descriptor_closed(descriptor);
  const Use use = use_begins(file);
  const int result = REAL(fclose)(stream);
  use_ends(use, IO_CLOSE, 0);
  return result;
}

HOOK size_t fread(void* restrict target, size_t size, size_t count, FILE* restrict stream) {
  const Use use = use_begins(file_of(fileno(stream)));
  const size_t read_count = REAL(fread)(target, size, count, stream);
  use_ends(use, IO_READ, (ssize_t)(read_count * size));
  return read_count;
}

HOOK size_t fwrite(const void* restrict source, size_t size, size_t count, FILE* restrict stream) {
  const Use use = use_begins(file_of(fileno(stream)));
  const size_t written_count = REAL(fwrite)(source, size, count, stream);
  use_ends(use, IO_WRITE, (ssize_t)(written_count * size));
  return written_count;
}

HOOK int fflush(FILE* stream) {
  const Use use = use_begins(stream == NULL ? 0 : file_of(fileno(stream)));
  const int result = REAL(fflush)(stream);
  use_ends(use, IO_WRITE, 0);
  return result;
}

ALIAS(fopen64, fopen)
