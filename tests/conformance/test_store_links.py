"""Both transports bring the same bytes, and say the same when they cannot."""

import os
import socket

import numpy as np
import pytest

from paceline import store
from paceline.core.errors import DeadlineExceeded, RankLost, UsageError
from paceline.native import ExtentPlan, PeerServer
from paceline.store.serve.card import NodeAddress, NodeCard, digest
from paceline.store.serve.links import (
    DAMAGED,
    GOOD,
    MISSING,
    NOT_HELD,
    LocalNode,
    LocalNodeLink,
    TcpNodeLink,
    encryption,
)

COUNT = 60
WAIT_S = 30.0
TOKEN = "correct horse battery staple"


@pytest.fixture(scope="module", params=["none", "zstd"])
def pack(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("links")
    random = np.random.default_rng(5)
    (folder / "source").mkdir()
    for k in range(COUNT):  # compressible, of many lengths, one of them empty
        body = random.integers(0, 4, k * k * 20, np.uint8).tobytes()
        (folder / "source" / f"{k:03d}").write_bytes(body)
    options = store.PackOptions(codec=request.param, shard_bytes=60_000)
    store.pack(store.Folder(folder / "source"), folder / "pack", options=options)
    with store.open_pack(folder / "pack") as opened:
        assert opened.shard_count > 3
        yield opened


class LinkTests:
    """What each transport must do; `served` changes or takes away what the node holds."""

    def served(self, pack, left_out=(), damaged=()):
        content = {}
        for shard in range(pack.shard_count):
            body = bytearray(pack.index.shard_path(shard).read_bytes())
            if shard in damaged:
                body[64:] = bytes(255 - byte for byte in body[64:])
            if shard not in left_out:
                content[shard] = bytes(body)
        return content

    @pytest.fixture
    def link_to(self, pack, tmp_path):
        raise NotImplementedError

    def test_any_batch_arrives_as_the_pack_reads_it(self, pack, link_to):
        link = link_to(self.served(pack))
        for ids in ([0], [7], [COUNT - 1, 0, 5, 5], list(range(COUNT)), []):
            plan = ExtentPlan(pack.native_reader, np.array(ids, np.int64))
            out = np.full(plan.size, 255, np.uint8)
            items = np.arange(len(plan.shards))
            assert (link.fetch(plan, items, out, WAIT_S) == GOOD).all()
            wanted, offsets = pack.read_batch(ids)
            assert out.tobytes() == wanted.tobytes()
            assert (plan.offsets == offsets).all()

    def test_only_what_is_asked_for_is_written(self, pack, link_to):
        link = link_to(self.served(pack))
        plan = ExtentPlan(pack.native_reader, np.array([20, 21], np.int64))
        out = np.zeros(plan.size, np.uint8)
        assert link.fetch(plan, np.array([1]), out, WAIT_S).tolist() == [MISSING, GOOD]
        assert not out[: plan.offsets[1]].any()
        assert out[plan.offsets[1] :].tobytes() == pack.read(21)

    def test_shards_that_are_not_held_or_damaged_are_named(self, pack, link_to):
        link = link_to(self.served(pack, left_out={0}, damaged={1}))
        plan = ExtentPlan(pack.native_reader, np.arange(1, COUNT))  # the first is empty
        out = np.empty(plan.size, np.uint8)
        outcomes = link.fetch(plan, np.arange(len(plan.shards)), out, WAIT_S)
        assert set(outcomes[plan.shards == 0]) == {NOT_HELD}
        assert set(outcomes[plan.shards == 1]) == {DAMAGED}
        assert set(outcomes[plan.shards > 1]) == {GOOD}
        assert link.card(WAIT_S).held == tuple(range(1, pack.shard_count))  # still connected

    def test_ranges_of_shards_come_unchecked(self, pack, link_to):
        link = link_to(self.served(pack, left_out={0}))
        out = np.empty(1000, np.uint8)
        assert link.fetch_range(1, 100, out, WAIT_S) == GOOD
        assert out.tobytes() == pack.index.shard_path(1).read_bytes()[100:1100]
        assert link.fetch_range(0, 0, out, WAIT_S) == NOT_HELD
        with pytest.raises(RankLost, match="beyond the end"):
            link.fetch_range(1, 1 << 40, out, WAIT_S)

    def test_no_time_is_a_deadline_that_names_the_node(self, pack, link_to):
        link = link_to(self.served(pack))
        plan = ExtentPlan(pack.native_reader, np.array([3], np.int64))
        with pytest.raises(DeadlineExceeded, match=link.name):
            link.fetch(plan, np.array([0]), np.empty(plan.size, np.uint8), 0.0)


class TestLocalNodeLink(LinkTests):
    @pytest.fixture
    def link_to(self):
        return lambda content: LocalNodeLink(LocalNode("node", content))


def serve(content, folder, pack, token="", tls=None):
    server = PeerServer("127.0.0.1", 0, digest(token), digest(pack.identity), tls=tls)
    for shard, body in content.items():
        path = folder / f"served-{shard}"
        path.write_bytes(body)
        server.hold(shard, os.fsencode(path))
    card = NodeCard(node="node", host="", folder="", held=tuple(sorted(content)))
    server.set_card(card.to_bytes())
    return server


class TestTcpNodeLink(LinkTests):
    tls = None

    @pytest.fixture
    def link_to(self, pack, tmp_path):
        servers, links = [], []

        def make(content):
            servers.append(serve(content, tmp_path, pack, TOKEN, self.tls))
            address = NodeAddress(host="127.0.0.1", port=servers[-1].port)
            links.append(TcpNodeLink(address, pack.identity, TOKEN, self.tls))
            return links[-1]

        yield make
        for closed in links:
            closed.close()
        for stopped in servers:
            stopped.stop()

    def test_a_wrong_token_or_pack_is_refused(self, pack, tmp_path):
        server = serve({}, tmp_path, pack, token="secret")
        address = NodeAddress(host="127.0.0.1", port=server.port)
        with pytest.raises(UsageError, match="refused the token"):
            TcpNodeLink(address, pack.identity, "guess").card(WAIT_S)
        with pytest.raises(UsageError, match="another pack"):
            TcpNodeLink(address, "0" * 32, "secret").card(WAIT_S)
        assert TcpNodeLink(address, pack.identity, "secret").card(WAIT_S).node == "node"
        assert server.stats().refused_connections == 2
        server.stop()

    def test_a_node_that_never_answers_is_a_deadline(self, pack):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = NodeAddress(host="127.0.0.1", port=silent.getsockname()[1])
            with pytest.raises(DeadlineExceeded, match=str(address)):
                TcpNodeLink(address, pack.identity, "").card(0.05)

    def test_a_node_that_was_started_again_is_found_by_kept_connections(self, pack, tmp_path):
        server = serve(self.served(pack), tmp_path, pack)
        address = NodeAddress(host="127.0.0.1", port=server.port)
        link = TcpNodeLink(address, pack.identity, "")
        link.card(WAIT_S)
        server.stop()
        with pytest.raises(RankLost, match=str(address)):
            link.card(WAIT_S)
        again = PeerServer("127.0.0.1", address.port, digest(""), digest(pack.identity))
        again.set_card(NodeCard(node="again", host="", folder="", held=()).to_bytes())
        assert link.card(WAIT_S).node == "again"
        again.stop()


class TestTlsNodeLink(TestTcpNodeLink):
    tls = encryption(TOKEN)


def test_a_server_notes_what_it_missed_and_who_asked(pack, tmp_path):
    server = serve({0: pack.index.shard_path(0).read_bytes()}, tmp_path, pack)
    link = TcpNodeLink(NodeAddress(host="127.0.0.1", port=server.port), pack.identity, "")
    byte = np.empty(1, np.uint8)
    assert [link.fetch_range(shard, 0, byte, WAIT_S) for shard in (0, 2, 3, 2)] == [
        GOOD,
        NOT_HELD,
        NOT_HELD,
        NOT_HELD,
    ]
    link.card(WAIT_S, "10.0.0.1:7420")
    link.card(WAIT_S)
    assert sorted(server.take_missed()) == [2, 3]
    assert server.take_callers() == [b"10.0.0.1:7420"]
    link.card(WAIT_S, damaged=0)
    link.card(WAIT_S, damaged=7)
    assert sorted(server.take_damaged()) == [0, 7]
    assert server.take_damaged() == []
    assert (server.take_missed(), server.take_callers()) == ([], [])
    with pytest.raises(RankLost, match="too long"):
        link.card(WAIT_S, "x" * 257)
    server.stop()
