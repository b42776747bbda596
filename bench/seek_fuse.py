"""A folder seen through FUSE, as on one disk: reads that do not continue the last one cost time.

A server of a parallel file system has disks that are fast at long reads and slow at going from one
place to another. Here one thread serves all requests of all processes, in the order in which they
come, and sleeps for each that does not continue the last one.
    python bench/seek_fuse.py SOURCE MOUNT_POINT SEEK_S COUNTS

runs until `fusermount3 -u MOUNT_POINT`, with the packages libfuse3 of the system and mfusepy, and
then writes {"reads", "seeks", "bytes"} to the file COUNTS.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import mfusepy

REQUEST_BYTES = 128 << 10  # of one request of the kernel
FIELDS = ("st_mode", "st_size", "st_uid", "st_gid", "st_nlink")
TIMES = ("st_mtime", "st_ctime", "st_atime")


class SeekingFolder(mfusepy.Operations):
    """Passes reads on to a folder, late where they are not sequential."""

    use_ns = True

    def __init__(self, source, seek_s):
        self._source = source
        self._seek_s = seek_s
        self._head = None  # path and offset behind the last read
        self._never = threading.Event()
        self.counts = {"reads": 0, "seeks": 0, "bytes": 0}

    def init_with_config(self, connection, _):
        connection.max_read = REQUEST_BYTES

    def getattr(self, path, fh=None):
        found = os.lstat(self._source + path)
        times = {name: getattr(found, f"{name}_ns") for name in TIMES}
        return {name: getattr(found, name) for name in FIELDS} | times

    def readdir(self, path, fh):
        return [".", "..", *(entry.name for entry in os.scandir(self._source + path))]

    def open(self, path, flags):
        return os.open(self._source + path, os.O_RDONLY)

    def release(self, path, fh):
        os.close(fh)
        return 0

    def read(self, path, size, offset, fh):
        if self._head != (path, offset):
            self.counts["seeks"] += 1
            self._never.wait(self._seek_s)
        body = os.pread(fh, size, offset)
        self._head = (path, offset + len(body))
        self.counts["reads"] += 1
        self.counts["bytes"] += len(body)
        return body


def main():
    source, point, seek_s, counts = sys.argv[1:]
    folder = SeekingFolder(str(Path(source).absolute()), float(seek_s))
    mfusepy.FUSE(folder, point, foreground=True, nothreads=True, ro=True, max_read=REQUEST_BYTES)
    Path(counts).write_text(json.dumps(folder.counts))


if __name__ == "__main__":
    main()
