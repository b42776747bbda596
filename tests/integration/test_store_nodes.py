"""Packs read from nodes: the same bytes as from the folder, whatever happens to a node."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from paceline import store
from paceline.core.errors import CorruptPack, DeadlineExceeded, RankLost, UsageError
from paceline.store.serve.card import NodeAddress
from paceline.store.serve.links import LocalNode, LocalNodeLink, tcp_connector
from paceline.store.serve.node import NodeOptions, StoreNode
from paceline.store.serve.remote_pack import RemotePack, open_remote

COUNT = 120
LOOPBACK = NodeAddress(host="127.0.0.1", port=0)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    random = np.random.default_rng(3)
    for k in range(COUNT):
        (folder / "source" / f"class{k % 3}").mkdir(parents=True, exist_ok=True)
        body = random.bytes(int(random.integers(0, 40_000)))
        (folder / "source" / f"class{k % 3}" / f"{k:03d}").write_bytes(body)
    options = store.PackOptions(shard_bytes=300_000)
    store.pack(store.Folder(folder / "source"), folder / "pack", options=options)
    with store.open_pack(folder / "pack") as opened:
        assert opened.shard_count > 4
        yield opened


def local_nodes(pack, count):
    shards = [pack.index.shard_path(shard).read_bytes() for shard in range(pack.shard_count)]
    return [LocalNode(f"node{k}", dict(enumerate(shards))) for k in range(count)]


def assert_equal(pack, remote):
    order = np.random.default_rng(1).permutation(COUNT)
    wanted, offsets = pack.read_batch(order)
    found, places = remote.read_batch(order)
    assert found.tobytes() == wanted.tobytes()
    assert (places == offsets).all()
    assert remote.read(7) == pack.read(7)
    assert [bytes(view) for view in remote.views([3, 9])] == [pack.read(3), pack.read(9)]


def test_over_tcp_a_pack_reads_as_from_its_folder(pack):
    with StoreNode(pack.path, NodeOptions(listen=LOOPBACK)) as node:
        sent = []
        for maps_files in (False, True):  # of a node on the same host: then nothing is sent
            with open_remote(pack.path, [node.name], maps_files=maps_files) as remote:
                assert len(remote) == COUNT
                assert remote.identity == pack.identity
                assert remote.find(pack.names[5]) == 5
                assert_equal(pack, remote)
                with pytest.raises(IndexError):
                    remote.read(COUNT)
            sent.append(node.stats().bytes)
        assert sent[1] == sent[0] > 0


def test_a_loader_reads_through_nodes(pack):
    def epoch(data):
        loader = store.Loader(data, 8, rank=0, world_size=1)
        return [(bytes(batch.buffer.numpy()), labels.tolist()) for batch, labels in loader]

    with (
        StoreNode(pack.path, NodeOptions(listen=LOOPBACK)) as node,
        open_remote(pack.path, [node.name], maps_files=False) as remote,
    ):
        assert epoch(remote) == epoch(pack)
        assert node.stats().bytes > 0


def test_threads_share_a_remote_pack(pack):
    problems = []
    with (
        StoreNode(pack.path, NodeOptions(listen=LOOPBACK)) as node,
        open_remote(pack.path, [node.name], maps_files=False) as remote,
    ):

        def read(seed):
            try:
                for sample in np.random.default_rng(seed).integers(0, COUNT, 50).tolist():
                    assert remote.read(sample) == pack.read(sample)
            except Exception as problem:  # noqa: BLE001  # any is a failure
                problems.append(problem)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert problems == []


def test_a_forked_child_reads_on_connections_of_its_own(pack):
    with (
        StoreNode(pack.path, NodeOptions(listen=LOOPBACK)) as node,
        open_remote(pack.path, [node.name], maps_files=False) as remote,
    ):
        remote.read(0)
        child = os.fork()
        if child == 0:
            same = all(remote.read(k) == pack.read(k) for k in range(20))
            os._exit(0 if same else 1)
        assert all(remote.read(k) == pack.read(k) for k in range(20))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_replicas_serve_what_a_lost_node_held(pack, caplog):
    nodes = local_nodes(pack, 3)
    with RemotePack(pack.path, [LocalNodeLink(node) for node in nodes], replicas=2) as remote:
        assert_equal(pack, remote)
        nodes[1].is_down = True
        with caplog.at_level(logging.WARNING):
            assert_equal(pack, remote)
        assert sum("node1" in record.getMessage() for record in caplog.records) == 1
        nodes[0].is_down = True
        assert_equal(pack, remote)
        nodes[2].is_down = True
        with pytest.raises(RankLost, match="cannot be read") as caught:
            remote.read_batch(range(COUNT))
        assert "shard-0" in caught.value.where
        assert "node2: it was stopped" in caught.value.why


def test_a_shard_that_moved_to_a_node_which_joined_is_found_there(pack):
    first, second = local_nodes(pack, 2)
    links = {node.name: LocalNodeLink(node) for node in (first, second)}
    with RemotePack(pack.path, [links["node0"]], connect=links.__getitem__) as remote:
        assert_equal(pack, remote)  # and knows one node only
        first.peers = ("node1",)
        first.shards.clear()
        assert_equal(pack, remote)


class BusyNodeLink(LocalNodeLink):
    """A node that needs longer for its card than a reader usually waits."""

    is_busy = False

    def card(self, wait_s, caller=""):
        if self.is_busy and wait_s < 10:
            raise DeadlineExceeded("it did not answer", where=self.name)
        return super().card(wait_s, caller)


def test_without_a_source_a_reader_waits_for_a_busy_node_that_has_joined(pack):
    first, second = local_nodes(pack, 2)
    links = {node.name: BusyNodeLink(node) for node in (first, second)}
    with RemotePack(pack.path, [links["node0"]], connect=links.__getitem__) as remote:
        assert_equal(pack, remote)
        first.peers = ("node1",)
        first.shards.clear()
        for link in links.values():
            link.is_busy = True
        assert_equal(pack, remote)


def test_a_node_ends_when_what_follows_its_peers_fails(pack, tmp_path):
    with StoreNode(pack.path, NodeOptions(listen=LOOPBACK, local=tmp_path)) as node:
        node.beat = lambda: 1 // 0
        node.start()
        with pytest.raises(ZeroDivisionError):
            node.wait(60)


def test_the_source_is_the_last_resort(pack):
    nodes = local_nodes(pack, 2)
    nodes[0].shards.pop(0)
    nodes[1].shards.pop(0)
    links = [LocalNodeLink(node) for node in nodes]
    with RemotePack(pack.path, links, source=pack.path) as remote:
        assert_equal(pack, remote)
        nodes[0].is_down = nodes[1].is_down = True
        assert_equal(pack, remote)


def test_damaged_bytes_never_arrive(pack):
    nodes = local_nodes(pack, 2)
    damaged = bytearray(nodes[0].shards[1])
    damaged[200:] = bytes(255 - byte for byte in damaged[200:])
    nodes[0].shards[1] = bytes(damaged)
    links = [LocalNodeLink(node) for node in nodes]
    with RemotePack(pack.path, links, replicas=2) as remote:
        assert_equal(pack, remote)
    nodes[1].shards[1] = bytes(damaged)
    with (
        RemotePack(pack.path, links, replicas=2) as remote,
        pytest.raises(CorruptPack, match=r"shard-00001\.pace"),
    ):
        remote.read_batch(range(COUNT))


def test_nodes_stage_their_shares_and_copy_again_after_a_loss(pack, tmp_path):
    """Beats by hand, so that nothing waits for a clock."""
    nodes = []
    for k in range(3):
        peers = tuple(NodeAddress.parse(node.name) for node in nodes)
        options = NodeOptions(
            listen=LOOPBACK, peers=peers, local=tmp_path / f"{k}", replicas=2, grace_s=0.0
        )
        nodes.append(StoreNode(pack.path, options))
    by_name = {node.name: node for node in nodes}
    for node in nodes:  # the later ones are known to the earlier ones only now
        node.join([other for other in by_name if other != node.name])

    def settle(alive):
        for _ in range(200):
            for node in alive:
                node.beat()
                node.finish_copies()
            held = [len([n for n in alive if s in n.members.held]) for s in range(pack.shard_count)]
            if held == [2] * pack.shard_count:
                return
        raise AssertionError(f"copies of each shard: {held}")

    settle(nodes)
    assert sum(node.source_bytes for node in nodes) == sum(pack.index.shard_lengths.tolist())
    names = list(by_name)
    with open_remote(pack.path, names, replicas=2, maps_files=False) as remote:
        assert_equal(pack, remote)
        nodes[0].close()
        assert_equal(pack, remote)
        settle(nodes[1:])
        assert_equal(pack, remote)
    for node in nodes[1:]:
        node.close()


def start_server(pack, *arguments):
    command = [sys.executable, "-m", "paceline", "store", "serve", str(pack.path), "--json"]
    server = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    return server, json.loads(server.stdout.readline())["node"]


def test_a_server_killed_while_it_is_read_costs_no_sample(pack):
    servers = [start_server(pack) for _ in range(2)]
    names = [name for _, name in servers]
    order = np.random.default_rng(2).integers(0, COUNT, 4000)
    try:
        with open_remote(pack.path, names, replicas=2, maps_files=False, wait_s=60) as remote:
            started, killed = threading.Event(), threading.Event()
            wrong, results = [], []

            def read():
                after = 0  # batches since the server was killed
                for begin in range(0, 1 << 30, 16):
                    at = begin % (len(order) - 16)
                    ids = order[at : at + 16]
                    body = remote.read_batch(ids)[0].tobytes()
                    if body != pack.read_batch(ids)[0].tobytes():
                        wrong.append(ids)
                    if begin == 20 * 16:
                        started.set()
                    after += killed.is_set()
                    if after == 20:
                        results.append("done")
                        return

            reader = threading.Thread(target=read)
            reader.start()
            assert started.wait(60)
            servers[0][0].send_signal(signal.SIGKILL)
            servers[0][0].wait(60)
            killed.set()
            reader.join(120)
            assert results == ["done"]
            assert wrong == []
    finally:
        for server, _ in servers:
            server.kill()
            server.wait(60)
            server.stdout.close()


def test_a_node_copies_again_what_a_reader_got_damaged(pack, tmp_path, caplog):
    """Its disk has changed a shard since it was copied, and it serves it still."""
    options = NodeOptions(listen=LOOPBACK, local=tmp_path / "local")
    with StoreNode(pack.path, options) as node:
        end_s = time.monotonic() + 60
        while node.members.held != set(range(pack.shard_count)):
            assert time.monotonic() < end_s
            node.beat()
            node.finish_copies()
        path = node.shards.path(0)
        right = path.read_bytes()
        path.write_bytes(right[:200] + bytes(255 - byte for byte in right[200:]))
        sample = next(k for k in range(len(pack)) if pack.extents(k)[0].shard == 0)
        with open_remote(pack.path, [node.name], source=pack.path, maps_files=False) as remote:
            assert remote.read(sample) == pack.read(sample)  # from the source
            remote.read(sample)
            while not path.exists() or path.read_bytes() != right:
                assert time.monotonic() < end_s
                node.beat()
                node.finish_copies()
        assert "shard 0" in caplog.text
        assert "it is copied again" in caplog.text
        link = tcp_connector(pack.identity, "")(node.name)
        link.card(60, damaged=1)  # who says so of a shard that is right changes nothing
        link.close()
        while "here it is right" not in caplog.text:
            assert time.monotonic() < end_s
            node.beat()
        assert node.members.held == set(range(pack.shard_count))


def test_a_node_without_a_token_has_its_users(pack, monkeypatch, tmp_path):
    with StoreNode(pack.path, NodeOptions(listen=LOOPBACK)) as node:
        with open_remote(pack.path, [node.name], maps_files=False) as remote:
            assert remote.read(0) == pack.read(0)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # as another user would have it
        with pytest.raises(UsageError, match="refused this client"):
            tcp_connector(pack.identity, "")(node.name).card(60)


def test_what_is_no_address_is_named(pack):
    with pytest.raises(UsageError, match="not an address"):
        open_remote(pack.path, ["nonsense"])
