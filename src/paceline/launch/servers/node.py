"""What the servers of packs and of outputs share: a launcher starts them for its node.

Those of ``--data`` are in data.py, those of ``--output`` in outputs.py. What both
say of themselves travels in one message of the rendezvous, the packs' first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from paceline.core.affinity import bind_threads, thread_ids
from paceline.core.config import environment
from paceline.core.errors import StorageError, UsageError
from paceline.core.files import commit_text
from paceline.core.processes import descendants
from paceline.launch.rendezvous.addresses import open_data_listener
from paceline.launch.rendezvous.messages import DataOffer, DataStart

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from paceline.launch.prepare import PreparedJob

_LOG = logging.getLogger(__name__)


class NodeServer(ABC):
    """A process that serves one pack or output on this node, until the end of its context."""

    _report: Path  # what becomes of it
    _process: subprocess.Popen[bytes]
    _listener: int  # its number in the process
    _address: tuple[str, int]
    _stack: contextlib.ExitStack

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    @abstractmethod
    def offer(self) -> DataOffer:
        """What the rendezvous carries to the other launchers."""

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def _listen(self, stack: contextlib.ExitStack, job: PreparedJob) -> socket.socket:
        listener = stack.enter_context(open_data_listener(job.task))
        self._address = listener.getsockname()[:2]
        self._listener = listener.fileno()
        return listener

    def _launch(self, module: str, listener: socket.socket, *descriptors: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._listener, *descriptors],
            env={**environment(), "OPENBLAS_NUM_THREADS": "1"},  # it forks
        )
        listener.close()  # else the port would stay open when the process has ended

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, as others find out
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _write_report(self, text: str) -> None:
        try:
            self._report.parent.mkdir(parents=True, exist_ok=True)
            commit_text(self._report, text)
        except (OSError, StorageError) as problem:  # the run itself is as it was
            _LOG.warning("no report of a server: %s", problem)


ServerT = TypeVar("ServerT", bound=NodeServer)


class NodeServers(Generic[ServerT]):
    """The servers of a launcher for all packs, or all outputs, of its run.

    Args:
        job: the run.
        makers: of the servers; they are made on entry, by the first launcher of the node.
        first: index of the first of them in what travels by the rendezvous.
        option: by which the user names them.
    """

    def __init__(
        self, job: PreparedJob, makers: Sequence[Callable[[], ServerT]], first: int, option: str
    ) -> None:
        self._job = job
        self._makers, self._first, self._option = makers, first, option
        self._stack = contextlib.ExitStack()
        self._servers: list[ServerT] = []

    def __enter__(self) -> Self:
        task = self._job.task
        if task is not None and task.local_task_number != 0:
            return self  # another launcher of this node serves
        with contextlib.ExitStack() as stack:
            for make in self._makers:
                server = make()
                stack.enter_context(server)
                self._servers.append(server)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def offers(self) -> tuple[DataOffer, ...]:
        """What the rendezvous carries to the other launchers."""
        return tuple(server.offer for server in self._servers)

    def bind(self, cores: Sequence[int]) -> None:
        """Bind the servers to cores that no rank has."""
        for server in self._servers:
            for process in (server.pid, *descendants(server.pid)):
                bind_threads(cores, thread_ids(process))

    def _own_part(self, start: DataStart | None) -> DataStart:
        """Return of what the rendezvous brought the part that is of these servers.

        Raises:
            UsageError: the launchers of this run were given other packs or outputs.
        """
        job = self._job
        if job.task is None:  # this launcher is alone
            nodes = tuple((f"127.0.0.1:{offer.port}",) for offer in self.offers)
            token = os.urandom(16).hex()
            return DataStart(servers=nodes, number=0, offers=self.offers, token=token)
        if start is None or len(start.servers) != len(job.data) + len(job.outputs):
            raise UsageError(
                f"no server on this node has what {self._option} of this run names",
                where=f"task {job.task_number}",
                why="the first task of each node serves it",
                fix=f"Give all launchers of the run the same {self._option}",
            )
        part = slice(self._first, self._first + len(self._makers))
        return dataclasses.replace(start, servers=start.servers[part], offers=start.offers[part])
