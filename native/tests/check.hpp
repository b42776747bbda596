// The test framework: CHECK says where and what, and ends the program.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);   \
      std::abort();                                                                    \
    }                                                                                  \
  } while (false)

#define CHECK_THROWS(expression, type)                                                 \
  do {                                                                                 \
    bool thrown = false;                                                               \
    try {                                                                              \
      static_cast<void>(expression);                                                   \
    } catch (const type&) {                                                            \
      thrown = true;                                                                   \
    }                                                                                  \
    CHECK(thrown && #expression " throws " #type);                                     \
  } while (false)

// A folder that is gone with its owner.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "paceline-XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};
