// The mount by FUSE without a kernel: what it is answered, and what threads do with a connection.
#include <linux/fuse.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "pack_builder.hpp"
#include "paceline/fuse_replies.hpp"
#include "paceline/fuse_server.hpp"

using namespace paceline;

namespace {

constexpr std::uint64_t top = FUSE_ROOT_ID;
constexpr std::uint64_t folder = 2;        // "class"
constexpr std::uint64_t first_sample = 3;  // "class/0"

std::vector<std::string> bodies() {
  return {"first", "", std::string(200'000, 'x') + "end", "fourth", std::string(64, 'y')};
}

std::vector<std::byte> request(std::uint32_t operation, std::uint64_t node, std::string_view body) {
  fuse_in_header head{};
  head.len = static_cast<std::uint32_t>(sizeof head + body.size());
  head.opcode = operation;
  head.unique = 77;
  head.nodeid = node;
  std::vector<std::byte> bytes(head.len);
  std::memcpy(bytes.data(), &head, sizeof head);
  if (!body.empty()) std::memcpy(bytes.data() + sizeof head, body.data(), body.size());
  return bytes;
}

template <class T>
std::string_view raw(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

std::string_view text(const FuseReply& reply) {
  return {reinterpret_cast<const char*>(reply.body.data()), reply.body.size()};
}

template <class T>
T value(const FuseReply& reply) {
  CHECK(reply.error == 0 && reply.body.size() == sizeof(T));
  T found{};
  std::memcpy(&found, reply.body.data(), sizeof found);
  return found;
}

fuse_init_in offer(std::uint32_t flags) {
  fuse_init_in offered{};
  offered.major = FUSE_KERNEL_VERSION;
  offered.minor = FUSE_KERNEL_MINOR_VERSION;
  offered.max_readahead = 1 << 17;
  offered.flags = flags;
  return offered;
}

struct Fixture {
  explicit Fixture(const std::vector<std::string>& samples = bodies()) {
    PackBuilder(samples).version3().write(place / "pack");
    pack = open_pack_files(place / "pack");
    replies = std::make_unique<FuseReplies>(pack.get());
  }
  const FuseReply& ask(std::uint32_t operation, std::uint64_t node, std::string_view body = {}) {
    CHECK(replies->answer(request(operation, node, body), reply));
    CHECK(reply.request == 77);
    return reply;
  }
  const FuseReply& read(std::uint64_t node, std::uint64_t offset, std::uint32_t size) {
    fuse_read_in asked{};
    asked.offset = offset;
    asked.size = size;
    return ask(FUSE_READ, node, raw(asked));
  }

  TemporaryFolder place;
  PackFilesOwner pack;
  std::unique_ptr<FuseReplies> replies;
  FuseReply reply;
};

void names_lead_to_nodes() {
  Fixture mount;
  const auto found = value<fuse_entry_out>(mount.ask(FUSE_LOOKUP, top, std::string_view("class", 6)));
  CHECK(found.nodeid == folder && S_ISDIR(found.attr.mode) && found.attr.nlink == 2);
  const auto sample = value<fuse_entry_out>(mount.ask(FUSE_LOOKUP, folder, std::string_view("2", 2)));
  CHECK(sample.nodeid == first_sample + 2 && sample.attr.size == 200'003);
  CHECK(S_ISREG(sample.attr.mode) && sample.attr.mtimensec == 2);
  const auto nothing = value<fuse_entry_out>(mount.ask(FUSE_LOOKUP, folder, std::string_view("9", 2)));
  CHECK(nothing.nodeid == 0 && nothing.entry_valid > 0);
  CHECK(mount.ask(FUSE_LOOKUP, first_sample, std::string_view("9", 2)).error == ENOTDIR);
  CHECK(mount.ask(FUSE_LOOKUP, 99, std::string_view("9", 2)).error == ESTALE);
  CHECK(mount.ask(FUSE_LOOKUP, top, std::string(300, 'n')).error == ENAMETOOLONG);
  CHECK(value<fuse_attr_out>(mount.ask(FUSE_GETATTR, top)).attr.ino == top);
  for (const std::uint64_t node : {std::uint64_t{0}, std::uint64_t{8}, ~std::uint64_t{0}}) {
    CHECK(mount.ask(FUSE_GETATTR, node).error == ESTALE);
  }
}

void files_are_read_whole_and_in_parts() {
  Fixture mount;
  CHECK(text(mount.read(first_sample, 0, 4096)) == "first");
  CHECK(text(mount.read(first_sample, 5, 4096)).empty() && mount.reply.error == 0);
  CHECK(text(mount.read(first_sample, ~std::uint64_t{0}, 4096)).empty());
  CHECK(text(mount.read(first_sample + 1, 0, 4096)).empty());
  CHECK(text(mount.read(first_sample + 2, 0, 1 << 20)) == bodies()[2]);
  std::string parts;
  while (parts.size() < bodies()[2].size()) {
    parts += text(mount.read(first_sample + 2, parts.size(), 70'000));
  }
  CHECK(parts == bodies()[2]);
  CHECK(mount.read(folder, 0, 4096).error == EISDIR);
  CHECK(mount.read(99, 0, 4096).error == ESTALE);
  CHECK(mount.ask(FUSE_READ, first_sample, "short").error == EINVAL);
}

void damage_is_an_error_of_the_sample() {
  Fixture mount;
  const std::string shard = mount.place / "pack/shard-00001.pace";
  FILE* file = std::fopen(shard.c_str(), "r+");
  CHECK(file != nullptr && std::fseek(file, 64 + 1000, SEEK_SET) == 0);
  std::fputc('z', file);
  std::fclose(file);
  CHECK(mount.read(first_sample + 2, 0, 1 << 20).error == EIO);
  CHECK(mount.read(first_sample + 2, 70'000, 4096).error == EIO);
  CHECK(text(mount.read(first_sample + 3, 0, 4096)) == "fourth");
}

struct Listed {
  std::vector<std::string> names;
  std::vector<std::uint64_t> nodes;
};

Listed list(Fixture& mount, std::uint64_t node, std::uint32_t size, bool with_status) {
  Listed found;
  fuse_read_in asked{};
  asked.size = size;
  for (;;) {
    mount.ask(with_status ? FUSE_READDIRPLUS : FUSE_READDIR, node, raw(asked));
    CHECK(mount.reply.error == 0 && mount.reply.body.size() <= size);
    if (mount.reply.body.empty()) return found;
    for (auto rest = mount.reply.body; !rest.empty();) {
      std::size_t head = 0;
      if (with_status) {
        fuse_entry_out entry{};
        std::memcpy(&entry, rest.data(), sizeof entry);
        found.nodes.push_back(entry.nodeid);
        head = sizeof entry;
      }
      fuse_dirent entry{};
      std::memcpy(&entry, rest.data() + head, offsetof(fuse_dirent, name));
      const auto* name = reinterpret_cast<const char*>(rest.data() + head + offsetof(fuse_dirent, name));
      found.names.emplace_back(name, entry.namelen);
      rest = rest.subspan(FUSE_DIRENT_ALIGN(head + offsetof(fuse_dirent, name) + entry.namelen));
      asked.offset = entry.off;
    }
  }
}

void folders_are_listed_from_any_place() {
  Fixture mount;
  const std::vector<std::string> names = {".", "..", "0", "1", "2", "3", "4"};
  for (const std::uint32_t size : {4096U, 200U, 160U}) {
    CHECK(list(mount, folder, size, true).names == names);
    CHECK(list(mount, folder, size, false).names == names);
  }
  CHECK((list(mount, folder, 4096, true).nodes == std::vector<std::uint64_t>{0, 0, 3, 4, 5, 6, 7}));
  CHECK((list(mount, top, 4096, true).nodes == std::vector<std::uint64_t>{0, 0, folder}));
  fuse_read_in asked{};
  asked.size = 4096;
  asked.offset = 99;
  CHECK(mount.ask(FUSE_READDIR, folder, raw(asked)).error == EINVAL);
  CHECK(mount.ask(FUSE_READDIR, first_sample, raw(asked)).error == ENOTDIR);
}

void the_kernel_is_agreed_with() {
  Fixture mount;
  const auto all = offer(~0U);
  const auto chosen = value<fuse_init_out>(mount.ask(FUSE_INIT, 0, raw(all)));
  CHECK(mount.reply.is_init && (chosen.flags & FUSE_NO_OPEN_SUPPORT) != 0);
  CHECK((chosen.flags & (FUSE_WRITEBACK_CACHE | FUSE_POSIX_LOCKS | FUSE_INIT_EXT)) == 0);
  CHECK(mount.ask(FUSE_OPEN, first_sample).error == ENOSYS);
  CHECK(mount.ask(FUSE_OPENDIR, folder).error == ENOSYS);
  const auto none = offer(0);
  CHECK(value<fuse_init_out>(mount.ask(FUSE_INIT, 0, raw(none))).flags == 0);
  CHECK(value<fuse_open_out>(mount.ask(FUSE_OPEN, first_sample)).open_flags == FOPEN_KEEP_CACHE);
  CHECK((value<fuse_open_out>(mount.ask(FUSE_OPENDIR, folder)).open_flags & FOPEN_CACHE_DIR) != 0);
  auto later = offer(0);
  later.major = FUSE_KERNEL_VERSION + 1;
  CHECK(value<fuse_init_out>(mount.ask(FUSE_INIT, 0, raw(later))).major == FUSE_KERNEL_VERSION);
  CHECK(!mount.reply.is_init);
  later.major = 6;
  CHECK(mount.ask(FUSE_INIT, 0, raw(later)).error == EPROTO);
}

void what_is_not_served_is_refused() {
  Fixture mount;
  for (const auto operation : {FUSE_WRITE, FUSE_CREATE, FUSE_UNLINK, FUSE_MKDIR, FUSE_RENAME2}) {
    CHECK(mount.ask(operation, folder).error == EROFS);
  }
  for (const auto operation : {FUSE_GETXATTR, FUSE_FLUSH, FUSE_LSEEK, FUSE_INTERRUPT}) {
    CHECK(mount.ask(operation, first_sample).error == ENOSYS);
  }
  CHECK(mount.ask(4711, first_sample).error == ENOSYS);
  CHECK(!mount.replies->answer(request(FUSE_FORGET, folder, ""), mount.reply));
  CHECK(!mount.replies->answer(std::vector<std::byte>(10), mount.reply));
  auto torn = request(FUSE_GETATTR, top, "");
  torn.push_back({});
  CHECK(mount.replies->answer(torn, mount.reply) && mount.reply.error == EIO);
}

void no_request_does_harm() {
  Fixture mount;
  std::mt19937_64 random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::string body(random() % 64, '\0');
    for (char& byte : body) byte = static_cast<char>(random() % 3 == 0 ? random() : 0);
    const auto operation = static_cast<std::uint32_t>(random() % 56);
    const std::uint64_t node = random() % 4 == 0 ? random() : random() % 10;
    if (!mount.replies->answer(request(operation, node, body), mount.reply)) continue;
    CHECK(mount.reply.error >= 0 && mount.reply.body.size() <= max_fuse_reply_bytes);
  }
}

// Many large samples in turn: what is kept stays bounded, and right.
void parts_are_read_by_many_threads() {
  std::vector<std::string> samples;
  for (int i = 0; i < 100; ++i) samples.push_back(std::string(20'000, static_cast<char>(i)));
  Fixture mount(samples);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      FuseReply reply;
      for (int i = 0; i < 2000; ++i) {
        const std::uint64_t sample = random() % samples.size();
        fuse_read_in asked{};
        asked.offset = random() % 20'000;
        asked.size = 1000;
        const auto bytes = request(FUSE_READ, first_sample + sample, raw(asked));
        CHECK(mount.replies->answer(bytes, reply) && reply.error == 0);
        CHECK(text(reply) == std::string_view(samples[sample]).substr(asked.offset, 1000));
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// A pair of sockets in place of /dev/fuse.
void threads_serve_until_the_connection_ends() {
  TemporaryFolder place;
  PackBuilder(bodies()).version3().write(place / "pack");
  FuseServer server(place / "pack");
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
  server.start(ends[1], 3);
  CHECK_THROWS(server.start(ends[1], 3), std::logic_error);
  CHECK(!server.wait_ready(0));
  const auto ask = [&](const std::vector<std::byte>& bytes) {
    CHECK(write(ends[0], bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  };
  ask(request(FUSE_INIT, 0, raw(offer(0))));
  CHECK(server.wait_ready(60'000'000'000));
  std::vector<char> reply(1 << 17);
  CHECK(read(ends[0], reply.data(), reply.size()) > 0);
  fuse_read_in asked{};
  asked.size = 4096;
  for (int i = 0; i < 50; ++i) {
    ask(request(FUSE_READ, first_sample + 2, raw(asked)));
    ask(request(FUSE_FORGET, folder, ""));
    ask(request(FUSE_READ, 99, raw(asked)));
    std::set<ssize_t> sizes;
    for (int k = 0; k < 2; ++k) sizes.insert(read(ends[0], reply.data(), reply.size()));
    CHECK((sizes == std::set<ssize_t>{16, 16 + 4096}));
  }
  pollfd ended{server.ended(), POLLIN, 0};
  CHECK(poll(&ended, 1, 0) == 0);
  const FuseStats stats = server.stats();
  CHECK(stats.requests > 100 && stats.reads >= 50 && stats.bytes >= 50 * 4096);
  CHECK(close(ends[0]) == 0);
  CHECK(poll(&ended, 1, 60'000) == 1);
  CHECK(server.stats().requests == 151 && server.stats().errors == 50);
}

}  // namespace

int main() {
  names_lead_to_nodes();
  files_are_read_whole_and_in_parts();
  damage_is_an_error_of_the_sample();
  folders_are_listed_from_any_place();
  the_kernel_is_agreed_with();
  what_is_not_served_is_refused();
  no_request_does_harm();
  parts_are_read_by_many_threads();
  threads_serve_until_the_connection_ends();
}
