"""One of RANKS processes that iterates over a loader: node_loader.py STORE RANK RANKS PACK MODE."""

import hashlib
import json
import os
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist

from paceline.store import Loader, LoaderOptions

EPOCHS = 2


def main(store, rank, ranks, path, mode):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    options = LoaderOptions(
        seed=5 if mode == "differs" and rank == 1 else 4,
        numbers=True,
        workers=2,
        timeout_s=5 if mode == "differs" else 60,
        node_reader="off" if mode in ("off", "raw-off") else "on",
    )
    raw = mode in ("raw", "raw-off")
    transform = None if raw else first_bytes
    views = samples_seen = 0
    loader = Loader(path, 20 * ranks, transform=transform, options=options)
    digest = hashlib.sha256()
    try:
        for _ in range(EPOCHS):
            for step, (samples, labels, numbers) in enumerate(loader):
                digest.update(bytes(numbers.numpy()) + bytes(labels.numpy()))
                if raw:
                    samples_seen += len(samples)
                    views += sum(lies_in_ring(loader, body) for body in samples)
                digest.update(bytes(samples.buffer.numpy() if raw else samples.numpy()))
                if mode == "killed" and rank == 0 and step % 4 == 2:
                    os.kill(loader._node._child.pid, signal.SIGKILL)
        stats = loader.stats
        said = {"digest": digest.hexdigest(), "by_node": stats.read_by_node, "all": stats.batches}
        said |= {"views": views, "samples": samples_seen}
    except Exception as problem:  # noqa: BLE001  # printed, for the test
        said = {"problem": f"{type(problem).__name__}: {problem}"}
    loader.close()
    print(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def lies_in_ring(loader, body):
    if loader._node is None:
        return False
    ring = loader._node.ring.data
    at = np.frombuffer(body, np.uint8).ctypes.data - ring.ctypes.data
    return 0 <= at <= len(ring) - len(body)


def first_bytes(body):
    found = torch.zeros(16, dtype=torch.uint8)
    part = torch.frombuffer(bytearray(body[:16]), dtype=torch.uint8)
    found[: len(part)] = part
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
