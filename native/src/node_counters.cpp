#include "paceline/node_counters.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>

namespace paceline {
namespace {

constexpr std::uint64_t sector_bytes = 512;  // of diskstats, whatever the disk's own are

std::string contents(const char* path) {
  std::string text;
  const int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return text;
  std::array<char, 8192> part{};
  for (ssize_t length = 0; (length = ::read(descriptor, part.data(), part.size())) > 0;) {
    text.append(part.data(), static_cast<std::size_t>(length));
  }
  close(descriptor);
  return text;
}

// Calls `use` with each line of a file.
template <class Use>
void each_line(const char* path, Use&& use) {
  const std::string text = contents(path);
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    use(text.substr(at, end - at));
    at = end + 1;
  }
}

}  // namespace

// NVML by its own names; no header of it is needed, and no program is linked to it.
struct NodeCounters::Gpus {
  using Device = void*;
  struct Utilization {
    unsigned gpu;  // percent of the time in which a kernel ran
    unsigned memory;
  };
  struct Memory {
    unsigned long long total, free, used;
  };

  int (*utilization)(Device, Utilization*) = nullptr;
  int (*memory)(Device, Memory*) = nullptr;
  int (*power)(Device, unsigned*) = nullptr;  // milliwatts
  std::vector<Device> devices;

  Gpus() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    int (*init)() = nullptr;
    int (*count)(unsigned*) = nullptr;
    int (*device)(unsigned, Device*) = nullptr;
    const auto find = [&](auto& function, const char* name) {
      void* found = dlsym(library, name);
      std::memcpy(&function, &found, sizeof found);
      return found != nullptr;
    };
    find(power, "nvmlDeviceGetPowerUsage");
    unsigned devices_count = 0;
    if (!find(init, "nvmlInit_v2") || !find(count, "nvmlDeviceGetCount_v2") ||
        !find(device, "nvmlDeviceGetHandleByIndex_v2") ||
        !find(utilization, "nvmlDeviceGetUtilizationRates") ||
        !find(memory, "nvmlDeviceGetMemoryInfo") || init() != 0 || count(&devices_count) != 0) {
      return;
    }
    for (unsigned i = 0; i < devices_count; ++i) {
      Device handle = nullptr;
      devices.push_back(device(i, &handle) == 0 ? handle : nullptr);
    }
  }

  void read(const Count& add) const {
    for (std::size_t i = 0; i < devices.size(); ++i) {
      const std::string name = "node_gpu" + std::to_string(i);
      Utilization used{};
      Memory bytes{};
      unsigned milliwatts = 0;
      if (devices[i] == nullptr) continue;
      if (utilization(devices[i], &used) == 0) add(name + "_busy_percent", used.gpu);
      if (memory(devices[i], &bytes) == 0) {
        add(name + "_memory_bytes", bytes.used);
        add(name + "_memory_total_bytes", bytes.total);
      }
      if (power != nullptr && power(devices[i], &milliwatts) == 0) {
        add(name + "_power_mw", milliwatts);
      }
    }
  }
};

NodeCounters::NodeCounters() = default;
NodeCounters::~NodeCounters() = default;

void NodeCounters::read(const Count& count) {
  read_cores(count);
  read_memory(count);
  read_network(count);
  read_disks(count);
  if (gpus_ == nullptr) gpus_ = std::make_unique<Gpus>();  // loading takes long on some nodes
  gpus_->read(count);
}

void NodeCounters::difference(const Count& count, const char* name, std::uint64_t total) {
  const auto [known, is_first] = last_.try_emplace(name, total);
  // A network interface or disk that went away takes what it had counted along.
  if (!is_first) count(name, total >= known->second ? total - known->second : 0);
  known->second = total;
}

void NodeCounters::read_cores(const Count& count) {
  std::uint64_t user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, softirq = 0, steal = 0;
  const std::string stat = contents("/proc/stat");
  const int found = std::sscanf(
      stat.c_str(),
      "cpu %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64
      " %" SCNu64,
      &user, &nice, &system, &idle, &wait, &irq, &softirq, &steal);
  const auto tick_ns = 1'000'000'000U / static_cast<std::uint64_t>(sysconf(_SC_CLK_TCK));
  if (found == 8 && idle > 0) {  // sandboxes show zeros
    difference(count, "node_busy_ns", (user + nice + system + irq + softirq) * tick_ns);
    difference(count, "node_stolen_ns", steal * tick_ns);
    count("node_cores", static_cast<std::uint64_t>(sysconf(_SC_NPROCESSORS_ONLN)));
  }
  unsigned running = 0;
  const std::string load = contents("/proc/loadavg");
  if (std::sscanf(load.c_str(), "%*s %*s %*s %u/", &running) == 1 && running > 0) {
    count("node_runnable", running - 1);  // without the thread that reads this
  }
}

void NodeCounters::read_memory(const Count& count) {
  std::uint64_t total = 0;
  std::uint64_t available = 0;
  each_line("/proc/meminfo", [&](const std::string& line) {
    std::sscanf(line.c_str(), "MemTotal: %" SCNu64, &total);
    std::sscanf(line.c_str(), "MemAvailable: %" SCNu64, &available);
  });
  if (total == 0) return;
  count("node_memory_bytes", (total - std::min(available, total)) * 1024);
  count("node_memory_total_bytes", total * 1024);
}

void NodeCounters::read_network(const Count& count) {
  std::uint64_t received = 0;
  std::uint64_t sent = 0;
  bool any = false;
  each_line("/proc/net/dev", [&](const std::string& line) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos) return;
    const std::size_t first = line.find_first_not_of(' ');
    if (line.compare(first, colon - first, "lo") == 0) return;
    std::uint64_t in = 0;
    std::uint64_t out = 0;
    if (std::sscanf(line.c_str() + colon + 1,
                    "%" SCNu64 " %*u %*u %*u %*u %*u %*u %*u %" SCNu64, &in, &out) == 2) {
      received += in;
      sent += out;
      any = true;
    }
  });
  if (!any) return;
  difference(count, "node_received_bytes", received);
  difference(count, "node_sent_bytes", sent);
}

void NodeCounters::read_disks(const Count& count) {
  std::uint64_t read = 0;
  std::uint64_t written = 0;
  bool any = false;
  each_line("/proc/diskstats", [&](const std::string& line) {
    std::array<char, 64> name{};
    std::uint64_t in = 0;
    std::uint64_t out = 0;
    if (std::sscanf(line.c_str(), "%*u %*u %63s %*u %*u %" SCNu64 " %*u %*u %*u %" SCNu64,
                    name.data(), &in, &out) == 3 &&
        is_whole_disk(name.data())) {
      read += in;
      written += out;
      any = true;
    }
  });
  if (!any) return;
  difference(count, "node_read_bytes", read * sector_bytes);
  difference(count, "node_written_bytes", written * sector_bytes);
}

// A partition, and a device that stands on others, would count the same bytes twice.
bool NodeCounters::is_whole_disk(std::string_view name) {
  const auto known = disks_.find(name);
  if (known != disks_.end()) return known->second;
  bool is_whole = access(("/sys/block/" + std::string(name)).c_str(), F_OK) == 0;
  for (const std::string_view prefix : {"loop", "ram", "zram", "dm-", "md", "sr", "nbd"}) {
    if (name.starts_with(prefix)) is_whole = false;
  }
  disks_.emplace(name, is_whole);
  return is_whole;
}

NodeClaim::~NodeClaim() {
  if (socket_ >= 0) close(socket_);
}

bool NodeClaim::take(const std::string& key) noexcept {
  if (socket_ >= 0) return true;
  // A name in the kernel rather than a file: it is gone with the process that holds it.
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::size_t length = std::min(key.size(), sizeof address.sun_path - 1);
  std::memcpy(address.sun_path + 1, key.data(), length);
  const int made = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (made < 0) return false;
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  if (bind(made, reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    close(made);
    return false;
  }
  socket_ = made;
  return true;
}

}  // namespace paceline
