/* Folders that programs write to: `paceline run --output`. The launcher names them:

       _PACELINE_OUTPUTS    lines of FOLDER TAB POINT: paths below POINT are those below FOLDER/tree, which
                            lies on local storage; FOLDER/room says how much may wait to be drained.
                            TAB "shared" follows if programs of other nodes write to it, too

   Such a path is not a pack's: in_mount replaces it by the kernel's own below FOLDER/tree, and the
   descriptor is the kernel's, so that write, fsync, mmap and all others are the kernel's, too. Two things
   are not. A file has its name only after it is closed, and a name is written by one program at a time:

       open("/out/a", O_CREAT)   tree/.paceline-a is made exclusively, and locked (flock) by the descriptor
       write, fsync, mmap ...    the kernel's
       close, the last one       rename to tree/a: from then on the name is there, or means the new content

   The kernel gives the lock up when the last descriptor is gone, however the process ended. So a hidden file
   without a lock is stale: the next program that creates the name removes it, as does the drain.

   Of an output that nodes share, the tree has all names, and a node's server (FOLDER/socket,
   store/serve/output_node.py) changes them: what another node wrote is a link to a file of the same size and
   time, whose bytes the server fetches before it is opened.

   A descriptor that a forked child inherited publishes nothing there. One that a program inherited by exec
   publishes when no other process has it: a shell opens what a program writes. */
#include "shim.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static const char hidden_prefix[] = ".paceline-";
enum {
  hidden_length = sizeof hidden_prefix - 1,
  most_records = most_output_descriptors,
  forked_without_exec = 0x40, /* PF_FORKNOEXEC of the kernel, in /proc/PID/stat */
  look_ms = 10,
  answer_s = 900,  /* of a server, which itself waits for other nodes */
  most_attempts = 5,
  restart_ms = 10000, /* for a server that was killed to be there again */
};

/* FOLDER/room, which the drain makes (store/serve/drain.py). Of two counters, so that each has one writer at
   a time: the programs add to the first, the drain sets the second. */
struct DrainRoom {
  _Atomic uint64_t published_bytes;
  _Atomic uint64_t settled_bytes; /* of these, what does not wait any more */
  uint64_t most_bytes;            /* that may wait; 0: any number */
  uint64_t wait_ms;               /* for room, in close */
};

typedef enum { NO_OUTPUT, OUTPUT_FOLDER, OPENED_HERE, INHERITED } OutputRole;

/* What is known of a descriptor of the kernel's. One that was closed by a call that nobody hooked leaves its
   record: so what a descriptor stands for is asked of the kernel before anything is done with it. */
typedef struct {
  _Atomic uint8_t role;
  unsigned forks; /* of this process, when it was opened */
  ino_t inode;
} OutputRecord;

static OutputRecord records[most_records]; /* untouched pages of it cost nothing */
static atomic_int records_end;
static atomic_uint forks;
static mode_t creation_mask; /* as the program began: the server makes folders for it */

static OutputRole role_of(int descriptor) {
  if (descriptor < 0 || descriptor >= atomic_load_explicit(&records_end, memory_order_relaxed)) {
    return NO_OUTPUT;
  }
  return (OutputRole)atomic_load_explicit(&records[descriptor].role, memory_order_acquire);
}

bool is_output(int descriptor) { return role_of(descriptor) != NO_OUTPUT; }
bool is_output_folder(int descriptor) { return role_of(descriptor) == OUTPUT_FOLDER; }
bool is_output_writer(int descriptor) { return role_of(descriptor) >= OPENED_HERE; }

static void note(int descriptor, OutputRole role, ino_t inode) {
  if (descriptor < 0 || descriptor >= most_records) return;
  OutputRecord* record = &records[descriptor];
  record->forks = atomic_load(&forks);
  record->inode = inode;
  atomic_store_explicit(&record->role, (uint8_t)role, memory_order_release);
  int end = atomic_load(&records_end);
  while (end <= descriptor && !atomic_compare_exchange_weak(&records_end, &end, descriptor + 1)) {
  }
}

void note_output_folder(int descriptor) { note(descriptor, OUTPUT_FOLDER, 0); }

void output_copied(int from, int to) {
  if (to < 0 || to >= most_records || from == to || !is_output(from)) return;
  note(to, role_of(from), records[from].inode);
  records[to].forks = records[from].forks;
}

static int close_quietly(int descriptor, int problem) {
  REAL(close)(descriptor);
  return fail(problem);
}

static int kernel_stat(const char* path, struct stat* to) {
  return (int)REAL(syscall)(SYS_newfstatat, AT_FDCWD, path, to, 0);
}


/* --- names ------------------------------------------------------------------------------------------- */

bool is_hidden_name(const char* name) {
  return strncmp(name, hidden_prefix, hidden_length - 1) == 0 &&
         (name[hidden_length - 1] == '-' || name[hidden_length - 1] == '\0');
}

/* Writes the path under which the file of `path` is written; 0 or an errno. */
static int hidden_path(const char* path, char* out) {
  const char* name = strrchr(path, '/') + 1;
  const size_t folder = (size_t)(name - path);
  if (folder + hidden_length + strlen(name) >= PATH_MAX) return ENAMETOOLONG;
  memcpy(out, path, folder);
  memcpy(out + folder, hidden_prefix, hidden_length);
  strcpy(out + folder + hidden_length, name);
  return 0;
}

int output_visible_path(const char* kernel_path, char* out) {
  for (unsigned i = 0; i < mount_count(); ++i) {
    const Mount* mount = mount_of_number(i);
    if (mount->tree == NULL || strncmp(kernel_path, mount->tree, mount->tree_length) != 0) continue;
    const char* behind = kernel_path + mount->tree_length;
    if (*behind != '/' && *behind != '\0') continue;
    if (mount->length + strlen(behind) >= PATH_MAX) return ENAMETOOLONG;
    memcpy(out, mount->point, mount->length);
    strcpy(out + mount->length, behind);
    return 0;
  }
  return ENOENT;
}

/* The path in which the kernel has an open file, or false. */
static bool path_of(int descriptor, char* out) {
  char link[40];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = REAL(readlink)(link, out, PATH_MAX - 1);
  if (length <= 0) return false;
  out[length] = '\0';
  return true;
}

int output_folder_path(int descriptor, char* out) {
  char path[PATH_MAX];
  if (!path_of(descriptor, path)) return errno;
  return output_visible_path(path, out);
}

static Mount* output_of(const char* kernel_path) {
  for (unsigned i = 0; i < mount_count(); ++i) {
    Mount* mount = mount_of_number(i);
    if (mount->tree != NULL && strncmp(kernel_path, mount->tree, mount->tree_length) == 0 &&
        kernel_path[mount->tree_length] == '/') {
      return mount;
    }
  }
  return NULL;
}

/* The output of a path that other nodes know as well; NULL: the kernel alone does. */
static Mount* shared_output(const char* kernel_path) {
  Mount* mount = output_of(kernel_path);
  return mount != NULL && mount->is_shared ? mount : NULL;
}

/* --- the server of a node ---------------------------------------------------------------------------- */

static void pause_ms(long ms) {
  const struct timespec pause = {ms / 1000, ms % 1000 * 1000000L};
  nanosleep(&pause, NULL);
}

/* Connects to FOLDER/socket; an errno. Through the folder: its path may be longer than an address can be. */
static int try_connect(int server, const Mount* mount) {
  struct sockaddr_un target = {.sun_family = AF_UNIX};
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%.*s", (int)(mount->tree_length - 5), mount->tree);
  const int folder = REAL(open)(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return errno;
  snprintf(target.sun_path, sizeof target.sun_path, "/proc/self/fd/%d/socket", folder);
  const int problem = connect(server, (struct sockaddr*)&target, sizeof target) == 0 ? 0 : errno;
  REAL(close)(folder);
  return problem;
}

/* A connection to the server of this node; -1 with errno. */
static int connect_server(const Mount* mount) {
  const int server = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (server < 0) return -1;
  for (int waited_ms = 0;; waited_ms += look_ms) {
    const int problem = try_connect(server, mount);
    if (problem == 0) break;
    const bool may_come =
        problem == ECONNREFUSED || problem == ENOENT || problem == EAGAIN || problem == EINTR;
    if (!may_come || waited_ms >= restart_ms) return close_quietly(server, problem);
    pause_ms(look_ms);
  }
  const struct timeval wait = {answer_s, 0};
  setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
  return server;
}

static int exchange(int server, const char* request, size_t size) {
  uint32_t code = 0;
  ssize_t length;
  while ((length = send(server, request, size, MSG_NOSIGNAL)) < 0 && errno == EINTR) {
  }
  if (length < 0) return errno == EPIPE ? ECONNRESET : errno;
  while ((length = recv(server, &code, sizeof code, 0)) < 0 && errno == EINTR) {
  }
  if (length == sizeof code) return (int)code;
  return length == 0 ? ECONNRESET : errno;
}

/* Asks the server of this node to do something with a path; 0 or an errno. `more` may be NULL. */
static int ask_server(const Mount* mount, const char* what, const char* kernel_path, const char* more,
                      unsigned number) {
  char request[2 * PATH_MAX + 64];
  const int before = errno;
  size_t size = (size_t)snprintf(request, sizeof request, "%s", what) + 1;
  char* again = request + size;
  memcpy(again, "0", 2);
  size += 2;
  size += (size_t)snprintf(request + size, sizeof request - size, "%s", kernel_path + mount->tree_length + 1) + 1;
  if (more != NULL) size += (size_t)snprintf(request + size, sizeof request - size, "%s", more) + 1;
  size += (size_t)snprintf(request + size, sizeof request - size, "%u", number);
  int problem = ECONNRESET;
  for (int attempt = 0; attempt < most_attempts && problem == ECONNRESET; ++attempt) {
    const int server = connect_server(mount);
    problem = server < 0 ? errno : exchange(server, request, size);
    if (server >= 0) REAL(close)(server);
    *again = '1'; /* a server that was killed may have done it */
  }
  if (problem == EIO || problem == ECONNRESET || problem == ECONNREFUSED || problem == EAGAIN) {
    dprintf(STDERR_FILENO, "paceline: %s: the server of this node could not %s it: %s\n",
            kernel_path + mount->tree_length + 1, what, strerror(problem));
  }
  errno = before;
  return problem;
}

/* Has the bytes of a file here before it is opened; 0 or an errno. */
static int fetch_bytes(const char* path) {
  const Mount* mount = shared_output(path);
  if (mount == NULL) return 0;
  char link[PATH_MAX];
  char marker[PATH_MAX];
  const ssize_t length = REAL(readlink)(path, link, sizeof link - 1);
  if (length <= 0) return 0; /* written here, or not there */
  link[length] = '\0';
  const char* name = strrchr(link, '/');
  const int folder = (int)(mount->tree_length - 5);
  if (name == NULL || strncmp(link, mount->tree, (size_t)folder) != 0) return 0; /* of the shared folder */
  snprintf(marker, sizeof marker, "%.*s/empty%s", folder, mount->tree, name);
  if (REAL(access)(marker, F_OK) != 0) return 0;
  return ask_server(mount, "fetch", path, NULL, 0);
}

/* --- opening ----------------------------------------------------------------------------------------- */

/* Removes a hidden file that nobody writes any more; false: somebody does. */
static bool remove_stale(const char* path) {
  struct stat named;
  struct stat opened;
  const int descriptor = REAL(open)(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) return errno == ENOENT;
  bool is_gone = false;
  if (REAL(flock)(descriptor, LOCK_EX | LOCK_NB) == 0 &&
      REAL(syscall)(SYS_fstat, descriptor, &opened) == 0) {
    is_gone = kernel_stat(path, &named) != 0 || named.st_ino != opened.st_ino ||
              REAL(unlink)(path) == 0;
  }
  REAL(close)(descriptor);
  return is_gone;
}

/* Makes a hidden file, which is this descriptor's alone; -1 with EEXIST while another one has it. */
static int claim(const char* path, int flags, mode_t mode) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const int descriptor = REAL(open)(path, flags | O_CREAT | O_EXCL, mode);
    if (descriptor >= 0) {
      struct stat status;
      /* Between the two calls, it looked stale. */
      const bool is_ours = REAL(flock)(descriptor, LOCK_EX | LOCK_NB) == 0 &&
                           REAL(syscall)(SYS_fstat, descriptor, &status) == 0 && status.st_nlink > 0;
      if (is_ours) {
        note(descriptor, OPENED_HERE, status.st_ino);
        return descriptor;
      }
      REAL(close)(descriptor);
    } else if (errno != EEXIST) {
      return -1;
    } else if (!remove_stale(path)) {
      return fail(EEXIST);
    }
  }
  return fail(EEXIST);
}

static int copy_bytes(int from, int to) {
  char buffer[1 << 14];
  for (;;) {
    const ssize_t moved = REAL(copy_file_range)(from, NULL, to, NULL, 1 << 30, 0);
    if (moved == 0) return 0;
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) break; /* the file systems cannot */
  }
  for (;;) {
    const ssize_t count = REAL(read)(from, buffer, sizeof buffer);
    if (count == 0) return 0;
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return errno;
    for (ssize_t done = 0; done < count;) {
      const ssize_t written = write(to, buffer + done, (size_t)(count - done));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return errno;
      done += written;
    }
  }
}

/* Has a new version of a file begin as a copy of the published one; 0 or an errno. */
static int copy_published(const char* path, const char* hidden, int descriptor, mode_t mode) {
  const int from = REAL(open)(path, O_RDONLY | O_CLOEXEC);
  if (from < 0) return errno;
  const int to = REAL(open)(hidden, O_WRONLY | O_CLOEXEC); /* without O_APPEND */
  const int problem = to < 0 ? errno : copy_bytes(from, to);
  if (to >= 0) REAL(close)(to);
  REAL(close)(from);
  fchmod(descriptor, mode);
  return problem;
}

static void discard(int descriptor, const char* hidden) {
  const int before = errno;
  REAL(unlink)(hidden);
  if (descriptor < most_records) atomic_store(&records[descriptor].role, NO_OUTPUT);
  REAL(close)(descriptor);
  errno = before;
}

static int open_published(const char* path, int flags) {
  const int problem = (flags & O_PATH) != 0 ? 0 : fetch_bytes(path);
  if (problem != 0) return fail(problem);
  const int descriptor = REAL(open)(path, flags & ~(O_CREAT | O_NOFOLLOW), 0);
  if (descriptor < 0) return -1;
  struct stat status;
  if ((flags & O_DIRECTORY) != 0 ||
      (REAL(syscall)(SYS_fstat, descriptor, &status) == 0 && S_ISDIR(status.st_mode))) {
    note_output_folder(descriptor);
  }
  return descriptor;
}

/* Has the file that a hidden descriptor is the new version of, if there is one, be its beginning; 0 or an
   errno. Nobody else publishes the name now. */
static int begin_version(const char* path, const char* hidden, int descriptor, int flags) {
  struct stat status;
  if (kernel_stat(path, &status) != 0) return errno == ENOENT ? 0 : errno;
  if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL)) return EEXIST;
  if (S_ISDIR(status.st_mode)) return EISDIR;
  if (REAL(euidaccess)(path, W_OK) != 0) return errno;
  const mode_t mode = status.st_mode & 07777;
  if ((flags & O_TRUNC) != 0) return fchmod(descriptor, mode) == 0 ? 0 : errno;
  const int problem = fetch_bytes(path);
  return problem != 0 ? problem : copy_published(path, hidden, descriptor, mode);
}

int open_output(const Place* place, const char* path, int flags, mode_t mode) {
  if ((flags & O_TMPFILE) == O_TMPFILE) return fail(EOPNOTSUPP);
  const bool writes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0;
  const bool creates = (flags & O_CREAT) != 0;
  if ((!writes && !creates) || (flags & O_PATH) != 0) return open_published(path, flags);
  struct stat status;
  if (!writes || !creates) {
    const bool is_there = kernel_stat(path, &status) == 0;
    if (!is_there && (errno != ENOENT || !creates)) return -1;
    if (is_there && !writes && (flags & O_EXCL) == 0) return open_published(path, flags);
  }
  if (place->is_folder_meant) return fail(EISDIR);
  char hidden[PATH_MAX];
  int problem = hidden_path(path, hidden);
  if (problem != 0) return fail(problem);
  const int descriptor = claim(hidden, flags & ~(O_TRUNC | O_NOFOLLOW), mode);
  if (descriptor < 0) return -1;
  const Mount* shared = shared_output(path);
  if (shared != NULL) problem = ask_server(shared, "claim", path, NULL, 0);
  if (problem == 0) {
    problem = begin_version(path, hidden, descriptor, flags);
    if (problem != 0 && shared != NULL) ask_server(shared, "release", path, NULL, 0);
  }
  if (problem == 0) return descriptor;
  discard(descriptor, hidden);
  return fail(problem);
}

/* --- publishing -------------------------------------------------------------------------------------- */

/* Whether a process is a copy of its parent that has executed no program. */
static bool is_forked_only(const char* process) {
  char path[300];
  char text[512];
  snprintf(path, sizeof path, "/proc/%s/stat", process);
  const int descriptor = REAL(open)(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return true; /* it has ended */
  const ssize_t length = REAL(read)(descriptor, text, sizeof text - 1);
  REAL(close)(descriptor);
  if (length <= 0) return true;
  text[length] = '\0';
  const char* behind_name = strrchr(text, ')');
  unsigned flags = 0;
  if (behind_name == NULL || sscanf(behind_name + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) != 1) {
    return false;
  }
  return (flags & forked_without_exec) != 0;
}

static bool has_open(const char* process, const char* wanted) {
  char folder[300];
  snprintf(folder, sizeof folder, "/proc/%s/fd", process);
  DIR* directory = REAL(opendir)(folder);
  if (directory == NULL) return false; /* another user's, or ended */
  bool is_open = false;
  for (const struct dirent* entry; !is_open && (entry = REAL(readdir)(directory)) != NULL;) {
    char target[PATH_MAX];
    const ssize_t length =
        REAL(readlinkat)(REAL(dirfd)(directory), entry->d_name, target, sizeof target - 1);
    if (length <= 0) continue;
    target[length] = '\0';
    is_open = strcmp(target, wanted) == 0;
  }
  REAL(closedir)(directory);
  return is_open;
}

/* Whether another process will publish the file. Who opened it does not wait for forked workers that
   inherited it by chance; a program that was started with it does. */
static bool is_left_to_another(const char* path, OutputRole role) {
  DIR* processes = REAL(opendir)("/proc");
  if (processes == NULL) return false;
  bool is_left = false;
  for (const struct dirent* entry; !is_left && (entry = REAL(readdir)(processes)) != NULL;) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    if (atoi(entry->d_name) == (int)getpid() || !has_open(entry->d_name, path)) continue;
    is_left = role == INHERITED || !is_forked_only(entry->d_name);
  }
  REAL(closedir)(processes);
  return is_left;
}

/* Waits until so many bytes may be published: those that wait for the drain are bounded. */
static int await_room(DrainRoom* room, uint64_t size, const char* path) {
  if (room == NULL || room->most_bytes == 0) return 0;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const int64_t end_ms = now.tv_sec * 1000 + now.tv_nsec / 1000000 + (int64_t)room->wait_ms;
  for (;;) {
    const uint64_t waiting =
        atomic_load(&room->published_bytes) - atomic_load(&room->settled_bytes);
    if (waiting == 0 || waiting + size <= room->most_bytes) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec * 1000 + now.tv_nsec / 1000000 >= end_ms) {
      dprintf(STDERR_FILENO,
              "paceline: %s is not published: %llu bytes wait to be drained, %llu may, and there was no room "
              "for %llu s\n",
              path, (unsigned long long)waiting, (unsigned long long)room->most_bytes,
              (unsigned long long)room->wait_ms / 1000);
      return ENOSPC;
    }
    pause_ms(look_ms);
  }
}

/* Whether this is the path of a hidden file; writes that by which it is published. */
static bool published_path(const char* hidden, char* out) {
  const char* name = strrchr(hidden, '/');
  if (name == NULL || strncmp(name + 1, hidden_prefix, hidden_length) != 0) return false;
  const size_t folder = (size_t)(name + 1 - hidden);
  memcpy(out, hidden, folder);
  strcpy(out + folder, name + 1 + hidden_length);
  return true;
}

/* Gives an open file its name, unless another process will; 0 or an errno. The kernel knows its path: it may
   have been renamed since it was opened. */
static int publish(int descriptor, OutputRole role, unsigned forks_before) {
  char hidden[PATH_MAX];
  char path[PATH_MAX];
  struct stat status;
  if (!path_of(descriptor, hidden) || !published_path(hidden, path)) return 0;
  Mount* mount = output_of(hidden);
  if (mount == NULL || REAL(syscall)(SYS_fstat, descriptor, &status) != 0 || status.st_nlink == 0) return 0;
  if ((role == INHERITED || forks_before != atomic_load(&forks)) && is_left_to_another(hidden, role)) {
    return 0;
  }
  char visible[PATH_MAX];
  if (output_visible_path(path, visible) != 0) return ENAMETOOLONG;
  int problem = await_room(mount->room, (uint64_t)status.st_size, visible);
  if (problem == 0 && mount->is_shared) {
    problem = ask_server(mount, "publish", path, NULL, 0);
  } else if (problem == 0 && REAL(renameat)(AT_FDCWD, hidden, AT_FDCWD, path) != 0) {
    problem = errno;
  }
  if (problem != 0) {
    REAL(unlink)(hidden);
  } else if (mount->room != NULL) {
    atomic_fetch_add(&mount->room->published_bytes, (uint64_t)status.st_size);
  }
  return problem;
}

int output_closing(int descriptor) {
  if (descriptor < 0 || descriptor >= most_records) return 0;
  OutputRecord* record = &records[descriptor];
  const ino_t inode = record->inode;
  const OutputRole role = (OutputRole)atomic_exchange(&record->role, NO_OUTPUT);
  if (role < OPENED_HERE) return 0;
  for (int other = 0; other < atomic_load(&records_end); ++other) {
    if (is_output_writer(other) && records[other].inode == inode) return 0;
  }
  const int before = errno;
  const int problem = publish(descriptor, role, record->forks);
  errno = before;
  return problem;
}

int close_output(int descriptor) {
  const int problem = output_closing(descriptor);
  const int result = REAL(close)(descriptor);
  return problem != 0 ? fail(problem) : result;
}

static void publish_all(void) {
  for (int descriptor = 0; descriptor < atomic_load(&records_end); ++descriptor) {
    if (is_output_writer(descriptor)) output_closing(descriptor);
  }
}

static bool has_writers(void) {
  for (int descriptor = 0; descriptor < atomic_load(&records_end); ++descriptor) {
    if (is_output_writer(descriptor)) return true;
  }
  return false;
}

/* A process that ends by itself closes its files. One that a signal ends publishes nothing. */
__attribute__((destructor)) static void end_process(void) {
  if (!has_writers()) return;
  fflush(NULL); /* the C library does it later */
  publish_all();
}

HOOK void _exit(int status) {
  publish_all();
  REAL(_exit)(status);
  __builtin_unreachable();
}

HOOK void _Exit(int status) { _exit(status); }

void output_spawns(void) { atomic_fetch_add(&forks, 1); }

static void forked(void) {
  for (int descriptor = 0; descriptor < atomic_load(&records_end); ++descriptor) {
    if (is_output_writer(descriptor)) atomic_store(&records[descriptor].role, NO_OUTPUT);
  }
}

/* --- the start of a program -------------------------------------------------------------------------- */

static void map_room(Mount* mount) {
  char path[PATH_MAX];
  if (snprintf(path, sizeof path, "%.*s/room", (int)(mount->tree_length - 5), mount->tree) >= PATH_MAX) return;
  const int descriptor = REAL(open)(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return;
  void* mapped =
      REAL(mmap)(NULL, sizeof(DrainRoom), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  REAL(close)(descriptor);
  if (mapped != MAP_FAILED) mount->room = mapped;
}

/* What the program before exec left open. */
static void find_inherited(void) {
  DIR* directory = REAL(opendir)("/proc/self/fd");
  if (directory == NULL) return;
  for (const struct dirent* entry; (entry = REAL(readdir)(directory)) != NULL;) {
    char path[PATH_MAX];
    char published[PATH_MAX];
    struct stat status;
    const int descriptor = atoi(entry->d_name);
    if (entry->d_name[0] == '.' || descriptor == REAL(dirfd)(directory) || !path_of(descriptor, path)) continue;
    if (output_visible_path(path, published) != 0 || REAL(syscall)(SYS_fstat, descriptor, &status) != 0) continue;
    if (S_ISDIR(status.st_mode)) note_output_folder(descriptor);
    if (S_ISREG(status.st_mode) && published_path(path, published)) note(descriptor, INHERITED, status.st_ino);
  }
  REAL(closedir)(directory);
}

void start_outputs(void) {
  bool has_output = false;
  for (unsigned i = 0; i < mount_count(); ++i) {
    if (mount_of_number(i)->tree == NULL) continue;
    map_room(mount_of_number(i));
    has_output = true;
  }
  if (!has_output) return;
  creation_mask = umask(0);
  umask(creation_mask);
  pthread_atfork(output_spawns, NULL, forked);
  find_inherited();
}

/* --- names that change ------------------------------------------------------------------------------- */

/* 0, or -1 with errno. */
static int ask(const Mount* mount, const char* what, const char* path, const char* more, unsigned number) {
  const int problem = ask_server(mount, what, path, more, number);
  return problem == 0 ? 0 : fail(problem);
}

int rename_output(const char* from, const char* to, unsigned flags) {
  if (output_of(from) == NULL || output_of(to) == NULL) return fail(EBUSY);
  const Mount* shared = shared_output(from);
  if (shared != NULL) {
    return ask(shared, "rename", from, to + shared->tree_length + 1, flags);
  }
  if (REAL(renameat2)(AT_FDCWD, from, AT_FDCWD, to, flags) == 0) return 0;
  char hidden_from[PATH_MAX];
  char hidden_to[PATH_MAX];
  if (errno != ENOENT || hidden_path(from, hidden_from) != 0) return -1;
  const int problem = hidden_path(to, hidden_to);
  if (problem != 0) return fail(problem);
  /* A file that is still written: it gets the new name when it is closed. */
  return REAL(renameat2)(AT_FDCWD, hidden_from, AT_FDCWD, hidden_to, RENAME_NOREPLACE);
}

int unlink_output(const char* path) {
  struct stat status;
  const Mount* shared = shared_output(path);
  if (shared != NULL) {
    if (kernel_stat(path, &status) == 0 && S_ISDIR(status.st_mode)) return fail(EISDIR);
    return ask(shared, "unlink", path, NULL, 0);
  }
  if (REAL(unlink)(path) == 0) return 0;
  char hidden[PATH_MAX];
  if (errno != ENOENT || hidden_path(path, hidden) != 0) return -1;
  return REAL(unlink)(hidden);
}

const char* written_path(const char* path, char* hidden) {
  struct stat status;
  const int before = errno;
  const bool is_there = kernel_stat(path, &status) == 0;
  const bool is_written =
      !is_there && errno == ENOENT && hidden_path(path, hidden) == 0 && kernel_stat(hidden, &status) == 0;
  errno = before;
  return is_written ? hidden : path;
}

int output_changed(const Place* place, const char* path, int result) {
  const Mount* shared = result != 0 || place->output == NULL ? NULL : shared_output(path);
  const char* name = strrchr(path, '/') + 1;
  return shared == NULL || is_hidden_name(name) ? result : ask(shared, "attributes", path, NULL, 0);
}

/* Of a folder that seems to be empty, what crashed writers left. */
static bool remove_stale_files(const char* path) {
  DIR* directory = REAL(opendir)(path);
  if (directory == NULL) return false;
  bool is_empty = true;
  for (const struct dirent* entry; is_empty && (entry = REAL(readdir)(directory)) != NULL;) {
    char file[PATH_MAX];
    if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
    is_empty = is_hidden_name(entry->d_name) &&
               snprintf(file, sizeof file, "%s/%s", path, entry->d_name) < PATH_MAX &&
               remove_stale(file);
  }
  REAL(closedir)(directory);
  return is_empty;
}

int make_output_folder(const char* path, mode_t mode) {
  const Mount* shared = shared_output(path);
  return shared == NULL ? REAL(mkdir)(path, mode)
                        : ask(shared, "mkdir", path, NULL, mode & 07777 & ~creation_mask);
}

int remove_output_folder(const char* path) {
  if (output_of(path) == NULL) return fail(EBUSY); /* the output itself */
  const Mount* shared = shared_output(path);
  if (shared != NULL) return ask(shared, "rmdir", path, NULL, 0);
  if (REAL(rmdir)(path) == 0) return 0;
  if ((errno != ENOTEMPTY && errno != EEXIST) || !remove_stale_files(path)) return fail(ENOTEMPTY);
  return REAL(rmdir)(path);
}

int truncate_output(const Place* place, const char* path, off_t length) {
  const int descriptor = open_output(place, path, O_WRONLY | O_CLOEXEC, 0);
  if (descriptor < 0) return -1;
  if (ftruncate(descriptor, length) == 0) return close_output(descriptor);
  const int problem = errno;
  char hidden[PATH_MAX];
  if (hidden_path(path, hidden) == 0) discard(descriptor, hidden);
  return fail(problem);
}

/* --- temporary names --------------------------------------------------------------------------------- */

enum { most_names = 1000, letters = 6 };

/* Fills in the letters of a template before its suffix; false: it has none. */
static bool draw_name(char* template, int suffix) {
  static const char alphabet[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  unsigned char drawn[letters];
  const size_t length = strlen(template);
  if (suffix < 0 || length < (size_t)suffix + letters) return false;
  if (getrandom(drawn, sizeof drawn, 0) != sizeof drawn) return false;
  char* end = template + length - (size_t)suffix;
  for (int i = 0; i < letters; ++i) end[i - letters] = alphabet[drawn[i] % (sizeof alphabet - 1)];
  return true;
}

static bool is_template(const char* template, int suffix) {
  const size_t length = strlen(template);
  return suffix >= 0 && length >= (size_t)suffix + letters &&
         memcmp(template + length - (size_t)suffix - letters, "XXXXXX", letters) == 0;
}

int open_output_template(char* template, int suffix, int flags) {
  if (!is_template(template, suffix)) return fail(EINVAL);
  for (int attempt = 0; attempt < most_names; ++attempt) {
    if (!draw_name(template, suffix)) return fail(EINVAL);
    const int descriptor = open(template, (flags & ~O_ACCMODE) | O_RDWR | O_CREAT | O_EXCL, 0600);
    if (descriptor >= 0 || errno != EEXIST) return descriptor;
  }
  return fail(EEXIST);
}

int make_output_template(char* template) {
  if (!is_template(template, 0)) return fail(EINVAL);
  for (int attempt = 0; attempt < most_names; ++attempt) {
    if (!draw_name(template, 0)) return fail(EINVAL);
    if (mkdir(template, 0700) == 0) return 0;
    if (errno != EEXIST) return -1;
  }
  return fail(EEXIST);
}
