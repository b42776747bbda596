"""A process of bench/posix_writes.py that writes files and reads them back. Sleeps until its turn.

It gets a JSON object as its argument ({"root", "size", "count"}) and a line on stdin for each turn;
it answers each with {"seconds"}: of creating, writing, closing, opening, reading and closing.
"""

import json
import os
import sys
import time


def write_and_read(path, body, buffer):
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
    done = os.write(descriptor, body)
    os.close(descriptor)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    count = os.readv(descriptor, [buffer])
    os.close(descriptor)
    if (done, count) != (len(body), len(body)):
        sys.exit(f"{path}: {done} bytes written, {count} read")


def main():
    asked = json.loads(sys.argv[1])
    body = os.urandom(asked["size"])
    buffer = bytearray(len(body))
    print("{}", flush=True)
    for turn, _ in enumerate(sys.stdin):
        paths = [f"{asked['root']}/{turn}-{number}" for number in range(asked["count"])]
        begin = time.perf_counter()
        for path in paths:
            write_and_read(path, body, buffer)
        took = time.perf_counter() - begin
        if buffer != body:
            sys.exit("other bytes were read than written")
        for path in paths:
            os.unlink(path)  # noqa: PTH108  # as the rest
        print(json.dumps({"seconds": took}), flush=True)


if __name__ == "__main__":
    main()
