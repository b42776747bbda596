"""What the recorder needs of torch, one test for each capability: a failure names what broke.

Run under another version of torch by scripts/torch-conformance.
"""

import multiprocessing
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import forking
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.utils.data import DataLoader

from paceline.native import Recorder
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors import torch_operators as operators
from paceline.trace.collectors.hook_registry import HookRegistry
from paceline.trace.collectors.torch_collectives import CollectiveRecorder
from paceline.trace.collectors.torch_hooks import Loop
from paceline.trace.collectors.torch_in_flight import InFlight
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.format.events import COMPLETION_UNKNOWN, Kind
from paceline.trace.format.files import read_trace

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT = timedelta(seconds=60)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A process group of one rank."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1, timeout=TIMEOUT
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_every_capability_has_a_test():
    tested = {name.removeprefix("test_capability_") for name in globals() if "capability_" in name}
    assert {capability.name.lower() for capability in Capability} <= tested


def test_this_torch_has_every_capability(caplog):
    assert internals.available() == frozenset(Capability)
    assert caplog.text == ""


@pytest.mark.parametrize("workers", [0, 1])
def test_capability_loader_iterator(monkeypatch, workers):
    """Iterators of all kinds of loaders get their batches through one method."""
    calls, original = [], internals.loader_iterator().__next__

    def counted(iterator):
        calls.append(iterator)
        return original(iterator)

    monkeypatch.setattr(internals.loader_iterator(), "__next__", counted)
    loader = DataLoader(list(range(4)), batch_size=2, num_workers=workers)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert len(calls) == 3


def test_capability_worker_loop(monkeypatch):
    """Workers run one function, found by its name when they are started, and fetch by one method.

    The function's arguments are known by their places, and a batch is put into the queue with its
    number, which the loop counts as well.
    """
    original, names = internals.worker_loop(), internals.worker_arguments(internals.worker_loop())
    made = multiprocessing.get_context("fork").SimpleQueue()

    class Queue:
        def __init__(self, queue):
            self.queue = queue

        def put(self, item):
            made.put((item[0], len(item[1])))
            self.queue.put(item)

        def __getattr__(self, name):
            return getattr(self.queue, name)

    def noted(*args):
        args = list(args)
        assert args[names["worker_id"]] == 0
        args[names["data_queue"]] = Queue(args[names["data_queue"]])
        original(*args)

    monkeypatch.setattr(internals.worker_module(), internals.WORKER_LOOP, noted)
    for fetcher in internals.fetchers():
        assert callable(vars(fetcher)["fetch"])
    context = {"num_workers": 1, "multiprocessing_context": "fork"}
    iterator = iter(DataLoader(list(range(4)), batch_size=2, **context))
    fetched = [(internals.delivered_number(iterator), batch.tolist()) for batch in iterator]
    assert fetched == [(0, [0, 1]), (1, [2, 3])]
    assert [made.get(), made.get()] == [(0, 2), (1, 2)]
    assert internals.delivered_number(iter(DataLoader([1]))) is None


def _optimizer(step=None):
    class Chosen(torch.optim.SGD):
        def step(self, closure=None):
            if step is not None:
                step()
            return super().step(closure)

    return Chosen([nn.Parameter(torch.ones(1))], lr=0.1)


def test_capability_optimizer_hooks():
    """Steps of any optimizer call the hooks; a step that raises does not call the later one."""
    calls = []
    handles = internals.hook_optimizer_steps(
        lambda *_: calls.append("before"), lambda *_: calls.append("after")
    )
    try:
        _optimizer().step()
        assert calls == ["before", "after"] or calls == ["before"] * 2 + ["after"] * 2
        calls.clear()

        def fail():
            raise MemoryError

        with pytest.raises(MemoryError):
            _optimizer(fail).step()
        assert calls == ["before"]
    finally:
        for handle in handles:
            handle.remove()


def test_capability_step_code():
    """The code around steps is the same for all classes, and on the stack during a step."""
    inside, code = [], internals.step_code()
    inner = _optimizer(lambda: inside.append(internals.frames_of(code)))
    alone = internals.frames_of(code)
    inner.step()
    outer = _optimizer(inner.step)
    outer.step()
    assert alone == 0
    assert inside[0] >= 1
    assert inside[1] > inside[0]


def test_capability_dispatcher(world):
    """A kernel on an autograd key sees a collective, with its group and its work."""
    seen = []
    overload = internals.operators("c10d")["allreduce_"]
    places = operators.places(overload, 0)

    def kernel(*args):
        with internals.below_autograd():
            result = overload(*args)
        seen.append((internals.unbox_group(args[places.group]), internals.work_of(result)))
        return result

    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", kernel, "AutogradCPU")
    try:
        value = torch.ones(3)
        dist.all_reduce(value)
    finally:
        library._destroy()
    ((group, work),) = seen
    assert group.group_name == world.group_name
    assert isinstance(work, internals.c10d().Work)
    assert value.tolist() == [1, 1, 1]
    dist.all_reduce(value)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("namespace", "table"), [("c10d", operators.C10D), ("_c10d_functional", operators.FUNCTIONAL)]
)
def test_every_operator_that_communicates_is_known_and_says_where_its_group_is(namespace, table):
    present = internals.operators(namespace)
    assert present.keys() - operators.NOT_COMMUNICATION <= table.keys(), "unseen collectives"
    needed = {"c10d": {"allreduce_", "broadcast_", "send", "recv_"}}
    assert needed.get(namespace, {"all_reduce", "all_gather_into_tensor"}) <= present.keys()
    for name in table.keys() & present.keys():
        places = operators.places(present[name], table[name][1])
        assert places.group > 0
        if table[name][0] in ("broadcast", "reduce", "gather", "scatter"):
            assert places.peer is not None, name
        if table[name][0] in ("send", "recv"):
            assert places.tag is not None, name


def test_capability_works(world, monkeypatch):
    """Waits go through the class's method, which can be replaced."""
    waited, original = [], internals.c10d().Work.wait

    def counted(work, *args, **kwargs):
        waited.append(work)
        return original(work, *args, **kwargs)

    monkeypatch.setattr(internals.c10d().Work, "wait", counted)
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), async_op=True).wait(timeout=TIMEOUT)
    dist.barrier()
    assert len(waited) == 3


def test_a_work_that_the_script_holds_is_told_from_one_that_it_does_not(world):
    holder = internals._Holder(dist.all_reduce(torch.ones(1), async_op=True))
    assert not internals.is_held_elsewhere(holder)
    script = holder.keep
    assert internals.is_held_elsewhere(holder)
    script.wait()
    del script
    assert not internals.is_held_elsewhere(holder)


def test_capability_futures(world):
    """A work's future calls back when the work is done, with the GIL held."""
    done = []
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    future = work.get_future()
    future.add_done_callback(lambda _: done.append(True))
    work.wait()
    future.wait()
    assert done == [True]


def test_capability_engine_callback():
    """The engine calls back when gradients are there, before `backward` returns."""
    value = torch.ones(3, requires_grad=True)
    seen = []
    value.register_hook(
        lambda _: internals.queue_engine_callback(lambda: seen.append(value.grad.tolist()))
    )
    value.sum().backward()
    assert seen == [[1, 1, 1]]
    with pytest.raises(RuntimeError):
        internals.queue_engine_callback(lambda: None)


def test_capability_buffer_broadcast(world, monkeypatch):
    """DDP broadcasts its buffers through the module's function."""
    calls, original = [], dist._broadcast_coalesced

    def counted(*args, **kwargs):
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    monkeypatch.setattr(dist, "_broadcast_coalesced", counted)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    made = len(calls)
    assert made >= 1
    model(torch.ones(4, 2))
    assert len(calls) > made
    for args, kwargs in calls:  # what the wrapper's signature takes
        names = ("process_group", "tensors", "buffer_size", "src")
        assert len(args) <= len(names)
        assert kwargs.keys() <= {*names}


def test_capability_functional_wait(world):
    """What a functional collective returns is waited for by an operator, and has its identity."""
    waited = []
    overload = internals.operators("_c10d_functional")["wait_tensor"]

    def kernel(tensor):
        waited.append(internals.tensor_identity(tensor))
        with internals.below_autograd():
            return overload(tensor)

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("wait_tensor", kernel, "AutogradCPU")
    try:
        issued = internals.operators("_c10d_functional")["all_reduce"](
            torch.ones(3), "sum", world.group_name
        )
        identity = internals.tensor_identity(issued)
        functional.wait_tensor(issued)
    finally:
        library._destroy()
    assert waited == [identity]


def test_capability_group_members(world):
    """Members are known by the group, in order, and as one object as long as the group lives."""
    group = dist.new_group([0])
    assert internals.members_of(world) == {0: 0}
    assert internals.members_of(group) is internals.members_of(group)
    assert internals.members_of(group) is not internals.members_of(world)
    assert list(internals.members_of(group)) == dist.get_process_group_ranks(group)
    assert internals.members_of(object()) == {}
    assert internals.unbox_group(group.group_name).group_name == group.group_name


def test_capability_backends(world):
    """A group names its backend for a type of device; a stream's backend shows no completion."""
    assert internals.backend_of(world, "cpu") == "gloo"
    assert internals.completion_is_seen("gloo", "cuda")
    assert internals.completion_is_seen("anything", "cpu")
    assert not internals.completion_is_seen("nccl", "cuda")
    assert not internals.completion_is_seen("", "cuda")


def test_capability_gradient_hooks():
    """A parameter's hook is called once its gradient is there, and leaves nothing behind."""
    layer = nn.Linear(2, 1)
    seen = []
    remove = internals.see_gradient(layer.weight, lambda weight: seen.append(weight.grad.clone()))
    layer(torch.ones(1, 2)).sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[[1.0, 1.0]]]
    remove()
    layer(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 1
    assert layer.weight._post_accumulate_grad_hooks is None
    own = layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(None))
    internals.see_gradient(layer.weight, lambda _: None)()
    layer(torch.ones(1, 2)).sum().backward()
    assert len(seen) == 2, "a hook of the script's stays"
    own.remove()


def test_capability_thread_state(world):
    """A backend's thread may be kept, again and again, and still call back."""
    threads = []

    def completed(_):
        internals.keep_thread_state()
        threads.append(True)

    for _ in range(20):
        work = dist.all_reduce(torch.ones(10), async_op=True)
        future = work.get_future()
        future.add_done_callback(completed)
        work.wait()
        future.wait()
    assert len(threads) == 20


def test_capability_dynamo_frames():
    """A hidden function is not compiled, nor what it calls; what a passing one calls is."""
    import torch._dynamo

    seen = []

    def backend(graph, _):
        seen.append(graph.code)
        return graph.forward

    def leaf(x):
        return x.sin()

    def hidden(x):
        return leaf(x) + 1

    def passing(x):
        return leaf(x) + 1

    set_strategy, strategy, action = internals._dynamo_frames()
    set_strategy(hidden.__code__, strategy(action.SKIP, action.SKIP))
    set_strategy(passing.__code__, strategy(action.SKIP, action.DEFAULT))
    run = torch._dynamo.optimize(backend)
    graphs = []
    for function in (hidden, passing):
        seen.clear()
        run(function)(torch.ones(1))
        graphs.append(len(seen))
    assert graphs == [0, 1]

    @torch.compile(backend=backend, fullgraph=True)
    def traced(x):
        return x + 1 if internals.at_run_time() else x - 1

    assert internals.at_run_time()
    assert traced(torch.ones(1)).item() == 0


def test_a_recorder_that_fails_amid_a_collective_says_so_once_and_ends_nothing(
    world, tmp_path, monkeypatch, caplog
):
    recorder = Recorder(str(tmp_path / "rank.trace"), 0, 1)
    in_flight = InFlight(recorder, Loop(main_thread=0), frozenset(Capability))
    collectives = CollectiveRecorder(in_flight, HookRegistry())
    overload = internals.operators("c10d")["allreduce_"]
    kernel = collectives._c10d_kernel("all_reduce", overload, operators.places(overload, 0))
    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", kernel, "AutogradCPU")
    monkeypatch.setattr(operators, "payload_of", lambda _: 1 / 0)
    try:
        for _ in range(3):
            value = torch.ones(2)
            dist.all_reduce(value)
            assert value.tolist() == [1, 1]
    finally:
        library._destroy()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert Capability.DISPATCHER.value in warning
    assert "ZeroDivisionError" in warning
    recorder.close()


@pytest.mark.parametrize("seen", [True, False])
def test_a_backend_that_calls_back_at_enqueue_has_its_collectives_marked(
    world, tmp_path, monkeypatch, seen
):
    """As NCCL's, whose futures would make each transfer look like nothing."""
    monkeypatch.setattr(internals, "completion_is_seen", lambda *_: seen)
    recorder = Recorder(str(tmp_path / "rank.trace"), 0, 1)
    loop = Loop(main_thread=threading.get_ident())
    in_flight = InFlight(recorder, loop, frozenset(Capability))
    collectives = CollectiveRecorder(in_flight, HookRegistry())
    overload = internals.operators("c10d")["allreduce_"]
    kernel = collectives._c10d_kernel("all_reduce", overload, operators.places(overload, 0))
    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", kernel, "AutogradCPU")
    try:
        dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()
        dist.all_reduce(torch.ones(2))
    finally:
        library._destroy()
    in_flight.close()
    recorder.close()
    events = read_trace(tmp_path / "rank.trace").events_of(Kind.COLLECTIVE)
    assert events["sequence"].tolist() == [1, 2]
    assert events["flags"].tolist() == [0 if seen else COMPLETION_UNKNOWN] * 2


def _as_unrecorded(script, folder):
    """Run a script that compares recorded children with unrecorded ones; return its last line."""
    done = forking.run(
        [sys.executable, str(SCRIPTS / script), str(folder)],
        modules=forking.TORCH,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_what_a_torch_lacks_costs_one_warning_each_and_the_rest_is_recorded(tmp_path):
    """In one child for each capability that it has to do without, and in one for all."""
    last = _as_unrecorded("missing_capabilities.py", tmp_path)
    assert last == f"{len(Capability) + 1} as unrecorded"


def test_a_hook_that_fails_costs_one_warning_and_neither_results_nor_the_scripts_exceptions(
    tmp_path,
):
    last = _as_unrecorded("failing_hooks.py", tmp_path)
    assert last == "7 groups of faults as unrecorded"
