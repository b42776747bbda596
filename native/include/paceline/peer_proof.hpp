// How a client and a node prove to each other that they have the same token (peer_frames.hpp), without sending it
// or anything that could be used again.
//
//     proof = HMAC-SHA-256(key: SHA-256 of the token,
//                          whose proof it is | the client's nonce | the node's nonce | the pack)
//
// Both nonces are new for each connection, so a proof that was overheard proves nothing later. It says
// nothing of the frames that follow: who can change what travels needs TLS against it (tls.hpp).
// Source: RFC 2104 (HMAC), FIPS 180-4 (SHA-256), ISO/IEC 9798-4 (mutual authentication, three passes).
#pragma once

#include <initializer_list>
#include <span>

#include "paceline/peer_frames.hpp"

namespace paceline {

Digest sha256(std::span<const std::byte> data) noexcept;
Digest hmac_sha256(std::span<const std::byte> key,
                   std::initializer_list<std::span<const std::byte>> parts) noexcept;

enum class Prover : std::uint8_t { client, node };

struct Nonces {
  Digest client, node;
};

// `token`: its digest. `pack`: the digest of the pack's identity.
Digest proof_of(Prover prover, const Digest& token, const Nonces& nonces,
                std::span<const std::byte> pack) noexcept;

// From the kernel's generator. Throws std::system_error: it has none.
Digest random_nonce();

// Takes the same time wherever they differ.
bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) noexcept;

}  // namespace paceline
