/* The hook of `syscall`, by which programs make calls that their C library had no function for when they were
   written: libuv, and so Node.js, asks for statx like that. What these files have a hook for goes to it. */
#include "shim.h"

#include <dirent.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The architecture's calls of the first Linux, which newer architectures do not have. */
static bool call_of_old(long number, const long at[6], long* result) {
  switch (number) {
#ifdef SYS_open
    case SYS_open: *result = open((const char*)at[0], (int)at[1], (mode_t)at[2]); return true;
    case SYS_stat: *result = stat((const char*)at[0], (struct stat*)at[1]); return true;
    case SYS_lstat: *result = lstat((const char*)at[0], (struct stat*)at[1]); return true;
    case SYS_access: *result = access((const char*)at[0], (int)at[1]); return true;
    case SYS_readlink:
      *result = readlink((const char*)at[0], (char*)at[1], (size_t)at[2]);
      return true;
    case SYS_rename: *result = rename((const char*)at[0], (const char*)at[1]); return true;
    case SYS_unlink: *result = unlink((const char*)at[0]); return true;
    case SYS_mkdir: *result = mkdir((const char*)at[0], (mode_t)at[1]); return true;
    case SYS_rmdir: *result = rmdir((const char*)at[0]); return true;
    case SYS_dup2: *result = dup2((int)at[0], (int)at[1]); return true;
#endif
    default: (void)at; (void)result; return false;
  }
}

static bool call_of_paths(long number, const long at[6], long* result) {
  const int folder = (int)at[0];
  const char* path = (const char*)at[1];
  switch (number) {
    case SYS_statx:
      *result = statx(folder, path, (int)at[2], (unsigned)at[3], (struct statx*)at[4]);
      return true;
    case SYS_newfstatat:
      *result = fstatat(folder, path, (struct stat*)at[2], (int)at[3]);
      return true;
    case SYS_openat: *result = openat(folder, path, (int)at[2], (mode_t)at[3]); return true;
    case SYS_faccessat: *result = faccessat(folder, path, (int)at[2], 0); return true;
#ifdef SYS_faccessat2
    case SYS_faccessat2: *result = faccessat(folder, path, (int)at[2], (int)at[3]); return true;
#endif
    case SYS_readlinkat:
      *result = readlinkat(folder, path, (char*)at[2], (size_t)at[3]);
      return true;
    case SYS_statfs: *result = statfs((const char*)at[0], (struct statfs*)at[1]); return true;
    case SYS_mkdirat: *result = mkdirat(folder, path, (mode_t)at[2]); return true;
    case SYS_unlinkat: *result = unlinkat(folder, path, (int)at[2]); return true;
    case SYS_renameat2:
      *result = renameat2(folder, path, (int)at[2], (const char*)at[3], (unsigned)at[4]);
      return true;
    case SYS_chdir: *result = chdir((const char*)at[0]); return true;
    case SYS_execve:
      *result = execve((const char*)at[0], (char* const*)at[1], (char* const*)at[2]);
      return true;
    default: return false;
  }
}

static bool call_of_descriptors(long number, const long at[6], long* result) {
  const int file = (int)at[0];
  const struct iovec* parts = (const struct iovec*)at[1];
  switch (number) {
    case SYS_fstat: *result = fstat(file, (struct stat*)at[1]); return true;
    case SYS_fstatfs: *result = fstatfs(file, (struct statfs*)at[1]); return true;
    case SYS_read: *result = read(file, (void*)at[1], (size_t)at[2]); return true;
    case SYS_pread64: *result = pread(file, (void*)at[1], (size_t)at[2], at[3]); return true;
    case SYS_readv: *result = readv(file, parts, (int)at[2]); return true;
    case SYS_preadv: *result = preadv(file, parts, (int)at[2], at[3]); return true;
    case SYS_preadv2: *result = preadv2(file, parts, (int)at[2], at[3], (int)at[5]); return true;
    case SYS_lseek: *result = lseek(file, at[1], (int)at[2]); return true;
    case SYS_close: *result = close(file); return true;
    case SYS_getdents64: *result = getdents64(file, (void*)at[1], (size_t)at[2]); return true;
    case SYS_dup: *result = dup(file); return true;
    case SYS_dup3: *result = dup3(file, (int)at[1], (int)at[2]); return true;
    case SYS_fcntl: *result = fcntl(file, (int)at[1], at[2]); return true;
    case SYS_fchdir: *result = fchdir(file); return true;
    case SYS_sendfile:
      *result = sendfile(file, (int)at[1], (off_t*)at[2], (size_t)at[3]);
      return true;
    case SYS_copy_file_range:
      *result = copy_file_range(file, (off64_t*)at[1], (int)at[2], (off64_t*)at[3], (size_t)at[4],
                                (unsigned)at[5]);
      return true;
    case SYS_mmap:
      *result = (long)mmap((void*)at[0], (size_t)at[1], (int)at[2], (int)at[3], (int)at[4], at[5]);
      return true;
    default: return false;
  }
}

HOOK long syscall(long number, ...) {
  long at[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; ++i) at[i] = va_arg(list, long); /* what was not given is not looked at */
  va_end(list);
  long result;
  if (mount_count() > 0 &&
      (call_of_paths(number, at, &result) || call_of_descriptors(number, at, &result) ||
       call_of_old(number, at, &result))) {
    return result;
  }
  return REAL(syscall)(number, at[0], at[1], at[2], at[3], at[4], at[5]);
}
