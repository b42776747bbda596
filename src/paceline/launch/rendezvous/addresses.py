"""Where the root listens, and where members look for it.

Where Slurm or mpirun tells every task the first host and a name of the job, both sides compute the
same ports from the name, and members connect without touching any file. Otherwise, and when these
ports are taken, members read one small file in the run's folder::

    RUN/rendezvous/root.json   {"version": 1, "run": ..., "hosts": [...], "port": ..., "token": ...}

Only this user can read the folder: the token in it serves tasks on nodes that share no home.
"""

from __future__ import annotations

import errno
import hashlib
import json
import secrets
import socket
from typing import TYPE_CHECKING, Any

from paceline.core.errors import StorageError, UsageError
from paceline.core.files import commit_text

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.launch.task_placement import TaskPlacement

FOLDER = "rendezvous"
FIRST_PORT, PORT_COUNT = 20_000, 12_000  # below the ports that Linux gives to outgoing connections
_CANDIDATES = 4


def job_identity(task: TaskPlacement, run: Path) -> str:
    """Return an identity that only the tasks of one job share: its name or the run's folder."""
    return task.identity or task.job_name or f"{task.source}:{run.resolve()}"


def agreed_ports(job: str) -> tuple[int, ...]:
    """Return the ports that the root tries to listen on, in this order."""
    digest = hashlib.blake2b(job.encode(), digest_size=4 * _CANDIDATES).digest()
    numbers = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4)]
    return tuple(dict.fromkeys(FIRST_PORT + number % PORT_COUNT for number in numbers))


def is_one_node(task: TaskPlacement) -> bool:
    """Whether all tasks run on this node."""
    return task.local_task_count == task.task_count


def known_addresses(task: TaskPlacement, job: str) -> tuple[tuple[str, int], ...]:
    """Return the addresses of the root that the task can compute; empty if its host is unknown."""
    host = "127.0.0.1" if is_one_node(task) else task.first_host
    ports = (task.port,) if task.port else agreed_ports(job)
    return tuple((host, port) for port in ports) if host else ()


def name_addresses(task: TaskPlacement) -> str:
    """Return where members look for the root, in words."""
    if task.port:
        return f"port {task.port} of {task.first_host}"
    return "its agreed ports"


def open_listener(task: TaskPlacement, job: str) -> socket.socket:
    """Return the root's listening socket, on an agreed port if one is free.

    Raises:
        StorageError: no port can be opened.
        UsageError: the endpoint that the user named cannot be opened.
    """
    host = "127.0.0.1" if is_one_node(task) else _loopback(task)
    ports = (task.port,) if task.port else (*agreed_ports(job), 0)
    problem: OSError | None = None
    for port in ports:
        try:
            return _listen(host, port)
        except OSError as refused:
            problem = refused
    assert problem is not None
    why = problem.strerror or str(problem)
    if task.port:
        raise UsageError(
            "node 0 cannot listen at the endpoint",
            where=f"port {task.port} of {host or 'all addresses'}",
            why=why,
            fix="Give each node its own --node-rank, and each job a port that is free on node 0",
        ) from problem
    raise StorageError(
        "rank 0 cannot listen for the other tasks",
        where=host or "all addresses",
        why=why,
        fix="Check the limits on open files and the node's firewall",
    ) from problem


def open_data_listener(task: TaskPlacement | None) -> socket.socket:
    """Return a listening socket, on any free port, that the other nodes of the run can reach.

    Raises:
        StorageError: no port can be opened.
    """
    is_here = task is None or is_one_node(task)
    host = "127.0.0.1" if task is None or is_here else _loopback(task)
    try:
        return _listen(host, 0)
    except OSError as refused:
        raise StorageError(
            "the data server of this node cannot listen",
            where=host or "all addresses",
            why=refused.strerror or str(refused),
            fix="Check the limits on open files",
        ) from refused


def _loopback(task: TaskPlacement) -> str:
    """Return the loopback address if the first host is one; empty if it is another host."""
    if task.first_host == "::1":
        return "::1"
    name = task.first_host
    return "127.0.0.1" if name == "localhost" or name.startswith("127.") else ""


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at `host`; at all addresses, IPv4 and IPv6, if it is empty."""
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
        except OSError as problem:
            if problem.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                raise  # else the kernel knows IPv6, and this host has it switched off
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=4096)


def listening_hosts(task: TaskPlacement) -> tuple[str, ...]:
    """Return the names of this host under which others may reach it, the best first."""
    if is_one_node(task):
        return ("127.0.0.1",)
    names = (task.first_host, socket.gethostname(), socket.getfqdn())
    return tuple(dict.fromkeys(name for name in names if name and resolves(name)))


def resolves(name: str) -> bool:
    """Whether a host name has an address; a node's name in Slurm need not."""
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def choose_address(task: TaskPlacement) -> tuple[str, int]:
    """Return an address and a free port of this host for rank 0's process group.

    Raises:
        UsageError: this host has no name that resolves.
    """
    hosts = listening_hosts(task)
    if not hosts:
        raise UsageError(
            "this host has no name that resolves",
            where=f"rank {task.task_number}",
            why=f"tried {task.first_host or '-'}, {socket.gethostname()}",
            fix="Give the host a name in DNS or /etc/hosts",
        )
    with socket.socket() as probe:
        probe.bind(("", 0))
        return hosts[0], probe.getsockname()[1]


def write_address(run: Path, number: str, hosts: tuple[str, ...], port: int) -> str:
    """Write where the root listens into the run's folder; return the token that stands beside it.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder = run / FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
    except OSError as problem:
        raise StorageError(
            "cannot make the rendezvous folder",
            where=str(folder),
            why=problem.strerror or "",
            fix="Choose a folder that you may write to",
        ) from problem
    token = secrets.token_hex(16)
    place = {"version": 1, "run": number, "hosts": hosts, "port": port, "token": token}
    commit_text(folder / "root.json", json.dumps(place))
    return token


def read_address(run: Path) -> tuple[tuple[str, int], ...]:
    """Return the addresses in the run's folder; empty while there are none that can be read."""
    try:
        data = _read(run)
        return tuple((str(host), int(data["port"])) for host in data["hosts"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def read_run_token(run: Path) -> str:
    """Return the token in the run's folder; empty while there is none that can be read."""
    try:
        return str(_read(run)["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _read(run: Path) -> Any:  # JSON, of whatever shape
    return json.loads((run / FOLDER / "root.json").read_text(encoding="utf-8"))
