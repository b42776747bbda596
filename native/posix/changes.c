/* Hooks that would change something in a mount: EROFS, as of a file system that is mounted read-only. */
#include "shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#include "aliases.h"

/* Of a path that is there. */
static int refuse_change(const Place* place) {
  PackEntry entry;
  const int problem = find_entry(place, &entry, NULL);
  return fail(problem == 0 ? EROFS : problem);
}

/* Of a path that is not there. */
static int refuse_new(const Place* place) {
  PackEntry entry;
  const int problem = find_entry(place, &entry, NULL);
  return fail(problem == 0 ? EEXIST : problem == ENOENT ? EROFS : problem);
}

#define REFUSE_HERE(refuse, function, parameters, arguments) \
  HOOK int function parameters {                             \
    Place place;                                             \
    if (in_mount_here(&path, &place)) return refuse(&place); \
    return REAL(function) arguments;                         \
  }
#define REFUSE_AT(refuse, function, parameters, arguments)     \
  HOOK int function parameters {                               \
    Place place;                                               \
    if (in_mount(&folder, &path, &place)) return refuse(&place); \
    return REAL(function) arguments;                           \
  }

REFUSE_HERE(refuse_new, mkdir, (const char* path, mode_t mode), (path, mode))
REFUSE_AT(refuse_new, mkdirat, (int folder, const char* path, mode_t mode), (folder, path, mode))
REFUSE_HERE(refuse_new, mkfifo, (const char* path, mode_t mode), (path, mode))
REFUSE_AT(refuse_new, mkfifoat, (int folder, const char* path, mode_t mode), (folder, path, mode))
REFUSE_HERE(refuse_new, mknod, (const char* path, mode_t mode, dev_t device), (path, mode, device))
REFUSE_AT(refuse_new, mknodat, (int folder, const char* path, mode_t mode, dev_t device),
          (folder, path, mode, device))
REFUSE_HERE(refuse_new, symlink, (const char* target, const char* path), (target, path))
REFUSE_AT(refuse_new, symlinkat, (const char* target, int folder, const char* path),
          (target, folder, path))
REFUSE_HERE(refuse_change, rmdir, (const char* path), (path))
REFUSE_HERE(refuse_change, unlink, (const char* path), (path))
REFUSE_HERE(refuse_change, remove, (const char* path), (path))
REFUSE_AT(refuse_change, unlinkat, (int folder, const char* path, int flags), (folder, path, flags))
REFUSE_HERE(refuse_change, truncate, (const char* path, off_t length), (path, length))
REFUSE_HERE(refuse_change, chmod, (const char* path, mode_t mode), (path, mode))
REFUSE_HERE(refuse_change, lchmod, (const char* path, mode_t mode), (path, mode))
REFUSE_AT(refuse_change, fchmodat, (int folder, const char* path, mode_t mode, int flags),
          (folder, path, mode, flags))
REFUSE_HERE(refuse_change, chown, (const char* path, uid_t user, gid_t group), (path, user, group))
REFUSE_HERE(refuse_change, lchown, (const char* path, uid_t user, gid_t group), (path, user, group))
REFUSE_AT(refuse_change, fchownat,
          (int folder, const char* path, uid_t user, gid_t group, int flags),
          (folder, path, user, group, flags))
REFUSE_HERE(refuse_change, utime, (const char* path, const struct utimbuf* times), (path, times))
REFUSE_HERE(refuse_change, utimes, (const char* path, const struct timeval times[2]), (path, times))
REFUSE_HERE(refuse_change, lutimes, (const char* path, const struct timeval times[2]), (path, times))
REFUSE_HERE(refuse_change, setxattr,
            (const char* path, const char* name, const void* value, size_t size, int flags),
            (path, name, value, size, flags))
REFUSE_HERE(refuse_change, lsetxattr,
            (const char* path, const char* name, const void* value, size_t size, int flags),
            (path, name, value, size, flags))
REFUSE_HERE(refuse_change, removexattr, (const char* path, const char* name), (path, name))
REFUSE_HERE(refuse_change, lremovexattr, (const char* path, const char* name), (path, name))

/* Templates of temporary files. The C library opens these by a call that no hook sees. */
#define REFUSE_TEMPLATE(function, parameters, arguments)     \
  HOOK int function parameters {                             \
    const char* path = template;                             \
    Place place;                                             \
    if (in_mount_here(&path, &place)) return fail(EROFS);    \
    return REAL(function) arguments;                         \
  }
REFUSE_TEMPLATE(mkstemp, (char* template), (template))
REFUSE_TEMPLATE(mkstemps, (char* template, int suffix), (template, suffix))
REFUSE_TEMPLATE(mkostemp, (char* template, int flags), (template, flags))
REFUSE_TEMPLATE(mkostemps, (char* template, int suffix, int flags), (template, suffix, flags))

HOOK char* mkdtemp(char* template) {
  const char* path = template;
  Place place;
  if (!in_mount_here(&path, &place)) return REAL(mkdtemp)(template);
  errno = EROFS;
  return NULL;
}

/* The kernel's descriptors have these calls themselves; ours are read-only. */
#define REFUSE_DESCRIPTOR(function, parameters, arguments, problem) \
  HOOK int function parameters {                                    \
    OpenFile* file = acquire(descriptor);                           \
    if (file == NULL) return REAL(function) arguments;              \
    release(file);                                                  \
    return fail(problem);                                           \
  }
REFUSE_DESCRIPTOR(fchmod, (int descriptor, mode_t mode), (descriptor, mode), EROFS)
REFUSE_DESCRIPTOR(fchown, (int descriptor, uid_t user, gid_t group), (descriptor, user, group), EROFS)
REFUSE_DESCRIPTOR(futimes, (int descriptor, const struct timeval times[2]), (descriptor, times), EROFS)
REFUSE_DESCRIPTOR(futimens, (int descriptor, const struct timespec times[2]), (descriptor, times), EROFS)
REFUSE_DESCRIPTOR(fsetxattr,
                  (int descriptor, const char* name, const void* value, size_t size, int flags),
                  (descriptor, name, value, size, flags), EROFS)
REFUSE_DESCRIPTOR(fremovexattr, (int descriptor, const char* name), (descriptor, name), EROFS)
REFUSE_DESCRIPTOR(ftruncate, (int descriptor, off_t length), (descriptor, length), EINVAL)

/* Also of a descriptor, with path NULL. */
HOOK int utimensat(int folder, const char* path, const struct timespec times[2], int flags) {
  if (path == NULL) return futimens(folder, times);
  Place place;
  if (in_mount(&folder, &path, &place)) return refuse_change(&place);
  return REAL(utimensat)(folder, path, times, flags);
}

HOOK int futimesat(int folder, const char* path, const struct timeval times[2]) {
  if (path == NULL) return futimes(folder, times);
  Place place;
  if (in_mount(&folder, &path, &place)) return refuse_change(&place);
  return REAL(futimesat)(folder, path, times);
}

/* Of two paths: what leads from one file system to another is EXDEV, as the kernel says. */
static int refuse_two(bool from_is_in, const Place* from, bool to_is_in, const Place* to) {
  PackEntry entry;
  const int problem = from_is_in ? find_entry(from, &entry, NULL) : 0;
  if (problem != 0) return fail(problem);
  return fail(from_is_in && to_is_in && from->mount == to->mount ? EROFS : EXDEV);
}

HOOK int renameat2(int from_folder, const char* from, int to_folder, const char* to,
                   unsigned flags) {
  Place from_place;
  Place to_place;
  const bool from_is_in = in_mount(&from_folder, &from, &from_place);
  const bool to_is_in = in_mount(&to_folder, &to, &to_place);
  if (from_is_in || to_is_in) return refuse_two(from_is_in, &from_place, to_is_in, &to_place);
  return REAL(renameat2)(from_folder, from, to_folder, to, flags);
}

HOOK int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  Place from_place;
  Place to_place;
  const bool from_is_in = in_mount(&from_folder, &from, &from_place);
  const bool to_is_in = in_mount(&to_folder, &to, &to_place);
  if (from_is_in || to_is_in) return refuse_two(from_is_in, &from_place, to_is_in, &to_place);
  return REAL(renameat)(from_folder, from, to_folder, to);
}

HOOK int rename(const char* from, const char* to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

HOOK int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  Place from_place;
  Place to_place;
  const bool from_is_in = in_mount(&from_folder, &from, &from_place);
  const bool to_is_in = in_mount(&to_folder, &to, &to_place);
  if (from_is_in || to_is_in) return refuse_two(from_is_in, &from_place, to_is_in, &to_place);
  return REAL(linkat)(from_folder, from, to_folder, to, flags);
}

HOOK int link(const char* from, const char* to) {
  return linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}

/* Names that programs compiled for glibc before 2.33 call. */
HOOK int __xmknod(int version, const char* path, mode_t mode, dev_t* device) {
  (void)version;
  return mknod(path, mode, *device);
}
HOOK int __xmknodat(int version, int folder, const char* path, mode_t mode, dev_t* device) {
  (void)version;
  return mknodat(folder, path, mode, *device);
}

ALIAS(truncate64, truncate)
ALIAS(ftruncate64, ftruncate)
ALIAS(mkstemp64, mkstemp)
ALIAS(mkstemps64, mkstemps)
ALIAS(mkostemp64, mkostemp)
ALIAS(mkostemps64, mkostemps)
