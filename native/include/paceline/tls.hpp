// TLS 1.3 between nodes and their clients, with a key that follows from the token (a pre-shared key,
// RFC 8446 section 4.2.11, with a Diffie-Hellman exchange: what was recorded stays secret when the token
// becomes known). Both sides prove by it that they have the token: there are no certificates to make, to
// hand out or to expire.
//
// The library is the system's OpenSSL, 1.1.1 or 3, found when the first context is made. It never
// touches the socket: what it has encrypted waits here for `flush`, and what came in is handed to it. So
// sockets keep their flags, and a connection that the other side has closed raises no SIGPIPE.
#pragma once

#include <sys/types.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "paceline/peer_frames.hpp"

namespace paceline {

// For both sides, and any number of connections. Thread-safe.
class TlsContext {
 public:
  // `token`: its digest. Throws std::runtime_error: the library is not installed, or cannot do this.
  explicit TlsContext(const Digest& token);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

 private:
  friend class TlsStream;
  Digest key_;
  void* context_ = nullptr;
};

// One connection, used by one thread at a time. The socket stays the caller's.
class TlsStream {
 public:
  enum class Side : std::uint8_t { client, server };
  enum class Handshake : std::uint8_t { done, waits, failed };

  // Throws std::bad_alloc.
  TlsStream(std::shared_ptr<const TlsContext> context, Side side, int socket);
  ~TlsStream();
  TlsStream(const TlsStream&) = delete;
  TlsStream& operator=(const TlsStream&) = delete;

  // A step of the handshake. `waits`: flush, fill, and step again. A server may leave it to `receive`.
  Handshake shake_hands();
  // Encrypts after the handshake. False: the connection is broken.
  bool encrypt(std::span<const std::byte> data);
  // Encrypted bytes that were not sent yet.
  std::size_t unsent_bytes();
  // Sends some of them; returns what send(2) does.
  ssize_t flush();
  // Takes bytes from the socket; returns what recv(2) does.
  ssize_t fill();
  // As recv(2), decrypted: EPROTO for what is no TLS or has another key.
  ssize_t receive(std::byte* target, std::size_t room);
  // Whether `receive` has something to work on without the socket.
  bool has_received() const;
  bool has_failed() const noexcept { return has_failed_; }

 private:
  std::shared_ptr<const TlsContext> context_;
  int socket_;
  void* session_ = nullptr;
  void* incoming_ = nullptr;  // BIOs in memory; the session owns them
  void* outgoing_ = nullptr;
  std::vector<std::byte> sending_;  // taken out of `outgoing_`
  std::size_t sent_ = 0;
  bool has_failed_ = false;
};

}  // namespace paceline
