// CRC-32C: the published vectors, and the hardware path equal to the portable one.
#include "paceline/crc32c.hpp"

#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

using paceline::crc32c;
using paceline::crc32c_portable;

namespace {

// Source: RFC 3720, appendix B.4; "123456789" is the check value of the Rocksoft catalogue.
void known_vectors() {
  const std::string digits = "123456789";
  const std::string zeros(32, '\0');
  const std::string ones(32, '\xff');
  std::string rising(32, '\0');
  std::string falling(32, '\0');
  for (int i = 0; i < 32; ++i) {
    rising[static_cast<std::size_t>(i)] = static_cast<char>(i);
    falling[static_cast<std::size_t>(i)] = static_cast<char>(31 - i);
  }
  for (const auto function : {crc32c, crc32c_portable}) {
    CHECK(function(nullptr, 0, 0) == 0);
    CHECK(function(digits.data(), digits.size(), 0) == 0xE3069283U);
    CHECK(function(zeros.data(), zeros.size(), 0) == 0x8A9136AAU);
    CHECK(function(ones.data(), ones.size(), 0) == 0x62A8AB43U);
    CHECK(function(rising.data(), rising.size(), 0) == 0x46DD794EU);
    CHECK(function(falling.data(), falling.size(), 0) == 0x113FDB5CU);
  }
}

void hardware_equals_portable() {
  std::mt19937 random(20240607);
  std::vector<unsigned char> data(40'000);
  for (auto& byte : data) byte = static_cast<unsigned char>(random());
  std::vector<std::size_t> sizes;
  for (std::size_t size = 0; size < 80; ++size) sizes.push_back(size);
  // Around the borders of three lanes of 128 and of 1,024 bytes.
  for (const std::size_t border : {128U, 256U, 384U, 768U, 1024U, 2048U, 3072U, 3456U, 6144U, 9216U, 30'720U}) {
    for (std::size_t near = border - 9; near <= border + 9; ++near) sizes.push_back(near);
  }
  for (const std::size_t size : sizes) {
    for (std::size_t start = 0; start < 16; ++start) {
      const auto seed = static_cast<std::uint32_t>(random());
      CHECK(crc32c(data.data() + start, size, seed) ==
            crc32c_portable(data.data() + start, size, seed));
    }
  }
}

void pieces_equal_the_whole() {
  std::mt19937 random(7);
  std::vector<unsigned char> data(10'000);
  for (auto& byte : data) byte = static_cast<unsigned char>(random());
  const std::uint32_t whole = crc32c(data.data(), data.size());
  for (int round = 0; round < 200; ++round) {
    const std::size_t cut = random() % (data.size() + 1);
    const std::uint32_t head = crc32c(data.data(), cut);
    CHECK(crc32c(data.data() + cut, data.size() - cut, head) == whole);
  }
}

void threads_agree() {  // the tables are made at the first call
  const std::string text(5000, 'x');
  const std::uint32_t expected = crc32c_portable(text.data(), text.size());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] { CHECK(crc32c(text.data(), text.size()) == expected); });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main() {
  threads_agree();
  known_vectors();
  hardware_equals_portable();
  pieces_equal_the_whole();
}
