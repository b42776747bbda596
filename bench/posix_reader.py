"""A process of bench/posix.py that reads files: raw, or through a mount. Sleeps until its turn.

It gets a JSON object as its argument ({"root", "names"}: a folder, and a file with a name a line),
and one a line on stdin ({"do", "seed"}); it answers each with {"files", "bytes", "seconds"}.
"""

import json
import os
import random
import sys
import time
from pathlib import Path


def read(paths):
    total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        total += len(os.read(descriptor, os.fstat(descriptor).st_size))
        os.close(descriptor)
    return total


def open_and_read(paths):
    total = 0
    for path in paths:
        with open(path, "rb") as file:  # noqa: PTH123  # what scripts do
            total += len(file.read())
    return total


def status(paths):
    stat = os.stat
    return sum(stat(path).st_size for path in paths)


WORK = {"read": read, "open": open_and_read, "stat": status}


def main():
    asked = json.loads(sys.argv[1])
    names = Path(asked["names"]).read_text().split("\n")
    paths = [f"{asked['root']}/{name}" for name in names if name]
    print("{}", flush=True)
    for line in sys.stdin:
        turn = json.loads(line)
        order = paths.copy()
        random.Random(turn["seed"]).shuffle(order)
        begin = time.perf_counter()
        total = WORK[turn["do"]](order)
        took = time.perf_counter() - begin
        print(json.dumps({"files": len(order), "bytes": total, "seconds": took}), flush=True)


if __name__ == "__main__":
    main()
