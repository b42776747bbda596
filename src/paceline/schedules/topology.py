"""Where the ranks of a group are, and what connects them: what costs of a Schedule depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.machine import Link
from paceline.schedules.groups import check_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.core.machine import Device, Machine

ADD_BYTES = 3  # `a += b` reads two bytes and writes one for each byte of the result


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Where the ranks of a group are, and what connects them.

    Attributes:
        hosts: the ranks of each host.
        inside: link between two ranks of a host; None if no host has two.
        across: link between ranks of two hosts; None if there is one host.
        devices: of each host, among which its ranks are divided in blocks.
        reduction_s_per_byte: seconds that one rank takes to reduce a received byte.
    """

    hosts: tuple[tuple[int, ...], ...]
    inside: Link | None = None
    across: Link | None = None
    devices: int = 1
    reduction_s_per_byte: float = 0.0

    @classmethod
    def of(
        cls,
        machine: Machine,
        hosts: Sequence[Sequence[int]],
        *,
        inside: str = "shared-memory",
        across: str = "network",
    ) -> Topology:
        """Return the topology of ranks on `hosts` of a Machine.

        Args:
            machine: its links of the two levels, and the memory bandwidth of its first device.
            hosts: the ranks of each host.
            inside: level of the link between ranks of one host.
            across: level of the link between hosts.

        Raises:
            UsageError: the machine lacks a level that is needed, or a rank is on no host or two.
        """
        check_groups(hosts)
        most = max(len(host) for host in hosts)
        return cls(
            hosts=tuple(tuple(host) for host in hosts),
            inside=_link(machine, inside) if most > 1 else None,
            across=_link(machine, across) if len(hosts) > 1 else None,
            devices=machine.devices[0].count if machine.devices else 1,
            reduction_s_per_byte=_reduction_s_per_byte(machine.devices, most),
        )

    def host_of(self) -> NDArray[np.int64]:
        """Return the index of each rank's host."""
        return host_indices(self.hosts)

    def device_of(self) -> NDArray[np.int64]:
        """Return the index of each rank's device, counted over all hosts."""
        device_of = np.empty(sum(len(host) for host in self.hosts), np.int64)
        for index, host in enumerate(self.hosts):
            places = np.arange(len(host)) * self.devices // len(host)
            device_of[list(host)] = index * self.devices + places
        return device_of


def host_indices(hosts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the index of each rank's host."""
    indices = np.empty(sum(len(host) for host in hosts), np.int64)
    for index, host in enumerate(hosts):
        indices[list(host)] = index
    return indices


def _link(machine: Machine, level: str) -> Link:
    link = machine.link(level)
    if link is None:
        known = ", ".join(link.level for link in machine.links) or "none"
        raise UsageError(
            f"the machine has no link of level '{level}'",
            where=machine.name,
            why=f"its levels: {known}",
            fix="Measure it with paceline probe, add it to the machine file, or name another level",
        )
    return link


def _reduction_s_per_byte(devices: Sequence[Device], ranks_per_host: int) -> float:
    """Return seconds per reduced byte at the memory bandwidth that one of the ranks gets.

    0 if the bandwidth is not known: the reduction then counts as free.
    """
    if not devices:
        return 0.0
    device = devices[0]
    shared = device.bandwidth_shared_bytes_per_s if ranks_per_host > device.count else None
    bandwidth = shared or device.bandwidth_bytes_per_s
    return ADD_BYTES / bandwidth.value if bandwidth else 0.0
