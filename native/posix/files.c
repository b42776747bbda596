/* Hooks that open, read and close. */
#include "shim.h"

#include <limits.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "aliases.h"

/* Of headers older than Linux 5.11; the number is the same on all machines. */
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC 4
#endif
int close_range(unsigned first, unsigned last, int flags);
void closefrom(int lowest);

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
  return place.output != NULL ? open_output(&place, path, flags, mode) : REAL(open)(path, flags, mode);
}

HOOK int openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  Place place;
  if (in_mount(&folder, &path, &place)) return open_entry(&place, flags);
  return place.output != NULL ? open_output(&place, path, flags, mode)
                              : REAL(openat)(folder, path, flags, mode);
}

HOOK int creat(const char* path, mode_t mode) {
  return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

/* Names that programs compiled with _FORTIFY_SOURCE call. */
HOOK int __open_2(const char* path, int flags) { return open(path, flags); }
HOOK int __openat_2(int folder, const char* path, int flags) { return openat(folder, path, flags); }

HOOK int close(int descriptor) {
  OpenFile* file = acquire(descriptor);
  if (file != NULL) return close_descriptor(file);
  if (is_output(descriptor)) return close_output(descriptor);
  return is_hidden(descriptor) ? fail(EBADF) : REAL(close)(descriptor);
}

static void close_ours(unsigned first, unsigned last, bool marks_only) {
  const unsigned end = (unsigned)first_descriptor + (unsigned)used_descriptors();
  if (first < first_descriptor) first = first_descriptor;
  for (unsigned number = first; number < end && number <= last; ++number) {
    OpenFile* file = acquire((int)number);
    if (file == NULL) continue;
    if (marks_only) {
      atomic_store(&file->closes_on_exec, true);
      release(file);
    } else {
      close_descriptor(file);
    }
  }
}

static void close_outputs(unsigned first, unsigned last) {
  for (unsigned number = first; number <= last && number < most_output_descriptors; ++number) {
    if (is_output((int)number)) output_closing((int)number);
  }
}

/* All but the hidden ones, which close on exec anyway. By the system call: the C library has the function
   since 2.34. */
HOOK int close_range(unsigned first, unsigned last, int flags) {
  const unsigned end = last < first_descriptor ? last + 1 : first_descriptor;
  if (mount_count() == 0 || first > last) return (int)REAL(syscall)(SYS_close_range, first, last, flags);
  if (((unsigned)flags & CLOSE_RANGE_CLOEXEC) == 0) close_outputs(first, last);
  for (unsigned begin = first; begin < end;) {
    const int skipped = next_hidden((int)begin);
    const unsigned stop = skipped < 0 || (unsigned)skipped > end ? end : (unsigned)skipped;
    if (begin < stop && REAL(syscall)(SYS_close_range, begin, stop - 1, flags) != 0) return -1;
    begin = stop + 1;
  }
  close_ours(first, last, ((unsigned)flags & CLOSE_RANGE_CLOEXEC) != 0);
  return 0;
}

HOOK void closefrom(int lowest) {
  const unsigned first = lowest < 0 ? 0 : (unsigned)lowest;
  if (close_range(first, UINT_MAX, 0) == 0) return;
  close_ours(first, UINT_MAX, false); /* Linux before 5.9 */
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  for (unsigned number = first; number < limit.rlim_cur && number < first_descriptor; ++number) {
    close((int)number);
  }
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

/* Reads into several buffers; `position` as for read_file, -1 alone meaning the file's own. Releases it. */
static ssize_t read_parts(OpenFile* file, const struct iovec* parts, int count, int64_t position) {
  ssize_t total = count < 0 || count > IOV_MAX || position < -1 ? fail(EINVAL) : 0;
  if (total < 0) count = 0;
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
  return read_parts(file, parts, count, position < 0 ? -2 : position);
}

HOOK ssize_t preadv2(int descriptor, const struct iovec* parts, int count, off_t position,
                     int flags) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(preadv2)(descriptor, parts, count, position, flags);
  if ((flags & ~(RWF_HIPRI | RWF_DSYNC | RWF_SYNC | RWF_NOWAIT)) != 0) {
    release(file);
    return fail(EOPNOTSUPP);
  }
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

/* All of a file is data; the hole is behind its end. */
static off_t seek_hole(OpenFile* file, off_t offset, int origin) {
  const off_t size = (off_t)file->status.size;
  if (offset < 0 || offset >= size) return fail(ENXIO);
  return move_position(file, origin == SEEK_HOLE ? size : offset, SEEK_SET);
}

HOOK off_t lseek(int descriptor, off_t offset, int origin) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(lseek)(descriptor, offset, origin);
  off_t position;
  switch (origin) {
    case SEEK_SET:
    case SEEK_CUR:
    case SEEK_END:
      position = move_position(file, offset, origin);
      break;
    case SEEK_DATA:
    case SEEK_HOLE:
      position = seek_hole(file, offset, origin);
      break;
    default:
      position = fail(EINVAL);
  }
  release(file);
  return position;
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
