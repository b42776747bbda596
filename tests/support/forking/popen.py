"""`subprocess.Popen` whose Python programs are forks; any thread may use it."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

from support.forking.child import THREADS, fork, program_of
from support.forking.messages import receive, send

TORCH = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "torch.utils.data",
    "paceline.cli.app",
    "paceline.launch.run",
    "paceline.launch.worker.ddp_order",
    "paceline.launch.worker.paced_input",
    "paceline.report.terminal",
    "paceline.store",
    "paceline.trace.collectors.torch",
    "paceline.training",
)
PLAIN = ("rich.console", "rich.table", "paceline without torch")
# Beginnings of variables that the interpreter and C libraries read when they are loaded.
READ_AT_START = (
    "COVERAGE_",
    "CUDA_",
    "GLIBC_TUNABLES",
    "KMP_",
    "LD_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTHON",
    "TORCH_LOGS",
)
# Set by scikit-learn when it is imported, for what is loaded after it.
_SET_BY_LIBRARIES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
# OpenBLAS takes OpenMP's number where it has none, and servers have one; coverage is off.
_MEAN_NOTHING = {
    ("OPENBLAS_NUM_THREADS", "1"),
    ("COVERAGE_PROCESS_START", ""),
    ("COVERAGE_PROCESS_CONFIG", ""),
}
DEADLINE_S = 120
_INTERPRETER = sys.executable  # tests put another one in its place
_ONE_THREAD = {THREADS: "1"}


def _read_at_start(environ) -> dict:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(READ_AT_START)
        and name not in _SET_BY_LIBRARIES
        and (name, value) not in _MEAN_NOTHING
    }


# Under PYTHONUNBUFFERED print writes a line in two pieces, and the lines of ranks that share a pipe
# get mixed.
os.environ.pop("PYTHONUNBUFFERED", None)
# Threads of OpenMP that spin wait a time slice for a core that other tests use, at every region of
# a kernel: two threads of a probe beside another test process would take minutes.
os.environ["OMP_WAIT_POLICY"] = "passive"
_BEFORE = dict(os.environ)
_AT_START = _read_at_start(_BEFORE | _ONE_THREAD)  # of servers, and so of all forks


def leaked_variables() -> list[str]:
    """Return the variables that keep this process from forking, and give them back their values."""
    now, before = _read_at_start(os.environ), _read_at_start(_BEFORE)
    changed = sorted(name for name in now | before if now.get(name) != before.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return changed


class Popen(subprocess.Popen):
    """A process that is forked from a server, or from this process, where that is possible.

    Args:
        args: as of `subprocess.Popen`, like all others.
        modules: what the server has imported; None: fork this process.
    """

    def __init__(self, args, *others, modules=None, **options):
        self._modules, self._server, self._pidfd = modules, None, -1
        super().__init__(args, *others, **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        # The order of CPython 3.11 to 3.14.
        _, _, shell, *pipes = rest[:9]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        _, gid, gids, uid, umask, session, process_group = rest[9:]
        environ = dict(os.environ if env is None else env)
        environ = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
        command = (
            [] if isinstance(args, str | bytes | os.PathLike) else list(map(os.fsdecode, args))
        )
        if (
            not (preexec_fn or shell or executable or gid or gids or uid)
            and close_fds
            and umask == -1
            and process_group in (-1, None)
            and Path(cwd or ".").is_dir()
            and self._is_forkable(command, environ)
        ):
            streams = (p2cread, c2pwrite, errwrite)
            order = {
                "command": command,
                "environ": environ,
                "cwd": str(Path(os.fsdecode(cwd or ".")).absolute()),
                "session": bool(session),
                "targets": [0, 1, 2, *pass_fds],
            }
            descriptors = [at if given == -1 else given for at, given in enumerate(streams)]
            self._fork(order, [*descriptors, *pass_fds])
            self._child_created = True
            self._close_pipe_fds(*pipes)
        else:
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )

    def _is_forkable(self, command, environ) -> bool:
        if len(command) < 2 or command[0] != _INTERPRETER or program_of(command) is None:
            return False
        if environ.get(THREADS, "1").isdecimal():  # the child sets its number of threads
            environ = environ | _ONE_THREAD
        if self._modules is None and has_foreign_threads():
            return False
        return _read_at_start(environ) == _AT_START

    def _fork(self, order, descriptors) -> None:
        if self._modules is None:
            self.pid = fork(order, descriptors)
        else:
            self._server = server(self._modules)
            order["parent"] = os.getpid()
            self.pid = self._server.start(order, descriptors)
            self._pidfd = os.pidfd_open(self.pid)

    def _try_wait(self, wait_flags):
        if self._server is None:
            return super()._try_wait(wait_flags)
        if not wait_flags & os.WNOHANG:
            select.select([self._pidfd], [], [])
        return self._server.reap(self.pid)

    def _internal_poll(self, _deadstate=None, **defaults):
        if self._server is None:
            return super()._internal_poll(_deadstate, **defaults)
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                if self.returncode is None:
                    pid, status = self._server.reap(self.pid)
                    if pid == self.pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _wait(self, timeout):
        if self._server is None or self.returncode is not None:
            return super()._wait(timeout)
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout)
        self._internal_poll()
        return super()._wait(timeout) if self.returncode is None else self.returncode

    def waitid(self, flags):
        """Do what os.waitid does for this process; with WNOWAIT only."""
        if self._server is None:
            return os.waitid(os.P_PID, self.pid, flags)
        assert flags & os.WNOWAIT
        if not flags & os.WNOHANG:
            select.select([self._pidfd], [], [])
        return self._server.look_at(self.pid)

    def __del__(self, *arguments, **options):
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._pidfd)
        super().__del__(*arguments, **options)


def has_foreign_threads() -> bool:
    """Whether this process has threads that Python has not started."""
    return len(list(Path("/proc/self/task").iterdir())) > threading.active_count()


def run(command, *, modules=PLAIN, input=None, timeout=DEADLINE_S, check=False, **options):  # noqa: A002  # as of subprocess.run
    """Do what `subprocess.run` does, forked where that is possible."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, modules=modules, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class Server:
    """The test process's end of a server; any thread may call it."""

    def __init__(self, modules) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        folder = str(Path(__file__).parents[2])
        program = (
            f"import sys; sys.path.insert(0, {folder!r}); from support.forking.server import main; "
            f"main({theirs.fileno()}, {os.getpid()}, {list(modules)}, {folder!r})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            pass_fds=[theirs.fileno()],
            env=os.environ | _ONE_THREAD,
        )
        theirs.close()
        said, _ = receive(self._socket)
        if said != "ready":
            raise RuntimeError(f"no forks of {modules}: {said}")

    def start(self, order, descriptors) -> int:
        """Return the process id of a child that runs the order, once it is set up."""
        with self._lock:
            send(self._socket, ["start", order], descriptors)
            return receive(self._socket)[0]

    def reap(self, pid: int) -> tuple[int, int]:
        """Return what os.waitpid does, without waiting."""
        with self._lock:
            send(self._socket, ["reap", pid])
            return tuple(receive(self._socket)[0])

    def look_at(self, pid: int):
        """Return how a child ended, which can be reaped still; None while it runs."""
        with self._lock:
            send(self._socket, ["look at", pid])
            seen = receive(self._socket)[0]
        if seen == "reaped":
            raise ChildProcessError(pid)
        return types.SimpleNamespace(si_code=seen[0], si_status=seen[1]) if seen else None


@functools.cache
def _server_of(modules, _pid) -> Server:
    return Server(modules)


def server(modules) -> Server:
    """Return the server of this process that has imported these modules."""
    return _server_of(tuple(modules), os.getpid())
