"""Several nodes without Slurm or MPI: one launcher per node, which find each other.

::

    node 0$ paceline run --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29400 -n 4 train.py
    node 1$ paceline run --nnodes 2 --node-rank 1 --rdzv-endpoint node0:29400 -n 4 train.py

The launchers are the tasks of a rendezvous (`launch.rendezvous`): that of node 0 listens at the
endpoint. Options and defaults are those of torchrun, where it has them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.launch.task_placement import TaskPlacement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.launch.options import RunConfig

DEFAULT_PORT = 29_400  # torch.distributed.elastic.rendezvous: that of the c10d backend


def task_of_node(
    config: RunConfig, task: TaskPlacement | None, ranks: int, command: Sequence[str]
) -> TaskPlacement | None:
    """Return this launcher's place among those of ``--nnodes``; `task` for a single node.

    Args:
        config: where nnodes, node_rank and rdzv_endpoint stand.
        task: this task's place under Slurm or mpirun: with one task per node, its number is
            the node's, unless the user says otherwise.
        ranks: ranks on each node.
        command: program and arguments of each rank, which tell jobs without ``--rdzv-id`` apart.

    Raises:
        UsageError: the options do not fit together.
    """
    if config.nnodes == 1:
        if config.node_rank:
            raise UsageError(
                f"node-rank is {config.node_rank}, nnodes is 1",
                why="a run on one node has no other node",
                fix="Give the number of nodes as well, for example --nnodes 2",
            )
        return task
    node = config.node_rank
    if node is None:
        node = task.task_number if task and task.task_count == config.nnodes else 0
    if not 0 <= node < config.nnodes:
        raise UsageError(
            f"node-rank is {node}, nnodes is {config.nnodes}",
            fix=f"Give a node rank from 0 to {config.nnodes - 1}, a different one on each node",
        )
    if not config.rdzv_endpoint:
        raise UsageError(
            f"{config.nnodes} nodes have to find each other",
            why="--rdzv-endpoint is missing",
            fix="Give the host of node 0 and a free port on all nodes: --rdzv-endpoint HOST:29400",
        )
    host, port = parse_endpoint(config.rdzv_endpoint)
    name = config.rdzv_id or command_name(command)
    identity = f"{name} at {host}:{port}, {config.nnodes} x {ranks} ranks"
    return TaskPlacement(
        source="nodes",
        task_number=node,
        task_count=config.nnodes,
        local_task_number=0,
        local_task_count=1,
        first_host=host,
        job_name=config.rdzv_id,
        identity=identity,
        port=port,
        ranks_per_task=ranks,
    )


def command_name(command: Sequence[str]) -> str:
    """Return a short name that two commands have in common only if they are the same.

    The folder of the program does not count: nodes may have it in different places.

    >>> command_name(["/a/train.py", "--lr", "1"]), command_name(["/b/train.py", "--lr", "2"])
    ('train.py [e4509451]', 'train.py [e8b0ef36]')
    """
    program, *arguments = command
    digest = hashlib.blake2b("\0".join(arguments).encode(errors="surrogateescape"), digest_size=4)
    return f"{Path(program).name} [{digest.hexdigest()}]"


def node_warnings(config: RunConfig) -> tuple[str, ...]:
    """Return a line if options that bring several nodes together are given for a single one."""
    options = {"--rdzv-endpoint": config.rdzv_endpoint, "--rdzv-id": config.rdzv_id}
    given = [option for option, value in options.items() if value]
    if config.nnodes > 1 or not given:
        return ()
    return (f"the run has one node: {' and '.join(given)} without --nnodes changes nothing",)


def parse_nnodes(text: str) -> int:
    """Return a number of nodes; also of torchrun's form MIN:MAX, if both are the same.

    Raises:
        UsageError: it is not a number, or the number of nodes may change.
    """
    numbers = set(text.split(":", 1))
    number = numbers.pop()
    if numbers or not number.isdecimal():
        raise UsageError(
            f"--nnodes {text!r} is not a number of nodes",
            why="a run has the same nodes from start to end" if ":" in text else "",
            fix="Give one number, for example --nnodes 2",
        )
    return int(number)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of an endpoint.

    Raises:
        UsageError: it is not HOST, HOST:PORT or [IPV6]:PORT.

    >>> parse_endpoint("node0"), parse_endpoint("node0:4711"), parse_endpoint("[::1]:4711")
    (('node0', 29400), ('node0', 4711), ('::1', 4711))
    """
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"--rdzv-endpoint {text!r} is not an address",
            fix="Write it as HOST:PORT, for example node0:29400",
        )
    return host, int(port)
