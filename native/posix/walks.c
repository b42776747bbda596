/* The hooks nftw and ftw: the C library's walk a tree by calls that no hook sees. Of a path outside of all
   mounts they are called as they are. */
#include "shim.h"

#include <dirent.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "aliases.h"

typedef struct {
  __nftw_func_t visit;     /* of nftw */
  __ftw_func_t plain_visit; /* of ftw; one of both is NULL */
  int flags;
  char path[PATH_MAX];
} Walk;

static int visit(Walk* walk, const struct stat* status, int kind, struct FTW* where) {
  return walk->visit != NULL ? walk->visit(walk->path, status, kind, where)
                             : walk->plain_visit(walk->path, status, kind);
}

static int visit_all(Walk* walk, size_t length, int level);

static int visit_entries(Walk* walk, size_t length, int level) {
  DIR* directory = opendir(walk->path);
  if (directory == NULL) return -1;
  int result = 0;
  for (const struct dirent* entry; result == 0 && (entry = readdir(directory)) != NULL;) {
    if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
    const int added =
        snprintf(walk->path + length, sizeof walk->path - length, "/%s", entry->d_name);
    result = length + (size_t)added >= sizeof walk->path
                 ? fail(ENAMETOOLONG)
                 : visit_all(walk, length + (size_t)added, level + 1);
    walk->path[length] = '\0';
  }
  closedir(directory);
  return result;
}

static int visit_all(Walk* walk, size_t length, int level) {
  struct stat status;
  if (lstat(walk->path, &status) != 0) return -1;
  const char* slash = memrchr(walk->path, '/', length);
  struct FTW where = {slash == NULL ? 0 : (int)(slash + 1 - walk->path), level};
  if (!S_ISDIR(status.st_mode)) return visit(walk, &status, FTW_F, &where);
  const bool is_last = (walk->flags & FTW_DEPTH) != 0;
  int result = is_last ? 0 : visit(walk, &status, FTW_D, &where);
  const bool has_actions = (walk->flags & FTW_ACTIONRETVAL) != 0;
  if (has_actions && result == FTW_SKIP_SUBTREE) return 0;
  if (result == 0) result = visit_entries(walk, length, level);
  if (has_actions && result == FTW_SKIP_SIBLINGS) result = 0; /* ended the loop over entries */
  return result == 0 && is_last ? visit(walk, &status, FTW_DP, &where) : result;
}

static int walk_place(const Place* place, const char* path, __nftw_func_t function,
                      __ftw_func_t plain_function, int flags) {
  PackEntry entry;
  const int problem = place->output != NULL ? 0 : find_entry(place, &entry, NULL);
  if (problem != 0) return fail(problem);
  if ((flags & FTW_CHDIR) != 0) return fail(ENOTSUP);
  Walk walk = {.visit = function, .plain_visit = plain_function, .flags = flags};
  size_t length = strlen(path);
  if (length >= sizeof walk.path) return fail(ENAMETOOLONG);
  memcpy(walk.path, path, length + 1);
  while (length > 1 && walk.path[length - 1] == '/') walk.path[--length] = '\0';
  return visit_all(&walk, length, 0);
}

HOOK int nftw(const char* path, __nftw_func_t function, int most_open, int flags) {
  Place place;
  const char* known = path;
  if (in_mount_here(&known, &place) || place.output != NULL) {
    return walk_place(&place, path, function, NULL, flags);
  }
  return REAL(nftw)(known, function, most_open, flags);
}

HOOK int ftw(const char* path, __ftw_func_t function, int most_open) {
  Place place;
  const char* known = path;
  if (in_mount_here(&known, &place) || place.output != NULL) {
    return walk_place(&place, path, NULL, function, 0);
  }
  return REAL(ftw)(known, function, most_open);
}

ALIAS(nftw64, nftw)
ALIAS(ftw64, ftw)
