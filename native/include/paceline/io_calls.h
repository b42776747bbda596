/* What the library that sees the calls for files (native/io) gives to the recorder of its process. Found by
   dlsym: a process without the preloaded library has none of these functions.

       program --read(3, ...)--> native/io --> the C library
                                    |  counts it in the file's row
                                    +--> the attached recorder, if the call took long

   All times are nanoseconds of CLOCK_MONOTONIC. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  IO_OPEN,
  IO_STAT,
  IO_LIST, /* reads of a folder */
  IO_READ,
  IO_WRITE,
  IO_SYNC,
  IO_MAP, /* mmap: what is read by it shows as page faults */
  IO_CLOSE,
  IO_OPERATIONS
} IoOperation;

/* A call that took long. */
typedef struct {
  IoOperation operation;
  const char* path; /* absolute */
  uint64_t begin_ns;
  uint64_t end_ns;
  uint64_t bytes; /* that were read or written; of a map its length */
} IoCall;

/* All calls for a file, of this process and of the processes that it forked. */
typedef struct {
  const char* path; /* or a name in parentheses for many files together */
  uint64_t count[IO_OPERATIONS];
  uint64_t ns[IO_OPERATIONS];
  uint64_t bytes[IO_OPERATIONS];
  uint32_t most_at_once; /* calls that were under way at one time */
} IoFile;

/* Has `sink` called by each thread whose call lasted `least_ns` or longer; NULL: no longer. */
void paceline_io_attach(void (*sink)(const IoCall* call), uint64_t least_ns);
/* Calls `each` for every file. */
void paceline_io_files(void (*each)(const IoFile* file, void* context), void* context);
/* Time that the calling thread has spent in calls that fetch: open, stat, list, read, map. */
uint64_t paceline_io_fetch_ns(void);

#ifdef __cplusplus
}
#endif
