"""An mpi4py program that sums for a while: timed.py SECONDS."""

import sys

from mpi4py import MPI

comm = MPI.COMM_WORLD
end = MPI.Wtime() + float(sys.argv[1])
goes_on = True
while goes_on:
    comm.allreduce(1.0)
    goes_on = comm.bcast(MPI.Wtime() < end if comm.Get_rank() == 0 else None)
