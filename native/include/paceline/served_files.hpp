// Files of a pack whose shards are spread over nodes: those here are mapped, as of a pack that lies here;
// others are asked of this node's server (range_requests.hpp); what that cannot get is read from the
// source. All bytes are compared with their checksums in this process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "paceline/pack_reader.hpp"
#include "paceline/range_requests.hpp"

namespace paceline {

// Writes a line to stderr.
void report(const std::string& where, const std::string& what) noexcept;
// Reads a sample whose shards are here, verified. Throws PackError.
void read_sample(const PackReader& reader, std::uint64_t sample, std::byte* target);

// Thread-safe, and safe to use in a forked child: without locks.
class ServedFiles {
 public:
  // `requests` leads to the memory of requests. Without it, or when the server has ended, all that is not
  // here comes from the pack in the folder `source`.
  ServedFiles(const std::string& requests, std::string source);
  ~ServedFiles();
  ServedFiles(const ServedFiles&) = delete;
  ServedFiles& operator=(const ServedFiles&) = delete;

  bool is_here(const PackReader& reader, std::uint64_t sample) const;
  // Counts a read of a file that is here.
  void note_local(std::uint64_t bytes) noexcept;
  // Counts the time until its end as spent reading; null: counts nothing.
  class Timed {
   public:
    explicit Timed(const ServedFiles* files) noexcept;
    ~Timed();
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

   private:
    const ServedFiles* files_;
    std::uint64_t begin_ns_;
  };
  // Reads a sample from wherever it is. Throws PackError.
  void read(const PackReader& reader, std::uint64_t sample, std::byte* target);

 private:
  // Gets the extents of a sample, of which some may be here. `tried`: how many of those that have it, this
  // node first, have it damaged.
  void read_anywhere(const PackReader& reader, std::uint64_t sample, std::byte* target);
  void count(ServedCount what, std::uint64_t amount) const noexcept;
  bool fetch(const PackReader& reader, std::uint64_t sample, std::span<std::byte> target,
                std::uint32_t tried, std::string& why);
  void read_source(const PackReader& reader, std::uint64_t sample, std::byte* target,
                   const std::string& why);
  const PackReader& source(const PackReader& reader);
  void say_once(const std::string& what) noexcept;

  std::unique_ptr<RangeRequests> requests_;  // none: they cannot be reached
  std::string source_path_;
  std::atomic<const PackReader*> source_{nullptr};  // opened when it is first needed
  std::atomic<bool> has_said_{false};
};

}  // namespace paceline
