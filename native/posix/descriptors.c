/* Descriptors that live in this process only: numbers from 2^20 on, which the kernel gives out to nobody and
   refuses (EBADF) where one reaches it past the hooks.

   A file is freed by its last user: another thread may close a descriptor while a read of it is under
   way. The records themselves are never freed, so that a number can be looked up without a lock. */
#include "shim.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static OpenFile files[max_descriptors]; /* untouched pages of it cost nothing */
static pthread_mutex_t allocating = PTHREAD_MUTEX_INITIALIZER; /* of what follows */
static int free_file = -1;
static int used_files;

static void lock(void) { pthread_mutex_lock(&allocating); }
static void unlock(void) { pthread_mutex_unlock(&allocating); }

/* Another thread may hold the lock while this one forks. */
__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(lock, unlock, unlock); }

static OpenFile* allocate(void) {
  OpenFile* file = NULL;
  lock();
  if (free_file >= 0) {
    file = &files[free_file];
    free_file = file->next_free;
  } else if (used_files < max_descriptors) {
    file = &files[used_files++];
    pthread_mutex_init(&file->loading, NULL);
  }
  unlock();
  return file;
}

static void publish(OpenFile* file, Mount* mount, PackEntry entry, const PackStatus* status,
                    int flags) {
  file->mount = mount;
  file->pack = atomic_load(&mount->pack);
  file->entry = entry;
  file->status = *status;
  file->flags = flags;
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
  lock();
  for (; used_files <= index; ++used_files) { /* the numbers below it stay free */
    pthread_mutex_init(&files[used_files].loading, NULL);
    if (used_files == index) continue;
    files[used_files].next_free = free_file;
    free_file = used_files;
  }
  unlock();
  if (atomic_load(&files[index].is_open)) return;
  publish(&files[index], mount, entry, &status, O_RDONLY);
  atomic_store(&files[index].position, position);
}

int number_of(const OpenFile* file) { return first_descriptor + (int)(file - files); }

int used_descriptors(void) {
  lock();
  const int used = used_files;
  unlock();
  return used;
}

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
  if (kernel >= 0) REAL(close)(kernel);
  if (file->own_bytes != NULL) munmap(file->own_bytes, file->status.size);
  lock();
  file->next_free = free_file;
  free_file = (int)(file - files);
  unlock();
}

int close_descriptor(OpenFile* file) {
  const bool was_open = atomic_exchange(&file->is_open, false);
  if (was_open) release(file); /* the table's own use */
  release(file);
  return was_open ? 0 : fail(EBADF);
}

/* Has `bytes` point to the whole sample; 0 or an errno. */
static int load(OpenFile* file) {
  pthread_mutex_lock(&file->loading);
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
  pthread_mutex_unlock(&file->loading);
  return problem;
}

static int copy(OpenFile* file, void* target, size_t count, uint64_t position) {
  const void* bytes = atomic_load_explicit(&file->bytes, memory_order_acquire);
  if (bytes == NULL) {
    /* All at once, as most programs read small files: no need to keep the bytes. */
    if (position == 0 && count == file->status.size) {
      return pack_files_read(file->pack, file->entry.number, target);
    }
    const int problem = load(file);
    if (problem != 0) return problem;
    bytes = atomic_load(&file->bytes);
  }
  return pack_files_copy(target, (const char*)bytes + position, count);
}

ssize_t read_file(OpenFile* file, void* target, size_t count, int64_t position) {
  if (file->entry.kind == PACK_FOLDER) return fail(EISDIR);
  const int kernel = atomic_load_explicit(&file->kernel, memory_order_acquire);
  const bool moves = position < 0;
  if (kernel >= 0) {
    return moves ? REAL(read)(kernel, target, count) : REAL(pread)(kernel, target, count, position);
  }
  const int64_t size = (int64_t)file->status.size;
  int64_t from = moves ? atomic_load(&file->position) : position;
  int64_t length;
  do { /* two threads that read one descriptor get different parts */
    length = from >= size ? 0 : size - from;
    if ((uint64_t)length > count) length = (int64_t)count;
  } while (moves && !atomic_compare_exchange_weak(&file->position, &from, from + length));
  if (length == 0) return 0;
  const int problem = copy(file, target, (size_t)length, (uint64_t)from);
  if (problem == 0) return length;
  if (moves) atomic_store(&file->position, from);
  return fail(problem);
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
  const int64_t ns = file->status.mtime_ns;
  const struct timespec time = {ns / 1000000000, ns % 1000000000};
  const struct timespec times[2] = {time, time};
  fchmod(memory, file->status.mode & 07777);
  futimens(memory, times);
  REAL(fcntl)(memory, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE);
  const int kernel = reopened(memory);
  lseek(kernel, atomic_load(&file->position), SEEK_SET);
  return kernel;
}

int promote(OpenFile* file) {
  if (file->entry.kind == PACK_FOLDER) return fail(EINVAL);
  int kernel = atomic_load_explicit(&file->kernel, memory_order_acquire);
  if (kernel >= 0) return kernel;
  const int before = errno;
  pthread_mutex_lock(&file->loading);
  kernel = atomic_load(&file->kernel);
  if (kernel < 0) kernel = sealed_copy(file);
  if (kernel >= 0) atomic_store_explicit(&file->kernel, kernel, memory_order_release);
  pthread_mutex_unlock(&file->loading);
  if (kernel >= 0) errno = before;
  return kernel;
}
