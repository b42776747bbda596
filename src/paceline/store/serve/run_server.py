"""The server of one pack on one node of a run. Started with ``-m`` by the launcher.

::

    launcher ---stdin: ServerSpec---> guard ---fork---> server
    launcher, programs <---memory of requests: counts--------+

The launcher gives it a listening socket, the memory of requests and a lock as descriptors, and one
line of JSON on stdin, when all nodes are there. The server is a child of this process, which forks
another one, within milliseconds and with the same socket, if it is killed. It serves until stdin
ends: with the launcher, however that ends. Signals that stop a job are the launcher's to
handle: other nodes may still read from here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from paceline.core.errors import PacelineError
from paceline.core.processes import die_with_parent, signal_name
from paceline.native import RangeRequests
from paceline.store.serve.card import NodeAddress
from paceline.store.serve.node import NodeOptions
from paceline.store.serve.requests import RequestService, ServerState, SharingNode

_BEAT_S = 1.0
_END_S = 8.0  # for a server to end when it is asked to
_MOST_SHORT, _STEADY_S = 3, 2.0  # so many servers in a row that live shorter are enough
_LOG = logging.getLogger(__name__)
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """What a server of a run has to know.

    Attributes:
        pack: folder of the source.
        name: address by which the other nodes reach this one.
        peers: those of the other nodes.
        listener: descriptor of the listening socket.
        listen: the numeric address that it listens at.
        requests: descriptor of the memory of requests.
        local: folder for this node's shards.
        is_temporary: whether it is to be removed in the end.
        replicas: copies of each shard.
        token: of all nodes.
        tls: whether what they send is encrypted.
        source_bytes_per_s: limit for reading from the source; 0: none.
    """

    pack: str
    name: str
    peers: tuple[str, ...]
    listener: int
    listen: str
    requests: int
    local: str
    is_temporary: bool
    replicas: int
    token: str
    tls: bool
    source_bytes_per_s: float

    def to_line(self) -> bytes:
        """Return it as it travels."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Return what `to_line` wrote."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**{**fields, "peers": tuple(fields["peers"])})


def main() -> int:
    """Serve until stdin ends; return the exit code."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:  # the run ended before it began
        return 0
    spec = ServerSpec.from_line(line)
    requests = RangeRequests.map(spec.requests)
    logging.basicConfig(format=f"paceline: data server {spec.name}: %(message)s")
    try:
        return _guard(spec, requests)
    finally:
        if spec.is_temporary:
            shutil.rmtree(spec.local, ignore_errors=True)


def _guard(spec: ServerSpec, requests: RangeRequests) -> int:
    """Keep a server running until stdin ends; return the exit code of the last one."""
    lifetimes_s = [_STEADY_S] * _MOST_SHORT  # of the last servers
    while True:
        begin_s = time.monotonic()
        child, stop, ended = _fork(spec, requests)
        found = select.select([sys.stdin, ended], [], [])[0]
        os.close(stop)
        if ended not in found and not select.select([ended], [], [], _END_S)[0]:
            os.kill(child, signal.SIGKILL)  # it waits for storage that does not answer
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(ended)
        if ended not in found or code >= 0:  # asked to end, or an error that would come again
            return code
        lifetimes_s = [*lifetimes_s[1:], time.monotonic() - begin_s]
        is_steady = not requests.has_ended and max(lifetimes_s) >= _STEADY_S
        _LOG.warning(
            "it was killed by %s; %s, and reads go on from replicas or the source",
            signal_name(-code),
            "it is started again" if is_steady else "not started again, it ends too often",
        )
        if not is_steady:
            return 1
        requests.set_state(ServerState.STARTING)


def _fork(spec: ServerSpec, requests: RangeRequests) -> tuple[int, int, int]:
    """Fork a server; return its process, a pipe that ends it, and one that ends with it."""
    stop_reader, stop = os.pipe()
    ended, ended_writer = os.pipe()
    guard = os.getpid()
    child = os.fork()
    if child:
        os.close(stop_reader)
        os.close(ended_writer)
        return child, stop, ended
    code = 1
    try:
        die_with_parent(guard)
        os.close(stop)
        os.close(ended)
        _serve(spec, requests, stop_reader)
        code = 0
    except PacelineError as problem:
        sys.stderr.write(f"paceline: data server {spec.name}: {problem}\n")
        code = problem.exit_code
    except BaseException:
        _LOG.exception("it failed")
        raise
    finally:
        os._exit(code)  # what the guard has to clean up is not the child's


def _serve(spec: ServerSpec, requests: RangeRequests, stop: int) -> None:
    options = NodeOptions(
        listen=NodeAddress.parse(spec.listen),
        name=spec.name,
        listener=spec.listener,
        peers=tuple(NodeAddress.parse(peer) for peer in spec.peers),
        local=Path(spec.local),
        replicas=spec.replicas,
        token=spec.token,
        tls=spec.tls,
        source_bytes_per_s=spec.source_bytes_per_s,
    )
    with SharingNode(spec.pack, options, requests) as node:
        node.start()
        service = RequestService(node, requests)
        service.start()
        while not select.select([stop], [], [], _BEAT_S)[0]:
            service.beat()
            node.note_load()
            node.wait(0.0)
        service.close()
        node.note_load()


if __name__ == "__main__":
    sys.exit(main())
