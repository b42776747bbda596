"""What the scripts of this folder share: the loop that is timed. They know nothing of packs."""

import json
import sys
import time

import torch

torch.manual_seed(0)
torch.set_num_threads(1)


def train(dataset, step, *, batch, epochs, workers=0):
    """Train for some epochs, and print what each but the first took, with the last loss."""
    order = torch.Generator().manual_seed(1)
    loader = torch.utils.data.DataLoader(
        dataset, batch, shuffle=True, drop_last=True, num_workers=workers, generator=order
    )
    seconds, cpu_s = [], []
    for epoch in range(epochs + 1):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        for inputs in loader:
            loss = step(inputs)
        if epoch:  # the first brings files and libraries into memory
            seconds.append(time.perf_counter() - begin)
            cpu_s.append(time.process_time() - begin_cpu)
    result = {"seconds": seconds, "cpu_s": cpu_s, "samples": len(loader) * batch, "loss": loss}
    sys.stdout.write(json.dumps(result) + "\n")
