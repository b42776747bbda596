/* The files that a process uses, and what it does with them.

   The rows lie in memory that forked processes share: a data loader's workers count in the rows of their rank.
   A row is filled once and stays. What comes when all rows are taken is counted together. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "paceline/io_calls.h"

enum { most_files = 4096, most_descriptors = 1 << 16 };

/* A call for a file, from before it is made until it has returned. */
typedef struct {
  unsigned file; /* 0: none that is recorded */
  uint64_t begin_ns;
} Use;

/* The row of a path, relative to `folder` or AT_FDCWD; 0 if it is not recorded. */
unsigned file_of_path(int folder, const char* path);
/* The row of an open file; 0 if it is not recorded. */
unsigned file_of(int descriptor);
/* A descriptor means a file from now on. */
void descriptor_opened(int descriptor, unsigned file);
void descriptor_closed(int descriptor);

Use use_begins(unsigned file);
/* `bytes` below 0 is a call that failed: it counts, without bytes. Keeps errno. */
void use_ends(Use use, IoOperation operation, ssize_t bytes);
