"""Requests of programs for bytes of shards: from the node, peers, or the source, in this order."""

import contextlib
import dataclasses
import hashlib

import numpy as np
import pytest

from paceline import store
from paceline.core.clock import ManualClock
from paceline.native import RangeRequests, ServedCount, served_counts
from paceline.store.serve.card import NodeAddress
from paceline.store.serve.node import NodeOptions
from paceline.store.serve.requests import (
    RangeRequest,
    RequestOutcome,
    RequestService,
    SharingNode,
)
from paceline.studies.server_processes import free_ports

LOOPBACK = NodeAddress(host="127.0.0.1", port=0)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("requests")
    random = np.random.default_rng(3)
    samples = [(f"{number:03}", random.bytes(20_000)) for number in range(60)]
    store.pack(
        store.Samples(samples), folder / "pack", options=store.PackOptions(shard_bytes=100_000)
    )
    with store.open_pack(folder / "pack") as opened:
        yield opened


@contextlib.contextmanager
def two_nodes(pack, folder, *, listen=(LOOPBACK, LOOPBACK), **options):
    """Yield two nodes, whose beats are made by hand, and the requests of the first one."""
    memory = [RangeRequests.create(pack.shard_count, 4, 1 << 16, f"node{k}") for k in range(2)]
    nodes = []
    for number in range(2):
        peers = tuple(NodeAddress.parse(node.name) for node in nodes)
        made = NodeOptions(
            listen=listen[number], peers=peers, local=folder / f"{number}", wait_s=60, **options
        )
        nodes.append(SharingNode(pack.path, made, memory[number]))
    nodes[0].join([nodes[1].name])
    try:
        yield nodes, memory[0]
    finally:
        for node in nodes:
            node.close()


def settle(nodes, pack):
    for _ in range(200):
        for node in nodes:
            node.beat()
            node.finish_copies()
        if sum(len(node.members.held) for node in nodes) == pack.shard_count:
            return
    raise AssertionError("the nodes do not get their shards")


def counted(memory):
    counts = served_counts(memory)
    return counts[ServedCount.PEER_BYTES], counts[ServedCount.REQUEST_SOURCE_BYTES]


def ask(service, pack, shard, attempt=0):
    out = np.zeros(1000, np.uint8)
    request = RangeRequest(slot=0, shard=shard, offset=100, length=1000, attempt=attempt)
    outcome = service.answer(request, out)
    body = pack.index.shard_path(shard).read_bytes()[100:1100]
    return outcome, hashlib.sha256(out).digest() == hashlib.sha256(body).digest()


def test_bytes_come_from_the_node_its_peer_or_the_source(pack, tmp_path):
    with two_nodes(pack, tmp_path) as (nodes, memory):
        settle(nodes, pack)
        service = RequestService(nodes[0], memory, stage_wait_s=0.0)
        here, there = (min(node.members.held) for node in nodes)
        assert [memory.is_held(shard) for shard in (here, there)] == [True, False]
        assert ask(service, pack, here)[0] == RequestOutcome.HERE
        assert ask(service, pack, there) == (RequestOutcome.GOOD, True)
        assert counted(memory) == (1000, 0)
        for shard in (here, there):  # damaged where it was asked for first
            assert ask(service, pack, shard, attempt=1) == (RequestOutcome.GOOD, True)
        assert counted(memory) == (1000, 2000)
        assert ask(service, pack, there, attempt=2)[0] == RequestOutcome.NOBODY
        nodes[1].close()
        assert ask(service, pack, there) == (RequestOutcome.GOOD, True)
        assert counted(memory) == (1000, 3000)


def test_a_shard_that_no_node_has_yet_is_copied_first_by_its_owner(pack, tmp_path):
    with two_nodes(pack, tmp_path) as (nodes, memory):
        service = RequestService(nodes[0], memory, stage_wait_s=0.0)
        theirs = [
            shard
            for shard in range(pack.shard_count)
            if nodes[0].members.placement.owners_of(shard)[0] == nodes[1].name
        ]
        wanted = theirs[-1]
        assert ask(service, pack, wanted) == (RequestOutcome.GOOD, True)  # of the source: no wait
        assert counted(memory) == (0, 1000)
        nodes[1].members.add(nodes[0].name)
        nodes[1].beat()  # takes note of what was asked for
        nodes[1].beat()
        nodes[1].finish_copies()
        assert wanted in nodes[1].members.held
        assert ask(service, pack, wanted) == (RequestOutcome.GOOD, True)
        assert counted(memory) == (1000, 1000)


def test_a_server_that_takes_over_goes_on_counting(pack, tmp_path):
    """What a killed server had counted is in the memory of requests: nothing of it is lost."""
    with two_nodes(pack, tmp_path) as (nodes, memory):
        settle(nodes, pack)
        staged = served_counts(memory)[ServedCount.STAGED_SOURCE_BYTES]
        lengths = pack.index.shard_lengths
        assert staged == sum(int(lengths[shard]) for shard in nodes[0].members.held) > 0
        (there,) = list(nodes[1].members.held)[:1]
        for count in (1, 2):
            service = RequestService(nodes[0], memory, stage_wait_s=0.0)
            service.start()
            assert ask(service, pack, there) == (RequestOutcome.GOOD, True)
            service.close()
            counts = served_counts(memory)
            assert counts[ServedCount.PEER_BYTES] == 1000 * count
            assert counts[ServedCount.SERVER_STARTS] == count
            assert counts[ServedCount.STAGED_SOURCE_BYTES] == staged


def test_nobody_waits_again_for_a_node_that_was_waited_for_in_vain(pack, tmp_path):
    """Its first shard is waited for; the others are read from the source until it is back."""
    (port,) = free_ports(1)
    place = NodeAddress(host="127.0.0.1", port=port)
    with two_nodes(pack, tmp_path, listen=(LOOPBACK, place)) as (nodes, memory):
        settle(nodes, pack)
        clock = ManualClock()
        service = RequestService(nodes[0], memory, stage_wait_s=10.0, clock=clock)
        first, second, third = sorted(nodes[1].members.held)[:3]
        nodes[1].close()
        assert ask(service, pack, first) == (RequestOutcome.GOOD, True)
        assert clock.now_s() >= 10.0
        waited_s = clock.now_s()
        for shard in (second, third):
            assert ask(service, pack, shard) == (RequestOutcome.GOOD, True)
        clock.advance(6.0)  # it is asked again, and still not waited for
        assert ask(service, pack, third) == (RequestOutcome.GOOD, True)
        assert clock.now_s() == waited_s + 6.0
        assert counted(memory) == (0, 4000)
        again = dataclasses.replace(nodes[1].options, peers=())
        nodes[1] = SharingNode(pack.path, again, RangeRequests.create(pack.shard_count, 4, 1, "b"))
        assert ask(service, pack, second) == (RequestOutcome.GOOD, True)  # it was just asked
        assert counted(memory) == (0, 5000)
        clock.advance(6.0)
        assert ask(service, pack, second) == (RequestOutcome.GOOD, True)
        assert ask(service, pack, third) == (RequestOutcome.GOOD, True)
        assert counted(memory) == (2000, 5000)


def test_programs_hear_of_a_copy_only_when_they_can_see_it(pack, tmp_path):
    """A shard may be here a moment before the memory says so: the program would look in vain."""
    with two_nodes(pack, tmp_path) as (nodes, memory):
        settle(nodes, pack)
        service = RequestService(nodes[0], memory, stage_wait_s=0.0)
        here = min(nodes[0].members.held)
        memory.set_held(here, is_held=False)
        assert ask(service, pack, here) == (RequestOutcome.GOOD, True)  # of the source: no wait
        memory.set_held(here, is_held=True)
        assert ask(service, pack, here)[0] == RequestOutcome.HERE


def test_the_counts_have_names_in_the_order_of_the_core(pack):
    memory = RangeRequests.create(pack.shard_count, 4, 1 << 16, "node")
    for what in ServedCount:
        memory.count(what, what + 1)
    memory.raise_to(ServedCount.PEAK_QUEUE, 50)
    memory.raise_to(ServedCount.PEAK_QUEUE, 40)
    counts = {what: what + 1 for what in ServedCount} | {ServedCount.PEAK_QUEUE: 50}
    assert served_counts(memory) == counts
    with pytest.raises(IndexError):
        memory.count(len(ServedCount), 1)
