"""Installs, pauses and resumes a collector; prints what of torch each left changed, as JSON.

Whatever a hook replaces is found by comparing torch before and after: the attributes of its modules
and classes, its tables of hooks, and the kernels on its dispatcher. So a hook that is put in place
past `HookRegistry` is found, too.
"""

import gc
import json
import sys
import threading
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn

import paceline.store.feed.loader  # noqa: F401  # wrapped, like the checkpoints, when imported
from paceline.native import Recorder
from paceline.trace.collectors.torch import TorchCollector
from paceline.trace.format.files import read_trace

OPERATORS = [
    name
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith(("c10d::", "_c10d_functional::"))
]
# Counters and caches that no hook is called through.
BOOKKEEPING = ("torch.library._", "torch.utils.hooks.RemovableHandle.next_id")


def snapshot():
    """Return what hooks can change, by where it is."""
    state = {f"dispatcher {name}": torch._C._dispatch_dump(name) for name in OPERATORS}
    state["gc callbacks"] = len(gc.callbacks)
    state["threads"] = sorted(thread.name for thread in threading.enumerate())
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType):
            continue
        if name.split(".")[0] == "torch" or name.startswith("paceline.store"):
            state.update(attributes(name, module))
    return state


def attributes(name, module):
    """Return what a module's attributes and those of its classes are."""
    state = {}
    for attribute, value in list(vars(module).items()):
        is_table = type(value).__name__ in ("OrderedDict", "dict", "list", "set")
        state[f"{name}.{attribute}"] = (id(value), len(value) if is_table else 0)
        if isinstance(value, type):
            for method, function in list(vars(value).items()):
                state[f"{value.__module__}.{value.__qualname__}.{method}"] = id(function)
    return state


def changed(before, after):
    """Return where two states differ, but for torch's own bookkeeping."""
    places = before.keys() | after.keys()
    found = {place for place in places if before.get(place) != after.get(place)}
    return sorted(place for place in found if not place.startswith(BOOKKEEPING))


def train(model, steps):
    """Train a few steps of a model under DDP."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def main(folder):
    """Print what was changed, and how many steps were recorded."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    train(model, 2)  # what torch imports and caches at first use
    path = folder / "rank-00000.trace"
    recorder = Recorder(str(path), 0, 1)
    collector = TorchCollector(recorder)
    states = [snapshot()]
    for change in (collector.install, collector.pause, collector.resume, collector.pause):
        change()
        states.append(snapshot())
        train(model, 3)
    collector.resume()
    collector.close()
    recorder.close()
    before, installed, paused, resumed, paused_again = states
    touched = changed(before, installed)
    result = {
        "installed": touched,
        "paused": [place for place in touched if paused.get(place) != before.get(place)],
        "resumed": changed(before, resumed),
        "paused again": [
            place for place in touched if paused_again.get(place) != before.get(place)
        ],
        "steps": len(read_trace(path).events_of(10)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
