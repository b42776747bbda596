#include "paceline/peer_proof.hpp"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <system_error>

namespace paceline {
namespace {

constexpr std::size_t block_bytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// SHA-256 of what is added, part after part.
class Sha256 {
 public:
  void add(std::span<const std::byte> data) noexcept {
    total_bytes_ += data.size();
    while (!data.empty()) {
      const std::size_t taken = std::min(data.size(), block_bytes - filled_);
      std::memcpy(block_ + filled_, data.data(), taken);
      filled_ += taken;
      data = data.subspan(taken);
      if (filled_ == block_bytes) compress();
    }
  }

  Digest finish() noexcept {
    const std::uint64_t bits = total_bytes_ * 8;
    const std::byte one{0x80}, zero{};
    add({&one, 1});
    while (filled_ != block_bytes - 8) add({&zero, 1});
    std::byte length[8];
    for (unsigned i = 0; i < 8; ++i) length[i] = static_cast<std::byte>(bits >> (56 - 8 * i));
    add(length);
    Digest digest;
    for (unsigned i = 0; i < 32; ++i) {
      digest[i] = static_cast<std::byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
  }

 private:
  void compress() noexcept {
    std::uint32_t w[64];
    for (unsigned i = 0; i < 16; ++i) {
      w[i] = 0;
      for (unsigned k = 0; k < 4; ++k) w[i] = w[i] << 8 | std::to_integer<std::uint32_t>(block_[4 * i + k]);
    }
    for (unsigned i = 16; i < 64; ++i) {
      const std::uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
      const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    std::uint32_t a = state_[0], b = state_[1], c = state_[2], d = state_[3];
    std::uint32_t e = state_[4], f = state_[5], g = state_[6], h = state_[7];
    for (unsigned i = 0; i < 64; ++i) {
      const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + round_constants[i] + w[i];
      const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::uint32_t added[8] = {a, b, c, d, e, f, g, h};
    for (unsigned i = 0; i < 8; ++i) state_[i] += added[i];
    filled_ = 0;
  }

  std::uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                             0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::byte block_[block_bytes];
  std::size_t filled_ = 0;
  std::uint64_t total_bytes_ = 0;
};

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace

Digest sha256(std::span<const std::byte> data) noexcept {
  Sha256 hash;
  hash.add(data);
  return hash.finish();
}

Digest hmac_sha256(std::span<const std::byte> key,
                   std::initializer_list<std::span<const std::byte>> parts) noexcept {
  const Digest shortened = key.size() > block_bytes ? sha256(key) : Digest{};
  if (key.size() > block_bytes) key = shortened;
  std::byte inner[block_bytes], outer[block_bytes];
  for (std::size_t i = 0; i < block_bytes; ++i) {
    const std::byte of_key = i < key.size() ? key[i] : std::byte{};
    inner[i] = of_key ^ std::byte{0x36};
    outer[i] = of_key ^ std::byte{0x5c};
  }
  Sha256 first, second;
  first.add(inner);
  for (const auto part : parts) first.add(part);
  second.add(outer);
  second.add(first.finish());
  return second.finish();
}

Digest proof_of(Prover prover, const Digest& token, const Nonces& nonces,
                std::span<const std::byte> pack) noexcept {
  // Of one length: no part can be taken for another's.
  const auto who = bytes_of(prover == Prover::client ? "paceline client" : "paceline server");
  return hmac_sha256(token, {who, nonces.client, nonces.node, pack});
}

Digest random_nonce() {
  Digest nonce;
  std::size_t have = 0;
  while (have < nonce.size()) {
    const ssize_t got = getrandom(nonce.data() + have, nonce.size() - have, 0);
    if (got > 0) have += static_cast<std::size_t>(got);
    if (got < 0 && errno != EINTR) throw std::system_error(errno, std::generic_category(), "getrandom");
  }
  return nonce;
}

bool equal_in_constant_time(std::span<const std::byte> a, std::span<const std::byte> b) noexcept {
  if (a.size() != b.size()) return false;
  volatile unsigned char differs = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    differs = static_cast<unsigned char>(differs | std::to_integer<unsigned char>(a[i] ^ b[i]));
  }
  return differs == 0;
}

}  // namespace paceline
