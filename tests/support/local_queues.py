"""Starts `paceline queue serve` as a user does, and asks it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

from paceline.cli.app import main
from support.launching import await_true

DEADLINE_S = 120
PYTHON = sys.executable


class QueueUnderTest:
    """A queue in a folder of its own; its daemon can be killed and started again.

    Attributes:
        folder: of the queue; short, since a socket's path is limited.
        environ: of the daemon.
        daemon: the process of the daemon; None before the first `serve`.
    """

    def __init__(self, policy: str = "fifo", slots: int = 2, sharing: dict | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="queue-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.options = ["--policy", policy, "--slots", str(slots)]
        if sharing is not None:
            path = self.folder / "sharing.json"
            path.write_text(json.dumps(sharing))
            self.options += ["--sharing", str(path)]
        self.environ = dict(os.environ)
        self.daemon: subprocess.Popen | None = None
        self.log = self.folder / "daemon.log"

    def __enter__(self):
        self.serve()
        return self

    def __exit__(self, *_: object) -> None:
        """Let nothing survive a test that fails."""
        if self.daemon is not None:
            self.kill()
        for pid in self.processes():
            with_signal(pid, signal.SIGKILL)

    def serve(self, *options: str) -> None:
        """Start the daemon, and wait until it answers."""
        with self.log.open("ab") as log:
            command = [PYTHON, "-m", "paceline", "queue", "serve", "--dir", str(self.folder)]
            command += [*self.options, *options]
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log, env=self.environ)
        daemon = self.daemon

        def answers() -> bool:
            assert daemon.poll() is None, self.log.read_text()
            return self.run("ls", check=False).returncode == 0

        await_true(answers, "the daemon to answer", DEADLINE_S)

    def kill(self) -> None:
        """Kill the daemon, as nothing in it can foresee."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    def run(self, verb: str, *args, check: bool = True) -> subprocess.CompletedProcess:
        """Run a subcommand to its end: in this process, as starting Python takes longer than it."""
        argv = ["paceline", "queue", verb, "--dir", str(self.folder), *map(str, args)]
        done = run_here(argv)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def submit(self, *args, check: bool = True) -> str:
        """Submit a job; return its name."""
        return self.run("submit", *args, check=check).stdout.strip()

    def jobs(self) -> dict[str, dict]:
        """Return all jobs by name, as the daemon has them."""
        text = self.run("ls", "--all", "--json").stdout
        return {job["name"]: job for job in json.loads(text)["jobs"]}

    def await_status(self, name: str, *statuses: str) -> dict:
        """Wait until a job has one of some statuses; return it."""
        found = {}

        def reached() -> bool:
            found.update(self.jobs()[name])
            return found["status"] in statuses

        await_true(reached, f"{name} to be {statuses}; {found}", DEADLINE_S)
        return found

    def await_file(self, path: Path, text: str = "") -> str:
        """Wait until a file has some text; return all of it."""
        await_true(
            lambda: path.exists() and text in path.read_text(), f"'{text}' in {path}", DEADLINE_S
        )
        return path.read_text()

    def replay(self) -> dict:
        """Decide the queue's log again."""
        argv = ["paceline", "queue", "replay", str(self.folder), "--json"]
        return json.loads(run_here(argv).stdout)

    def cancel_all(self) -> None:
        """Let no job wait or run any more."""
        active = json.loads(self.run("ls", "--json").stdout)["jobs"]
        for job in active:
            self.run("cancel", job["name"])
        for job in active:
            self.await_status(job["name"], "cancelled", "done", "failed")

    def processes(self) -> list[int]:
        """Return the processes of this queue's jobs that still run."""
        needle = os.fsencode(f"{self.folder}/jobs")
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdecimal() and (
                    needle in (folder / "environ").read_bytes()
                    or needle in (folder / "cmdline").read_bytes()
                ):
                    found.append(int(folder.name))
            except OSError:  # it has ended
                continue
        return found


def run_here(argv: list[str]) -> subprocess.CompletedProcess:
    """Run the command line in this process."""
    output = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    before, sys.argv = sys.argv, argv
    try:
        with contextlib.redirect_stdout(output[0]), contextlib.redirect_stderr(output[1]):
            main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
    texts = []
    for stream in output:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return subprocess.CompletedProcess(argv, code, *texts)


def with_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
