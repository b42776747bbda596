"""What `make test` costs: seconds by file and kind of test, processes started, slowest fixtures.

    python bench/suite.py [--json] [--quick]

Runs `scripts/check` and `scripts/test` once and watches them. Processes are counted by the kernel's
process events, which needs root; without it that row is left out. `--quick` runs the unit tests
alone.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

from harness import Report, options, tell

ROOT = Path(__file__).parent.parent
SO_RCVBUFFORCE = 33  # not in the socket module


class ProcessCounter:
    """Counts the processes that descend from one, through the kernel's connector (netlink).

    One thread reads the events; the counts are read after `stop`.
    """

    FORK, EXEC, EXIT = 1, 2, 0x80000000

    def __init__(self, root_pid: int) -> None:
        self.forks = 0
        self.programs: Counter[str] = Counter()
        self._ours = {root_pid}
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        self._socket.bind((0, 1))
        listen = struct.pack("=IIIIHHI", 1, 1, 0, 0, 4, 0, 1)
        self._socket.send(struct.pack("=IHHII", 16 + len(listen), 3, 0, 0, 0) + listen)
        self._socket.settimeout(0.5)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._ended.is_set():
            try:
                data = self._socket.recv(4096)
            except TimeoutError:
                continue
            except OSError:  # events were lost: the counts are a lower bound
                self.programs["(events lost)"] += 1
                continue
            what = struct.unpack_from("=I", data, 36)[0]
            if what == self.FORK:
                _, parent, child, group = struct.unpack_from("=IIII", data, 52)
                if child == group and parent in self._ours:
                    self._ours.add(child)
                    self.forks += 1
            elif what == self.EXEC:
                pid, group = struct.unpack_from("=II", data, 52)
                if pid == group and pid in self._ours:
                    self.programs[_program(pid)] += 1
            elif what == self.EXIT:
                pid, group = struct.unpack_from("=II", data, 52)
                if pid == group:
                    self._ours.discard(pid)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self._socket.close()


def _program(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "(ended)"
    return Path(words[0].decode(errors="replace")).name


def watch(command: list[str], folder: Path) -> dict:
    """Run a command; return its seconds, exit code, and the processes that it started."""
    environ = {
        **os.environ,
        "SUITE_TIMES": str(folder / "times.jsonl"),
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTEST_ADDOPTS": "-p suite_times",
    }
    begin, cpu = time.perf_counter(), os.times()
    with (folder / "output").open("a") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=out, stderr=out)
        counter = None
        if os.geteuid() == 0:
            counter = ProcessCounter(process.pid)
        code = process.wait()
    seconds, after = time.perf_counter() - begin, os.times()
    row = {
        "command": command[0].rpartition("/")[2],
        "seconds": round(seconds, 1),
        "cpu_s": round(sum(after[2:4]) - sum(cpu[2:4]), 1),
        "exit_code": code,
    }
    if counter:
        counter.stop()
        row |= {
            "forks": counter.forks,
            "programs_started": sum(counter.programs.values()),
            "programs": dict(counter.programs.most_common(20)),
        }
    return row


def summarise(times: Path) -> dict:
    """Return seconds by folder and file, and the slowest tests and fixtures."""
    tests: dict[str, float] = defaultdict(float)
    fixtures: dict[str, list[float]] = defaultdict(list)
    outcomes: Counter[str] = Counter()
    for line in times.read_text().splitlines():
        entry = json.loads(line)
        if "fixture" in entry:
            fixtures[entry["fixture"]].append(entry["seconds"])
            continue
        tests[entry["test"]] += entry["seconds"]
        if entry["phase"] == "call" or entry["outcome"] != "passed":
            outcomes[entry["outcome"]] += 1
    files: dict[str, float] = defaultdict(float)
    folders: dict[str, float] = defaultdict(float)
    for test, seconds in tests.items():
        path = test.partition("::")[0]
        files[path] += seconds
        folders["/".join(path.split("/")[:2])] += seconds
    return {
        "outcomes": dict(outcomes),
        "folders": _largest(folders, 20),
        "files": _largest(files, 60),
        "tests": _largest(tests, 60),
        "fixtures": _largest({name: sum(values) for name, values in fixtures.items()}, 40),
    }


def _largest(seconds: dict[str, float], count: int) -> dict[str, float]:
    ordered = sorted(seconds.items(), key=lambda entry: -entry[1])[:count]
    return {name: round(value, 1) for name, value in ordered}


def main() -> int:
    arguments = options(__doc__)
    report = Report("suite", arguments.json)
    folder = Path(tempfile.mkdtemp(prefix="suite-"))
    tests = ["tests/unit", "-n2", "-q"] if arguments.quick else []
    check = watch([str(ROOT / "scripts/check")], folder)
    report.row(**check)
    test = watch([str(ROOT / "scripts/test"), *tests], folder)
    report.row(**test)
    report.row(**summarise(folder / "times.jsonl"))
    report.bar("seconds of `make test`", check["seconds"] + test["seconds"], 600)
    report.bar("exit code", check["exit_code"] or test["exit_code"], 0)
    tell(f"all times and the output: {folder}")
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
