/* Hooks for calls on descriptors and paths: each counts in its file's row, and does what it did. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dirent.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../posix/aliases.h"
#include "files.h"
#include "paceline/hook.h"

/* The call `real` for a file, counted as `operation`; its value is the number of bytes, if any. */
#define COUNTED(file, operation, type, real)                \
  do {                                                      \
    const Use use = use_begins(file);                       \
    const type result = (real);                             \
    use_ends(use, operation, (ssize_t)result);              \
    return result;                                          \
  } while (0)
/* The same for calls whose value is no number of bytes. */
#define COUNTED_CALL(file, operation, type, real)           \
  do {                                                      \
    const Use use = use_begins(file);                       \
    const type result = (real);                             \
    use_ends(use, operation, 0);                            \
    return result;                                          \
  } while (0)

static mode_t mode_of(int flags, va_list arguments) {
  return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, mode_t) : 0;
}

static int counted_open(int folder, const char* path, int flags, mode_t mode) {
  const unsigned file = file_of_path(folder, path);
  const Use use = use_begins(file);
  const int descriptor = REAL(openat)(folder, path, flags, mode);
  use_ends(use, IO_OPEN, 0);
  if (descriptor >= 0) descriptor_opened(descriptor, file);
  return descriptor;
}

HOOK int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return counted_open(AT_FDCWD, path, flags, mode);
}

HOOK int openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return counted_open(folder, path, flags, mode);
}

HOOK int creat(const char* path, mode_t mode) {
  return counted_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

/* Names that programs compiled with _FORTIFY_SOURCE call. */
int __open_2(const char* path, int flags);
int __openat_2(int folder, const char* path, int flags);
HOOK int __open_2(const char* path, int flags) { return counted_open(AT_FDCWD, path, flags, 0); }
HOOK int __openat_2(int folder, const char* path, int flags) {
  return counted_open(folder, path, flags, 0);
}

HOOK int close(int descriptor) {
  const unsigned file = file_of(descriptor);
  if (file == 0) return REAL(close)(descriptor);
  descriptor_closed(descriptor); /* before another thread gets the number */
  COUNTED_CALL(file, IO_CLOSE, int, REAL(close)(descriptor));
}

HOOK int dup(int descriptor) {
  const int copy = REAL(dup)(descriptor);
  if (copy >= 0) descriptor_opened(copy, file_of(descriptor));
  return copy;
}

HOOK int dup2(int descriptor, int copy) {
  const int result = REAL(dup2)(descriptor, copy);
  if (result >= 0) descriptor_opened(copy, file_of(descriptor));
  return result;
}

HOOK int dup3(int descriptor, int copy, int flags) {
  const int result = REAL(dup3)(descriptor, copy, flags);
  if (result >= 0) descriptor_opened(copy, file_of(descriptor));
  return result;
}

/* --- bytes ------------------------------------------------------------------------------------------- */

HOOK ssize_t read(int descriptor, void* target, size_t count) {
  COUNTED(file_of(descriptor), IO_READ, ssize_t, REAL(read)(descriptor, target, count));
}

HOOK ssize_t pread(int descriptor, void* target, size_t count, off_t position) {
  COUNTED(file_of(descriptor), IO_READ, ssize_t, REAL(pread)(descriptor, target, count, position));
}

HOOK ssize_t readv(int descriptor, const struct iovec* parts, int count) {
  COUNTED(file_of(descriptor), IO_READ, ssize_t, REAL(readv)(descriptor, parts, count));
}

HOOK ssize_t preadv(int descriptor, const struct iovec* parts, int count, off_t position) {
  COUNTED(file_of(descriptor), IO_READ, ssize_t, REAL(preadv)(descriptor, parts, count, position));
}

HOOK ssize_t write(int descriptor, const void* source, size_t count) {
  COUNTED(file_of(descriptor), IO_WRITE, ssize_t, REAL(write)(descriptor, source, count));
}

HOOK ssize_t pwrite(int descriptor, const void* source, size_t count, off_t position) {
  COUNTED(file_of(descriptor), IO_WRITE, ssize_t, REAL(pwrite)(descriptor, source, count, position));
}

HOOK ssize_t writev(int descriptor, const struct iovec* parts, int count) {
  COUNTED(file_of(descriptor), IO_WRITE, ssize_t, REAL(writev)(descriptor, parts, count));
}

HOOK ssize_t pwritev(int descriptor, const struct iovec* parts, int count, off_t position) {
  COUNTED(file_of(descriptor), IO_WRITE, ssize_t, REAL(pwritev)(descriptor, parts, count, position));
}

/* Copies in the kernel take as long for both files. */
HOOK ssize_t sendfile(int out, int in, off_t* position, size_t count) {
  const Use source = use_begins(file_of(in));
  const Use target = use_begins(file_of(out));
  const ssize_t result = REAL(sendfile)(out, in, position, count);
  use_ends(source, IO_READ, result);
  use_ends(target, IO_WRITE, result);
  return result;
}

HOOK ssize_t copy_file_range(int in, off64_t* from, int out, off64_t* to, size_t count, unsigned flags) {
  const Use source = use_begins(file_of(in));
  const Use target = use_begins(file_of(out));
  const ssize_t result = REAL(copy_file_range)(in, from, out, to, count, flags);
  use_ends(source, IO_READ, result);
  use_ends(target, IO_WRITE, result);
  return result;
}

ssize_t __read_chk(int descriptor, void* target, size_t count, size_t room);
ssize_t __pread_chk(int descriptor, void* target, size_t count, off_t position, size_t room);
HOOK ssize_t __read_chk(int descriptor, void* target, size_t count, size_t room) {
  COUNTED(file_of(descriptor), IO_READ, ssize_t, REAL(__read_chk)(descriptor, target, count, room));
}
HOOK ssize_t __pread_chk(int descriptor, void* target, size_t count, off_t position, size_t room) {
  COUNTED(file_of(descriptor), IO_READ, ssize_t,
          REAL(__pread_chk)(descriptor, target, count, position, room));
}

HOOK int fsync(int descriptor) {
  COUNTED_CALL(file_of(descriptor), IO_SYNC, int, REAL(fsync)(descriptor));
}

HOOK int fdatasync(int descriptor) {
  COUNTED_CALL(file_of(descriptor), IO_SYNC, int, REAL(fdatasync)(descriptor));
}

HOOK void* mmap(void* at, size_t length, int protection, int flags, int descriptor, off_t offset) {
  const Use use = use_begins((flags & MAP_ANONYMOUS) != 0 ? 0 : file_of(descriptor));
  void* result = REAL(mmap)(at, length, protection, flags, descriptor, offset);
  use_ends(use, IO_MAP, result == MAP_FAILED ? 0 : (ssize_t)length);
  return result;
}

/* --- names ------------------------------------------------------------------------------------------- */

HOOK int stat(const char* restrict path, struct stat* restrict to) {
  COUNTED_CALL(file_of_path(AT_FDCWD, path), IO_STAT, int, REAL(stat)(path, to));
}

HOOK int lstat(const char* restrict path, struct stat* restrict to) {
  COUNTED_CALL(file_of_path(AT_FDCWD, path), IO_STAT, int, REAL(lstat)(path, to));
}

HOOK int fstat(int descriptor, struct stat* to) {
  COUNTED_CALL(file_of(descriptor), IO_STAT, int, REAL(fstat)(descriptor, to));
}

/* An empty path means the descriptor itself. */
static unsigned file_at(int folder, const char* path, int flags) {
  const bool itself = (flags & AT_EMPTY_PATH) != 0 && (path == NULL || *path == '\0');
  return itself ? file_of(folder) : file_of_path(folder, path);
}

HOOK int fstatat(int folder, const char* restrict path, struct stat* restrict to, int flags) {
  COUNTED_CALL(file_at(folder, path, flags), IO_STAT, int, REAL(fstatat)(folder, path, to, flags));
}

HOOK int statx(int folder, const char* restrict path, int flags, unsigned mask, struct statx* restrict to) {
  COUNTED_CALL(file_at(folder, path, flags), IO_STAT, int, REAL(statx)(folder, path, flags, mask, to));
}

HOOK int access(const char* path, int mode) {
  COUNTED_CALL(file_of_path(AT_FDCWD, path), IO_STAT, int, REAL(access)(path, mode));
}

/* Of programs that were linked before glibc 2.33. */
int __xstat(int version, const char* path, struct stat* to);
int __lxstat(int version, const char* path, struct stat* to);
int __fxstat(int version, int descriptor, struct stat* to);
HOOK int __xstat(int version, const char* path, struct stat* to) {
  COUNTED_CALL(file_of_path(AT_FDCWD, path), IO_STAT, int, REAL(__xstat)(version, path, to));
}
HOOK int __lxstat(int version, const char* path, struct stat* to) {
  COUNTED_CALL(file_of_path(AT_FDCWD, path), IO_STAT, int, REAL(__lxstat)(version, path, to));
}
HOOK int __fxstat(int version, int descriptor, struct stat* to) {
  COUNTED_CALL(file_of(descriptor), IO_STAT, int, REAL(__fxstat)(version, descriptor, to));
}

/* --- folders: the C library opens and closes them by calls that no hook sees ------------------------- */

HOOK DIR* opendir(const char* path) {
  const unsigned file = file_of_path(AT_FDCWD, path);
  const Use use = use_begins(file);
  DIR* folder = REAL(opendir)(path);
  use_ends(use, IO_OPEN, 0);
  if (folder != NULL) descriptor_opened(dirfd(folder), file);
  return folder;
}

HOOK struct dirent* readdir(DIR* folder) {
  const Use use = use_begins(file_of(dirfd(folder)));
  struct dirent* entry = REAL(readdir)(folder);
  use_ends(use, IO_LIST, 0);
  return entry;
}

HOOK int closedir(DIR* folder) {
  const int descriptor = dirfd(folder);
  const unsigned file = file_of(descriptor);
  descriptor_closed(descriptor);
  COUNTED_CALL(file, IO_CLOSE, int, REAL(closedir)(folder));
}

ALIAS(open64, open)
ALIAS(openat64, openat)
ALIAS(creat64, creat)
ALIAS(__open64_2, __open_2)
ALIAS(__openat64_2, __openat_2)
ALIAS(__open, open)
ALIAS(__open64, open)
ALIAS(__close, close)
ALIAS(__read, read)
ALIAS(__write, write)
ALIAS(pread64, pread)
ALIAS(pwrite64, pwrite)
ALIAS(__pread64, pread)
ALIAS(__pwrite64, pwrite)
ALIAS(__pread64_chk, __pread_chk)
ALIAS(preadv64, preadv)
ALIAS(pwritev64, pwritev)
ALIAS(sendfile64, sendfile)
ALIAS(mmap64, mmap)
ALIAS(stat64, stat)
ALIAS(lstat64, lstat)
ALIAS(fstat64, fstat)
ALIAS(fstatat64, fstatat)
ALIAS(__xstat64, __xstat)
ALIAS(__lxstat64, __lxstat)
ALIAS(__fxstat64, __fxstat)
ALIAS(readdir64, readdir)
