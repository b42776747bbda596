// A client's connection to a node that serves shards (peer_frames.hpp).
//
// Bytes are received straight into the caller's buffer, and each range is compared with its checksum
// while it is still in the processor's cache. The thread sleeps in the kernel while it waits.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "paceline/peer_frames.hpp"
#include "paceline/tls.hpp"

namespace paceline {

struct PeerError {
  enum class Kind : std::uint8_t { none, lost, deadline, token, pack, protocol, interrupted, tls };
  Kind kind = Kind::none;
  std::string why;
};

struct WantedRange {
  std::uint32_t shard;
  ByteRange range;
  std::byte* target;  // room for range.length bytes
  std::uint32_t checksum;
  bool is_checked;  // whether the bytes must have this checksum
};

enum class RangeOutcome : std::uint8_t { missing = 0, good = 1, damaged = 2, not_held = 3 };

// Thread-safe: one fetch at a time, others wait for it.
class PeerLink {
 public:
  // Called when a signal interrupted a wait; true ends the fetch.
  using Interrupted = std::function<bool()>;

  PeerLink() = default;
  ~PeerLink();
  PeerLink(const PeerLink&) = delete;
  PeerLink& operator=(const PeerLink&) = delete;

  // Connects; each side proves to the other that it has the token. `card` becomes what the node says of
  // itself. With `tls`, all is encrypted.
  PeerError connect(const std::string& host, std::uint16_t port, const Digest& token,
                    const Digest& pack, std::uint64_t wait_ns, std::string& card,
                    std::shared_ptr<const TlsContext> tls = nullptr);
  // Asks for the card again. `caller`: name of the node that asks; "" if it is none. `damaged`: a shard of
  // which the node sent damaged bytes; -1: none.
  PeerError ask_card(std::uint64_t wait_ns, const std::string& caller, std::int64_t damaged,
                     std::string& card);
  // Fetches ranges, neighbours of the same shard in one request. Says of each what became of it; after
  // an error, the connection is closed, and the ranges that are `missing` have no bytes of use.
  PeerError fetch(std::span<const WantedRange> wanted, std::span<RangeOutcome> outcomes,
                  std::uint64_t wait_ns, const Interrupted& interrupted);
  bool is_open() const noexcept { return fd_ >= 0; }
  void close();  // waits for a fetch that is under way

 private:
  struct Frame;  // ranges [first, end) of one request

  PeerError reach(const std::string& host, std::uint16_t port);
  PeerError begin_tls(std::shared_ptr<const TlsContext> context);
  PeerError introduce(const Digest& token, const Digest& pack, std::string& card);
  PeerError send_all(const void* data, std::size_t size);
  PeerError send_frame_of(const FrameHeader& header, std::span<const std::byte> body);
  PeerError receive(std::byte* target, std::size_t size);
  PeerError wait_again();
  PeerError receive_header(FrameHeader& header, std::uint64_t id);
  PeerError receive_body_of(FrameKind kind, std::uint64_t id, std::uint64_t most_bytes, std::string& body);
  PeerError receive_frame(std::span<const WantedRange> wanted, std::span<RangeOutcome> outcomes,
                          const Frame& frame);
  PeerError send_frame(std::span<const WantedRange> wanted, const Frame& frame);
  void disconnect();
  bool set_timeout(int option);
  bool finish_connecting();
  PeerError failed(const char* doing);
  PeerError broken(PeerError error);

  std::mutex mutex_;
  std::atomic<int> fd_{-1};  // changed by who has the mutex
  std::unique_ptr<TlsStream> tls_;
  std::uint64_t next_id_ = 1;
  std::uint64_t deadline_ns_ = 0;  // of what is under way, as is the next
  const Interrupted* interrupted_ = nullptr;
  std::vector<std::byte> request_;
};

}  // namespace paceline
