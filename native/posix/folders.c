/* Hooks that list folders. A DIR of ours begins with a mark that no DIR of the C library has: that begins
   with a descriptor and a lock. */
#include "shim.h"

#include <dirent.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "aliases.h"

#define folder_mark UINT64_C(0x5041434544495221)

typedef struct {
  uint64_t mark;
  Mount* mount;
  PackFiles* pack;
  PackEntry folder;
  PackEntry* entries;
  size_t count;
  size_t next; /* 0: ".", 1: "..", then the entries */
  int descriptor; /* -1 until it is asked for */
  struct dirent current;
} PackFolder;

static PackFolder* folder_of(DIR* directory) {
  PackFolder* folder = (PackFolder*)directory;
  return folder != NULL && folder->mark == folder_mark ? folder : NULL;
}

static PackFolder* list(Mount* mount, PackEntry entry, int descriptor) {
  PackFolder* folder = calloc(1, sizeof *folder);
  if (folder == NULL) return NULL;
  folder->mark = folder_mark;
  folder->mount = mount;
  folder->pack = mount_pack(mount);
  folder->folder = entry;
  folder->descriptor = descriptor;
  const int problem =
      pack_files_list(folder->pack, entry.number, &folder->entries, &folder->count);
  if (problem == 0) return folder;
  free(folder);
  errno = problem;
  return NULL;
}

static DIR* open_output_list(const char* path) {
  DIR* directory = REAL(opendir)(path);
  if (directory != NULL) note_output_folder(REAL(dirfd)(directory));
  return directory;
}

/* Whether an entry of a folder of the kernel's is none for the program. What the kernel has as a link in
   an output is a file. */
static bool is_hidden_entry(int folder, struct dirent* entry) {
  const bool may_be = entry->d_name[0] == '.' || entry->d_type == DT_LNK;
  if (!may_be || !is_output_folder(folder)) return false;
  if (entry->d_type == DT_LNK) entry->d_type = DT_REG;
  return is_hidden_name(entry->d_name);
}

static struct dirent* next_kernel_entry(DIR* directory) {
  struct dirent* entry = REAL(readdir)(directory);
  while (entry != NULL && is_hidden_entry(REAL(dirfd)(directory), entry)) entry = REAL(readdir)(directory);
  return entry;
}

HOOK DIR* opendir(const char* path) {
  Place place;
  if (!in_mount_here(&path, &place)) return place.output != NULL ? open_output_list(path) : REAL(opendir)(path);
  PackEntry entry;
  int problem = find_entry(&place, &entry, NULL);
  if (problem == 0 && entry.kind != PACK_FOLDER) problem = ENOTDIR;
  if (problem == 0) return (DIR*)list(place.mount, entry, -1);
  errno = problem;
  return NULL;
}

/* The list owns the descriptor. */
HOOK DIR* fdopendir(int descriptor) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(fdopendir)(descriptor);
  Mount* mount = file->mount;
  const PackEntry entry = file->entry;
  release(file);
  if (entry.kind == PACK_FOLDER) return (DIR*)list(mount, entry, descriptor);
  errno = ENOTDIR;
  return NULL;
}

/* The last component of an entry's path; 0 or an errno. */
static int last_component(PackFolder* folder, PackEntry entry, char* name) {
  char path[PATH_MAX];
  size_t length = 0;
  const int problem = pack_files_name(folder->pack, entry, path, &length);
  if (problem != 0) return problem;
  const char* slash = memrchr(path, '/', length);
  const char* begin = slash == NULL ? path : slash + 1;
  const size_t size = (size_t)(path + length - begin);
  if (size > NAME_MAX) return ENAMETOOLONG;
  memcpy(name, begin, size);
  name[size] = '\0';
  return 0;
}

static struct dirent* next_entry(PackFolder* folder) {
  struct dirent* current = &folder->current;
  PackEntry entry = folder->folder;
  int problem = 0;
  if (folder->next < 2) {
    strcpy(current->d_name, folder->next == 0 ? "." : "..");
  } else if (folder->next - 2 < folder->count) {
    entry = folder->entries[folder->next - 2];
    problem = last_component(folder, entry, current->d_name);
  } else {
    return NULL;
  }
  if (problem != 0) {
    errno = problem;
    return NULL;
  }
  ++folder->next;
  current->d_ino = pack_files_inode(folder->pack, entry);
  current->d_type = entry.kind == PACK_FOLDER ? DT_DIR : DT_REG;
  current->d_off = (off_t)folder->next;
  current->d_reclen =
      (unsigned short)(offsetof(struct dirent, d_name) + strlen(current->d_name) + 1);
  return current;
}

HOOK struct dirent* readdir(DIR* directory) {
  PackFolder* folder = folder_of(directory);
  return folder == NULL ? next_kernel_entry(directory) : next_entry(folder);
}

HOOK int readdir_r(DIR* directory, struct dirent* entry, struct dirent** result) {
  if (folder_of(directory) == NULL) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    int problem;
    do {
      problem = REAL(readdir_r)(directory, entry, result);
    } while (problem == 0 && *result != NULL && is_hidden_entry(REAL(dirfd)(directory), entry));
    return problem;
#pragma GCC diagnostic pop
  }
  errno = 0;
  const struct dirent* found = readdir(directory);
  *result = found == NULL ? NULL : entry;
  if (found != NULL) memcpy(entry, found, found->d_reclen);
  return found == NULL ? errno : 0;
}

HOOK void rewinddir(DIR* directory) {
  PackFolder* folder = folder_of(directory);
  if (folder == NULL) {
    REAL(rewinddir)(directory);
  } else {
    folder->next = 0;
  }
}

HOOK long telldir(DIR* directory) {
  const PackFolder* folder = folder_of(directory);
  return folder == NULL ? REAL(telldir)(directory) : (long)folder->next;
}

HOOK void seekdir(DIR* directory, long position) {
  PackFolder* folder = folder_of(directory);
  if (folder == NULL) {
    REAL(seekdir)(directory, position);
  } else {
    folder->next = (size_t)position;
  }
}

HOOK int dirfd(DIR* directory) {
  PackFolder* folder = folder_of(directory);
  if (folder == NULL) return REAL(dirfd)(directory);
  if (folder->descriptor < 0) {
    char path[PATH_MAX];
    const int problem = entry_path(folder->mount, folder->folder, path);
    if (problem != 0) return fail(problem);
    folder->descriptor = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  }
  return folder->descriptor;
}

static int end_list(PackFolder* folder) {
  const int descriptor = folder->descriptor;
  folder->mark = 0;
  free(folder->entries);
  free(folder);
  return descriptor < 0 ? 0 : close(descriptor);
}

HOOK int closedir(DIR* directory) {
  PackFolder* folder = folder_of(directory);
  if (folder != NULL) return end_list(folder);
  if (directory != NULL && is_output(REAL(dirfd)(directory))) output_closing(REAL(dirfd)(directory));
  return REAL(closedir)(directory);
}

static ssize_t kernel_entries(int descriptor, void* buffer, size_t room) {
  for (;;) {
    const ssize_t length = REAL(getdents64)(descriptor, buffer, room);
    if (length <= 0 || !is_output_folder(descriptor)) return length;
    size_t kept = 0;
    for (size_t at = 0; at < (size_t)length;) {
      struct dirent* entry = (struct dirent*)((char*)buffer + at);
      const size_t size = entry->d_reclen;
      if (!is_hidden_entry(descriptor, entry)) {
        memmove((char*)buffer + kept, entry, size);
        kept += size;
      }
      at += size;
    }
    if (kept > 0) return (ssize_t)kept;
  }
}

/* The kernel's own records; as many as fit. The position of the descriptor counts entries. */
HOOK ssize_t getdents64(int descriptor, void* buffer, size_t room) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return kernel_entries(descriptor, buffer, room);
  const bool is_folder = file->entry.kind == PACK_FOLDER;
  PackFolder* folder = is_folder ? list(file->mount, file->entry, -1) : NULL;
  if (folder == NULL) {
    release(file);
    return fail(is_folder ? errno : ENOTDIR);
  }
  folder->next = (size_t)atomic_load(&file->position);
  size_t length = 0;
  bool is_full = false;
  const int before = errno;
  errno = 0;
  for (const struct dirent* entry; (entry = next_entry(folder)) != NULL;) {
    const size_t size = (entry->d_reclen + sizeof(uint64_t) - 1) & ~(sizeof(uint64_t) - 1);
    is_full = length + size > room;
    if (is_full) break;
    struct dirent* record = (struct dirent*)((char*)buffer + length);
    memcpy(record, entry, entry->d_reclen);
    record->d_reclen = (unsigned short)size;
    length += size;
    atomic_store(&file->position, (int64_t)folder->next);
  }
  const int problem = length > 0 ? 0 : is_full ? EINVAL : errno;
  end_list(folder);
  release(file);
  if (problem != 0) return fail(problem);
  errno = before;
  return (ssize_t)length;
}

/* The C library's scandir opens the folder by a call that no hook sees. */
HOOK int scandirat(int descriptor, const char* path, struct dirent*** names,
                   int (*is_wanted)(const struct dirent*),
                   int (*compare)(const struct dirent**, const struct dirent**)) {
  Place place;
  DIR* open = NULL;
  if (in_mount(&descriptor, &path, &place)) {
    PackEntry folder;
    const int problem = find_entry(&place, &folder, NULL);
    if (problem != 0 || folder.kind != PACK_FOLDER) return fail(problem != 0 ? problem : ENOTDIR);
    open = (DIR*)list(place.mount, folder, -1);
  } else if (place.output != NULL) {
    open = open_output_list(path);
  } else {
    return REAL(scandirat)(descriptor, path, names, is_wanted, compare);
  }
  if (open == NULL) return -1;
  struct dirent** found = NULL;
  size_t count = 0;
  size_t capacity = 0;
  bool has_memory = true;
  const int before = errno;
  for (struct dirent* entry; has_memory && (errno = 0, entry = readdir(open)) != NULL;) {
    if (is_wanted != NULL && !is_wanted(entry)) continue;
    if (count == capacity) {
      capacity = capacity == 0 ? 64 : 2 * capacity;
      struct dirent** larger = realloc(found, capacity * sizeof *found);
      has_memory = larger != NULL;
      if (has_memory) found = larger;
    }
    struct dirent* own = has_memory ? malloc(entry->d_reclen) : NULL;
    has_memory = own != NULL;
    if (has_memory) found[count++] = memcpy(own, entry, entry->d_reclen);
  }
  const int problem = has_memory ? errno : ENOMEM; /* of the entry that could not be read */
  closedir(open);
  if (problem != 0) {
    while (count > 0) free(found[--count]);
    free(found);
    return fail(problem);
  }
  errno = before;
  if (compare != NULL) qsort(found, count, sizeof *found, (int (*)(const void*, const void*))compare);
  *names = found;
  return (int)count;
}

HOOK int scandir(const char* path, struct dirent*** names, int (*is_wanted)(const struct dirent*),
                 int (*compare)(const struct dirent**, const struct dirent**)) {
  return scandirat(AT_FDCWD, path, names, is_wanted, compare);
}

/* The C library's glob lists by functions of the caller's, if it is given some. */
HOOK int glob(const char* pattern, int flags, int (*on_error)(const char*, int), glob_t* found) {
  if (mount_count() == 0 || (flags & GLOB_ALTDIRFUNC) != 0) {
    return REAL(glob)(pattern, flags, on_error, found);
  }
  found->gl_opendir = (void* (*)(const char*))opendir;
  found->gl_readdir = (struct dirent * (*)(void*)) readdir;
  found->gl_closedir = (void (*)(void*))(uintptr_t)closedir;
  found->gl_stat = stat;
  found->gl_lstat = lstat;
  const int result = REAL(glob)(pattern, flags | GLOB_ALTDIRFUNC, on_error, found);
  found->gl_flags &= ~GLOB_ALTDIRFUNC;
  return result;
}

ALIAS(readdir64, readdir)
ALIAS(readdir64_r, readdir_r)
ALIAS(scandir64, scandir)
ALIAS(scandirat64, scandirat)
ALIAS(glob64, glob)
