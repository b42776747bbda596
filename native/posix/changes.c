/* Hooks that would change something in a mount: EROFS, as of a file system that is mounted read-only. What they
   change in an output, they change in the kernel's tree, but for links and special files: EPERM, as on
   file systems without them. */
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

/* Of what an output cannot have. */
#define DENY_HERE(function, parameters, arguments)             \
  HOOK int function parameters {                               \
    Place place;                                               \
    if (in_mount_here(&path, &place)) return refuse_new(&place); \
    if (place.output != NULL) return fail(EPERM);              \
    return REAL(function) arguments;                           \
  }
#define DENY_AT(function, parameters, arguments)               \
  HOOK int function parameters {                               \
    Place place;                                               \
    if (in_mount(&folder, &path, &place)) return refuse_new(&place); \
    if (place.output != NULL) return fail(EPERM);              \
    return REAL(function) arguments;                           \
  }

HOOK int mkdirat(int folder, const char* path, mode_t mode) {
  Place place;
  if (in_mount(&folder, &path, &place)) return refuse_new(&place);
  return place.output != NULL ? make_output_folder(path, mode) : REAL(mkdirat)(folder, path, mode);
}

HOOK int mkdir(const char* path, mode_t mode) {
  Place place;
  if (in_mount_here(&path, &place)) return refuse_new(&place);
  return place.output != NULL ? make_output_folder(path, mode) : REAL(mkdir)(path, mode);
}

DENY_HERE(mkfifo, (const char* path, mode_t mode), (path, mode))
DENY_AT(mkfifoat, (int folder, const char* path, mode_t mode), (folder, path, mode))
DENY_HERE(mknod, (const char* path, mode_t mode, dev_t device), (path, mode, device))
DENY_AT(mknodat, (int folder, const char* path, mode_t mode, dev_t device),
          (folder, path, mode, device))
DENY_HERE(symlink, (const char* target, const char* path), (target, path))
DENY_AT(symlinkat, (const char* target, int folder, const char* path),
          (target, folder, path))

HOOK int unlinkat(int folder, const char* path, int flags) {
  Place place;
  if (in_mount(&folder, &path, &place)) return refuse_change(&place);
  if (place.output == NULL) return REAL(unlinkat)(folder, path, flags);
  return (flags & AT_REMOVEDIR) != 0 ? remove_output_folder(path) : unlink_output(path);
}

HOOK int unlink(const char* path) {
  Place place;
  if (in_mount_here(&path, &place)) return refuse_change(&place);
  return place.output != NULL ? unlink_output(path) : REAL(unlink)(path);
}

HOOK int rmdir(const char* path) {
  Place place;
  if (in_mount_here(&path, &place)) return refuse_change(&place);
  return place.output != NULL ? remove_output_folder(path) : REAL(rmdir)(path);
}

HOOK int remove(const char* path) {
  Place place;
  if (in_mount_here(&path, &place)) return refuse_change(&place);
  if (place.output == NULL) return REAL(remove)(path);
  struct stat status;
  return stat(path, &status) == 0 && S_ISDIR(status.st_mode) ? remove_output_folder(path)
                                                             : unlink_output(path);
}

HOOK int truncate(const char* path, off_t length) {
  Place place;
  if (in_mount_here(&path, &place)) return refuse_change(&place);
  return place.output != NULL ? truncate_output(&place, path, length) : REAL(truncate)(path, length);
}

/* Of a file that is published, or still written. */
#define CHANGE_HERE(function, parameters, arguments)                          \
  HOOK int function parameters {                                              \
    Place place;                                                              \
    char hidden[PATH_MAX];                                                    \
    if (in_mount_here(&path, &place)) return refuse_change(&place);           \
    if (place.output != NULL) path = written_path(path, hidden);              \
    return output_changed(&place, path, REAL(function) arguments);            \
  }
#define CHANGE_AT(function, parameters, arguments)                            \
  HOOK int function parameters {                                              \
    Place place;                                                              \
    char hidden[PATH_MAX];                                                    \
    if (in_mount(&folder, &path, &place)) return refuse_change(&place);       \
    if (place.output != NULL) path = written_path(path, hidden);              \
    return output_changed(&place, path, REAL(function) arguments);            \
  }
CHANGE_HERE(chmod, (const char* path, mode_t mode), (path, mode))
CHANGE_HERE(lchmod, (const char* path, mode_t mode), (path, mode))
CHANGE_AT(fchmodat, (int folder, const char* path, mode_t mode, int flags),
          (folder, path, mode, flags))
CHANGE_HERE(chown, (const char* path, uid_t user, gid_t group), (path, user, group))
CHANGE_HERE(lchown, (const char* path, uid_t user, gid_t group), (path, user, group))
CHANGE_AT(fchownat,
          (int folder, const char* path, uid_t user, gid_t group, int flags),
          (folder, path, user, group, flags))
CHANGE_HERE(utime, (const char* path, const struct utimbuf* times), (path, times))
CHANGE_HERE(utimes, (const char* path, const struct timeval times[2]), (path, times))
CHANGE_HERE(lutimes, (const char* path, const struct timeval times[2]), (path, times))
REFUSE_HERE(refuse_change, setxattr,
            (const char* path, const char* name, const void* value, size_t size, int flags),
            (path, name, value, size, flags))
REFUSE_HERE(refuse_change, lsetxattr,
            (const char* path, const char* name, const void* value, size_t size, int flags),
            (path, name, value, size, flags))
REFUSE_HERE(refuse_change, removexattr, (const char* path, const char* name), (path, name))
REFUSE_HERE(refuse_change, lremovexattr, (const char* path, const char* name), (path, name))

/* Templates of temporary files. The C library opens these by a call that no hook sees. */
#define TEMPLATE_HOOK(function, parameters, arguments, suffix, flags)                     \
  HOOK int function parameters {                                                          \
    const char* path = template;                                                          \
    Place place;                                                                          \
    if (in_mount_here(&path, &place)) return fail(EROFS);                                 \
    if (place.output != NULL) return open_output_template(template, suffix, flags);       \
    return REAL(function) arguments;                                                      \
  }
TEMPLATE_HOOK(mkstemp, (char* template), (template), 0, 0)
TEMPLATE_HOOK(mkstemps, (char* template, int suffix), (template, suffix), suffix, 0)
TEMPLATE_HOOK(mkostemp, (char* template, int flags), (template, flags), 0, flags)
TEMPLATE_HOOK(mkostemps, (char* template, int suffix, int flags), (template, suffix, flags), suffix, flags)

HOOK char* mkdtemp(char* template) {
  const char* path = template;
  Place place;
  if (!in_mount_here(&path, &place)) {
    if (place.output == NULL) return REAL(mkdtemp)(template);
    return make_output_template(template) == 0 ? template : NULL;
  }
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
  char hidden[PATH_MAX];
  if (in_mount(&folder, &path, &place)) return refuse_change(&place);
  if (place.output != NULL) path = written_path(path, hidden);
  return output_changed(&place, path, REAL(utimensat)(folder, path, times, flags));
}

HOOK int futimesat(int folder, const char* path, const struct timeval times[2]) {
  if (path == NULL) return futimes(folder, times);
  Place place;
  char hidden[PATH_MAX];
  if (in_mount(&folder, &path, &place)) return refuse_change(&place);
  if (place.output != NULL) path = written_path(path, hidden);
  return output_changed(&place, path, REAL(futimesat)(folder, path, times));
}

/* Of two paths: what leads from one file system to another is EXDEV, as the kernel says. */
static int refuse_two(bool from_is_in, const Place* from, bool to_is_in, const Place* to) {
  PackEntry entry;
  const int problem = from_is_in ? find_entry(from, &entry, NULL) : 0;
  if (problem != 0) return fail(problem);
  return fail(from_is_in && to_is_in && from->mount == to->mount ? EROFS : EXDEV);
}

static int rename_two(const Place* from_place, const char* from, const Place* to_place, const char* to,
                      unsigned flags) {
  return from_place->output == to_place->output ? rename_output(from, to, flags) : fail(EXDEV);
}

HOOK int renameat2(int from_folder, const char* from, int to_folder, const char* to,
                   unsigned flags) {
  Place from_place;
  Place to_place;
  const bool from_is_in = in_mount(&from_folder, &from, &from_place);
  const bool to_is_in = in_mount(&to_folder, &to, &to_place);
  if (from_is_in || to_is_in) return refuse_two(from_is_in, &from_place, to_is_in, &to_place);
  if (from_place.output != NULL || to_place.output != NULL) return rename_two(&from_place, from, &to_place, to, flags);
  return REAL(renameat2)(from_folder, from, to_folder, to, flags);
}

HOOK int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  Place from_place;
  Place to_place;
  const bool from_is_in = in_mount(&from_folder, &from, &from_place);
  const bool to_is_in = in_mount(&to_folder, &to, &to_place);
  if (from_is_in || to_is_in) return refuse_two(from_is_in, &from_place, to_is_in, &to_place);
  if (from_place.output != NULL || to_place.output != NULL) return rename_two(&from_place, from, &to_place, to, 0);
  return REAL(renameat)(from_folder, from, to_folder, to);
}

HOOK int rename(const char* from, const char* to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

HOOK int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  Place from_place;
  Place to_place;
  const bool from_is_in = in_mount(&from_folder, &from, &from_place);
  const bool to_is_in = in_mount(&to_folder, &to, &to_place);
  if (from_is_in || to_is_in) return refuse_two(from_is_in, &from_place, to_is_in, &to_place);
  if (from_place.output != NULL || to_place.output != NULL) return fail(from_place.output == to_place.output ? EPERM : EXDEV);
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
