"""The two ranks of store_mpi.py: rank 0 reads files, rank 1 has the shards.

    mpiexec -n 2 python bench/store_mpi_ranks.py JSON

Rank 0 prints one JSON object: of each size the rates and the processor time of all ways, whether a
target that is outside of MPI serves a Get, and what waiting costs. Over a Unix socket, which is
outside of MPI, it tells rank 1 what to do:

    outside     wait in the kernel, outside of MPI
    inside      wait in a receive of MPI, which serves what arrives meanwhile
    messages    answer requests by messages
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import socket
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI
from store_remote import DEPTH, Round, cpu_s, read_batches

from paceline import store
from paceline.native import crc32c
from paceline.store.serve.remote_pack import open_remote

ASK, BODY, END = 1, 2, 3  # tags
PROGRESS_S = 2.0
IDLE_S = 1.0
COMM = MPI.COMM_WORLD


def shard_of(place):
    """Return the bytes of a pack's only shard, mapped; MPI wants memory that may be written."""
    with store.open_pack(place) as pack, pack.index.shard_path(0).open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)


class Windows:
    """The windows over a shard: its mapping, and where ranks may share memory, a copy in that."""

    def __init__(self, shard, shares_memory):
        own = shard if COMM.rank == 1 else MPI.BOTTOM
        self.by_way = {"rma": MPI.Win.Create(own, comm=COMM)}
        if shares_memory:
            size = shard.size if COMM.rank == 1 else 0
            window = MPI.Win.Allocate_shared(size, comm=COMM)
            if COMM.rank == 1:
                np.frombuffer(window.tomemory(), np.uint8)[:] = shard
            self.by_way["rma, shared memory"] = window
        COMM.Barrier()

    def free(self):
        """Free them, both ranks at a time."""
        for window in self.by_way.values():
            window.Free()


# --- rank 1 --------------------------------------------------------------------------------------


def serve_messages(shard):
    """Answer lists of ranges until one is empty."""
    ranges = np.empty((DEPTH, 2), np.int64)
    status = MPI.Status()
    while True:
        COMM.Recv(ranges, 0, ASK, status)
        count = status.Get_count(MPI.INT64_T) // 2
        if count == 0:
            return
        bodies = [shard[begin : begin + length] for begin, length in ranges[:count].tolist()]
        MPI.Request.Waitall([COMM.Isend(body, 0, BODY) for body in bodies])


def serve(control, shard):
    """Do what rank 0 says, and say what it took, until rank 0 goes on to another size."""
    while (do := control.readline().strip()) != "next":
        cpu, begin = time.process_time(), time.perf_counter()
        print("begun", file=control, flush=True)
        if do == "inside":
            COMM.Recv(np.empty(0, np.uint8), 0, END)
        elif do == "messages":
            serve_messages(shard)
        else:
            control.readline()
        print(time.process_time() - cpu, time.perf_counter() - begin, file=control, flush=True)


# --- rank 0 --------------------------------------------------------------------------------------


class Target:
    """Rank 1, as rank 0 sees it."""

    def __init__(self, control):
        self._control = control

    @contextlib.contextmanager
    def doing(self, what):
        """Have it do something; yields a list that then gets its CPU and wall time, in s."""
        print(what, file=self._control, flush=True)
        self._control.readline()
        took = []
        yield took
        if what == "inside":
            COMM.Send(np.empty(0, np.uint8), 1, END)
        elif what == "messages":
            COMM.Send(np.empty(0, np.int64), 1, ASK)
        else:
            print("end", file=self._control, flush=True)
        took += map(float, self._control.readline().split())

    def go_on(self):
        print("next", file=self._control, flush=True)


def batches(work, out):
    """Yield the ranges of each batch, where to put them, and check what came."""
    for at in range(0, len(work.ranges), DEPTH):
        ranges = work.ranges[at : at + DEPTH]
        ends = list(itertools.accumulate(length for _, length in ranges))
        places = [out[end - length : end] for end, (_, length) in zip(ends, ranges, strict=True)]
        yield ranges, places
        if [crc32c(place) for place in places] != work.checksums[at : at + DEPTH]:
            sys.exit("MPI brought wrong bytes")


def get_batches(window, work, out):
    """Get files with `DEPTH` of them in flight."""
    for ranges, places in batches(work, out):
        for (begin, length), place in zip(ranges, places, strict=True):
            window.Get(place, 1, (begin, length, MPI.BYTE))
        window.Flush(1)


def receive_batches(work, out):
    """Ask for files with `DEPTH` of them in flight."""
    for ranges, places in batches(work, out):
        requests = [COMM.Irecv(place, 1, BODY) for place in places]
        COMM.Send(np.array(ranges, np.int64), 1, ASK)
        MPI.Request.Waitall(requests)


def serves_outside(window, target, out):
    """Return whether a Get completes while its target is outside of MPI."""
    with target.doing("outside"):
        request = window.Rget(out, 1, (0, out.size, MPI.BYTE))
        end_s = time.perf_counter() + PROGRESS_S
        while not (is_done := request.Test()) and time.perf_counter() < end_s:
            pass
    if not is_done:
        with target.doing("inside"):
            request.Wait()
    return is_done


def measure_waiting(target, node_pid):
    """Return the share of a core that each takes which waits for requests."""
    never = threading.Event()
    found = {}
    before = cpu_s(node_pid)
    for what in ("outside", "inside"):
        with target.doing(what) as took:
            never.wait(IDLE_S)
        found[f"target {what} of MPI"] = took[0] / took[1]
    found["node, TCP"] = (cpu_s(node_pid) - before) / (2 * IDLE_S)
    return found


class CheckedRound(Round):
    """What one round reads, with the checksums of the files."""

    def __init__(self, pack, seed, quick):
        super().__init__(pack, seed, quick)
        self.checksums = [pack.extents(int(sample))[0].checksum for sample in self.ids]


def measure_size(asked, size, target, windows):
    """Let the ways take turns over files of one size; return rates, CPU times, and waits."""
    place = size["place"]
    with (
        store.open_pack(place) as pack,
        open_remote(place, [size["node"]], maps_files=False) as remote,
        open_remote(place, [size["node"]]) as near,
    ):
        out = np.ones(DEPTH * int(pack.lengths[0]), np.uint8)
        outside = {}
        with target.doing("inside"):
            for window in windows.values():
                window.Lock_all()
                get_batches(window, CheckedRound(pack, 0, quick=True), out)
        for name, window in windows.items():
            outside[name] = serves_outside(window, target, out[: out.size // DEPTH])

        ways = {
            "mapped": ("outside", lambda r: read_batches(near, r.ids, out)),
            "tcp": ("outside", lambda r: read_batches(remote, r.ids, out)),
            "messages": ("messages", lambda r: receive_batches(r, out)),
        }
        for name, window in windows.items():
            where = "outside" if outside[name] else "inside"
            ways[name] = where, lambda r, w=window: get_batches(w, r, out)
        rates, cpu = {name: [] for name in ways}, dict.fromkeys(ways, 0.0)
        files = 0
        for number in range(1 + asked["rounds"]):
            work = CheckedRound(pack, number, asked["quick"])
            for name, (where, run) in ways.items():
                out[:] = 0
                before = cpu_s(size["pid"])
                with target.doing(where) as took:
                    own, begin = time.process_time(), time.perf_counter()
                    run(work)
                    wall_s = time.perf_counter() - begin
                    own = time.process_time() - own
                if number > 0:  # the first warms up
                    rates[name].append(len(work.ids) / wall_s)
                    cpu[name] += own + took[0] + cpu_s(size["pid"]) - before
            files += len(work.ids) if number > 0 else 0
        waiting = measure_waiting(target, size["pid"])
    return {
        "rates": {
            name: [statistics.median(found), min(found), max(found)]
            for name, found in rates.items()
        },
        "cpu_us_per_file": {name: total / files * 1e6 for name, total in cpu.items()},
        "serves_outside": outside,
        "waiting": waiting,
    }


def main():
    asked = json.loads(sys.argv[1])
    path = asked["control"]
    listener = None
    if COMM.rank == 0:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
    COMM.Barrier()
    if COMM.rank == 0:
        connection, _ = listener.accept()
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
    control = connection.makefile("rw")
    target = Target(control)
    found = {}
    for name, size in asked["sizes"].items():
        shard = shard_of(size["place"])
        windows = Windows(shard, asked["shares_memory"])
        if COMM.rank == 1:
            serve(control, shard)
        else:
            found[name] = measure_size(asked, size, target, windows.by_way)
            target.go_on()
            for window in windows.by_way.values():
                window.Unlock_all()
        windows.free()
    if COMM.rank == 0:
        Path(path).unlink()
        print(json.dumps({"sizes": found, "library": MPI.Get_library_version()}), flush=True)


if __name__ == "__main__":
    main()
