"""Trains in forked children, each with a torch that lacks a capability; compares with unrecorded.

What is recorded without a capability must be all that the others allow.
"""

import json
import logging
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from paceline.native import Recorder
from paceline.trace.collectors import sampled_steps
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.torch import TorchCollector
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.format.events import DRAIN, Kind
from paceline.trace.format.files import read_trace

# What is missing from the trace without a capability: (kind, name).
LOST = {
    Capability.LOADER_ITERATOR: [(Kind.INPUT, "next")],
    Capability.OPTIMIZER_HOOKS: [(Kind.STEP, "step"), (Kind.OPTIMIZER, "step")],
    Capability.DISPATCHER: [(Kind.COLLECTIVE, "all_reduce"), (Kind.WAIT, DRAIN)],
    Capability.WORKS: [(Kind.WAIT, "barrier")],
    Capability.ENGINE_CALLBACK: [(Kind.WAIT, DRAIN)],
    Capability.BUFFER_BROADCAST: [(Kind.WAIT, "broadcast")],
    Capability.GRADIENT_HOOKS: [(Kind.GRADIENT, "0.weight")],
    Capability.FUNCTIONAL_WAIT: [(Kind.WAIT, "all_gather")],
}
sampled_steps.SampledSteps.is_sampled = lambda *_: True  # not only few steps
operators = torch.ops._c10d_functional
ALWAYS = [(Kind.FORWARD, "forward"), (Kind.BACKWARD, "backward"), (Kind.CHECKPOINT, "save")]


def train(folder):
    """Return what a script would print."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for inputs in DataLoader([torch.full((4,), float(i)) for i in range(8)], batch_size=4):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.barrier()
    group = dist.group.WORLD.group_name
    gathered = operators.all_gather_into_tensor(torch.ones(2), 1, group)
    gathered = operators.wait_tensor(gathered).tolist()
    torch.save(obj=model.state_dict(), f=folder / "model.pt")
    return losses, gathered


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def recorded_without(missing, folder):
    """Train recorded, without the capabilities `missing`; return its output, and check the rest."""

    def fail():
        raise AttributeError("gone")

    for capability in missing:
        internals._CHECKS[capability] = fail
    warnings = Warnings()
    logging.getLogger().addHandler(warnings)
    recorder = Recorder(str(folder / "rank.trace"), 0, 1)
    collector = TorchCollector(recorder)
    collector.install()
    result = train(folder)
    collector.close()
    recorder.close()
    for capability in missing:
        (text,) = [text for text in warnings.texts if f"({capability.name.lower()}: " in text]
        assert capability.value in text
        assert "gone" in text
    assert len(warnings.texts) == len(missing), warnings.texts
    trace = read_trace(folder / "rank.trace")
    pairs = trace.events[["kind", "name"]].tolist()
    found = {(Kind(kind), trace.names[name]) for kind, name in pairs}
    lost = {place for capability in missing for place in LOST.get(capability, [])}
    everything = {place for places in LOST.values() for place in places}
    if Capability.DISPATCHER in missing:  # waits and messages go with it
        lost |= {place for place in everything if place[0] is Kind.WAIT}
    assert found >= {*ALWAYS, *(everything - lost)}, (everything - lost) - found
    assert not found & lost, found & lost
    return result


def main():
    folder = Path(sys.argv[1])
    children = {}
    cases = [None, *([capability] for capability in Capability), list(Capability)]
    for number, missing in enumerate(cases):
        mine = folder / str(number)
        mine.mkdir()
        child = os.fork()
        if child == 0:
            try:
                result = train(mine) if missing is None else recorded_without(missing, mine)
                (mine / "result.json").write_text(json.dumps(result))
                sys.stdout.flush()
                os._exit(0)
            except BaseException:  # noqa: BLE001  # a child must not go on as its parent
                print(missing, flush=True)
                traceback.print_exc()
                os._exit(1)
        children[child] = mine
        _, status = os.waitpid(child, 0)
        assert status == 0, missing
    results = [(mine / "result.json").read_text() for mine in children.values()]
    assert len(set(results)) == 1, results
    print(f"{len(results) - 1} as unrecorded")


if __name__ == "__main__":
    main()
