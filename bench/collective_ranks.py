"""A rank of one contender of collectives.py; runs in the contender's own environment.

It gets its contender's name and a Unix socket, connects, says its rank, and then measures what it
is asked to: a line of JSON in, one out. It blocks on the socket while others are measured.
Only numpy and the contender's library are imported.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

import numpy as np

MOST_BYTES = 256 << 20


class Native:
    """Paceline's native calls, on private arrays or in the symmetric heap."""

    def __init__(self, rank, ranks, port, *, heap=False):
        from paceline.collectives import HostGroup

        self.store = _tcp_store(rank, ranks, port)  # kept: rank 0's is the server of all
        heap_bytes = MOST_BYTES if heap else 0
        self.group = HostGroup.form(self.store, rank, ranks, 60.0, heap_bytes=heap_bytes)
        if heap:
            self.address = self.group.allocate(MOST_BYTES)
        else:
            self.memory = np.zeros(MOST_BYTES, np.uint8)
            self.address = self.memory.ctypes.data

    def call(self, operation, size_bytes, dtype):
        group, address = self.group, self.address
        number, element_bytes = (0, 4) if dtype == "float32" else (3, 2)
        count = size_bytes // element_bytes
        return {
            "all_reduce": lambda: group.all_reduce(address, count, number, 0, 60.0),
            "reduce": lambda: group.reduce(address, count, number, 0, 0, 60.0),
            "broadcast": lambda: group.broadcast(address, size_bytes, 0, 60.0),
        }[operation]

    def barrier(self):
        self.group.barrier(60.0)


class Torch:
    """A backend of torch.distributed, on ordinary tensors."""

    def __init__(self, rank, ranks, port, *, backend):
        import torch
        import torch.distributed as dist

        if backend == "paceline":
            from paceline.collectives.registration import register

            register()  # torch does so itself, where Paceline is installed as a package
        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        store = _tcp_store(rank, ranks, port)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        self.memory = torch.zeros(MOST_BYTES, dtype=torch.uint8)

    def call(self, operation, size_bytes, dtype):
        tensor = self.memory[:size_bytes].view(getattr(self.torch, dtype))
        return {
            "all_reduce": lambda: self.dist.all_reduce(tensor),
            "reduce": lambda: self.dist.reduce(tensor, 0),
            "broadcast": lambda: self.dist.broadcast(tensor, 0),
        }[operation]

    def barrier(self):
        self.dist.barrier()


class Mpi:
    """An MPI library through mpi4py, on arrays in place."""

    def __init__(self):
        from mpi4py import MPI

        self.mpi = MPI
        self.world = MPI.COMM_WORLD
        self.memory = np.zeros(MOST_BYTES, np.uint8)

    def call(self, operation, size_bytes, dtype):
        assert dtype == "float32"
        array = self.memory[:size_bytes].view(np.float32)
        world, in_place = self.world, self.mpi.IN_PLACE
        source = in_place if world.rank == 0 else array
        return {
            "all_reduce": lambda: world.Allreduce(in_place, array),
            "reduce": lambda: world.Reduce(source, array, root=0),
            "broadcast": lambda: world.Bcast(array, 0),
        }[operation]

    def barrier(self):
        self.world.Barrier()


def _tcp_store(rank, ranks, port):
    from datetime import timedelta

    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=60))


def connect(name, port):
    """Return the contender's library, and this process's rank."""
    if name in ("mpich", "openmpi"):
        library = Mpi()
        return library, library.world.rank
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if name in ("native", "heap"):
        return Native(rank, ranks, port, heap=name == "heap"), rank
    return Torch(rank, ranks, port, backend=name), rank


def batch(library, request):
    """Return the seconds per call of one batch."""
    call = library.call(request["operation"], request["size_bytes"], request["dtype"])
    call()
    library.barrier()
    begin = time.perf_counter()
    for _ in range(request["calls"]):
        call()
    return (time.perf_counter() - begin) / request["calls"]


def main():
    name, path, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    stream = connection.makefile("rw")

    def answer(message):
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    try:
        library, rank = connect(name, port)
    except BaseException as problem:
        answer({"error": f"{type(problem).__name__}: {problem}".splitlines()[0]})
        raise
    answer({"rank": rank})
    for line in stream:
        answer({"seconds": batch(library, json.loads(line))})
    os._exit(0)  # libraries need no teardown here


if __name__ == "__main__":
    main()
