// Nodes that serve shards, and their clients: what is answered, what is refused, and the limits.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "check.hpp"
#include "paceline/crc32c.hpp"
#include "paceline/peer_link.hpp"
#include "paceline/peer_proof.hpp"
#include "paceline/peer_server.hpp"

using namespace paceline;
using Kind = PeerError::Kind;

namespace {

constexpr std::uint64_t wait_ns = 20'000'000'000;

Digest digest(unsigned char fill) {
  Digest made;
  made.fill(std::byte{fill});
  return made;
}

struct Node {
  explicit Node(std::size_t most = 64, std::uint64_t hello_ns = wait_ns, unsigned threads = 1,
                std::shared_ptr<const TlsContext> encryption = nullptr)
      : tls(encryption),
        server({.token = digest(1),
                .pack = digest(2),
                .tls = encryption,
                .threads = threads,
                .max_connections = most,
                .hello_ns = hello_ns}) {
    for (std::size_t i = 0; i < 300'000; ++i) shard += static_cast<char>(i * 7 % 251);
    std::ofstream(folder / "shard", std::ios::binary) << shard;
    server.set_card("a card");
    server.hold(3, folder / "shard");
  }
  TemporaryFolder folder;
  std::string shard;
  std::shared_ptr<const TlsContext> tls;  // that its clients use, too
  PeerServer server;
};

// Null: the library is not installed.
std::shared_ptr<const TlsContext> tls_of(unsigned char token) {
  try {
    return std::make_shared<const TlsContext>(digest(token));
  } catch (const std::runtime_error& problem) {
    std::fprintf(stderr, "no TLS: %s\n", problem.what());
    return nullptr;
  }
}

PeerError connect(PeerLink& link, const Node& node, unsigned char token = 1, unsigned char pack = 2) {
  std::string card;
  auto error = link.connect("127.0.0.1", node.server.port(), digest(token), digest(pack), wait_ns, card,
                            node.tls);
  if (error.kind == Kind::none) CHECK(card == "a card");
  return error;
}

// Of `count` ranges of `length` bytes each, from `first` on, each compared with what is in the file.
PeerError fetch(PeerLink& link, const Node& node, std::uint32_t shard, std::size_t count,
                std::size_t length, std::vector<RangeOutcome>& outcomes, std::uint64_t first = 0) {
  std::vector<std::vector<std::byte>> targets(count, std::vector<std::byte>(length));
  std::vector<WantedRange> wanted;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t offset = (i * 997) % (node.shard.size() - length);
    wanted.push_back({.shard = shard,
                      .range = {first + offset, length},
                      .target = targets[i].data(),
                      .checksum = crc32c(node.shard.data() + offset, length),
                      .is_checked = true});
  }
  outcomes.assign(count, RangeOutcome::missing);
  auto error = link.fetch(wanted, outcomes, wait_ns, [] { return false; });
  for (std::size_t i = 0; i < count; ++i) {
    if (outcomes[i] != RangeOutcome::good || length == 0) continue;
    const std::size_t offset = (i * 997) % (node.shard.size() - length);
    CHECK(std::memcmp(targets[i].data(), node.shard.data() + offset, length) == 0);
  }
  return error;
}

bool are_all(const std::vector<RangeOutcome>& outcomes, RangeOutcome wanted) {
  for (const RangeOutcome outcome : outcomes) {
    if (outcome != wanted) return false;
  }
  return true;
}

// A connection that speaks no protocol.
int dial(const Node& node) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(fd >= 0);
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_port = htons(node.server.port());
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(connect(fd, reinterpret_cast<sockaddr*>(&place), sizeof place) == 0);
  return fd;
}

// Whether the server closed a connection without a word, before the deadline.
bool is_closed(int fd) {
  pollfd waited{.fd = fd, .events = POLLIN, .revents = 0};
  CHECK(poll(&waited, 1, static_cast<int>(wait_ns / 1'000'000)) == 1);
  char byte;
  return recv(fd, &byte, 1, 0) <= 0;
}

void test_what_is_answered(const std::shared_ptr<const TlsContext>& tls) {
  Node node(64, wait_ns, 1, tls);
  PeerLink link;
  CHECK(connect(link, node).kind == Kind::none && link.is_open());
  std::vector<RangeOutcome> outcomes;
  // More ranges than a frame holds, of more bytes than a turn sends, and more frames than may wait.
  CHECK(fetch(link, node, 3, 20 * max_ranges, 1000, outcomes).kind == Kind::none);
  CHECK(are_all(outcomes, RangeOutcome::good));
  CHECK(fetch(link, node, 3, 5, 0, outcomes).kind == Kind::none);
  CHECK(are_all(outcomes, RangeOutcome::good));
  CHECK(fetch(link, node, 4, 5, 1000, outcomes).kind == Kind::none);
  CHECK(are_all(outcomes, RangeOutcome::not_held));
  std::string card;
  CHECK(link.ask_card(wait_ns, "", -1, card).kind == Kind::none && card == "a card");
  node.server.drop(3);
  CHECK(fetch(link, node, 3, 5, 1000, outcomes).kind == Kind::none);
  CHECK(are_all(outcomes, RangeOutcome::not_held));
  node.server.hold(3, node.folder / "shard");
  CHECK(fetch(link, node, 3, 1, 1000, outcomes, node.shard.size()).kind == Kind::protocol);
  CHECK(!link.is_open() && are_all(outcomes, RangeOutcome::missing));
  CHECK(fetch(link, node, 3, 1, 1000, outcomes).kind == Kind::lost);
  CHECK_THROWS(node.server.set_card(std::string(max_card_bytes + 1, 'x')), std::length_error);
}

void test_damaged_bytes_are_said() {
  Node node;
  PeerLink link;
  CHECK(connect(link, node).kind == Kind::none);
  std::vector<std::byte> target(100);
  const WantedRange wanted{
      .shard = 3, .range = {0, 100}, .target = target.data(), .checksum = 1, .is_checked = true};
  RangeOutcome outcome{};
  CHECK(link.fetch({&wanted, 1}, {&outcome, 1}, wait_ns, [] { return false; }).kind == Kind::none);
  CHECK(outcome == RangeOutcome::damaged && link.is_open());
}

void test_nothing_without_the_token() {
  Node node;
  PeerLink link;
  CHECK(connect(link, node, 9).kind == Kind::token && !link.is_open());
  CHECK(connect(link, node, 9, 9).kind == Kind::token);  // and it does not say which pack it serves
  CHECK(connect(link, node, 1, 9).kind == Kind::pack);
  const FrameHeader header{.kind = FrameKind::card};
  const int fd = dial(node);
  CHECK(send(fd, &header, sizeof header, MSG_NOSIGNAL) == sizeof header);
  CHECK(is_closed(fd));
  close(fd);
  CHECK(node.server.stats().reads == 0 && node.server.stats().refused_connections == 4);
}

void test_digests_are_compared_wherever_they_differ() {
  for (std::size_t i = 0; i < digest_bytes; ++i) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      Digest other = digest(5);
      CHECK(equal_in_constant_time(other, digest(5)));
      other[i] ^= static_cast<std::byte>(1U << bit);
      CHECK(!equal_in_constant_time(other, digest(5)));
    }
  }
  CHECK(!equal_in_constant_time(digest(5), std::span<const std::byte>()));
}

void test_a_peer_too_many_is_refused() {
  Node node(/*most=*/2);
  PeerLink links[2], third;
  for (PeerLink& link : links) CHECK(connect(link, node).kind == Kind::none);
  CHECK(connect(third, node).kind == Kind::lost);
  links[0].close();
  while (connect(third, node).kind != Kind::none) std::this_thread::yield();  // it notices the end
  std::vector<RangeOutcome> outcomes;
  CHECK(fetch(third, node, 3, 2, 10, outcomes).kind == Kind::none);
}

// Silent connections are many, and come again: each makes way for the next, and peers are served.
void test_strangers_shut_out_strangers_only() {
  Node node;
  PeerLink old;
  CHECK(connect(old, node).kind == Kind::none);
  std::vector<int> strangers;
  for (int i = 0; i < 700; ++i) strangers.push_back(dial(node));
  PeerLink young;
  CHECK(connect(young, node).kind == Kind::none);
  for (PeerLink* link : {&old, &young}) {
    std::vector<RangeOutcome> outcomes;
    CHECK(fetch(*link, node, 3, 2, 10, outcomes).kind == Kind::none);
  }
  CHECK(is_closed(strangers.front()));
  CHECK(node.server.stats().refused_connections >= 700 - 256);
  for (const int fd : strangers) close(fd);
}

void test_who_says_no_hello_is_closed() {
  Node node(64, /*hello_ns=*/10'000'000);
  const int fd = dial(node);
  CHECK(is_closed(fd));
  close(fd);
  const FrameHeader header{.kind = FrameKind::hello, .body_bytes = hello_bytes};
  const int half = dial(node);
  CHECK(send(half, &header, sizeof header, MSG_NOSIGNAL) == sizeof header);  // and no body
  CHECK(is_closed(half));
  close(half);
}

// A node whose process has no descriptor left closes connections; it did spin.
void test_no_descriptors_are_left() {
  Node node;
  PeerLink link;
  CHECK(connect(link, node).kind == Kind::none);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const int lowest = dup(0);
  CHECK(fd >= 0 && lowest >= 0);
  close(lowest);
  rlimit before{};
  CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit none{.rlim_cur = static_cast<rlim_t>(lowest), .rlim_max = before.rlim_max};
  CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_port = htons(node.server.port());
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::connect(fd, reinterpret_cast<sockaddr*>(&place), sizeof place) == 0);
  CHECK(is_closed(fd));
  close(fd);
#ifndef __SANITIZE_ADDRESS__  // built with UBSan, which asks a pipe whether an exception is one
  CHECK_THROWS(PeerServer(PeerServerOptions{.threads = 4}), std::system_error);
#endif
  CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
  std::vector<RangeOutcome> outcomes;
  CHECK(fetch(link, node, 3, 2, 10, outcomes).kind == Kind::none);
}

int listen_here(std::uint16_t& port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof place;
  CHECK(bind(fd, reinterpret_cast<sockaddr*>(&place), size) == 0 && listen(fd, 8) == 0);
  CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&place), &size) == 0);
  port = ntohs(place.sin_port);
  return fd;
}

void test_a_server_that_is_silent_is_given_up() {
  std::uint16_t port = 0;
  const int listener = listen_here(port);
  PeerLink link;
  std::string card;
  const auto error = link.connect("127.0.0.1", port, digest(1), digest(2),
                                  /*wait_ns=*/50'000'000, card);
  CHECK(error.kind == Kind::deadline && !link.is_open());
  close(listener);
}

// Threads of one link, links of one server, shards that come and go, links that are closed meanwhile.
void test_threads(const std::shared_ptr<const TlsContext>& tls) {
  Node node(64, wait_ns, /*threads=*/3, tls);
  std::atomic<bool> ends{false};
  std::thread keeper([&] {
    while (!ends) {
      node.server.drop(3);
      node.server.hold(3, node.folder / "shard");
      node.server.set_card("a card");
      static_cast<void>(node.server.stats());
    }
  });
  std::vector<std::thread> readers;
  PeerLink shared;
  CHECK(connect(shared, node).kind == Kind::none);
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&, i] {
      PeerLink own;
      std::vector<RangeOutcome> outcomes;
      for (int round = 0; round < 20; ++round) {
        PeerLink& link = i % 2 == 0 ? own : shared;
        if (i == 3 && round % 5 == 0) link.close();
        if (!link.is_open()) CHECK(connect(link, node).kind == Kind::none);
        const auto error = fetch(link, node, 3, 50, 500, outcomes);
        CHECK(error.kind == Kind::none || error.kind == Kind::lost);
        for (const RangeOutcome outcome : outcomes) CHECK(outcome != RangeOutcome::damaged);
      }
    });
  }
  for (auto& reader : readers) reader.join();
  ends = true;
  keeper.join();
  node.server.stop();
  node.server.stop();
}

// --- TLS

void test_another_key(const std::shared_ptr<const TlsContext>& tls,
                      const std::shared_ptr<const TlsContext>& other) {
  Node node(64, wait_ns, 1, tls);
  PeerLink link;
  std::string card;
  auto error = link.connect("127.0.0.1", node.server.port(), digest(1), digest(2), wait_ns, card, other);
  CHECK(error.kind == Kind::tls && card.empty() && !link.is_open());
  CHECK(connect(link, node, 9).kind == Kind::token);  // the right key and another token: not one's own
  CHECK(connect(link, node).kind == Kind::none);
  CHECK(node.server.stats().refused_connections == 2);
}

void test_tls_on_one_side_only(const std::shared_ptr<const TlsContext>& tls) {
  Node with(64, wait_ns, 1, tls), without;
  PeerLink link;
  std::string card;
  auto error = link.connect("127.0.0.1", with.server.port(), digest(1), digest(2), wait_ns, card);
  CHECK(error.kind == Kind::lost && error.why.find("TLS") != std::string::npos);
  error = link.connect("127.0.0.1", without.server.port(), digest(1), digest(2), wait_ns, card, tls);
  CHECK(error.kind == Kind::lost && error.why.find("TLS") != std::string::npos);
  CHECK(card.empty() && !link.is_open());
}

// Passes one connection on and keeps what it sees.
void pass_on(int listener, std::uint16_t port, std::string& seen) {
  const int client = accept(listener, nullptr, nullptr);
  const int node = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_port = htons(port);
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::connect(node, reinterpret_cast<sockaddr*>(&place), sizeof place) == 0);
  pollfd ends[2] = {{.fd = client, .events = POLLIN, .revents = 0}, {.fd = node, .events = POLLIN, .revents = 0}};
  std::vector<char> buffer(1 << 16);
  for (bool is_open = true; is_open;) {
    CHECK(poll(ends, 2, static_cast<int>(wait_ns / 1'000'000)) > 0);
    for (int i = 0; i < 2 && is_open; ++i) {
      if (ends[i].revents == 0) continue;
      const ssize_t got = recv(ends[i].fd, buffer.data(), buffer.size(), 0);
      is_open = got > 0;
      if (!is_open) break;
      seen.append(buffer.data(), static_cast<std::size_t>(got));
      CHECK(send(ends[1 - i].fd, buffer.data(), static_cast<std::size_t>(got), MSG_NOSIGNAL) == got);
    }
  }
  close(client);
  close(node);
}

void test_nothing_is_readable(const std::shared_ptr<const TlsContext>& tls) {
  for (const auto& encryption : {std::shared_ptr<const TlsContext>(), tls}) {
    Node node(64, wait_ns, 1, encryption);
    std::uint16_t port = 0;
    const int listener = listen_here(port);
    std::string seen;
    std::thread between([&] { pass_on(listener, node.server.port(), seen); });
    PeerLink link;
    std::string card;
    auto error = link.connect("127.0.0.1", port, digest(1), digest(2), wait_ns, card, encryption);
    CHECK(error.kind == Kind::none && card == "a card");
    std::vector<RangeOutcome> outcomes;
    CHECK(fetch(link, node, 3, 3, 50'000, outcomes).kind == Kind::none);
    CHECK(are_all(outcomes, RangeOutcome::good));
    link.close();
    between.join();
    close(listener);
    const std::string sample = node.shard.substr(1000, 64);
    CHECK((seen.find(sample) == std::string::npos) == (encryption != nullptr));
    CHECK((seen.find("a card") == std::string::npos) == (encryption != nullptr));
    // The token never travels, in whatever form.
    const Digest token = digest(1), hashed = sha256(token);
    for (const Digest& secret : {token, hashed}) {
      CHECK(seen.find(std::string(reinterpret_cast<const char*>(secret.data()), 32)) == std::string::npos);
    }
  }
}

// A page behind the end of a mapped file ends the connection, not the process.
void test_a_shard_that_shrinks(const std::shared_ptr<const TlsContext>& tls) {
  Node node(64, wait_ns, 1, tls);
  PeerLink link;
  CHECK(connect(link, node).kind == Kind::none);
  CHECK(truncate((node.folder / "shard").c_str(), 1000) == 0);
  std::vector<RangeOutcome> outcomes;
  CHECK(fetch(link, node, 3, 1, 100'000, outcomes, 100'000).kind == Kind::lost);
  std::ofstream(node.folder / "shard", std::ios::binary) << node.shard;
  node.server.hold(3, node.folder / "shard");
  CHECK(connect(link, node).kind == Kind::none);
  CHECK(fetch(link, node, 3, 1, 100'000, outcomes).kind == Kind::none);
}

}  // namespace

int main() {
  test_what_is_answered(nullptr);
  test_damaged_bytes_are_said();
  test_nothing_without_the_token();
  test_digests_are_compared_wherever_they_differ();
  test_a_peer_too_many_is_refused();
  test_strangers_shut_out_strangers_only();
  test_who_says_no_hello_is_closed();
  test_no_descriptors_are_left();
  test_a_server_that_is_silent_is_given_up();
  test_threads(nullptr);
  if (const auto tls = tls_of(1); tls != nullptr) {
    test_what_is_answered(tls);
    test_threads(tls);
    test_another_key(tls, tls_of(9));
    test_tls_on_one_side_only(tls);
    test_nothing_is_readable(tls);
    test_a_shard_that_shrinks(tls);
  }
}
