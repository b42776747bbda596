#include "paceline/peer_server.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <deque>
#include <list>
#include <stdexcept>
#include <system_error>

#include "paceline/fault_guard.hpp"
#include "paceline/pack_index.hpp"
#include "paceline/peer_proof.hpp"

namespace paceline {

struct PeerServer::HeldShard {
  Mapping mapping;
};

namespace {

constexpr std::size_t max_iov = 64;
constexpr std::size_t max_noted = 4096;
// In one turn of a connection, so that a client of many bytes doesn't starve the others.
constexpr std::size_t turn_bytes = std::size_t{4} << 20;
// That are encrypted at a time.
constexpr std::size_t chunk_bytes = std::size_t{64} << 10;
// That wait to be accepted: a burst of them must not have the kernel drop a peer's for a second.
constexpr int backlog = 4096;
// That are accepted in one turn of a thread.
constexpr int accepted_at_once = 64;

std::uint64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

int listen_on(const std::string& host, std::uint16_t port, std::uint16_t* bound) {
  sockaddr_storage storage{};
  socklen_t size = 0;
  auto* four = reinterpret_cast<sockaddr_in*>(&storage);
  auto* six = reinterpret_cast<sockaddr_in6*>(&storage);
  if (inet_pton(AF_INET, host.c_str(), &four->sin_addr) == 1) {
    four->sin_family = AF_INET;
    four->sin_port = htons(port);
    size = sizeof *four;
  } else if (inet_pton(AF_INET6, host.c_str(), &six->sin6_addr) == 1) {
    six->sin6_family = AF_INET6;
    six->sin6_port = htons(port);
    size = sizeof *six;
  } else {
    errno = EINVAL;
    fail("not a numeric address");
  }
  const int fd = socket(storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) fail("socket");
  const int one = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(fd, reinterpret_cast<sockaddr*>(&storage), size) != 0 || listen(fd, backlog) != 0 ||
      getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    const int error = errno;
    close(fd);
    errno = error;
    fail("bind");
  }
  *bound = ntohs(storage.ss_family == AF_INET ? four->sin_port : six->sin6_port);
  return fd;
}

void take_over(int listener, std::uint16_t* bound) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&storage), &size) != 0 ||
      fcntl(listener, F_SETFL, O_NONBLOCK) != 0 || fcntl(listener, F_SETFD, FD_CLOEXEC) != 0) {
    fail("a listening socket");
  }
  *bound = ntohs(storage.ss_family == AF_INET
                     ? reinterpret_cast<const sockaddr_in*>(&storage)->sin_port
                     : reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port);
}

struct Reply {  // a frame on its way out
  FrameHeader header;
  std::shared_ptr<const void> owner;  // of what the pieces show
  std::vector<std::span<const std::byte>> pieces;
  std::size_t next = 0;  // piece; what is sent of it is cut off
  std::size_t header_sent = 0;
};

enum class Outcome : std::uint8_t { fine, blocked, closed };

}  // namespace

// One thread and its connections; nothing of it is shared.
class PeerServer::Worker {
 public:
  explicit Worker(PeerServer& server)
      : server_(server),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        spare_(eventfd(0, EFD_CLOEXEC)),
        max_strangers_(std::max<std::size_t>(
            1, server.options_.max_strangers / std::max(1U, server.options_.threads))) {
    if (epoll_ >= 0 && spare_ >= 0 &&
        watch(server.listener_, EPOLLIN | EPOLLEXCLUSIVE, EPOLL_CTL_ADD) &&
        watch(server.wake_, EPOLLIN, EPOLL_CTL_ADD)) {
      return;
    }
    const int error = errno;
    close_own();
    errno = error;
    fail("epoll");
  }
  ~Worker() {
    while (!connections_.empty()) end(connections_.begin()->first);
    close_own();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void run() {
    epoll_event events[64];
    for (;;) {
      const int count = epoll_wait(epoll_, events, 64, wait_ms());
      bool has_callers = false;
      for (int i = 0; i < count; ++i) {
        const int fd = events[i].data.fd;
        if (fd == server_.wake_) return;
        if (fd == server_.listener_) {
          has_callers = true;
        } else if (const auto found = connections_.find(fd); found != connections_.end()) {
          if (!serve(fd, found->second, events[i].events)) end(fd);
        }
      }
      // After the others: a descriptor that is closed here may be given out again, and an event of this turn
      // would be taken for the new connection's.
      end_silent();
      for (int i = 0; has_callers && i < accepted_at_once && accept_one(); ++i) {
      }
    }
  }

 private:
  enum class Stage : std::uint8_t { silent, challenged, welcome };

  struct Connection {
    std::uint64_t since_ns = 0;  // when it was accepted
    Stage stage = Stage::silent;
    std::list<int>::iterator stranger;  // its place in strangers_, until it is welcome
    Nonces nonces{};
    std::unique_ptr<TlsStream> tls;  // null: nothing is encrypted
    bool ends_after_replies = false;
    std::uint32_t watched = EPOLLIN;
    FrameHeader header;
    std::size_t have = 0;  // bytes of header and body read
    std::vector<std::byte> body;
    std::deque<Reply> replies;
  };

  bool watch(int fd, std::uint32_t what, int operation) const {
    epoll_event event{};
    event.events = what;
    event.data.fd = fd;
    return epoll_ctl(epoll_, operation, fd, &event) == 0;
  }

  void close_own() const {
    if (epoll_ >= 0) close(epoll_);
    if (spare_ >= 0) close(spare_);
  }

  // The process has no descriptor left. The oldest stranger makes way, or else the caller: a connection
  // that stayed in the queue would wake the thread again and again, so the spare descriptor takes it.
  void refuse_one() {
    if (!strangers_.empty()) {
      refuse_oldest();
      return;
    }
    if (spare_ >= 0) close(spare_);
    const int fd = accept4(server_.listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      server_.refused_.fetch_add(1);
      close(fd);
    }
    spare_ = eventfd(0, EFD_CLOEXEC);
  }

  // False: nobody else waits, or there is no room.
  bool accept_one() {
    const int fd = accept4(server_.listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE) refuse_one();
      return false;
    }
    if (strangers_.size() >= max_strangers_) refuse_oldest();
    server_.connections_.fetch_add(1);
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    Connection& made = connections_[fd];
    made.since_ns = now_ns();
    if (const auto& tls = server_.options_.tls; tls != nullptr) {
      made.tls = std::make_unique<TlsStream>(tls, TlsStream::Side::server, fd);
    }
    made.stranger = strangers_.insert(strangers_.end(), fd);
    if (!watch(fd, EPOLLIN, EPOLL_CTL_ADD)) end(fd);
    return true;
  }

  void end(int fd) {
    const auto found = connections_.find(fd);
    if (found->second.stage == Stage::welcome) {
      server_.peers_.fetch_sub(1);
    } else {
      strangers_.erase(found->second.stranger);
    }
    connections_.erase(found);
    close(fd);
  }

  // Only strangers have a deadline: without any, the thread sleeps.
  int wait_ms() const { return strangers_.empty() ? -1 : 500; }

  void end_silent() {
    if (strangers_.empty()) return;
    const std::uint64_t now = now_ns();
    while (!strangers_.empty() &&
           now - connections_.at(strangers_.front()).since_ns > server_.options_.hello_ns) {
      refuse_oldest();
    }
  }

  void refuse_oldest() {
    server_.refused_.fetch_add(1);
    end(strangers_.front());
  }

  // False: the connection ends.
  bool serve(int fd, Connection& connection, std::uint32_t events) {
    if ((events & EPOLLERR) != 0) return false;
    bool has_input = (events & (EPOLLIN | EPOLLHUP)) != 0;
    Outcome outcome = Outcome::fine;
    for (;;) {
      if (has_input && take(fd, connection) == Outcome::closed) return false;
      outcome = send(fd, connection);
      if (outcome == Outcome::closed) return false;
      // What TLS has taken from the socket already, epoll does not tell of.
      has_input = outcome == Outcome::fine && can_take(connection) && connection.tls != nullptr &&
                  connection.tls->has_received();
      if (!has_input) break;
    }
    if (connection.replies.empty() && connection.ends_after_replies) return false;
    std::uint32_t wanted = outcome == Outcome::fine && connection.replies.empty() ? 0U : EPOLLOUT;
    if (can_take(connection)) wanted |= EPOLLIN;
    if (wanted != connection.watched) {
      watch(fd, wanted, EPOLL_CTL_MOD);
      connection.watched = wanted;
    }
    return true;
  }

  static bool can_take(const Connection& connection) {
    return connection.replies.size() < max_pending_reads && !connection.ends_after_replies;
  }

  Outcome take(int fd, Connection& connection) {
    while (can_take(connection)) {
      std::byte* target = nullptr;
      std::size_t room = 0;
      if (connection.have < sizeof connection.header) {
        target = reinterpret_cast<std::byte*>(&connection.header) + connection.have;
        room = sizeof connection.header - connection.have;
      } else {
        const std::size_t in_body = connection.have - sizeof connection.header;
        target = connection.body.data() + in_body;
        room = connection.body.size() - in_body;
      }
      const bool is_plain = connection.tls == nullptr;
      const ssize_t got = is_plain ? recv(fd, target, room, 0) : connection.tls->receive(target, room);
      if (got == 0) return Outcome::closed;
      if (got < 0) {
        if (errno == EINTR) continue;
        if (errno == EPROTO) return refuse_malformed();  // no TLS, or another key
        return errno == EAGAIN ? Outcome::blocked : Outcome::closed;
      }
      connection.have += static_cast<std::size_t>(got);
      if (connection.have == sizeof connection.header) {
        if (!is_expected(connection)) return refuse_malformed();
        connection.body.resize(connection.header.body_bytes);
      }
      if (connection.have == sizeof connection.header + connection.body.size() &&
          connection.have >= sizeof connection.header) {
        if (!answer(connection)) return refuse_malformed();
        connection.have = 0;
        connection.body.clear();
      }
    }
    return Outcome::fine;
  }

  Outcome refuse_malformed() {
    server_.refused_.fetch_add(1);
    return Outcome::closed;
  }

  // Whether the frame may come now, and how long it says it is: decided before memory is taken.
  static bool is_expected(const Connection& connection) {
    const FrameHeader& header = connection.header;
    if (header.magic != peer_magic || header.version != peer_version) return false;
    if (connection.stage == Stage::silent) {
      return header.kind == FrameKind::hello && header.body_bytes == hello_bytes;
    }
    if (connection.stage == Stage::challenged) {
      return header.kind == FrameKind::proof && header.body_bytes == proof_bytes;
    }
    if (header.kind == FrameKind::card) return header.count <= 1 && header.body_bytes <= max_caller_bytes;
    return header.kind == FrameKind::read && header.count > 0 && header.count <= max_ranges &&
           header.body_bytes == header.count * sizeof(ByteRange);
  }

  bool answer(Connection& connection) {
    switch (connection.header.kind) {
      case FrameKind::hello:
        answer_hello(connection);
        return true;
      case FrameKind::proof:
        answer_proof(connection);
        return true;
      case FrameKind::card:
        if (!connection.body.empty()) {
          server_.note_caller({reinterpret_cast<const char*>(connection.body.data()),
                               connection.body.size()});
        }
        if (connection.header.count > 0) server_.note_damaged(connection.header.shard);
        push_card(connection);
        return true;
      default:
        return answer_read(connection);
    }
  }

  void answer_hello(Connection& connection) {
    std::copy(connection.body.begin(), connection.body.end(), connection.nonces.client.begin());
    connection.nonces.node = random_nonce();
    connection.stage = Stage::challenged;
    auto nonce = std::make_shared<const Digest>(connection.nonces.node);
    push(connection, FrameKind::challenge, nonce, {*nonce});
  }

  void answer_proof(Connection& connection) {
    const std::span<const std::byte> body(connection.body);
    const auto& options = server_.options_;
    const auto pack = body.subspan(digest_bytes);
    const Digest right = proof_of(Prover::client, options.token, connection.nonces, pack);
    if (!equal_in_constant_time(body.first(digest_bytes), right)) {
      push_refusal(connection, Refusal::wrong_token);
    } else if (!equal_in_constant_time(pack, options.pack)) {
      push_refusal(connection, Refusal::wrong_pack);
    } else if (server_.peers_.fetch_add(1) >= server_.options_.max_connections) {
      server_.peers_.fetch_sub(1);
      push_refusal(connection, Refusal::full);
    } else {
      connection.stage = Stage::welcome;
      strangers_.erase(connection.stranger);
      const Digest own = proof_of(Prover::node, options.token, connection.nonces, pack);
      const auto owned = std::make_shared<const std::pair<Digest, std::shared_ptr<const std::string>>>(
          own, server_.card());
      push(connection, FrameKind::welcome, owned,
           {owned->first, std::as_bytes(std::span(*owned->second))});
    }
  }

  void push_card(Connection& connection) {
    const auto card = server_.card();
    push(connection, FrameKind::welcome, card, {std::as_bytes(std::span(*card))});
  }

  static void push(Connection& connection, FrameKind kind, std::shared_ptr<const void> owner,
                   std::initializer_list<std::span<const std::byte>> pieces) {
    Reply reply{.header = {.kind = kind, .id = connection.header.id},
                .owner = std::move(owner),
                .pieces = {}};
    for (const auto piece : pieces) {
      reply.header.body_bytes += piece.size();
      if (!piece.empty()) reply.pieces.push_back(piece);
    }
    connection.replies.push_back(std::move(reply));
  }

  void push_refusal(Connection& connection, Refusal refusal) {
    connection.replies.push_back({.header = {.kind = FrameKind::refused,
                                             .id = connection.header.id,
                                             .shard = connection.header.shard,
                                             .count = static_cast<std::uint32_t>(refusal)},
                                  .owner = nullptr,
                                  .pieces = {}});
    if (refusal == Refusal::not_held) return;
    server_.refused_.fetch_add(1);
    connection.ends_after_replies = true;
  }

  bool answer_read(Connection& connection) {
    const FrameHeader& header = connection.header;
    const auto held = server_.find(header.shard);
    if (held == nullptr) {
      server_.note_missed(header.shard);
      push_refusal(connection, Refusal::not_held);
      return true;
    }
    const auto file = held->mapping.bytes();
    Reply reply{.header = {.kind = FrameKind::data,
                           .id = header.id,
                           .shard = header.shard,
                           .count = header.count},
                .owner = held,
                .pieces = {}};
    reply.pieces.reserve(header.count);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < header.count; ++i) {
      ByteRange range{};
      std::memcpy(&range, connection.body.data() + i * sizeof range, sizeof range);
      const bool is_within = range.offset <= file.size() && range.length <= file.size() - range.offset;
      if (!is_within) {
        push_refusal(connection, Refusal::bad_range);
        return true;
      }
      total += range.length;
      if (range.length > 0) reply.pieces.push_back(file.subspan(range.offset, range.length));
    }
    reply.header.body_bytes = total;
    server_.reads_.fetch_add(1, std::memory_order_relaxed);
    server_.ranges_.fetch_add(header.count, std::memory_order_relaxed);
    server_.bytes_.fetch_add(total, std::memory_order_relaxed);
    connection.replies.push_back(std::move(reply));
    return true;
  }

  Outcome send(int fd, Connection& connection) {
    return connection.tls != nullptr ? send_encrypted(connection) : send_plain(fd, connection);
  }

  Outcome send_plain(int fd, Connection& connection) {
    std::size_t left = turn_bytes;
    while (!connection.replies.empty() && left > 0) {
      Reply& reply = connection.replies.front();
      iovec parts[max_iov];
      int count = 0;
      if (reply.header_sent < sizeof reply.header) {
        auto* header = reinterpret_cast<std::byte*>(&reply.header);
        parts[count++] = {header + reply.header_sent, sizeof reply.header - reply.header_sent};
      }
      for (std::size_t i = reply.next; i < reply.pieces.size() && count < static_cast<int>(max_iov);
           ++i) {
        const auto piece = reply.pieces[i];
        parts[count++] = {const_cast<std::byte*>(piece.data()), piece.size()};
      }
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = static_cast<std::size_t>(count);
      const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL);
      if (sent < 0) {
        if (errno == EINTR) continue;
        // EFAULT: the shard was truncated under the mapping. The client reads elsewhere.
        return errno == EAGAIN ? Outcome::blocked : Outcome::closed;
      }
      advance(reply, static_cast<std::size_t>(sent));
      if (is_sent(reply)) connection.replies.pop_front();
      left -= std::min(left, static_cast<std::size_t>(sent));
    }
    return Outcome::fine;
  }

  Outcome send_encrypted(Connection& connection) {
    TlsStream& tls = *connection.tls;
    std::size_t left = turn_bytes;
    for (;;) {
      while (tls.unsent_bytes() > 0) {
        if (tls.flush() >= 0 || errno == EINTR) continue;
        return errno == EAGAIN ? Outcome::blocked : Outcome::closed;
      }
      if (connection.replies.empty() || left == 0) return Outcome::fine;
      if (!gather(connection) || !tls.encrypt(chunk_)) return Outcome::closed;
      left -= std::min(left, chunk_.size());
    }
  }

  // Copies what is to be encrypted next, of as many replies as there is room for. False: a shard was truncated
  // under the mapping. The client reads elsewhere.
  bool gather(Connection& connection) {
    chunk_.clear();
    chunk_.reserve(chunk_bytes);
    while (!connection.replies.empty() && chunk_.size() < chunk_bytes) {
      Reply& reply = connection.replies.front();
      const auto header = std::as_bytes(std::span(&reply.header, 1)).subspan(reply.header_sent);
      const auto source = !header.empty() ? header : reply.pieces[reply.next];
      const auto part = source.first(std::min(source.size(), chunk_bytes - chunk_.size()));
      const std::size_t have = chunk_.size();
      chunk_.resize(have + part.size());
      std::byte* const target = chunk_.data() + have;
      const FaultRange range(part);
      if (!completes(range, [&] { std::memcpy(target, part.data(), part.size()); })) return false;
      advance(reply, part.size());
      if (is_sent(reply)) connection.replies.pop_front();
    }
    return true;
  }

  static bool is_sent(const Reply& reply) {
    return reply.header_sent == sizeof reply.header && reply.next == reply.pieces.size();
  }

  static void advance(Reply& reply, std::size_t sent) {
    const std::size_t of_header = std::min(sent, sizeof reply.header - reply.header_sent);
    reply.header_sent += of_header;
    sent -= of_header;
    while (sent > 0) {
      auto& piece = reply.pieces[reply.next];
      const std::size_t of_piece = std::min(sent, piece.size());
      piece = piece.subspan(of_piece);
      sent -= of_piece;
      if (piece.empty()) ++reply.next;
    }
  }

  PeerServer& server_;
  int epoll_;
  int spare_;
  std::size_t max_strangers_;
  std::list<int> strangers_;  // connections that have not proved the token, the oldest first
  std::vector<std::byte> chunk_;  // what is encrypted next
  std::unordered_map<int, Connection> connections_;
};

PeerServer::PeerServer(const PeerServerOptions& options)
    : options_(options), card_(std::make_shared<const std::string>()) {
  if (options_.listener >= 0) {
    take_over(options_.listener, &port_);
    listener_ = options_.listener;
  } else {
    listener_ = listen_on(options_.host, options_.port, &port_);
  }
  try {
    wake_ = eventfd(0, EFD_CLOEXEC);
    if (wake_ < 0) fail("eventfd");
    for (unsigned i = 0; i < std::max(1U, options_.threads); ++i) {
      threads_.emplace_back([worker = std::make_unique<Worker>(*this)] { worker->run(); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

PeerServer::~PeerServer() { stop(); }

void PeerServer::stop() {
  if (listener_ < 0) return;
  const std::uint64_t one = 1;
  static_cast<void>(!write(wake_, &one, sizeof one));  // stays readable: for all workers
  for (auto& thread : threads_) thread.join();
  threads_.clear();
  close(listener_);
  if (wake_ >= 0) close(wake_);
  listener_ = wake_ = -1;
}

void PeerServer::set_card(std::string card) {
  if (card.size() > max_card_bytes) throw std::length_error("the card of a node is too long");
  auto made = std::make_shared<const std::string>(std::move(card));
  const std::lock_guard lock(mutex_);
  card_ = std::move(made);
}

void PeerServer::hold(std::uint32_t shard, const std::string& path) {
  auto made = std::make_shared<const HeldShard>(Mapping(path));
  const std::lock_guard lock(mutex_);
  held_[shard] = std::move(made);
}

void PeerServer::drop(std::uint32_t shard) {
  const std::lock_guard lock(mutex_);
  held_.erase(shard);
}

void PeerServer::note_missed(std::uint32_t shard) {
  const std::lock_guard lock(mutex_);
  if (missed_.size() < max_noted) missed_.insert(shard);
}

void PeerServer::note_damaged(std::uint32_t shard) {
  const std::lock_guard lock(mutex_);
  if (damaged_.size() < max_noted) damaged_.insert(shard);
}

void PeerServer::note_caller(std::string name) {
  const std::lock_guard lock(mutex_);
  if (callers_.size() < max_noted) callers_.insert(std::move(name));
}

std::vector<std::uint32_t> PeerServer::take_missed() {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> taken(missed_.begin(), missed_.end());
  missed_.clear();
  return taken;
}

std::vector<std::uint32_t> PeerServer::take_damaged() {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint32_t> taken(damaged_.begin(), damaged_.end());
  damaged_.clear();
  return taken;
}

std::vector<std::string> PeerServer::take_callers() {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> taken(callers_.begin(), callers_.end());
  callers_.clear();
  return taken;
}

std::shared_ptr<const PeerServer::HeldShard> PeerServer::find(std::uint32_t shard) const {
  const std::lock_guard lock(mutex_);
  const auto found = held_.find(shard);
  return found == held_.end() ? nullptr : found->second;
}

std::shared_ptr<const std::string> PeerServer::card() const {
  const std::lock_guard lock(mutex_);
  return card_;
}

PeerServerStats PeerServer::stats() const noexcept {
  return {connections_.load(), refused_.load(), reads_.load(), ranges_.load(), bytes_.load()};
}

}  // namespace paceline
