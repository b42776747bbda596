"""One rank of bench/out_of_core.py: trains some steps in one mode, and prints what they came to.

out_of_core_ranks.py '{"mode": ..., "model": ..., "steps": ..., "folder": ..., "quick": ...}'

With "rank", "ranks" and "store" it is one of several data-parallel ranks.
"""

import hashlib
import json
import mmap
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from out_of_core_models import make
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.training import OutOfCore
from paceline.training.out_of_core.process_memory import ProcessMemory, page_faults


class MappedFile:
    """Saved tensors in a mapped file, whose pages come when they are touched: the naive way."""

    def __init__(self, folder):
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # as long as the process
        self.end = 0

    def pack(self, tensor):
        if tensor.nbytes < 1 << 16 or not tensor.is_contiguous():
            return tensor
        size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        offset, self.end = self.end, self.end + size
        os.ftruncate(self.file.fileno(), max(self.end, os.fstat(self.file.fileno()).st_size))
        mapped = mmap.mmap(self.file.fileno(), size, offset=offset)
        copy = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel())
        copy.copy_(tensor.detach().reshape(-1))
        return copy.view(tensor.shape)

    def unpack(self, tensor):
        return tensor


def main():
    asked = json.loads(sys.argv[1])
    mode = asked["mode"]
    model, inputs, target = make(asked["model"], mode == "checkpointing", asked["quick"])
    if "rank" in asked:
        store = dist.FileStore(asked["store"], asked["ranks"])
        dist.init_process_group("gloo", store=store, rank=asked["rank"], world_size=asked["ranks"])
        torch.set_num_threads(max(1, torch.get_num_threads() // asked["ranks"]))
        inputs, target = (part.chunk(asked["ranks"])[asked["rank"]] for part in (inputs, target))
        model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    out_of_core = hooks = None
    if mode == "planned":
        out_of_core = OutOfCore(
            model, optimizer, budget_bytes=asked.get("budget"), spill_folder=asked["folder"]
        )
    mapped = MappedFile(asked["folder"])
    memory = ProcessMemory()
    times, cpu, digests, peaks, faults = [], [], [], [], []
    for step in range(asked["steps"]):
        torch.manual_seed(step)
        is_watched = out_of_core is None or out_of_core.plan is not None
        if is_watched:
            memory.start()
        begin, begin_cpu, begin_faults = time.perf_counter(), time.process_time(), page_faults()
        if mode == "mapped":
            mapped.end = 0
            hooks = torch.autograd.graph.saved_tensors_hooks(mapped.pack, mapped.unpack)
            hooks.__enter__()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        if hooks is not None:
            hooks.__exit__()
        gradients_s = time.perf_counter()
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.grad.numpy())
        digests.append(digest.hexdigest()[:16])
        begin += time.perf_counter() - gradients_s
        optimizer.step()
        times.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
        faults.append(page_faults() - begin_faults)
        peaks.append(memory.peak_bytes() if is_watched else None)
    result = {
        "step_s": times,
        "cpu_s": cpu,
        "digests": digests,
        "peaks": peaks,
        "faults": faults,
    }
    if out_of_core is not None:
        result["out_of_core"] = out_of_core.to_json()
    print(json.dumps(result), flush=True)
    os._exit(0)  # no teardown: torch's has aborted a rank that had done its work


main()
