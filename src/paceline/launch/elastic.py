"""Starts ranks on this node through torch's elastic agent: the leaf that imports torch."""

from __future__ import annotations

import logging
import signal
import uuid
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from paceline.core.processes import Exit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def start(command: Sequence[str], ranks: int, temporary: Path) -> tuple[Exit, ...]:
    """Run `command` on `ranks` ranks until all end, or one fails and the others were stopped.

    Args:
        command: of each rank.
        ranks: on this node.
        temporary: a folder for what the agent writes.

    Returns:
        The exits of ranks that did not end well, in order of time; none when all did. A stop by
        signal appears as rank -1 with that signal.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)  # the agent's own story of a failure; we tell it in our words
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
            Exit(rank=rank, code=failure.exitcode, signal=_signal_of(failure.exitcode))
            for rank, failure in in_time
        )
    except SignalException as stopped:
        return (Exit(rank=-1, code=130, signal=signal.Signals(stopped.sigval).name),)
    finally:
        logging.disable(before)
    return ()


def _signal_of(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else ""
