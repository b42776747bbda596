"""The ranks that this launcher starts itself: their environment, their processes, their ends.

A rank is a child process. One thread per rank waits for its end and notes the time; everything else
belongs to the launcher's main thread. When a rank fails, the others mostly lose a peer and end by
themselves within a second, each with a report; the ranks that do not are stopped, and only those
are marked as stopped by their launcher.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import Preempted, StorageError
from paceline.core.processes import GRACE_S
from paceline.launch.exits import RankExit, exit_of
from paceline.launch.rendezvous.addresses import FIRST_PORT, PORT_COUNT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paceline.core.clock import Clock
    from paceline.launch.output import TaggedOutput

SIGNAL_DELAY_S = 0.3  # terminals signal ranks as well; schedulers do so one after the other
_POLL_INTERVAL_S = 0.25  # how often a task checks whether it must stop its ranks
_PEER_LOSS_GRACE_S = 1.0  # a rank that lost a peer mostly ends by itself, and reports why


@dataclass(frozen=True, kw_only=True, slots=True)
class RankIds:
    """A rank's ids: its numbers in the run and on its node, and how many ranks there are.

    Attributes:
        rank: the global rank.
        world_size: number of ranks of the run.
        local_rank: the rank's number on its node.
        local_world_size: number of ranks on its node.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def environment(self, address: str, port: int, run_id: str) -> dict[str, str]:
        """Return the variables that torchrun gives to a rank.

        TORCHELASTIC_USE_AGENT_STORE is False: rank 0 listens at the port itself. A launcher that
        listens there makes every process below a rank a client, and a script that starts a group
        of its own (`torch.multiprocessing.spawn` with another port) then waits for a server that
        nobody starts.

        Args:
            address: where rank 0's process group listens.
            port: at which it listens.
            run_id: the same for all ranks of the run.
        """
        node, node_count = (
            number // self.local_world_size
            for number in (self.rank, self.world_size + self.local_world_size - 1)
        )
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(node_count),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }


class LocalRanks:
    """The rank processes of this launcher; its methods belong to the main thread.

    Attributes:
        output: tags the lines that the ranks print; None leaves them our own streams.
        stop_signal: has a rank's process end; SIGINT lets Python close the trace.
    """

    def __init__(
        self,
        clock: Clock,
        output: TaggedOutput | None = None,
        stop_signal: signal.Signals = signal.SIGINT,
    ) -> None:
        self.output = output
        self.stop_signal = stop_signal
        self._clock = clock
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._ends: dict[int, float] = {}  # time of the end, by rank; written by the rank's thread
        self._changed = threading.Event()
        self._stopped: set[int] = set()

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start a rank's process.

        Args:
            rank: its number.
            command: program and arguments.
            environ: its variables.
            descriptors: open files that it inherits, beside the standard streams.

        Raises:
            StorageError: the system cannot start it.
        """
        streams = self.output.streams(rank) if self.output else contextlib.nullcontext((None, None))
        with streams as (out, err):
            try:
                child = subprocess.Popen(
                    command, env=environ, stdout=out, stderr=err, pass_fds=descriptors
                )
            except OSError as problem:  # no process or memory left
                raise StorageError(
                    f"cannot start rank {rank}",
                    where=str(problem.filename or command[0]),
                    why=problem.strerror or str(problem),
                    fix="Check the limits on processes (ulimit -u) and memory",
                ) from problem
        self._children[rank] = child
        threading.Thread(
            target=self._reap, args=(rank, child), name=f"paceline-rank-{rank}", daemon=True
        ).start()

    def _reap(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        child.wait()  # no deadline: a run lasts as long as it lasts
        self._ends[rank] = self._clock.wall_s()
        self._changed.set()

    def wait(self, stop_reason: Callable[[], str] = str) -> None:
        """Wait until all ranks have ended; stop the others when a rank fails.

        Args:
            stop_reason: why the ranks are to end; empty while they may go on.
        """
        while self._running():
            self._clock.wait(self._changed, _POLL_INTERVAL_S)
            self._changed.clear()
            # A rank that was preempted may be done before another one has saved its state.
            well = (0, Preempted.exit_code)
            failed = any(self._children[rank].returncode not in well for rank in list(self._ends))
            if failed or stop_reason():
                self._await_ends(_PEER_LOSS_GRACE_S)
                self.stop()

    def all_started(self) -> None:
        """Begin to pass on what the ranks print."""
        if self.output is not None:
            self.output.begin()

    def stop(self, patience_s: float = 0.0) -> None:
        """Send the stop signal, so that ranks close their traces; after GRACE_S send SIGKILL.

        Args:
            patience_s: time for ranks to end by themselves: a signal may have reached them, too.
        """
        self._await_ends(patience_s)
        left = self._running()
        self._stopped.update(left)
        for rank in left:
            self._children[rank].send_signal(self.stop_signal)
        self._await_ends(GRACE_S)
        for rank in self._running():
            self._children[rank].kill()
        while self._running():
            self._clock.wait(self._changed, _POLL_INTERVAL_S)
            self._changed.clear()

    def exits(self) -> tuple[RankExit, ...]:
        """Return how the ranks ended, in order of time."""
        return tuple(
            exit_of(
                rank,
                self._children[rank].returncode,
                stopped=rank in self._stopped,
                at_s=at_s,
            )
            for rank, at_s in sorted(self._ends.items(), key=lambda item: item[1])
        )

    def _running(self) -> list[int]:
        return [rank for rank in self._children if rank not in self._ends]

    def _await_ends(self, timeout_s: float) -> None:
        """Wait until all ranks have ended, but not longer than `timeout_s`."""
        deadline_s = self._clock.now_s() + timeout_s
        while self._running() and (left_s := deadline_s - self._clock.now_s()) > 0:
            self._clock.wait(self._changed, left_s)
            self._changed.clear()


def free_port(seed: str) -> int:
    """Return a free port for the process group of a run on this node.

    Rank 0 binds it only seconds later. So it is not one of those that the kernel gives to outgoing
    connections, and runs that start at the same time look in different places.

    Args:
        seed: differs between runs.
    """
    first = int.from_bytes(seed.encode()[-8:], "little")
    for attempt in range(PORT_COUNT):
        port = FIRST_PORT + (first + 7919 * attempt) % PORT_COUNT
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise StorageError(
        f"no free port between {FIRST_PORT} and {FIRST_PORT + PORT_COUNT - 1}",
        fix="End processes that hold them",
    )
