"""The policies by name, as the command line and the benchmarks ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.scheduler.policies.fifo import Fifo
from paceline.scheduler.policies.gandiva import Gandiva
from paceline.scheduler.policies.las import LeastAttained
from paceline.scheduler.policies.marble import Marble
from paceline.scheduler.policies.muri import Muri
from paceline.scheduler.policies.optimus import Optimus
from paceline.scheduler.policies.paceline import for_objective
from paceline.scheduler.policies.rounds import Rounds
from paceline.scheduler.policies.srtf import ShortestRemaining

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.scheduler.decide import Policy

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "fifo": Fifo,  # in the order of submission, devices exclusive
    "fifo-nodes": lambda: Fifo(whole_nodes=True),  # the same, whole nodes: a batch system
    "srtf": ShortestRemaining,  # shortest remaining time first, preemptive
    "srsf": lambda: ShortestRemaining(service=True),  # the same by time x devices
    "las": LeastAttained,  # least attained service by levels: Tiresias
    "optimus": lambda: Rounds(Optimus(), 600.0),  # elastic sizes by gain of remaining time
    "gandiva": Gandiva,  # pairs on one set of devices, by trial
    "marble": Marble,  # the devices of a node that pay, several jobs to a node
    "marble-share": lambda: Marble(share=True),  # the same, several jobs to a device
    "muri": Muri,  # up to four jobs that take turns on resources
    "paceline": for_objective,  # by what progress is worth, elastic sizes, sharing
}
