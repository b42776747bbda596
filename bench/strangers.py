"""What can a stranger do to our servers?

- flood: 4,000 connections that say nothing against each server, each replaced every 10 s, by a
  process on a core of its own. Meanwhile an honest client connects, proves the token and asks,
  again and again, on the other core, which the server has, too. Its calls are compared with those
  beside a process that only computes on the stranger's core.

      data         a node of `paceline store serve`: connect, and ask for its card
      outputs      a node of `paceline run --output`: connect, and ask what is written
      rendezvous   rank 0's launcher: connect, as a task does
      turns        who grants turns to readers of a shared file system: connect, and take one
      queue        `paceline queue serve`: ask for its jobs; the stranger is another user

- second user: what another user of this machine gets when it tries to read the token, to ask the
  node, to take part in a rendezvous, and to ask, fill and cancel in the queue.
- modes: the files that commands make under umask 000 and 077. Right is: with 077 nobody else has
  any access; with 000 nobody else has any to what is secret or says what a user's jobs are.

    sudo python bench/strangers.py --json [--quick] [--only SECTION ...]

Needs root, to become another user.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness import Report, options, run_sections, tell

CONNECTIONS, RENEW_S = 4000, 10.0
FLOOD_S, CALM_S = 60.0, 20.0
QUICK_FLOOD_S, QUICK_CALM_S = 4.0, 2.0
MOST_P99 = 3.0  # of that of calls that nobody disturbs
NOBODY = 65534
TOKEN = "the token of this benchmark"
PACELINE = (sys.executable, "-m", "paceline")
START_S, CALL_S = 60.0, 30.0
SERVERS = ("data", "outputs", "rendezvous", "turns", "queue")
SECTIONS = ("flood", "second user", "modes")


def main():
    flags = options(__doc__, "--serve", "--attack", "--only")
    if flags.serve:
        return serve(flags.serve[0], Path(flags.serve[1]))
    if flags.attack:
        return attack(*flags.attack)
    report = Report("strangers", flags.json)
    sections = {"flood": flood, "second user": second_user, "modes": modes}
    names = [" ".join(flags.only)] if flags.only else SECTIONS
    run_sections(names, lambda name: sections[name](report, flags.quick), report)
    return report.print()


# --- flood --------------------------------------------------------------------------------------


def flood(report, quick):
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[:-1] or cores, cores[-1]
    os.sched_setaffinity(0, ours)
    allow_descriptors()
    for name in SERVERS:
        with tempfile.TemporaryDirectory() as folder, Server(name, Path(folder)) as server:
            busy = Stranger(server, "busy", theirs)
            calm = measure(server, QUICK_CALM_S if quick else CALM_S)
            busy.stop()
            stranger = Stranger(server, "flood", theirs)
            found = measure(server, QUICK_FLOOD_S if quick else FLOOD_S)
            opened = stranger.stop()
        report.row(server=name, opened=opened, calm=calm, flooded=found)
        share = found["calls"] / max(1, found["calls"] + found["failed"])
        report.bar(f"{name}: share of calls that succeed", share, 1.0, at_least=True)
        ratio = found["p99_ms"] / calm["p99_ms"]
        report.bar(f"{name}: p99 of a call, flooded / beside other work", ratio, MOST_P99)


def measure(server, seconds):
    """Return how long honest calls took in this time, one after the other, and how many failed."""
    took, failed, why = [], 0, ""
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        try:
            server.call()
            took.append(1e3 * (time.perf_counter() - begin))
        except Exception as problem:  # counted, whatever it is
            failed, why = failed + 1, str(problem)
    if why:
        tell(f"    the last of {failed} calls that failed: {why}")
    times = sorted(took) or [float("inf")]
    return {
        "calls": len(took),
        "failed": failed,
        "median_ms": statistics.median(times),
        "p99_ms": times[int(0.99 * (len(times) - 1))],
        "longest_ms": times[-1],
    }


class Server:
    """A server in a process of its own, on the cores of this one, and an honest call to it."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        (folder / "token").write_text(TOKEN)
        (folder / "token").chmod(0o600)
        command = [sys.executable, __file__, "--serve", name, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.said = json.loads(self.process.stdout.readline())
        self.place = self.said["place"]
        self.pid = self.said.get("pid", self.process.pid)
        self.token = self.said.get("token", TOKEN)
        self.call = HONEST[name](self.said)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(timeout=START_S)


def call_data(said):
    from paceline.store.serve.links import tcp_connector

    connect = tcp_connector(said["pack"], TOKEN)

    def call():
        link = connect("{}:{}".format(*said["place"]))
        link.card(CALL_S)
        link.close()

    return call


def call_outputs(said):
    from paceline.store.serve.card import NodeAddress
    from paceline.store.serve.output_wire import OutputLink

    def call():
        link = OutputLink(NodeAddress(host=said["place"][0], port=said["place"][1]), TOKEN)
        assert link.call({"do": "written"}, CALL_S) == {"paths": []}
        link.close()

    return call


def call_rendezvous(said):
    from paceline.core.handshake import prove

    def call():
        with socket.create_connection(tuple(said["place"]), CALL_S) as connection:
            prove(connection, TOKEN, CALL_S)

    return call


def call_turns(said):
    from paceline.store.feed.node.turns import Turns

    def call():
        turns = Turns(said["address"])
        with turns.turn(1):
            pass
        turns.close()
        if turns.missed:
            raise TimeoutError("no turn was granted")

    return call


def call_queue(said):
    from paceline.core.clock import SystemClock
    from paceline.scheduler.local.paths import queue_paths
    from paceline.scheduler.local.protocol.client import ask
    from paceline.scheduler.local.protocol.messages import Request

    paths, clock = queue_paths(Path(said["place"]).parent, os.environ), SystemClock()

    def call():
        ask(paths, Request(verb="list"), clock)

    return call


HONEST = {
    "data": call_data,
    "outputs": call_outputs,
    "rendezvous": call_rendezvous,
    "turns": call_turns,
    "queue": call_queue,
}


def serve(name, folder):
    """Be a server until stdin ends."""
    allow_descriptors()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    said = SERVE[name](folder)
    print(json.dumps(said), flush=True)
    sys.stdin.buffer.read()
    if "pid" in said:
        os.kill(said["pid"], signal.SIGTERM)
    os._exit(0)


def serve_data(folder):
    from paceline.store.serve.card import NodeAddress
    from paceline.store.serve.node import NodeOptions, StoreNode

    pack = a_pack(folder)
    options = NodeOptions(listen=NodeAddress(host="127.0.0.1", port=0), token=TOKEN)
    node = StoreNode(pack, options)
    node.start()
    host, _, port = node.name.rpartition(":")
    return {"place": [host, int(port)], "pack": node.pack.identity}


def serve_outputs(folder):
    from paceline.store.serve.card import NodeAddress
    from paceline.store.serve.output_node import OutputNode

    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    other = socket.create_server(("127.0.0.1", 0))
    places = [server.getsockname() for server in (listener, other)]
    nodes = [NodeAddress(host=host, port=port) for host, port in places]
    for part in ("local", "target"):
        (folder / part).mkdir()
    OutputNode(folder / "local", folder / "target", nodes, 0, TOKEN, listener)
    return {"place": places[0]}


def serve_rendezvous(folder):
    from paceline.core.clock import SystemClock
    from paceline.launch.rendezvous.job import TaskRendezvous
    from paceline.launch.rendezvous.root import Deadlines
    from paceline.launch.task_placement import TaskPlacement

    place = TaskPlacement(
        source="bench", task_number=0, task_count=2, local_task_number=0, local_task_count=2
    )
    deadlines = Deadlines(rendezvous_timeout_s=3600)
    rendezvous = TaskRendezvous(
        folder,
        place,
        host="here",
        cores=(0,),
        deadlines=deadlines,
        clock=SystemClock(),
        token_file=str(folder / "token"),
    )
    rendezvous.start()
    written = json.loads((folder / "rendezvous" / "root.json").read_text())
    return {"place": [written["hosts"][0], written["port"]]}


def serve_turns(folder):
    from paceline.store.feed.node.turns import TurnServer, TurnTuner

    address = TurnServer(TurnTuner(2)).address("127.0.0.1")
    return {
        "place": ["127.0.0.1", int(address.rpartition(":")[2])],
        "address": address,
        "token": address.partition("@")[0],
    }


def serve_queue(folder):
    queue = folder / "q"
    folder.chmod(0o755)  # a stranger reaches the socket, or would
    command = [*PACELINE, "queue", "serve", "--dir", str(queue), "--slots", "1"]
    daemon = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + START_S
    while not (queue / "queue.sock").exists():
        assert time.monotonic() < end, "the daemon of the queue did not start"
        time.sleep(0.05)
    return {"place": str(queue / "queue.sock"), "pid": daemon.pid}


SERVE = {
    "data": serve_data,
    "outputs": serve_outputs,
    "rendezvous": serve_rendezvous,
    "turns": serve_turns,
    "queue": serve_queue,
}


def a_pack(folder):
    source = folder / "source"
    source.mkdir()
    for number in range(20):
        (source / f"{number}.bin").write_bytes(os.urandom(1000))
    pack = folder / "pack"
    subprocess.run([*PACELINE, "pack", str(source), str(pack)], check=True, capture_output=True)
    return pack


class Stranger:
    """A process on a core of its own that floods a server, or computes beside it."""

    def __init__(self, server, what, core):
        place = json.dumps(server.place)
        command = [sys.executable, __file__, "--attack", what, place, str(core)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process.stdout.readline()  # it has begun

    def stop(self):
        self.process.stdin.close()
        said = self.process.stdout.read()
        self.process.wait(timeout=START_S)
        return json.loads(said)


def attack(what, place, core):
    """Open connections, and each anew after a while, until stdin ends; or compute."""
    os.sched_setaffinity(0, {int(core)})
    allow_descriptors()
    place = json.loads(place)
    is_unix = isinstance(place, str)
    if is_unix and what == "flood":
        os.setuid(NOBODY)
    print("begun", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), ended.set()), daemon=True).start()
    opened = refused = 0
    connections, turn = [None] * CONNECTIONS, 0
    begin = time.monotonic()
    while not ended.is_set():
        if what == "busy":
            sum(range(10_000))
            continue
        if turn >= CONNECTIONS:  # all are open: from now on each is replaced after RENEW_S
            late = begin + (turn - CONNECTIONS) * RENEW_S / CONNECTIONS - time.monotonic()
            if late > 0:
                ended.wait(min(late, 0.1))
                continue
        index = turn % CONNECTIONS
        turn += 1
        if connections[index] is not None:
            connections[index].close()
        family = socket.AF_UNIX if is_unix else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(is_unix)
        try:
            connection.connect(place if is_unix else tuple(place))
            opened += 1
        except BlockingIOError:
            opened += 1  # on its way
        except OSError:
            refused += 1
        connections[index] = connection
        if turn == CONNECTIONS:
            begin = time.monotonic()
    print(json.dumps({"connections": opened, "refused": refused}), flush=True)
    os._exit(0)


def allow_descriptors():
    from paceline.core.processes import allow_descriptors as allow

    allow(20_000)


# --- second user --------------------------------------------------------------------------------


def second_user(report, quick):
    del quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        home = folder / "home"
        home.mkdir(mode=0o755)  # as homes are on many systems
        environ = {**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
        (folder / "other").mkdir()
        os.chown(folder / "other", NOBODY, NOBODY)
        other = {**environ, "HOME": str(folder / "other")}
        other["XDG_CONFIG_HOME"] = str(folder / "other" / ".config")
        pack = a_pack(folder)
        node = subprocess.Popen(
            [*PACELINE, "store", "serve", str(pack), "--listen", "127.0.0.1:0"],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        address = node.stdout.readline().split()[-1]
        queue = str(folder / "q")
        daemon = subprocess.Popen(
            [*PACELINE, "queue", "serve", "--dir", queue, "--slots", "1"],
            env=environ,
            stdout=subprocess.DEVNULL,
        )
        try:
            end = time.monotonic() + START_S
            while not (folder / "q" / "queue.sock").exists():
                assert time.monotonic() < end
                time.sleep(0.05)
            job = [*PACELINE, "queue", "submit", "--dir", queue, "--", "sleep", "600"]
            subprocess.run(job, env=environ, check=True, capture_output=True)
            token = home / ".config" / "paceline" / "token"
            status = [*PACELINE, "store", "status", str(pack), "--nodes", address]
            ls = [*PACELINE, "queue", "ls", "--dir", queue]
            join = [*PACELINE, "run", "--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:28477"]
            join += ["--rdzv-id", "a job"]
            waiting = subprocess.Popen(
                [*join, "--node-rank", "0", "--out", str(folder / "run"), "/bin/true"],
                env=environ, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            other["PACELINE_RUN__RENDEZVOUS_TIMEOUT_S"] = "5"
            tries = {
                "joins a run": [
                    *join,
                    "--node-rank",
                    "1",
                    "--out",
                    str(folder / "other" / "run"),
                    "/bin/true",
                ],
                "reads the token": ["cat", str(token)],
                "asks the node": status,
                "lists the queue": ls,
                "fills the queue": job,
                "cancels a job": [*PACELINE, "queue", "cancel", "--dir", queue, "sleep-1"],
                "reads the queue's files": ["ls", queue],
            }
            control = subprocess.run(
                as_nobody([*PACELINE, "--version"]), env=other, capture_output=True, check=False
            )
            assert control.returncode == 0, control.stderr
            own = {"asks the node": status, "lists the queue": ls}
            for what, command in own.items():
                done = subprocess.run(command, env=environ, capture_output=True, check=False)
                report.row(user="the first", what=what, succeeds=done.returncode == 0)
                assert done.returncode == 0, done.stderr
            succeeded = 0
            for what, command in tries.items():
                done = subprocess.run(
                    as_nobody(command), env=other, capture_output=True, check=False
                )
                said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
                report.row(
                    user="another",
                    what=what,
                    succeeds=done.returncode == 0,
                    said=said[-1][:160] if said else "",
                )
                succeeded += done.returncode == 0
            report.bar("what another user can do, of " + str(len(tries)), succeeded, 0)
            report.row(user="the first", what="waits for its own", succeeds=waiting.poll() is None)
            assert waiting.poll() is None
            waiting.terminate()
            waiting.wait(timeout=START_S)
        finally:
            subprocess.run(
                [*PACELINE, "queue", "cancel", "--dir", queue, "sleep-1"],
                env=environ,
                capture_output=True,
                check=False,
            )
            for process in (node, daemon):
                process.terminate()
                process.wait(timeout=START_S)


def as_nobody(command):
    """Return a command that another user runs, also where Python lies in a home that is closed.

    There, it gets a view of the file system in which that home holds Python and nothing else.
    """
    become = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]
    python = Path(sys.base_prefix)
    closed = [folder for folder in reversed(python.parents) if not folder.stat().st_mode & 0o001]
    if not closed:
        return become
    script = f"""
        set -e
        keep=$(mktemp -d)
        mount --bind {python} $keep
        mount -t tmpfs -o mode=755 none {closed[0]}
        mkdir -p {python}
        mount --move $keep {python}
        exec "$@"
    """
    return ["unshare", "--mount", "sh", "-c", script, "sh", *become]


# --- modes --------------------------------------------------------------------------------------

SECRET = ("token", "rendezvous", "q/")

RANKS = """
import os
import time
import torch
import torch.distributed as dist
import paceline.collectives
dist.init_process_group("paceline")
dist.all_reduce(torch.ones(1 << 20))
print("shared memory", flush=True)
while not os.path.exists("looked"):
    time.sleep(0.02)
"""


def modes(report, quick):
    del quick
    wrong = 0
    for mask in (0o000, 0o077):
        with tempfile.TemporaryDirectory() as name:
            for what, path, is_secret in made_files(Path(name), mask):
                try:
                    status = path.lstat()
                except FileNotFoundError:
                    continue
                mode = stat.S_IMODE(status.st_mode)
                is_out_of_reach = stat.S_ISLNK(status.st_mode) or is_closed(path, name)
                others = 0 if is_out_of_reach else mode & 0o077
                allowed = 0 if mask == 0o077 or is_secret else 0o077
                is_right = others & ~allowed == 0
                wrong += not is_right
                report.row(
                    umask=f"{mask:03o}",
                    command=what,
                    file=str(path).removeprefix(name + "/"),
                    mode=f"{mode:04o}",
                    right=is_right,
                )
    report.bar("files with wrong modes", wrong, 0)


def is_closed(path, base):
    """Whether a folder on the way there lets nobody else through."""
    return any(
        not folder.stat().st_mode & 0o011
        for folder in path.parents
        if folder.is_relative_to(base) and folder != Path(base)
    )


def made_files(folder, mask):
    """Run commands under a umask; yield each file that is new, with who made it."""
    environ = {**os.environ, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    environ |= {"XDG_CONFIG_HOME": str(folder / "home/.config")}
    environ |= {"XDG_CACHE_HOME": str(folder / "home/.cache")}
    before = os.umask(mask)
    try:
        for part in ("home", "tmp", "source"):
            (folder / part).mkdir()
        for number in range(20):
            (folder / "source" / f"{number}.bin").write_bytes(os.urandom(1000))
        (folder / "ranks.py").write_text(RANKS)
        shutil.make_archive(str(folder / "data"), "tar", folder / "source")
        known = set(folder.rglob("*"))
        shared = set(Path("/dev/shm").iterdir())

        def new(what):
            nonlocal known
            found = sorted(path for path in folder.rglob("*") if path not in known)
            known |= set(found)
            for path in found:
                name = path.relative_to(folder).as_posix()
                yield what, path, any(part in name for part in SECRET)

        pack = str(folder / "pack")
        subprocess.run(
            [*PACELINE, "pack", "source", pack], cwd=folder, env=environ, check=True,
            capture_output=True,
        )  # fmt: skip
        yield from new("pack")
        subprocess.run(
            [*PACELINE, "store", "ls", "data.tar"], cwd=folder, env=environ, check=False,
            capture_output=True,
        )  # fmt: skip
        yield from new("store ls of a tar")
        node = subprocess.Popen(
            [*PACELINE, "store", "serve", pack, "--listen", "127.0.0.1:0", "--local", "staged"],
            cwd=folder, env=environ, stdout=subprocess.PIPE,
        )  # fmt: skip
        node.stdout.readline()
        time.sleep(1.0)
        yield from new("store serve --local")
        node.terminate()
        node.wait(timeout=START_S)
        run = subprocess.Popen(
            [*PACELINE, "run", "-n", "2", "--out", "run", "ranks.py"],
            cwd=folder, env=environ, stdout=subprocess.PIPE,
        )  # fmt: skip
        ready = 0
        while ready < 2 and (line := run.stdout.readline()):
            ready += line.count(b"shared memory")
        for path in set(Path("/dev/shm").iterdir()) - shared:
            yield "run, shared memory", path, True
        (folder / "looked").touch()
        run.wait(timeout=START_S)
        yield from new("run")
        queue = subprocess.Popen(
            [*PACELINE, "queue", "serve", "--dir", "q", "--slots", "1"],
            cwd=folder, env=environ, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + START_S
        while not (folder / "q" / "queue.sock").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        subprocess.run(
            [*PACELINE, "queue", "submit", "--dir", "q", "--wait", "--", "true"],
            cwd=folder, env=environ, check=False, capture_output=True,
        )  # fmt: skip
        yield from new("queue")
        queue.terminate()
        queue.wait(timeout=START_S)
    finally:
        os.umask(before)


if __name__ == "__main__":
    sys.exit(main())
