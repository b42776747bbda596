"""A rank of a ring program of `truth_ring.py`: on MPI, `truth_ring_ranks.py PLAN.json`.

In each step it reads a batch from a file, computes, exchanges messages with its neighbours in a
ring, computes on, and takes part in an all-reduce. On MPI it is recorded as any MPI program; on
torch/gloo by the recorder and the collector of `paceline run --record-io`. It notes by itself when
it entered and left each call, and the CPU time of the work that is the same on all ranks: from that
follows how long ranks really waited, which was really late, and whether its core was slower.
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

import truth_ranks

OPEN, READ, WRITE = range(3)  # calls that slow_files.c delays
BATCH_BYTES = 64 << 10
BLOCK = bytes(64 << 10)  # a unit of work is its CRC-32
SUMMED = 2000  # numbers in the all-reduce
TAG = 5


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


class MpiCalls:
    """Calls of mpi4py."""

    sends_at_once = True  # a send of so few bytes is over before it is received
    issued_ns = 0  # a call is issued as it is entered

    def __init__(self, out, received, previous, following):
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.out, self.received = out, received
        self.own, self.total = (array.array("d", [1.0] * SUMMED) for _ in range(2))
        self.source = {"source": previous, "tag": TAG}
        self.destination = {"dest": following, "tag": TAG}

    def send(self):
        self.comm.Send(self.out, **self.destination)

    def recv(self):
        self.comm.Recv(self.received, **self.source)

    def isend(self):
        return self.comm.Isend(self.out, **self.destination)

    def irecv(self):
        return self.comm.Irecv(self.received, **self.source)

    def wait_all(self, requests):
        self.mpi.Request.Waitall(requests)

    def all_reduce(self):
        self.comm.Allreduce(self.own, self.total)

    def barrier(self):
        self.comm.Barrier()

    def end_step(self):
        self.mpi.Pcontrol(1)


class GlooCalls:
    """Calls of torch.distributed on gloo; where one blocks, it is waited for at once.

    Attributes:
        issued_ns: when the last call that blocks had been issued: what it took before, it took
            torch, and the recorder, to do that.
    """

    sends_at_once = False  # a send is over when the other side receives

    def __init__(self, out, received, previous, following):
        import torch
        import torch.distributed

        import paceline

        self.distributed = torch.distributed
        self.out = torch.frombuffer(out, dtype=torch.uint8)
        self.received = torch.frombuffer(received, dtype=torch.uint8)
        self.total = torch.ones(SUMMED, dtype=torch.float64)
        self.previous, self.following = previous, following
        self.issued_ns = 0
        self.end_step = paceline.step

    def _wait(self, request):
        self.issued_ns = time.monotonic_ns()
        request.wait()

    def send(self):
        self._wait(self.isend())

    def recv(self):
        self._wait(self.irecv())

    def isend(self):
        return self.distributed.isend(self.out, self.following, tag=TAG)

    def irecv(self):
        return self.distributed.irecv(self.received, self.previous, tag=TAG)

    def wait_all(self, requests):
        for request in requests:
            request.wait()

    def all_reduce(self):
        self._wait(self.distributed.all_reduce(self.total, async_op=True))

    def barrier(self):
        self._wait(self.distributed.barrier(async_op=True))


class Rank:
    """What a rank does in a step; the culprit's is slowed as the plan says."""

    def __init__(self, plan, calls, rank, size):
        self.plan, self.rank = plan, rank
        self.noted = []  # (call, entered, issued, left)
        self.computed_ns = []  # CPU time by step of the work that is the same on all ranks
        previous, following = (rank - 1) % size, (rank + 1) % size
        out, received = bytearray(message_bytes(rank)), bytearray(message_bytes(previous))
        self.calls = calls(out, received, previous, following)
        # If all ranks sent first, each would wait for the next one to receive.
        self.sends_first = self.calls.sends_at_once or rank == (plan["culprit"] or 0)
        self.files = Path(plan["files"])
        self.pattern = plan["pattern"] if rank == plan["culprit"] else ""
        self.disk = ctypes.CDLL(plan["slow_files"])
        self.disk.slow_files_arm.argtypes = (ctypes.c_int, ctypes.c_double)
        self.helper = None
        if self.pattern in ("stopped", "hog"):
            self.helper = Client(plan["helper"], "AF_UNIX")
            self.helper.send_bytes(struct.pack("<q", os.getpid()))

    def run(self):
        """Perform all steps, and write what was noted."""
        plan = self.plan
        self.timed("barrier", self.calls.barrier)
        for number in range(plan["steps"]):
            self.step(plan["seconds"][number] if self.pattern else 0.0)
            if plan["marks"]:
                self.calls.end_step()
        notes = {"calls": self.noted, "computed_ns": self.computed_ns}
        (Path(plan["folder"]) / f"notes-{self.rank}.json").write_text(json.dumps(notes))

    def timed(self, call, function, *arguments):
        begin_ns = time.monotonic_ns()
        result = function(*arguments)
        left_ns = time.monotonic_ns()
        issued_ns = left_ns if call in ("isend", "irecv") else max(begin_ns, self.calls.issued_ns)
        self.noted.append((call, begin_ns, issued_ns, left_ns))
        return result

    def step(self, seconds):
        plan = self.plan
        self.computed_ns.append(0)
        if seconds and self.pattern == "hog":
            self.helper.send_bytes(truth_ranks.CHANNEL.pack(seconds))
        self.read_batch(seconds)
        units = plan["units"]
        self.compute(units - units // 3)
        time.sleep(plan["device_s"])
        if seconds and self.pattern == "late sender":
            work(round(seconds / plan["unit_s"]))
        if seconds and self.pattern == "stopped":
            self.helper.send_bytes(truth_ranks.CHANNEL.pack(seconds))
            self.helper.recv_bytes()  # a stop while the rank waits would cost nothing
        self.exchange()
        self.compute(units // 3)
        if seconds and self.pattern == "imbalance":
            work(round(seconds / plan["unit_s"]))
        if seconds and self.pattern == "checkpoint":
            self.write_checkpoint(seconds)
        self.timed("all_reduce", self.calls.all_reduce)

    def compute(self, units):
        begin_ns = time.thread_time_ns()
        work(units)
        self.computed_ns[-1] += time.thread_time_ns() - begin_ns

    def read_batch(self, seconds):
        if seconds and self.pattern == "slow loader":
            self.disk.slow_files_arm(OPEN, seconds)
        descriptor = os.open(self.files / "batch", os.O_RDONLY)
        if seconds and self.pattern == "slow disk":
            self.disk.slow_files_arm(READ, seconds)
        os.read(descriptor, BATCH_BYTES)
        os.close(descriptor)

    def write_checkpoint(self, seconds):
        descriptor = os.open(self.files / "checkpoint", os.O_WRONLY | os.O_CREAT)
        self.disk.slow_files_arm(WRITE, seconds)
        os.write(descriptor, BLOCK)
        os.close(descriptor)

    def exchange(self):
        calls = self.calls
        if self.plan["blocking"]:
            order = ("send", "recv") if self.sends_first else ("recv", "send")
            for call in order:
                self.timed(call, getattr(calls, call))
            return
        requests = [self.timed("irecv", calls.irecv), self.timed("isend", calls.isend)]
        self.timed("wait_all", calls.wait_all, requests)


def take_cores(plan, rank):
    """Bind this thread, and those that it starts, to the rank's cores."""
    os.sched_setaffinity(0, plan["cores"][rank])
    if plan["pattern"] == "hog":
        truth_ranks.leave_other_programs(truth_ranks.RANK_PRIORITY)


def run_on_gloo(plan, rank):
    """Be a rank on torch/gloo, recorded; ends the process."""
    import torch
    import torch.distributed as dist

    from paceline.native import Recorder
    from paceline.trace.collectors.torch import TorchCollector
    from paceline.trace.format.files import trace_name

    folder, size = Path(plan["folder"]), len(plan["cores"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    take_cores(plan, rank)
    torch.set_num_threads(1)
    recorder = Recorder(str(folder / "trace" / trace_name(rank)), rank, size)
    collector = TorchCollector(recorder)
    collector.install()
    if not recorder.attach_io():
        sys.exit("the library that sees calls for files was not preloaded")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    Rank(plan, GlooCalls, rank, size).run()
    collector.close()
    recorder.detach_io()
    recorder.close()
    os._exit(0)


def main():
    from mpi4py import MPI

    plan = json.loads(Path(sys.argv[1]).read_text())
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    take_cores(plan, rank)
    Rank(plan, MpiCalls, rank, size).run()


if __name__ == "__main__":
    main()
