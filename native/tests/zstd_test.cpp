// Compresses and decodes again; whatever is decoded, nothing is written beyond the target.
#include "paceline/zstd.hpp"

#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"

using paceline::zstd_compress;
using paceline::zstd_decompress;

int main() {
  if (!paceline::zstd_available()) return 0;
  std::mt19937 random(7);
  for (const std::size_t size : {0U, 1U, 100U, 70000U}) {
    std::vector<std::byte> body(size);
    for (auto& one : body) one = static_cast<std::byte>(random() % 4);
    std::vector<std::byte> frame(paceline::zstd_bound(size));
    const std::size_t length = zstd_compress(body, frame, 3);
    CHECK(length > 0);
    frame.resize(length);
    std::vector<std::byte> again(size);
    std::string why;
    CHECK(zstd_decompress(frame, again, &why));
    CHECK(again == body);
    again.resize(size + 1);
    CHECK(!zstd_decompress(frame, again, &why) && !why.empty());
    if (size > 0) {
      again.resize(size - 1);
      CHECK(!zstd_decompress(frame, again));
      CHECK(zstd_compress(body, std::span(frame).first(0), 3) == 0);
    }
    again.resize(size);
    for (int round = 0; round < 2000; ++round) {
      auto damaged = frame;
      damaged[random() % damaged.size()] ^= static_cast<std::byte>(1U << (random() % 8));
      damaged.resize(random() % 2 == 0 ? damaged.size() : random() % damaged.size());
      zstd_decompress(damaged, again, &why);
    }
  }
  return 0;
}
