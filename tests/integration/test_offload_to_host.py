"""Tensors that are away in the memory of the host: from a CPU in full, and from a GPU."""

import contextlib
import copy
import dataclasses
import gc
import time
import weakref
from typing import ClassVar

import pytest
import torch
from support.out_of_core_cases import PLENTY, WIDTH, digest, make, plan_for_half, residuals, train
from torch import nn

from paceline.core.errors import StorageError, UsageError
from paceline.schedules.memory import SpillTier
from paceline.training.out_of_core import planning
from paceline.training.out_of_core.device import StreamLane
from paceline.training.out_of_core.host_memory import HostMemory
from paceline.training.out_of_core.places import Place, spill_to_file
from paceline.training.out_of_core.process_memory import Allocator, ProcessMemory
from paceline.training.out_of_core.training import OutOfCore
from paceline.training.out_of_core.transfers import aligned

CPU = torch.device("cpu")
STEPS = 6


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    yield
    torch.set_num_threads(threads)


class Stream:
    """A stream of a device that has done a copy when somebody waits for it, and not before."""

    def __init__(self, device=None):
        self.waited = []

    def wait_stream(self, other):
        assert other is not self

    def wait_event(self, event):
        self.waited.append(event)
        event.is_over = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class Event:
    all: ClassVar = weakref.WeakSet()

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.is_over = False
        self.at_s = None
        self.all.add(self)

    @classmethod
    def synchronize_all(cls, _device):
        for event in cls.all:
            event.is_over = True

    def record(self, stream):
        self.at_s = time.monotonic()

    def query(self):
        return self.is_over

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1e3


@pytest.fixture
def streams(monkeypatch):
    """Have torch.cuda's streams and events do what their interface says, on a CPU."""
    compute = Stream()
    monkeypatch.setattr("torch.cuda.Stream", Stream)
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.stream", lambda stream: stream)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: compute)
    monkeypatch.setattr("torch.cuda.synchronize", Event.synchronize_all)
    return compute


def in_host_memory(lanes=None):
    return Place(CPU, HostMemory(CPU, lanes), ProcessMemory(), Allocator())


def trained(kind, make_place, monkeypatch):
    """Train within a budget that half of the tensors fit; return digests and the session."""
    model, batch = make(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    lines = []
    with OutOfCore(
        model,
        optimizer,
        budget_bytes=PLENTY,
        recompute=False,
        say=lines.append,
        place=make_place(),
    ) as out_of_core:
        plan_for_half(out_of_core, monkeypatch)
        found = train(model, batch, STEPS, optimizer)
        session, outcome = out_of_core.session, out_of_core.to_json()
    assert session.plan.spilled_bytes > 0
    assert session.counters.diverged == 0
    moments = [digest(values["exp_avg_sq"]) for values in optimizer.state_dict()["state"].values()]
    return (found, list(map(digest, model.parameters())), moments), session, outcome, lines


def without_times(monkeypatch):
    """Have plans depend on the order of events and the sizes alone."""
    made = planning.profile_of

    def profile_of(*args):
        profile, places = made(*args)
        events = profile.events
        times, floor = (1e-3,) * events, (64 << 20,) * events
        return dataclasses.replace(profile, compute_s=times, floor_bytes=floor), places

    tier = SpillTier(write_bytes_per_s=1e6, read_bytes_per_s=1e6)
    monkeypatch.setattr(planning, "profile_of", profile_of)
    monkeypatch.setattr(planning.Planner, "tier", lambda _: tier)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_host_memory_trains_as_a_file_does(kind, tmp_path, monkeypatch):
    without_times(monkeypatch)
    expected, with_file, _, _ = trained(kind, lambda: spill_to_file(tmp_path), monkeypatch)
    found, session, outcome, lines = trained(kind, in_host_memory, monkeypatch)
    assert found == expected
    assert session.profile == with_file.profile
    assert session.plan == with_file.plan
    assert any("go to host memory and back" in line for line in lines)
    assert outcome["host_bytes"] > 0
    assert outcome["write_bytes_per_s"] > 0
    assert 0 <= outcome["hidden_part"] <= 1


def test_streams_train_as_threads_do(streams, monkeypatch):
    expected, _, _, _ = trained("mlp", in_host_memory, monkeypatch)
    lanes = StreamLane(CPU), StreamLane(CPU)
    found, _, outcome, _ = trained("mlp", lambda: in_host_memory(lanes), monkeypatch)
    assert found == expected
    assert streams.waited
    assert outcome["transfer_s"] > 0
    assert not any(lane._flights for lane in lanes)


def test_memory_of_a_copy_is_held_until_the_device_has_done_it(streams):
    lanes = StreamLane(CPU), StreamLane(CPU)
    target = HostMemory(CPU, lanes)
    source = torch.arange(5000).to(torch.uint8)
    expected = source.clone()
    part = target.allocate(5000)
    written = target.write([source], part, lambda: None)
    alive = weakref.ref(source)
    del source
    assert alive() is not None
    assert not written.is_done
    written.wait()
    written.wait()
    assert alive() is None
    assert lanes[0].moved_bytes == 0  # counted where the lane is used next
    read = target.read(part, 5000, written)
    assert read.bytes is None
    memory = weakref.ref(read._memory)
    dropped = read
    del read, dropped
    assert memory() is not None
    lanes[1]._flights[0].end.is_over = True
    read = target.read(part, 5000, written)
    assert memory() is None
    read.wait()
    assert torch.equal(read.bytes[:5000], expected)
    assert read.bytes.numel() == aligned(5000)
    streams.wait_event(lanes[1]._flights[-1].end)
    target.close()
    assert target.moved().written_bytes == 5000
    assert target.moved().read_bytes == 10000


def test_parts_serve_again_when_their_transfer_is_done():
    target = HostMemory(CPU)
    source = torch.ones(4096, dtype=torch.uint8)
    part = target.allocate(4000)
    transfer = target.write([source], part, lambda: None)
    target.release(part, 4000, transfer)
    transfer.wait()
    assert target.allocate(4096) == part
    assert target.allocate(4096) != part
    assert target.size_bytes == 2 * 4096
    target.close()
    target.close()
    with pytest.raises(UsageError, match="used after its memory budget was closed"):
        target.read(part, 4096)


def test_memory_that_the_host_has_not_is_said():
    target = HostMemory(CPU)
    with pytest.raises(StorageError, match="cannot offload tensors"):
        target.allocate(1 << 60)
    target.close()


def test_a_model_on_several_devices_is_refused():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(UsageError, match="this one is on cpu, meta"):
        OutOfCore(model, optimizer)
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(UsageError, match="this one is on meta"):
        OutOfCore(model, torch.optim.SGD(model.parameters()))


@contextlib.contextmanager
def device_of(size_bytes):
    """Let this process have so much of the GPU."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(size_bytes / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.gpu
def test_a_model_of_half_as_much_again_as_a_gpu_trains(record_property):
    torch.manual_seed(0)
    model = residuals(24).cuda()
    twin = copy.deepcopy(model)
    batch = torch.randn(1 << 16, WIDTH, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    expected = train(model, batch, STEPS, torch.optim.Adam(model.parameters(), lr=1e-3))
    has_bytes = torch.cuda.max_memory_allocated() / 1.5
    del model
    with device_of(has_bytes):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            train(copy.deepcopy(twin), batch, 1, torch.optim.Adam(twin.parameters(), lr=1e-3))
        gc.collect()
        torch.cuda.empty_cache()
        optimizer = torch.optim.Adam(twin.parameters(), lr=1e-3)
        # Torch's allocator cannot use all of its blocks.
        with OutOfCore(
            twin, optimizer, budget_bytes=int(0.9 * has_bytes), recompute=False
        ) as out_of_core:
            found = train(twin, batch, STEPS, optimizer)
            outcome = out_of_core.to_json()
    assert found == expected
    assert outcome["plan"]["spilled_bytes"] > 0
    assert outcome["diverged_steps"] == 0
    record_property("overlap_efficiency", outcome["hidden_part"])


@pytest.mark.gpu
def test_tensors_of_a_gpu_go_to_no_folder(tmp_path):
    model = nn.Linear(2, 2).cuda()
    with pytest.raises(UsageError, match="to no folder"):
        OutOfCore(model, torch.optim.SGD(model.parameters()), spill_folder=tmp_path)
