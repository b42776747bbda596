#include "paceline/fuse_server.hpp"

#include <fcntl.h>
#include <linux/fuse.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "paceline/fuse_replies.hpp"
#include "paceline/pack_files.h"

namespace paceline {

struct FuseServer::Session {
  explicit Session(const std::string& of) : place(of), pack(open_pack_files(of)), replies(pack.get()) {
    if (ended < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  }
  ~Session() {
    close(ended);
    if (device >= 0) close(device);
  }

  void serve(int from);
  void send(int to, const FuseReply& reply);
  void note_ready();
  void leave();

  const std::string place;
  PackFilesOwner pack;
  FuseReplies replies;
  int ended = eventfd(0, EFD_CLOEXEC);
  int device = -1;
  std::mutex mutex;  // of `is_ready`
  std::condition_variable changed;
  bool is_ready = false;
  std::atomic<unsigned> threads{0};
  std::atomic<std::uint64_t> requests{0}, reads{0}, bytes{0}, errors{0};
};

namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// A descriptor of the same connection with a queue of its own, on which no other thread waits; or the
// same descriptor if the kernel has no such queues.
int own_queue(int device) {
  const int cloned = open("/dev/fuse", O_RDWR | O_CLOEXEC);
  if (cloned < 0) return device;
  auto source = static_cast<std::uint32_t>(device);
  if (ioctl(cloned, FUSE_DEV_IOC_CLONE, &source) == 0) return cloned;
  close(cloned);
  return device;
}

}  // namespace

void FuseServer::Session::note_ready() {
  const std::lock_guard lock(mutex);
  is_ready = true;
  changed.notify_all();
}

void FuseServer::Session::leave() {
  if (threads.fetch_sub(1) > 1) return;
  const std::uint64_t one = 1;
  if (write(ended, &one, sizeof one) < 0) return;  // it cannot be full: this is the last thread
}

void FuseServer::Session::send(int to, const FuseReply& reply) {
  fuse_out_header head{};
  head.len = static_cast<std::uint32_t>(sizeof head + reply.body.size());
  head.error = -reply.error;
  head.unique = reply.request;
  const iovec parts[] = {{&head, sizeof head},
                         {const_cast<std::byte*>(reply.body.data()), reply.body.size()}};
  const ssize_t sent = writev(to, parts, reply.body.empty() ? 1 : 2);
  if (reply.is_init && sent > 0) note_ready();
  if (sent < 0 && errno == EFAULT) {  // the kernel has made it EIO
    const std::string line = "paceline: " + place + ": a shard was cut off after it was verified\n";
    if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;  // nobody reads it
  }
  if (reply.error != 0 || sent < 0) errors.fetch_add(1, std::memory_order_relaxed);
}

void FuseServer::Session::serve(int from) {
  std::vector<std::byte> request(max_fuse_request_bytes);
  FuseReply reply;
  for (;;) {
    const ssize_t size = read(from, request.data(), request.size());
    if (size < 0 && (errno == EINTR || errno == EAGAIN || errno == ENOENT)) continue;
    if (size <= 0) return;  // ENODEV: it was unmounted
    requests.fetch_add(1, std::memory_order_relaxed);
    const auto length = static_cast<std::size_t>(size);
    if (!replies.answer({request.data(), length}, reply)) continue;
    if (reply.is_read) {
      reads.fetch_add(1, std::memory_order_relaxed);
      bytes.fetch_add(reply.body.size(), std::memory_order_relaxed);
    }
    send(from, reply);
    reply.held.reset();
  }
}

FuseServer::FuseServer(const std::string& place) : session_(std::make_shared<Session>(place)) {}

FuseServer::~FuseServer() = default;

void FuseServer::start(int device, unsigned threads) {
  if (session_->device >= 0) throw std::logic_error("the server was started before");
  session_->device = device;
  for (unsigned i = 0; i < std::max(threads, 1U); ++i) {
    const int from = i == 0 ? device : own_queue(device);
    session_->threads.fetch_add(1);
    try {
      std::thread([session = session_, from, device] {
        session->serve(from);
        if (from != device) close(from);
        session->leave();
      }).detach();
    } catch (const std::system_error&) {  // no more threads: those that there are do
      if (from != device) close(from);
      session_->leave();
      if (i == 0) throw;
      return;
    }
  }
}

bool FuseServer::wait_ready(std::uint64_t wait_ns) const {
  std::unique_lock lock(session_->mutex);
  return session_->changed.wait_for(lock, std::chrono::nanoseconds(wait_ns),
                                    [&] { return session_->is_ready; });
}

int FuseServer::ended() const noexcept { return session_->ended; }

FuseStats FuseServer::stats() const noexcept {
  return {session_->requests, session_->reads, session_->bytes, session_->errors};
}

void mount_fuse(int device, const std::string& source, const std::string& point) {
  const std::string options = "fd=" + std::to_string(device) +
                              ",rootmode=40000,user_id=" + std::to_string(geteuid()) +
                              ",group_id=" + std::to_string(getegid()) +
                              ",default_permissions,allow_other";
  if (mount(source.c_str(), point.c_str(), "fuse.paceline", MS_RDONLY | MS_NOSUID | MS_NODEV,
            options.c_str()) != 0) {
    fail("mount");
  }
}

void unmount(const std::string& point, bool lazy) {
  if (umount2(point.c_str(), UMOUNT_NOFOLLOW | (lazy ? MNT_DETACH : 0)) != 0) fail("umount");
}

}  // namespace paceline
