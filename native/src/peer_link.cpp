#include "paceline/peer_link.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <deque>
#include <memory>

#include "paceline/crc32c.hpp"
#include "paceline/peer_proof.hpp"

namespace paceline {
namespace {

using Kind = PeerError::Kind;

std::uint64_t now_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
         static_cast<std::uint64_t>(now.tv_nsec);
}

PeerError refused(std::uint32_t count) {
  switch (static_cast<Refusal>(count)) {
    case Refusal::wrong_token:
      return {Kind::token, "the node refused the token"};
    case Refusal::wrong_pack:
      return {Kind::pack, "the node serves another pack"};
    case Refusal::bad_range:
      return {Kind::protocol, "the node refused a range beyond the end of its shard"};
    case Refusal::full:
      return {Kind::lost, "the node has as many peers as it takes"};
    default:
      return {Kind::protocol, "the node refused a request for an unknown reason"};
  }
}

}  // namespace

struct PeerLink::Frame {
  std::uint64_t id;
  std::size_t first, end;
  std::uint64_t bytes;
};

PeerLink::~PeerLink() { disconnect(); }

void PeerLink::close() {
  const std::lock_guard lock(mutex_);
  disconnect();
}

void PeerLink::disconnect() {
  tls_.reset();
  const int fd = fd_.exchange(-1);
  if (fd >= 0) ::close(fd);
}

PeerError PeerLink::broken(PeerError error) {
  if (error.kind != Kind::none) disconnect();
  return error;
}

PeerError PeerLink::failed(const char* doing) {
  return {Kind::lost, std::string(doing) + ": " + std::strerror(errno)};
}

// False: the deadline has passed.
bool PeerLink::set_timeout(int option) {
  const std::uint64_t now = now_ns();
  if (now >= deadline_ns_) return false;
  const std::uint64_t left_us = std::max<std::uint64_t>((deadline_ns_ - now) / 1000, 1);
  timeval limit{};
  limit.tv_sec = static_cast<time_t>(left_us / 1'000'000);
  limit.tv_usec = static_cast<suseconds_t>(left_us % 1'000'000);
  return setsockopt(fd_, SOL_SOCKET, option, &limit, sizeof limit) == 0;
}

// A connect that a signal interrupted goes on by itself. False with errno.
bool PeerLink::finish_connecting() {
  for (;;) {
    const std::uint64_t now = now_ns();
    pollfd waited{.fd = fd_, .events = POLLOUT, .revents = 0};
    const std::uint64_t left_ms = now < deadline_ns_ ? (deadline_ns_ - now) / 1'000'000 + 1 : 0;
    const int ready = poll(&waited, 1, static_cast<int>(std::min<std::uint64_t>(left_ms, 60'000)));
    if (ready > 0) break;
    if (ready < 0 && errno != EINTR) return false;
    if (now_ns() >= deadline_ns_) {
      errno = ETIMEDOUT;
      return false;
    }
  }
  int problem = 0;
  socklen_t size = sizeof problem;
  if (getsockopt(fd_, SOL_SOCKET, SO_ERROR, &problem, &size) != 0) return false;
  errno = problem;
  return problem == 0;
}

PeerError PeerLink::send_all(const void* data, std::size_t size) {
  const auto* at = static_cast<const std::byte*>(data);
  if (tls_ != nullptr) {
    if (!tls_->encrypt({at, size})) return {Kind::lost, "TLS with it is broken"};
    size = tls_->unsent_bytes();
  }
  while (size > 0) {
    const ssize_t sent = tls_ == nullptr ? send(fd_, at, size, MSG_NOSIGNAL) : tls_->flush();
    if (sent < 0 && errno == EINTR) {
      if (interrupted_ != nullptr && (*interrupted_)()) return {Kind::interrupted, ""};
      continue;
    }
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (!set_timeout(SO_SNDTIMEO)) return {Kind::deadline, "it took no request in time"};
      continue;
    }
    if (sent < 0) return failed("sending to it");
    at += sent;
    size -= static_cast<std::size_t>(sent);
    // Less than all: the time was over, or a signal came.
    if (size > 0 && !set_timeout(SO_SNDTIMEO)) return {Kind::deadline, "it took no request in time"};
  }
  return {};
}

// After a signal, or when the kernel's wait was over.
PeerError PeerLink::wait_again() {
  if (interrupted_ != nullptr && (*interrupted_)()) return {Kind::interrupted, ""};
  if (!set_timeout(SO_RCVTIMEO)) return {Kind::deadline, "it did not answer in time"};
  return {};
}

PeerError PeerLink::receive(std::byte* target, std::size_t size) {
  while (size > 0) {
    // The kernel returns when all is there, a signal came, or the time is over: no wait in between.
    const ssize_t got =
        tls_ == nullptr ? recv(fd_, target, size, MSG_WAITALL) : tls_->receive(target, size);
    if (got == 0) return {Kind::lost, "it closed the connection"};
    if (got < 0 && errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK) {
      return failed("receiving from it");
    }
    if (got > 0) {
      target += got;
      size -= static_cast<std::size_t>(got);
      if (size == 0) break;
      if (tls_ != nullptr) continue;  // a record of TLS: at most 16 KiB
    }
    auto error = wait_again();
    if (error.kind != Kind::none) return error;
  }
  return {};
}

PeerError PeerLink::begin_tls(std::shared_ptr<const TlsContext> context) {
  auto tls = std::make_unique<TlsStream>(std::move(context), TlsStream::Side::client, fd_);
  for (;;) {
    const auto state = tls->shake_hands();
    if (state == TlsStream::Handshake::failed) {
      return {Kind::tls, "it has another token, or it does not speak TLS"};
    }
    while (tls->unsent_bytes() > 0) {
      if (tls->flush() < 0 && errno != EINTR) return failed("sending to it");  // a few hundred bytes
    }
    if (state == TlsStream::Handshake::done) break;
    const ssize_t got = tls->fill();
    if (got > 0) continue;
    if (got == 0 || errno == ECONNRESET) {
      return {Kind::lost, "it closed the connection in the handshake, as one without TLS does"};
    }
    if (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK) return failed("receiving from it");
    auto error = wait_again();
    if (error.kind != Kind::none) return error;
  }
  tls_ = std::move(tls);
  return {};
}

PeerError PeerLink::receive_header(FrameHeader& header, std::uint64_t id) {
  auto error = receive(reinterpret_cast<std::byte*>(&header), sizeof header);
  if (error.kind != Kind::none) return error;
  if (header.magic != peer_magic) return {Kind::protocol, "what answers is no Paceline node"};
  if (header.version != peer_version) {
    return {Kind::protocol, "it speaks version " + std::to_string(header.version) +
                                " of the protocol, this client " + std::to_string(peer_version)};
  }
  if (header.id != id) return {Kind::protocol, "it answered another request"};
  return {};
}

PeerError PeerLink::receive_body_of(FrameKind kind, std::uint64_t id, std::uint64_t most_bytes,
                                    std::string& body) {
  FrameHeader header;
  auto error = receive_header(header, id);
  if (error.kind != Kind::none) return error;
  if (header.kind == FrameKind::refused) return refused(header.count);
  if (header.kind != kind || header.body_bytes > most_bytes) {
    return {Kind::protocol, "it answered with another frame than the one that was due"};
  }
  body.resize(header.body_bytes);
  return receive(reinterpret_cast<std::byte*>(body.data()), body.size());
}

PeerError PeerLink::send_frame_of(const FrameHeader& header, std::span<const std::byte> body) {
  request_.resize(sizeof header + body.size());
  std::memcpy(request_.data(), &header, sizeof header);
  std::copy(body.begin(), body.end(), request_.begin() + sizeof header);
  return send_all(request_.data(), request_.size());
}

PeerError PeerLink::connect(const std::string& host, std::uint16_t port, const Digest& token,
                            const Digest& pack, std::uint64_t wait_ns, std::string& card,
                            std::shared_ptr<const TlsContext> tls) {
  const std::lock_guard lock(mutex_);
  disconnect();
  deadline_ns_ = now_ns() + wait_ns;
  interrupted_ = nullptr;
  auto error = reach(host, port);
  if (error.kind == Kind::none && tls != nullptr) error = begin_tls(std::move(tls));
  if (error.kind == Kind::none) error = introduce(token, pack, card);
  return broken(std::move(error));
}

PeerError PeerLink::reach(const std::string& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int unknown = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (unknown != 0) return {Kind::lost, gai_strerror(unknown)};
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> places(found, freeaddrinfo);
  PeerError last{Kind::lost, "it has no address"};
  for (const addrinfo* place = found; place != nullptr && fd_ < 0; place = place->ai_next) {
    fd_ = socket(place->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd_ < 0) return failed("socket");
    const int one = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    // The kernel bounds connect by the time to send.
    if (!set_timeout(SO_SNDTIMEO)) return {Kind::deadline, "it did not answer in time"};
    const bool is_connected = ::connect(fd_, place->ai_addr, place->ai_addrlen) == 0 ||
                              (errno == EINTR && finish_connecting());
    if (!is_connected) {
      last = errno == EINPROGRESS || errno == ETIMEDOUT
                 ? PeerError{Kind::deadline, "it did not answer in time"}
                 : failed("connecting to it");
      disconnect();
    }
  }
  if (fd_ < 0) return last;
  if (!set_timeout(SO_RCVTIMEO)) return {Kind::deadline, "it did not answer in time"};
  return {};
}

// What the node says is believed only when it has proved the token, too.
PeerError PeerLink::introduce(const Digest& token, const Digest& pack, std::string& card) {
  Nonces nonces{.client = random_nonce(), .node = {}};
  std::string body;
  auto error = send_frame_of(
      {.kind = FrameKind::hello, .id = next_id_, .body_bytes = hello_bytes}, nonces.client);
  if (error.kind == Kind::none) {
    error = receive_body_of(FrameKind::challenge, next_id_++, digest_bytes, body);
  }
  if (error.kind == Kind::lost && tls_ == nullptr) error.why += ", as one with TLS does to a client without";
  if (error.kind != Kind::none) return error;
  if (body.size() != digest_bytes) return {Kind::protocol, "its challenge has another length"};
  std::memcpy(nonces.node.data(), body.data(), body.size());
  std::array<std::byte, proof_bytes> own;
  const Digest proof = proof_of(Prover::client, token, nonces, pack);
  std::copy(pack.begin(), pack.end(), std::copy(proof.begin(), proof.end(), own.begin()));
  error = send_frame_of({.kind = FrameKind::proof, .id = next_id_, .body_bytes = proof_bytes}, own);
  if (error.kind == Kind::none) {
    error = receive_body_of(FrameKind::welcome, next_id_++, digest_bytes + max_card_bytes, body);
  }
  if (error.kind != Kind::none) return error;
  const Digest right = proof_of(Prover::node, token, nonces, pack);
  const auto theirs = std::as_bytes(std::span(body)).first(std::min(body.size(), digest_bytes));
  if (!equal_in_constant_time(theirs, right)) {
    return {Kind::token, "the node did not prove that it has the token"};
  }
  card = body.substr(digest_bytes);
  return {};
}

PeerError PeerLink::ask_card(std::uint64_t wait_ns, const std::string& caller, std::int64_t damaged,
                             std::string& card) {
  const std::lock_guard lock(mutex_);
  if (fd_ < 0) return {Kind::lost, "the connection is closed"};
  deadline_ns_ = now_ns() + wait_ns;
  interrupted_ = nullptr;
  if (!set_timeout(SO_SNDTIMEO) || !set_timeout(SO_RCVTIMEO)) {
    return broken({Kind::deadline, "no time was given"});
  }
  if (caller.size() > max_caller_bytes) return {Kind::protocol, "the name of this node is too long"};
  const FrameHeader header{.kind = FrameKind::card,
                           .id = next_id_,
                           .shard = damaged < 0 ? 0 : static_cast<std::uint32_t>(damaged),
                           .count = damaged < 0 ? 0U : 1U,
                           .body_bytes = caller.size()};
  auto error = send_frame_of(header, std::as_bytes(std::span(caller)));
  if (error.kind == Kind::none) {
    error = receive_body_of(FrameKind::welcome, next_id_++, max_card_bytes, card);
  }
  return broken(std::move(error));
}

PeerError PeerLink::send_frame(std::span<const WantedRange> wanted, const Frame& frame) {
  const std::size_t count = frame.end - frame.first;
  const FrameHeader header{.kind = FrameKind::read,
                           .id = frame.id,
                           .shard = wanted[frame.first].shard,
                           .count = static_cast<std::uint32_t>(count),
                           .body_bytes = count * sizeof(ByteRange)};
  request_.resize(sizeof header + header.body_bytes);
  std::memcpy(request_.data(), &header, sizeof header);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(request_.data() + sizeof header + i * sizeof(ByteRange),
                &wanted[frame.first + i].range, sizeof(ByteRange));
  }
  return send_all(request_.data(), request_.size());
}

PeerError PeerLink::receive_frame(std::span<const WantedRange> wanted,
                                  std::span<RangeOutcome> outcomes, const Frame& frame) {
  FrameHeader header;
  auto error = receive_header(header, frame.id);
  if (error.kind != Kind::none) return error;
  if (header.kind == FrameKind::refused) {
    if (header.count != static_cast<std::uint32_t>(Refusal::not_held)) return refused(header.count);
    std::fill(outcomes.begin() + static_cast<std::ptrdiff_t>(frame.first),
              outcomes.begin() + static_cast<std::ptrdiff_t>(frame.end), RangeOutcome::not_held);
    return {};
  }
  if (header.kind != FrameKind::data || header.body_bytes != frame.bytes) {
    return {Kind::protocol, "it answered with other bytes than were asked for"};
  }
  for (std::size_t i = frame.first; i < frame.end; ++i) {
    const WantedRange& one = wanted[i];
    error = receive(one.target, one.range.length);
    if (error.kind != Kind::none) return error;
    const bool is_good = !one.is_checked || crc32c(one.target, one.range.length) == one.checksum;
    outcomes[i] = is_good ? RangeOutcome::good : RangeOutcome::damaged;
  }
  return {};
}

PeerError PeerLink::fetch(std::span<const WantedRange> wanted, std::span<RangeOutcome> outcomes,
                          std::uint64_t wait_ns, const Interrupted& interrupted) {
  const std::lock_guard lock(mutex_);
  std::fill(outcomes.begin(), outcomes.end(), RangeOutcome::missing);
  if (fd_ < 0) return {Kind::lost, "the connection is closed"};
  deadline_ns_ = now_ns() + wait_ns;
  interrupted_ = &interrupted;
  if (!set_timeout(SO_SNDTIMEO) || !set_timeout(SO_RCVTIMEO)) {
    return broken({Kind::deadline, "no time was given"});
  }
  std::deque<Frame> flying;
  std::size_t next = 0;
  while (next < wanted.size() || !flying.empty()) {
    while (next < wanted.size() && flying.size() < max_reads_in_flight) {
      Frame frame{.id = next_id_++, .first = next, .end = next, .bytes = 0};
      while (frame.end < wanted.size() && frame.end - frame.first < max_ranges &&
             wanted[frame.end].shard == wanted[frame.first].shard &&
             (frame.end == next || frame.bytes < read_bytes)) {
        frame.bytes += wanted[frame.end++].range.length;
      }
      next = frame.end;
      flying.push_back(frame);
      auto error = send_frame(wanted, frame);
      if (error.kind != Kind::none) return broken(std::move(error));
    }
    auto error = receive_frame(wanted, outcomes, flying.front());
    if (error.kind != Kind::none) return broken(std::move(error));
    if (now_ns() > deadline_ns_ && (next < wanted.size() || flying.size() > 1)) {
      return broken({Kind::deadline, "it did not send everything in time"});
    }
    flying.pop_front();
  }
  return {};
}

}  // namespace paceline
