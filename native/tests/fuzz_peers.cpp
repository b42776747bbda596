// Sends a node frames that no client would send, and answers a client as no node would.
//
//   fuzz_peers SECONDS [SEED [CASE]]      at least `least_frames` frames, however long that takes
//
// A model of peer_frames.hpp says of each frame what a node has to do: answer, refuse or close. Nothing but a
// challenge or a refusal may come before a right proof of the token; bytes that come are those of the shard; memory does not depend on
// what a frame claims. A client may say anything of such answers but "good" of wrong bytes. A case is a pure
// function of (seed, number), so that a failure can be seen again.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/peer_link.hpp"
#include "paceline/peer_proof.hpp"
#include "paceline/peer_server.hpp"

using namespace paceline;
using Random = std::mt19937_64;

#if defined(__SANITIZE_ADDRESS__)
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() {
  // Larger than anything that a frame may make a node or a client ask for.
  return "max_allocation_size_mb=16:allocator_may_return_null=0:detect_leaks=1:quarantine_size_mb=4";
}
#endif

namespace {

constexpr unsigned long long least_frames = 5000;
constexpr std::uint64_t wait_ns = 20'000'000'000;
constexpr std::uint32_t held_shard = 7;
constexpr long most_growth_kb = 64 << 10;

unsigned long long running_seed = 0, running_case = 0, frames = 0, refusals = 0, answers = 0;

void name_case() {
  std::fprintf(stderr, "the case: fuzz_peers 1 %llu %llu\n", running_seed, running_case);
}

Digest digest(unsigned char fill) {
  Digest made;
  made.fill(std::byte{fill});
  return made;
}

std::string bytes_of_shard() {
  std::string bytes;
  for (std::size_t i = 0; i < 50'000; ++i) bytes += static_cast<char>(i * 13 % 241);
  return bytes;
}
const std::string shard_bytes = bytes_of_shard();

std::uint64_t pick(Random& random, std::initializer_list<std::uint64_t> values) {
  return *(values.begin() + random() % values.size());
}

std::uint64_t odd_number(Random& random, std::uint64_t right) {
  return pick(random, {0, 1, right - 1, right + 1, 2 * right, 1ULL << 31, 1ULL << 32, 1ULL << 63,
                       ~0ULL, random()});
}

// --- a hostile client ------------------------------------------------------------------------------------

struct Sent {
  FrameHeader header;
  std::vector<std::byte> body;
};

enum class Stage : std::uint8_t { silent, challenged, welcome };

struct Connection {
  int fd;
  Stage stage = Stage::silent;
  Nonces nonces{};
};

Sent hello() {
  Sent made{.header = {.kind = FrameKind::hello, .body_bytes = hello_bytes}, .body = {}};
  made.body.resize(hello_bytes, std::byte{42});
  return made;
}

Sent proof(const Connection& connection, unsigned char token, unsigned char pack) {
  Sent made{.header = {.kind = FrameKind::proof, .body_bytes = proof_bytes}, .body = {}};
  const Digest right = proof_of(Prover::client, digest(token), connection.nonces, digest(pack));
  made.body.assign(right.begin(), right.end());
  made.body.insert(made.body.end(), digest_bytes, std::byte{pack});
  return made;
}

ByteRange some_range(Random& random) {
  const std::uint64_t size = shard_bytes.size();
  const std::uint64_t offset = random() % (size + 1);
  ByteRange range{offset, random() % (size - offset + 1) % 300};
  if (random() % 40 == 0) range.offset = odd_number(random, size);
  if (random() % 40 == 0) range.length = odd_number(random, size - offset);
  return range;
}

Sent read_frame(Random& random) {
  const std::size_t count = random() % 30 == 0 ? max_ranges : 1 + random() % 8;
  Sent made{.header = {.kind = FrameKind::read,
                       .shard = random() % 8 == 0 ? static_cast<std::uint32_t>(random()) : held_shard,
                       .count = static_cast<std::uint32_t>(count),
                       .body_bytes = count * sizeof(ByteRange)},
            .body = std::vector<std::byte>(count * sizeof(ByteRange))};
  for (std::size_t i = 0; i < count; ++i) {
    const ByteRange range = some_range(random);
    std::memcpy(made.body.data() + i * sizeof range, &range, sizeof range);
  }
  return made;
}

void damage(FrameHeader& header, Random& random) {
  switch (random() % 6) {
    case 0:
      header.magic ^= 1U << random() % 32;
      break;
    case 1:
      header.version = static_cast<std::uint16_t>(odd_number(random, peer_version));
      break;
    case 2:
      header.kind = static_cast<FrameKind>(odd_number(random, 3));
      break;
    case 3:
      header.count = static_cast<std::uint32_t>(odd_number(random, header.count));
      break;
    case 4:
      header.body_bytes = odd_number(random, header.body_bytes);
      break;
    default:
      reinterpret_cast<unsigned char*>(&header)[random() % sizeof header] ^=
          static_cast<unsigned char>(1U << random() % 8);
  }
}

Sent some_frame(const Connection& connection, Random& random) {
  Sent made;
  switch (random() % 9) {
    case 0:
      made = proof(connection, static_cast<unsigned char>(1 + random() % 2),
                   static_cast<unsigned char>(1 + random() % 3));
      if (random() % 4 == 0) made.body[random() % made.body.size()] ^= std::byte{1};
      break;
    case 8:
      made = hello();
      break;
    case 1:
      made = {.header = {.kind = FrameKind::card}, .body = {}};
      made.header.shard = static_cast<std::uint32_t>(random() % 6);
      made.header.count = static_cast<std::uint32_t>(random() % 3);  // 1: it got damaged bytes
      made.header.body_bytes = random() % (2 * max_caller_bytes);  // the name of the node that asks
      break;
    case 2:  // more than a frame holds, and it says so
      made = read_frame(random);
      made.header.count = static_cast<std::uint32_t>(odd_number(random, max_ranges));
      made.header.body_bytes = made.header.count * std::uint64_t{sizeof(ByteRange)};
      break;
    default:
      made = read_frame(random);
  }
  made.header.id = random();
  if (random() % 4 == 0) damage(made.header, random);
  // What follows the header is as long as it says, within reason.
  made.body.resize(std::min<std::uint64_t>(made.header.body_bytes, 64 << 10));
  return made;
}

enum class Verdict : std::uint8_t { closes, challenges, welcomes, says_card, sends, refuses_and_stays, refuses_and_closes };

// What a node must do, by peer_frames.hpp.
Verdict verdict_on(const Sent& frame, const Connection& connection) {
  const FrameHeader& header = frame.header;
  if (header.magic != peer_magic || header.version != peer_version) return Verdict::closes;
  if (connection.stage == Stage::silent) {
    const bool is_hello = header.kind == FrameKind::hello && header.body_bytes == hello_bytes;
    return is_hello ? Verdict::challenges : Verdict::closes;
  }
  if (connection.stage == Stage::challenged) {
    if (header.kind != FrameKind::proof || header.body_bytes != proof_bytes) return Verdict::closes;
    return frame.body == proof(connection, 1, 2).body ? Verdict::welcomes : Verdict::refuses_and_closes;
  }
  if (header.kind == FrameKind::card) {
    const bool fits = header.count <= 1 && header.body_bytes <= max_caller_bytes;
    return fits ? Verdict::says_card : Verdict::closes;
  }
  if (header.kind != FrameKind::read || header.count == 0 || header.count > max_ranges ||
      header.body_bytes != header.count * sizeof(ByteRange)) {
    return Verdict::closes;
  }
  if (header.shard != held_shard) return Verdict::refuses_and_stays;
  for (std::size_t i = 0; i < header.count; ++i) {
    ByteRange range{};
    std::memcpy(&range, frame.body.data() + i * sizeof range, sizeof range);
    const std::uint64_t size = shard_bytes.size();
    if (range.offset > size || range.length > size - range.offset) return Verdict::refuses_and_closes;
  }
  return Verdict::sends;
}

std::string expected_body(const Connection& connection, const Sent& frame, Verdict verdict) {
  std::string bytes;
  if (verdict == Verdict::welcomes) {
    const Digest right = proof_of(Prover::node, digest(1), connection.nonces, digest(2));
    bytes.assign(reinterpret_cast<const char*>(right.data()), right.size());
  }
  if (verdict == Verdict::welcomes || verdict == Verdict::says_card) bytes += "the card";
  if (verdict != Verdict::sends) return bytes;
  for (std::size_t i = 0; i < frame.header.count; ++i) {
    ByteRange range{};
    std::memcpy(&range, frame.body.data() + i * sizeof range, sizeof range);
    bytes += shard_bytes.substr(range.offset, range.length);
  }
  return bytes;
}

FrameKind kind_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::challenges:
      return FrameKind::challenge;
    case Verdict::welcomes:
    case Verdict::says_card:
      return FrameKind::welcome;
    case Verdict::sends:
      return FrameKind::data;
    default:
      return FrameKind::refused;
  }
}

int dial(std::uint16_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_port = htons(port);
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(fd >= 0 && connect(fd, reinterpret_cast<sockaddr*>(&place), sizeof place) == 0);
  const int one = 1;  // pieces leave at once
  CHECK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
  const timeval limit{.tv_sec = wait_ns / 1'000'000'000, .tv_usec = 0};
  CHECK(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
  return fd;
}

// How many bytes came before the connection ended. Fails if nothing comes in time.
std::size_t receive(int fd, void* target, std::size_t size) {
  std::size_t have = 0;
  while (have < size) {
    const ssize_t got = recv(fd, static_cast<char*>(target) + have, size - have, 0);
    CHECK(got >= 0 || (errno != EAGAIN && "an answer, or the end, comes in time"));
    if (got <= 0) break;
    have += static_cast<std::size_t>(got);
  }
  return have;
}

// False: the connection has ended, as it had to.
bool check_answer(Connection& connection, const Sent& frame, Verdict verdict) {
  const int fd = connection.fd;
  FrameHeader header{};
  const std::size_t have = receive(fd, &header, sizeof header);
  if (verdict == Verdict::closes) {
    CHECK(have == 0);
    ++refusals;
    return false;
  }
  CHECK(have == sizeof header && header.magic == peer_magic && header.id == frame.header.id);
  CHECK(header.kind == kind_of(verdict));
  if (verdict == Verdict::challenges) {  // any nonce, but a new one
    const Digest last = connection.nonces.node;
    CHECK(header.body_bytes == digest_bytes);
    CHECK(receive(fd, connection.nonces.node.data(), digest_bytes) == digest_bytes);
    CHECK(connection.nonces.node != last);
    std::copy(frame.body.begin(), frame.body.end(), connection.nonces.client.begin());
    connection.stage = Stage::challenged;
    ++answers;
    return true;
  }
  const std::string expected = expected_body(connection, frame, verdict);
  CHECK(header.body_bytes == expected.size());
  std::string body(expected.size(), '\0');
  CHECK(receive(fd, body.data(), body.size()) == body.size() && body == expected);
  ++(header.kind == FrameKind::refused ? refusals : answers);
  if (verdict == Verdict::welcomes) connection.stage = Stage::welcome;
  if (verdict != Verdict::refuses_and_closes) return true;
  CHECK(receive(fd, &header, 1) == 0);
  return false;
}

void send_frame(int fd, const Sent& frame, Random& random) {
  std::vector<std::byte> bytes(sizeof frame.header + frame.body.size());
  std::memcpy(bytes.data(), &frame.header, sizeof frame.header);
  std::copy(frame.body.begin(), frame.body.end(), bytes.begin() + sizeof frame.header);
  for (std::size_t at = 0; at < bytes.size();) {  // in pieces that end anywhere
    const std::size_t size = random() % 3 == 0 ? 1 + random() % bytes.size() : bytes.size();
    const std::size_t piece = std::min(size, bytes.size() - at);
    if (send(fd, bytes.data() + at, piece, MSG_NOSIGNAL) < 0) return;  // it was refused by its header
    at += piece;
  }
}

// What a good client would send next, to be let in.
Sent next_step(const Connection& connection) {
  return connection.stage == Stage::silent ? hello() : proof(connection, 1, 2);
}

void attack_node(const PeerServer& server, Random& random) {
  Connection connection{.fd = dial(server.port())};
  for (std::size_t left = 2 + random() % 12; left > 0; --left) {
    const bool steps = connection.stage != Stage::welcome && random() % 8 != 0;
    const Sent frame = steps ? next_step(connection) : some_frame(connection, random);
    const Verdict verdict = verdict_on(frame, connection);
    ++frames;
    if (random() % 50 == 0) {  // the client dies in the middle of a frame
      const std::size_t part = random() % sizeof frame.header;
      CHECK(send(connection.fd, &frame.header, part, MSG_NOSIGNAL) == static_cast<ssize_t>(part));
      break;
    }
    send_frame(connection.fd, frame, random);
    if (!check_answer(connection, frame, verdict)) break;
  }
  close(connection.fd);
}

// Reads one after the other without waiting for an answer: more than a node takes at once.
void flood_node(const PeerServer& server, Random& random) {
  Connection connection{.fd = dial(server.port())};
  while (connection.stage != Stage::welcome) {
    const Sent frame = next_step(connection);
    send_frame(connection.fd, frame, random);
    CHECK(check_answer(connection, frame, verdict_on(frame, connection)));
    ++frames;
  }
  std::vector<Sent> sent;
  while (sent.size() < 3 * max_pending_reads) {
    Sent frame = read_frame(random);
    if (verdict_on(frame, connection) == Verdict::refuses_and_closes) continue;
    sent.push_back(std::move(frame));
  }
  std::thread writer([&] {
    Random pieces(1);
    for (const Sent& frame : sent) send_frame(connection.fd, frame, pieces);
  });
  frames += sent.size();
  for (const Sent& frame : sent) CHECK(check_answer(connection, frame, verdict_on(frame, connection)));
  writer.join();
  close(connection.fd);
}

// --- a hostile node --------------------------------------------------------------------------------------

// Answers one connection: the right way, but for one place.
void answer_wrongly(int listener, Random random) {
  const int fd = accept(listener, nullptr, nullptr);
  CHECK(fd >= 0);
  const std::size_t wrong_frame = random() % 5;
  Nonces nonces{};
  for (std::size_t i = 0; i < 9; ++i) {
    FrameHeader asked{};
    if (receive(fd, &asked, sizeof asked) < sizeof asked) break;
    std::vector<ByteRange> ranges(asked.body_bytes / sizeof(ByteRange));
    if (receive(fd, ranges.data(), asked.body_bytes) < asked.body_bytes) break;
    const bool is_read = asked.kind == FrameKind::read;
    const bool is_hello = asked.kind == FrameKind::hello;
    std::string body = is_read ? "" : "the card";
    if (is_hello) {
      std::memcpy(nonces.client.data(), ranges.data(), digest_bytes);
      body = std::string(digest_bytes, '\0');
    } else if (asked.kind == FrameKind::proof) {
      const Digest right = proof_of(Prover::node, digest(1), nonces, digest(2));
      body.insert(0, reinterpret_cast<const char*>(right.data()), right.size());
    }
    for (const ByteRange& range : ranges) {
      if (is_read) body += shard_bytes.substr(range.offset, range.length);
    }
    FrameHeader header{.kind = is_read    ? FrameKind::data
                               : is_hello ? FrameKind::challenge
                                          : FrameKind::welcome,
                       .id = asked.id,
                       .shard = asked.shard,
                       .count = asked.count,
                       .body_bytes = body.size()};
    ++frames;
    if (i == wrong_frame) {
      switch (random() % 4) {
        case 0:
          if (!body.empty()) body[random() % body.size()] ^= 1;
          break;
        case 1:
          body.resize(random() % (body.size() + 1));
          break;
        case 2:
          header.kind = FrameKind::refused;
          header.count = static_cast<std::uint32_t>(random() % 6);
          body.clear();
          break;
        default:
          damage(header, random);
      }
    }
    if (send(fd, &header, sizeof header, MSG_NOSIGNAL) < 0) break;
    if (send(fd, body.data(), body.size(), MSG_NOSIGNAL) < 0) break;
    if (i == wrong_frame) break;
  }
  close(fd);
}

void use_wrong_node(int listener, std::uint16_t port, Random& random) {
  const Random of_node(random());
  std::thread node([&] { answer_wrongly(listener, of_node); });
  PeerLink link;
  std::string card;
  auto error = link.connect("127.0.0.1", port, digest(1), digest(2), wait_ns, card);
  while (error.kind == PeerError::Kind::none) {
    CHECK(card.size() <= max_card_bytes);
    std::vector<WantedRange> wanted;
    std::vector<std::vector<std::byte>> targets(3 + random() % 20);
    for (auto& target : targets) {
      target.resize(1 + random() % 500);
      const ByteRange range{random() % (shard_bytes.size() - 500), target.size()};
      wanted.push_back({.shard = static_cast<std::uint32_t>(random() % 2),
                        .range = range,
                        .target = target.data(),
                        .checksum = crc32c(shard_bytes.data() + range.offset, range.length),
                        .is_checked = true});
    }
    std::vector<RangeOutcome> outcomes(wanted.size());
    error = link.fetch(wanted, outcomes, wait_ns, [] { return false; });
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (outcomes[i] != RangeOutcome::good) continue;
      CHECK(std::memcmp(targets[i].data(), shard_bytes.data() + wanted[i].range.offset,
                        targets[i].size()) == 0);
    }
  }
  CHECK(!link.is_open() && error.kind != PeerError::Kind::deadline);
  node.join();
}

// --- the cases -------------------------------------------------------------------------------------------

long peak_memory_kb() {
  rusage usage{};
  CHECK(getrusage(RUSAGE_SELF, &usage) == 0);
  return usage.ru_maxrss;
}

void check_good_client(const PeerServer& server) {
  PeerLink link;
  std::string card;
  CHECK(link.connect("127.0.0.1", server.port(), digest(1), digest(2), wait_ns, card).kind ==
        PeerError::Kind::none);
  std::vector<std::byte> target(1000);
  const WantedRange wanted{.shard = held_shard,
                           .range = {100, target.size()},
                           .target = target.data(),
                           .checksum = crc32c(shard_bytes.data() + 100, target.size()),
                           .is_checked = true};
  RangeOutcome outcome{};
  CHECK(link.fetch({&wanted, 1}, {&outcome, 1}, wait_ns, [] { return false; }).kind ==
            PeerError::Kind::none &&
        outcome == RangeOutcome::good);
}

int listen_here(std::uint16_t& port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof place;
  CHECK(fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&place), size) == 0 && listen(fd, 8) == 0);
  CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&place), &size) == 0);
  port = ntohs(place.sin_port);
  return fd;
}

}  // namespace

int main(int count, char** words) {
  const double seconds = count > 1 ? std::strtod(words[1], nullptr) : 1;
  running_seed = count > 2 ? std::strtoull(words[2], nullptr, 10) : 1;
  const bool is_single = count > 3;
  if (is_single) running_case = std::strtoull(words[3], nullptr, 10);
  std::signal(SIGABRT, [](int) { name_case(); });
  const TemporaryFolder folder;
  std::ofstream(folder / "shard", std::ios::binary) << shard_bytes;
  PeerServer server({.token = digest(1), .pack = digest(2), .threads = 2, .hello_ns = wait_ns});
  server.set_card("the card");
  server.hold(held_shard, folder / "shard");
  std::uint16_t port = 0;
  const int listener = listen_here(port);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  long memory_kb = 0;
  for (;; ++running_case) {
    Random random(running_seed * 1'000'003 + running_case);
    switch (running_case % 8) {
      case 6:
        flood_node(server, random);
        break;
      case 7:
        use_wrong_node(listener, port, random);
        break;
      default:
        attack_node(server, random);
    }
    if (running_case % 100 == 0) check_good_client(server);
    if (running_case == 100) memory_kb = peak_memory_kb();  // threads and buffers are there by now
    if (memory_kb > 0) CHECK(peak_memory_kb() - memory_kb < most_growth_kb);
    if (is_single || (frames >= least_frames && std::chrono::steady_clock::now() >= end)) break;
  }
  close(listener);
  std::printf("%llu frames in %llu cases: %llu answered, %llu refused\n", frames, running_case + 1, answers,
              refusals);
  CHECK(is_single || (answers > 0 && refusals > 0));
}
