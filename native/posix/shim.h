/* What the files of the shim share: how a hook reaches the function that it stands before, where a path
   leads, and the descriptors that live in this process only.

       program --open("/data/x.jpg")--> hook --in a mount?--no---> the C library
                                          |
                                          yes --> a user-level descriptor: a number that the kernel does
                                                  not know, an entry of a pack and a position
*/
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "paceline/fork_guard.h"
#include "paceline/hook.h"
#include "paceline/pack_files.h"

/* Sets errno and returns -1. */
static inline int fail(int problem) {
  errno = problem;
  return -1;
}

/* --- mounts.c: which paths lie in a mount ------------------------------------------------------------ */

typedef struct DrainRoom DrainRoom; /* outputs.c */

/* A pack, or a folder that programs write to. */
typedef struct {
  char* point; /* absolute, without a slash at the end */
  size_t length;
  const char* last; /* component of `point` */
  char* tree;       /* of an output: where the kernel has its files; else NULL */
  size_t tree_length;
  DrainRoom* room; /* of an output; NULL: any number of bytes may wait to be drained */
  bool is_shared;  /* of an output: other nodes write to it, too; then changes of names are asked for */
  char* place;      /* of the pack */
  char* requests;   /* of a pack that nodes serve: see pack_files_open; else NULL */
  char* source;
  PackFiles* _Atomic pack;
  pthread_mutex_t opening;
  bool is_broken; /* with `opening` */
  unsigned number;
} Mount;

/* A path in a mount. */
typedef struct {
  Mount* mount;
  const char* inner; /* below the mount's point, normal: no "//", ".", "..", or slash at the end */
  size_t length;
  bool is_folder_meant; /* it ended in a slash */
  Mount* output;        /* the path lies in this output, and became the kernel's; NULL: it does not */
  char absolute[PATH_MAX];
} Place;

/* Whether a path, relative to the folder `*descriptor` or AT_FDCWD, lies in a mount. If not, `*path` and
   `*descriptor` may have been set to others that mean the same to the kernel: it does not know
   a working folder in a mount, and ".." may lead out of one. Of a path in an output they become the kernel's,
   in `place`. */
bool in_mount(int* descriptor, const char** path, Place* place);
/* The same, for functions that have no descriptor. */
static inline bool in_mount_here(const char** path, Place* place) {
  int here = AT_FDCWD;
  return in_mount(&here, path, place);
}
/* Finds what is there; returns 0 or an errno. */
int find_entry(const Place* place, PackEntry* entry, PackStatus* status);
PackFiles* mount_pack(Mount* mount); /* opened when it is first needed; NULL if it cannot be */
Mount* mount_of_number(unsigned number);
unsigned mount_count(void);
/* The path in which programs know an entry, of PATH_MAX bytes; 0 or an errno. */
int entry_path(Mount* mount, PackEntry entry, char* path);
/* Whether the working folder is in a mount; writes its path to `path` of PATH_MAX bytes, unless NULL. */
bool folder_in_mount(char* path);
/* Makes a folder in a mount the working one, or forgets it after the kernel's has changed. */
int enter_folder(const char* path);
void folder_changed(void);

/* --- descriptors.c ----------------------------------------------------------------------------------- */

/* Beyond what the kernel gives out to any real program, which is the lowest number that is free; and not
   far beyond, because shells keep arrays as long as the largest number. */
enum { first_descriptor = 1 << 20, max_descriptors = 32768 };

typedef struct {
  atomic_int users; /* calls that are under way, and one as long as it is open */
  atomic_bool is_open;
  Mount* mount;
  PackFiles* pack;
  PackEntry entry;
  PackStatus status;
  atomic_int flags;          /* of open, and those that fcntl set */
  atomic_bool closes_on_exec;
  _Atomic int64_t position;  /* position_of_kernel once `kernel` has it */
  atomic_int kernel;         /* a true descriptor of the same file, once it was needed; else -1 */
  const void* _Atomic bytes; /* of the whole sample, once a part of it was read */
  void* own_bytes;           /* the same if they are this file's memory: to be unmapped */
  pthread_mutex_t loading;   /* while `bytes` or `kernel` is made */
  atomic_int next_free;
} OpenFile;

#define position_of_kernel INT64_MIN

/* Returns a new descriptor, or -1 with errno. */
int new_descriptor(Mount* mount, PackEntry entry, const PackStatus* status, int flags);
/* Opens an entry under the number that it had before exec. */
void restore_descriptor(int number, Mount* mount, PackEntry entry, int64_t position);
/* The file of a descriptor, which has to be released; NULL if it is the kernel's. */
OpenFile* acquire_slow(int descriptor);
static inline OpenFile* acquire(int descriptor) {
  return __builtin_expect(descriptor < first_descriptor, 1) ? NULL : acquire_slow(descriptor);
}
void release(OpenFile* file);
int close_descriptor(OpenFile* file); /* and releases it */
int number_of(const OpenFile* file);
int used_descriptors(void); /* numbers from first_descriptor on that were ever given out */
/* Sets a position as lseek does, from an origin of SEEK_SET, SEEK_CUR or SEEK_END. */
off_t move_position(OpenFile* file, off_t offset, int origin);
/* Reads up to `count` bytes at `position`, at the file's own if it is below 0. */
ssize_t read_file(OpenFile* file, void* target, size_t count, int64_t position);
/* A true descriptor of a sealed copy in memory, which belongs to the file and shares its position from
   now on; -1 with errno. */
int promote(OpenFile* file);
int kernel_of(OpenFile* file); /* the descriptor that promote made, or -1 */
/* Whether a number of the kernel's is one that promote made: the program does not know that it is in use,
   and must not close it. */
bool is_hidden(int number);
/* Moves what a hidden number stands for to another one; 0 or an errno. */
int vacate(int number);
/* The first hidden number from `number` on; -1: none. */
int next_hidden(int number);

/* --- What neither a signal's handler nor the end of the thread may interrupt: it holds a lock, or memory of
   the core's. Faults still arrive: the core turns them into errors. */
typedef struct {
  sigset_t mask;
  int cancel_state;
} Protection;
void protect(Protection* before);
void unprotect(const Protection* before);

/* --- outputs.c: folders that programs write to --------------------------------------------------------- */

enum { most_output_descriptors = 1 << 16 };

/* `path` is the kernel's, from in_mount, where `place->output` was set. */
int open_output(const Place* place, const char* path, int flags, mode_t mode);
int rename_output(const char* from, const char* to, unsigned flags);
int unlink_output(const char* path);
int make_output_folder(const char* path, mode_t mode);
int remove_output_folder(const char* path);
/* The path of a file that is still written, of PATH_MAX bytes at `hidden`, or `path` if it is there: programs set
   modes and times by name before they close. */
const char* written_path(const char* path, char* hidden);
/* After mode or times of a path were changed here, with this result: other nodes hear of it. */
int output_changed(const Place* place, const char* path, int result);
int truncate_output(const Place* place, const char* path, off_t length);
/* As mkostemps and mkdtemp; `template` is the program's. */
int open_output_template(char* template, int suffix, int flags);
int make_output_template(char* template);
/* Descriptors of the kernel's that lie in an output: of a file that is written, or of a folder. */
bool is_output(int descriptor);
bool is_output_folder(int descriptor);
bool is_output_writer(int descriptor);
void note_output_folder(int descriptor);
void output_copied(int from, int to); /* both mean one open file now */
/* Before a descriptor is closed: publishes its file if this was the last one; 0 or an errno. */
int output_closing(int descriptor);
int close_output(int descriptor);
void output_spawns(void); /* before another process gets copies of descriptors */
/* Whether a name of a folder is no file's of the program's. */
bool is_hidden_name(const char* name);
/* The path in which programs know what the kernel has; 0 or an errno. Both of PATH_MAX bytes. */
int output_visible_path(const char* kernel_path, char* out);
int output_folder_path(int descriptor, char* out);
void start_outputs(void);

/* --- across files ------------------------------------------------------------------------------------ */

int open_entry(const Place* place, int flags);
struct stat;
void fill_stat(const Mount* mount, const PackStatus* from, struct stat* to);
/* Opens what the program before exec left open. */
void inherit_descriptors(void);
/* The launcher's variables as this program got them, for a next one with an environment of its own. */
enum { most_kept = 5 };
extern char* kept_variables[most_kept + 1]; /* NULL at the end */
/* After fork, in the child: locks that threads of the parent held are nobody's. */
void free_mount_locks(void);
