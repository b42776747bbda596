"""Serves the packs of ``--data`` on this node for the length of a run.

The first launcher of each node starts a process for each pack (store/serve/run_server.py) before
the launchers meet. What it says of them travels with its arrival, and when all are there, the
processes learn of each other and the ranks of where to read::

    launcher   listening socket, memory of requests, folder ----> DataOffer ----> rendezvous
                    |                                                                 |
    server     idle until it hears of its peers <------------- DataStart <------------+
                    |
    ranks      open_remote, or files below the mount point

A server ends with its launcher, even when that is killed, and removes what it made. One that is
killed is named on stderr and started again; meanwhile, programs read from the source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import (
    DeadlineExceeded,
    RankLost,
    UsageError,
    storage_errors,
)
from paceline.core.processes import signal_name
from paceline.core.token import find_token
from paceline.launch.rendezvous.messages import DataOffer, DataStart
from paceline.launch.servers.local_folders import leftovers, lock_folder, make_locked
from paceline.launch.servers.node import NodeServer, NodeServers
from paceline.native import RangeRequests, ServedCount, served_counts
from paceline.runs.data_report import DATA_FOLDER, DataReport
from paceline.store.posix.mounts import PackMount
from paceline.store.serve.requests import ServerState
from paceline.store.serve.run_data import ServedPack
from paceline.store.serve.run_data import variables as data_variables
from paceline.store.serve.run_server import ServerSpec

if TYPE_CHECKING:
    from paceline.launch.options import RunConfig
    from paceline.launch.prepare import PreparedJob
    from paceline.store.serve.run_data import RunData

_LOG = logging.getLogger(__name__)
_SLOTS, _SLOT_BYTES = 64, 1 << 20  # requests of a node at a time, and their longest answer
_START_S = 60.0  # for a server to open its index and listen
_END_S = 10.0  # for a server to end
_PREFIX = "paceline-data-"


class DataServers(NodeServers["_PackServer"]):
    """The servers of a launcher, and what its ranks need to reach those of its node.

    Args:
        job: the run.
    """

    def __init__(self, job: PreparedJob) -> None:
        makers = [functools.partial(_PackServer, data, job) for data in job.data]
        super().__init__(job, makers, 0, "--data")
        self._start: DataStart | None = None

    def start(self, start: DataStart | None) -> None:
        """Have the servers serve, and wait until those of this node do.

        Args:
            start: from the rendezvous; None: this launcher is alone.

        Raises:
            UsageError: the launchers of this run were given other packs, or none serves this node.
            RankLost: a server of this node has ended.
            DeadlineExceeded: it did not begin to serve.
        """
        start = self._own_part(start)
        token_file = self._job.resolved.config.token_file
        if token_file:
            start = dataclasses.replace(start, token=find_token(token_file))
        self._start = start
        for pack, server in enumerate(self._servers):
            server.serve(start.servers[pack], start.number, start.token)
        for data, offer in zip(self._job.data, start.offers, strict=True):
            _await_serving(data, offer)

    @property
    def variables(self) -> dict[str, str]:
        """By which Python programs of the run find the packs."""
        assert self._start is not None, "read after start"
        start, config = self._start, self._job.resolved.config
        replicas, tls = config.data_replicas, config.data_tls
        return data_variables(
            [
                ServedPack(
                    place=data.place,
                    local=offer.local,
                    nodes=servers,
                    replicas=replicas,
                    token=start.token,
                    tls=tls,
                    requests=offer.requests,
                )
                for data, offer, servers in zip(
                    self._job.data, start.offers, start.servers, strict=True
                )
            ]
        )

    @property
    def mounts(self) -> tuple[PackMount, ...]:
        """The packs that the ranks see as folders."""
        assert self._start is not None, "read after start"
        return tuple(
            PackMount(
                place=offer.local, point=data.point, requests=offer.requests, source=data.place
            )
            for data, offer in zip(self._job.data, self._start.offers, strict=True)
            if data.point
        )


class _PackServer(NodeServer):
    """The process that serves one pack on this node."""

    def __init__(self, data: RunData, job: PreparedJob) -> None:
        self._data = data
        self._config = job.resolved.config
        self._host = os.uname().nodename
        self._ending = threading.Event()
        self._name = ""
        folder = job.run_folder / DATA_FOLDER
        self._report = folder / f"{Path(data.place).name}-{job.task_number:05}.json"
        with contextlib.ExitStack() as stack:
            listener = self._listen(stack, job)
            self._requests = RangeRequests.create(data.shard_count, _SLOTS, _SLOT_BYTES, self._host)
            self._local, self._lock, self._is_temporary = _claim_local(data, self._config)
            stack.callback(os.close, self._lock)
            if self._is_temporary:
                stack.callback(shutil.rmtree, self._local, ignore_errors=True)
            passed = (self._requests.descriptor, self._lock)
            self._launch("paceline.store.serve.run_server", listener, *passed)
            self._watcher = threading.Thread(target=self._watch, name="paceline-data", daemon=True)
            self._watcher.start()
            stack.callback(self._end)
            self._stack = stack.pop_all()

    @property
    def offer(self) -> DataOffer:
        return DataOffer(
            port=self._address[1],
            requests=f"/proc/{os.getpid()}/fd/{self._requests.descriptor}",
            local=str(self._local),
        )

    def serve(self, names: tuple[str, ...], number: int, token: str) -> None:
        """Tell the process of its peers."""
        host, port = self._address
        self._name = names[number]
        spec = ServerSpec(
            pack=self._data.place,
            name=self._name,
            peers=tuple(name for name in names if name != self._name),
            listener=self._listener,
            listen=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            requests=self._requests.descriptor,
            local=str(self._local),
            is_temporary=self._is_temporary,
            replicas=self._config.data_replicas,
            token=token,
            tls=self._config.data_tls,
            source_bytes_per_s=self._config.data_source_rate,
        )
        self._send(spec.to_line())  # the watcher says if the process has ended

    def _watch(self) -> None:
        """Wait for the end of the process; name one that nobody asked to end."""
        assert self._process.stdout is not None
        self._process.stdout.read()
        code = self._process.wait()
        self._requests.set_state(ServerState.ENDED)
        if not self._ending.is_set():
            how = f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"
            _LOG.warning(
                "the data server of node %s for %s ended %s; reads go on from replicas or the "
                "source",
                self._name or self._host,
                self._data.place,
                how,
            )

    def _sum_up(self) -> DataReport:
        """Return what was counted, also by servers that were killed."""
        counts = served_counts(self._requests)
        for_programs = (
            counts[ServedCount.REQUEST_SOURCE_BYTES] + counts[ServedCount.PROGRAM_SOURCE_BYTES]
        )
        shards = range(self._data.shard_count)
        return DataReport(
            node=self._name,
            pack=self._data.place,
            source_bytes=counts[ServedCount.STAGED_SOURCE_BYTES] + for_programs,
            peer_bytes=counts[ServedCount.PEER_BYTES],
            sent_bytes=counts[ServedCount.SENT_BYTES],
            local_reads=counts[ServedCount.LOCAL_READS],
            local_bytes=counts[ServedCount.LOCAL_BYTES],
            remote_reads=counts[ServedCount.REMOTE_READS],
            program_source_bytes=for_programs,
            copied_bytes=counts[ServedCount.STAGED_PEER_BYTES],
            read_s=counts[ServedCount.READ_NS] / 1e9,
            shard_count=len(shards),
            held_shards=sum(self._requests.is_held(shard) for shard in shards),
            peak_queue=counts[ServedCount.PEAK_QUEUE],
            peak_copies=counts[ServedCount.PEAK_COPIES],
            server_starts=counts[ServedCount.SERVER_STARTS],
        )

    def _end(self) -> None:
        self._ending.set()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._watcher.join(_END_S)
        if self._watcher.is_alive():
            self._process.kill()
            self._watcher.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        if self._name:
            self._write_report(self._sum_up().to_text())


def _await_serving(data: RunData, offer: DataOffer) -> None:
    """Wait until a server of this node serves."""
    with storage_errors(
        "the data server of this node cannot be reached",
        where=offer.requests,
        fix="See the output of the launcher that started it",
    ):
        requests = RangeRequests.open(os.fsencode(offer.requests))
    if requests.await_serving(_START_S):
        return
    if requests.has_ended:
        raise RankLost(
            "the data server of this node ended before it served",
            where=data.place,
            fix="See what it says on stderr",
        )
    raise DeadlineExceeded(
        "the data server of this node does not serve",
        where=data.place,
        why=f"{_START_S:g} s passed",
        fix="Check the storage that the pack and the node's folder lie on",
    )


def _claim_local(data: RunData, config: RunConfig) -> tuple[Path, int, bool]:
    """Return a folder for this node's shards, its lock, and whether it goes with the run.

    Raises:
        UsageError: another server uses the folder.
        StorageError: it cannot be made.
    """
    parent = Path(config.data_folder or tempfile.gettempdir())
    lock: int | None
    with storage_errors(
        "no local storage for data", where=parent, fix="Give another folder: --data-folder"
    ):
        if not config.data_folder:
            for leftover in leftovers(parent, _PREFIX):
                with leftover as left:
                    shutil.rmtree(left, ignore_errors=True)
            folder, lock = make_locked(parent, _PREFIX)
        else:
            folder = parent / f"{Path(data.place).name}-{data.identity[:12]}"
            folder.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(folder)
    if lock is None:
        raise UsageError(
            "another data server uses this node's folder",
            where=str(folder),
            why="a folder for data belongs to one node and one run at a time",
            fix="Give each node storage of its own: --data-folder",
        )
    return folder.absolute(), lock, not config.data_folder
