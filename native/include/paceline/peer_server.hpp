// Serves byte ranges of the shards that a node holds to other nodes, over TCP (peer_frames.hpp).
//
// Each worker thread waits in epoll for its own connections and never spins. A reply is written from
// the mapped shard with writev: the kernel copies once. Memory per connection is bounded by
// max_pending_reads requests of max_ranges.
//
// Connections that have not proved the token are strangers: there is room for a few, the oldest of which
// makes way for a new one. So strangers shut out strangers only; peers have places of their own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "paceline/peer_frames.hpp"
#include "paceline/tls.hpp"

namespace paceline {

struct PeerServerOptions {
  std::string host = "127.0.0.1";  // a numeric address
  std::uint16_t port = 0;          // 0: any free one
  int listener = -1;               // or a socket that listens already; the server closes it
  Digest token{};                  // of the token; of "" where none is needed
  Digest pack{};                   // of the identity of the pack
  std::shared_ptr<const TlsContext> tls{};  // null: nothing is encrypted
  unsigned threads = 1;
  std::size_t max_connections = 16384;     // that have proved the token
  std::size_t max_strangers = 256;         // that have not, of all threads
  std::uint64_t hello_ns = 5'000'000'000;  // in which a connection must prove its token
};

struct PeerServerStats {
  std::uint64_t connections, refused_connections, reads, ranges, bytes;
};

// Thread-safe; not for a forked child.
class PeerServer {
 public:
  // Listens at once. Throws std::system_error: the address cannot be listened on.
  explicit PeerServer(const PeerServerOptions& options);
  ~PeerServer();  // ends all connections
  PeerServer(const PeerServer&) = delete;
  PeerServer& operator=(const PeerServer&) = delete;

  std::uint16_t port() const noexcept { return port_; }
  // What the welcome says. Throws std::length_error.
  void set_card(std::string card);
  // Serves this file as a shard from now on. Throws PackError: it cannot be mapped.
  void hold(std::uint32_t shard, const std::string& path);
  void drop(std::uint32_t shard);  // reads that were asked for are still answered
  // Shards that were asked for and are not held, shards that peers say they got damaged, and nodes that
  // asked for the card, since the last call; of each at most max_noted.
  std::vector<std::uint32_t> take_missed();
  std::vector<std::uint32_t> take_damaged();
  std::vector<std::string> take_callers();
  PeerServerStats stats() const noexcept;
  void stop();

  // For the workers.
  struct HeldShard;
  std::shared_ptr<const HeldShard> find(std::uint32_t shard) const;
  std::shared_ptr<const std::string> card() const;
  void note_missed(std::uint32_t shard);
  void note_damaged(std::uint32_t shard);
  void note_caller(std::string name);
  const PeerServerOptions& options() const noexcept { return options_; }

 private:
  class Worker;

  PeerServerOptions options_;
  int listener_ = -1;
  int wake_ = -1;  // an eventfd that ends the workers
  std::uint16_t port_ = 0;
  mutable std::mutex mutex_;  // of the five below
  std::unordered_map<std::uint32_t, std::shared_ptr<const HeldShard>> held_;
  std::shared_ptr<const std::string> card_;
  std::unordered_set<std::uint32_t> missed_, damaged_;
  std::unordered_set<std::string> callers_;
  std::atomic<std::uint64_t> connections_{0}, peers_{0}, refused_{0}, reads_{0}, ranges_{0}, bytes_{0};
  std::vector<std::thread> threads_;
};

}  // namespace paceline
