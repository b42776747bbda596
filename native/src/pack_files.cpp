// The files and folders of a pack: calls of the reader, its errors turned into errnos.
#include "paceline/pack_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <string_view>

#include "paceline/fault_guard.hpp"
#include "paceline/pack_index.hpp"
#include "paceline/pack_reader.hpp"
#include "paceline/served_files.hpp"

using paceline::PackError;
using paceline::PackIndex;
using paceline::PackReader;
using paceline::ReadOptions;
using paceline::report;
using paceline::ServedFiles;

struct PackFiles {
  PackFiles(const char* place, bool maps_shards, const char* requests, const char* source)
      : path(place),
        reader(place, ReadOptions{.lazy = !maps_shards}),
        served(requests == nullptr ? nullptr : std::make_unique<ServedFiles>(requests, source)) {
    struct stat status {};
    if (stat(reader.index().path().c_str(), &status) != 0) return;
    user = status.st_uid;
    group = status.st_gid;
    mtime_ns = std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
  }
  std::string path;
  PackReader reader;
  std::unique_ptr<ServedFiles> served;  // none: all of it is here
  std::uint32_t user = 0;
  std::uint32_t group = 0;
  std::int64_t mtime_ns = 0;  // of the index: folders have none of their own
};

void paceline::report(const std::string& where, const std::string& what) noexcept {
  const std::string line = "paceline: " + where + ": " + what + "\n";
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) return;  // nobody reads it
}

namespace {

constexpr std::uint64_t folder_bytes = 4096;
constexpr std::uint32_t folder_mode = S_IFDIR | 0755;
constexpr std::uint32_t no_mode = S_IFREG | 0644;  // of samples that come without one

int explain(const PackFiles* pack, const PackError& problem) {
  std::string why = problem.what();
  if (problem.kind == PackError::Kind::library) why = "needs the library " + problem.file;
  if (!problem.name.empty()) why = problem.name + ": " + why;
  if (problem.kind != PackError::Kind::library) why += " (" + problem.file + ")";
  report(pack->path, why);
  return problem.kind == PackError::Kind::memory ? ENOMEM : EIO;
}

// Calls `work`, which returns an errno; whatever it throws becomes one.
template <class Work>
int translated(const PackFiles* pack, Work&& work) noexcept {
  const int before = errno;
  try {
    const int problem = work();
    errno = before;
    return problem;
  } catch (const PackError& problem) {
    return explain(pack, problem);
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  } catch (const std::exception& problem) {
    report(pack->path, problem.what());
    return EIO;
  }
}

struct Contents {  // of a folder: itself and what lies below it, at any depth
  std::uint64_t first_folder;
  std::uint64_t folders_end;
  std::uint64_t first_sample;
  std::uint64_t samples_end;
};

Contents contents(const PackIndex& index, std::uint64_t folder) {
  if (folder == 0) return {0, index.folder_count(), 0, index.sample_count()};
  const auto [first, end] = index.folder_samples(folder - 1);
  return {folder, index.folder_end(folder - 1), first, end};
}

// Calls `found` with each direct entry of a folder behind `after`: its folders, then its samples, as long
// as it returns true. An entry of another folder has nothing behind it.
template <class Found>
void each_entry(const PackIndex& index, std::uint64_t folder, bool with_samples, PackEntry after,
                Found&& found) {
  const Contents inside = contents(index, folder);
  if (after.kind != PACK_FILE) {
    std::uint64_t i = inside.first_folder;
    if (after.kind == PACK_FOLDER) {
      if (after.number <= i || after.number > inside.folders_end) return;
      i = index.folder_end(after.number - 1);
    }
    for (; i < inside.folders_end; i = index.folder_end(i)) {
      if (!found(PackEntry{PACK_FOLDER, i + 1})) return;
    }
  }
  if (!with_samples) return;
  std::uint64_t sample = after.kind == PACK_FILE ? after.number + 1 : inside.first_sample;
  if (sample < inside.first_sample) return;
  for (std::uint64_t i = inside.first_folder; i < inside.folders_end; i = index.folder_end(i)) {
    const auto [first, end] = index.folder_samples(i);
    for (; sample < first; ++sample) {
      if (!found(PackEntry{PACK_FILE, sample})) return;
    }
    sample = std::max(sample, end);
  }
  for (; sample < inside.samples_end; ++sample) {
    if (!found(PackEntry{PACK_FILE, sample})) return;
  }
}

template <class Found>
void each_entry(const PackIndex& index, std::uint64_t folder, bool with_samples, Found&& found) {
  each_entry(index, folder, with_samples, {}, [&](PackEntry entry) {
    found(entry);
    return true;
  });
}

std::uint64_t inode(const PackIndex& index, PackEntry entry) {
  return entry.kind == PACK_FOLDER ? 1 + entry.number : 2 + index.folder_count() + entry.number;
}

PackStatus status_of(const PackFiles& pack, PackEntry entry) {
  const PackIndex& index = pack.reader.index();
  if (entry.kind == PACK_FOLDER) {
    std::uint64_t links = 2;  // its own name, and the ".." of each folder in it
    each_entry(index, entry.number, /*with_samples=*/false, [&](PackEntry) { ++links; });
    return {inode(index, entry), folder_bytes, links, pack.mtime_ns, folder_mode, pack.user,
            pack.group};
  }
  const std::uint32_t mode = index.modes()[entry.number];
  return {inode(index, entry), pack.reader.checked_length(entry.number), 1,
          index.mtimes()[entry.number], S_IFREG | ((mode == 0 ? no_mode : mode) & 07777U),
          pack.user, pack.group};
}

int find(const PackIndex& index, std::string_view name, PackEntry& entry) {
  if (name.empty()) {
    entry = {PACK_FOLDER, 0};
    return 0;
  }
  if (const std::int64_t sample = index.find(name); sample >= 0) {
    entry = {PACK_FILE, static_cast<std::uint64_t>(sample)};
    return 0;
  }
  if (const std::int64_t folder = index.find_folder(name); folder >= 0) {
    entry = {PACK_FOLDER, static_cast<std::uint64_t>(folder) + 1};
    return 0;
  }
  const std::size_t slash = name.rfind('/');
  if (slash == name.npos) return ENOENT;
  PackEntry parent{};
  const int problem = find(index, name.substr(0, slash), parent);
  if (problem != 0) return problem;
  return parent.kind == PACK_FILE ? ENOTDIR : ENOENT;
}

}  // namespace

paceline::PackFilesOwner paceline::open_pack_files(const std::string& place) {
  return PackFilesOwner(new PackFiles(place.c_str(), /*maps_shards=*/true, nullptr, nullptr));
}

PackFiles* pack_files_open(const char* place, const char* requests, const char* source) {
  try {
    // Each program of a job opens the pack, and many ask for names only: a shard is mapped when it is read.
    return new PackFiles(place, /*maps_shards=*/false, requests, source);
  } catch (const std::exception& problem) {
    report(place, std::string("cannot be mounted: ") + problem.what());
    return nullptr;
  }
}

void pack_files_close(PackFiles* pack) { delete pack; }

int pack_files_find(PackFiles* pack, const char* name, size_t length, PackEntry* entry,
                    PackStatus* status) {
  return translated(pack, [&] {
    volatile int problem = EIO;
    pack->reader.index().read([&] {
      problem = find(pack->reader.index(), {name, length}, *entry);
      if (problem == 0 && status != nullptr) *status = status_of(*pack, *entry);
    });
    return static_cast<int>(problem);
  });
}

int pack_files_status(PackFiles* pack, PackEntry entry, PackStatus* status) {
  return translated(pack, [&] {
    pack->reader.index().read([&] { *status = status_of(*pack, entry); });
    return 0;
  });
}

PackEntry pack_files_entry(PackFiles* pack, uint64_t inode) {
  const PackIndex& index = pack->reader.index();
  if (inode >= 1 && inode <= 1 + index.folder_count()) return {PACK_FOLDER, inode - 1};
  const std::uint64_t sample = inode - 2 - index.folder_count();
  if (inode < 1 || sample >= index.sample_count()) return {};
  return {PACK_FILE, sample};
}

int pack_files_name(PackFiles* pack, PackEntry entry, char* name, size_t* length) {
  return translated(pack, [&] {
    const PackIndex& index = pack->reader.index();
    const bool is_there = entry.kind == PACK_FILE ? entry.number < index.sample_count()
                                                  : entry.number <= index.folder_count();
    if (!is_there) return ENOENT;  // of a program that was started with another pack
    volatile int problem = 0;
    index.read([&] {
      const bool is_file = entry.kind == PACK_FILE;
      const std::string_view found = is_file            ? index.name(entry.number)
                                     : entry.number > 0 ? index.folder(entry.number - 1)
                                                        : std::string_view();
      if (found.size() >= PATH_MAX) {
        problem = ENAMETOOLONG;
        return;
      }
      *length = found.size();
      if (!found.empty()) std::memcpy(name, found.data(), found.size());
    });
    return static_cast<int>(problem);
  });
}

int pack_files_list(PackFiles* pack, uint64_t folder, PackEntry** entries, size_t* count) {
  *entries = nullptr;
  *count = 0;
  const int problem = translated(pack, [&] {
    const PackIndex& index = pack->reader.index();
    index.read([&] { each_entry(index, folder, true, [&](PackEntry) { *count += 1; }); });
    if (*count == 0) return 0;
    const std::size_t room = *count;
    auto* const found = static_cast<PackEntry*>(std::malloc(room * sizeof(PackEntry)));
    if (found == nullptr) return ENOMEM;
    *entries = found;
    *count = 0;
    index.read([&] {
      each_entry(index, folder, true, [&](PackEntry entry) {
        if (*count < room) found[(*count)++] = entry;
      });
    });
    return 0;
  });
  if (problem != 0) {
    std::free(*entries);
    *entries = nullptr;
  }
  return problem;
}

int pack_files_each(PackFiles* pack, uint64_t folder, PackEntry after, PackFound found, void* state) {
  return translated(pack, [&] {
    const PackIndex& index = pack->reader.index();
    index.read([&] {
      each_entry(index, folder, true, after, [&](PackEntry entry) {
        const bool is_file = entry.kind == PACK_FILE;
        std::string_view name = is_file ? index.name(entry.number) : index.folder(entry.number - 1);
        name.remove_prefix(name.rfind('/') + 1);  // npos + 1 is 0
        PackStatus status{};
        bool is_known = true;
        try {
          status = status_of(*pack, entry);
        } catch (const PackError&) {
          is_known = false;
        }
        return found(state, entry, name.data(), name.size(), is_known ? &status : nullptr);
      });
    });
    return 0;
  });
}

uint64_t pack_files_inode(PackFiles* pack, PackEntry entry) {
  return inode(pack->reader.index(), entry);
}

int pack_files_read_stored(PackFiles* pack, uint64_t sample, void* target) {
  if (pack->served != nullptr) return ENOTSUP;  // it may be elsewhere, or damaged here only
  return translated(pack, [&] {
    auto single = pack->reader.find_single(sample, /*only_mapped=*/true);
    if (!single) return ENOTSUP;
    single->target = static_cast<std::byte*>(target);
    pack->reader.read_single(*single);
    return 0;
  });
}

int pack_files_read(PackFiles* pack, uint64_t sample, void* target) {
  return translated(pack, [&] {
    auto* const bytes = static_cast<std::byte*>(target);
    if (pack->served != nullptr) {
      pack->served->read(pack->reader, sample, bytes);
    } else {
      paceline::read_sample(pack->reader, sample, bytes);
    }
    return 0;
  });
}

int pack_files_view(PackFiles* pack, uint64_t sample, const void** bytes) {
  *bytes = nullptr;
  return translated(pack, [&] {
    const std::int64_t ids[] = {static_cast<std::int64_t>(sample)};
    if (pack->served != nullptr && !pack->served->is_here(pack->reader, sample)) return 0;
    try {
      const ServedFiles::Timed timed(pack->served.get());
      const auto views = pack->reader.views(ids);
      if (views[0] && !views[0]->empty()) {
        *bytes = views[0]->data();
        if (pack->served != nullptr) pack->served->note_local(views[0]->size());
      }
    } catch (const PackError& problem) {
      // What is damaged here is read from another node.
      if (pack->served == nullptr || problem.kind == PackError::Kind::memory) throw;
    }
    return 0;
  });
}

int pack_files_copy(void* target, const void* view, size_t size) {
  const paceline::FaultRange range({static_cast<const std::byte*>(view), size});
  return paceline::completes(range, [&] { std::memcpy(target, view, size); }) ? 0 : EIO;
}
