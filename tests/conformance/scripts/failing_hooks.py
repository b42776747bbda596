"""Trains in forked children, in each of which other hooks fail; compares with unrecorded.

A failure stops the recording of its kind, with one warning. The script sees nothing of it.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed.checkpoint  # its saves are seen when it has been imported
from missing_capabilities import Warnings, train
from torch import nn

from paceline.native import Recorder
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors import torch_operators as operators
from paceline.trace.collectors.torch import TorchCollector
from paceline.trace.collectors.torch_groups import Groups
from paceline.trace.collectors.torch_in_flight import InFlight
from paceline.trace.collectors.torch_layers import LayerRecorder
from paceline.trace.collectors.torch_memory import MemoryRecorder
from paceline.trace.collectors.torch_parameters import TrainedParameters
from paceline.trace.collectors.torch_phases import PhaseRecorder
from paceline.trace.format.events import Kind
from paceline.trace.format.files import read_trace

PHASES = (Kind.INPUT, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.CHECKPOINT)


class Broken(Exception):
    """What our own code raises in these tests."""


def fail(*_, **__):
    raise Broken("amid a hook")


class FailingRecorder:
    """A recorder of which methods fail from their second call for a phase on.

    Args:
        recorder: the true one.
        faults: method and first argument (None: any) of the calls that fail.
    """

    def __init__(self, recorder, faults):
        self.recorder = recorder
        self.faults = faults
        self.called = set()

    def __getattr__(self, name):
        found = getattr(self.recorder, name)
        if all(name != method for method, _ in self.faults):
            return found

        def call(*args):
            faults = {(name, args[0] if args else None), (name, None)} & self.faults
            if faults & self.called:
                fail()
            self.called |= faults
            return found(*args)

        return call


# What fails in one child, and how the warnings name what is lost. A fault is a method of the
# recorder and a phase, or an object and its attribute.
GROUPS = {
    "begin": {("begin", int(kind)): kind.name.lower() for kind in PHASES},
    "end": {("end", int(kind)): kind.name.lower() for kind in PHASES},
    "callbacks": {
        ("end_step", None): "optimizer steps",
        (TrainedParameters, "note_first_step"): "bytes of parameters",
        (internals, "keep_thread_state"): "when collectives complete",
        (InFlight, "_computed"): "the wait at the end of a backward pass",
        (PhaseRecorder, "wrap_checkpoint"): "checkpoint",
        (InFlight, "close"): "had not completed",
        (internals, "hide_from_dynamo"): "Dynamo",
    },
    "groups": {
        (Groups, "record_of"): "collectives and messages",
        (PhaseRecorder, "install"): "phases of the loop",
    },
    "sizes": {
        (operators, "payload_of"): "collectives and messages",
        ("begin", int(Kind.WAIT)): "waits for collectives",
        (PhaseRecorder, "on_main_thread"): "the phase forward",
    },
    "closer": {
        (LayerRecorder, "open"): "times of layers",
        (MemoryRecorder, "_count"): "memory by what holds it",
    },
    "gradients": {
        (LayerRecorder, "_note_ready"): "when gradients are ready",
        (MemoryRecorder, "before_backward"): "memory by what holds it",
    },
}


class Refusing(nn.Module):
    def forward(self, x):
        raise ValueError("the script's own")


def raise_as_unrecorded():
    """Return what the script sees of its own exceptions in a phase that a hook may break."""
    seen = []
    for call in (
        lambda: Refusing()(torch.ones(1)),
        lambda: torch.ones(1).backward(),
        lambda: torch.save({}, "/does/not/exist"),
    ):
        try:
            call()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is compared
            seen.append((type(error).__name__, str(error)[:40], error.__context__ is None))
    return seen


def recorded_with(faults, folder):
    """Train recorded with faults in hooks; return what an unrecorded script would."""
    warnings = Warnings()
    internals.logging.getLogger().addHandler(warnings)
    recorder = Recorder(str(folder / "rank.trace"), 0, 1)
    for owner, attribute in faults:
        if not isinstance(owner, str):
            setattr(owner, attribute, fail)
    of_recorder = {fault for fault in faults if isinstance(fault[0], str)}
    collector = TorchCollector(FailingRecorder(recorder, of_recorder))
    collector.install()
    result = train(folder), raise_as_unrecorded()
    collector.close()
    recorder.close()
    texts = [text for text in warnings.texts if "Broken: amid a hook" in text]
    assert texts == warnings.texts, warnings.texts
    for lost in faults.values():
        assert any(lost in text for text in texts), (lost, texts)
    assert len(texts) == len({text.partition(";")[0] for text in texts}), "one warning per kind"
    assert len(read_trace(folder / "rank.trace").events) > 0
    return result


def main():
    folder = Path(sys.argv[1])
    results = {}
    for name, faults in {"unrecorded": None, **GROUPS}.items():
        mine = folder / name
        mine.mkdir()
        child = os.fork()
        if child == 0:
            try:
                if faults is None:
                    result = train(mine), raise_as_unrecorded()
                else:
                    result = recorded_with(faults, mine)
                (mine / "result.json").write_text(json.dumps(result))
                sys.stdout.flush()
                os._exit(0)
            except BaseException:  # noqa: BLE001  # a child must not go on as its parent
                print(name, flush=True)
                traceback.print_exc()
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0, name
        results[name] = (mine / "result.json").read_text()
    differing = [name for name, result in results.items() if result != results["unrecorded"]]
    assert not differing, (differing, results)
    print(f"{len(GROUPS)} groups of faults as unrecorded")


if __name__ == "__main__":
    main()
