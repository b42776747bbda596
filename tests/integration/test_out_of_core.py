"""Training out of core: gradients and updates equal to the bit to those of a training in core."""

import contextlib
import copy
import gc
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.out_of_core_cases import (
    PLENTY,
    ROWS,
    WIDTH,
    digest,
    make,
    plan_for_half,
    residuals,
    rows,
    train,
    train_on,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import MemoryExceeded, StorageError, UsageError
from paceline.schedules.memory import SpillTier
from paceline.training import prepare
from paceline.training.capture import TrainingStep
from paceline.training.out_of_core.capturing import capture_events
from paceline.training.out_of_core.optimizer_files import OptimizerFiles
from paceline.training.out_of_core.process_memory import Allocator, ProcessMemory
from paceline.training.out_of_core.recompute import candidates
from paceline.training.out_of_core.spill_file import SpillFile
from paceline.training.out_of_core.training import OutOfCore
from paceline.training.out_of_core.transfers import aligned, aligned_memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def one_thread():
    """Do without threads that wait for each other on a loaded machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()  # what tests before left would be freed at any time, as memory of this one
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("kind", "make_optimizer"), [("mlp", torch.optim.Adam), ("cnn", torch.optim.SGD)]
)
def test_gradients_and_updates_are_equal_to_the_bit(kind, make_optimizer, tmp_path, monkeypatch):
    model, batch = make(kind)
    twin = copy.deepcopy(model)
    settings = {"lr": 1e-3} | ({"momentum": 0.9} if make_optimizer is torch.optim.SGD else {})
    plain = make_optimizer(model.parameters(), **settings)
    expected = train(model, batch, 5, plain)

    optimizer = make_optimizer(twin.parameters(), **settings)
    lines = []
    with OutOfCore(
        twin,
        optimizer,
        budget_bytes=PLENTY,
        spill_folder=tmp_path,
        recompute=False,
        say=lines.append,
    ) as out_of_core:
        plan_for_half(out_of_core, monkeypatch)
        found = train(twin, batch, 5, optimizer)
        plan = out_of_core.plan
        state = copy.deepcopy(optimizer.state_dict())
    assert plan.method in ("greedy", "milp")
    assert plan.spilled_bytes > 0
    assert out_of_core.session.counters.diverged == 0
    assert out_of_core.session.counters.steps == 3
    assert any("go to disk and back" in line for line in lines)
    assert found == expected
    assert list(map(digest, twin.parameters())) == list(map(digest, model.parameters()))
    others = plain.state_dict()["state"]
    assert state["state"].keys() == others.keys()
    for number, values in state["state"].items():
        assert values.keys() == others[number].keys()
        for key, value in values.items():
            other = others[number][key]
            assert value is other or torch.equal(value, other)


def test_memory_stays_under_the_budget(tmp_path, monkeypatch):
    model, batch = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    memory = ProcessMemory()
    peaks = []

    def note(step):
        peaks.append(memory.peak_bytes())
        memory.start()

    with OutOfCore(
        model, optimizer, budget_bytes=PLENTY, spill_folder=tmp_path, recompute=False
    ) as out_of_core:
        plan_for_half(out_of_core, monkeypatch)
        train(model, batch, 2, optimizer)
        memory.start()
        train(model, batch, 3, optimizer, note)
        assert out_of_core.plan.spilled_bytes > 0
        used = out_of_core.to_json()["peak_used_bytes"]
    assert max(peaks) <= out_of_core.session.budget_bytes
    assert used == pytest.approx(out_of_core.plan.peak_bytes, rel=0.05)


class Working(nn.Module):
    """Takes memory for a while that is not torch's, as operators do for their workspaces."""

    def forward(self, x):
        np.ones(48 * MIB, dtype=np.uint8)
        return x


def test_kept_memory_leaves_room_for_what_operators_take_for_a_while(tmp_path, monkeypatch):
    model, batch = make("mlp")
    model = nn.Sequential(model, Working())
    optimizer = torch.optim.Adam(model.parameters())
    memory = ProcessMemory()
    peaks = []

    def note(step):
        peaks.append(memory.peak_bytes())
        memory.start()

    with OutOfCore(
        model, optimizer, budget_bytes=PLENTY, spill_folder=tmp_path, recompute=False
    ) as out_of_core:
        plan_for_half(out_of_core, monkeypatch)
        train(model, batch, 2, optimizer)
        memory.start()
        train(model, batch, 3, optimizer, note)
        assert out_of_core.plan.spilled_bytes > 0
    assert max(peaks) <= out_of_core.session.budget_bytes


def test_a_block_that_nobody_has_touched_yet_is_no_workspace():
    memory, allocator = ProcessMemory(), Allocator()
    allocator.begin()
    try:
        blocks = []
        for size in (1, 64):  # MiB that an interval touches, of a block from before it
            blocks.append(torch.empty(size * MIB, dtype=torch.uint8))
            allocator.begin_interval(memory.now_bytes)
            memory.start()
            blocks[-1].fill_(1)
            allocator.end_interval(memory.peak_bytes)
        allocator.end_step()
        allocator.keep_within(PLENTY, memory.now_bytes)
        counts = allocator.counts()
        assert PLENTY - counts.cap_bytes < memory.now_bytes() - counts.resident_bytes + 32 * MIB
    finally:
        allocator.end()
        memory.close()


def test_memory_that_others_have_freed_is_used_again(tmp_path):
    model, batch = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    with OutOfCore(model, optimizer, budget_bytes=PLENTY, spill_folder=tmp_path) as out_of_core:
        train(model, batch, 2, optimizer)
        held = [np.ones(64 * MIB, dtype=np.uint8)]  # not torch's: another part of the process
        train(model, batch, 1, optimizer, lambda _: held.clear())
        caps = []
        for _ in range(3):
            train(model, batch, 1, optimizer)
            caps.append(out_of_core.session.allocator.counts().cap_bytes)
    assert caps[-1] - caps[0] > 60 * MIB


def test_a_step_of_another_order_is_trained_right(tmp_path, monkeypatch):
    model, batch = make("mlp")
    twin = copy.deepcopy(model)

    def batches(step):
        return batch[: ROWS // 2] if step in (4, 6, 7) else batch

    expected = train(model, batches, 11, torch.optim.Adam(model.parameters()))
    optimizer = torch.optim.Adam(twin.parameters())
    lines = []
    modes = []
    with OutOfCore(
        twin,
        optimizer,
        budget_bytes=PLENTY,
        spill_folder=tmp_path,
        recompute=False,
        say=lines.append,
    ) as out_of_core:
        plan_for_half(out_of_core, monkeypatch)
        found = train(
            twin, batches, 11, optimizer, lambda _: modes.append(out_of_core.session.mode)
        )
    assert found == expected
    # After one such step the plan holds; after two in a row two steps are recorded.
    assert modes == ["record", *["plan"] * 6, "record", "record", "plan", "plan"]
    assert sum("another order" in line for line in lines) == 1


def test_what_fits_is_left_in_memory(tmp_path):
    model, batch = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    with OutOfCore(model, optimizer, budget_bytes=1 << 40, spill_folder=tmp_path) as out_of_core:
        train(model, batch, 2, optimizer)
        before = out_of_core.session.target.moved().written_bytes
        train(model, batch, 2, optimizer)
        assert out_of_core.plan.method == "fits"
        assert out_of_core.session.target.moved().written_bytes == before


def test_a_change_in_place_is_refused_as_autograd_refuses_it(tmp_path):
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OutOfCore(model, optimizer, budget_bytes=1 << 40, spill_folder=tmp_path):

        def step(is_changed):
            hidden = weight * 2
            outcome = hidden * hidden
            if is_changed:
                hidden.add_(1)
            outcome.sum().backward()
            optimizer.step()

        step(False)
        step(False)
        step(False)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(True)


def test_a_change_of_a_small_tensor_is_refused_too(tmp_path):
    scale = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([scale], lr=0.1)
    with OutOfCore(nn.ParameterList([scale]), optimizer, spill_folder=tmp_path):
        loss = (scale * scale).sum()
        with torch.no_grad():
            scale.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_graph_without_a_backward_pass_leaves_nothing_in_the_file(tmp_path):
    model, batch = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OutOfCore(model, optimizer, spill_folder=tmp_path) as out_of_core:
        sizes = []
        for _ in range(3):  # an evaluation without no_grad, whose last operators save small outputs
            outputs = model(batch)
            outputs.mean(1).log_softmax(0).sum()
            del outputs
            sizes.append(os.fstat(out_of_core.session.target.disk._descriptor).st_size)
        assert 0 < sizes[1] == sizes[2]


def test_a_refused_second_budget_leaves_the_first_its_pool(tmp_path):
    model, batch = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    with OutOfCore(model, optimizer, spill_folder=tmp_path) as first:
        with pytest.raises(UsageError, match="this thread has a memory budget already"):
            OutOfCore(model, optimizer, spill_folder=tmp_path)
        before = first.session.allocator.counts().used_bytes
        held = torch.empty(64 * MIB, dtype=torch.uint8)
        assert first.session.allocator.counts().used_bytes >= before + held.nbytes
        train(model, batch, 1, optimizer)


def test_a_process_of_few_addresses_trains_without_a_pool(tmp_path):
    script = Path(__file__).parent / "scripts" / "few_addresses.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"is_pooled": False, "steps": 3}


def test_the_state_goes_on_from_a_state_dict(tmp_path, monkeypatch):
    model, batch = make("mlp")
    plain = torch.optim.Adam(model.parameters())
    train(model, batch, 2, plain)
    twin = copy.deepcopy(model)
    saved = copy.deepcopy(plain.state_dict())
    expected = train(model, batch, 4, plain)

    optimizer = torch.optim.Adam(twin.parameters())
    with OutOfCore(
        twin, optimizer, budget_bytes=PLENTY, spill_folder=tmp_path, recompute=False
    ) as out_of_core:
        plan_for_half(out_of_core, monkeypatch)
        optimizer.load_state_dict(saved)
        found = train(twin, batch, 4, optimizer)
    assert found == expected


class AnotherAdam(torch.optim.Adam):
    """Its update may be anything: Paceline leaves its state where it is."""


def with_closure(model, batch, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    torch.manual_seed(0)
    optimizer.step(closure)


@pytest.mark.parametrize("make_optimizer", [AnotherAdam, torch.optim.Adam])
def test_loaded_state_is_used_by_an_optimizer_that_is_left_alone(make_optimizer, tmp_path):
    model, batch = make("mlp")
    plain = make_optimizer(model.parameters())
    train(model, batch, 2, plain)
    twin = copy.deepcopy(model)
    saved = copy.deepcopy(plain.state_dict())

    def go_on(model, optimizer):
        if make_optimizer is AnotherAdam:
            train(model, batch, 4, optimizer)
            return
        for _ in range(2):  # with a closure and without
            with_closure(model, batch, optimizer)
            train(model, batch, 1, optimizer)

    go_on(model, plain)
    optimizer = make_optimizer(twin.parameters())
    with OutOfCore(twin, optimizer, spill_folder=tmp_path):
        optimizer.load_state_dict(saved)
        go_on(twin, optimizer)
    assert list(map(digest, twin.parameters())) == list(map(digest, model.parameters()))


def test_loaded_state_replaces_all_that_was_away(tmp_path):
    model, batch = make("mlp")
    twin = copy.deepcopy(model)
    fresh = torch.optim.Adam(model.parameters()).state_dict()
    optimizer = torch.optim.Adam(twin.parameters())
    expected = train(model, batch, 2, torch.optim.Adam(model.parameters()))
    with OutOfCore(twin, optimizer, spill_folder=tmp_path):
        before = copy.deepcopy(twin.state_dict())
        train(twin, batch, 2, optimizer)
        twin.load_state_dict(before)
        optimizer.load_state_dict(fresh)
        assert train(twin, batch, 2, optimizer) == expected
    assert list(map(digest, twin.parameters())) == list(map(digest, model.parameters()))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_update_that_fails_leaves_the_optimizer_whole(error, tmp_path):
    model, batch = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    parameters = list(model.parameters())

    def refuse(group, *args):
        if any(parameter is parameters[6] for parameter in group["params"]):
            raise error
        return torch.optim.Adam._init_group(optimizer, group, *args)

    with OutOfCore(model, optimizer, spill_folder=tmp_path):
        train(model, batch, 3, optimizer)
        optimizer._init_group = refuse
        with pytest.raises(error):
            train(model, batch, 1, optimizer)
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(parameters)]
        del optimizer._init_group
        moments = optimizer.state_dict()["state"]
        assert moments[6]["step"] == 3
        assert moments[0]["step"] == 4
        assert all("exp_avg" in values for values in moments.values())
        train(model, batch, 1, optimizer)
        assert optimizer.state_dict()["state"][6]["step"] == 4


def test_a_step_of_small_tensors_has_only_its_end(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with OutOfCore(model, optimizer, spill_folder=tmp_path) as out_of_core:
        train(model, torch.ones(2, 2), 4, optimizer)
        assert out_of_core.plan.method == "fits"


def test_a_second_memory_budget_is_refused(tmp_path):
    model, batch = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    with OutOfCore(model, optimizer, spill_folder=tmp_path) as first:
        with pytest.raises(UsageError, match="this thread has a memory budget already"):
            OutOfCore(model, optimizer, spill_folder=tmp_path)
        with pytest.raises(UsageError, match="state is kept within a memory budget already"):
            OptimizerFiles(optimizer, first.session)
        train(model, batch, 3, optimizer)
    with OutOfCore(model, optimizer, spill_folder=tmp_path):
        train(model, batch, 1, optimizer)
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))


def test_conjugate_tensors_have_the_same_gradients(tmp_path):
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def gradient():
        optimizer.zero_grad()
        hidden = weight * 2j
        outcome = hidden * hidden.conj() * hidden.conj().imag
        outcome.abs().sum().backward()
        return weight.grad.clone()

    expected = gradient()
    with OutOfCore(nn.ParameterList([weight]), optimizer, spill_folder=tmp_path):
        assert torch.equal(gradient(), expected)


def test_state_that_is_not_in_plain_memory_stays_where_it_is(tmp_path):
    model, batch = make("mlp")
    elsewhere = nn.Parameter(torch.empty(WIDTH, WIDTH, device="meta"))  # as on a GPU
    elsewhere.grad = torch.empty_like(elsewhere)
    optimizer = torch.optim.Adam([*model.parameters(), elsewhere])
    with OutOfCore(model, optimizer, spill_folder=tmp_path):
        for _ in range(3):
            model(batch).square().mean().backward()
            optimizer.step()
        assert optimizer.state[elsewhere]["exp_avg"].device.type == "meta"


def test_a_folder_in_memory_is_refused(tmp_path):
    model, _ = make("cnn")
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(StorageError, match=r"is a tmpfs.*a folder on a disk"):
        OutOfCore(model, optimizer, spill_folder="/dev/shm")


def test_tensors_that_no_backward_pass_needs_count(tmp_path):
    model, batch = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OutOfCore(model, optimizer, budget_bytes=1 << 40, spill_folder=tmp_path) as out_of_core:
        for _ in range(3):
            optimizer.zero_grad()
            unused = model(batch)
            model(batch).square().mean().backward()
            optimizer.step()
            del unused
        activations = [
            tensor for tensor in out_of_core.session.profile.tensors if tensor.kind == "activation"
        ]
        last = len(out_of_core.session.profile.floor_bytes) - 1
        assert sum(tensor.needed == last for tensor in activations) >= 8


def test_hooks_of_a_step_see_all_parameters(tmp_path):
    model, batch = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    counts = []

    def count(optimizer, args, kwargs):
        counts.append(len(optimizer.param_groups[0]["params"]))

    optimizer.register_step_pre_hook(count)
    optimizer.register_step_post_hook(count)
    with OutOfCore(model, optimizer, spill_folder=tmp_path):
        optimizer.register_step_post_hook(count)
        train(model, batch, 1, optimizer)
        assert counts == [len(list(model.parameters()))] * 3
        late = optimizer.register_step_pre_hook(count)
        with pytest.raises(UsageError, match="would be called after its update"):
            train(model, batch, 1, optimizer)
        late.remove()
        train(model, batch, 1, optimizer)


def test_it_is_closed_once_and_says_what_cannot_be_read_afterwards(tmp_path):
    model, batch = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    out_of_core = OutOfCore(model, optimizer, spill_folder=tmp_path)
    train(model, batch, 1, optimizer)
    loss = model(batch).square().mean()
    out_of_core.close()
    out_of_core.close()
    with pytest.raises(UsageError, match="used after its memory budget was closed"):
        loss.backward()
    train(model, batch, 1, optimizer)
    assert optimizer.state_dict()["state"][0]["step"] == 2


def test_parameters_are_left_to_autograd(tmp_path):
    model, _ = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    with OutOfCore(model, optimizer, spill_folder=tmp_path) as out_of_core:
        before = out_of_core.session.target.moved().written_bytes
        hidden = torch.randn(1, WIDTH)  # too small to move
        (hidden @ weight.t() @ weight @ weight[:, :WIDTH]).sum().backward()
        assert out_of_core.session.target.moved().written_bytes == before


def test_shared_memory_counts_now_and_at_the_peak():
    memory = ProcessMemory()
    memory.start()
    before = memory.now_bytes()
    shared = torch.ones(16 * MIB, dtype=torch.uint8).share_memory_()
    assert memory.now_bytes() - before >= shared.nbytes
    assert memory.peak_bytes() >= memory.now_bytes() - MIB
    memory.close()


def test_the_ranks_of_a_node_share_its_memory(tmp_path, monkeypatch):
    model, _ = make("cnn")
    budgets = []
    for ranks in ("1", "4"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        optimizer = torch.optim.Adam(model.parameters())
        with OutOfCore(model, optimizer, spill_folder=tmp_path) as out_of_core:
            budgets.append(out_of_core.session.budget_bytes)
    assert budgets[1] == budgets[0] // 4


def test_state_that_stays_in_memory_is_said(tmp_path):
    model, _ = make("cnn")
    lines = []
    for make_optimizer in (torch.optim.Adam, AnotherAdam):
        with OutOfCore(
            model, make_optimizer(model.parameters()), spill_folder=tmp_path, say=lines.append
        ):
            pass
    assert len(lines) == 1
    assert "state of AnotherAdam stays in memory" in lines[0]


def test_nothing_is_left_in_the_folder(tmp_path):
    model, batch = make("cnn")
    optimizer = torch.optim.Adam(model.parameters())
    with OutOfCore(model, optimizer, spill_folder=tmp_path):
        train(model, batch, 1, optimizer)
        assert list(tmp_path.iterdir()) == []


def test_a_budget_that_is_too_small_says_which_one_is_not(tmp_path):
    model, batch = make("cnn")
    optimizer = torch.optim.Adam(model.parameters())
    session = OutOfCore(model, optimizer, budget_bytes=MIB, spill_folder=tmp_path)
    with session, pytest.raises(MemoryExceeded, match="Give at least") as found:
        train(model, batch, 3, optimizer)
    _, _, _, least, unit, *_ = found.value.fix.split()
    assert unit.startswith("MiB")
    assert int(least.replace(",", "")) > 100


class Layers(nn.Module):
    """Layers in a list, one of them twice; a small parameter, and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(256))
        self.unused = nn.Parameter(torch.ones(256, 256))

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = layer(x) * self.scale
        return x


@pytest.mark.parametrize("make_optimizer", [torch.optim.Adam, AnotherAdam])
def test_a_captured_step_has_the_events_of_a_recorded_one(make_optimizer, tmp_path):
    torch.manual_seed(0)
    model, batch = Layers(), torch.randn(512, 256)
    step = TrainingStep(
        module=model, inputs=batch, loss_fn=lambda x: x.mean(), optimizer=make_optimizer
    )
    captured = capture_events(step).profile
    optimizer = make_optimizer(model.parameters())
    with OutOfCore(model, optimizer, budget_bytes=PLENTY, spill_folder=tmp_path) as out_of_core:
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
        recorded = out_of_core.session.profile
    assert captured.events == recorded.events
    assert captured.tensors
    assert any(tensor.kind == "optimizer" for tensor in captured.tensors) == (
        make_optimizer is torch.optim.Adam
    )
    assert captured.tensors == recorded.tensors
    # The first layer ran twice, the first time before any event of its step.
    assert [module.name for module in recorded.modules] == ["layers.1", "layers.2"]
    assert {module.name: module.tensors for module in captured.modules} == {
        module.name: module.tensors for module in recorded.modules
    }


@contextlib.contextmanager
def slow_device(file, bytes_per_s):
    """Have each transfer of a spill file take the time of a device of this rate."""
    write, read = file.disk.write, file.disk.read
    never = threading.Event()

    def slowly(transfer, size_bytes, *args):
        transfer(*args)
        never.wait(size_bytes / bytes_per_s)

    file.disk.write = lambda chunks, begin: slowly(
        write, sum(chunk.nbytes for chunk in chunks), chunks, begin
    )
    file.disk.read = lambda into, offset: slowly(read, into.nbytes, into, offset)
    try:
        yield
    finally:
        file.disk.write, file.disk.read = write, read


def test_a_disk_slower_than_planned_is_said_and_planned_again(tmp_path, monkeypatch):
    model, batch = make("mlp")
    twin = copy.deepcopy(model)
    expected = train(model, batch, 12, torch.optim.Adam(model.parameters()))
    optimizer = torch.optim.Adam(twin.parameters())
    lines = []
    with OutOfCore(
        twin, optimizer, budget_bytes=PLENTY, spill_folder=tmp_path, recompute=False,
        say=lines.append,
    ) as out_of_core:  # fmt: skip
        plan_for_half(out_of_core, monkeypatch)
        found = train(twin, batch, 3, optimizer)
        planned = out_of_core.to_json()["planned_write_bytes_per_s"]
        with slow_device(out_of_core.session.target, planned / 20):
            found += train_on(twin, batch, range(3, 12), optimizer)
            outcome = out_of_core.to_json()
    assert found == expected
    assert outcome["corrected"] == 1
    assert outcome["planned_write_bytes_per_s"] < planned / 10
    assert outcome["plan"]["slowdown"] > 1
    assert sum("steps are recorded and planned again" in line for line in lines) == 1
    assert out_of_core.session.counters.diverged == 0


@contextlib.contextmanager
def files_up_to(size_bytes):
    """Let no file of this process grow beyond a size (`ulimit -f`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_may_not_grow_is_said(tmp_path):
    model, batch = make("mlp")
    optimizer = torch.optim.Adam(model.parameters())
    with (
        OutOfCore(model, optimizer, budget_bytes=MIB, spill_folder=tmp_path),
        files_up_to(8 * MIB),
        pytest.raises(StorageError, match=r"cannot spill tensors.*File too large"),
    ):
        train(model, batch, 1, optimizer)


def test_state_that_could_not_be_written_is_not_lost(tmp_path):
    model, batch = make("mlp")
    plain = torch.optim.Adam(model.parameters())
    train(model, batch, 2, plain)
    expected = plain.state_dict()["state"]
    twin, _ = make("mlp")
    optimizer = torch.optim.Adam(twin.parameters())
    with OutOfCore(twin, optimizer, budget_bytes=MIB, spill_folder=tmp_path):
        with files_up_to(0), pytest.raises(StorageError, match="cannot spill tensors"):
            optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
        found = optimizer.state_dict()["state"]
        for number, values in expected.items():
            for key, value in values.items():
                assert torch.equal(found[number][key], value)
    for number, values in optimizer.state_dict()["state"].items():
        assert torch.equal(values["exp_avg"], expected[number]["exp_avg"])


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    model, _ = make("cnn")
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(StorageError, match="cannot make a spill file"):
        OutOfCore(model, optimizer, spill_folder=tmp_path / "none")
    with pytest.raises(UsageError, match="above 0"):
        OutOfCore(model, optimizer, budget_bytes=0, spill_folder=tmp_path)


def test_modules_are_recomputed_where_the_disk_is_slow(tmp_path, monkeypatch):
    # The first use of checkpoints imports modules of 20 MB, much beside so small a model.
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    model, batch = make("mlp")
    twin = copy.deepcopy(model)
    expected = train(model, batch, 7, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    with OutOfCore(twin, optimizer, budget_bytes=PLENTY, spill_folder=tmp_path) as out_of_core:
        plan_for_half(out_of_core, monkeypatch)
        slow = SpillTier(write_bytes_per_s=1e5, read_bytes_per_s=1e5)
        out_of_core.session.planning.tier = lambda: slow
        found = train(twin, batch, 7, optimizer)
        plan = out_of_core.plan
    # Dropout drops the same elements when it is computed again.
    assert found == expected
    assert plan.recomputed
    assert set(plan.recomputed) <= {"0", "1", "2", "3"}
    assert plan.in_core_step_s < plan.step_s
    assert all("forward" not in vars(module) for module in twin)


def test_layers_that_change_statistics_are_not_recomputed(tmp_path):
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)
    ]
    model = nn.Sequential(*blocks)
    assert list(candidates(model)) == ["0", "1", "2"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(16, 8, 32, 32)
    with OutOfCore(model, optimizer, budget_bytes=1 << 40, spill_folder=tmp_path) as out_of_core:
        train(model, batch, 2, optimizer)
    assert out_of_core.session.profile.tensors
    assert out_of_core.session.profile.modules == ()


def test_prepare_takes_a_memory_budget(tmp_path, monkeypatch):
    model, batch = make("mlp")
    twin = copy.deepcopy(model)
    plain = torch.optim.Adam(model.parameters())
    expected = train(model, batch, 4, plain)
    prepared = prepare(
        twin,
        torch.optim.Adam(twin.parameters()),
        memory_budget=PLENTY,
        spill_folder=str(tmp_path),
        alarm=False,
    )
    plan_for_half(prepared.out_of_core, monkeypatch)
    prepared.out_of_core.session.planning.recompute = None  # what is chosen depends on the disk
    try:
        found = train(prepared.model, batch, 4, prepared.optimizer)
        assert prepared.out_of_core.plan.spilled_bytes > 0
        state = prepared.state_dict()["optimizer"]["state"]
    finally:
        prepared.out_of_core.close()
    assert found == expected
    # By name, and whole, as of a training in core.
    moments = {name: plain.state[parameter] for name, parameter in model.named_parameters()}
    assert state.keys() == moments.keys()
    for name, values in state.items():
        assert torch.equal(values["exp_avg_sq"], moments[name]["exp_avg_sq"])


def test_two_optimizers_and_several_backward_passes_are_a_step(tmp_path, monkeypatch):
    """A generator and a critic: the critic's two passes come first, then the generator's."""

    def train_both(models, optimizers):
        generator, critic = models
        found = []
        for step in range(6):
            torch.manual_seed(step)
            noise, real = rows(), rows()
            optimizers[1].zero_grad()
            critic(real).square().mean().backward()
            critic(generator(noise).detach()).square().mean().neg().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic(generator(noise)).square().mean().backward()
            optimizers[0].step()
            every = [*generator.parameters(), *critic.parameters()]
            found.append([digest(parameter.grad) for parameter in every])
        return found

    models = nn.ModuleList([residuals(2), residuals(2)])
    twins = copy.deepcopy(models)
    expected = train_both(models, [torch.optim.Adam(model.parameters()) for model in models])
    optimizers = [torch.optim.Adam(model.parameters()) for model in twins]
    ends = []
    # The generator's optimizer ends a step; the critic's keeps its state in memory.
    with OutOfCore(
        twins, optimizers[0], budget_bytes=PLENTY, spill_folder=tmp_path, recompute=False
    ) as out_of_core:
        optimizers[0].register_step_post_hook(
            lambda *_: ends.append(out_of_core.session.target.size_bytes)
        )
        plan_for_half(out_of_core, monkeypatch)
        found = train_both(twins, optimizers)
        assert out_of_core.plan.spilled_bytes > 0
        assert out_of_core.session.counters.diverged == 0
        assert out_of_core.session.counters.steps == 4
    assert found == expected
    assert ends[-1] == ends[1]  # the file does not grow with the steps


def test_pieces_that_lie_beside_each_other_are_written_at_once(tmp_path, monkeypatch):
    """Whole pages in one system call, and whatever has another size or address as well."""
    calls = []
    pwritev = os.pwritev

    def counted(descriptor, views, offset):
        calls.append(len(views))
        # A disk may take less than all: part of the first pieces.
        return pwritev(descriptor, [views[0][: len(views[0]) // 2 // 4096 * 4096 or None]], offset)

    file = SpillFile(tmp_path)
    pages = torch.arange(9 * 4096).to(torch.uint8)
    pages = aligned_memory(9 * 4096).copy_(pages)
    pieces = [pages[:8192], pages[8192:16384], pages[16385:20000], pages[20480:28672]]
    extent = sum(aligned(piece.nbytes) for piece in pieces)
    for write in (pwritev, counted):
        monkeypatch.setattr("os.pwritev", write)
        offset = file.allocate(extent)
        transfer = file.write(pieces, offset, lambda: None)
        transfer.wait()
        read = file.read(offset, extent, transfer)
        read.wait()
        found, at = read.bytes.numpy(), 0
        for piece in pieces:
            assert np.array_equal(found[at : at + piece.nbytes], piece.numpy())
            at += aligned(piece.nbytes)
    assert calls[0] == 2
    file.close()
