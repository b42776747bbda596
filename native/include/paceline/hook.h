/* How a preloaded library reaches the function before which its hook stands. For C. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

/* A function of the C library that programs call in place of the original. */
#define HOOK __attribute__((visibility("default")))

/* The function of that name behind this library: mostly the C library's. */
#define REAL(name)                                                                       \
  (__extension__({                                                                       \
    static atomic_uintptr_t known_address;                                               \
    uintptr_t address = atomic_load_explicit(&known_address, memory_order_relaxed);      \
    if (address == 0) {                                                                  \
      address = next_function(#name);                                                    \
      atomic_store_explicit(&known_address, address, memory_order_relaxed);              \
    }                                                                                    \
    (__typeof__(&name))address;                                                          \
  }))
uintptr_t next_function(const char* name); /* ends the process with a line on stderr if there is none */
