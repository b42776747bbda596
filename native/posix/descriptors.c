/* Descriptors that live in this process only: numbers from 2^20 on, which the kernel gives out to nobody and
   refuses (EBADF) where one reaches it past the hooks.

   A file is freed by its last user: another thread may close a descriptor while a read of it is under
   way. The records themselves are never freed, so that a number can be looked up without a lock; neither
   opening nor closing takes one, so that a signal's handler may do both.

   A file that was promoted has a descriptor of the kernel's that the program does not know of: a hidden
   one. Hidden numbers are high, closing one has no effect, and one that the program gives to a file of its
   own (dup2) is vacated first. */
#include "shim.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static OpenFile files[max_descriptors]; /* untouched pages of it cost nothing */
static atomic_int used_files;
/* A stack of free records: the index of the first, plus 1, in the low half. The high half counts changes, so
   that a record which left and came back is not taken for one that stayed. */
static _Atomic uint64_t free_files;

enum { most_hidden = 1 << 16, usual_hidden = 1024 };
static _Atomic uint64_t hidden[most_hidden / 64]; /* a bit for each number of the kernel's */

static uint64_t stack_top(uint64_t before, int index) {
  return ((before >> 32) + 1) << 32 | (uint64_t)(uint32_t)(index + 1);
}

static void push_free(int index) {
  uint64_t top = atomic_load(&free_files);
  do {
    atomic_store(&files[index].next_free, (int)(uint32_t)top - 1);
  } while (!atomic_compare_exchange_weak(&free_files, &top, stack_top(top, index)));
}

static OpenFile* allocate(void) {
  uint64_t top = atomic_load(&free_files);
  while ((uint32_t)top != 0) {
    OpenFile* file = &files[(uint32_t)top - 1];
    const int next = atomic_load(&file->next_free);
    if (atomic_compare_exchange_weak(&free_files, &top, stack_top(top, next))) return file;
  }
  int index = atomic_load(&used_files);
  do {
    if (index == max_descriptors) return NULL;
  } while (!atomic_compare_exchange_weak(&used_files, &index, index + 1));
  return &files[index]; /* all zero: its mutex is ready */
}

/* The threads that held locks are not in the child. What they were making is not published, and is lost. */
static void free_locks(void) {
  for (int i = 0; i < atomic_load(&used_files); ++i) pthread_mutex_init(&files[i].loading, NULL);
  free_mount_locks();
}
__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(NULL, NULL, free_locks); }

void protect(Protection* before) {
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT};
  sigset_t others;
  sigfillset(&others);
  for (size_t i = 0; i < sizeof faults / sizeof *faults; ++i) sigdelset(&others, faults[i]);
  pthread_sigmask(SIG_BLOCK, &others, &before->mask);
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before->cancel_state);
}

void unprotect(const Protection* before) {
  pthread_setcancelstate(before->cancel_state, NULL);
  pthread_sigmask(SIG_SETMASK, &before->mask, NULL);
}

static void lock(OpenFile* file, Protection* before) {
  protect(before);
  pthread_mutex_lock(&file->loading);
}

static void unlock(OpenFile* file, const Protection* before) {
  pthread_mutex_unlock(&file->loading);
  unprotect(before);
}

/* --- hidden descriptors ------------------------------------------------------------------------------ */

bool is_hidden(int number) {
  if (number < 0 || number >= most_hidden) return false;
  return (atomic_load_explicit(&hidden[number / 64], memory_order_relaxed) >> (number % 64) & 1) != 0;
}

static void mark_hidden(int number, bool is) {
  if (number >= most_hidden) return;
  const uint64_t bit = UINT64_C(1) << (number % 64);
  if (is) {
    atomic_fetch_or(&hidden[number / 64], bit);
  } else {
    atomic_fetch_and(&hidden[number / 64], ~bit);
  }
}

int next_hidden(int number) {
  for (; number >= 0 && number < most_hidden; ++number) {
    if (number % 64 == 0 && atomic_load(&hidden[number / 64]) == 0) {
      number += 63;
    } else if (is_hidden(number)) {
      return number;
    }
  }
  return -1;
}

/* A copy of a descriptor under a high number, marked; -1 with errno. With fork_guard_enter, until a file has
   the number: fork copies the table of descriptors first and the memory afterwards, so that a child's file
   could have a number that the child has not. */
static int hidden_copy(int descriptor) {
  struct rlimit limit;
  int from = 0;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    from = limit.rlim_cur / 2 < usual_hidden ? (int)(limit.rlim_cur / 2) : usual_hidden;
  }
  int copied = REAL(fcntl)(descriptor, F_DUPFD_CLOEXEC, from);
  if (copied < 0) copied = REAL(fcntl)(descriptor, F_DUPFD_CLOEXEC, 0); /* as high as there is room */
  if (copied >= 0) mark_hidden(copied, true);
  return copied;
}

/* Another thread that reads the file at this moment may still use the number: as with any number that one
   thread gives a new meaning while another uses it. */
int vacate(int number) {
  int problem = 0;
  for (int i = 0; problem == 0 && i < used_descriptors(); ++i) {
    OpenFile* file = acquire(first_descriptor + i);
    if (file == NULL) continue;
    if (atomic_load(&file->kernel) == number) {
      fork_guard_enter();
      const int moved = hidden_copy(number);
      problem = moved < 0 ? errno : 0;
      if (moved >= 0) atomic_store(&file->kernel, moved);
      fork_guard_leave();
    }
    release(file);
  }
  if (problem == 0) mark_hidden(number, false);
  return problem;
}

/* --- the table of open files --------------------------------------------------------------------------- */

static void publish(OpenFile* file, Mount* mount, PackEntry entry, const PackStatus* status,
                    int flags) {
  file->mount = mount;
  file->pack = atomic_load(&mount->pack);
  file->entry = entry;
  file->status = *status;
  atomic_store_explicit(&file->flags, flags, memory_order_relaxed);
  file->own_bytes = NULL;
  atomic_store_explicit(&file->closes_on_exec, (flags & O_CLOEXEC) != 0, memory_order_relaxed);
  atomic_store_explicit(&file->position, 0, memory_order_relaxed);
  atomic_store_explicit(&file->kernel, -1, memory_order_relaxed);
  atomic_store_explicit(&file->bytes, NULL, memory_order_relaxed);
  atomic_store_explicit(&file->users, 1, memory_order_relaxed);
  atomic_store_explicit(&file->is_open, true, memory_order_release);
}

int new_descriptor(Mount* mount, PackEntry entry, const PackStatus* status, int flags) {
  OpenFile* file = allocate();
  if (file == NULL) return fail(EMFILE);
  publish(file, mount, entry, status, flags);
  return number_of(file);
}

void restore_descriptor(int number, Mount* mount, PackEntry entry, int64_t position) {
  char name[PATH_MAX];
  size_t length = 0;
  PackStatus status;
  const int index = number - first_descriptor;
  PackFiles* pack = index >= 0 && index < max_descriptors ? mount_pack(mount) : NULL;
  if (pack == NULL || pack_files_name(pack, entry, name, &length) != 0) return;
  if (pack_files_find(pack, name, length, &entry, &status) != 0) return;
  /* Before any other thread. The numbers below it stay free. */
  int used = atomic_load(&used_files);
  for (; used < index; ++used) push_free(used);
  if (used > index) return; /* not in the order in which they were written */
  atomic_store(&used_files, index + 1);
  publish(&files[index], mount, entry, &status, O_RDONLY);
  atomic_store(&files[index].position, position < 0 ? 0 : position);
}

int number_of(const OpenFile* file) { return first_descriptor + (int)(file - files); }

int used_descriptors(void) { return atomic_load(&used_files); }

OpenFile* acquire_slow(int descriptor) {
  const int index = descriptor - first_descriptor;
  if (index >= max_descriptors) return NULL;
  OpenFile* file = &files[index];
  int users = atomic_load_explicit(&file->users, memory_order_relaxed);
  do {
    if (users == 0) return NULL;
  } while (!atomic_compare_exchange_weak_explicit(&file->users, &users, users + 1,
                                                  memory_order_acquire, memory_order_relaxed));
  if (atomic_load_explicit(&file->is_open, memory_order_acquire)) return file;
  release(file);
  return NULL;
}

void release(OpenFile* file) {
  if (atomic_fetch_sub_explicit(&file->users, 1, memory_order_acq_rel) != 1) return;
  const int kernel = atomic_load(&file->kernel);
  if (kernel >= 0) {
    mark_hidden(kernel, false);
    REAL(close)(kernel);
  }
  if (file->own_bytes != NULL) munmap(file->own_bytes, file->status.size);
  push_free((int)(file - files));
}

int close_descriptor(OpenFile* file) {
  const bool was_open = atomic_exchange(&file->is_open, false);
  if (was_open) release(file); /* the table's own use */
  release(file);
  return was_open ? 0 : fail(EBADF);
}

/* Has `bytes` point to the whole sample; 0 or an errno. */
static int load(OpenFile* file) {
  Protection before;
  lock(file, &before);
  int problem = 0;
  const void* bytes = atomic_load(&file->bytes);
  if (bytes == NULL) problem = pack_files_view(file->pack, file->entry.number, &bytes);
  if (bytes == NULL && problem == 0) {
    /* Not malloc: read may be called in a signal handler. */
    void* own = mmap(NULL, file->status.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                     -1, 0);
    problem = own == MAP_FAILED ? errno : pack_files_read(file->pack, file->entry.number, own);
    if (problem == 0) {
      file->own_bytes = own;
      bytes = own;
    } else if (own != MAP_FAILED) {
      munmap(own, file->status.size);
    }
  }
  if (problem == 0) atomic_store_explicit(&file->bytes, bytes, memory_order_release);
  unlock(file, &before);
  return problem;
}

static int copy(OpenFile* file, void* target, size_t count, uint64_t position) {
  const void* bytes = atomic_load_explicit(&file->bytes, memory_order_acquire);
  if (bytes == NULL) {
    /* All at once, as most programs read small files: no need to keep the bytes. */
    if (position == 0 && count == file->status.size) {
      int problem = pack_files_read_stored(file->pack, file->entry.number, target);
      if (problem != ENOTSUP) return problem;
      Protection before;
      protect(&before);
      problem = pack_files_read(file->pack, file->entry.number, target);
      unprotect(&before);
      return problem;
    }
    const int problem = load(file);
    if (problem != 0) return problem;
    bytes = atomic_load(&file->bytes);
  }
  return pack_files_copy(target, (const char*)bytes + position, count);
}

int kernel_of(OpenFile* file) {
  const int kernel = atomic_load_explicit(&file->kernel, memory_order_acquire);
  if (kernel >= 0 || atomic_load(&file->position) != position_of_kernel) return kernel;
  Protection before; /* another thread promotes it now */
  lock(file, &before);
  unlock(file, &before);
  return atomic_load(&file->kernel);
}

ssize_t read_file(OpenFile* file, void* target, size_t count, int64_t position) {
  if (file->entry.kind == PACK_FOLDER) return fail(EISDIR);
  if ((atomic_load_explicit(&file->flags, memory_order_relaxed) & O_PATH) != 0) return fail(EBADF);
  const bool moves = position < 0;
  const int64_t size = (int64_t)file->status.size;
  int64_t from = position;
  int64_t length = 0;
  for (bool has_part = false; !has_part;) { /* two threads that read one descriptor get different parts */
    const int kernel = kernel_of(file);
    if (kernel >= 0) {
      return moves ? REAL(read)(kernel, target, count) : REAL(pread)(kernel, target, count, position);
    }
    if (moves) from = atomic_load(&file->position);
    if (from == position_of_kernel) continue;
    length = from >= size ? 0 : size - from;
    if ((uint64_t)length > count) length = (int64_t)count;
    has_part = !moves || atomic_compare_exchange_weak(&file->position, &from, from + length);
  }
  if (length == 0) return 0;
  const int problem = copy(file, target, (size_t)length, (uint64_t)from);
  if (problem == 0) return length;
  int64_t moved = from + length;
  if (moves) atomic_compare_exchange_strong(&file->position, &moved, from);
  return fail(problem);
}

off_t move_position(OpenFile* file, off_t offset, int origin) {
  for (;;) {
    const int kernel = kernel_of(file);
    if (kernel >= 0) return REAL(lseek)(kernel, offset, origin);
    int64_t before = atomic_load(&file->position);
    if (before == position_of_kernel) continue;
    const int64_t size = file->entry.kind == PACK_FOLDER ? 0 : (int64_t)file->status.size;
    const int64_t from = origin == SEEK_SET ? 0 : origin == SEEK_CUR ? before : size;
    int64_t target;
    if (__builtin_add_overflow(from, offset, &target) || target < 0) return fail(EINVAL);
    if (atomic_compare_exchange_weak(&file->position, &before, target)) return target;
  }
}

static int fill_copy(OpenFile* file, int memory) {
  const size_t size = file->status.size;
  if (ftruncate(memory, (off_t)size) != 0) return errno;
  if (size == 0) return 0;
  const void* bytes = atomic_load(&file->bytes);
  if (bytes == NULL) {
    const int problem = pack_files_view(file->pack, file->entry.number, &bytes);
    if (problem != 0) return problem;
  }
  if (bytes == NULL) { /* compressed: decoded in place */
    void* target = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (target == MAP_FAILED) return errno;
    const int problem = pack_files_read(file->pack, file->entry.number, target);
    munmap(target, size);
    return problem;
  }
  for (size_t done = 0; done < size;) {
    const ssize_t written = pwrite(memory, (const char*)bytes + done, size - done, (off_t)done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 && errno != EFAULT ? errno : EIO; /* the shard shrank */
    done += (size_t)written;
  }
  return 0;
}

/* A descriptor that can only be read, as the one that it stands for; else that for writing, which the
   seals refuse. */
static int reopened(int memory) {
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", memory);
  const int opened = REAL(open)(link, O_RDONLY | O_CLOEXEC);
  if (opened < 0) return memory;
  REAL(close)(memory);
  return opened;
}

/* A descriptor of a sealed copy; -1 with errno. */
static int sealed_copy(OpenFile* file) {
  char name[PATH_MAX];
  size_t length = 0;
  if (pack_files_name(file->pack, file->entry, name, &length) != 0 || length > 200) length = 0;
  name[length] = '\0';
  const int memory = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (memory < 0) return -1;
  const int problem = fill_copy(file, memory);
  if (problem != 0) {
    REAL(close)(memory);
    return fail(problem);
  }
  struct stat status;
  fill_stat(file->mount, &file->status, &status);
  const struct timespec times[2] = {status.st_mtim, status.st_mtim};
  fchmod(memory, file->status.mode & 07777);
  futimens(memory, times);
  REAL(fcntl)(memory, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
  return reopened(memory);
}

/* Hides a descriptor and closes it under the number that it had; -1 with errno. */
static int hide(int descriptor) {
  const int kernel = descriptor < 0 ? -1 : hidden_copy(descriptor);
  const int problem = errno;
  if (descriptor >= 0) REAL(close)(descriptor);
  errno = problem;
  return kernel;
}

int promote(OpenFile* file) {
  if (file->entry.kind == PACK_FOLDER) return fail(EINVAL);
  int kernel = atomic_load_explicit(&file->kernel, memory_order_acquire);
  if (kernel >= 0) return kernel;
  const int before = errno;
  Protection protection;
  lock(file, &protection);
  kernel = atomic_load(&file->kernel);
  if (kernel < 0) {
    const int copied = sealed_copy(file);
    fork_guard_enter();
    kernel = hide(copied);
    if (kernel >= 0) { /* who sees this position waits for the lock, and then uses the kernel's */
      REAL(lseek)(kernel, atomic_exchange(&file->position, position_of_kernel), SEEK_SET);
      atomic_store_explicit(&file->kernel, kernel, memory_order_release);
    }
    fork_guard_leave();
  }
  unlock(file, &protection);
  if (kernel >= 0) errno = before;
  return kernel;
}
