"""Servers as processes: staging, joining, losing all of them; what a client then reads, and how."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support.command_line import without_torch

from paceline import store
from paceline.core.errors import RankLost, StorageError, UsageError
from paceline.store import open_pack
from paceline.store.serve import local_shards
from paceline.store.serve.card import NodeAddress
from paceline.store.serve.links import LocalNode, LocalNodeLink
from paceline.store.serve.local_shards import LocalShards
from paceline.store.serve.node import NodeOptions, StoreNode
from paceline.store.serve.remote_pack import RemotePack, open_remote
from paceline.studies.server_processes import ServerProcesses
from paceline.studies.torture_cluster import ClusterOptions, torture_cluster

COUNT = 160
SHARD_BYTES = 120_000
LOOPBACK = NodeAddress(host="127.0.0.1", port=0)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    random = np.random.default_rng(7)
    for k in range(COUNT):
        place = folder / "source" / ("val" if k % 8 == 0 else f"train{k % 2}")
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{k:03d}").write_bytes(random.bytes(int(random.integers(1, 20_000))))
    options = store.PackOptions(shard_bytes=SHARD_BYTES)
    store.pack(store.Folder(folder / "source"), folder / "pack", options=options)
    (folder / "index").mkdir()
    shutil.copy(folder / "pack" / "index.pace", folder / "index")
    with store.open_pack(folder / "pack") as opened:
        assert opened.shard_count > 8
        yield opened


@pytest.fixture
def servers(pack, tmp_path):
    """Four nodes that stage the pack, two copies of each shard."""
    with ServerProcesses(pack=pack.path, folder=tmp_path, nodes=4, replicas=2) as running:
        yield running


def index_of(pack):
    return pack.path.parent / "index"


def assert_equal(pack, remote, seed=1):
    order = np.random.default_rng(seed).permutation(COUNT)
    wanted, offsets = pack.read_batch(order)
    found, places = remote.read_batch(order)
    assert found.tobytes() == wanted.tobytes()
    assert (places == offsets).all()


def source_bytes(servers):
    return sum(card.load.source_bytes for card in servers.cards())


def test_the_source_is_read_once_while_a_client_reads_already(pack, servers):
    """The client waits for shards that are not staged yet, and asks for them to be staged first."""
    with open_remote(
        index_of(pack), servers.names, replicas=2, source=pack.path, stage_wait_s=100.0
    ) as remote:
        for seed in range(4):
            assert_equal(pack, remote, seed)
        assert remote.tier_bytes.source == 0
        assert remote.tier_bytes.mapped > 0
    servers.wait_until(servers.is_whole, "all shards are staged")
    assert source_bytes(servers) == servers.shard_bytes
    loads = [card.load for card in servers.cards()]
    assert sum(load.peer_bytes for load in loads) == servers.shard_bytes  # the second copies
    assert all(load.waiting_shards == load.failed_copies == 0 for load in loads)
    with open_remote(index_of(pack), servers.names[:1], replicas=2) as remote:
        assert_equal(pack, remote)  # one node names the others; each holds a part, and is mapped
        assert remote.tier_bytes.nodes == 0
        assert remote.tier_bytes.mapped > 0

    status_of = ("store", "status", str(index_of(pack)), "--nodes")
    run = without_torch(*status_of, servers.names[2], "--json", text=True)
    status = json.loads(run.stdout)
    assert run.returncode == 0
    assert status["unheld"] == 0
    assert [node["node"] for node in status["nodes"]] == sorted(servers.names)
    assert sum(node["card"]["load"]["source_bytes"] for node in status["nodes"]) == (
        servers.shard_bytes
    )
    servers.kill(0)
    run = without_torch(*status_of, ",".join(servers.names), text=True)
    assert run.returncode == RankLost.exit_code
    said = " ".join(run.stdout.split())
    assert f"{servers.names[0]} connecting to it: Connection refused" in said


def test_a_node_that_joins_takes_its_share_and_its_readers_hear_of_it(pack, servers):
    servers.wait_until(servers.is_whole, "all shards are staged")
    with open_remote(index_of(pack), servers.names[:1], replicas=2, maps_files=False) as remote:
        assert_equal(pack, remote)
        joined = servers.add()
        servers.start(joined, peers=servers.names[:1])

        def has_its_share():
            card = servers.card(joined)
            return card is not None and len(card.held) > 0 and servers.is_whole()

        servers.wait_until(has_its_share, "the new node holds its share")
        assert source_bytes(servers) == servers.shard_bytes  # it came from peers

        assert_equal(pack, remote)
        card = servers.card(joined)
        assert set(card.peers) == set(servers.names[:joined])


def test_nothing_is_left_of_servers_that_were_all_killed(pack, tmp_path):
    shared_memory = Path("/dev/shm")  # where others, beside this test, keep files of theirs, too
    before = set(shared_memory.glob("*paceline*"))
    slow = ("--stage-rate", "1")  # after the first shard: still staging when they are killed
    with ServerProcesses(
        pack=pack.path, folder=tmp_path, nodes=3, replicas=1, arguments=slow
    ) as servers:
        servers.wait_until(
            lambda: all(card.held for card in servers.cards()) and len(servers.cards()) == 3,
            "each node holds something",
        )
        held = [servers.card(number).held for number in range(3)]
        for process in servers.processes.values():
            process.send_signal(signal.SIGKILL)
        for number in range(3):
            servers.kill(number)
        for number in range(3):
            names = {path.name for path in servers.local(number).iterdir()}
            shards = {f"shard-{shard:05d}.pace" for shard in held[number]}
            assert names - shards == {
                ".local-shards",
                "index.pace",
            }  # no partial file, whatever was written
        assert set(shared_memory.glob("*paceline*")) <= before
        with (
            open_remote(index_of(pack), servers.names) as remote,
            pytest.raises(RankLost, match="cannot be read") as caught,
        ):
            remote.read(3)
        assert all(name in caught.value.why for name in servers.names)
        with open_remote(index_of(pack), servers.names, source=pack.path) as remote:
            assert_equal(pack, remote)
        servers.start(1)
        servers.wait_until(lambda: servers.card(1) is not None, "it is back")
        assert set(held[1]) <= set(servers.card(1).held)


def test_killing_nodes_again_and_again_costs_no_read(tmp_path):
    report = torture_cluster(tmp_path, ClusterOptions(kills=5, seed=3))
    assert (report.failed, report.wrong, report.problems) == (0, 0, ())
    assert report.ok
    assert report.wiped == 1
    assert report.batches >= 5 * 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.campaign("faults")
def test_two_hundred_kills_cost_no_read(tmp_path):
    report = torture_cluster(tmp_path, ClusterOptions(kills=200))
    assert (report.failed, report.wrong, report.problems) == (0, 0, ())


def test_what_is_everywhere_is_on_all_nodes(pack, tmp_path):
    val = {pack.extents(sample)[0].shard for sample in range(COUNT) if "val/" in pack.names[sample]}
    nodes = []
    for number in range(3):
        options = NodeOptions(
            listen=LOOPBACK, local=tmp_path / f"{number}", everywhere=("val/*",), grace_s=0.0
        )
        nodes.append(StoreNode(pack.path, options))
    try:
        for node in nodes:
            node.join(other.name for other in nodes)
        for _ in range(40):
            for node in nodes:
                node.beat()
                node.finish_copies()
        for node in nodes:
            assert val <= node.members.held
            assert len(node.members.held) < pack.shard_count
        assert sum(node.source_bytes for node in nodes) == int(pack.index.shard_lengths.sum())
        with pytest.raises(UsageError, match="no sample's name matches"):
            StoreNode(pack.path, NodeOptions(listen=LOOPBACK, everywhere=("vall/*",)))
    finally:
        for node in nodes:
            node.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for one shard, not for two."""
    place = tmp_path / "disk"
    place.mkdir()
    size = f"size={SHARD_BYTES * 3 // 2 // 1024}k"
    command = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_of_a_node_leaves_the_rest_to_the_source(pack, small_disk, caplog):
    options = NodeOptions(listen=LOOPBACK, local=small_disk / "local")
    with StoreNode(pack.path, options) as node:
        for _ in range(3):
            node.beat()
            node.finish_copies()
        assert 0 < len(node.members.held) < pack.shard_count
        assert "local storage is full" in caplog.text
        with open_remote(index_of(pack), [node.name], source=pack.path) as remote:
            assert_equal(pack, remote)
            assert remote.tier_bytes.source > 0
            assert remote.tier_bytes.mapped > 0


@pytest.mark.parametrize("unnamed", [True, False])
def test_shards_in_local_storage_are_as_private_as_the_pack(pack, tmp_path, monkeypatch, unnamed):
    """They were readable by all users of the node."""
    private = tmp_path / "private.pack"
    shutil.copytree(pack.path, private)
    for path in private.iterdir():
        path.chmod(0o600)
    private.chmod(0o700)
    if not unnamed:  # as on file systems without O_TMPFILE
        monkeypatch.setattr(local_shards.os, "O_TMPFILE", os.O_DIRECTORY)
    with open_pack(private) as opened:
        shards = LocalShards(tmp_path / "local", opened)
        shards.open()
        shards.write(0, [opened.index.shard_path(0).read_bytes()], "a test")
        shards.close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "local").iterdir()}
    assert modes.pop(".local-shards") & 0o002 == 0
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "local").stat().st_mode & 0o777 == 0o700


def test_of_two_shards_that_are_written_at_once_one_has_the_room(pack, small_disk):
    """Each would fit alone; both together would end amid each, and none would be kept."""
    shards = LocalShards(small_disk / "local", pack)
    shards.open()

    def bytes_of(shard):
        content = pack.index.shard_path(shard).read_bytes()
        half = len(content) // 2
        yield content[:half]
        if shard == 0:
            with pytest.raises(StorageError, match="local storage is full") as caught:
                shards.write(1, bytes_of(1), "a test")
            assert f", {len(content) - half} of them for shards" in caught.value.why
        yield content[half:]

    shards.write(0, bytes_of(0), "a test")
    assert list(shards.present()) == [0]
    with pytest.raises(StorageError, match="local storage is full"):
        shards.write(1, bytes_of(1), "a test")
    shards.remove(0)
    shards.write(1, bytes_of(1), "a test")
    assert list(shards.present()) == [1]
    shards.close()


def remote_with_cache(pack, folder, capacity_bytes, **options):
    content = [pack.index.shard_path(shard).read_bytes() for shard in range(pack.shard_count)]
    link = LocalNodeLink(LocalNode("node", dict(enumerate(content))))
    return RemotePack(pack.path, [link], cache=folder, cache_bytes=capacity_bytes, **options)


def test_a_full_disk_of_a_cache_leaves_the_rest_to_the_nodes(pack, small_disk, caplog):
    with remote_with_cache(pack, small_disk / "cache", 1 << 30) as remote:
        remote.expect(iter([np.arange(COUNT)]))
        assert remote.cache.wait_until_filled(60)
        assert_equal(pack, remote)
        assert remote.tier_bytes.cached > 0
        assert remote.tier_bytes.nodes > 0
    assert "nothing more is cached" in caplog.text


def cached_bytes(folder):
    total = 0
    for path in folder.glob("shard-*"):
        with contextlib.suppress(FileNotFoundError):  # evicted since it was listed
            total += path.stat().st_size
    return total


def epochs_of(data, shuffle, cache=None):
    """Return two epochs of batches; a cache keeps up with them, and within its bound."""
    options = store.LoaderOptions(
        seed=5, shuffle=shuffle, block_samples=8, window_blocks=2, batches_ahead=1, workers=1
    )
    found = []
    with store.Loader(data, 8, rank=0, world_size=1, options=options) as loader:
        for _ in range(2):
            for batch, labels in loader:
                found.append((bytes(batch.buffer.numpy()), labels.tolist()))
                assert cache is None or cache.wait_until_filled(60)
            if cache is not None:
                assert 0 < cached_bytes(cache.folder) <= cache.capacity_bytes
    return found


def test_what_is_read_next_lies_in_a_cache_that_is_filled(pack, tmp_path):
    with remote_with_cache(pack, tmp_path / "cache", 5 * SHARD_BYTES) as remote:
        batches = np.array_split(np.arange(COUNT), COUNT // 8)
        remote.expect(iter(batches))
        for batch in batches:
            remote.prefetch(batch)
            assert remote.cache.wait_until_filled(60)
            assert [remote.read(int(k)) for k in batch] == [pack.read(int(k)) for k in batch]
        assert remote.tier_bytes.cached > remote.tier_bytes.nodes


@pytest.mark.parametrize("shuffle", ["block", "global", "none"])
def test_a_loader_fills_the_cache_in_its_own_order(pack, tmp_path, shuffle):
    capacity = 5 * SHARD_BYTES
    with remote_with_cache(pack, tmp_path / "cache", capacity) as remote:
        assert epochs_of(remote, shuffle, remote.cache) == epochs_of(pack, shuffle)
        total = int(pack.index.shard_lengths.sum())
        tiers = remote.tier_bytes
        assert tiers.cached > 0
        # Two epochs have twice the pack. How much comes from nodes before the cache has it is a
        # race; a shard that the cache gives up too early is copied again.
        assert tiers.nodes <= 2 * total
        assert remote.cache.copied_bytes <= 2.5 * total
        with pytest.raises(UsageError, match="another process"):
            remote_with_cache(pack, tmp_path / "cache", capacity)
    with remote_with_cache(pack, tmp_path / "cache", capacity) as again:
        assert again.cache.shards  # what was left there is used
        assert_equal(pack, again)
        assert again.tier_bytes.cached > 0


def test_a_forked_child_reads_what_is_cached(pack, tmp_path):
    with remote_with_cache(pack, tmp_path / "cache", 1 << 30) as remote:
        remote.expect(iter([np.arange(COUNT)]))
        assert remote.cache.wait_until_filled(60)
        child = os.fork()
        if child == 0:
            body = remote.read_batch(range(COUNT))[0].tobytes()
            same = body == pack.read_batch(range(COUNT))[0].tobytes()
            os._exit(0 if same and remote.tier_bytes.nodes == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_shards_of_a_pack_are_never_taken_for_those_of_a_cache(pack, tmp_path):
    shutil.copytree(pack.path, tmp_path / "copy")
    names = sorted(path.name for path in (tmp_path / "copy").iterdir())
    with pytest.raises(UsageError, match="folder of a pack"):
        remote_with_cache(pack, tmp_path / "copy", SHARD_BYTES)
    with pytest.raises(UsageError, match="folder of a pack"):
        StoreNode(pack.path, NodeOptions(listen=LOOPBACK, local=tmp_path / "copy"))
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == names


def test_fit_says_what_fits(pack):
    total = int(pack.index.shard_lengths.sum())
    run = without_torch(
        "store", "fit", str(pack.path), "--nodes", "4", "--local", str(total), "--json", text=True
    )
    found = json.loads(run.stdout)
    assert (run.returncode, found["ok"], found["codec"]) == (0, True, "as packed")
    run = without_torch(
        "store", "fit", str(pack.path), "--nodes", "2", "--local", str(total // 3), text=True
    )
    assert run.returncode == 1
    assert "least number of nodes that would do is" in run.stdout
