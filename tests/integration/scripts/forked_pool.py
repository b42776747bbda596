"""Forks while another thread allocates from the pool of tensors; says how the children ended."""

import json
import os
import threading

import torch

from paceline.native import redirect_allocations, use_pool

SIZE = 1 << 20
FORKS = 20

torch.set_num_threads(1)
found = {"unknown_library": redirect_allocations("libnone.so") is not None}
pool = redirect_allocations("libc10.so")
pool.set_cap(8 * SIZE)
use_pool(is_used=True)
tensor = torch.full((SIZE,), 7, dtype=torch.uint8)
used = pool.counts()[0]
is_over = threading.Event()


def allocate():
    while not is_over.is_set():
        torch.empty(SIZE, dtype=torch.uint8)


def child():
    """Return 0 where the tensor is whole, may be changed and freed, and new ones are not pooled."""
    global tensor
    before = pool.counts()[0]
    is_right = before >= used and int(tensor[-1]) == 7
    other = torch.full((SIZE,), 9, dtype=torch.uint8)
    is_right = is_right and pool.counts()[0] == before and int(other[-1]) == 9
    tensor.fill_(8)
    tensor = None
    return 0 if is_right and pool.counts()[0] == before - SIZE else 1


thread = threading.Thread(target=allocate)
thread.start()
codes = []
for _ in range(FORKS):
    pid = os.fork()
    if pid == 0:
        os._exit(child())
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
is_over.set()
thread.join()
found |= {"codes": codes, "is_whole": bool((tensor == 7).all())}
tensor = None
print(json.dumps({**found, "left_bytes": pool.counts()[0]}))
