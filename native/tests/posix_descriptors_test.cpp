// User-level descriptors of the POSIX shim among threads: posix_descriptors_checks.c.
#include <string>
#include <vector>

#include "check.hpp"
#include "pack_builder.hpp"

extern "C" void check_descriptors(const char* place);

int main() {
  const TemporaryFolder folder;
  std::vector<std::string> bodies(4);
  for (std::size_t sample = 0; sample < bodies.size(); ++sample) {
    for (std::size_t i = 0; i < 5000; ++i) bodies[sample] += static_cast<char>((sample * 31 + i) % 251);
  }
  PackBuilder(bodies).version2().write(folder / "pack");
  check_descriptors((folder / "pack").c_str());
}
