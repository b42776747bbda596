// The frames between a node that serves shards of a pack and a client. All numbers are little-endian.
//
//     header (32 bytes)   magic "PCLN" | version | kind | id | shard | count | body_bytes
//
//     client                server
//     hello  ----------->             body: a nonce
//            <----------- challenge   body: a nonce
//     proof  ----------->             body: proof of the token (peer_proof.hpp), SHA-256 of the pack's identity
//            <----------- welcome     body: the node's own proof, then its card (JSON), at most max_card_bytes
//     read   ----------->             body: `count` Ranges, all of `shard`, at most max_ranges
//            <----------- data        body: the bytes of these ranges, end to end
//            <----------- refused     count: Refusal; body: nothing. Of not_held the connection lives on.
//     card   ----------->             body: the name of the node that asks, or nothing; count: 1 if it got damaged
//                                     bytes of `shard`, else 0
//            <----------- welcome     body: the card
//
// Replies come in the order of the requests. Whatever else arrives closes the connection. With TLS
// (tls.hpp), all of it is encrypted.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace paceline {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint32_t peer_magic = 0x4e4c4350;  // "PCLN"
constexpr std::uint16_t peer_version = 3;

enum class FrameKind : std::uint16_t { hello = 1, welcome, read, data, refused, card, challenge, proof };
enum class Refusal : std::uint32_t { not_held = 1, bad_range, wrong_token, wrong_pack, full };

struct FrameHeader {
  std::uint32_t magic = peer_magic;
  std::uint16_t version = peer_version;
  FrameKind kind{};
  std::uint64_t id = 0;
  std::uint32_t shard = 0;
  std::uint32_t count = 0;
  std::uint64_t body_bytes = 0;
};
static_assert(sizeof(FrameHeader) == 32);

struct ByteRange {  // of a shard's file
  std::uint64_t offset;
  std::uint64_t length;
};
static_assert(sizeof(ByteRange) == 16);

constexpr std::size_t digest_bytes = 32;
using Digest = std::array<std::byte, digest_bytes>;
constexpr std::size_t hello_bytes = digest_bytes;
constexpr std::size_t proof_bytes = 2 * digest_bytes;
constexpr std::uint32_t max_ranges = 1024;
// After so many bytes a client begins another read. A longer range is a read of its own: the server
// sends it from the mapped file, so that its memory does not depend on it.
constexpr std::uint64_t read_bytes = std::uint64_t{64} << 20;
constexpr std::uint64_t max_card_bytes = std::uint64_t{1} << 20;
constexpr std::uint64_t max_caller_bytes = 256;  // of a node that asks
// Requests that a server takes from one connection before it has answered the first, and those that a
// client sends: fewer, so that a client which waits for room to send can't wait for itself.
constexpr std::size_t max_pending_reads = 16;
constexpr std::size_t max_reads_in_flight = 8;

}  // namespace paceline
