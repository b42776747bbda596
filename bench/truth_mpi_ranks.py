"""A rank of an MPI program of `truth_mpi.py`: `truth_mpi_ranks.py PLAN.json`.

In each step it reads a batch from a file, computes, exchanges messages with its neighbours in a
ring, computes on, and takes part in an all-reduce. It is recorded as any MPI program, and notes by
itself when it entered and left each call: from that follows how long ranks really waited.
"""

from __future__ import annotations

import array
import ctypes
import json
import os
import struct
import sys
import time
import zlib
from multiprocessing.connection import Client
from pathlib import Path

OPEN, READ, WRITE = range(3)  # calls that slow_files.c delays
BATCH_BYTES = 64 << 10
BLOCK = bytes(64 << 10)  # a unit of work is its CRC-32
SUMMED = 2000  # numbers in the all-reduce
TAG = 5
CHANNEL = struct.Struct("<d")  # a message to a helper (truth_ranks.py): seconds


def work(units):
    """Compute for some units."""
    for _ in range(units):
        zlib.crc32(BLOCK)


def unit_s():
    """Return the CPU seconds of a unit of work."""
    rounds = []
    for _ in range(30):
        begin = time.thread_time()
        work(50)
        rounds.append((time.thread_time() - begin) / 50)
    return sorted(rounds)[len(rounds) // 2]


def message_bytes(rank):
    """Return the size of the message that a rank sends to the next one in each step."""
    return 1000 * (rank + 1) + 24


class Rank:
    """What a rank does in a step; the culprit's is slowed as the plan says."""

    def __init__(self, plan, comm):
        self.plan, self.comm = plan, comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.calls = []  # (call, entered, left)
        self.out = bytearray(message_bytes(self.rank))
        self.received = bytearray(message_bytes((self.rank - 1) % self.size))
        self.folder = Path(plan["folder"])
        is_culprit = self.rank == plan["culprit"]
        self.pattern = plan["pattern"] if is_culprit else ""
        self.disk = ctypes.CDLL(plan["slow_files"])
        self.disk.slow_files_arm.argtypes = (ctypes.c_int, ctypes.c_double)
        self.helper = None
        if self.pattern in ("stopped", "hog"):
            self.helper = Client(plan["helper"], "AF_UNIX")
            self.helper.send_bytes(struct.pack("<q", os.getpid()))

    def timed(self, call, function, *arguments, **named):
        begin_ns = time.monotonic_ns()
        function(*arguments, **named)
        self.calls.append((call, begin_ns, time.monotonic_ns()))

    def step(self, number):
        plan, seconds = self.plan, self.plan["seconds"][number] if self.pattern else 0.0
        if self.pattern == "hog":
            self.helper.send_bytes(CHANNEL.pack(seconds))
        self.read_batch(seconds)
        units = plan["units"]
        work(units - units // 3)
        time.sleep(plan["device_s"])
        if seconds and self.pattern == "late sender":
            work(round(seconds / plan["unit_s"]))
        if seconds and self.pattern == "stopped":
            self.helper.send_bytes(CHANNEL.pack(seconds))
            self.helper.recv_bytes()  # a stop while the rank waits would cost nothing
        self.exchange()
        work(units // 3)
        if seconds and self.pattern == "imbalance":
            work(round(seconds / plan["unit_s"]))
        if seconds and self.pattern == "checkpoint":
            self.write_checkpoint(seconds)
        total = array.array("d", bytes(8 * SUMMED))
        self.timed("all_reduce", self.comm.Allreduce, array.array("d", [1.0] * SUMMED), total)

    def read_batch(self, seconds):
        if seconds and self.pattern == "slow loader":
            self.disk.slow_files_arm(OPEN, seconds)
        descriptor = os.open(self.folder / "batch", os.O_RDONLY)
        if seconds and self.pattern == "slow disk":
            self.disk.slow_files_arm(READ, seconds)
        os.read(descriptor, BATCH_BYTES)
        os.close(descriptor)

    def write_checkpoint(self, seconds):
        descriptor = os.open(self.folder / "checkpoint", os.O_WRONLY | os.O_CREAT)
        self.disk.slow_files_arm(WRITE, seconds)
        os.write(descriptor, BLOCK)
        os.close(descriptor)

    def exchange(self):
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        if self.plan["blocking"]:
            self.timed("send", self.comm.Send, self.out, dest=following, tag=TAG)
            self.timed("recv", self.comm.Recv, self.received, source=previous, tag=TAG)
            return
        from mpi4py import MPI

        requests = []

        def receive():
            requests.append(self.comm.Irecv(self.received, source=previous, tag=TAG))

        def send():
            requests.append(self.comm.Isend(self.out, dest=following, tag=TAG))

        self.timed("irecv", receive)
        self.timed("isend", send)
        self.timed("wait_all", MPI.Request.Waitall, requests)


def main():
    from mpi4py import MPI

    plan = json.loads(Path(sys.argv[1]).read_text())
    comm = MPI.COMM_WORLD
    os.sched_setaffinity(0, plan["cores"][comm.Get_rank()])
    rank = Rank(plan, comm)
    rank.timed("barrier", comm.Barrier)
    for number in range(plan["steps"]):
        rank.step(number)
        if plan["marks"]:
            MPI.Pcontrol(1)
    (rank.folder / f"calls-{rank.rank}.json").write_text(json.dumps(rank.calls))


if __name__ == "__main__":
    main()
