"""The reader of a node: every rank gets its samples when others die, wait or hold on to them."""

import dataclasses
import gc
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import numpy as np
import pytest
import torch
from support.launching import await_true
from support.process_groups import run_ranks

from paceline import store
from paceline.core.errors import CorruptPack
from paceline.store import PackOptions, SampleOrder, Samples, open_pack
from paceline.store.feed.batches import RawSamples
from paceline.store.feed.node import client as client_module
from paceline.store.feed.node.client import NodeClient
from paceline.store.feed.node.reader import RingReader
from paceline.store.feed.node.ring import PAGE_BYTES, NodeConfig, RankWord, Ring, Word
from paceline.store.feed.node.turns import TurnServer, TurnTuner
from paceline.store.feed.sampler import RankBatches
from paceline.store.format.header import parse_sections
from paceline.store.format.layout import BLOCK_BYTES, Section
from paceline.store.write.index.stored import IndexLayout

COUNT = 1000
DEADLINE_S = 60


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node") / "pack"
    generator = np.random.default_rng(3)
    pairs = [(f"{k:05d}", generator.bytes(int(generator.integers(1, 4000)))) for k in range(COUNT)]
    store.pack(Samples(pairs), folder)
    return folder


class Node:
    """The ranks of a node as threads of this process, and a real reader."""

    def __init__(
        self, path, ranks, *, batch=60, data_bytes=4 << 20, last="pad", direct=False, turns=""
    ):
        self.pack = open_pack(path)
        self.ranks = ranks
        self.order = SampleOrder(sample_count=len(self.pack), seed=9)
        self.batches = [
            RankBatches(
                sample_count=len(self.pack),
                global_batch_size=batch,
                rank=rank,
                world_size=ranks,
                last=last,
            )
            for rank in range(ranks)
        ]
        fields = dataclasses.asdict(self.order)
        del fields["epoch"], fields["sample_count"]
        config = NodeConfig(
            pack=str(path),
            side_file=None if self.pack.side_file is None else str(self.pack.side_file),
            identity=self.pack.identity,
            verify="first",
            order=fields,
            global_batch_size=batch,
            world_size=ranks,
            last=last,
            window_bytes=data_bytes // 4,
            direct=direct,
            turns=turns,
        )
        self.ring = Ring.create(config, ranks, data_bytes)
        self.clients = [NodeClient(self.ring, rank, rank, DEADLINE_S) for rank in range(ranks)]
        self.clients[0].start_reader()

    def expected(self, rank, epoch, position=0):
        """Return the bytes of each batch of a rank."""
        order = dataclasses.replace(self.order, epoch=epoch)
        planned = self.batches[rank].positions(position, COUNT)
        return [[self.pack.read(k) for k in order.samples(places)] for places in planned]

    def take_pass(self, rank, epoch, position=0, on_batch=lambda step: None):
        """Return a rank's batches of a pass; it reads by itself what the reader does not give."""
        expected = self.expected(rank, epoch, position)
        one = self.clients[rank].begin(epoch, position)
        found = []
        for step, bodies in enumerate(expected):
            taken = one.take(step, len(bodies))
            found.append(bodies if taken is None else [bytes(view) for view in taken])
            on_batch(step)
        return found

    def on_all_ranks(self, work):
        """Call `work(rank)` on a thread for each rank; return the results."""
        results, problems = {}, []

        def run(rank):
            try:
                results[rank] = work(rank)
            except BaseException as problem:  # noqa: BLE001  # raised below
                problems.append(problem)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert not any(thread.is_alive() for thread in threads)
        if problems:
            raise problems[0]
        return [results[rank] for rank in range(self.ranks)]

    def reader(self):
        """Return the process of the reader that this node's ranks started last."""
        started = [client._child for client in self.clients if client._child is not None]
        return max(started, key=lambda child: child.pid)

    def leave(self):
        for client in self.clients:
            client.leave()


@pytest.fixture
def node(path):
    nodes = []

    def make(ranks, path=path, **given):
        nodes.append(Node(path, ranks, **given))
        return nodes[-1]

    yield make
    for made in nodes:
        made.leave()
        gc.collect()
        for client in made.clients:
            if client._child is not None:
                assert client._child.wait(DEADLINE_S) is not None


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("last", ["pad", "drop", "join"])
def test_each_rank_gets_its_samples_epoch_after_epoch(node, ranks, last):
    here = node(ranks, last=last)
    for epoch in range(3):
        position = 0 if epoch != 1 else here.batches[0].after(0, 4)
        found = here.on_all_ranks(lambda rank, e=epoch, p=position: here.take_pass(rank, e, p))
        assert found == [here.expected(rank, epoch, position) for rank in range(ranks)]
    assert sum(client.own_reads for client in here.clients) == 0


def test_past_the_page_cache_each_byte_is_read_once(node):
    here = node(2, direct=True)
    found = here.on_all_ranks(lambda rank: here.take_pass(rank, 0))
    assert found == [here.expected(rank, 0) for rank in range(2)]
    words = here.ring.words
    # Samples of 2 KB in random order: each window reads whole pages, and gaps of up to four.
    assert words.load(Word.READS) <= sum(map(len, here.expected(0, 0))) * 2


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.campaign("faults"))])
def test_a_reader_that_is_killed_again_and_again_loses_nothing(node, count):
    here = node(2, data_bytes=2 << 20)
    killed = set()

    def kill(step):
        reader = here.reader()
        if step % 3 == 1 and len(killed) < count and reader.poll() is None:
            reader.kill()
            killed.add(reader.pid)

    epoch = 0
    while len(killed) < count:
        found = here.on_all_ranks(
            lambda rank, e=epoch: here.take_pass(rank, e, on_batch=kill if rank == 0 else str)
        )
        assert found == [here.expected(rank, epoch) for rank in range(2)]
        epoch += 1
    assert here.ring.words.load(Word.READERS) >= count


def test_views_stay_as_they_are_while_they_are_referenced(node):
    here = node(1, data_bytes=1 << 20)
    expected = here.expected(0, 0)
    one = here.clients[0].begin(0, 0)
    held = [one.take(step, len(bodies)) for step, bodies in enumerate(expected)]
    assert any(taken is None for taken in held)  # more than the ring can hold: read by the rank
    for taken, bodies in zip(held, expected, strict=True):
        if taken is not None:
            assert [bytes(view) for view in taken] == bodies
    view = next(iter(held[0]))
    first = bytes(view)
    del held, taken
    assert here.take_pass(0, 1) == here.expected(0, 1)
    assert bytes(view) == first


def test_a_window_that_is_taken_between_two_looks_stays_needed(node):
    """The reader looked what was held, then what was taken, and a rank took a window in between."""
    here = node(1)
    one = here.clients[0].begin(0, 0)
    await_true(lambda: here.ring.words.load(Word.PUBLISHED), "a window")
    taken = []
    original = here.ring.rank

    def rank(local_rank, word):
        found = original(local_rank, word)
        if not taken and word in (RankWord.HELD, RankWord.NEXT):
            taken.append(None)  # for `take` looks as well
            taken[0] = one.take(0, 60)
        return found

    here.ring.rank = rank
    assert here.ring.still_needed(0) == 0
    assert taken.pop() is not None


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_is_dropped_gives_back_memory_and_descriptors_and_ends_the_reader(path):
    before = descriptors()

    def read_and_drop():  # without saying that the ranks leave
        here = Node(path, 2)
        assert here.on_all_ranks(lambda rank: here.take_pass(rank, 0))
        return here.reader()

    child = read_and_drop()
    assert descriptors() == before
    assert child.wait(DEADLINE_S) == 0


def test_windows_begin_with_a_page(path, tmp_path, node):
    with open_pack(path) as pack:
        pairs = [(f"{k:05d}", pack.read(k) + bytes(100)) for k in range(COUNT)]
    store.pack(Samples(pairs), tmp_path / "pack", options=PackOptions(codec="zstd"))
    here = node(1, path=tmp_path / "pack")
    assert here.take_pass(0, 0) == here.expected(0, 0)
    begins = [here.ring.window(k).begin for k in range(here.ring.words.load(Word.PUBLISHED))]
    assert len(set(begins)) > 1
    assert {begin % PAGE_BYTES for begin in begins} == {0}


def test_ranks_that_ask_for_different_positions_read_by_themselves(node):
    here = node(2)
    positions = [0, here.batches[0].after(0, 2)]
    found = here.on_all_ranks(lambda rank: here.take_pass(rank, 0, positions[rank]))
    assert found == [here.expected(rank, 0, positions[rank]) for rank in range(2)]
    assert all(client.own_reads for client in here.clients)
    found = here.on_all_ranks(lambda rank: here.take_pass(rank, 1))
    assert found == [here.expected(rank, 1) for rank in range(2)]


def test_a_pass_that_is_left_early_does_not_disturb_the_next(node):
    here = node(2)

    def leave_early(rank):
        one = here.clients[rank].begin(0, 0)
        taken = one.take(0, 30)
        return [bytes(view) for view in taken]

    assert here.on_all_ranks(leave_early) == [here.expected(rank, 0)[0] for rank in range(2)]
    found = here.on_all_ranks(lambda rank: here.take_pass(rank, 1))
    assert found == [here.expected(rank, 1) for rank in range(2)]


def test_batches_larger_than_the_ring_are_read_by_ranks(node):
    here = node(2, batch=200, data_bytes=64 << 10)
    found = here.on_all_ranks(lambda rank: here.take_pass(rank, 0))
    assert found == [here.expected(rank, 0) for rank in range(2)]
    assert here.clients[0].own_reads == len(found[0])


def test_a_pack_that_the_reader_cannot_open_is_read_by_ranks(node, path, tmp_path):
    here = node(1)
    config = dataclasses.replace(here.ring.config, pack=str(tmp_path / "gone"))
    ring = Ring.create(config, 1, 1 << 20)
    client = NodeClient(ring, 0, 0, DEADLINE_S)
    client.start_reader()
    assert client.begin(0, 0).take(0, 60) is None
    client.leave()
    client._child.wait(DEADLINE_S)


SCRIPT = Path(__file__).parent / "scripts" / "node_loader.py"


def test_loaders_deliver_the_same_with_and_without(path, tmp_path):
    found = {}
    for mode in ("off", "on", "killed"):
        (tmp_path / mode).mkdir()
        found[mode] = run_ranks(SCRIPT, tmp_path / mode, 2, path, mode)
    digests = {mode: [said["digest"] for said in by_rank] for mode, by_rank in found.items()}
    assert digests["on"] == digests["killed"] == digests["off"]
    assert all(said["by_node"] == 0 for said in found["off"])
    assert all(said["by_node"] == said["all"] > 0 for said in found["on"])


def test_raw_batches_are_views_and_the_same_as_without(path, tmp_path):
    with open_pack(path) as pack:
        database(tmp_path / "data", [pack.read(number) for number in range(len(pack))])
    open_pack(tmp_path / "data").close()  # else the ranks index it, each for itself
    found = {}
    for source, mode in ((path, "raw-off"), (path, "raw"), (tmp_path / "data", "raw")):
        place = tmp_path / f"{mode}-of-{source.name}"
        place.mkdir()
        found[place.name] = run_ranks(SCRIPT, place, 2, source, mode)
    digests = [[said["digest"] for said in by_rank] for by_rank in found.values()]
    assert digests[0] == digests[1] == digests[2]
    for said in (*found["raw-of-pack"], *found["raw-of-data"]):
        assert said["by_node"] == said["all"] > 0
        assert said["views"] == said["samples"] > 0  # none was copied out of the shared memory


def test_raw_samples_stay_as_they_are_while_a_tensor_is_referenced(node):
    here = node(1, data_bytes=1 << 20)
    expected = here.expected(0, 0)
    raw = RawSamples.shared(here.clients[0].begin(0, 0).take(0, len(expected[0])))
    assert [bytes(raw[k]) for k in range(-len(raw), len(raw))] == expected[0] * 2
    first = raw.tensors()[0]
    first[0] ^= 255  # for this rank to change
    changed = first.clone()
    assert bytes(raw.buffer.numpy()) == bytes(changed.numpy()) + b"".join(expected[0][1:])
    assert pickle.loads(pickle.dumps(raw)).offsets.tolist() == raw.offsets.tolist()
    del raw
    assert here.take_pass(0, 1) == here.expected(0, 1)
    assert torch.equal(first, changed)


def test_the_reader_runs_on_the_cores_of_all_ranks(node):
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("one core here")
    os.sched_setaffinity(0, {min(cores)})  # as of a rank that is bound to a part of the node
    try:
        here = node(1)
        reader = here.reader()
    finally:
        os.sched_setaffinity(0, cores)  # as if other ranks were bound to the rest
    assert here.take_pass(0, 0) == here.expected(0, 0)
    assert os.sched_getaffinity(reader.pid) == cores


def test_a_reader_goes_on_with_what_the_one_before_it_had_found(node):
    here = node(1, direct=True)
    largest = here.ring.config.window_bytes
    here.ring.words.store(Word.DEPTH, 2)
    here.ring.words.store(Word.WINDOW_BYTES, largest // 2)
    tuner = RingReader(here.ring)._tuner
    assert (tuner.depth.value, tuner.windows.value / tuner.windows.most) == (2, 0.5)


def test_a_reader_that_takes_turns_begins_with_one_read_at_a_time(node):
    depths = [
        RingReader(node(1, direct=True, turns=turns).ring)._tuner.depth.value
        for turns in ("token@127.0.0.1:1", "")
    ]
    assert depths == [1, 8]


def test_loaders_that_differ_are_refused(path, tmp_path):
    said = run_ranks(SCRIPT, tmp_path, 2, path, "differs")
    assert "differ" in said[1]["problem"]
    assert "seed" in said[1]["problem"]


def database(path, bodies):
    with (
        lmdb.open(str(path), map_size=1 << 28) as environment,
        environment.begin(write=True) as transaction,
    ):
        for number, body in enumerate(bodies):
            transaction.put(f"{number:05d}".encode(), body, append=True)


def test_a_database_is_read_in_place(node, path, tmp_path):
    with open_pack(path) as pack:
        expected = [pack.read(number) for number in range(len(pack))]
    database(tmp_path / "data", expected)
    here = node(2, path=tmp_path / "data")
    assert [here.pack.read(number) for number in range(COUNT)] == expected
    found = here.on_all_ranks(lambda rank: here.take_pass(rank, 0))
    assert found == [here.expected(rank, 0) for rank in range(2)]
    assert sum(client.own_reads for client in here.clients) == 0


def test_a_rank_that_stays_away_does_not_hold_up_the_others(node, monkeypatch):
    monkeypatch.setattr(client_module, "_PATIENCE_S", 0.5)
    here = node(2, data_bytes=2 << 20)  # a step takes less than a quarter, whatever is held
    assert here.take_pass(0, 0) == here.expected(0, 0)  # rank 1 never begins
    assert here.clients[0].own_reads == len(here.expected(0, 0))
    alone = here.clients[0].own_reads
    monkeypatch.setattr(client_module, "_PATIENCE_S", DEADLINE_S)
    here.clients[1].begin(0, 0)
    found = here.on_all_ranks(lambda rank: here.take_pass(rank, 1))
    assert found == [here.expected(rank, 1) for rank in range(2)]
    assert here.clients[0].own_reads == alone


def test_a_rank_waits_for_one_that_is_slower(node, monkeypatch):
    """It took the window that it held itself for what was in the reader's way."""
    here = node(2, data_bytes=2 << 20)
    looks = threading.Semaphore(0)
    original = NodeClient._waits_for_ranks

    def waits_for_ranks(self, *given):
        looks.release()
        return original(self, *given)

    monkeypatch.setattr(NodeClient, "_waits_for_ranks", waits_for_ranks)

    def await_looks(step):
        while step == 0 and not here.ring.words.load(Word.WAITS_FOR_ROOM):
            assert looks.acquire(timeout=DEADLINE_S)
        for _ in range(3 * (step == 0)):
            assert looks.acquire(timeout=DEADLINE_S)

    on_batch = (lambda step: None, await_looks)
    found = here.on_all_ranks(lambda rank: here.take_pass(rank, 0, on_batch=on_batch[rank]))
    assert found == [here.expected(rank, 0) for rank in range(2)]
    assert [client.own_reads for client in here.clients] == [0, 0]


def test_readers_of_two_nodes_take_turns_and_go_on_without_their_server(node):
    server = TurnServer(TurnTuner(2))
    nodes = [node(1, turns=server.address("127.0.0.1")) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda here: here.take_pass(0, 0), nodes)
        assert list(found) == [here.expected(0, 0) for here in nodes]
    server.close()
    for here in nodes:
        assert here.take_pass(0, 1) == here.expected(0, 1)
        assert here.clients[0].own_reads == 0


@pytest.mark.parametrize(
    ("section", "named"),
    [(Section.OFFSETS, "section 1, bytes 65536"), (Section.LENGTHS, "section 2, bytes 65536")],
)
def test_a_database_with_a_large_index_is_read_and_its_damage_is_found(
    node, tmp_path, monkeypatch, section, named
):
    monkeypatch.setattr(IndexLayout, "needs_version_3", True)  # as with more samples
    database(tmp_path / "data", [b"%d" % number * (number % 9) for number in range(70_000)])
    here = node(2, path=tmp_path / "data", batch=1000, data_bytes=16 << 20)
    assert here.pack.index.version == 3
    found = here.on_all_ranks(lambda rank: here.take_pass(rank, 0))
    assert found == [here.expected(rank, 0) for rank in range(2)]
    assert sum(client.own_reads for client in here.clients) == 0
    side_file = here.pack.side_file
    content = bytearray(side_file.read_bytes())
    content[parse_sections(content)[section].offset + BLOCK_BYTES] ^= 1
    here.pack.close()
    side_file.write_bytes(content)
    damaged = node(1, path=tmp_path / "data", batch=1000, data_bytes=16 << 20)
    assert damaged.clients[0].begin(0, 0).take(0, 1000) is None  # the reader plans none of it
    first = damaged.order.samples(damaged.batches[0].positions(0, 1)[0])
    with pytest.raises(CorruptPack, match=named):
        damaged.pack.read_batch(first)
    assert damaged.ring.words.load(Word.READERS) == 1  # it has not died of it
