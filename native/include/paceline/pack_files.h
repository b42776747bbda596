/* The files and folders of a pack, as the shim (native/posix) and the mount by FUSE (fuse_replies.hpp)
   show them to programs. Plain C for the shim; no exception and no C++ type crosses it. All functions are thread-safe, and safe to use in a forked child.
   Functions return 0 or an errno. EIO is explained in one line on stderr, with the file's name. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct PackFiles PackFiles;

typedef enum { PACK_FILE = 1, PACK_FOLDER = 2 } PackKind;

typedef struct {
  PackKind kind;
  uint64_t number; /* of the sample; of a folder one more than in the index: 0 is the top one */
} PackEntry;

typedef struct {
  uint64_t inode;
  uint64_t size;
  uint64_t links;
  int64_t mtime_ns;
  uint32_t mode;
  uint32_t user;  /* who owns the index */
  uint32_t group;
} PackStatus;

/* Opens the pack in the folder `place`, or an index of data in place. NULL after a line on stderr. Its shards are
   opened when they are first read.
   Of a pack that nodes serve, `place` has the index and some of the shards, `requests` leads to where the
   node's server takes requests, and `source` is the whole pack; otherwise both are NULL. */
PackFiles* pack_files_open(const char* place, const char* requests, const char* source);
void pack_files_close(PackFiles* pack);
/* Finds what a path relative to the pack's top names; "" is the top. Returns 0, ENOENT, ENOTDIR
   or EIO. `status` may be NULL. */
int pack_files_find(PackFiles* pack, const char* name, size_t length, PackEntry* entry,
                    PackStatus* status);
/* Writes the path of an entry, relative to the top and without a NUL, to `name` of PATH_MAX bytes. */
int pack_files_name(PackFiles* pack, PackEntry entry, char* name, size_t* length);
/* Makes a list of the entries of a folder, which the caller frees. */
int pack_files_list(PackFiles* pack, uint64_t folder, PackEntry** entries, size_t* count);
/* Called with a direct entry of a folder: the last component of its name, valid during the call, and its
   status, or NULL if the index is damaged there. Returns whether to go on. Must not allocate. */
typedef bool (*PackFound)(void* state, PackEntry entry, const char* name, size_t length,
                          const PackStatus* status);
/* Calls `found` for the direct entries of a folder behind `after`, which is one of them, or has the kind
   0 for all: folders, then files, in the order of pack_files_list. */
int pack_files_each(PackFiles* pack, uint64_t folder, PackEntry after, PackFound found, void* state);
uint64_t pack_files_inode(PackFiles* pack, PackEntry entry);
/* The entry with this inode; of the kind 0 if there is none. */
PackEntry pack_files_entry(PackFiles* pack, uint64_t inode);
int pack_files_status(PackFiles* pack, PackEntry entry, PackStatus* status);
/* Reads a whole sample, verified, into `target` of the sample's size. */
int pack_files_read(PackFiles* pack, uint64_t sample, void* target);
/* The same of a sample that is stored as it is, in one extent of a shard that is mapped already; ENOTSUP of others,
   which take memory of the core's. */
int pack_files_read_stored(PackFiles* pack, uint64_t sample, void* target);
/* Sets `bytes` to where a sample lies in a mapping, verified; to NULL if it is compressed, or in
   several extents. Valid as long as the pack. */
int pack_files_view(PackFiles* pack, uint64_t sample, const void** bytes);
/* Copies from a view, whose file may be truncated meanwhile: then EIO. */
int pack_files_copy(void* target, const void* view, size_t size);

#ifdef __cplusplus
}

#include <memory>
#include <string>

namespace paceline {

struct ClosePackFiles {
  void operator()(PackFiles* pack) const noexcept { pack_files_close(pack); }
};
using PackFilesOwner = std::unique_ptr<PackFiles, ClosePackFiles>;

// As pack_files_open; throws PackError.
PackFilesOwner open_pack_files(const std::string& place);

}  // namespace paceline
#endif
