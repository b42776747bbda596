"""What runs beside `truth.py` itself: the ranks of a case, its culprit's helper, and a neighbour.

All of them are forked from one server that has torch imported, so that a case starts in a tenth of
a second. A rank trains a small net under DistributedDataParallel, recorded by the collector and the
recorder that `paceline run` uses. Its computing is real (matrix products) but short; the rest of a
step sleeps, as a host thread does that waits for its device, so that three ranks fit on two cores.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import random
import signal
import struct
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

CHANNEL = struct.Struct("<d")  # a message to a helper: seconds
BATCH = 4
BUSY_S, DEVICE_S = 2.5e-3, 4.5e-3  # of a step: computing, and waiting for the device
HELD = ("lock", "sleep", "pipe")  # ways in which host code blocks
BEFORE_DEVICE = (1.0, 0.0, 0.5)  # share of the computing by rank: three do not want a core at once
WARM = 2  # steps in which the culprit does not collect yet
DEADLINE_S = 60.0
RANK_PRIORITY, HOG_PRIORITY = 1, 2  # in real time
UNIT = 96  # a unit of work is a product of two matrices of this size


@dataclass(frozen=True)
class Plant:
    """What slows the culprit.

    Attributes:
        cause: as the analysis should name it.
        seconds: by which each step is slowed.
        unit_s: of CPU time that a unit of work takes.
        object_s: that a garbage collection takes for each object.
    """

    cause: str
    seconds: tuple[float, ...]
    unit_s: float
    object_s: float
    variant: int = 0


def run_to_the_end(case, ranks, others=()):
    """Start the processes of ranks and wait for them; end them, and `others`, in any case.

    Raises:
        RuntimeError: a rank failed, or did not end.
    """
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_S)
        codes = [process.exitcode for process in ranks]
    finally:
        for process in (*ranks, *others):
            if process.pid is not None:
                process.kill()
                process.join()
    if any(code != 0 for code in codes):  # None is a rank that did not end
        raise RuntimeError(f"{case}: ranks ended with {codes}")


def train(folder, rank, world_size, cores, plant, units, steps, helper, real_time):
    """Train one rank, recorded; `plant` is None for all but the culprit. Ends the process.

    It notes how long each step took from the end of one backward pass, in which ranks wait for each
    other, to the begin of the next: `notes-RANK.json`, seconds.
    """
    import torch
    import torch.distributed as dist

    from paceline.native import Recorder
    from paceline.trace.collectors.torch import TorchCollector
    from paceline.trace.format.files import trace_name

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.sched_setaffinity(0, cores)
    if real_time:
        leave_other_programs(RANK_PRIORITY)
    torch.set_num_threads(1)
    recorder = Recorder(str(Path(folder) / "trace" / trace_name(rank)), rank, world_size)
    collector = TorchCollector(recorder)
    collector.install()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    if helper is not None:
        helper.send_bytes(struct.pack("<q", os.getpid()))
    noted = _loop(plant, units, steps, helper, BEFORE_DEVICE[rank % len(BEFORE_DEVICE)])
    collector.close()
    recorder.close()
    (Path(folder) / f"notes-{rank}.json").write_text(json.dumps(noted))
    os._exit(0)


def _loop(plant, units, steps, helper, share):
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    slowness = _Slowness(plant, helper)
    left, right = torch.randn(UNIT, UNIT), torch.randn(UNIT, UNIT)

    def work(count):
        for _ in range(count):
            torch.mm(left, right)

    class Samples(Dataset):
        inputs = torch.randn(steps * BATCH, 64)

        def __len__(self):
            return len(self.inputs)

        def __getitems__(self, indices):
            slowness.apply("data")
            return [self.inputs[i] for i in indices]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))

        def forward(self, inputs):
            slowness.apply("stopped")
            slowness.apply("not_running")
            count = units + slowness.units()
            work(round(share * count))
            time.sleep(DEVICE_S)
            work(count - round(share * count))
            return self.layers(inputs)

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    noted = []
    ended = time.monotonic()
    for inputs in DataLoader(Samples(), batch_size=BATCH):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        noted.append(time.monotonic() - ended)
        loss.backward()
        ended = time.monotonic()
        slowness.apply("blocked")
        slowness.apply("gc")
        slowness.apply("checkpoint")
        slowness.apply("metrics")
        slowness.apply("log")
        optimizer.step()
        slowness.step += 1
        if slowness.step == WARM:  # what torch has loaded by now is not what a collection is for
            gc.collect()
            gc.freeze()
    return noted


class _Slowness:
    """Slows the culprit where its cause lies; does nothing in all other ranks."""

    def __init__(self, plant, helper):
        self.plant = plant
        self.helper = helper
        self.step = 0
        self.lock = threading.Lock()
        self.heap = []
        self.state = {"weights": bytes(1 << 12)}
        self.numbers = random.Random(0).choices(range(1 << 20), k=200)
        if plant is not None and plant.cause == "log":
            self.log = tempfile.TemporaryFile()  # noqa: SIM115 - open until the process ends
        if plant is not None and plant.cause == "blocked":
            self.pipe = os.pipe()
            self.wanted = os.pipe()
            threading.Thread(target=self._hold, daemon=True).start()

    def seconds(self, cause):
        if self.plant is None or self.plant.cause != cause or self.step >= len(self.plant.seconds):
            return 0.0
        return self.plant.seconds[self.step]

    def units(self):
        seconds = self.seconds("compute")
        return round(seconds / self.plant.unit_s) if seconds else 0

    def apply(self, cause):
        seconds = self.seconds(cause)
        if seconds > 0:
            getattr(self, f"_{cause}")(seconds)

    def _data(self, seconds):
        time.sleep(seconds)

    def _stopped(self, seconds):
        """Wait until it is over: a stop while the rank sleeps for its device would cost nothing."""
        self.helper.send_bytes(CHANNEL.pack(seconds))
        self.helper.recv_bytes()

    def _not_running(self, seconds):
        self.helper.send_bytes(CHANNEL.pack(seconds))

    def _checkpoint(self, seconds):
        import torch

        torch.save(self.state, _SlowFile(seconds))

    def _gc(self, seconds):
        if self.step < WARM:
            return
        wanted = round(seconds / self.plant.object_s)
        self.heap.extend([] for _ in range(wanted - len(self.heap)))
        del self.heap[wanted:]
        gc.collect()

    def _metrics(self, seconds):
        """Compute in Python what one rank alone reports, for so many seconds on a core."""
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            sorted(self.numbers)

    def _log(self, seconds):
        """Write to a log and have it written to the disk, until so many seconds have passed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.log.write(b"step %d\n" % self.step)
            self.log.flush()
            os.fsync(self.log.fileno())

    def _blocked(self, seconds):
        held = HELD[self.plant.variant % len(HELD)]
        if held == "sleep":
            time.sleep(seconds)
            return
        os.write(self.wanted[1], CHANNEL.pack(seconds))
        os.read(self.pipe[0], 1)  # "pipe": until it was long enough; "lock": until the lock is held
        if held == "lock":
            with self.lock:
                pass

    def _hold(self):
        """Run the thread that holds the lock, or that the main thread reads from."""
        while data := os.read(self.wanted[0], CHANNEL.size):
            (seconds,) = CHANNEL.unpack(data)
            if HELD[self.plant.variant % len(HELD)] == "lock":
                with self.lock:
                    os.write(self.pipe[1], b"x")
                    time.sleep(seconds)
            else:
                time.sleep(seconds)
                os.write(self.pipe[1], b"x")


class _SlowFile(io.BytesIO):
    """A file on a file system that takes its time."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def write(self, data):
        seconds, self.seconds = self.seconds, 0.0
        if seconds:
            time.sleep(seconds)
        return super().write(data)


def unit_s():
    """Return the CPU seconds of a unit of work, and of an object in a garbage collection."""
    import torch

    torch.set_num_threads(1)
    left, right = torch.randn(UNIT, UNIT), torch.randn(UNIT, UNIT)
    rounds = []
    for _ in range(30):
        begin = time.thread_time()
        for _ in range(20):
            torch.mm(left, right)
        rounds.append((time.thread_time() - begin) / 20)
    gc.collect()
    gc.freeze()
    heap = [[] for _ in range(100_000)]
    begin = time.thread_time()
    gc.collect()
    seconds = time.thread_time() - begin
    return sorted(rounds)[len(rounds) // 2], seconds / len(heap)


def measure_units(answer):
    """Send what `unit_s` returns."""
    answer.send(unit_s())


def stop_on_demand(channel):
    """Stop the rank that asks for it, for as long as it asks."""
    _hurry()
    (pid,) = struct.unpack("<q", channel.recv_bytes())
    for seconds in _demands(channel):
        try:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            channel.send_bytes(b"over")  # read when the rank runs again
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return


def compute_on_demand(channel, cores, real_time):
    """Take the core of the rank that asks for it, for as long as it asks."""
    os.sched_setaffinity(0, cores)
    if real_time:
        leave_other_programs(HOG_PRIORITY)
    _hurry()
    channel.recv_bytes()
    for seconds in _demands(channel):
        begin = time.thread_time()
        while time.thread_time() - begin < seconds:
            pass


def _hurry():
    with contextlib.suppress(PermissionError):  # then it takes half of the core
        os.nice(-15)


def leave_other_programs(priority):
    """Have the kernel run this thread before all ordinary ones, if it may: in real time.

    The kernel would move other programs from a core that a hog takes to the other rank's, so that
    the hog made that rank late. Ranks and hogs in real time have the cores to themselves.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))


def _demands(channel):
    try:
        while True:
            yield CHANNEL.unpack(channel.recv_bytes())[0]
    except EOFError:
        return


def disturb(seed):
    """Be the neighbour: take a core now and then until killed."""
    random_ = random.Random(seed)
    while True:
        end = time.monotonic() + random_.uniform(0.06, 0.25)
        while time.monotonic() < end:
            pass
        time.sleep(random_.uniform(0.3, 1.2))
