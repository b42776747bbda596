"""Starts `paceline run` as a user does, and looks at what it leaves behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
import weakref
from pathlib import Path
from typing import Self

from support import forking
from support.forking import MARK

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 120
TWO_NODES = (("127.0.0.1", ()),) * 2  # on this host: an address of each, words before its command

_OURS = re.compile(r"paceline|psm_|^torch_(?P<owner>\d+)_")


class Launched:
    """A run of the command line in a folder of its own, with a temporary folder of its own.

    Its processes are forked (`forking`) unless `fresh`, where starting them is what is tested.
    """

    def __init__(
        self,
        folder: Path,
        *args,
        prefix=(),
        env=None,
        threads=1,
        own_group=False,
        fresh=False,
    ):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="run-"))
        weakref.finalize(self, shutil.rmtree, self.temporary, ignore_errors=True)
        self.mark = uuid.uuid4().hex
        environ = {
            **os.environ,
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(folder / "cache"),
            **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
            **(env or {}),
        }
        self.shared_before = shared_memory()
        start = (
            subprocess.Popen if fresh else functools.partial(forking.Popen, modules=forking.TORCH)
        )
        self.process = start(
            [*prefix, sys.executable, "-m", "paceline", *map(str, args)],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=own_group,
        )
        self.code: int | None = None
        self.out = self.err = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let nothing survive a test that fails."""
        if self.code is None:
            self.kill()
            self.process.communicate()

    def wait(self, deadline_s: float = DEADLINE_S) -> Launched:
        """Wait for its end and keep what it said."""
        try:
            self.out, self.err = self.process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.out, self.err = self.process.communicate()
            raise AssertionError(f"it hangs; so far: {self.out}{self.err}") from None
        self.code = self.process.returncode
        return self

    def kill(self) -> None:
        """Kill all processes of this run, and those that they started meanwhile."""

        def kill_those_seen() -> bool:
            seen = self.running()
            for pid in seen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            return not seen

        await_true(kill_those_seen, "all processes to be killed")

    def running(self) -> list[int]:
        """Return the processes of this run that still run: all of them carry its mark."""
        return forking.marked(self.mark)

    def assert_nothing_left(self) -> None:
        """Check for processes, shared memory and temporary files."""
        assert self.running() == [], self.running()
        left = [path for path in self.temporary.rglob("*") if not is_torchs(path)]
        assert left == [], left
        await_true(lambda: shared_memory() <= self.shared_before, "shared memory to be gone")


def is_torchs(path: Path) -> bool:
    """Whether a temporary file is torch's, which leaves it, too, where a rank is killed.

    It makes a cache folder when it is imported. A DataLoader that cannot read from a worker makes
    empty files, to see whether it still can (`_try_get_data`); a rank may be killed meanwhile.
    """
    is_probe = re.fullmatch(r"tmp[a-z0-9_]{8}", path.name) is not None
    return "torchinductor" in path.name or (is_probe and path.is_file() and not path.stat().st_size)


def shared_memory() -> set[str]:
    """Return what is named in /dev/shm of the kinds that our processes make, without an owner.

    Other tests run beside this one: what other programs make there (MPICH, semaphores of joblib)
    comes and goes, and a file of torch bears the number of the process that will remove it.
    """
    return {
        path.name
        for path in Path("/dev/shm").iterdir()
        if (kind := _OURS.search(path.name))
        and not (kind["owner"] and Path(f"/proc/{kind['owner']}").exists())
    }


def paceline(folder: Path, *args, deadline_s: float = DEADLINE_S, **options) -> Launched:
    """Run the command line to its end."""
    return Launched(folder, *args, **options).wait(deadline_s)


def free_endpoint(host: str = "127.0.0.1") -> str:
    """Return an address for a rendezvous, at a port that is free on this host."""
    # Not one that the system would give out: another test's connection may have it in the meantime.
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"{host}:{port}"


def launch_node(
    folder: Path, number: int, endpoint: str, *args, count=2, out="RUN", **options
) -> Launched:
    """Start the launcher of one of `count` nodes; `options` are those of `Launched`."""
    place = ("--nnodes", count, "--node-rank", number, "--rdzv-endpoint", endpoint, "--out", out)
    return Launched(folder, "run", *place, *args, **options)


def launch_nodes(folder: Path, hosts, *args, **options) -> list[Launched]:
    """Start a run with a launcher on each host, given as address and words to run there.

    `options` are those of `Launched`.
    """
    endpoint = free_endpoint(hosts[0][0])
    words = ("--no-record", *args)
    return [
        launch_node(folder, number, endpoint, *words, count=len(hosts), prefix=prefix, **options)
        for number, (_, prefix) in enumerate(hosts)
    ]


def await_true(condition, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Wait until `condition()` holds."""
    never = threading.Event()
    for _ in range(int(deadline_s / 0.05)):
        if condition():
            return
        never.wait(0.05)
    raise AssertionError(f"waited {deadline_s} s for {what}")


def last_json(text: str) -> dict:
    """Return the object in the last line of `text`."""
    return json.loads(text.splitlines()[-1])
