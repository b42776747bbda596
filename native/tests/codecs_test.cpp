// Compresses and decodes again; whatever is decoded, nothing is written beyond the target.
#include "paceline/codecs.hpp"

#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "paceline/pack_writer.hpp"

using paceline::Codec;
using paceline::Encoding;
using paceline::ZstdDictionary;
using Bytes = std::vector<std::byte>;

namespace {

Bytes bytes_of(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

// Texts that are alike, and the dictionary of what they have in common.
std::vector<Bytes> texts(std::size_t count) {
  std::vector<Bytes> result;
  for (std::size_t k = 0; k < count; ++k) {
    const std::string number = std::to_string(k * 7919 % 10007);
    result.push_back(bytes_of("{\"name\": \"sample " + number + "\", \"class\": \"a common word\", " +
                              "\"size\": " + number + ", \"source\": \"where all of them are from\"}"));
  }
  return result;
}

Bytes dictionary() {
  Bytes all;
  std::vector<std::size_t> lengths;
  for (const Bytes& text : texts(2000)) {
    all.insert(all.end(), text.begin(), text.end());
    lengths.push_back(text.size());
  }
  return paceline::zstd_train(all, lengths, 4096);
}

void damage_is_found_or_harmless(Encoding encoding, const ZstdDictionary& known, const Bytes& frame,
                                 std::size_t size, std::mt19937& random) {
  Bytes guarded(size + 64);
  for (int round = 0; round < 200; ++round) {
    Bytes damaged = frame;
    for (int k = 0; k < 3; ++k) damaged[random() % damaged.size()] ^= std::byte{0x10};
    if (round % 4 == 0) damaged.resize(random() % damaged.size());
    std::fill(guarded.begin(), guarded.end(), std::byte{0xA5});
    std::string why;
    paceline::decode(encoding, known, damaged, std::span(guarded).first(size), &why);
    for (std::size_t k = size; k < guarded.size(); ++k) CHECK(guarded[k] == std::byte{0xA5});
  }
}

void codecs_return_what_they_got() {
  std::mt19937 random(7);
  const Bytes content = dictionary();
  CHECK(!content.empty());
  const ZstdDictionary known(content, 3);
  CHECK(known);
  for (const Codec codec : {Codec::zstd, Codec::lz4, Codec::zstd_dictionary}) {
    if (!paceline::codec_available(codec)) continue;
    for (const std::size_t size : {1U, 7U, 100U, 70001U}) {
      Bytes body(size);
      for (auto& byte : body) byte = static_cast<std::byte>(random() % 4);
      for (std::uint8_t bits = 0; bits <= paceline::max_element_bits; ++bits) {
        const Encoding encoding{codec, bits};
        CHECK(Encoding::of(encoding.code())->code() == encoding.code());
        Bytes shuffled(size);
        paceline::shuffle(body, shuffled, bits);
        Bytes frame(paceline::compress_bound(codec, size));
        const std::size_t length = paceline::compress(codec, 3, known, shuffled, frame);
        CHECK(length > 0);
        frame.resize(length);
        CHECK(size <= paceline::max_decoded_length(codec, length));
        Bytes again(size);
        std::string why;
        CHECK(paceline::decode(encoding, known, frame, again, &why) && again == body);
        again.resize(size + 1);
        CHECK(!paceline::decode(encoding, known, frame, again, &why) && !why.empty());
        if (size > 1) {
          again.resize(size - 1);
          CHECK(!paceline::decode(encoding, known, frame, again));
          CHECK(paceline::compress(codec, 3, known, body, std::span(frame).first(0)) == 0);
          damage_is_found_or_harmless(encoding, known, frame, size, random);
        }
      }
    }
    // The most that so few bytes can stand for.
    const Bytes same(paceline::max_encoded_length, std::byte{7});
    Bytes frame(paceline::compress_bound(codec, same.size()));
    const std::size_t length = paceline::compress(codec, 3, known, same, frame);
    CHECK(length > 0 && paceline::max_decoded_length(codec, length) == same.size());
  }
}

void only_known_codes_are_taken() {
  for (unsigned code = 0; code < 256; ++code) {
    const auto encoding = Encoding::of(static_cast<std::uint8_t>(code));
    const bool expected = code == 0 || (code < 64 && code % 16 >= 1 && code % 16 <= 3);
    CHECK(encoding.has_value() == expected);
    CHECK(!encoding || encoding->code() == code);
  }
}

// The planes of the elements, by the definition.
void shuffling_is_what_the_format_says() {
  std::mt19937 random(8);
  for (std::uint8_t bits = 0; bits <= paceline::max_element_bits; ++bits) {
    const std::size_t width = std::size_t{1} << bits;
    for (std::size_t size = 0; size < 100; ++size) {
      Bytes body(size), expected, shuffled(size), again(size);
      for (auto& byte : body) byte = static_cast<std::byte>(random());
      const std::size_t count = size / width;
      for (std::size_t byte = 0; byte < width; ++byte) {
        for (std::size_t k = 0; k < count; ++k) expected.push_back(body[k * width + byte]);
      }
      expected.insert(expected.end(), body.begin() + static_cast<std::ptrdiff_t>(count * width),
                      body.end());
      paceline::shuffle(body, shuffled, bits);
      CHECK(shuffled == expected);
      paceline::unshuffle(shuffled, again, bits);
      CHECK(again == body);
    }
  }
}

void small_alike_samples_gain_by_a_dictionary() {
  const Bytes content = dictionary();
  const ZstdDictionary known(content, 3);
  std::size_t plain = 0, with = 0;
  for (const Bytes& text : texts(50)) {
    Bytes frame(paceline::zstd_bound(text.size()));
    plain += paceline::zstd_compress(text, frame, 3);
    with += known.compress(text, frame);
  }
  CHECK(with > 0 && with * 3 < plain);
  CHECK(!ZstdDictionary());
  Bytes nothing(10);
  std::string why;
  CHECK(!ZstdDictionary().decompress(nothing, nothing, &why) && !why.empty());
  CHECK(paceline::zstd_train({}, {}, 4096).empty());
  CHECK(paceline::zstd_train(nothing, {10}, 4096).empty());
  Bytes damaged = content;  // with the number of a dictionary, and tables that are none
  for (std::size_t k = 8; k < 200; ++k) damaged[k] = std::byte{0xFF};
  CHECK(!ZstdDictionary(damaged));
}

void elements_of_arrays_are_found() {
  const auto header = [](const std::string& type) {
    return bytes_of("\x93NUMPY\x01" + std::string("\0v\0", 3) + "{'descr': '" + type +
                    "', 'fortran_order': False, 'shape': (3,), }");
  };
  const std::pair<const char*, int> types[] = {{"<f4", 2},  {"<f8", 3},  {">f2", 1}, {"<i8", 3},
                                               {"|u1", 0},  {"<c8", 2},  {"<c16", 3}, {"<f16", 0},
                                               {"|V2", 1},  {"<U4", 0},  {"|O", 0},  {"", 0},
                                               {"|S8", 0},  {"<c4", 0}};
  for (const auto& [type, bits] : types) CHECK(paceline::npy_element_bits(header(type)) == bits);
  const Bytes whole = header("<f4");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    CHECK(paceline::npy_element_bits(std::span(whole).first(size)) <= paceline::max_element_bits);
  }
  std::mt19937 random(9);
  for (int round = 0; round < 2000; ++round) {
    Bytes damaged = whole;
    for (int k = 0; k < 3; ++k) damaged[6 + random() % (whole.size() - 6)] = static_cast<std::byte>(random());
    CHECK(paceline::npy_element_bits(damaged) <= paceline::max_element_bits);
  }
  CHECK(paceline::npy_element_bits(bytes_of("'descr': '<f4'")) == 0);
}

}  // namespace

int main() {
  only_known_codes_are_taken();
  shuffling_is_what_the_format_says();
  elements_of_arrays_are_found();
  if (!paceline::zstd_available()) return 0;
  codecs_return_what_they_got();
  small_alike_samples_gain_by_a_dictionary();
  return 0;
}
