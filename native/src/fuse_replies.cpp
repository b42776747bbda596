#include "paceline/fuse_replies.hpp"

#include <dirent.h>
#include <linux/fuse.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>

#include "paceline/recorder.hpp"

static_assert(FUSE_KERNEL_MINOR_VERSION >= 29, "Linux headers of 5.1 or later are needed");

namespace paceline {
namespace {

// For how long the kernel may keep names and attributes: a year.
constexpr std::uint64_t kept_s = 365 * 24 * 3600;
constexpr std::uint64_t block_bytes = 4096;
constexpr std::size_t page_bytes = 4096;
constexpr std::uint32_t max_waiting_reads = 64;  // of readahead: 12 is the kernel's default

// What of FUSE is used, as far as the kernel has it. Without FUSE_ASYNC_READ the parts of a large file
// are read one after another.
constexpr std::uint32_t wanted_flags =
    FUSE_ASYNC_READ | FUSE_DO_READDIRPLUS | FUSE_READDIRPLUS_AUTO | FUSE_PARALLEL_DIROPS |
    FUSE_MAX_PAGES | FUSE_NO_OPEN_SUPPORT | FUSE_NO_OPENDIR_SUPPORT;

// Positions in a folder: behind ".", behind "..", and behind an entry by its inode, so that a listing goes
// on wherever the kernel asks, and nothing is kept between two requests.
constexpr std::uint64_t behind_itself = 1;
constexpr std::uint64_t behind_parent = 2;
constexpr std::uint64_t position_behind(std::uint64_t inode) { return inode + 1; }  // inodes: from 2 on

template <class T>
bool take(std::span<const std::byte> body, T& value) {
  if (body.size() < sizeof value) return false;
  std::memcpy(&value, body.data(), sizeof value);
  return true;
}

template <class T>
int put(const T& value, FuseReply& reply) {
  reply.room.resize(std::max(reply.room.size(), sizeof value));
  std::memcpy(reply.room.data(), &value, sizeof value);
  reply.body = std::span(reply.room).first(sizeof value);
  return 0;
}

fuse_attr attributes_of(const PackStatus& status) {
  fuse_attr found{};
  std::int64_t seconds = status.mtime_ns / 1'000'000'000;
  std::int64_t nanoseconds = status.mtime_ns % 1'000'000'000;
  if (nanoseconds < 0) {  // before 1970
    nanoseconds += 1'000'000'000;
    seconds -= 1;
  }
  found.ino = status.inode;
  found.size = status.size;
  found.blocks = (status.size + block_bytes - 1) / block_bytes * (block_bytes / 512);
  found.atime = found.mtime = found.ctime = static_cast<std::uint64_t>(seconds);
  found.atimensec = found.mtimensec = found.ctimensec = static_cast<std::uint32_t>(nanoseconds);
  found.mode = status.mode;
  found.nlink = static_cast<std::uint32_t>(status.links);
  found.uid = status.user;
  found.gid = status.group;
  found.blksize = block_bytes;
  return found;
}

fuse_entry_out entry_of(const PackStatus& status) {
  fuse_entry_out found{};
  found.nodeid = status.inode;
  found.entry_valid = found.attr_valid = kept_s;
  found.attr = attributes_of(status);
  return found;
}

// Writes the entries of a folder as the kernel wants them until the room is full. Owns nothing: it runs
// while the index is read (fault_guard.hpp).
struct Listing {
  PackFiles* pack;
  std::byte* at;
  std::size_t room;
  bool with_status;

  bool add(std::uint64_t inode, std::uint64_t position, bool is_folder, std::string_view name,
           const PackStatus* status) {
    const std::size_t head =
        with_status ? offsetof(fuse_direntplus, dirent) + offsetof(fuse_dirent, name)
                    : offsetof(fuse_dirent, name);
    const std::size_t size = FUSE_DIRENT_ALIGN(head + name.size());
    if (size > room) return false;
    std::memset(at, 0, size);
    std::byte* plain = at;
    if (with_status) {
      // Without a status, the kernel asks when it needs one.
      const fuse_entry_out entry = status != nullptr ? entry_of(*status) : fuse_entry_out{};
      std::memcpy(at, &entry, sizeof entry);
      plain += offsetof(fuse_direntplus, dirent);
    }
    fuse_dirent found{};
    found.ino = inode;
    found.off = position;
    found.namelen = static_cast<std::uint32_t>(name.size());
    found.type = is_folder ? DT_DIR : DT_REG;
    std::memcpy(plain, &found, offsetof(fuse_dirent, name));
    std::memcpy(plain + offsetof(fuse_dirent, name), name.data(), name.size());
    at += size;
    room -= size;
    return true;
  }

  static bool found(void* listing, PackEntry entry, const char* name, std::size_t length,
                    const PackStatus* status) {
    auto& self = *static_cast<Listing*>(listing);
    if (length > NAME_MAX) return true;  // no program could name it
    const std::uint64_t inode = pack_files_inode(self.pack, entry);
    return self.add(inode, position_behind(inode), entry.kind == PACK_FOLDER, {name, length}, status);
  }
};

}  // namespace

// --- samples that are read in parts --------------------------------------------------------------------

namespace {
constexpr std::size_t max_partly_read = 64;
constexpr std::size_t max_own_bytes = std::size_t{256} << 20;  // of decompressed samples
// As ReadOptions::trust_ns: then a sample in a mapping is verified again.
constexpr std::uint64_t trust_ns = 30'000'000'000;
}  // namespace

struct PartlyReadSamples::Sample {
  std::uint64_t number = 0;
  std::uint64_t since_ns = 0;
  std::size_t size = 0;
  std::mutex loading;
  bool is_loaded = false;  // with `loading`, as are the two below
  const std::byte* bytes = nullptr;
  std::unique_ptr<std::byte[]> own;  // decompressed, or put together
  bool is_counted = false;           // with the mutex of all
};

std::shared_ptr<PartlyReadSamples::Sample> PartlyReadSamples::find(std::uint64_t number,
                                                                   std::size_t size) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t now = monotonic_ns();
  if (const auto known = places_.find(number); known != places_.end()) {
    order_.splice(order_.begin(), order_, known->second);
    if (now - order_.front()->since_ns <= trust_ns) return order_.front();
    if (order_.front()->is_counted) own_bytes_ -= order_.front()->size;
    order_.pop_front();
  }
  auto added = std::make_shared<Sample>();
  added->number = number;
  added->since_ns = now;
  added->size = size;
  order_.push_front(added);
  places_[number] = order_.begin();
  keep_within_limits();
  return added;
}

// The first one stays, whatever its size: it is being read.
void PartlyReadSamples::keep_within_limits() {
  while (order_.size() > 1 && (order_.size() > max_partly_read || own_bytes_ > max_own_bytes)) {
    if (order_.back()->is_counted) own_bytes_ -= order_.back()->size;
    places_.erase(order_.back()->number);
    order_.pop_back();
  }
}

void PartlyReadSamples::forget(const std::shared_ptr<Sample>& sample) {
  const std::lock_guard lock(mutex_);
  const auto known = places_.find(sample->number);
  if (known == places_.end() || *known->second != sample) return;
  if (sample->is_counted) own_bytes_ -= sample->size;
  order_.erase(known->second);
  places_.erase(known);
}

int PartlyReadSamples::load(PackFiles* pack, Sample& sample) {
  const void* view = nullptr;
  int problem = pack_files_view(pack, sample.number, &view);
  if (problem != 0) return problem;
  sample.bytes = static_cast<const std::byte*>(view);
  if (view == nullptr) {
    sample.own.reset(new (std::nothrow) std::byte[sample.size]);
    if (sample.own == nullptr) return ENOMEM;
    problem = pack_files_read(pack, sample.number, sample.own.get());
    sample.bytes = sample.own.get();
  }
  sample.is_loaded = problem == 0;
  return problem;
}

int PartlyReadSamples::get(PackFiles* pack, std::uint64_t number, std::size_t size,
                           std::span<const std::byte>& bytes, std::shared_ptr<const void>& held) {
  const std::shared_ptr<Sample> sample = find(number, size);
  bool is_new = false;
  {
    const std::lock_guard lock(sample->loading);
    if (!sample->is_loaded) {
      if (const int problem = load(pack, *sample); problem != 0) {
        forget(sample);
        return problem;
      }
      is_new = sample->own != nullptr;
    }
    bytes = {sample->bytes, size};
  }
  if (is_new) {
    const std::lock_guard lock(mutex_);
    const auto known = places_.find(number);
    if (known != places_.end() && *known->second == sample) {
      sample->is_counted = true;
      own_bytes_ += size;
      keep_within_limits();
    }
  }
  held = sample;
  return 0;
}

// --- requests ------------------------------------------------------------------------------------------

int FuseReplies::find(std::uint64_t folder_node, std::string_view name, FuseReply& reply) {
  const PackEntry folder = pack_files_entry(pack_, folder_node);
  if (folder.kind != PACK_FOLDER) return folder.kind == PACK_FILE ? ENOTDIR : ESTALE;
  char path[PATH_MAX];
  std::size_t length = 0;
  int problem = pack_files_name(pack_, folder, path, &length);
  if (problem != 0) return problem;
  if (length + 1 + name.size() > PATH_MAX || name.size() > NAME_MAX) return ENAMETOOLONG;
  if (length > 0) path[length++] = '/';
  std::memcpy(path + length, name.data(), name.size());
  PackEntry entry{};
  PackStatus status{};
  problem = pack_files_find(pack_, path, length + name.size(), &entry, &status);
  if (problem == 0) return put(entry_of(status), reply);
  if (problem != ENOENT) return problem;
  fuse_entry_out nothing{};  // which the kernel remembers, too
  nothing.entry_valid = kept_s;
  return put(nothing, reply);
}

int FuseReplies::attributes(std::uint64_t node, FuseReply& reply) {
  const PackEntry entry = pack_files_entry(pack_, node);
  if (entry.kind != PACK_FOLDER && entry.kind != PACK_FILE) return ESTALE;
  PackStatus status{};
  if (const int problem = pack_files_status(pack_, entry, &status); problem != 0) return problem;
  fuse_attr_out found{};
  found.attr_valid = kept_s;
  found.attr = attributes_of(status);
  return put(found, reply);
}

int FuseReplies::start(std::span<const std::byte> body, FuseReply& reply) {
  fuse_init_in offered{};
  // Old kernels send less; what is not there is 0.
  std::memcpy(&offered, body.data(), std::min(body.size(), sizeof offered));
  if (offered.major < FUSE_KERNEL_VERSION) return EPROTO;
  fuse_init_out chosen{};
  chosen.major = FUSE_KERNEL_VERSION;
  chosen.minor = FUSE_KERNEL_MINOR_VERSION;
  if (offered.major > FUSE_KERNEL_VERSION) return put(chosen, reply);  // it asks again
  kernel_can_ = offered.flags;
  chosen.flags = offered.flags & wanted_flags;
  chosen.max_readahead = offered.max_readahead;
  chosen.max_background = max_waiting_reads;
  chosen.congestion_threshold = max_waiting_reads * 3 / 4;
  chosen.max_write = page_bytes;
  chosen.time_gran = 1;
  chosen.max_pages = max_fuse_reply_bytes / page_bytes;
  reply.is_init = true;
  return put(chosen, reply);
}

// A kernel that hears that there is no such call opens files and folders by itself from then on, and
// keeps what it read of them.
int FuseReplies::open(bool is_folder, FuseReply& reply) {
  if ((kernel_can_ & (is_folder ? FUSE_NO_OPENDIR_SUPPORT : FUSE_NO_OPEN_SUPPORT)) != 0) return ENOSYS;
  fuse_open_out opened{};
  opened.open_flags = FOPEN_KEEP_CACHE | (is_folder ? FOPEN_CACHE_DIR : 0U);
  return put(opened, reply);
}

int FuseReplies::read(std::uint64_t node, std::span<const std::byte> body, FuseReply& reply) {
  fuse_read_in asked{};
  reply.is_read = true;
  if (!take(body, asked)) return EINVAL;
  const PackEntry entry = pack_files_entry(pack_, node);
  if (entry.kind != PACK_FILE) return entry.kind == PACK_FOLDER ? EISDIR : ESTALE;
  PackStatus status{};
  if (const int problem = pack_files_status(pack_, entry, &status); problem != 0) return problem;
  if (asked.offset >= status.size) return 0;
  const std::size_t size = std::min<std::uint64_t>(
      {status.size - asked.offset, asked.size, max_fuse_reply_bytes});
  std::span<const std::byte> sample;
  if (size < status.size) {
    const int problem = partly_read_.get(pack_, entry.number, status.size, sample, reply.held);
    if (problem == 0) reply.body = sample.subspan(asked.offset, size);
    return problem;
  }
  const void* view = nullptr;
  if (const int problem = pack_files_view(pack_, entry.number, &view); problem != 0) return problem;
  if (view != nullptr) {  // the kernel copies from the mapping
    reply.body = {static_cast<const std::byte*>(view), size};
    return 0;
  }
  reply.room.resize(std::max(reply.room.size(), size));
  reply.body = std::span(reply.room).first(size);
  return pack_files_read(pack_, entry.number, reply.room.data());
}

int FuseReplies::list(std::uint64_t node, std::span<const std::byte> body, bool with_status,
                      FuseReply& reply) {
  fuse_read_in asked{};
  if (!take(body, asked)) return EINVAL;
  const PackEntry folder = pack_files_entry(pack_, node);
  if (folder.kind != PACK_FOLDER) return folder.kind == PACK_FILE ? ENOTDIR : ESTALE;
  const std::size_t size = std::min<std::size_t>(asked.size, max_fuse_reply_bytes);
  reply.room.resize(std::max(reply.room.size(), size));
  Listing listing{pack_, reply.room.data(), size, with_status};
  bool has_room = true;
  if (asked.offset < behind_itself) has_room = listing.add(node, behind_itself, true, ".", nullptr);
  if (has_room && asked.offset < behind_parent) {
    // The kernel knows the parent; a program that asks for its inode here gets the folder's own.
    has_room = listing.add(node, behind_parent, true, "..", nullptr);
  }
  PackEntry after{};
  if (asked.offset > behind_parent) {
    after = pack_files_entry(pack_, asked.offset - 1);
    if (after.kind != PACK_FOLDER && after.kind != PACK_FILE) return EINVAL;
  }
  if (has_room) {
    const int problem = pack_files_each(pack_, folder.number, after, &Listing::found, &listing);
    if (problem != 0) return problem;
  }
  reply.body = std::span(reply.room).first(size - listing.room);
  return 0;
}

int FuseReplies::describe_file_system(FuseReply& reply) {
  fuse_statfs_out found{};  // no blocks: df and its like leave it out
  found.st.bsize = found.st.frsize = block_bytes;
  found.st.namelen = NAME_MAX;
  return put(found, reply);
}

int FuseReplies::dispatch(std::uint32_t operation, std::uint64_t node,
                          std::span<const std::byte> body, FuseReply& reply) {
  switch (operation) {
    case FUSE_INIT: return start(body, reply);
    case FUSE_LOOKUP: {
      const auto* name = reinterpret_cast<const char*>(body.data());
      return find(node, {name, strnlen(name, body.size())}, reply);
    }
    case FUSE_GETATTR: return attributes(node, reply);
    case FUSE_READ: return read(node, body, reply);
    case FUSE_READDIR: return list(node, body, /*with_status=*/false, reply);
    case FUSE_READDIRPLUS: return list(node, body, /*with_status=*/true, reply);
    case FUSE_STATFS: return describe_file_system(reply);
    case FUSE_OPEN: return open(/*is_folder=*/false, reply);
    case FUSE_OPENDIR: return open(/*is_folder=*/true, reply);
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
    case FUSE_DESTROY: return 0;
    case FUSE_READLINK: return EINVAL;  // there are no links
    case FUSE_SETATTR:
    case FUSE_SYMLINK:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_UNLINK:
    case FUSE_RMDIR:
    case FUSE_RENAME:
    case FUSE_RENAME2:
    case FUSE_LINK:
    case FUSE_WRITE:
    case FUSE_CREATE:
    case FUSE_FALLOCATE:
    case FUSE_SETXATTR:
    case FUSE_REMOVEXATTR: return EROFS;
    default: return ENOSYS;  // the kernel does by itself what there is to do, and asks no more
  }
}

bool FuseReplies::answer(std::span<const std::byte> request, FuseReply& reply) {
  fuse_in_header head{};
  reply.body = {};
  reply.held.reset();
  reply.is_init = reply.is_read = false;
  reply.error = EIO;
  if (!take(request, head)) return false;
  if (head.opcode == FUSE_FORGET || head.opcode == FUSE_BATCH_FORGET) return false;
  reply.request = head.unique;
  if (head.len != request.size()) return true;
  try {
    reply.error = dispatch(head.opcode, head.nodeid, request.subspan(sizeof head), reply);
  } catch (const std::bad_alloc&) {
    reply.error = ENOMEM;
  }
  if (reply.error != 0) reply.body = {};
  return true;
}

}  // namespace paceline
