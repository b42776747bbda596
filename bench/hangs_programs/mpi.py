"""The same by mpi4py: FAULT RANK STEP."""

import sys

import numpy as np
from faults import commit
from mpi4py import MPI

_, fault, culprit, at = sys.argv
world = MPI.COMM_WORLD
values, sums = np.ones(1000), np.empty(1000)
for step in range(12):
    if step == int(at) and world.rank == int(culprit):
        if commit(fault):
            continue
        if fault == "order":
            world.Bcast(values, 0)
        if fault == "message":
            world.Recv(sums, source=(world.rank + 1) % world.size, tag=7)
    world.Allreduce(values, sums)
    world.Bcast(sums, 0)
world.Barrier()
