"""How tasks of one step find each other and tell how they ended: files in the run's folder.

All nodes of a job share that folder anyway. What stands in ``RUN/meeting`` is removed when all
have ended:

    rank-00001.hello   each task says that it is here, with a number that only this run knows
    start.json         rank 0, when all are here: their numbers, its address, their cores
    rank-00001.exit    each task says how its rank ended
    failed             a rank did not end well: the others need not go on

The numbers matter: a file of an earlier run in the same folder is never taken for one of this run.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.errors import DeadlineExceeded, DestinationExists, RankLost, StorageError
from paceline.core.files import commit_text
from paceline.core.processes import Exit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.core.clock import Clock

MEET_S = 120.0  # tasks of one step start within this of each other
TAIL_S = 600.0  # and end, when all go well: some rank may still write a checkpoint
AFTER_FAILURE_S = 10.0  # a task needs about 3 s to end its rank when another has failed
_LOOK_S = 0.05
# What rank 0 writes before all are here: in a folder with only these, a run is about to start.
_START = frozenset(
    ("config.json", "versions.json", "machine.json", "plan.json", "trace", "meeting")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where rank 0 listens, and which part of its cores a rank gets: `index` of `count`."""

    address: str
    port: int
    index: int
    count: int


class Meeting:
    """One task's side of the meeting in the folder of a run."""

    def __init__(self, run: Path, rank: int, world_size: int, clock: Clock) -> None:
        self.folder = run / "meeting"
        self.rank = rank
        self.world_size = world_size
        self.clock = clock
        self.number = uuid.uuid4().hex

    def start(
        self, host: str, cores: Sequence[int], listen: Callable[[], tuple[str, int]]
    ) -> Start:
        """Return where and how to start, when all are here.

        Args:
            host: this node.
            cores: that this task may use.
            listen: returns rank 0's address and port; called on rank 0 alone.

        Raises:
            DeadlineExceeded: somebody did not come.
            RankLost: somebody failed before all were here.
        """
        if self.rank == 0:
            self.folder.mkdir()
        else:
            self._await(self.folder.is_dir, self._without_rank_0)
        hello = {"number": self.number, "host": host, "cores": list(cores)}
        commit_text(self._path(self.rank, "hello"), json.dumps(hello))
        path = self.folder / "start.json"
        if self.rank == 0:
            self._await(lambda: not self.missing("hello"), self._without_others)
            hellos = [_read(self._path(rank, "hello")) for rank in range(self.world_size)]
            address, port = listen()
            start: dict[str, Any] = {
                "numbers": [one["number"] for one in hellos],
                "address": address,
                "port": port,
                "parts": parts([(one["host"], tuple(one["cores"])) for one in hellos]),
            }
            commit_text(path, json.dumps(start))
        else:
            self._await(lambda: self._is_ours(path), self._without_rank_0)
            start = _read(path)
        index, count = start["parts"][self.rank]
        return Start(address=start["address"], port=start["port"], index=index, count=count)

    def tell(self, ended: Exit) -> None:
        """Tell the others how this task's rank ended."""
        told = {
            "version": 1,
            "rank": self.rank,
            "code": ended.code,
            "signal": ended.signal,
            "fate": ended.fate,
            "at_ns": int(ended.at_s * 1e9),
        }
        if ended.code:
            self.fail()
        try:
            commit_text(self._path(self.rank, "exit"), json.dumps(told))
        except StorageError:
            if self.folder.is_dir():
                raise
            # This was the last to tell, rank 0 has read it, and removed the folder under our hands.

    def fail(self) -> None:
        """Have the others stop: not all ranks will end well."""
        (self.folder / "failed").touch()

    def began(self) -> bool:
        """Whether all tasks came, so that all will tell how they end."""
        return (self.folder / "start.json").exists()

    def failed(self) -> bool:
        """Whether some rank did not end well."""
        return (self.folder / "failed").exists()

    def gather(self) -> tuple[Exit, ...]:
        """Return the exits of all ranks that did not end well, the first first.

        A rank whose task does not tell in time is among them, as lost.
        """
        begin_s = self.clock.now_s()
        failed_s: float | None = None
        never = threading.Event()
        while missing := self.missing("exit"):
            now_s = self.clock.now_s()
            if failed_s is None and self.failed():
                failed_s = now_s
            if now_s - begin_s > TAIL_S or (
                failed_s is not None and now_s - failed_s > AFTER_FAILURE_S
            ):
                break
            self.clock.wait(never, _LOOK_S)
        told = [
            _read(self._path(rank, "exit"))
            for rank in range(self.world_size)
            if rank not in missing
        ]
        told = sorted((one for one in told if one["code"]), key=lambda one: int(one["at_ns"]))
        if not missing:
            shutil.rmtree(self.folder, ignore_errors=True)
        if told and told[0]["fate"] == "interrupted":
            return (_exit(told[0]),)
        # Whoever was stopped or interrupted later is a consequence.
        exits = [_exit(one) for one in told if not one["fate"]]
        exits += [Exit(rank=rank, code=RankLost.exit_code, fate="lost") for rank in missing]
        return tuple(exits) or tuple(_exit(one) for one in told)

    def missing(self, kind: str) -> list[int]:
        """Return the ranks that have not written their file of `kind`."""
        names = set(os.listdir(self.folder))  # noqa: PTH208  # names are all that is needed
        return [r for r in range(self.world_size) if self._path(r, kind).name not in names]

    def _path(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank-{rank:05d}.{kind}"

    def _is_ours(self, path: Path) -> bool:
        return path.exists() and self.number in _read(path)["numbers"]

    def _await(self, condition: Callable[[], bool], late: Callable[[], DeadlineExceeded]) -> None:
        deadline_s = self.clock.now_s() + MEET_S
        never = threading.Event()
        while not condition():
            if self.failed():
                raise RankLost(
                    "another task failed before all were here",
                    where=f"rank {self.rank}",
                    fix="See the output of the other tasks",
                )
            if self.clock.now_s() > deadline_s:
                raise late()
            self.clock.wait(never, _LOOK_S)

    def _without_rank_0(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            "rank 0 did not come",
            where=str(self.folder),
            why=f"its file did not appear within {MEET_S:.0f} s",
            fix="See rank 0's output; the folder must be on a file system that all nodes share",
        )

    def _without_others(self) -> DeadlineExceeded:
        missing = self.missing("hello")
        return DeadlineExceeded(
            f"{len(missing)} of {self.world_size} tasks did not come: {names_of(missing)}",
            where=str(self.folder),
            why=f"their files did not appear within {MEET_S:.0f} s",
            fix="See their output; the folder must be on a file system that all nodes share",
        )


def refuse_taken(run: Path, rank: int) -> None:
    """Refuse a folder that holds something already, on every task of a step.

    A task other than rank 0 may find what rank 0 has just written for this run: that, and no more.

    Raises:
        DestinationExists: the folder is not for this run.
    """
    if not run.exists():
        return
    taken = not run.is_dir()
    if not taken and rank == 0:
        taken = any(run.iterdir())
    elif not taken:
        names = {one.name for one in run.iterdir() if not one.name.endswith(".partial")}
        own = [
            run / "meeting" / name for name in ("start.json", "failed", f"rank-{rank:05d}.hello")
        ]
        traces = run / "trace"
        taken = (
            bool(names - _START)
            or any(one.exists() for one in own)
            or (traces.is_dir() and any(traces.iterdir()))
        )
    if taken:
        raise DestinationExists(
            "the run's folder exists and is not empty",
            where=str(run),
            fix="Choose another with --out, or remove it",
        )


def parts(places: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[int, int]]:
    """Return which part of its cores each task gets, as (index, count).

    Tasks of a node that may all use the same cores have not been bound: they share them. A task
    with cores of its own keeps them all.

    >>> parts([("a", (0, 1)), ("a", (0, 1)), ("b", (0,)), ("b", (1,))])
    [(0, 2), (1, 2), (0, 1), (0, 1)]
    """
    seen: dict[tuple[str, tuple[int, ...]], int] = {}
    index = []
    for place in places:
        index.append(seen.get(place, 0))
        seen[place] = index[-1] + 1
    return [(one, seen[place]) for one, place in zip(index, places, strict=True)]


def names_of(ranks: Sequence[int]) -> str:
    """Return ``rank 1, 2, 3``, cut short when there are many.

    >>> names_of(range(12))
    'rank 0, 1, 2, 3, 4, 5, 6, 7 and 4 more'
    """
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def await_result(run: Path, clock: Clock) -> bool:
    """Wait until rank 0 has written the run's result; return whether it did in time.

    A task that leaves before has the others killed by some launchers: rank 0 would not get to it.
    """
    deadline_s = clock.now_s() + 2 * AFTER_FAILURE_S
    never = threading.Event()
    while not (run / "result.json").exists():
        if clock.now_s() > deadline_s or not run.is_dir():  # rank 0 has never come
            return False
        clock.wait(never, _LOOK_S)
    return True


def _read(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return told


def _exit(told: dict[str, Any]) -> Exit:
    rank = -1 if told["fate"] == "interrupted" else int(told["rank"])
    return Exit(rank=rank, code=int(told["code"]), signal=str(told["signal"]), fate=told["fate"])
