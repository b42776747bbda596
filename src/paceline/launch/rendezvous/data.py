"""How the servers of a run's data find each other, from what the tasks of a job report.

The first task of each node listens on a port for each pack of ``--data`` and reports it with its
arrival; the root tells all tasks the addresses of all nodes. A node's address is the one from which
its task has connected to the root, as that leads to the other nodes.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from paceline.launch.rendezvous.messages import DataStart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.launch.rendezvous.messages import TaskReport


def data_starts(
    reports: Sequence[TaskReport], addresses: Sequence[str], root_host: str, token: str
) -> list[DataStart | None]:
    """Return for each task where the packs of the run are served; None where no server is.

    Args:
        reports: of all tasks, in the order of their numbers.
        addresses: from which each has connected to the root; empty: it reports through files.
        root_host: a name of the root's host that the other nodes know.
        token: of all servers.
    """
    leaders = [number for number, report in enumerate(reports) if report.data]
    if not leaders:
        return [None] * len(reports)
    hosts = [address or report.host for report, address in zip(reports, addresses, strict=True)]
    if not all(_is_loopback(host) for host in hosts):  # else all are on one host
        hosts = [root_host if _is_loopback(host) else host for host in hosts]
    servers = tuple(
        tuple(_address(hosts[number], reports[number].data[pack].port) for number in leaders)
        for pack in range(min(len(reports[number].data) for number in leaders))
    )
    by_host = {reports[number].host: number for number in reversed(leaders)}
    starts: list[DataStart | None] = []
    for number, report in enumerate(reports):
        leader = number if report.data else by_host.get(report.host)
        if leader is None:
            starts.append(None)
            continue
        starts.append(
            DataStart(
                servers=servers,
                number=leaders.index(leader),
                offers=reports[leader].data,
                token=token,
            )
        )
    return starts


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
