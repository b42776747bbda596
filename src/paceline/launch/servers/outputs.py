"""Has what ranks write to ``--output`` drained to the shared file system, from this node.

The first launcher of a node starts a process for each output (store/serve/output_server.py) before
the ranks, and ends it after them: then it copies what is left. Files that it cannot copy stay where
they are, and the run ends with an error that names them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import (
    DeadlineExceeded,
    RankLost,
    StorageError,
    storage_errors,
)
from paceline.launch.rendezvous.messages import DataOffer, DataStart
from paceline.launch.servers.local_folders import leftovers, make_locked
from paceline.launch.servers.node import NodeServer, NodeServers
from paceline.store.serve.drain import ROOM, TARGET, DrainRoom, drain_error
from paceline.store.serve.output_server import READY, OutputReport, OutputSpec

if TYPE_CHECKING:
    from paceline.launch.prepare import PreparedJob
    from paceline.store.serve.run_output import RunOutput

_START_S = 60.0  # for a server to look at what its target has
PREFIX = "paceline-output-"
OUTPUT_FOLDER = "output"  # of the run: what was drained from each node


class OutputServers(NodeServers["_OutputServer"]):
    """The servers of a launcher, and where its ranks write.

    Args:
        job: the run.
    """

    def __init__(self, job: PreparedJob) -> None:
        makers = [functools.partial(_OutputServer, output, job) for output in job.outputs]
        super().__init__(job, makers, len(job.data), "--output")
        self._folders: tuple[tuple[str, str, bool], ...] = ()

    def start(self, start: DataStart | None) -> None:
        """Have the servers of this launcher serve, and wait until they do.

        Args:
            start: from the rendezvous; None: this launcher is alone.

        Raises:
            UsageError: the launchers of this run were given other outputs.
            RankLost: a server has ended.
            DeadlineExceeded: it does not begin to serve.
        """
        own = self._own_part(start)
        for server, nodes in zip(self._servers, own.servers, strict=False):
            server.start(nodes, own.number, own.token)
        self._folders = tuple(
            (offer.local, output.point, len(nodes) > 1)
            for offer, output, nodes in zip(own.offers, self._job.outputs, own.servers, strict=True)
        )

    @property
    def folders(self) -> tuple[tuple[str, str, bool], ...]:
        """For each output its folder on this node, its path for ranks, whether nodes share it."""
        return self._folders

    def finish(self) -> StorageError | None:
        """Wait until all that ranks wrote is drained; return what is not, as an error."""
        problems = [server.finish() for server in self._servers]
        return next((problem for problem in problems if problem is not None), None)


class _OutputServer(NodeServer):
    """The process that drains one output from this node."""

    def __init__(self, output: RunOutput, job: PreparedJob) -> None:
        self.output = output
        folder = job.run_folder / OUTPUT_FOLDER
        self._report = folder / f"{Path(output.target).name}-{job.task_number:05}.json"
        self._config = config = job.resolved.config
        self._parent = parent = Path(config.data_folder or tempfile.gettempdir())
        with contextlib.ExitStack() as stack:
            with storage_errors(
                "no local storage for outputs",
                where=parent,
                fix="Give another folder: --data-folder",
            ):
                self.folder, lock = make_locked(parent, PREFIX)
                stack.callback(os.close, lock)
                stack.callback(self._remove)
                self._is_kept = False
                self.folder = self.folder.absolute()
                (self.folder / TARGET).write_text(output.target)
                DrainRoom(self.folder / ROOM, config.output_limit_bytes, config.output_wait_s)
            listener = self._listen(stack, job)
            self._launch("paceline.store.serve.output_server", listener, lock)
            stack.callback(self._end)
            self._stack = stack.pop_all()

    def finish(self) -> StorageError | None:
        """Have the rest drained; return why some of it is not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        said = self._process.stdout.read().decode().splitlines()
        self._process.wait()
        lines = [line for line in said if line.startswith("{")]
        if not lines:
            self._is_kept = True
            return drain_error(
                self.output.target, str(self.folder), {"": "the server that drains it has ended"}
            )
        report = OutputReport.from_json(json.loads(lines[-1]))
        self._write_report(report.to_text())
        if not report.problems:
            return None
        self._is_kept = True
        return drain_error(self.output.target, str(self.folder), report.problems)

    @property
    def offer(self) -> DataOffer:
        return DataOffer(port=self._address[1], requests="", local=str(self.folder))

    def start(self, nodes: tuple[str, ...], number: int, token: str) -> None:
        """Tell the process of the other nodes, and wait until it serves."""
        with contextlib.ExitStack() as locks:
            left = [locks.enter_context(folder) for folder in leftovers(self._parent, PREFIX)]
            spec = OutputSpec(
                target=self.output.target,
                folder=str(self.folder),
                end_s=self._config.output_end_s,
                leftovers=tuple(map(str, left)),
                nodes=nodes,
                number=number,
                token=token,
                listener=self._listener,
            )
            self._await_ready(spec)

    def _await_ready(self, spec: OutputSpec) -> None:
        assert self._process.stdout is not None
        self._send(spec.to_line())
        if not select.select([self._process.stdout], [], [], _START_S)[0]:
            raise DeadlineExceeded(
                "the server of an output does not start",
                where=self.output.target,
                why=f"{_START_S:g} s passed",
                fix="Check the file system that the folder lies on",
            )
        if self._process.stdout.readline().decode().strip() != READY:
            raise RankLost(
                "the server of an output ended before it served",
                where=self.output.target,
                fix="See what it says on stderr",
            )

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()  # its child ends with it
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def _remove(self) -> None:
        if not self._is_kept:
            shutil.rmtree(self.folder, ignore_errors=True)
