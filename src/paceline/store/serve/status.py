"""Asks all nodes of a store what they hold and do, from one of them on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import RankLost
from paceline.core.record import Record
from paceline.store.serve.card import NodeCard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.store.serve.links import Connector

_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport(Record):
    """The answer of a node; without a card, why there is none."""

    node: str
    card: NodeCard | None
    why: str = ""


def ask_nodes(names: Iterable[str], connect: Connector, wait_s: float) -> list[NodeReport]:
    """Return the answers of these nodes and of all nodes that they name, by name.

    Raises:
        UsageError: a node refuses the token, or serves another pack; or an address is none.
    """

    def ask(name: str) -> NodeReport:
        link = connect(name)
        try:
            return NodeReport(node=name, card=link.card(wait_s))
        except RankLost as problem:
            return NodeReport(node=name, card=None, why=problem.why or problem.what)
        finally:
            link.close()

    reports: dict[str, NodeReport] = {}
    asked = set(names)
    with ThreadPoolExecutor(_AT_ONCE, "paceline-ask") as threads:
        while asked:
            for report in threads.map(ask, sorted(asked)):
                reports[report.node] = report
            named = {
                peer for report in reports.values() if report.card for peer in report.card.peers
            }
            asked = named - set(reports)
    return [reports[name] for name in sorted(reports)]
