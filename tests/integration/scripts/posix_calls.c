/* Calls of the C library on a folder of files, as programs make them that are not Python:

       posix_calls FOLDER        prints a line for each probe: its name, and what it found

   The folder has a/t.txt ("hello\nworld\n"), big (100,000 bytes, the i-th i % 251) and run.sh, which exits
   with 7. What is found must not depend on whether the folder is one of the kernel's or a mount. Each probe
   has a process of its own; one that does not end in `deadline_s` is named. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { deadline_s = 60, big_bytes = 100000, modulus = 251 };

extern char** environ;
static char top[4096];
static char text[4096]; /* what the probe found */

__attribute__((format(printf, 1, 2))) static void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const size_t length = strlen(text);
  vsnprintf(text + length, sizeof text - length, format, arguments);
  va_end(arguments);
}

/* " read 5", or " read failed: EBADF". */
static void tell(const char* what, long result) {
  if (result >= 0) {
    say(" %s %ld", what, result);
  } else {
    say(" %s failed: %s", what, strerrorname_np(errno));
  }
}

static const char* in(const char* name) {
  static char path[8192];
  snprintf(path, sizeof path, "%s/%s", top, name);
  return path;
}

static int open_big(void) {
  const int descriptor = open(in("big"), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) exit(99);
  return descriptor;
}

/* Has the kernel need the file. */
static void map(int descriptor) {
  void* bytes = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (bytes == MAP_FAILED) tell("mmap", -1);
}

static void tell_bytes(const char* what, int descriptor) {
  unsigned char bytes[1000];
  const ssize_t length = pread(descriptor, bytes, sizeof bytes, 1000);
  bool are_right = length == sizeof bytes;
  for (size_t i = 0; are_right && i < sizeof bytes; ++i) are_right = bytes[i] == (1000 + i) % modulus;
  if (length < 0) {
    tell(what, length);
  } else {
    say(" %s %s", what, are_right ? "right" : "WRONG");
  }
}

static int lowest_free(void) {
  const int free_number = dup(0);
  close(free_number);
  return free_number;
}

/* --- descriptors ----------------------------------------------------------------------------------------- */

static void dup2_to_the_lowest_number(void) {
  const int descriptor = open_big();
  const int wanted = lowest_free();
  tell("is the wanted number", dup2(descriptor, wanted) == wanted);
  tell_bytes("copy", wanted);
  tell("lseek", lseek(wanted, 77, SEEK_SET));
  tell("shared position", lseek(descriptor, 0, SEEK_CUR));
}

static void dup2_onto_all_other_numbers(void) {
  const int descriptor = open_big();
  map(descriptor);
  const int other = open("/dev/zero", O_RDONLY);
  for (int i = 3; i < 900; ++i) {
    if (i != descriptor && i != other && dup2(other, i) != i) tell("dup2", -1);
  }
  tell_bytes("file", descriptor);
}

static void closing_all_other_numbers(void) {
  const int descriptor = open_big();
  map(descriptor);
  for (int i = 3; i < 1024; ++i) {
    if (i != descriptor) close(i);
  }
  for (int i = 0; i < 8; ++i) open("/dev/zero", O_RDONLY);
  tell_bytes("file", descriptor);
}

static void close_range_around(void) {
  const int descriptor = open_big();
  map(descriptor);
  tell("below", descriptor == 3 ? 0 : close_range(3, (unsigned)descriptor - 1, 0));
  tell("above", close_range((unsigned)descriptor + 1, ~0U, 0));
  for (int i = 0; i < 8; ++i) open("/dev/zero", O_RDONLY);
  tell_bytes("file", descriptor);
}

static void close_range_of_all(void) {
  const int descriptor = open_big();
  tell("close_range", close_range(3, ~0U, CLOSE_RANGE_CLOEXEC));
  tell("flags", fcntl(descriptor, F_GETFD));
  fcntl(descriptor, F_SETFD, 0);
  tell("close_range", close_range(3, ~0U, 0));
  char byte;
  tell("read", read(descriptor, &byte, 1));
  const int again = open_big();
  closefrom(3);
  tell("read", read(again, &byte, 1));
  tell("close_range", close_range(9, 3, 0));
}

static void polls(void) {
  int ends[2];
  const int descriptor = open_big();
  if (pipe(ends) != 0) exit(99);
  struct pollfd asked[2] = {{descriptor, POLLIN | POLLOUT, 0}, {ends[0], POLLIN, 0}};
  tell("ready", poll(asked, 2, 1000));
  say(" %x %x", asked[0].revents, asked[1].revents);
  asked[0].events = 0;
  tell("ready", poll(asked, 2, 10)); /* nothing is: waits */
  say(" %x %x", asked[0].revents, asked[1].revents);
  asked[0].events = POLLIN;
  const struct timespec second = {1, 0};
  tell("ready", ppoll(asked, 2, &second, NULL));
  say(" %x %x", asked[0].revents, asked[1].revents);
  close(descriptor);
  tell("closed", poll(asked, 1, 0));
  say(" %x", asked[0].revents);
}

static void sent_through_a_socket(void) {
  int ends[2];
  const int descriptor = open_big();
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) exit(99);
  char byte = 'x';
  struct iovec part = {&byte, 1};
  union {
    struct cmsghdr header;
    char room[CMSG_SPACE(2 * sizeof(int))];
  } control = {0};
  struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
                           .msg_controllen = CMSG_SPACE(2 * sizeof(int))};
  struct cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(2 * sizeof(int));
  const int numbers[2] = {0, descriptor};
  memcpy(CMSG_DATA(header), numbers, sizeof numbers);
  tell("sendmsg", sendmsg(ends[0], &message, 0));
  memset(&control, 0, sizeof control);
  message.msg_controllen = sizeof control;
  tell("recvmsg", recvmsg(ends[1], &message, 0));
  header = CMSG_FIRSTHDR(&message);
  if (header == NULL) return;
  int received[2];
  memcpy(received, CMSG_DATA(header), sizeof received);
  tell_bytes("received", received[1]);
}

static void flags_of_a_descriptor(void) {
  const int descriptor = open_big();
  tell("set", fcntl(descriptor, F_SETFL, O_NONBLOCK));
  tell("nonblock", (fcntl(descriptor, F_GETFL) & O_NONBLOCK) != 0);
  tell("set", fcntl(descriptor, F_SETFL, 0));
  tell("nonblock", (fcntl(descriptor, F_GETFL) & O_NONBLOCK) != 0);
  char byte;
  const int path_only = open(in("big"), O_PATH);
  tell("read of a path", read(path_only, &byte, 1));
  struct stat status;
  tell("fstat of a path", fstat(path_only, &status));
  tell("lockf", lockf(descriptor, F_TEST, 0));
  tell("lockf", lockf(descriptor, F_TLOCK, 0));
  tell("unlock", lockf(descriptor, F_ULOCK, 0));
}

/* --- reading --------------------------------------------------------------------------------------------- */

static void vectors_and_positions(void) {
  char bytes[32];
  const struct iovec parts[2] = {{bytes, 16}, {bytes + 16, 16}};
  const int descriptor = open_big();
  tell("readv", readv(descriptor, parts, 2));
  tell("preadv", preadv(descriptor, parts, 2, 99990));
  tell("preadv -5", preadv(descriptor, parts, 2, -5));
  tell("preadv -1", preadv(descriptor, parts, 2, -1));
  tell("preadv2 -1", preadv2(descriptor, parts, 2, -1, 0));
  tell("preadv2 -2", preadv2(descriptor, parts, 2, -2, 0));
  tell("preadv2 flags", preadv2(descriptor, parts, 2, 0, 0x4000));
  const volatile int odd_counts[] = {-1, 0, 2000};
  for (int i = 0; i < 3; ++i) tell("readv of so many", readv(descriptor, parts, odd_counts[i]));
  tell("position", lseek(descriptor, 0, SEEK_CUR));
  tell("back", lseek(descriptor, -65, SEEK_CUR));
  tell("origin -1", lseek(descriptor, 0, -1));
  tell("origin 9", lseek(descriptor, 0, 9));
  tell("far", lseek(descriptor, INT64_MAX, SEEK_CUR));
  tell("behind", lseek(descriptor, 10, SEEK_END));
  tell("read", read(descriptor, bytes, 1));
  tell("hole", lseek(descriptor, 5, SEEK_HOLE));
  tell("data", lseek(descriptor, 100000, SEEK_DATA));
  map(descriptor);
  tell("origin -1", lseek(descriptor, 0, -1));
  tell("position", lseek(descriptor, 0, SEEK_CUR));
}

static int shared;
static atomic_int go;

static void* read_to_the_end(void* total) {
  char bytes[10];
  ssize_t length;
  while (atomic_load(&go) == 0) sched_yield();
  while ((length = read(shared, bytes, sizeof bytes)) > 0) *(size_t*)total += (size_t)length;
  return NULL;
}

static void* map_shared(void* unused) {
  while (atomic_load(&go) == 0) sched_yield();
  for (int i = 0; i < 50; ++i) sched_yield();
  map(shared);
  return unused;
}

/* No byte twice, none left out, whatever needs the kernel meanwhile. */
static void one_position_of_three_threads(void) {
  size_t wrong = 0;
  for (int round = 0; round < 50; ++round) {
    size_t totals[2] = {0, 0};
    pthread_t threads[3];
    shared = open_big();
    atomic_store(&go, 0);
    pthread_create(&threads[0], NULL, read_to_the_end, &totals[0]);
    pthread_create(&threads[1], NULL, read_to_the_end, &totals[1]);
    pthread_create(&threads[2], NULL, map_shared, NULL);
    atomic_store(&go, 1);
    for (int i = 0; i < 3; ++i) pthread_join(threads[i], NULL);
    wrong += totals[0] + totals[1] != big_bytes;
    close(shared);
  }
  tell("rounds that went wrong", (long)wrong);
}

static void streams(void) {
  char line[32] = "";
  int descriptor = open(in("a/t.txt"), O_RDONLY);
  FILE* stream = fdopen(descriptor, "w");
  say(" for writing: %s", stream == NULL ? strerrorname_np(errno) : "opened");
  tell("still open", read(descriptor, line, 1));
  stream = fdopen(descriptor, "r");
  say(" %s", stream != NULL && fgets(line, sizeof line, stream) != NULL ? line : "nothing");
  if (stream != NULL) fclose(stream);
}

/* --- paths ------------------------------------------------------------------------------------------------ */

static void odd_paths(void) {
  tell("file/.", open(in("a/t.txt/."), O_RDONLY));
  tell("chdir", chdir(in("a")));
  char path[PATH_MAX + 8] = "";
  for (int i = 0; i < 2046; ++i) strcat(path, "b/");
  strcat(path, "b/b/b/b");
  tell("too long", open(path, O_RDONLY));
  tell("pathconf", pathconf("t.txt", _PC_NAME_MAX));
  const int descriptor = open("t.txt", O_RDONLY);
  tell("fpathconf", fpathconf(descriptor, _PC_NAME_MAX));
  tell("access", access("t.txt", 64));
}

/* As find and du do. */
static void changing_the_folder_for_long(void) {
  struct rusage before;
  struct rusage after;
  const int here = open(in("a"), O_RDONLY | O_DIRECTORY);
  for (int i = 0; i < 100; ++i) chdir(top);
  getrusage(RUSAGE_SELF, &before);
  for (int i = 0; i < 100000; ++i) {
    if (chdir(top) != 0 || fchdir(here) != 0) exit(98);
  }
  getrusage(RUSAGE_SELF, &after);
  say(" memory %s", after.ru_maxrss - before.ru_maxrss < 4096 ? "bounded" : "grew");
}

/* --- processes ---------------------------------------------------------------------------------------------- */

static void tell_child(const char* what, pid_t child) {
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) < 0) {
    tell(what, -1);
  } else {
    say(" %s %s %d", what, WIFEXITED(status) ? "exited" : "was killed",
        WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  }
}

/* The child shares this process's memory, and not its descriptors and folder. */
static void vfork_leaves_the_parent_alone(void) {
  char folder[4096];
  const int descriptor = open_big();
  if (chdir("/") != 0) exit(99);
  const pid_t child = vfork();
  if (child == 0) {
    if (dup2(descriptor, 0) != 0 || chdir(top) != 0) _exit(1);
    close(descriptor);
    fcntl(descriptor, F_SETFD, 0);
    _exit(5);
  }
  tell_child("child", child);
  say(" in %s", getcwd(folder, sizeof folder));
  for (int i = 0; i < 8; ++i) open("/dev/zero", O_RDONLY);
  tell_bytes("file", descriptor);
  map(descriptor);
  tell("close", close(descriptor));
}

static void programs_of_the_folder(void) {
  char path[4096];
  char* const arguments[] = {(char*)"run.sh", NULL};
  pid_t child;
  strcpy(path, in("run.sh"));
  const int problem = posix_spawn(&child, path, NULL, NULL, arguments, environ);
  if (problem == 0) {
    tell_child("spawned", child);
  } else {
    say(" posix_spawn failed: %s", strerrorname_np(problem));
  }
  const int descriptor = open(path, O_RDONLY);
  child = fork();
  if (child == 0) {
    fexecve(descriptor, arguments, environ);
    _exit(errno);
  }
  tell_child("fexecve", child);
}

/* A program that starts in a folder whose process has ended. */
static void an_orphan_in_the_folder(void) {
  int ends[2];
  if (pipe(ends) != 0) exit(99);
  const pid_t child = fork();
  if (child == 0) {
    if (chdir(in("a")) != 0) _exit(1);
    const pid_t parent = getpid();
    if (fork() != 0) _exit(0);
    while (getppid() == parent) sched_yield();
    dup2(ends[1], 1);
    execlp("cat", "cat", "t.txt", (char*)NULL);
    _exit(1);
  }
  tell_child("child", child);
  close(ends[1]);
  char bytes[64] = "";
  tell("read", read(ends[0], bytes, sizeof bytes - 1));
  say(" %s", bytes);
}

/* A child does not inherit a lock that another thread of its parent held. */
static void forks_beside_threads(void) {
  size_t wrong = 0;
  for (int round = 0; round < 50; ++round) {
    pthread_t thread;
    shared = open_big();
    atomic_store(&go, 0);
    pthread_create(&thread, NULL, map_shared, NULL);
    atomic_store(&go, 1);
    for (int i = 0; i < round; ++i) sched_yield();
    const pid_t child = fork();
    if (child == 0) {
      map(shared);
      tell_bytes("file", shared);
      close(shared);
      _exit(strstr(text, "right") == NULL);
    }
    int status = 0;
    waitpid(child, &status, 0);
    wrong += status != 0;
    pthread_join(thread, NULL);
    close(shared);
  }
  tell("children that went wrong", (long)wrong);
}

static atomic_long handled;

static void open_in_a_handler(int number) {
  const int before = errno;
  char byte;
  const int descriptor = open(top, O_RDONLY);
  (void)number;
  fstat(descriptor, &(struct stat){0});
  read(descriptor, &byte, 1);
  close(descriptor);
  atomic_fetch_add(&handled, 1);
  errno = before;
}

static void signals_in_the_middle(void) {
  strcpy(top, in("a/t.txt"));
  signal(SIGPROF, open_in_a_handler);
  const struct itimerval often = {{0, 200}, {0, 200}};
  setitimer(ITIMER_PROF, &often, NULL);
  char bytes[64];
  long wrong = 0;
  for (int i = 0; i < 50000 || atomic_load(&handled) < 20; ++i) {
    const int descriptor = open(top, O_RDONLY);
    wrong += read(descriptor, bytes, sizeof bytes) != 12;
    wrong += close(descriptor) != 0;
  }
  tell("wrong", wrong);
}

/* As libuv, and so Node.js, asks for statx; others have calls of their own for what their C library lacked. */
static void system_calls(void) {
  struct statx wide = {0};
  struct stat found = {0};
  char bytes[64] = "";
  tell("statx", syscall(SYS_statx, AT_FDCWD, in("big"), 0, STATX_SIZE, &wide));
  say(" of %ld", (long)wide.stx_size);
  tell("statx", syscall(SYS_statx, AT_FDCWD, in("nothing"), 0, STATX_SIZE, &wide));
  tell("newfstatat", syscall(SYS_newfstatat, AT_FDCWD, in("a"), &found, 0));
  say(" mode %o", found.st_mode & S_IFMT);
  tell("faccessat", syscall(SYS_faccessat, AT_FDCWD, in("run.sh"), X_OK));
  tell("faccessat", syscall(SYS_faccessat, AT_FDCWD, in("nothing"), R_OK));
  tell("readlinkat", syscall(SYS_readlinkat, AT_FDCWD, in("big"), bytes, sizeof bytes));
  const long file = syscall(SYS_openat, AT_FDCWD, in("a/t.txt"), O_RDONLY);
  tell("read", syscall(SYS_read, file, bytes, 5));
  tell("lseek", syscall(SYS_lseek, file, 1, SEEK_CUR));
  tell("read", syscall(SYS_read, file, bytes + 5, 20));
  tell("pread64", syscall(SYS_pread64, file, bytes + 11, 5, 0));
  say(" '%s'", bytes);
  tell("fstat", syscall(SYS_fstat, file, &found));
  say(" of %ld", (long)found.st_size);
  void* mapped = (void*)syscall(SYS_mmap, NULL, 12, PROT_READ, MAP_PRIVATE, file, 0);
  say(" mapped %d", mapped != MAP_FAILED && memcmp(mapped, "hello", 5) == 0);
  tell("close", syscall(SYS_close, file));
  tell("read", syscall(SYS_read, file, bytes, 5));
  const long folder = syscall(SYS_openat, AT_FDCWD, in("a"), O_RDONLY | O_DIRECTORY);
  char entries[4096];
  say(" entries %d", syscall(SYS_getdents64, folder, entries, sizeof entries) > 0);
  tell("own", syscall(SYS_getpid) == getpid());
  const pid_t child = fork();
  if (child == 0) {
    char* words[] = {"run.sh", NULL};
    syscall(SYS_execve, in("run.sh"), words, environ);
    _exit(9);
  }
  int status = 0;
  waitpid(child, &status, 0);
  say(" exit %d", WEXITSTATUS(status));
}

/* --- the probes ------------------------------------------------------------------------------------------- */

#define PROBE(function) {#function, function}
static const struct {
  const char* name;
  void (*run)(void);
} probes[] = {
    PROBE(dup2_to_the_lowest_number),
    PROBE(dup2_onto_all_other_numbers),
    PROBE(closing_all_other_numbers),
    PROBE(close_range_around),
    PROBE(close_range_of_all),
    PROBE(polls),
    PROBE(sent_through_a_socket),
    PROBE(flags_of_a_descriptor),
    PROBE(vectors_and_positions),
    PROBE(one_position_of_three_threads),
    PROBE(streams),
    PROBE(odd_paths),
    PROBE(changing_the_folder_for_long),
    PROBE(vfork_leaves_the_parent_alone),
    PROBE(programs_of_the_folder),
    PROBE(an_orphan_in_the_folder),
    PROBE(forks_beside_threads),
    PROBE(signals_in_the_middle),
    PROBE(system_calls),
};

static void run(size_t i) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(deadline_s);
    probes[i].run();
    printf("%s:%s\n", probes[i].name, text);
    exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  if (status == SIGALRM) printf("%s: did not end in %d s\n", probes[i].name, deadline_s);
  else if (status != 0) printf("%s: status %x\n", probes[i].name, (unsigned)status);
}

int main(int count, char** words) {
  setvbuf(stdout, NULL, _IONBF, 0);
  if (count < 2 || realpath(words[1], top) == NULL) return 2;
  for (size_t i = 0; i < sizeof probes / sizeof *probes; ++i) {
    if (count == 2 || strcmp(words[2], probes[i].name) == 0) run(i);
  }
  return 0;
}
