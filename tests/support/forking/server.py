"""A process that imports modules once and forks a child for each program; one thread."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import socket
import sys

from paceline.core.processes import die_with_parent
from support.forking import child
from support.forking.messages import receive, send
from support.forking.popen import has_foreign_threads

_FRAMEWORKS = ("torch", "flwr", "mpi4py", "jax", "tensorflow")


def main(number: int, parent: int, modules: list[str], tests: str) -> None:
    """Serve forks of this process to the test process `parent` until it has gone.

    Args:
        number: the descriptor of the connection.
        parent: process id.
        modules: to import.
        tests: the folder that a program would not have on its path.
    """
    sys.path.remove(tests)
    child.use_path(sys.path)
    die_with_parent(parent)
    connection = socket.socket(fileno=number)
    for module in modules:
        if module == "paceline without torch":
            _import_without_frameworks()
        else:
            importlib.import_module(module)
    send(connection, "they have started threads" if has_foreign_threads() else "ready")
    with contextlib.suppress(EOFError):
        while True:
            _answer(connection)
    os._exit(0)


def _answer(connection: socket.socket) -> None:
    (act, subject), descriptors = receive(connection)
    if act == "reap":
        return send(connection, os.waitpid(subject, os.WNOHANG))
    if act == "look at":
        with contextlib.suppress(ChildProcessError):  # it has been reaped
            seen = os.waitid(os.P_PID, subject, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            return send(connection, [seen.si_code, seen.si_status] if seen else None)
        return send(connection, "reaped")
    if os.fork() == 0:
        # The child answers itself, once it is set up: a signal may hit it from then on.
        child.become(subject, descriptors, lambda: send(connection, os.getpid()))
    for descriptor in descriptors:
        os.close(descriptor)
    return None


class _Absent:
    """A finder that lets frameworks look as if they were not installed."""

    def find_spec(self, name, path=None, target=None):
        if name in _FRAMEWORKS:
            raise ImportError(name)


def _import_without_frameworks() -> None:
    """Import all modules of the package that need no framework."""
    import paceline

    absent = _Absent()
    sys.meta_path.insert(0, absent)
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        if not module.name.endswith(("__main__", ".sitecustomize", ".mpi")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    sys.meta_path.remove(absent)
    assert not set(_FRAMEWORKS) & sys.modules.keys()
