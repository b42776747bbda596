// The least that a file service over TCP can do: bench/store_remote.py compares the store with it.
//
//   epoll_pair serve FILE            prints its port; serves ranges of FILE by writev from a mapping
//   epoll_pair fetch PORT RANGES N DEPTH   RANGES: file of u64 offset, length; prints files per second
//
// A request is an offset and a length, a reply the bytes: no header, no checksum, no token.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

struct Range {
  std::uint64_t offset, length;
};

static int serve(const char* path) {
  const int file = open(path, O_RDONLY);
  struct stat state {};
  fstat(file, &state);
  const auto size = static_cast<std::size_t>(state.st_size);
  const auto* data = static_cast<const char*>(mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0));
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  if (bind(listener, reinterpret_cast<sockaddr*>(&address), length) != 0) return 1;
  listen(listener, 16);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  std::printf("%d\n", ntohs(address.sin_port));
  std::fflush(stdout);
  const int epoll = epoll_create1(0);
  epoll_event event{.events = EPOLLIN, .data = {.fd = listener}};
  epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event);
  std::unordered_map<int, std::deque<Range>> waiting;
  for (;;) {
    epoll_event events[16];
    const int count = epoll_wait(epoll, events, 16, -1);
    for (int i = 0; i < count; ++i) {
      const int fd = events[i].data.fd;
      if (fd == listener) {
        const int made = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK);
        const int one = 1;
        setsockopt(made, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        event = {.events = EPOLLIN, .data = {.fd = made}};
        epoll_ctl(epoll, EPOLL_CTL_ADD, made, &event);
        waiting[made];
        continue;
      }
      auto& ranges = waiting[fd];
      Range asked[256];
      const ssize_t got = read(fd, asked, sizeof asked);
      bool dead = got == 0 || (got < 0 && errno != EAGAIN) || (got > 0 && got % 16 != 0);
      for (ssize_t k = 0; k < got / 16; ++k) ranges.push_back(asked[k]);
      bool blocked = false;
      while (!dead && !blocked && !ranges.empty()) {
        Range& next = ranges.front();
        const ssize_t sent = send(fd, data + next.offset, next.length, MSG_NOSIGNAL);
        if (sent < 0) {
          (errno == EAGAIN ? blocked : dead) = true;
          continue;
        }
        next.offset += static_cast<std::uint64_t>(sent);
        next.length -= static_cast<std::uint64_t>(sent);
        if (next.length == 0) ranges.pop_front();
      }
      if (dead) {
        close(fd);
        waiting.erase(fd);
        continue;
      }
      const std::uint32_t wanted = EPOLLIN | (blocked ? EPOLLOUT : 0U);
      event = {.events = wanted, .data = {.fd = fd}};
      epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event);
    }
  }
}

static int fetch(int port, const char* path, std::size_t count, std::size_t depth) {
  std::FILE* file = std::fopen(path, "rb");
  std::vector<Range> ranges(count);
  if (std::fread(ranges.data(), sizeof(Range), count, file) != count) return 1;
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return 1;
  const int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  std::uint64_t most = 0;
  for (const Range& range : ranges) most = std::max(most, range.length);
  std::vector<char> buffer(most * depth, 1);  // as much memory as a batch takes
  const auto begin = std::chrono::steady_clock::now();
  std::size_t next = 0;
  for (std::size_t done = 0; done < count; ++done) {
    for (; next < count && next < done + depth; ++next) {
      if (write(fd, &ranges[next], sizeof(Range)) != sizeof(Range)) return 1;
    }
    char* target = buffer.data() + done % depth * most;
    std::size_t left = ranges[done].length;
    while (left > 0) {
      const ssize_t got = recv(fd, target, left, MSG_WAITALL);
      if (got <= 0) return 1;
      target += got;
      left -= static_cast<std::size_t>(got);
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::printf("%.3f\n", static_cast<double>(count) / seconds.count());
  return 0;
}

int main(int count, char** words) {
  if (count == 3 && std::string(words[1]) == "serve") return serve(words[2]);
  if (count == 6 && std::string(words[1]) == "fetch") {
    return fetch(std::atoi(words[2]), words[3], std::strtoul(words[4], nullptr, 10),
                 std::strtoul(words[5], nullptr, 10));
  }
  return 2;
}
