"""One node's server of an output that several nodes write to.

::

    program --claim, publish, rename, unlink ...--> this node's server --> the first node's
                                                         ^                      | one at a time
                                                         +------- apply --------+---> all nodes

The node that orders the changes of an output is one of all, chosen by a hash of the output. It
decides who may create a name, makes a change itself, has all other nodes make it, and only then
answers: so what a program has closed is there on every node, and no node sees it before. A server
that is killed is started again and waited for; the change that its death interrupted is made once
more. A node that does not answer for longer is left out: it is lost to the run as well.

Bytes stay on the node that wrote them. When a program of another node opens the file, its server
fetches all of it once, or reads it from the shared folder if that node is lost.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.core.clock import SystemClock
from paceline.core.errors import PacelineError
from paceline.store.serve.output_names import NameChange, OutputNames, check_path
from paceline.store.serve.output_wire import OutputLink, OutputListener

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.store.serve.card import NodeAddress

_LOG = logging.getLogger(__name__)
_CHANGE = "change"  # of the folder: the change that is being made
SOCKET = "socket"  # of the folder: where programs ask (native/posix/outputs.c)
_PROGRAMS = 32  # requests of programs that are answered at a time
_MOST_REQUEST = 16384
_WAIT_S = 30.0  # for the answer of a node
_LOOK_S = 0.01
_RESTART_S = 10.0  # for a server that was killed to be there again
_PIECE_BYTES = 8 << 20
_NO_REPLACE = 1  # RENAME_NOREPLACE


def leader_of(target: str, count: int) -> int:
    """Return the index of the node that orders the changes of an output."""
    return zlib.crc32(target.encode()) % count


class OutputNode:
    """The server of one node, from here to `close`.

    Args:
        folder: on local storage.
        target: folder of the shared file system.
        nodes: addresses of all nodes, in the same order on all.
        number: of this node in these.
        token: of all nodes.
        listener: that listens at this node's address.
    """

    def __init__(
        self,
        folder: Path,
        target: Path,
        nodes: Sequence[NodeAddress],
        number: int,
        token: str,
        listener: socket.socket,
    ) -> None:
        self.names = OutputNames(folder, number)
        self._target = target
        self._number = number
        self._leader = leader_of(str(target), len(nodes))
        self._links = {
            node: OutputLink(address, token) for node, address in enumerate(nodes) if node != number
        }
        self._lost: set[int] = set()
        self._changing = threading.Lock()  # of the order of changes, and of claims; of the leader
        self._applying = threading.Lock()
        self._clock = SystemClock()
        self._never = threading.Event()
        self._fetching: dict[str, threading.Lock] = {}
        self._claims: dict[str, int] = {}
        self._interrupted = folder / _CHANGE
        self._tellers = ThreadPoolExecutor(max(1, min(64, len(nodes))), "paceline-tell")
        was_killed = (folder / SOCKET).exists()
        self._programs = _listen(folder / SOCKET)
        if was_killed and self._leader == number:
            self._recover()
        OutputListener(listener, token, self._answer_node)
        for _ in range(_PROGRAMS):
            threading.Thread(target=self._serve, name="paceline-programs", daemon=True).start()

    def close(self) -> None:
        """Answer no program any more."""
        self._programs.close()
        self._close_links()

    def _close_links(self) -> None:
        for link in self._links.values():
            link.close()

    # --- programs ------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._programs.accept()
            except OSError:
                self._close_links()  # what this thread asked other nodes for was still under way
                return
            with connection:
                try:
                    request = connection.recv(_MOST_REQUEST)
                    code = self._answer_program(
                        [os.fsdecode(word) for word in request.split(b"\0")]
                    )
                    connection.send(code.to_bytes(4, "little"))
                except OSError as problem:
                    _LOG.debug("a program ended before its answer: %s", problem)

    def _answer_program(self, words: list[str]) -> int:
        """Do what a program asks for; return 0 or an errno."""
        try:
            do, again, path, *more = words
            path = path.rstrip("/")
            check_path(path)
            return self._do(do, path, more, is_again=again == "1")
        except OSError as problem:
            return problem.errno or errno.EIO
        except PacelineError as problem:
            _LOG.warning("%s", problem)
            return errno.EIO
        except (ValueError, UnicodeError) as problem:
            _LOG.warning("a request that is none: %s", problem)
            return errno.EINVAL

    def _do(self, do: str, path: str, more: list[str], *, is_again: bool) -> int:
        """Do one thing; `is_again`: a server before this one may have done it."""
        if do == "fetch":
            return self._fetch(path)
        if do == "publish":
            return self._publish(path, is_again=is_again)
        if do in ("claim", "release"):
            return self._ask_leader({"do": do, "node": self._number, "path": path})
        if do == "attributes":  # of a file of another node, they are this node's alone
            is_here = self.names.is_published_here(path)
            return self._ask_for(self.names.attributes(path)) if is_here else 0
        if do == "mkdir":
            change = NameChange(kind="mkdir", path=path, mode=int(more[0]))
            return self._ask_for(change, is_again=is_again, done=errno.EEXIST)
        if do == "rename":
            return self._rename(path, more[0].rstrip("/"), int(more[1]), is_again=is_again)
        if do == "rmdir":
            change = NameChange(kind="rmdir", path=path)
            return self._ask_for(change, is_again=is_again, done=errno.ENOENT)
        if do == "unlink":
            return self._unlink(path, is_again=is_again)
        raise ValueError(do)

    def _publish(self, path: str, *, is_again: bool) -> int:
        try:
            change = self.names.offer(path)
        except FileNotFoundError:
            if is_again and self.names.is_published_here(path):
                return 0
            raise
        code = self._ask_for(change)
        if code:
            self.names.hidden(path).unlink(missing_ok=True)
        return code

    def _unlink(self, path: str, *, is_again: bool) -> int:
        is_written = self.names.is_written(path)
        change = NameChange(kind="unlink", path=path)
        code = self._ask_for(change, is_again=is_again, done=0 if is_written else errno.ENOENT)
        if code != errno.ENOENT or not is_written:
            return code
        self.names.hidden(path).unlink(missing_ok=True)
        return self._ask_leader({"do": "release", "node": self._number, "path": path})

    def _rename(self, path: str, to: str, flags: int, *, is_again: bool) -> int:
        check_path(to)
        if flags & ~_NO_REPLACE:
            return errno.EINVAL
        is_written = self.names.is_written(path)
        change = NameChange(kind="rename", path=path, to=to, mode=flags)
        code = self._ask_for(change, is_again=is_again, done=0 if is_written else errno.ENOENT)
        if code != errno.ENOENT or not is_written:
            return code
        # A file that is still written here: it gets the new name when it is closed.
        code = self._ask_leader({"do": "claim", "node": self._number, "path": to})
        if code == 0:
            self.names.hidden(path).rename(self.names.hidden(to))
            self._ask_leader({"do": "release", "node": self._number, "path": path})
        return code

    def _ask_for(self, change: NameChange, *, is_again: bool = False, done: int = 0) -> int:
        message = {"do": "change", "node": self._number, **change.to_json()}
        return self._ask_leader(message, is_again=is_again, done=done)

    def _ask_leader(self, message: dict[str, Any], *, is_again: bool = False, done: int = 0) -> int:
        """Return the answer of the node that orders changes: 0 or an errno.

        It is asked again if its server is killed meanwhile; the answer `done` then says that the
        one before has made the change.
        """
        if self._leader == self._number:
            code = self._lead(message)
            return 0 if is_again and code == done else code
        end_s = self._clock.now_s() + _WAIT_S
        while True:
            try:
                code = int(self._links[self._leader].call(message, 4 * _WAIT_S)["error"])
            except PacelineError:
                if self._clock.now_s() >= end_s:
                    raise
                is_again = True
                self._clock.wait(self._never, _LOOK_S)
            else:
                return 0 if is_again and code == done else code

    # --- the order of changes, on the leader ---------------------------------------------------

    def _lead(self, message: dict[str, Any]) -> int:
        do, node, path = message.pop("do"), int(message.pop("node")), str(message["path"])
        check_path(path)
        with self._changing:
            if do == "claim":
                return self._claim(path, node)
            if do == "release":
                if self._claims.get(path) == node:
                    del self._claims[path]
                return 0
            change = NameChange.from_json({**message, "node": node})
            if change.kind == "publish" and self._claims.get(path, node) != node:
                return errno.EIO  # another writer has the name: this one was taken for dead
            if change.kind == "rmdir" and self._is_written_below(path):
                return errno.ENOTEMPTY
            code = self._change(change)
            if code == 0:
                self._follow_claims(change)
            return code

    def _claim(self, path: str, node: int) -> int:
        holder = self._claims.get(path)
        if holder is not None and holder != node and self._is_written(holder, path):
            return errno.EEXIST
        self._claims[path] = node  # on one node, the kernel lets one program only write it
        return 0

    def _is_written_below(self, folder: str) -> bool:
        below = {path: node for path, node in self._claims.items() if _is_below(path, folder)}
        return any(self._is_written(node, path) for path, node in below.items())

    def _follow_claims(self, change: NameChange) -> None:
        if change.kind == "publish":
            self._claims.pop(change.path, None)
        elif change.kind == "rename":  # of a folder: what is written in it is published there
            for path in [path for path in self._claims if _is_below(path, change.path)]:
                self._claims[change.to + path[len(change.path) :]] = self._claims.pop(path)

    def _is_written(self, node: int, path: str) -> bool:
        if node == self._number:
            return self.names.is_written(path)
        if node in self._lost:
            return False
        try:
            answer = self._links[node].call({"do": "is written", "path": path}, _WAIT_S)
        except PacelineError as problem:
            _LOG.warning("%s; what it was writing can be written again", problem)
            return False
        return bool(answer["is_written"])

    def _change(self, change: NameChange) -> int:
        """Make a change here, then on all other nodes; return 0 or an errno."""
        try:
            self.names.check(change)
            self._interrupted.write_text(json.dumps(change.to_json()))
            self._apply(change)
        except OSError as problem:
            self._interrupted.unlink(missing_ok=True)
            return problem.errno or errno.EIO
        self._tell_all(change)
        return 0

    def _recover(self) -> None:
        """Take over from a server that was killed: who writes what, and what it was changing."""
        self._claims = dict.fromkeys(self.names.written(), self._number)
        for node, link in self._links.items():
            with suppress(PacelineError):
                said = link.call({"do": "written"}, _WAIT_S)
                self._claims.update(dict.fromkeys(map(str, said["paths"]), node))
        try:
            change = NameChange.from_json(json.loads(self._interrupted.read_text()))
        except (FileNotFoundError, ValueError):  # none, or not begun
            return
        with suppress(OSError):  # it was made here
            self._apply(change)
        self._tell_all(change)

    def _tell_all(self, change: NameChange) -> None:
        message = {"do": "apply", **change.to_json()}
        others = [node for node in self._links if node not in self._lost]
        told = self._tellers.map(lambda node: self._tell(node, message), others)
        for node, lost in zip(others, told, strict=True):
            if lost is not None:
                self._lost.add(node)
                _LOG.warning("%s; it does not follow the output any more", lost)
        self._interrupted.unlink()

    def _tell(self, node: int, message: dict[str, Any]) -> PacelineError | None:
        end_s = self._clock.now_s() + _WAIT_S
        while True:
            try:
                code = self._links[node].call(message, _WAIT_S)["error"]
            except PacelineError as problem:
                if self._clock.now_s() >= end_s:
                    return problem
                self._clock.wait(self._never, _LOOK_S)  # it may be started again
                continue
            if code:
                name = self._links[node].name
                _LOG.debug("%s did not change %s: %s", name, message["path"], os.strerror(code))
            return None

    def _apply(self, change: NameChange) -> None:
        with self._applying:
            self.names.apply(change)

    # --- other nodes ---------------------------------------------------------------------------

    def _answer_node(self, message: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        do = message["do"]
        if do == "read":
            return self._open_own(message)
        if do == "written":
            return {"paths": self.names.written()}, None
        if do == "is written":
            check_path(str(message["path"]))
            return {"is_written": self.names.is_written(str(message["path"]))}, None
        if do == "apply":
            del message["do"]
            return {"error": self._follow(NameChange.from_json(message))}, None
        return {"error": self._lead(message)}, None

    def _follow(self, change: NameChange) -> int:
        try:
            self._apply(change)
        except OSError as problem:
            return problem.errno or errno.EIO
        return 0

    def _open_own(self, message: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        path, size = str(message["path"]), int(message["size"])
        check_path(path)
        try:
            file = self.names.open_own(path, str(message["identity"]), size)
        except OSError as problem:
            return {"error": problem.errno}, None
        return {"error": 0, "size": size}, file

    # --- bytes ---------------------------------------------------------------------------------

    def _fetch(self, path: str) -> int:
        """Bring the bytes of a file here; return 0 or an errno."""
        end_s = self._clock.now_s() + _WAIT_S
        while (copy := self.names.empty_copy(path)) is not None:
            with self._fetching.setdefault(copy.name, threading.Lock()):
                if self.names.empty_copy(path) != copy:
                    continue
                try:
                    code = self._fill(path, copy)
                except FileNotFoundError:  # the name has a new version, or is gone
                    code = errno.ENOENT
            self._fetching.pop(copy.name, None)
            if code != errno.ENOENT or self._clock.now_s() >= end_s:
                return code
            self._clock.wait(self._never, _LOOK_S)  # its node has renamed or replaced it
        return 0

    def _fill(self, path: str, copy: Path) -> int:
        wanted = copy.stat()
        copy.chmod(0o600)
        file = os.open(copy, os.O_WRONLY | os.O_CLOEXEC)
        try:
            code = self._read_from_node(path, copy.name, file, wanted)
        except OSError as problem:
            _LOG.warning("%s of another node cannot be copied here: %s", path, problem)
            os.truncate(file, 0)
            os.truncate(file, wanted.st_size)
            code = problem.errno or errno.EIO
        finally:
            os.close(file)
        self.names.restore(copy, wanted)
        if code == 0:
            self.names.note_filled(copy)
        return code

    def _read_from_node(self, path: str, name: str, file: int, wanted: os.stat_result) -> int:
        node, _, identity = name.partition("-")
        message = {"do": "read", "path": path, "identity": identity, "size": wanted.st_size}
        end_s = self._clock.now_s() + _RESTART_S
        while True:
            try:
                return int(self._links[int(node)].fetch(message, file, _WAIT_S)["error"])
            except PacelineError as problem:
                if self._is_drained(path, file, wanted):
                    return 0
                if self._clock.now_s() >= end_s:
                    _LOG.warning("%s cannot be read: %s, and it is not drained", path, problem)
                    return errno.EIO
            self._clock.wait(self._never, _LOOK_S)  # its server may be started again

    def _is_drained(self, path: str, file: int, wanted: os.stat_result) -> bool:
        """Read a file that its node does not send from the shared folder, if it is there."""
        try:
            with (self._target / path).open("rb", buffering=0) as drained:
                found = os.fstat(drained.fileno())
                if (found.st_size, found.st_mtime_ns) != (wanted.st_size, wanted.st_mtime_ns):
                    return False
                done = 0
                while count := os.sendfile(file, drained.fileno(), done, _PIECE_BYTES):
                    done += count
        except FileNotFoundError:
            return False
        return True


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder}/")


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of a server that was killed
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # an address has 107 bytes at most (unix(7)), the path of the folder may have more
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    listener.listen(1024)
    return listener
