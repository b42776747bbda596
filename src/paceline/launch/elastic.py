"""Starts ranks on this node through torch's elastic agent. Imports torch."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.core.processes import StopRequested, signal_name
from paceline.launch.exits import exit_of, interrupted_exit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.launch.exits import RankExit


def start(command: Sequence[str], ranks: int, temporary: Path) -> tuple[RankExit, ...]:
    """Run `command` on `ranks` ranks until all end, or one fails and the others are stopped.

    Args:
        command: the command of each rank.
        ranks: number of ranks on this node.
        temporary: a folder for the agent's files.

    Returns:
        The exits of ranks that did not end well, in order of time; none when all ended well. A stop
        by a signal is one interrupted exit for all ranks.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # the agent's report of a failure: Paceline prints its own
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",  # one node: its host name need not resolve
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(temporary)),
    )
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as failed:
        in_time = sorted(failed.failures.items(), key=lambda item: item[1].timestamp)
        return tuple(
            exit_of(rank, failure.exitcode, at_s=float(failure.timestamp))
            for rank, failure in in_time
        )
    except SignalException as stopped:
        return (interrupted_exit(None, StopRequested(signal_name(stopped.sigval)), 0.0),)
    finally:
        logging.disable(before)
    return ()
