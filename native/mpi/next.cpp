#include "next.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "abi.hpp"

namespace paceline::mpi {
namespace {

#if PACELINE_MPI_ABI == PACELINE_OPENMPI
constexpr const char* library_names[] = {"libmpi.so.40"};
#elif PACELINE_MPI_ABI == PACELINE_MPICH
constexpr const char* library_names[] = {"libmpi.so.12", "libmpich.so.12", "libmpi_cray.so.12"};
#else
constexpr const char* library_names[] = {"libmpi_abi.so.0", "libmpi_abi.so.1"};
#endif

// The MPI as a program has loaded it, under whatever name: a link may lack the number.
int take_library(dl_phdr_info* info, std::size_t, void* found) {
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* name = slash == nullptr ? info->dlpi_name : slash + 1;
  if (std::strncmp(name, "libmpi.so", 9) != 0 && std::strncmp(name, "libmpich.so", 11) != 0 &&
      std::strncmp(name, "libmpi_abi.so", 13) != 0) {
    return 0;
  }
  *static_cast<void**>(found) = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  return *static_cast<void**>(found) != nullptr ? 1 : 0;
}

void* library() noexcept {
  for (const char* name : library_names) {
    if (void* found = dlopen(name, RTLD_LAZY | RTLD_NOLOAD); found != nullptr) return found;
  }
  void* found = nullptr;
  dl_iterate_phdr(take_library, &found);
  return found;
}

}  // namespace

void* find_next(const char* name) noexcept {
  void* found = dlsym(RTLD_NEXT, name);
  if (found == nullptr) {
    if (void* mpi = library(); mpi != nullptr) found = dlsym(mpi, name);
  }
  return found;
}

void fail_missing(const char* name) noexcept {
  std::fprintf(stderr, "paceline: the MPI of this program has no %s\n", name);
  std::abort();
}

#if PACELINE_MPI_ABI == PACELINE_OPENMPI
void* object(const char* name) noexcept {
  // A program may hold the object itself, which the library then uses, too (a copy relocation).
  void* found = dlsym(RTLD_DEFAULT, name);
  if (found == nullptr) found = find_next(name);
  if (found == nullptr) fail_missing(name);
  return found;
}
#elif PACELINE_MPI_ABI == PACELINE_STANDARD
bool was_cancelled(const Status& status) noexcept {
  static Next<int(const Status*, int*)> test("PMPI_Test_cancelled");
  int cancelled = 0;
  return test.get()(&status, &cancelled) == success && cancelled != 0;
}

std::uint64_t byte_count(const Status& status) noexcept {
  static Next<int(const Status*, Datatype, Count*)> get("PMPI_Get_count_c");
  Count count = 0;
  const bool known = get.get()(&status, handle(0x247), &count) == success && count > 0;
  return known ? static_cast<std::uint64_t>(count) : 0;
}
#endif

}  // namespace paceline::mpi
