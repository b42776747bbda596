// Answers the requests of the kernel for a pack that is mounted by FUSE: a function of the request and
// the pack, without I/O of its own but that of the pack's reader.
//
//     program --open, stat, read--> kernel --request--> FuseServer --> FuseReplies
//        ^                            |  keeps names, attributes and pages     |
//        +----------------------------+ <---- reply, from the shard's mapping -+
//
// A pack does not change, so the kernel may keep replies for as long as it likes: once a file was read,
// stat, open, read and close of it never come here. A node is numbered as the inode of its
// entry: there is no table of the files that programs looked up or opened, and nothing to forget. That is
// why this speaks the kernel's protocol (linux/fuse.h) and not libfuse's: half of what libfuse does is
// keeping such tables, and a wheel that is installed with pip could not count on it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "paceline/pack_files.h"

namespace paceline {

constexpr std::size_t max_fuse_reply_bytes = std::size_t{1} << 20;    // of file data
constexpr std::size_t max_fuse_request_bytes = std::size_t{64} << 10;  // all others are writes

struct FuseReply {
  std::uint64_t request = 0;  // its number
  int error = 0;              // an errno
  bool is_init = false;       // from then on the mount serves programs
  bool is_read = false;
  std::span<const std::byte> body;  // in `room`, in a mapping, or in what `held` keeps
  std::vector<std::byte> room;      // kept from request to request of a thread
  std::shared_ptr<const void> held;
};

// Verified bytes of samples that are read in several parts, so that not each part verifies, or
// decompresses, the whole sample. Thread-safe.
class PartlyReadSamples {
 public:
  struct Sample;

  // Returns 0 or an errno. `bytes` stays valid as long as `held`.
  int get(PackFiles* pack, std::uint64_t number, std::size_t size, std::span<const std::byte>& bytes,
          std::shared_ptr<const void>& held);

 private:
  using Order = std::list<std::shared_ptr<Sample>>;  // the last one that was used is the first

  std::shared_ptr<Sample> find(std::uint64_t number, std::size_t size);
  int load(PackFiles* pack, Sample& sample);
  void keep_within_limits();
  void forget(const std::shared_ptr<Sample>& sample);

  std::mutex mutex_;  // of what follows
  Order order_;
  std::unordered_map<std::uint64_t, Order::iterator> places_;
  std::size_t own_bytes_ = 0;
};

// Thread-safe, if each thread has a FuseReply of its own.
class FuseReplies {
 public:
  explicit FuseReplies(PackFiles* pack) : pack_(pack) {}

  // Answers a request, whatever its bytes are; false if the kernel expects no reply.
  bool answer(std::span<const std::byte> request, FuseReply& reply);

 private:
  int find(std::uint64_t folder_node, std::string_view name, FuseReply& reply);
  int attributes(std::uint64_t node, FuseReply& reply);
  int start(std::span<const std::byte> body, FuseReply& reply);
  int open(bool is_folder, FuseReply& reply);
  int read(std::uint64_t node, std::span<const std::byte> body, FuseReply& reply);
  int list(std::uint64_t node, std::span<const std::byte> body, bool with_status, FuseReply& reply);
  int describe_file_system(FuseReply& reply);
  int dispatch(std::uint32_t operation, std::uint64_t node, std::span<const std::byte> body,
               FuseReply& reply);

  PackFiles* pack_;
  PartlyReadSamples partly_read_;
  std::atomic<std::uint32_t> kernel_can_{0};  // FUSE_* flags that it offered
};

}  // namespace paceline
