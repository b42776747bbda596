// What a node does as a whole: time on its cores, run queue, memory, network, disks, GPUs.
// Sources: proc(5) for /proc/stat, loadavg, meminfo, net/dev and diskstats; NVIDIA's NVML, which is
// loaded if it is there. What the kernel hides has no counter.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace paceline {

// Used by one thread. The first reading finds no counter that is a difference.
class NodeCounters {
 public:
  // Takes a counter's name and its value: a difference since the last reading, or what is now.
  using Count = std::function<void(const std::string& name, std::uint64_t value)>;

  NodeCounters();
  ~NodeCounters();
  NodeCounters(const NodeCounters&) = delete;
  NodeCounters& operator=(const NodeCounters&) = delete;

  void read(const Count& count);

 private:
  struct Gpus;

  void difference(const Count& count, const char* name, std::uint64_t total);
  void read_cores(const Count& count);
  void read_memory(const Count& count);
  void read_network(const Count& count);
  void read_disks(const Count& count);
  bool is_whole_disk(std::string_view name);

  std::map<std::string, std::uint64_t> last_;
  std::map<std::string, bool, std::less<>> disks_;
  std::unique_ptr<Gpus> gpus_;
};

// Of all processes of a node that ask by the same key, one holds it until it ends.
class NodeClaim {
 public:
  NodeClaim() = default;
  ~NodeClaim();
  NodeClaim(const NodeClaim&) = delete;
  NodeClaim& operator=(const NodeClaim&) = delete;

  // Whether this process holds it, from now on or already.
  bool take(const std::string& key) noexcept;

 private:
  int socket_ = -1;
};

}  // namespace paceline
