"""A wait of another thread than the loop's: the loop does not wait, but the collective ended."""

import threading

import pytest
import torch

from paceline.native import Recorder
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.torch import TorchCollector
from paceline.trace.collectors.torch_groups import GroupRecord
from paceline.trace.format.events import Kind
from paceline.trace.format.files import read_trace


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rank.trace"


@pytest.fixture
def collector(path):
    found = TorchCollector(Recorder(str(path), 0, 1))
    yield found
    found.recorder.close()


def call(function, thread):
    if thread:
        other = threading.Thread(target=function)
        other.start()
        other.join()
    else:
        function()


@pytest.mark.parametrize("thread", [False, True])
def test_a_functional_collective_that_another_thread_awaits(path, collector, monkeypatch, thread):
    monkeypatch.setattr(internals, "redispatch_of", lambda overload: overload)
    wait = collector.collectives._wait_tensor_kernel(lambda tensor: tensor)
    name = collector.recorder.intern("all_reduce")
    result = torch.ones(1)
    issued = collector.in_flight.issue(Kind.COLLECTIVE, name, GroupRecord(0, (0,), {}), 4, 1)
    collector.in_flight.hold_result(result, issued)
    call(lambda: wait(result), thread)
    collector.recorder.close()
    kinds = read_trace(path).events["kind"].tolist()
    assert kinds == [Kind.COLLECTIVE] + [Kind.WAIT] * (not thread)
    assert not collector.in_flight.tensors
