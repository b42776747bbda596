"""Ranks of one host as real processes; run with ``python -m host_ranks SCENARIO RANKS ARGUMENTS``.

The parent forks the ranks and serves their key-value store over pipes, so that a rank needs neither
torch nor a port. It prints a JSON list: what each rank reported, or null for one that was killed.
"""

import json
import os
import random
import signal
import subprocess
import sys
from multiprocessing.connection import Pipe, wait
from pathlib import Path

import numpy as np

from paceline.collectives import DType, HostGroup, ReduceOp, find_hosts
from paceline.core.errors import PacelineError

TIMEOUT_S = 60.0


def run(scenario, ranks, **arguments):
    """Return what each rank of a scenario reported, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "support.host_ranks",
        scenario,
        str(ranks),
        json.dumps(arguments),
    ]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, timeout=120, check=True
    )
    return json.loads(result.stdout)


class PipeStore:
    """A rank's end of the store."""

    def __init__(self, pipe):
        self.pipe = pipe

    def set(self, key, value):
        self.pipe.send(("set", key, value))

    def get(self, key):
        self.wait([key], None)
        self.pipe.send(("get", key, None))
        return self.pipe.recv()

    def wait(self, keys, timeout):
        self.pipe.send(("wait", list(keys), None))
        if not self.pipe.poll(None if timeout is None else timeout.total_seconds()):
            self.pipe.send(("forget", None, None))
            self.pipe.recv()  # the late answer, or that there will be none
            raise RuntimeError("wait timeout")
        self.pipe.recv()


class Parent:
    """Serves the store, and acts on what ranks report; one thread."""

    def __init__(self, pipes, on_report):
        self.pipes = pipes  # by rank
        self.on_report = on_report
        self.values = {}
        self.waiting = {}  # rank -> keys
        self.results = {}

    def serve(self):
        while len(self.results) < len(self.pipes):
            open_pipes = [pipe for rank, pipe in enumerate(self.pipes) if rank not in self.results]
            ready = wait(open_pipes, timeout=TIMEOUT_S)
            assert ready, f"no rank did anything; finished: {self.results}"
            for pipe in ready:
                self.receive(self.pipes.index(pipe), pipe)

    def receive(self, rank, pipe):
        try:
            act, key, value = pipe.recv()
        except (EOFError, ConnectionResetError):  # killed
            self.results[rank] = None
            return
        if act == "set":
            self.values[key] = value
            self.answer_waiting()
        elif act == "get":
            pipe.send(self.values[key])
        elif act == "wait":
            self.waiting[rank] = key
            self.answer_waiting()
        elif act == "forget":
            if self.waiting.pop(rank, None) is not None:
                pipe.send(None)
        elif act == "report":
            self.on_report(rank, key)
        elif act == "result":
            self.results[rank] = key
            self.on_report(rank, "result")

    def answer_waiting(self):
        for rank, keys in list(self.waiting.items()):
            if all(key in self.values for key in keys):
                del self.waiting[rank]
                self.pipes[rank].send(None)


def start(ranks, work):
    """Fork the ranks; return their pipes and process ids."""
    pipes, processes = [], []
    for rank in range(ranks):
        own, theirs = Pipe()
        process = os.fork()
        if process == 0:
            own.close()
            for pipe in pipes:
                pipe.close()
            theirs.send(("result", outcome(work, rank, PipeStore(theirs)), None))
            os._exit(0)
        theirs.close()
        pipes.append(own)
        processes.append(process)
    return pipes, processes


def outcome(work, rank, store):
    try:
        return {"value": work(rank, store)}
    except PacelineError as error:
        return {"error": type(error).__name__, "where": error.where, "text": str(error)}
    except BaseException as error:  # noqa: BLE001  # reported to the parent, which fails the test
        print(f"rank {rank}: {error!r}", file=sys.stderr)
        return {"error": type(error).__name__, "where": "", "text": str(error)}


def collect(pipes, processes, on_report=lambda rank, what: None):
    parent = Parent(pipes, on_report)
    try:
        parent.serve()
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)  # not reaped yet: the id is still theirs
            os.waitpid(process, 0)
    return [parent.results[rank] for rank in range(len(pipes))]


# Scenarios: functions of the number of ranks and arguments, each returns what the ranks reported.

NUMPY_TYPES = {
    DType.FLOAT32: np.float32,
    DType.FLOAT64: np.float64,
    DType.FLOAT16: np.float16,
    DType.INT8: np.int8,
    DType.INT16: np.int16,
    DType.INT32: np.int32,
    DType.INT64: np.int64,
    DType.UINT8: np.uint8,
}
COUNTS = (0, 1, 5, 1000, 70_001)


def values_of(rank, count, numpy_type):
    """Return small whole numbers: their sums are exact in every type, in every order."""
    return np.random.default_rng(rank).integers(0, 6, count).astype(numpy_type)


def sum_of(ranks, count, numpy_type):
    return sum(values_of(rank, count, numpy_type) for rank in range(ranks))


def correctness(ranks):
    def work(rank, store):
        group = HostGroup.form(store, rank, ranks, TIMEOUT_S)
        for dtype, numpy_type in NUMPY_TYPES.items():
            for count in COUNTS:
                check_reductions(group, dtype, numpy_type, count)
        for count in COUNTS:
            check_copies(group, count)
        check_bfloat16(group)
        check_same_bits(group)
        group.close()
        return "ok"

    return collect(*start(ranks, work))


def check_reductions(group, dtype, numpy_type, count):
    rank, ranks = group.rank, group.ranks
    expected = sum_of(ranks, count, numpy_type)
    array = values_of(rank, count, numpy_type)
    group.all_reduce(array.ctypes.data, count, dtype, ReduceOp.SUM, TIMEOUT_S)
    np.testing.assert_array_equal(array, expected)
    array = values_of(rank, count, numpy_type)
    group.all_reduce_array(array, ReduceOp.MAXIMUM)
    everyone = [values_of(peer, count, numpy_type) for peer in range(ranks)]
    np.testing.assert_array_equal(array, np.max(everyone, axis=0))
    array = values_of(rank, count, numpy_type)
    group.reduce_array(array, ranks - 1, ReduceOp.SUM)
    own = values_of(rank, count, numpy_type)
    np.testing.assert_array_equal(array, expected if rank == ranks - 1 else own)
    source = values_of(rank, count * ranks, numpy_type)
    target = np.zeros(count, numpy_type)
    group.reduce_scatter(
        source.ctypes.data, target.ctypes.data, count, dtype, ReduceOp.SUM, TIMEOUT_S
    )
    shares = sum_of(ranks, count * ranks, numpy_type).reshape(ranks, count)
    np.testing.assert_array_equal(target, shares[rank])


def check_copies(group, count):
    rank, ranks = group.rank, group.ranks
    own = values_of(rank, count, np.float32)
    everyone = np.array([values_of(peer, count, np.float32) for peer in range(ranks)])
    gathered = np.zeros((ranks, count), np.float32)
    group.all_gather(own.ctypes.data, gathered.ctypes.data, own.nbytes, TIMEOUT_S)
    np.testing.assert_array_equal(gathered, everyone)
    array = own.copy()
    group.broadcast_array(array, ranks - 1)
    np.testing.assert_array_equal(array, everyone[-1])
    target = np.zeros((ranks, count), np.float32)
    group.gather(own.ctypes.data, target.ctypes.data, own.nbytes, 0, TIMEOUT_S)
    np.testing.assert_array_equal(target, everyone if rank == 0 else np.zeros_like(target))
    group.scatter(everyone.ctypes.data, array.ctypes.data, own.nbytes, 0, TIMEOUT_S)
    np.testing.assert_array_equal(array, own)
    sizes = [own.nbytes] * ranks
    group.all_to_all(everyone.ctypes.data, target.ctypes.data, sizes, sizes, TIMEOUT_S)
    np.testing.assert_array_equal(target, np.array([own] * ranks))
    check_messages(group, own)
    group.barrier(TIMEOUT_S)


def check_messages(group, own):
    """Even ranks send to the next odd one, which sends back."""
    partner = group.rank ^ 1
    if partner >= group.ranks:
        return
    answer = np.zeros_like(own)
    for sending in (True, False) if group.rank % 2 == 0 else (False, True):
        if sending:
            group.send(own.ctypes.data, own.nbytes, partner, 7, TIMEOUT_S)
        else:
            group.receive(answer.ctypes.data, answer.nbytes, partner, 7, TIMEOUT_S)
    np.testing.assert_array_equal(answer, values_of(partner, own.size, np.float32))


def send_around(group, array, timeout_s):
    """Send to the next rank, and receive from the one before."""
    received = np.zeros_like(array)
    before, following = ((group.rank + step) % group.ranks for step in (-1, 1))
    receive = group.post_receive(received.ctypes.data, received.nbytes, before, 0)
    send = group.post_send(array.ctypes.data, array.nbytes, following, 0)
    for message in (receive, send):
        group.wait(message, timeout_s)
    np.testing.assert_array_equal(received, array)


def check_bfloat16(group):
    """Sums of small whole numbers, as the upper halves of float32."""
    count = 10_001
    array = (values_of(group.rank, count, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    group.all_reduce_array(array, dtype=DType.BFLOAT16)
    wide = (array.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(wide, sum_of(group.ranks, count, np.float32))


def check_same_bits(group):
    """One sum, in rank order, whatever the size of the message and the path."""
    count = 50_000
    values = [np.random.default_rng(peer).standard_normal(count) for peer in range(group.ranks)]
    values = [value.astype(np.float32) for value in values]
    expected = values[0].copy()
    for value in values[1:]:
        expected += value
    whole = values[group.rank].copy()
    group.all_reduce_array(whole)
    np.testing.assert_array_equal(whole.view(np.uint32), expected.view(np.uint32))
    split = values[group.rank].copy()
    for part in np.array_split(split, 37):
        group.all_reduce_array(part)
    np.testing.assert_array_equal(split.view(np.uint32), expected.view(np.uint32))


def hosts(ranks):
    return collect(*start(ranks, lambda rank, store: find_hosts(store, rank, ranks, TIMEOUT_S)))


def absent(ranks):
    """The last rank never comes to the forming of the group."""

    def work(rank, store):
        if rank < ranks - 1:
            HostGroup.form(store, rank, ranks, 1.0)

    return collect(*start(ranks, work))


def differing(ranks):
    def work(rank, store):
        group = HostGroup.form(store, rank, ranks, TIMEOUT_S)
        if rank == ranks - 1:
            group.broadcast_array(np.zeros(3, np.float32), ranks - 1, TIMEOUT_S)
        else:
            group.all_reduce_array(np.zeros(2, np.float32))
        group.barrier(TIMEOUT_S)

    return collect(*start(ranks, work))


def several_roots(ranks):
    """Each rank takes itself for the root of a broadcast, and so waits for nobody."""

    def work(rank, store):
        group = HostGroup.form(store, rank, ranks, TIMEOUT_S)
        group.broadcast_array(np.zeros(3, np.float32), rank, TIMEOUT_S)
        group.barrier(TIMEOUT_S)

    return collect(*start(ranks, work))


def ahead(ranks):
    """Roots change from call to call, and ranks get ahead of each other; calls are equal."""

    def work(rank, store):
        group = HostGroup.form(store, rank, ranks, TIMEOUT_S)
        for call in range(2000):
            root = call // 7 % ranks
            group.broadcast_array(np.zeros(1 + call % 3, np.float32), root, TIMEOUT_S)
            if call % 31 == 0:
                group.barrier(TIMEOUT_S)
        return "ok"

    return collect(*start(ranks, work))


def forked(ranks):
    """A child of each rank tries the group, and ends; the rank goes on, a message under way."""

    def work(rank, store):
        group = HostGroup.form(store, rank, ranks, TIMEOUT_S)
        array, received = np.full(200_000, 7.0), np.zeros(200_000)
        other = 1 - rank
        send = group.post_send(array.ctypes.data, array.nbytes, other, 0)
        said = outcome_of_child(group)
        receive = group.post_receive(received.ctypes.data, received.nbytes, other, 0)
        for message in (send, receive):
            group.wait(message, TIMEOUT_S)
        group.barrier(TIMEOUT_S)
        assert received.tolist() == array.tolist()
        return said

    return collect(*start(ranks, work))


def outcome_of_child(group):
    """Return what a forked child of this process gets from a group that it then closes."""
    own, theirs = Pipe()
    process = os.fork()
    if process == 0:
        theirs.send(outcome(lambda rank, store: group.barrier(TIMEOUT_S), 0, None))
        group.close()
        os._exit(0)
    said = own.recv()
    os.waitpid(process, 0)
    return said


def disturbed(ranks, number, victim, deadline_s, seed):
    """A signal hits a rank in the middle of collectives; the others go on until they fail."""
    rng = random.Random(seed)
    countdown = rng.randrange(3, 60)  # reports until the signal
    stopped = False

    def work(rank, store):
        group = HostGroup.form(store, rank, ranks, TIMEOUT_S)
        draw = random.Random(seed)  # equal on all ranks
        while True:
            array = np.ones(draw.choice((8, 3000, 200_000, 1_000_000)), np.float32)
            call = draw.choice(("all_reduce", "broadcast", "reduce", "barrier", "ring"))
            if call == "all_reduce":
                group.all_reduce_array(array, timeout_s=deadline_s)
            elif call == "broadcast":
                group.broadcast_array(array, draw.randrange(ranks), timeout_s=deadline_s)
            elif call == "reduce":
                group.reduce_array(array, draw.randrange(ranks), timeout_s=deadline_s)
            elif call == "ring":
                send_around(group, array, deadline_s)
            else:
                group.barrier(deadline_s)
            store.pipe.send(("report", call, None))

    pipes, processes = start(ranks, work)
    survivors = set(range(ranks)) - {victim}

    def on_report(rank, what):
        nonlocal countdown, stopped
        countdown -= 1
        if countdown <= 0 and not stopped:
            stopped = True
            os.kill(processes[victim], number)
        if what == "result":
            survivors.discard(rank)
            if not survivors:
                os.kill(processes[victim], signal.SIGKILL)

    return collect(pipes, processes, on_report)


SCENARIOS = {
    "absent": absent,
    "correctness": correctness,
    "differing": differing,
    "several_roots": several_roots,
    "ahead": ahead,
    "forked": forked,
    "disturbed": disturbed,
    "hosts": hosts,
}

if __name__ == "__main__":
    print(json.dumps(SCENARIOS[sys.argv[1]](int(sys.argv[2]), **json.loads(sys.argv[3]))))
