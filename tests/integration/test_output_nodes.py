"""Servers of an output on two nodes: what they answer to each other, and to strangers."""

import contextlib
import errno
import socket
import struct
import threading

import pytest

from paceline.core.errors import RankLost
from paceline.store.serve.card import NodeAddress
from paceline.store.serve.drain import ROOM, Drain, DrainRoom
from paceline.store.serve.output_node import OutputNode, leader_of
from paceline.store.serve.output_wire import OutputLink

TOKEN = "secret"


@pytest.fixture
def nodes(tmp_path):
    """Return the addresses of two servers with trees of their own, and the trees."""
    target = tmp_path / "shared"
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [
        NodeAddress(host="127.0.0.1", port=listener.getsockname()[1]) for listener in listeners
    ]
    servers, trees = [], []
    for number, listener in enumerate(listeners):
        folder = tmp_path / str(number)
        folder.mkdir()
        Drain(folder, target, DrainRoom(folder / ROOM, 0)).begin()
        servers.append(OutputNode(folder, target, addresses, number, TOKEN, listener))
        trees.append(folder / "tree")
    leader = leader_of(str(target), 2)
    yield addresses[leader], [trees[leader], trees[1 - leader]], leader
    for server, listener in zip(servers, listeners, strict=True):
        server.close()
        listener.close()


def change(leader, kind, path, **more):
    return {"do": "change", "node": leader, "kind": kind, "path": path, **more}


def test_changes_are_made_on_both_nodes_or_on_none(nodes):
    address, trees, leader = nodes
    link = OutputLink(address, TOKEN)

    def ask(kind, path, **more):
        return link.call(change(leader, kind, path, **more), 10.0)["error"]

    assert ask("mkdir", "a", mode=0o755) == 0
    assert ask("mkdir", "a", mode=0o755) == errno.EEXIST
    assert ask("mkdir", "b/c", mode=0o755) == errno.ENOENT
    assert ask("rename", "a", to="b") == 0
    assert all([path.name for path in tree.iterdir()] == ["b"] for tree in trees)
    assert ask("rmdir", "b") == 0
    assert ask("rmdir", "b") == errno.ENOENT
    assert ask("unlink", "b") == errno.ENOENT
    assert all(list(tree.iterdir()) == [] for tree in trees)
    link.close()


def test_a_stranger_is_not_answered(nodes):
    address, trees, leader = nodes
    stranger = OutputLink(address, "guessed")
    with pytest.raises(RankLost):
        stranger.call(change(leader, "mkdir", "a", mode=0o755), 10.0)
    assert list(trees[0].iterdir()) == []


def test_connections_that_wait_cost_no_thread_each(nodes):
    address, _, leader = nodes
    links = [OutputLink(address, TOKEN) for _ in range(300)]
    before = threading.active_count()
    for link in links:
        assert link.call({"do": "written"}, 60.0) == {"paths": []}  # and keeps its connection
    assert threading.active_count() - before < 50
    for number in (299, 150, 0):
        message = change(leader, "mkdir", f"folder{number}", mode=0o755)
        assert links[number].call(message, 60.0)["error"] == 0
    for link in links:
        link.close()


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "a\0b"])
def test_no_path_leads_out_of_the_output(nodes, tmp_path, path):
    address, _, leader = nodes
    link = OutputLink(address, TOKEN)
    for message in (
        change(leader, "mkdir", path, mode=0o755),
        change(leader, "rename", "x", to=path),
        {"do": "read", "path": path, "identity": "1-1", "size": 1},
        {"do": "apply", "kind": "publish", "path": "x", "identity": path, "node": 9},
    ):
        with pytest.raises(RankLost):  # it ends the connection
            link.call(message, 10.0)
    assert not (tmp_path / "out").exists()


def test_malformed_frames_end_their_connection_alone(nodes):
    address, _, leader = nodes
    frames = [
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 3) + b"{}}",
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 2) + b"{}",
        struct.pack("<I", 5000) + b"[" * 5000,
        struct.pack("<I", 10) + b"short",
    ]
    for frame in frames:
        link = OutputLink(address, TOKEN)
        connection = link._connect(10.0)
        connection.sendall(frame)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
        connection.close()
    with contextlib.closing(OutputLink(address, TOKEN)) as link:
        assert link.call(change(leader, "mkdir", "a", mode=0o755), 10.0) == {"error": 0}
