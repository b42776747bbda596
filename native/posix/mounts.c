/* Which paths lie in a mount, or in an output (outputs.c). The launcher names the mounts:

       _PACELINE_MOUNTS        lines of PLACE TAB POINT, POINT absolute and normal; of a pack that
                               nodes serve, followed by TAB REQUESTS TAB SOURCE
       _PACELINE_MOUNT_ONLY    programs that see them, separated by ':'; unset: all
       _PACELINE_MOUNT_NOT     programs that do not

   Paths are compared as text: a symbolic link elsewhere that leads into a mount is not followed.
   The working folder may lie in a mount; the kernel is then in a folder in which nothing can be
   created, so that a call that nobody hooked fails rather than meets the wrong file. */
#include "shim.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

enum { max_mounts = 16 };

typedef struct Folder {
  bool is_in_mount;
  struct Folder* next_retired;
  size_t length; /* 0: the root */
  char path[];
} Folder;

char* kept_variables[most_kept + 1];
static Mount mounts[max_mounts];
static unsigned count; /* 0 while the shim is not active */
static char too_long[PATH_MAX + 2]; /* a path for which the kernel says ENAMETOOLONG */

/* The working folder; NULL: not known. Readers count themselves; one that was replaced is freed by a later
   change of the folder, when nobody reads. */
static Folder* _Atomic working_folder;
static atomic_int folder_readers;
static Folder* retired_folders;
static pthread_mutex_t changing_folder = PTHREAD_MUTEX_INITIALIZER;
static const char kernels_folder[] = "/proc/self/fdinfo"; /* while ours is in a mount */

static bool names_program(const char* variable, const char* program) {
  const char* names = getenv(variable);
  const size_t length = strlen(program);
  for (const char* name = names; name != NULL && *name != '\0';) {
    const char* end = strchrnul(name, ':');
    if ((size_t)(end - name) == length && memcmp(name, program, length) == 0) return true;
    name = *end == ':' ? end + 1 : end;
  }
  return false;
}

static bool is_wanted(void) {
  if (getauxval(AT_SECURE) != 0) return false; /* a setuid program trusts no variable of its caller */
  const char* program = program_invocation_short_name;
  if (getenv("_PACELINE_MOUNT_ONLY") != NULL && !names_program("_PACELINE_MOUNT_ONLY", program)) {
    return false;
  }
  return !names_program("_PACELINE_MOUNT_NOT", program);
}

/* Ends a field at its tab and returns the next one, or NULL. */
static char* cut(char* field) {
  char* tab = strchr(field, '\t');
  if (tab == NULL) return NULL;
  *tab = '\0';
  return tab + 1;
}

static void add_mount(char* line) {
  char* tab = strchr(line, '\t');
  if (tab == NULL || tab[1] != '/' || tab[2] == '\0' || count == max_mounts) {
    dprintf(STDERR_FILENO, "paceline: _PACELINE_MOUNTS has an impossible line: %s\n", line);
    return;
  }
  *tab = '\0';
  Mount* mount = &mounts[count];
  mount->place = line;
  mount->point = tab + 1;
  mount->requests = cut(mount->point);
  mount->source = mount->requests == NULL ? NULL : cut(mount->requests);
  if (mount->source == NULL) mount->requests = NULL;
  mount->length = strlen(mount->point);
  mount->last = strrchr(mount->point, '/') + 1;
  mount->number = count;
  pthread_mutex_init(&mount->opening, NULL);
  ++count;
}

/* A folder that programs write to: FOLDER TAB POINT, and TAB "shared" if those of other nodes do. */
static void add_output(char* line) {
  char* point = cut(line);
  Mount* mount = &mounts[count];
  if (point == NULL || point[0] != '/' || point[1] == '\0' || count == max_mounts ||
      asprintf(&mount->tree, "%s/tree", line) < 0) {
    dprintf(STDERR_FILENO, "paceline: _PACELINE_OUTPUTS has an impossible line: %s\n", line);
    return;
  }
  mount->is_shared = cut(point) != NULL;
  mount->tree_length = strlen(mount->tree);
  mount->point = point;
  mount->length = strlen(point);
  mount->last = strrchr(point, '/') + 1;
  mount->number = count++;
}

/* `path` NULL: it is not known. */
static void set_folder(const char* path, bool is_in_mount) {
  const size_t length = path == NULL || strcmp(path, "/") == 0 ? 0 : strlen(path);
  Folder* folder = path == NULL ? NULL : malloc(sizeof *folder + length + 1);
  if (folder != NULL) {
    folder->is_in_mount = is_in_mount;
    folder->length = length;
    memcpy(folder->path, path, length);
    folder->path[length] = '\0';
  }
  Protection before;
  protect(&before);
  pthread_mutex_lock(&changing_folder);
  Folder* old = atomic_exchange(&working_folder, folder);
  if (old != NULL) {
    old->next_retired = retired_folders;
    retired_folders = old;
  }
  while (retired_folders != NULL && atomic_load(&folder_readers) == 0) {
    Folder* unused = retired_folders;
    retired_folders = unused->next_retired;
    free(unused);
  }
  pthread_mutex_unlock(&changing_folder);
  unprotect(&before);
  /* For programs that the C library itself starts, as system does. */
  if (is_in_mount && folder != NULL) {
    setenv("_PACELINE_MOUNT_FOLDER", path, 1);
  } else if (getenv("_PACELINE_MOUNT_FOLDER") != NULL) {
    unsetenv("_PACELINE_MOUNT_FOLDER");
  }
}

void folder_changed(void) {
  char path[PATH_MAX];
  if (REAL(getcwd)(path, sizeof path) != NULL && path[0] == '/') {
    set_folder(path, false);
  } else {
    set_folder(NULL, false);
  }
}

int enter_folder(const char* path) {
  if (REAL(chdir)(kernels_folder) != 0) return errno;
  set_folder(path, true);
  return 0;
}

static const Folder* acquire_folder(void) {
  atomic_fetch_add(&folder_readers, 1);
  return atomic_load(&working_folder);
}

static void release_folder(void) { atomic_fetch_sub(&folder_readers, 1); }

bool folder_in_mount(char* path) {
  if (count == 0) return false;
  const Folder* folder = acquire_folder();
  const bool is_in_mount = folder != NULL && folder->is_in_mount;
  if (is_in_mount && path != NULL) memcpy(path, folder->path, folder->length + 1);
  release_folder();
  return is_in_mount;
}

void free_mount_locks(void) {
  pthread_mutex_init(&changing_folder, NULL);
  atomic_store(&folder_readers, 0);
  for (unsigned i = 0; i < count; ++i) pthread_mutex_init(&mounts[i].opening, NULL);
}

/* A program that one of ours executed starts in a folder of a mount. */
static void inherit_folder(void) {
  const char* inherited = getenv("_PACELINE_MOUNT_FOLDER");
  char path[PATH_MAX];
  /* A folder that a program without mounts has left is not the working one any more. Where the kernel's is
     is not known once the process has ended that went there. */
  const bool is_known = REAL(getcwd)(path, sizeof path) != NULL;
  const bool is_parked =
      is_known ? strncmp(path, "/proc/", 6) == 0 && strstr(path, "/fdinfo") != NULL : errno == ENOENT;
  if (inherited != NULL && is_parked) {
    set_folder(inherited, true);
  } else {
    folder_changed();
  }
}

/* The launcher's variables as this program got them, for a next one with an environment of its own. */
static bool keep_variables(void) {
  static const char* const names[most_kept] = {"_PACELINE_MOUNTS", "_PACELINE_OUTPUTS", "LD_PRELOAD",
                                               "_PACELINE_MOUNT_ONLY", "_PACELINE_MOUNT_NOT"};
  size_t kept = 0;
  for (size_t i = 0; i < most_kept; ++i) {
    const char* value = getenv(names[i]);
    if (value == NULL) continue;
    if (asprintf(&kept_variables[kept++], "%s=%s", names[i], value) < 0) return false;
  }
  return true;
}

static void add_lines(const char* lines, void (*add)(char* line)) {
  /* A program may overwrite its environment; the mounts point into it. */
  char* own = lines == NULL ? NULL : strdup(lines);
  for (char* line = own; line != NULL && *line != '\0';) {
    char* end = strchr(line, '\n');
    if (end != NULL) *end = '\0';
    add(line);
    line = end == NULL ? NULL : end + 1;
  }
}

__attribute__((constructor)) static void read_mounts(void) {
  const char* packs = getenv("_PACELINE_MOUNTS");
  const char* outputs = getenv("_PACELINE_OUTPUTS");
  if ((packs == NULL && outputs == NULL) || !is_wanted()) return;
  add_lines(packs, add_mount);
  add_lines(outputs, add_output);
  if (!keep_variables()) {
    dprintf(STDERR_FILENO, "paceline: no memory for mounts\n");
    count = 0;
    return;
  }
  memset(too_long, 'x', sizeof too_long - 1);
  inherit_folder();
  inherit_descriptors();
  start_outputs();
}

uintptr_t next_function(const char* name) {
  void* function = dlsym(RTLD_NEXT, name);
  if (function != NULL) return (uintptr_t)function;
  dprintf(STDERR_FILENO, "paceline: the C library has no function %s\n", name);
  abort();
}

unsigned mount_count(void) { return count; }
Mount* mount_of_number(unsigned number) { return number < count ? &mounts[number] : NULL; }

PackFiles* mount_pack(Mount* mount) {
  PackFiles* pack = atomic_load_explicit(&mount->pack, memory_order_acquire);
  if (pack != NULL) return pack;
  Protection before;
  protect(&before);
  pthread_mutex_lock(&mount->opening);
  pack = atomic_load(&mount->pack);
  if (pack == NULL && !mount->is_broken) {
    pack = pack_files_open(mount->place, mount->requests, mount->source);
    mount->is_broken = pack == NULL; /* said once */
    atomic_store_explicit(&mount->pack, pack, memory_order_release);
  }
  pthread_mutex_unlock(&mount->opening);
  unprotect(&before);
  return pack;
}

/* Whether a part of a path is as it would be printed: without "//", "." and "..". */
static bool is_normal(const char* path) {
  for (const char* at = path; *at != '\0';) {
    if (at[0] == '/') return false;
    if (at[0] == '.' && (at[1] == '\0' || at[1] == '/')) return false;
    if (at[0] == '.' && at[1] == '.' && (at[2] == '\0' || at[2] == '/')) return false;
    at = strchrnul(at, '/');
    if (*at == '/') {
      if (at[1] == '\0') return true;
      ++at;
    }
  }
  return true;
}

/* Whether an absolute path may be normal: no false alarm matters, as long as they are rare. */
static bool may_be_odd(const char* path) {
  return strstr(path, "/.") != NULL || strstr(path, "//") != NULL;
}

/* Whether a path ends in a slash, "." or "..": it can only mean a folder. */
static bool ends_in_folder(const char* path, const char* end) {
  const char* last = end;
  while (last > path && last[-1] != '/') --last;
  const size_t size = (size_t)(end - last);
  return (size == 0 && end > path) || (size == 1 && last[0] == '.') ||
         (size == 2 && last[0] == '.' && last[1] == '.');
}

/* Writes `folder`/`path` without "//", "." and ".." to `out`, of PATH_MAX bytes; with a slash at the end if
   it can only mean a folder. False: too long. */
static bool join(const char* folder, size_t folder_length, const char* path, char* out) {
  size_t length = 0;
  const char* parts[] = {folder, path};
  const char* ends[] = {folder + folder_length, path + strlen(path)};
  for (int part = 0; part < 2; ++part) {
    for (const char* at = parts[part]; at < ends[part];) {
      while (at < ends[part] && *at == '/') ++at;
      const char* begin = at;
      while (at < ends[part] && *at != '/') ++at;
      const size_t size = (size_t)(at - begin);
      if (size == 0 || (size == 1 && begin[0] == '.')) continue;
      if (size == 2 && begin[0] == '.' && begin[1] == '.') {
        while (length > 0 && out[--length] != '/') {
        }
        continue;
      }
      if (length + size + 3 > PATH_MAX) return false;
      out[length++] = '/';
      memcpy(out + length, begin, size);
      length += size;
    }
  }
  if (length == 0 || ends_in_folder(path, ends[1])) out[length++] = '/';
  out[length] = '\0';
  return true;
}

/* Sets `place` if what follows the point of a mount is normal. */
static bool enter(Mount* mount, const char* behind, Place* place) {
  if (*behind == '/') ++behind;
  if (!is_normal(behind)) return false;
  place->mount = mount;
  place->inner = behind;
  place->length = strlen(behind);
  place->is_folder_meant = place->length > 0 && behind[place->length - 1] == '/';
  if (place->is_folder_meant) --place->length;
  return true;
}

static bool is_below(const char* path, const char* point, size_t length) {
  return strncmp(path, point, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

static bool match(const char* path, Place* place) {
  for (unsigned i = 0; i < count; ++i) {
    Mount* mount = &mounts[i];
    if (is_below(path, mount->point, mount->length)) {
      return enter(mount, path + mount->length, place);
    }
    if (mount->tree != NULL && is_below(path, mount->tree, mount->tree_length)) {
      return enter(mount, path + mount->tree_length, place);
    }
  }
  return false;
}

static bool match_joined(const char* folder, size_t length, const char* path, Place* place) {
  return join(folder, length, path, place->absolute) && match(place->absolute, place);
}

/* Below a folder in a mount. If the path leads out, `*path` becomes absolute. */
static bool match_inside(const char* folder, size_t length, const char** path, Place* place) {
  const bool is_short = join(folder, length, *path, place->absolute);
  if (is_short && match(place->absolute, place)) return true;
  *path = is_short ? place->absolute : too_long;
  return false;
}

static bool match_absolute(const char* path, Place* place) {
  if (match(path, place)) return true;
  return may_be_odd(path) && match_joined("", 0, path, place);
}

static bool match_in(const Folder* folder, const char** path, Place* place) {
  if (folder == NULL) return false;
  if (folder->is_in_mount) return match_inside(folder->path, folder->length, path, place);
  for (unsigned i = 0; i < count; ++i) {
    Mount* mount = &mounts[i];
    if (strncmp(mount->point, folder->path, folder->length) != 0) continue;
    if (mount->point[folder->length] != '/') continue;
    const char* rest = mount->point + folder->length + 1;
    const size_t length = mount->length - folder->length - 1;
    if (is_below(*path, rest, length) && enter(mount, *path + length, place)) return true;
  }
  if ((*path)[0] != '.' && !may_be_odd(*path)) return false;
  return match_joined(folder->path, folder->length, *path, place);
}

static bool match_here(const char** path, Place* place) {
  const bool is_inside = match_in(acquire_folder(), path, place);
  release_folder();
  return is_inside;
}

/* Below a folder that is open: one of ours, or one of the kernel's from which the path may lead into a
   mount. The kernel is asked for its path only if a mount's last component is in `path`. */
static bool match_below(int* descriptor, const char** path, Place* place) {
  char folder[PATH_MAX];
  OpenFile* file = acquire(*descriptor);
  if (file != NULL) {
    const int problem = entry_path(file->mount, file->entry, folder);
    release(file);
    if (problem != 0) return false;
    *descriptor = AT_FDCWD;
    return match_inside(folder, strlen(folder), path, place);
  }
  bool may_enter = is_output_folder(*descriptor);
  for (unsigned i = 0; i < count; ++i) may_enter |= strstr(*path, mounts[i].last) != NULL;
  if (!may_enter) return false;
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", *descriptor);
  const ssize_t length = REAL(readlink)(link, folder, sizeof folder);
  if (length <= 0 || (size_t)length == sizeof folder || folder[0] != '/') return false;
  return match_joined(folder, (size_t)length, *path, place);
}

/* Whether a component of a normal path is no file's of the program's. */
static bool is_hidden_path(const char* path) {
  for (const char* at = path; at != NULL; at = strchr(at, '/')) {
    while (*at == '/') ++at;
    if (*at == '.' && is_hidden_name(at)) return true;
  }
  return false;
}

/* Has a path in an output be the kernel's. */
static void lead_to_output(int* descriptor, const char** path, Place* place) {
  Mount* mount = place->mount;
  const size_t length = strlen(place->inner);
  place->output = mount;
  *descriptor = AT_FDCWD;
  *path = place->absolute;
  if (mount->tree_length + length + 2 > PATH_MAX) {
    *path = too_long;
    return;
  }
  if (is_hidden_path(place->inner)) { /* in a folder that is not there */
    snprintf(place->absolute, PATH_MAX, "%s/.paceline-none/none", mount->tree);
    return;
  }
  char* inner = place->absolute + mount->tree_length + 1;
  memmove(inner, place->inner, length + 1);
  memcpy(place->absolute, mount->tree, mount->tree_length);
  inner[-1] = length == 0 ? '\0' : '/';
  place->inner = inner;
}

bool in_mount(int* descriptor, const char** path, Place* place) {
  place->output = NULL;
  if (count == 0 || *path == NULL) return false;
  if ((*path)[0] == '\0') return false;
  const int before = errno;
  const bool is_inside = (*path)[0] == '/' ? match_absolute(*path, place)
                         : *descriptor == AT_FDCWD
                             ? match_here(path, place)
                             : match_below(descriptor, path, place);
  errno = before;
  if (!is_inside || place->mount->tree == NULL) return is_inside;
  lead_to_output(descriptor, path, place);
  return false;
}

int find_entry(const Place* place, PackEntry* entry, PackStatus* status) {
  PackFiles* pack = mount_pack(place->mount);
  if (pack == NULL) return EIO;
  const int problem = pack_files_find(pack, place->inner, place->length, entry, status);
  if (problem != 0) return problem;
  return place->is_folder_meant && entry->kind != PACK_FOLDER ? ENOTDIR : 0;
}

int entry_path(Mount* mount, PackEntry entry, char* path) {
  char name[PATH_MAX];
  size_t length = 0;
  const int problem = pack_files_name(atomic_load(&mount->pack), entry, name, &length);
  if (problem != 0) return problem;
  if (mount->length + length + 2 > PATH_MAX) return ENAMETOOLONG;
  memcpy(path, mount->point, mount->length);
  path[mount->length] = length > 0 ? '/' : '\0';
  memcpy(path + mount->length + 1, name, length);
  if (length > 0) path[mount->length + 1 + length] = '\0';
  return 0;
}
