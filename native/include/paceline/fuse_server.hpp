// Serves a pack to the kernel, as the file system of a mount by FUSE: threads that take requests from
// /dev/fuse and answer them (fuse_replies.hpp).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace paceline {

struct FuseStats {
  std::uint64_t requests, reads, bytes, errors;
};

// Thread-safe; not for a forked child.
class FuseServer {
 public:
  // Opens the pack in a folder, or an index of data in place. Throws PackError.
  explicit FuseServer(const std::string& place);
  // The threads end with the mount; those of a mount that is still there go on by themselves.
  ~FuseServer();
  FuseServer(const FuseServer&) = delete;
  FuseServer& operator=(const FuseServer&) = delete;

  // Serves the mount of this descriptor of /dev/fuse, which belongs to the server from now on. Once.
  // Throws std::system_error, std::logic_error.
  void start(int device, unsigned threads);
  // Whether the kernel has agreed with the server, within this time.
  bool wait_ready(std::uint64_t wait_ns) const;
  // A descriptor, readable once the mount has ended and all threads with it.
  int ended() const noexcept;
  FuseStats stats() const noexcept;

 private:
  struct Session;
  std::shared_ptr<Session> session_;  // shared with the threads
};

// mount(2) of a descriptor of /dev/fuse at `point`, for all users; only root may. Throws
// std::system_error.
void mount_fuse(int device, const std::string& source, const std::string& point);
// umount2(2). `lazy` takes the mount out of the tree at once, and it ends with its last open file. Throws
// std::system_error.
void unmount(const std::string& point, bool lazy);

}  // namespace paceline
