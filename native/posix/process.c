/* Hooks for what belongs to a process: its working folder, and what a program that it executes inherits.

   Mounts reach a program by its environment. So do, across exec, a working folder in a mount and the
   user-level descriptors that stay open, under the same numbers:

       _PACELINE_MOUNT_FOLDER       the working folder
       _PACELINE_MOUNT_DESCRIPTORS  NUMBER:MOUNT:KIND:ENTRY:POSITION, separated by blanks */
#include "shim.h"

#include <inttypes.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- the working folder ------------------------------------------------------------------------------ */

static int enter_place(const Place* place) {
  PackEntry entry;
  char path[PATH_MAX];
  int problem = find_entry(place, &entry, NULL);
  if (problem == 0 && entry.kind != PACK_FOLDER) problem = ENOTDIR;
  if (problem == 0) problem = entry_path(place->mount, entry, path);
  if (problem == 0) problem = enter_folder(path);
  return problem == 0 ? 0 : fail(problem);
}

static int enter_output(const char* kernel_path) {
  struct stat found;
  char path[PATH_MAX];
  if (stat(kernel_path, &found) != 0) return -1;
  if (!S_ISDIR(found.st_mode)) return fail(ENOTDIR);
  if (REAL(euidaccess)(kernel_path, X_OK) != 0) return -1;
  int problem = output_visible_path(kernel_path, path);
  for (size_t end = strlen(path); end > 1 && path[end - 1] == '/'; --end) path[end - 1] = '\0';
  if (problem == 0) problem = enter_folder(path);
  return problem == 0 ? 0 : fail(problem);
}

HOOK int chdir(const char* path) {
  Place place;
  if (in_mount_here(&path, &place)) return enter_place(&place);
  if (place.output != NULL) return enter_output(path);
  const int result = REAL(chdir)(path);
  if (result == 0 && mount_count() > 0) folder_changed();
  return result;
}

HOOK int fchdir(int descriptor) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL && is_output_folder(descriptor)) {
    char output[PATH_MAX];
    if (output_folder_path(descriptor, output) == 0) return chdir(output);
  }
  if (file == NULL) {
    const int result = REAL(fchdir)(descriptor);
    if (result == 0 && mount_count() > 0) folder_changed();
    return result;
  }
  char path[PATH_MAX];
  int problem = file->entry.kind == PACK_FOLDER ? 0 : ENOTDIR;
  if (problem == 0) problem = entry_path(file->mount, file->entry, path);
  release(file);
  if (problem == 0) problem = enter_folder(path);
  return problem == 0 ? 0 : fail(problem);
}

HOOK char* getcwd(char* buffer, size_t room) {
  char folder[PATH_MAX];
  if (!folder_in_mount(folder)) return REAL(getcwd)(buffer, room);
  const size_t size = strlen(folder) + 1;
  if (buffer != NULL && room == 0) {
    errno = EINVAL;
    return NULL;
  }
  if (room != 0 && size > room) {
    errno = ERANGE;
    return NULL;
  }
  if (buffer == NULL) buffer = malloc(room > size ? room : size);
  return buffer == NULL ? NULL : memcpy(buffer, folder, size);
}

HOOK char* get_current_dir_name(void) {
  return folder_in_mount(NULL) ? getcwd(NULL, 0) : REAL(get_current_dir_name)();
}

void __chk_fail(void) __attribute__((noreturn));

HOOK char* __getcwd_chk(char* buffer, size_t count, size_t room) {
  if (count > room) __chk_fail();
  return getcwd(buffer, count);
}

/* There are no links in a mount: the normal path is the real one. */
static char* real_place(const Place* place, char* out) {
  PackEntry entry;
  char path[PATH_MAX];
  int problem = find_entry(place, &entry, NULL);
  if (problem == 0) problem = entry_path(place->mount, entry, path);
  if (problem == 0) return out == NULL ? strdup(path) : strcpy(out, path);
  errno = problem;
  return NULL;
}

static char* real_output(const char* kernel_path, char* out) {
  char real[PATH_MAX];
  char path[PATH_MAX];
  if (REAL(realpath)(kernel_path, real) == NULL) return NULL;
  const int problem = output_visible_path(real, path);
  if (problem == 0) return out == NULL ? strdup(path) : strcpy(out, path);
  if (problem == ENOENT) return output_visible_path(kernel_path, path) != 0 ? NULL : out == NULL ? strdup(path) : strcpy(out, path);
  errno = problem;
  return NULL;
}

HOOK char* realpath(const char* path, char* out) {
  Place place;
  if (in_mount_here(&path, &place)) return real_place(&place, out);
  return place.output != NULL ? real_output(path, out) : REAL(realpath)(path, out);
}

HOOK char* canonicalize_file_name(const char* path) { return realpath(path, NULL); }

HOOK char* __realpath_chk(const char* path, char* out, size_t room) {
  if (room < PATH_MAX) __chk_fail();
  return realpath(path, out);
}

/* --- fork -------------------------------------------------------------------------------------------- */

/* The child of a vfork has its parent's memory and descriptors of its own: what it does to a user-level
   descriptor or to the working folder before it executes a program would happen to its parent. POSIX lets
   vfork be fork. */
HOOK pid_t vfork(void) { return fork(); }

/* --- exec -------------------------------------------------------------------------------------------- */

enum { most_added = most_kept + 2 };

/* What a program gets beside its caller's variables. On the stack: in a forked child of a program with threads
   there may be no memory to allocate. */
typedef struct {
  char folder[PATH_MAX + 32];
  char descriptors[PATH_MAX];
} Inherited;

static size_t count_of(char* const* values) {
  size_t count = 0;
  while (values != NULL && values[count] != NULL) ++count;
  return count;
}

static bool is_variable(const char* variable, const char* name) {
  const size_t length = strlen(name);
  return strncmp(variable, name, length) == 0 && variable[length] == '=';
}

/* Whether NAME=VALUE and NAME=OTHER are of one name. */
static bool names_same(const char* a, const char* b) {
  const size_t length = (size_t)(strchrnul(b, '=') - b);
  return strncmp(a, b, length) == 0 && a[length] == '=';
}

static bool write_folder(char* out, size_t room) {
  char folder[PATH_MAX];
  if (!folder_in_mount(folder)) return false;
  snprintf(out, room, "_PACELINE_MOUNT_FOLDER=%s", folder);
  return true;
}

static bool write_descriptors(char* out, size_t room) {
  const int before = snprintf(out, room, "_PACELINE_MOUNT_DESCRIPTORS=");
  size_t length = (size_t)before;
  for (int i = 0; i < used_descriptors(); ++i) {
    OpenFile* file = acquire(first_descriptor + i);
    if (file == NULL) continue;
    if (!atomic_load(&file->closes_on_exec) && length < room) {
      const int kernel = kernel_of(file);
      const int64_t position =
          kernel >= 0 ? REAL(lseek)(kernel, 0, SEEK_CUR) : atomic_load(&file->position);
      length += (size_t)snprintf(out + length, room - length, "%d:%u:%d:%" PRIu64 ":%" PRId64 " ",
                                 number_of(file), file->mount->number, (int)file->entry.kind,
                                 file->entry.number, position);
    }
    release(file);
  }
  if (length < room) return length > (size_t)before;
  static const char problem[] = "paceline: too many open files of a mount to inherit by exec\n";
  return write(STDERR_FILENO, problem, sizeof problem - 1) < 0;
}

/* Writes the next program's variables to `next`, which has `most_added` more places than `variables`, and
   one for the end. A program with an empty environment keeps its mounts. */
static void compose(char* const* variables, char** next, Inherited* inherited) {
  char** end = next;
  bool has[most_kept] = {false};
  for (; variables != NULL && *variables != NULL; ++variables) {
    if (is_variable(*variables, "_PACELINE_MOUNT_FOLDER")) continue;
    if (is_variable(*variables, "_PACELINE_MOUNT_DESCRIPTORS")) continue;
    for (int i = 0; kept_variables[i] != NULL; ++i) has[i] |= names_same(*variables, kept_variables[i]);
    *end++ = *variables;
  }
  for (int i = 0; kept_variables[i] != NULL; ++i) {
    if (!has[i]) *end++ = kept_variables[i];
  }
  if (write_folder(inherited->folder, sizeof inherited->folder)) *end++ = inherited->folder;
  if (write_descriptors(inherited->descriptors, sizeof inherited->descriptors)) {
    *end++ = inherited->descriptors;
  }
  *end = NULL;
}

/* A descriptor of a copy in memory of a program in a mount, which the kernel executes by the path that is
   written to `link`. It stays open in the program, for an interpreter. -1 with errno. */
static int program_copy(const Place* place, char link[40]) {
  PackEntry entry;
  PackStatus status;
  const int problem = find_entry(place, &entry, &status);
  if (problem != 0) return fail(problem);
  if (entry.kind == PACK_FOLDER || (status.mode & 0111) == 0) return fail(EACCES);
  const int number = new_descriptor(place->mount, entry, &status, O_CLOEXEC);
  const int kernel = number < 0 ? -1 : dup(number);
  const int error = errno;
  if (number >= 0) close(number);
  errno = error;
  if (kernel >= 0) snprintf(link, 40, "/proc/self/fd/%d", kernel);
  return kernel;
}

/* The interpreter that a script's first line names, and its one argument or NULL. */
typedef struct {
  char line[256];
  char* interpreter;
  char* argument;
} Script;

/* Whether a program in a mount is a script. The kernel would give its interpreter the path of a copy: `$0`,
   and what a script finds beside itself, are of the mount. */
static bool is_script(const Place* place, Script* script) {
  PackEntry entry;
  PackStatus status;
  if (find_entry(place, &entry, &status) != 0 || entry.kind == PACK_FOLDER) return false;
  if ((status.mode & 0111) == 0) return false; /* program_copy says so */
  const int number = new_descriptor(place->mount, entry, &status, O_CLOEXEC);
  OpenFile* file = number < 0 ? NULL : acquire(number);
  if (file == NULL) return false;
  const ssize_t count = read_file(file, script->line, sizeof script->line - 1, 0);
  release(file);
  close(number);
  if (count < 2 || script->line[0] != '#' || script->line[1] != '!') return false;
  script->line[count] = '\0';
  char* end = strchr(script->line, '\n');
  if (end == NULL) return false; /* as the kernel has it: too long a line names nothing */
  while (end > script->line + 2 && (end[-1] == ' ' || end[-1] == '\t')) --end;
  *end = '\0';
  script->interpreter = script->line + 2 + strspn(script->line + 2, " \t");
  script->argument = script->interpreter + strcspn(script->interpreter, " \t");
  if (*script->argument == '\0') {
    script->argument = NULL;
  } else {
    *script->argument++ = '\0';
    script->argument += strspn(script->argument, " \t");
  }
  return *script->interpreter != '\0';
}

/* The arguments of a script's interpreter, in `words`, which has three more places than `arguments`. */
static void interpreter_words(const Script* script, const char* path, char* const* arguments,
                              char** words) {
  *words++ = script->interpreter;
  if (script->argument != NULL) *words++ = script->argument;
  *words++ = (char*)path;
  if (arguments != NULL && arguments[0] != NULL) {
    while (*++arguments != NULL) *words++ = *arguments;
  }
  *words = NULL;
}

static void close_again(int descriptor) {
  const int before = errno;
  if (descriptor >= 0) REAL(close)(descriptor);
  errno = before;
}

enum { most_interpreters = 4 }; /* of an interpreter that is a script itself, as the kernel has it */

static int execute(const char* path, char* const* arguments, char* const* variables, int depth) {
  Place place;
  char link[40];
  int copy = -1;
  const char* named = path;
  if (in_mount_here(&path, &place)) {
    Script script;
    if (is_script(&place, &script)) {
      if (depth == most_interpreters) return fail(ELOOP);
      char* words[count_of(arguments) + 4];
      interpreter_words(&script, named, arguments, words);
      return execute(script.interpreter, words, variables, depth + 1);
    }
    copy = program_copy(&place, link);
    if (copy < 0) return -1;
    path = link;
  }
  Inherited inherited;
  char* next[count_of(variables) + most_added + 1];
  compose(variables, next, &inherited);
  REAL(execve)(path, arguments, next);
  close_again(copy);
  return -1;
}

HOOK int execve(const char* path, char* const* arguments, char* const* variables) {
  if (mount_count() == 0) return REAL(execve)(path, arguments, variables);
  return execute(path, arguments, variables, 0);
}

HOOK int fexecve(int descriptor, char* const* arguments, char* const* variables) {
  if (mount_count() == 0) return REAL(fexecve)(descriptor, arguments, variables);
  OpenFile* file = acquire(descriptor);
  const int copy = file == NULL ? -1 : dup(descriptor);
  if (file != NULL) release(file);
  if (file != NULL && copy < 0) return -1;
  Inherited inherited;
  char* next[count_of(variables) + most_added + 1];
  compose(variables, next, &inherited);
  REAL(fexecve)(file == NULL ? descriptor : copy, arguments, next);
  close_again(copy);
  return -1;
}

HOOK int execv(const char* path, char* const* arguments) {
  return execve(path, arguments, environ);
}

/* A text file that says no interpreter is a script of the shell. */
static int execute_or_interpret(const char* path, char* const* arguments, char* const* variables) {
  execve(path, arguments, variables);
  if (errno != ENOEXEC) return -1;
  const size_t count = count_of(arguments);
  char* words[count + 3];
  words[0] = "/bin/sh";
  words[1] = (char*)path;
  for (size_t i = 1; i <= count; ++i) words[i + 1] = arguments[i];
  words[count + 1] = NULL;
  return execve("/bin/sh", words, variables);
}

HOOK int execvpe(const char* name, char* const* arguments, char* const* variables) {
  if (mount_count() == 0) return REAL(execvpe)(name, arguments, variables);
  if (*name == '\0' || strchr(name, '/') != NULL) {
    return execute_or_interpret(name, arguments, variables);
  }
  const char* at = getenv("PATH");
  if (at == NULL) at = "/bin:/usr/bin";
  int problem = ENOENT;
  for (bool is_last = false; !is_last;) {
    const char* end = strchrnul(at, ':');
    is_last = *end == '\0';
    char path[PATH_MAX];
    const int length = (int)(end - at);
    if (snprintf(path, sizeof path, "%.*s%s%s", length, at, length > 0 ? "/" : "", name) < PATH_MAX) {
      execute_or_interpret(path, arguments, variables);
      if (errno == EACCES) problem = EACCES;
      if (errno != EACCES && errno != ENOENT && errno != ENOTDIR && errno != ESTALE) return -1;
    }
    at = end + 1;
  }
  return fail(problem);
}

HOOK int execvp(const char* name, char* const* arguments) {
  return execvpe(name, arguments, environ);
}

/* Collects the arguments of execl and its like, up to NULL, into `words`. */
#define COLLECT(words, last, first, list)                                                \
  size_t words##_count = 1;                                                              \
  va_start(list, first);                                                                 \
  while (va_arg(list, char*) != NULL) ++words##_count;                                   \
  va_end(list);                                                                          \
  char* words[words##_count + 1];                                                        \
  words[0] = (char*)first;                                                               \
  va_start(list, first);                                                                 \
  for (size_t i = 1; i <= words##_count; ++i) words[i] = va_arg(list, char*);            \
  last;                                                                                  \
  va_end(list)

HOOK int execl(const char* path, const char* first, ...) {
  va_list list;
  COLLECT(words, (void)0, first, list);
  return execve(path, words, environ);
}

HOOK int execlp(const char* name, const char* first, ...) {
  va_list list;
  COLLECT(words, (void)0, first, list);
  return execvpe(name, words, environ);
}

HOOK int execle(const char* path, const char* first, ...) {
  va_list list;
  char* const* variables;
  COLLECT(words, variables = va_arg(list, char* const*), first, list);
  return execve(path, words, variables);
}

/* --- posix_spawn ------------------------------------------------------------------------------------- */

static _Thread_local int spawn_depth; /* of scripts whose interpreter is a script */

#define SPAWN_HOOK(function)                                                                       \
  HOOK int function(pid_t* child, const char* path, const posix_spawn_file_actions_t* actions,     \
                    const posix_spawnattr_t* attributes, char* const* arguments,                   \
                    char* const* variables) {                                                      \
    if (mount_count() == 0) {                                                                      \
      return REAL(function)(child, path, actions, attributes, arguments, variables);               \
    }                                                                                              \
    Place place;                                                                                   \
    char link[40];                                                                                 \
    int copy = -1;                                                                                 \
    const char* named = path;                                                                      \
    if (strchr(path, '/') != NULL && in_mount_here(&path, &place)) {                               \
      Script script;                                                                               \
      if (is_script(&place, &script)) {                                                            \
        char* words[count_of(arguments) + 4];                                                      \
        interpreter_words(&script, named, arguments, words);                                       \
        if (spawn_depth == most_interpreters) return ELOOP;                                        \
        ++spawn_depth;                                                                             \
        const int result =                                                                         \
            function(child, script.interpreter, actions, attributes, words, variables);            \
        --spawn_depth;                                                                             \
        return result;                                                                             \
      }                                                                                            \
      copy = program_copy(&place, link);                                                           \
      if (copy < 0) return errno;                                                                  \
      path = link;                                                                                 \
    }                                                                                              \
    Inherited inherited;                                                                           \
    char* next[count_of(variables) + most_added + 1];                                              \
    compose(variables, next, &inherited);                                                          \
    output_spawns();                                                                               \
    const int problem = REAL(function)(child, path, actions, attributes, arguments, next);         \
    close_again(copy);                                                                             \
    return problem;                                                                                \
  }
SPAWN_HOOK(posix_spawn)
SPAWN_HOOK(posix_spawnp)

/* The C library does these in the child, by calls that no hook sees. */
HOOK int posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t* actions, int descriptor,
                                          int wanted) {
  OpenFile* file = acquire(descriptor);
  if (file == NULL) return REAL(posix_spawn_file_actions_adddup2)(actions, descriptor, wanted);
  const int kernel = promote(file);
  release(file);
  return kernel < 0 ? errno : REAL(posix_spawn_file_actions_adddup2)(actions, kernel, wanted);
}

/* Opened here: the child takes it from this process, which keeps it. */
HOOK int posix_spawn_file_actions_addopen(posix_spawn_file_actions_t* actions, int wanted,
                                          const char* path, int flags, mode_t mode) {
  Place place;
  if (!in_mount_here(&path, &place)) {
    if (place.output == NULL) {
      return REAL(posix_spawn_file_actions_addopen)(actions, wanted, path, flags, mode);
    }
    const int output = open_output(&place, path, flags | O_CLOEXEC, mode);
    return output < 0 ? errno : posix_spawn_file_actions_adddup2(actions, output, wanted);
  }
  const int number = open_entry(&place, flags | O_CLOEXEC);
  return number < 0 ? errno : posix_spawn_file_actions_adddup2(actions, number, wanted);
}

/* --- io_uring ---------------------------------------------------------------------------------------- */

/* What a program hands to a ring is done by the kernel, which does not know the mounts. Programs that use
   liburing are noticed; rings that are made by system calls are not. */
static void name_ring(void) {
  static atomic_bool is_named;
  if (mount_count() == 0 || atomic_exchange(&is_named, true)) return;
  dprintf(STDERR_FILENO,
          "paceline: %s uses io_uring, which does not see the mount %s. Mount the pack by FUSE for it: "
          "paceline store mount\n",
          program_invocation_short_name, mount_of_number(0)->point);
}

struct io_uring;
struct io_uring_params;
int io_uring_queue_init(unsigned entries, struct io_uring* ring, unsigned flags);
int io_uring_queue_init_params(unsigned entries, struct io_uring* ring, struct io_uring_params* how);

HOOK int io_uring_queue_init(unsigned entries, struct io_uring* ring, unsigned flags) {
  name_ring();
  return REAL(io_uring_queue_init)(entries, ring, flags);
}

HOOK int io_uring_queue_init_params(unsigned entries, struct io_uring* ring, struct io_uring_params* how) {
  name_ring();
  return REAL(io_uring_queue_init_params)(entries, ring, how);
}

/* --- the start of a program -------------------------------------------------------------------------- */

void inherit_descriptors(void) {
  const char* at = getenv("_PACELINE_MOUNT_DESCRIPTORS");
  while (at != NULL && mount_count() > 0) {
    int number = 0;
    int kind = 0;
    int size = 0;
    unsigned mount_number = 0;
    int64_t position = 0;
    PackEntry entry;
    if (sscanf(at, "%d:%u:%d:%" SCNu64 ":%" SCNd64 " %n", &number, &mount_number, &kind,
               &entry.number, &position, &size) != 5) {
      break;
    }
    entry.kind = (PackKind)kind;
    Mount* mount = mount_of_number(mount_number);
    if (mount != NULL) restore_descriptor(number, mount, entry, position);
    at += size;
  }
  unsetenv("_PACELINE_MOUNT_DESCRIPTORS"); /* of this program only */
}
