/* Hooks through which a descriptor leaves this process's hands: dup, fcntl, ioctl, mmap, sendfile and their
   like. The kernel then gets a true descriptor of a sealed copy in memory (promote), which from there on
   stands for the file: both share one position, as after dup. */
#include "shim.h"

#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

#include "aliases.h"

void __chk_fail(void) __attribute__((noreturn)); /* the C library's: "buffer overflow detected" */

enum { clone_request = 0x40049409 }; /* FICLONE; its argument is a descriptor */

/* Another user-level descriptor: of folders, of which the kernel can have none. */
static int duplicate_folder(const OpenFile* file, int flags) {
  return new_descriptor(file->mount, file->entry, &file->status, flags);
}

static bool is_folder(const OpenFile* file) { return file->entry.kind == PACK_FOLDER; }

static int copied(int descriptor, int result) {
  if (result >= 0) output_copied(descriptor, result);
  return result;
}

HOOK int dup(int descriptor) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return copied(descriptor, REAL(dup)(descriptor));
  int result;
  if (is_folder(file)) {
    result = duplicate_folder(file, O_RDONLY);
  } else {
    const int kernel = promote(file);
    result = kernel < 0 ? -1 : REAL(dup)(kernel);
  }
  release(file);
  return result;
}

HOOK int dup3(int descriptor, int wanted, int flags) {
  OpenFile* file = acquire(descriptor);
  const int problem = is_hidden(wanted) ? vacate(wanted) : 0;
  if (problem != 0) {
    if (file != NULL) release(file);
    return fail(problem);
  }
  if (file == NULL) {
    if (is_output(wanted) && wanted != descriptor) output_closing(wanted);
    return copied(descriptor, REAL(dup3)(descriptor, wanted, flags));
  }
  /* A folder cannot have a number of the kernel's. */
  const int kernel = is_folder(file) ? fail(EBADF) : promote(file);
  const int result = kernel < 0 ? -1 : REAL(dup3)(kernel, wanted, flags);
  release(file);
  return result;
}

HOOK int dup2(int descriptor, int wanted) {
  OpenFile* file = descriptor == wanted ? acquire(descriptor) : NULL;
  if (file != NULL) {
    release(file);
    return wanted;
  }
  if (descriptor >= first_descriptor || is_hidden(wanted)) return dup3(descriptor, wanted, 0);
  if (is_output(wanted) && wanted != descriptor) output_closing(wanted);
  return copied(descriptor, REAL(dup2)(descriptor, wanted));
}

/* Nobody writes to the file: every lock for reading is granted. */
static int lock_file(int command, struct flock* lock) {
  if (command == F_GETLK || command == F_OFD_GETLK) {
    lock->l_type = F_UNLCK;
    return 0;
  }
  return lock->l_type == F_WRLCK ? fail(EBADF) : 0;
}

static int control_file(OpenFile* file, int command, void* argument) {
  switch (command) {
    case F_GETFD:
      return atomic_load(&file->closes_on_exec) ? FD_CLOEXEC : 0;
    case F_SETFD:
      atomic_store(&file->closes_on_exec, ((intptr_t)argument & FD_CLOEXEC) != 0);
      return 0;
    case F_GETFL:
      return atomic_load(&file->flags) & ~(O_CLOEXEC | O_CREAT | O_NOCTTY | O_NOFOLLOW);
    case F_SETFL: { /* without effect on a file that is only read, and remembered */
      const int settable = O_APPEND | O_NONBLOCK | O_NOATIME;
      const int set = (int)(intptr_t)argument & settable;
      atomic_store(&file->flags, (atomic_load(&file->flags) & ~settable) | set);
      return 0;
    }
    case F_GETLK:
    case F_SETLK:
    case F_SETLKW:
    case F_OFD_GETLK:
    case F_OFD_SETLK:
    case F_OFD_SETLKW:
      return lock_file(command, argument);
    case F_DUPFD:
    case F_DUPFD_CLOEXEC:
      if (is_folder(file)) {
        return duplicate_folder(file, command == F_DUPFD_CLOEXEC ? O_CLOEXEC : 0);
      }
      break;
    default:
      break;
  }
  const int kernel = promote(file);
  return kernel < 0 ? -1 : REAL(fcntl)(kernel, command, argument);
}

HOOK int fcntl(int descriptor, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  OpenFile* file = acquire(descriptor);
  if (file == NULL) {
    const int number = REAL(fcntl)(descriptor, command, argument);
    return command == F_DUPFD || command == F_DUPFD_CLOEXEC ? copied(descriptor, number) : number;
  }
  const int result = control_file(file, command, argument);
  release(file);
  return result;
}

static int control_device(OpenFile* file, unsigned long request, void* argument) {
  switch (request) {
    case TCGETS:
    case TIOCGWINSZ:
    case TIOCGPGRP:
      return fail(ENOTTY);
    case FIOCLEX:
    case FIONCLEX:
      atomic_store(&file->closes_on_exec, request == FIOCLEX);
      return 0;
    case FIONREAD: {
      const int kernel = kernel_of(file);
      if (kernel >= 0) return REAL(ioctl)(kernel, request, argument);
      *(int*)argument = (int)((int64_t)file->status.size - atomic_load(&file->position));
      return 0;
    }
    default: {
      const int kernel = is_folder(file) ? fail(ENOTTY) : promote(file);
      return kernel < 0 ? -1 : REAL(ioctl)(kernel, request, argument);
    }
  }
}

HOOK int ioctl(int descriptor, unsigned long request, ...) {
  va_list arguments;
  va_start(arguments, request);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  OpenFile* file = acquire(descriptor);
  if (file == NULL && request == clone_request) { /* onto a file of the kernel's: not possible */
    OpenFile* source = acquire((int)(intptr_t)argument);
    if (source != NULL) {
      release(source);
      return fail(EXDEV);
    }
  }
  if (file == NULL) return REAL(ioctl)(descriptor, request, argument);
  const int result = control_device(file, request, argument);
  release(file);
  return result;
}

/* Releases the file, and fails with `problem`. */
static int refuse(OpenFile* file, int problem) {
  release(file);
  return fail(problem);
}

HOOK int isatty(int descriptor) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(isatty)(descriptor);
  refuse(file, ENOTTY);
  return 0;
}

HOOK int tcgetattr(int descriptor, struct termios* to) {
  OpenFile* file = acquire(descriptor);
  return file == NULL ? REAL(tcgetattr)(descriptor, to) : refuse(file, ENOTTY);
}

HOOK int flock(int descriptor, int operation) {
  OpenFile* file = acquire(descriptor);
  /* A file that is written has one writer: the lock that says so stays. */
  if (file == NULL) return is_output_writer(descriptor) ? 0 : REAL(flock)(descriptor, operation);
  release(file);
  return 0;
}

/* The kernel's descriptor of a file that it has to read itself; -1 with errno. A number that is not ours
   is returned as it is. */
static int kernel_number(int descriptor) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return descriptor;
  const int kernel = promote(file);
  release(file);
  return kernel;
}

HOOK void* mmap(void* wanted, size_t length, int protection, int flags, int descriptor,
                off_t offset) {
  if (descriptor >= first_descriptor && (flags & MAP_ANONYMOUS) == 0) {
    descriptor = kernel_number(descriptor);
    if (descriptor < 0) return MAP_FAILED;
  }
  return REAL(mmap)(wanted, length, protection, flags, descriptor, offset);
}

HOOK ssize_t sendfile(int target, int source, off_t* offset, size_t count) {
  source = kernel_number(source);
  return source < 0 ? -1 : REAL(sendfile)(target, source, offset, count);
}

HOOK ssize_t splice(int source, off64_t* from, int target, off64_t* to, size_t count,
                    unsigned flags) {
  source = kernel_number(source);
  return source < 0 ? -1 : REAL(splice)(source, from, target, to, count, flags);
}

/* Between file systems, which the kernel mostly refuses too: programs then read and write. */
HOOK ssize_t copy_file_range(int source, off64_t* from, int target, off64_t* to, size_t count,
                             unsigned flags) {
  OpenFile* file = acquire(source);
  return file == NULL ? REAL(copy_file_range)(source, from, target, to, count, flags)
                      : refuse(file, EXDEV);
}

HOOK int posix_fadvise(int descriptor, off_t offset, off_t length, int advice) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(posix_fadvise)(descriptor, offset, length, advice);
  release(file);
  return 0;
}

HOOK ssize_t readahead(int descriptor, off64_t offset, size_t count) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(readahead)(descriptor, offset, count);
  release(file);
  return 0;
}

HOOK int fsync(int descriptor) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(fsync)(descriptor);
  release(file);
  return 0;
}

HOOK int fdatasync(int descriptor) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(fdatasync)(descriptor);
  release(file);
  return 0;
}

/* By the C library's own call: its lockf makes it past the hooks. */
HOOK int lockf(int descriptor, int command, off_t length) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(lockf)(descriptor, command, length);
  release(file);
  switch (command) {
    case F_TEST:
    case F_ULOCK:
      return 0;
    case F_LOCK:
    case F_TLOCK:
      return fail(EBADF); /* these lock for writing */
    default:
      return fail(EINVAL);
  }
}

/* What poll says of a file that can always be read, and, as of any regular file, written. */
static short poll_file(const struct pollfd* asked) {
  return asked->events & (POLLIN | POLLOUT | POLLRDNORM | POLLWRNORM);
}

static bool is_ours(int descriptor) {
  OpenFile* file = acquire(descriptor);
  if (file != NULL) release(file);
  return file != NULL;
}

/* The kernel is asked about the others, a copy in which ours are left out (negative). It waits only if none
   of ours is ready. */
static int poll_others(struct pollfd* asked, nfds_t count, const struct timespec* timeout,
                       const sigset_t* mask) {
  static const struct timespec now = {0, 0};
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && count > limit.rlim_cur) return fail(EINVAL);
  struct pollfd* copy = malloc(count * sizeof *copy);
  if (copy == NULL) return fail(ENOMEM);
  int ready = 0;
  for (nfds_t i = 0; i < count; ++i) {
    copy[i] = asked[i];
    if (asked[i].fd < first_descriptor || !is_ours(asked[i].fd)) continue;
    copy[i].fd = -1;
    ready += poll_file(&asked[i]) != 0;
  }
  const int found = REAL(ppoll)(copy, count, ready > 0 ? &now : timeout, mask);
  for (nfds_t i = 0; found >= 0 && i < count; ++i) {
    asked[i].revents = copy[i].fd == asked[i].fd ? copy[i].revents : poll_file(&asked[i]);
  }
  const int problem = errno;
  free(copy);
  errno = problem;
  return found < 0 ? found : found + ready;
}

static bool has_ours(const struct pollfd* asked, nfds_t count) {
  for (nfds_t i = 0; i < count; ++i) {
    if (asked[i].fd >= first_descriptor) return true;
  }
  return false;
}

HOOK int ppoll(struct pollfd* asked, nfds_t count, const struct timespec* timeout,
               const sigset_t* mask) {
  return has_ours(asked, count) ? poll_others(asked, count, timeout, mask)
                                : REAL(ppoll)(asked, count, timeout, mask);
}

/* The C library declares that poll writes to `asked`; it also reads. */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

HOOK int poll(struct pollfd* asked, nfds_t count, int timeout_ms) {
  if (!has_ours(asked, count)) return REAL(poll)(asked, count, timeout_ms);
  const struct timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
  return poll_others(asked, count, timeout_ms < 0 ? NULL : &timeout, NULL);
}

HOOK int __poll_chk(struct pollfd* asked, nfds_t count, int timeout_ms, size_t room) {
  if (room / sizeof *asked < count) __chk_fail();
  return poll(asked, count, timeout_ms);
}

HOOK int __ppoll_chk(struct pollfd* asked, nfds_t count, const struct timespec* timeout,
                     const sigset_t* mask, size_t room) {
  if (room / sizeof *asked < count) __chk_fail();
  return ppoll(asked, count, timeout, mask);
}

/* As the kernel says of regular files. */
struct epoll_event;
int epoll_ctl(int set, int operation, int descriptor, struct epoll_event* event);
HOOK int epoll_ctl(int set, int operation, int descriptor, struct epoll_event* event) {
  OpenFile* file = acquire(descriptor);
  return file == NULL ? REAL(epoll_ctl)(set, operation, descriptor, event) : refuse(file, EPERM);
}

/* --- sockets: descriptors that are sent to another process (SCM_RIGHTS) -------------------------------- */

static bool sends_ours(struct msghdr* message) {
  for (struct cmsghdr* part = CMSG_FIRSTHDR(message); part != NULL; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= part->cmsg_len; at += sizeof(int)) {
      int number;
      memcpy(&number, CMSG_DATA(part) + at, sizeof number);
      if (number >= first_descriptor) return true;
    }
  }
  return false;
}

/* In place: the receiver gets the kernel's descriptors. False with errno. */
static bool replace_ours(struct msghdr* message) {
  for (struct cmsghdr* part = CMSG_FIRSTHDR(message); part != NULL; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= part->cmsg_len; at += sizeof(int)) {
      int number;
      memcpy(&number, CMSG_DATA(part) + at, sizeof number);
      const int kernel = kernel_number(number);
      if (kernel < 0 && number >= first_descriptor) return false;
      memcpy(CMSG_DATA(part) + at, &kernel, sizeof kernel);
    }
  }
  return true;
}

HOOK ssize_t sendmsg(int socket, const struct msghdr* message, int flags) {
  struct msghdr own;
  if (message == NULL || message->msg_controllen == 0 ||
      (own = *message, !sends_ours(&own))) {
    return REAL(sendmsg)(socket, message, flags);
  }
  own.msg_control = malloc(own.msg_controllen);
  if (own.msg_control == NULL) return fail(ENOBUFS);
  memcpy(own.msg_control, message->msg_control, own.msg_controllen);
  const ssize_t sent = replace_ours(&own) ? REAL(sendmsg)(socket, &own, flags) : -1;
  const int problem = errno;
  free(own.msg_control);
  errno = problem;
  return sent;
}

ALIAS(__dup2, dup2)
ALIAS(lockf64, lockf)
ALIAS(fcntl64, fcntl)
ALIAS(__fcntl, fcntl)
ALIAS(mmap64, mmap)
ALIAS(sendfile64, sendfile)
ALIAS(posix_fadvise64, posix_fadvise)
