/* A folder seen through libfuse's high-level interface, as a first FUSE file system is written: the peer
   of bench/posix.py.

     cc -O2 fuse_pass_through.c -o fuse_pass_through $(pkg-config --cflags --libs fuse3)
     fuse_pass_through SOURCE kept|default MOUNT_POINT -f

   With `default` nothing is set: names and attributes are kept for a second, pages as long as a file is
   open. With `kept` the kernel keeps everything. */
#define _GNU_SOURCE
#define FUSE_USE_VERSION 31
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char* source;
static bool keeps;

static const char* below_source(const char* path, char* place) {
  snprintf(place, PATH_MAX, "%s%s", source, path);
  return place;
}

static int result(long value) { return value < 0 ? -errno : (int)value; }

static void* start(struct fuse_conn_info* connection, struct fuse_config* config) {
  (void)connection;
  if (keeps) {
    config->kernel_cache = 1;
    config->entry_timeout = config->attr_timeout = 3600;
  }
  return NULL;
}

static int get_attributes(const char* path, struct stat* status, struct fuse_file_info* file) {
  char place[PATH_MAX];
  return result(file != NULL ? fstat((int)file->fh, status)
                             : lstat(below_source(path, place), status));
}

static int open_file(const char* path, struct fuse_file_info* file) {
  char place[PATH_MAX];
  const int descriptor = open(below_source(path, place), O_RDONLY | O_CLOEXEC);
  file->fh = (uint64_t)descriptor;
  return descriptor < 0 ? -errno : 0;
}

static int read_file(const char* path, char* target, size_t size, off_t offset,
                     struct fuse_file_info* file) {
  (void)path;
  return result(pread((int)file->fh, target, size, offset));
}

static int close_file(const char* path, struct fuse_file_info* file) {
  (void)path;
  return result(close((int)file->fh));
}

static int list_folder(const char* path, void* list, fuse_fill_dir_t add, off_t offset,
                       struct fuse_file_info* file, enum fuse_readdir_flags flags) {
  (void)offset;
  (void)file;
  (void)flags;
  char place[PATH_MAX];
  DIR* folder = opendir(below_source(path, place));
  if (folder == NULL) return -errno;
  for (struct dirent* entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
    const struct stat status = {.st_ino = entry->d_ino, .st_mode = DTTOIF(entry->d_type)};
    if (add(list, entry->d_name, &status, 0, 0) != 0) break;
  }
  closedir(folder);
  return 0;
}

int main(int count, char** words) {
  static const struct fuse_operations operations = {.init = start,
                                                    .getattr = get_attributes,
                                                    .open = open_file,
                                                    .read = read_file,
                                                    .release = close_file,
                                                    .readdir = list_folder};
  if (count < 4) return 2;
  source = words[1];
  keeps = strcmp(words[2], "kept") == 0;
  words[2] = words[0];
  return fuse_main(count - 2, words + 2, &operations, NULL);
}
