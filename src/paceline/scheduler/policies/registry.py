"""The policies by name, as the command line and the benchmarks ask for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.scheduler.policies.fifo import Fifo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.scheduler.decide import Policy

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "fifo": Fifo,  # in the order of submission, devices exclusive
}
