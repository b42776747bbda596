"""How the executor of schedules moves memory between ranks: one module for each way.

    threads      ranks that are threads of one process: tests, first steps
    torch_p2p    torch.distributed, any backend with send and receive; imports torch
    mpi          mpi4py; imports mpi4py

Import the module that you need: only it loads its library.
"""
