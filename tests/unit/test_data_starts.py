"""Which addresses the servers of a run's data get, from how their tasks reached the root."""

import dataclasses

import pytest

from paceline.launch.rendezvous.data import data_starts
from paceline.launch.rendezvous.messages import (
    DataOffer,
    Notice,
    StartInfo,
    TaskReport,
    parse_notice,
    parse_report,
)
from paceline.launch.rendezvous.root import JobPhase


def report(number, host, *ports):
    offers = tuple(
        DataOffer(port=port, requests=f"/proc/{number}/fd/{port}", local=f"/l/{number}")
        for port in ports
    )
    return TaskReport(
        job="j", run="", task="t", rank=number, world_size=4, host=host, cores=(0,), data=offers
    )


TWO_NODES = [report(0, "a", 1, 2), report(1, "a"), report(2, "b", 3, 4), report(3, "b")]


def test_tasks_of_a_node_share_its_servers():
    addresses = ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]
    starts = data_starts(TWO_NODES, addresses, "head", "secret")
    servers = (("10.0.0.1:1", "10.0.0.2:3"), ("10.0.0.1:2", "10.0.0.2:4"))
    assert [start.servers for start in starts] == [servers] * 4
    assert [start.number for start in starts] == [0, 0, 1, 1]
    assert starts[1].offers == TWO_NODES[0].data
    assert starts[3].offers == TWO_NODES[2].data
    assert {start.token for start in starts} == {"secret"}


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["127.0.0.1", "127.0.0.1"], ["127.0.0.1:1", "127.0.0.1:3"]),
        (["127.0.0.1", "10.0.0.2"], ["head:1", "10.0.0.2:3"]),  # others cannot reach a loopback
        (["fd00::1", "fd00::2"], ["[fd00::1]:1", "[fd00::2]:3"]),
        (["", ""], ["head:1", "b:3"]),  # tasks that report through files
    ],
)
def test_the_address_is_one_that_other_nodes_reach(addresses, expected):
    reports = [report(0, "head" if "" in addresses else "a", 1), report(1, "b", 3)]
    starts = data_starts(reports, addresses, "head", "")
    assert list(starts[0].servers[0]) == expected


def test_without_data_or_a_server_on_the_node_there_is_nothing_to_start():
    assert data_starts([report(0, "a"), report(1, "b")], ["", ""], "a", "") == [None, None]
    starts = data_starts([report(0, "a", 1), report(1, "b")], ["", ""], "a", "")
    assert starts[1] is None


def test_messages_carry_it():
    start = data_starts(TWO_NODES, [""] * 4, "a", "secret")[0]
    info = StartInfo(address="a", port=1, share_index=0, share_count=1, data=start)
    notice = Notice(run="r", phase=JobPhase.RUNNING, start=info)
    assert parse_notice(notice.to_line()) == notice
    assert parse_report(TWO_NODES[0].to_line()) == TWO_NODES[0]
    without = dataclasses.replace(notice, start=dataclasses.replace(info, data=None))
    assert parse_notice(without.to_line()) == without
