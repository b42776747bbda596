// A library of the system that is loaded when it is first asked for: neither its header nor the library
// is needed to build, or to run what does not use it.
#pragma once

#include <dlfcn.h>

namespace paceline {

class SharedLibrary {
 public:
  explicit SharedLibrary(const char* name) noexcept
      : handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {}  // never closed

  // Sets `function` to the one of that name; returns whether there is one.
  template <class Function>
  bool find(const char* name, Function& function) const noexcept {
    function = handle_ == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(handle_, name));
    return function != nullptr;
  }

 private:
  void* handle_;
};

}  // namespace paceline
