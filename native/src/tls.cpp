#include "paceline/tls.hpp"

#include <dlfcn.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string_view>

#include "paceline/fork.hpp"
#include "paceline/peer_proof.hpp"

namespace paceline {
namespace {

// What ssl.h calls these numbers. They are part of the library's binary interface since 1.1.1.
constexpr int error_want_read = 2, error_zero_return = 6;
constexpr int control_min_version = 123, control_mode = 33;
constexpr long tls_1_3 = 0x0304;
constexpr long mode_release_buffers = 0x10;
constexpr int verify_peer = 1;
constexpr std::uint64_t init_no_atexit = 0x00080000;
constexpr const char* identity = "paceline";

// At most so many bytes lie between a socket and the library.
constexpr std::size_t buffer_bytes = std::size_t{64} << 10;

using ClientKey = unsigned (*)(void* session, const char* hint, char* name, unsigned name_room,
                               unsigned char* key, unsigned key_room);
using ServerKey = unsigned (*)(void* session, const char* name, unsigned char* key, unsigned key_room);

// OpenSSL's C interface, by its names; the structures are opaque.
struct Library {
  int (*init)(std::uint64_t, const void*) = nullptr;
  const void* (*method)() = nullptr;
  void* (*context_new)(const void*) = nullptr;
  void (*context_free)(void*) = nullptr;
  long (*context_control)(void*, int, long, void*) = nullptr;
  int (*set_suites)(void*, const char*) = nullptr;
  int (*set_ticket_count)(void*, std::size_t) = nullptr;
  void (*set_verify)(void*, int, void*) = nullptr;
  void (*set_client_key)(void*, ClientKey) = nullptr;
  void (*set_server_key)(void*, ServerKey) = nullptr;
  void* (*session_new)(void*) = nullptr;
  void (*session_free)(void*) = nullptr;
  int (*set_data)(void*, int, void*) = nullptr;
  void* (*get_data)(const void*, int) = nullptr;
  void (*set_bio)(void*, void*, void*) = nullptr;
  void (*set_client)(void*) = nullptr;
  void (*set_server)(void*) = nullptr;
  int (*handshake)(void*) = nullptr;
  int (*read)(void*, void*, int) = nullptr;
  int (*write)(void*, const void*, int) = nullptr;
  int (*error_of)(const void*, int) = nullptr;
  int (*pending)(const void*) = nullptr;
  const void* (*memory_bio)() = nullptr;
  void* (*bio_new)(const void*) = nullptr;
  int (*bio_read)(void*, void*, int) = nullptr;
  int (*bio_write)(void*, const void*, int) = nullptr;
  std::size_t (*bio_pending)(void*) = nullptr;
  void (*clear_errors)() = nullptr;
  std::string missing;

  Library() {
    void* handle = nullptr;
    for (const char* name : {"libssl.so.3", "libssl.so.1.1"}) {
      handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);  // never closed; it brings libcrypto
      if (handle != nullptr) break;
    }
    if (handle == nullptr) {
      missing = "neither libssl.so.3 nor libssl.so.1.1 is installed";
      return;
    }
    find(handle, "OPENSSL_init_ssl", init);
    find(handle, "TLS_method", method);
    find(handle, "SSL_CTX_new", context_new);
    find(handle, "SSL_CTX_free", context_free);
    find(handle, "SSL_CTX_ctrl", context_control);
    find(handle, "SSL_CTX_set_ciphersuites", set_suites);  // from here on not before 1.1.1
    find(handle, "SSL_CTX_set_num_tickets", set_ticket_count);
    find(handle, "SSL_set_verify", set_verify);
    find(handle, "SSL_CTX_set_psk_client_callback", set_client_key);
    find(handle, "SSL_CTX_set_psk_server_callback", set_server_key);
    find(handle, "SSL_new", session_new);
    find(handle, "SSL_free", session_free);
    find(handle, "SSL_set_ex_data", set_data);
    find(handle, "SSL_get_ex_data", get_data);
    find(handle, "SSL_set_bio", set_bio);
    find(handle, "SSL_set_connect_state", set_client);
    find(handle, "SSL_set_accept_state", set_server);
    find(handle, "SSL_do_handshake", handshake);
    find(handle, "SSL_read", read);
    find(handle, "SSL_write", write);
    find(handle, "SSL_get_error", error_of);
    find(handle, "SSL_has_pending", pending);
    find(handle, "BIO_s_mem", memory_bio);
    find(handle, "BIO_new", bio_new);
    find(handle, "BIO_read", bio_read);
    find(handle, "BIO_write", bio_write);
    find(handle, "BIO_ctrl_pending", bio_pending);
    find(handle, "ERR_clear_error", clear_errors);
    // Its clean-up at exit would take it away from threads that still serve.
    if (missing.empty() && init(init_no_atexit, nullptr) != 1) missing = "OpenSSL cannot be initialised";
  }

  template <class Function>
  void find(void* handle, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (function == nullptr && missing.empty()) missing = std::string("the system's OpenSSL has no ") + name;
  }
};

const Library& library() { return made_once<Library>(); }

unsigned copy_key(void* session, unsigned char* key, unsigned room) {
  const auto* stored = static_cast<const Digest*>(library().get_data(session, 0));
  if (stored == nullptr || room < stored->size()) return 0;
  std::memcpy(key, stored->data(), stored->size());
  return static_cast<unsigned>(stored->size());
}

unsigned give_client_key(void* session, const char*, char* name, unsigned name_room,
                         unsigned char* key, unsigned key_room) {
  if (name_room <= std::strlen(identity)) return 0;
  std::strcpy(name, identity);
  return copy_key(session, key, key_room);
}

unsigned give_server_key(void* session, const char* name, unsigned char* key, unsigned key_room) {
  return std::strcmp(name, identity) == 0 ? copy_key(session, key, key_room) : 0;
}

Digest key_of(const Digest& token) {
  constexpr std::string_view purpose = "paceline tls";  // the proofs of peer_proof.hpp have another key
  return hmac_sha256(token, {std::as_bytes(std::span(purpose.data(), purpose.size()))});
}

}  // namespace

TlsContext::TlsContext(const Digest& token) : key_(key_of(token)) {
  const Library& ssl = library();
  if (!ssl.missing.empty()) throw std::runtime_error(ssl.missing);
  context_ = ssl.context_new(ssl.method());
  if (context_ == nullptr) throw std::bad_alloc();
  ssl.set_client_key(context_, give_client_key);
  ssl.set_server_key(context_, give_server_key);
  ssl.context_control(context_, control_mode, mode_release_buffers, nullptr);
  // A key without a stated hash goes with SHA-256, and so with these suites.
  if (ssl.context_control(context_, control_min_version, tls_1_3, nullptr) != 1 ||
      ssl.set_suites(context_, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") != 1 ||
      ssl.set_ticket_count(context_, 0) != 1) {
    ssl.context_free(context_);
    throw std::runtime_error("the system's OpenSSL refuses TLS 1.3 with AES-128-GCM");
  }
}

TlsContext::~TlsContext() { library().context_free(context_); }

TlsStream::TlsStream(std::shared_ptr<const TlsContext> context, Side side, int socket)
    : context_(std::move(context)), socket_(socket) {
  const Library& ssl = library();
  session_ = ssl.session_new(context_->context_);
  incoming_ = ssl.bio_new(ssl.memory_bio());
  outgoing_ = ssl.bio_new(ssl.memory_bio());
  if (session_ == nullptr || incoming_ == nullptr || outgoing_ == nullptr) throw std::bad_alloc();
  ssl.set_bio(session_, incoming_, outgoing_);
  ssl.set_data(session_, 0, const_cast<Digest*>(&context_->key_));
  if (side == Side::server) {
    ssl.set_server(session_);  // without a certificate: only a client with the key gets through
    return;
  }
  ssl.set_client(session_);
  // It trusts no authority: of a node that shows a certificate in place of the key, verification fails.
  ssl.set_verify(session_, verify_peer, nullptr);
}

TlsStream::~TlsStream() { library().session_free(session_); }

TlsStream::Handshake TlsStream::shake_hands() {
  const Library& ssl = library();
  ssl.clear_errors();  // left in this thread by other calls: error_of would see them
  const int result = ssl.handshake(session_);
  if (result == 1) return Handshake::done;
  if (ssl.error_of(session_, result) == error_want_read) return Handshake::waits;
  has_failed_ = true;
  if (unsent_bytes() > 0) flush();  // an alert, which says why
  return Handshake::failed;
}

bool TlsStream::encrypt(std::span<const std::byte> data) {
  const Library& ssl = library();
  while (!data.empty()) {
    const auto part = static_cast<int>(std::min<std::size_t>(data.size(), INT_MAX));
    ssl.clear_errors();
    const int taken = ssl.write(session_, data.data(), part);
    if (taken <= 0) {
      has_failed_ = true;
      return false;
    }
    data = data.subspan(static_cast<std::size_t>(taken));
  }
  return true;
}

std::size_t TlsStream::unsent_bytes() {
  return sending_.size() - sent_ + library().bio_pending(outgoing_);
}

ssize_t TlsStream::flush() {
  const Library& ssl = library();
  if (sent_ == sending_.size()) {
    sending_.resize(std::min(ssl.bio_pending(outgoing_), 2 * buffer_bytes));
    sent_ = 0;
    if (sending_.empty()) return 0;
    ssl.bio_read(outgoing_, sending_.data(), static_cast<int>(sending_.size()));
  }
  const ssize_t sent = send(socket_, sending_.data() + sent_, sending_.size() - sent_, MSG_NOSIGNAL);
  if (sent > 0) sent_ += static_cast<std::size_t>(sent);
  return sent;
}

ssize_t TlsStream::fill() {
  std::byte buffer[buffer_bytes];
  const ssize_t got = recv(socket_, buffer, sizeof buffer, 0);
  if (got > 0 && library().bio_write(incoming_, buffer, static_cast<int>(got)) != got) {
    errno = ENOMEM;
    return -1;
  }
  return got;
}

ssize_t TlsStream::receive(std::byte* target, std::size_t room) {
  const Library& ssl = library();
  for (;;) {
    ssl.clear_errors();
    const int got = ssl.read(session_, target, static_cast<int>(std::min<std::size_t>(room, INT_MAX)));
    if (got > 0) return got;
    const int error = ssl.error_of(session_, got);
    if (error == error_zero_return) return 0;
    if (error != error_want_read) {
      has_failed_ = true;
      if (unsent_bytes() > 0) flush();  // an alert, which says why
      errno = EPROTO;
      return -1;
    }
    // A server's part of the handshake. If the socket takes less, who sends next sends the rest.
    if (unsent_bytes() > 0 && flush() < 0 && errno != EAGAIN && errno != EINTR) return -1;
    const ssize_t filled = fill();
    if (filled <= 0) return filled;
  }
}

bool TlsStream::has_received() const {
  return library().pending(session_) != 0 || library().bio_pending(incoming_) > 0;
}

}  // namespace paceline
