/* Hooks that tell about a path: stat in all its names, access, readlink, file systems, attributes. */
#include "shim.h"

#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "aliases.h"

enum {
  device_major = 0xfac, /* of no real device; the minor number is the mount's */
  block_bytes = 4096,
  magic = 0x50414345, /* "PACE", of the file system */
};

void fill_stat(const Mount* mount, const PackStatus* from, struct stat* to) {
  memset(to, 0, sizeof *to);
  to->st_dev = makedev(device_major, mount->number);
  to->st_ino = from->inode;
  to->st_mode = from->mode;
  to->st_nlink = (nlink_t)from->links;
  to->st_uid = from->user;
  to->st_gid = from->group;
  to->st_size = (off_t)from->size;
  to->st_blksize = block_bytes;
  to->st_blocks = (blkcnt_t)((from->size + block_bytes - 1) / block_bytes * (block_bytes / 512));
  to->st_mtim.tv_sec = from->mtime_ns / 1000000000;
  to->st_mtim.tv_nsec = from->mtime_ns % 1000000000;
  if (to->st_mtim.tv_nsec < 0) { /* before 1970 */
    to->st_mtim.tv_nsec += 1000000000;
    to->st_mtim.tv_sec -= 1;
  }
  to->st_atim = to->st_mtim;
  to->st_ctim = to->st_mtim;
}

static int stat_place(const Place* place, struct stat* to) {
  PackEntry entry;
  PackStatus status;
  const int problem = find_entry(place, &entry, &status);
  if (problem != 0) return fail(problem);
  fill_stat(place->mount, &status, to);
  return 0;
}

/* Releases the file. */
static int stat_file(OpenFile* file, struct stat* to) {
  fill_stat(file->mount, &file->status, to);
  release(file);
  return 0;
}

/* Not REAL(stat) and its like: before glibc 2.33 they are not functions of the library. */
static int kernel_stat(int folder, const char* path, struct stat* to, int flags) {
  return (int)REAL(syscall)(SYS_newfstatat, folder, path, to, flags);
}

HOOK int stat(const char* path, struct stat* to) {
  Place place;
  return in_mount_here(&path, &place) ? stat_place(&place, to) : kernel_stat(AT_FDCWD, path, to, 0);
}

HOOK int lstat(const char* path, struct stat* to) {
  Place place;
  if (in_mount_here(&path, &place)) return stat_place(&place, to);
  return kernel_stat(AT_FDCWD, path, to, place.output != NULL ? 0 : AT_SYMLINK_NOFOLLOW);
}

HOOK int fstat(int descriptor, struct stat* to) {
  OpenFile* file = acquire(descriptor);
  if (file != NULL) return stat_file(file, to);
  return (int)REAL(syscall)(SYS_fstat, descriptor, to);
}

/* "" with AT_EMPTY_PATH means the descriptor itself, which may be the working folder's. */
static bool means_descriptor(const char* path, int flags) {
  return (flags & AT_EMPTY_PATH) != 0 && (path == NULL || *path == '\0');
}

HOOK int fstatat(int folder, const char* path, struct stat* to, int flags) {
  if (means_descriptor(path, flags)) {
    OpenFile* file = acquire(folder);
    if (file != NULL) return stat_file(file, to);
    if (folder == AT_FDCWD && folder_in_mount(NULL)) path = ".";
  }
  Place place;
  if (in_mount(&folder, &path, &place)) return stat_place(&place, to);
  if (place.output != NULL) flags &= ~AT_SYMLINK_NOFOLLOW; /* a link of ours, not the program's */
  return kernel_stat(folder, path, to, flags);
}

static void widen_stat(const struct stat* from, struct statx* to) {
  memset(to, 0, sizeof *to);
  to->stx_mask = STATX_BASIC_STATS;
  to->stx_blksize = (uint32_t)from->st_blksize;
  to->stx_nlink = (uint32_t)from->st_nlink;
  to->stx_uid = from->st_uid;
  to->stx_gid = from->st_gid;
  to->stx_mode = (uint16_t)from->st_mode;
  to->stx_ino = from->st_ino;
  to->stx_size = (uint64_t)from->st_size;
  to->stx_blocks = (uint64_t)from->st_blocks;
  to->stx_mtime.tv_sec = from->st_mtim.tv_sec;
  to->stx_mtime.tv_nsec = (uint32_t)from->st_mtim.tv_nsec;
  to->stx_atime = to->stx_mtime;
  to->stx_ctime = to->stx_mtime;
  to->stx_dev_major = major(from->st_dev);
  to->stx_dev_minor = minor(from->st_dev);
}

HOOK int statx(int folder, const char* path, int flags, unsigned mask, struct statx* to) {
  struct stat found;
  if (means_descriptor(path, flags)) {
    OpenFile* file = acquire(folder);
    if (file != NULL) {
      stat_file(file, &found);
      widen_stat(&found, to);
      return 0;
    }
    if (folder == AT_FDCWD && folder_in_mount(NULL)) path = ".";
  }
  Place place;
  if (!in_mount(&folder, &path, &place)) {
    if (place.output != NULL) flags &= ~AT_SYMLINK_NOFOLLOW;
    return REAL(statx)(folder, path, flags, mask, to);
  }
  if (stat_place(&place, &found) != 0) return -1;
  widen_stat(&found, to);
  return 0;
}

/* Names that programs compiled for glibc before 2.33 call, as those of every manylinux wheel. The
   version says which struct they mean: on 64-bit systems there is one. */
HOOK int __xstat(int version, const char* path, struct stat* to) {
  (void)version;
  return stat(path, to);
}
HOOK int __lxstat(int version, const char* path, struct stat* to) {
  (void)version;
  return lstat(path, to);
}
HOOK int __fxstat(int version, int descriptor, struct stat* to) {
  (void)version;
  return fstat(descriptor, to);
}
HOOK int __fxstatat(int version, int folder, const char* path, struct stat* to, int flags) {
  (void)version;
  return fstatat(folder, path, to, flags);
}

static int access_place(const Place* place, int mode) {
  PackEntry entry;
  PackStatus status;
  const int problem = find_entry(place, &entry, &status);
  if (problem != 0) return fail(problem);
  if ((mode & ~(R_OK | W_OK | X_OK)) != 0) return fail(EINVAL);
  if ((mode & W_OK) != 0) return fail(EROFS);
  return (mode & X_OK) != 0 && (status.mode & 0111) == 0 ? fail(EACCES) : 0;
}

HOOK int access(const char* path, int mode) {
  Place place;
  return in_mount_here(&path, &place) ? access_place(&place, mode) : REAL(access)(path, mode);
}

HOOK int faccessat(int folder, const char* path, int mode, int flags) {
  Place place;
  if (in_mount(&folder, &path, &place)) return access_place(&place, mode);
  return REAL(faccessat)(folder, path, mode, flags);
}

HOOK int euidaccess(const char* path, int mode) {
  Place place;
  return in_mount_here(&path, &place) ? access_place(&place, mode) : REAL(euidaccess)(path, mode);
}

/* There are no links in a pack. */
static int no_link(const Place* place) {
  PackEntry entry;
  const int problem = find_entry(place, &entry, NULL);
  return fail(problem == 0 ? EINVAL : problem);
}

static int no_link_of_output(const char* path) {
  struct stat found;
  return kernel_stat(AT_FDCWD, path, &found, 0) == 0 ? fail(EINVAL) : -1;
}

HOOK ssize_t readlink(const char* path, char* target, size_t room) {
  Place place;
  if (in_mount_here(&path, &place)) return no_link(&place);
  return place.output != NULL ? no_link_of_output(path) : REAL(readlink)(path, target, room);
}

HOOK ssize_t readlinkat(int folder, const char* path, char* target, size_t room) {
  Place place;
  if (in_mount(&folder, &path, &place)) return no_link(&place);
  if (place.output != NULL) return no_link_of_output(path);
  return REAL(readlinkat)(folder, path, target, room);
}

void __chk_fail(void) __attribute__((noreturn));

HOOK ssize_t __readlink_chk(const char* path, char* target, size_t count, size_t room) {
  if (count > room) __chk_fail();
  return readlink(path, target, count);
}

HOOK ssize_t __readlinkat_chk(int folder, const char* path, char* target, size_t count,
                              size_t room) {
  if (count > room) __chk_fail();
  return readlinkat(folder, path, target, count);
}

static int statfs_place(const Place* place, struct statfs* to) {
  PackEntry entry;
  const int problem = find_entry(place, &entry, NULL);
  if (problem != 0) return fail(problem);
  memset(to, 0, sizeof *to);
  to->f_type = magic;
  to->f_bsize = block_bytes;
  to->f_frsize = block_bytes;
  to->f_namelen = NAME_MAX;
  to->f_flags = ST_RDONLY;
  return 0;
}

static void widen(const struct statfs* from, struct statvfs* to) {
  memset(to, 0, sizeof *to);
  to->f_bsize = (unsigned long)from->f_bsize;
  to->f_frsize = (unsigned long)from->f_frsize;
  to->f_namemax = (unsigned long)from->f_namelen;
  to->f_flag = ST_RDONLY;
}

HOOK int statfs(const char* path, struct statfs* to) {
  Place place;
  return in_mount_here(&path, &place) ? statfs_place(&place, to) : REAL(statfs)(path, to);
}

HOOK int statvfs(const char* path, struct statvfs* to) {
  Place place;
  if (!in_mount_here(&path, &place)) return REAL(statvfs)(path, to);
  struct statfs found;
  if (statfs_place(&place, &found) != 0) return -1;
  widen(&found, to);
  return 0;
}

HOOK int fstatfs(int descriptor, struct statfs* to) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(fstatfs)(descriptor, to);
  const Place top = {.mount = file->mount, .inner = ""};
  release(file);
  return statfs_place(&top, to);
}

HOOK int fstatvfs(int descriptor, struct statvfs* to) {
  struct statfs found;
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(fstatvfs)(descriptor, to);
  release(file);
  if (fstatfs(descriptor, &found) != 0) return -1;
  widen(&found, to);
  return 0;
}

/* Limits are those of Linux, as of "/". */
HOOK long pathconf(const char* path, int name) {
  Place place;
  PackEntry entry;
  if (!in_mount_here(&path, &place)) return REAL(pathconf)(path, name);
  const int problem = find_entry(&place, &entry, NULL);
  return problem == 0 ? REAL(pathconf)("/", name) : fail(problem);
}

HOOK long fpathconf(int descriptor, int name) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(fpathconf)(descriptor, name);
  release(file);
  return REAL(pathconf)("/", name);
}

/* There are no extended attributes. */
static ssize_t no_attribute(const Place* place) {
  PackEntry entry;
  const int problem = find_entry(place, &entry, NULL);
  return fail(problem == 0 ? ENOTSUP : problem);
}

#define ATTRIBUTE_HOOK(function)                                                              \
  HOOK ssize_t function(const char* path, const char* name, void* value, size_t room) {       \
    Place place;                                                                              \
    return in_mount_here(&path, &place) ? no_attribute(&place)                                \
                                        : REAL(function)(path, name, value, room);            \
  }
ATTRIBUTE_HOOK(getxattr)
ATTRIBUTE_HOOK(lgetxattr)

#define LIST_HOOK(function)                                                                   \
  HOOK ssize_t function(const char* path, char* names, size_t room) {                         \
    Place place;                                                                              \
    if (!in_mount_here(&path, &place)) return REAL(function)(path, names, room);              \
    return no_attribute(&place) < 0 && errno == ENOTSUP ? 0 : -1;                             \
  }
LIST_HOOK(listxattr)
LIST_HOOK(llistxattr)

HOOK ssize_t fgetxattr(int descriptor, const char* name, void* value, size_t room) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(fgetxattr)(descriptor, name, value, room);
  release(file);
  return fail(ENOTSUP);
}

HOOK ssize_t flistxattr(int descriptor, char* names, size_t room) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(flistxattr)(descriptor, names, room);
  release(file);
  return 0;
}

ALIAS(stat64, stat)
ALIAS(lstat64, lstat)
ALIAS(fstat64, fstat)
ALIAS(fstatat64, fstatat)
ALIAS(__xstat64, __xstat)
ALIAS(__lxstat64, __lxstat)
ALIAS(__fxstat64, __fxstat)
ALIAS(__fxstatat64, __fxstatat)
ALIAS(eaccess, euidaccess)
ALIAS(statfs64, statfs)
ALIAS(statvfs64, statvfs)
ALIAS(fstatfs64, fstatfs)
ALIAS(fstatvfs64, fstatvfs)
