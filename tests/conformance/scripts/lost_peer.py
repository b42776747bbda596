"""A rank is killed, or calls something else, while another waits for it.

    lost_peer.py STORE RANK RANKS HOW

A rank that gets an error prints it as JSON.
"""

import json
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANK, RANKS, HOW = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def all_reduce():
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10))


def backward():
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()


def other_size():
    dist.all_reduce(torch.ones(10 + RANK))


def other_call():
    if RANK == 1:
        dist.broadcast(torch.ones(10), 0)
    else:
        dist.all_reduce(torch.ones(10))


def in_subgroup():
    group = dist.new_group([1, 2])
    if RANK == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 1:
        dist.all_reduce(torch.ones(10), group=group)


store = dist.FileStore(sys.argv[1], RANKS)
limit = timedelta(seconds=20)
dist.init_process_group("paceline", store=store, rank=RANK, world_size=RANKS, timeout=limit)
try:
    globals()[HOW]()
except Exception as problem:  # noqa: BLE001  # whatever it is, the test shows it
    print(json.dumps({"kind": type(problem).__name__, "text": str(problem)}), flush=True)
os._exit(0)  # no tidy end: the group cannot be used any more
