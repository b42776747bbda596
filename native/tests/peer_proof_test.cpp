// SHA-256 and HMAC against published values, and proofs of a token.
#include <cstdio>
#include <string>
#include <string_view>

#include "check.hpp"
#include "paceline/peer_proof.hpp"

using namespace paceline;

namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string hex(const Digest& digest) {
  std::string text;
  for (const std::byte byte : digest) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", std::to_integer<unsigned>(byte));
    text += digits;
  }
  return text;
}

void test_sha256_of_fips_180() {
  CHECK(hex(sha256(bytes_of("abc"))) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex(sha256({})) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(hex(sha256(bytes_of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"))) ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(hex(sha256(bytes_of(std::string(1'000'000, 'a')))) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

void test_hmac_of_rfc_4231() {
  CHECK(hex(hmac_sha256(bytes_of("Jefe"), {bytes_of("what do ya want "), bytes_of("for nothing?")})) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hex(hmac_sha256(bytes_of(std::string(131, '\xaa')),
                        {bytes_of("Test Using Larger Than Block-Size Key - Hash Key First")})) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

void test_each_part_changes_a_proof() {
  const Digest a = random_nonce(), b = random_nonce(), token = random_nonce(), pack = random_nonce();
  CHECK(a != b && token != pack);
  const Digest right = proof_of(Prover::client, token, {a, b}, pack);
  CHECK(right == proof_of(Prover::client, token, {a, b}, pack));
  CHECK(right != proof_of(Prover::node, token, {a, b}, pack));  // none can be sent back to its sender
  CHECK(right != proof_of(Prover::client, a, {a, b}, pack));
  CHECK(right != proof_of(Prover::client, token, {b, a}, pack));
  CHECK(right != proof_of(Prover::client, token, {a, b}, a));
}

}  // namespace

int main() {
  test_sha256_of_fips_180();
  test_hmac_of_rfc_4231();
  test_each_part_changes_a_proof();
}
