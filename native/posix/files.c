/* Hooks that open, read and close. */
#include "shim.h"

#include <limits.h>
#include <stdarg.h>
#include <sys/uio.h>
#include <unistd.h>

#include "aliases.h"

int open_entry(const Place* place, int flags) {
  PackEntry entry;
  PackStatus status;
  const bool writes = (flags & O_ACCMODE) != O_RDONLY;
  const int problem = find_entry(place, &entry, &status);
  if (problem == ENOENT && (flags & O_CREAT) != 0) return fail(EROFS);
  if (problem != 0) return fail(problem);
  if ((flags & O_TMPFILE) == O_TMPFILE) return fail(EROFS);
  if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL)) return fail(EEXIST);
  const bool is_folder = entry.kind == PACK_FOLDER;
  if (is_folder && (writes || (flags & O_CREAT) != 0)) return fail(EISDIR);
  if (!is_folder && (flags & O_DIRECTORY) != 0) return fail(ENOTDIR);
  if (writes || (flags & O_TRUNC) != 0) return fail(EROFS);
  return new_descriptor(place->mount, entry, &status, flags);
}

static mode_t mode_of(int flags, va_list arguments) {
  return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(arguments, mode_t) : 0;
}

HOOK int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  Place place;
  if (in_mount_here(&path, &place)) return open_entry(&place, flags);
  return REAL(open)(path, flags, mode);
}

HOOK int openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  Place place;
  if (in_mount(&folder, &path, &place)) return open_entry(&place, flags);
  return REAL(openat)(folder, path, flags, mode);
}

HOOK int creat(const char* path, mode_t mode) {
  return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

/* Names that programs compiled with _FORTIFY_SOURCE call. */
HOOK int __open_2(const char* path, int flags) { return open(path, flags); }
HOOK int __openat_2(int folder, const char* path, int flags) { return openat(folder, path, flags); }

HOOK int close(int descriptor) {
  OpenFile* file = acquire(descriptor);
  return file == NULL ? REAL(close)(descriptor) : close_descriptor(file);
}

HOOK ssize_t read(int descriptor, void* target, size_t count) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(read)(descriptor, target, count);
  const ssize_t length = read_file(file, target, count, -1);
  release(file);
  return length;
}

HOOK ssize_t pread(int descriptor, void* target, size_t count, off_t position) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(pread)(descriptor, target, count, position);
  const ssize_t length = position < 0 ? fail(EINVAL) : read_file(file, target, count, position);
  release(file);
  return length;
}

/* Reads into several buffers; `position` as for read_file. Releases the file. */
static ssize_t read_parts(OpenFile* file, const struct iovec* parts, int count, int64_t position) {
  ssize_t total = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t from = position < 0 ? position : position + total;
    const ssize_t length = read_file(file, parts[i].iov_base, parts[i].iov_len, from);
    if (length < 0) {
      if (total == 0) total = -1;
      break;
    }
    total += length;
    if ((size_t)length < parts[i].iov_len) break;
  }
  release(file);
  return total;
}

HOOK ssize_t readv(int descriptor, const struct iovec* parts, int count) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(readv)(descriptor, parts, count);
  return read_parts(file, parts, count, -1);
}

HOOK ssize_t preadv(int descriptor, const struct iovec* parts, int count, off_t position) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(preadv)(descriptor, parts, count, position);
  return read_parts(file, parts, count, position);
}

HOOK ssize_t preadv2(int descriptor, const struct iovec* parts, int count, off_t position,
                     int flags) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(preadv2)(descriptor, parts, count, position, flags);
  return read_parts(file, parts, count, position);
}

void __chk_fail(void) __attribute__((noreturn)); /* the C library's: "buffer overflow detected" */

HOOK ssize_t __read_chk(int descriptor, void* target, size_t count, size_t room) {
  if (count > room) __chk_fail();
  return read(descriptor, target, count);
}

HOOK ssize_t __pread_chk(int descriptor, void* target, size_t count, off_t position, size_t room) {
  if (count > room) __chk_fail();
  return pread(descriptor, target, count, position);
}

HOOK off_t lseek(int descriptor, off_t offset, int origin) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(lseek)(descriptor, offset, origin);
  const int kernel = atomic_load(&file->kernel);
  const int64_t size = file->entry.kind == PACK_FOLDER ? 0 : (int64_t)file->status.size;
  int64_t from = 0;
  int64_t target = -1;
  switch (kernel >= 0 ? -1 : origin) {
    case -1:
      target = REAL(lseek)(kernel, offset, origin);
      release(file);
      return target;
    case SEEK_SET:
      break;
    case SEEK_CUR:
      from = atomic_load(&file->position);
      break;
    case SEEK_END:
      from = size;
      break;
    case SEEK_DATA: /* all of it is data; the hole is behind the end */
    case SEEK_HOLE:
      if (offset < 0 || offset >= size) {
        release(file);
        return fail(ENXIO);
      }
      from = origin == SEEK_HOLE ? size - offset : 0;
      break;
    default:
      release(file);
      return fail(EINVAL);
  }
  if (__builtin_add_overflow(from, offset, &target) || target < 0) {
    target = fail(EINVAL);
  } else {
    atomic_store(&file->position, target);
  }
  release(file);
  return target;
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
ALIAS(pread64, pread)
ALIAS(__pread64, pread)
ALIAS(__pread64_chk, __pread_chk)
ALIAS(preadv64, preadv)
ALIAS(preadv64v2, preadv2)
ALIAS(lseek64, lseek)
ALIAS(__lseek, lseek)
