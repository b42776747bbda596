"""Packs of both versions that are written hold the same; damage of an index is never trusted."""

import contextlib
import itertools
import os
import random
import tempfile
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline import store
from paceline.core.errors import CorruptPack
from paceline.native import codec_available
from paceline.store import Loader, LoaderOptions, PackOptions, open_pack
from paceline.store.format.header import head_bytes, parse_sections
from paceline.store.format.layout import BLOCK_BYTES, Section, aligned_begins
from paceline.store.write.index.stored import IndexLayout

MANY = 30_000  # samples of which some columns have several blocks

names = st.sampled_from([b"a", b"b", b"c"]).flatmap(
    lambda folder: st.integers(0, 10**6).map(lambda k: b"%s/%d" % (folder, k))
)
bodies = st.binary(max_size=80) | st.integers(0, 3000).map(lambda size: b"ab" * size)
codecs = st.sampled_from(
    [name for name in ("none", "zstd", "lz4", "zstd-dict") if codec_available(name)]
)


@contextlib.contextmanager
def version(number):
    """Have indices be written in this version, whether or not they need it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexLayout, "needs_version_3", number == 3)
        yield


def content(path):
    """Return all that the columns of a pack say, at full width."""
    with open_pack(path) as pack:
        index = pack.index
        index.check()
        columns = (
            index.offsets, index.lengths, index.stored_lengths, index.shards, index.checksums,
            index.codecs, index.labels, index.modes, index.mtimes_ns, index.name_offsets,
            index.shard_lengths, pack.lengths, pack.shards,
        )  # fmt: skip
        buffer, offsets = pack.read_batch(range(len(pack)))
        assert pack.labels_of(range(len(pack))).tolist() == pack.labels.tolist()
        assert pack.lengths_of(range(len(pack))).tolist() == pack.lengths.tolist()
        return (
            [(str(column.dtype), column.tolist()) for column in columns],
            list(pack.names),
            buffer.tobytes(),
            offsets.tolist(),
            [pack.find(name) for name in pack.names],
            [(folder, entries) for folder, entries in pack.walk()],
        )


@settings(max_examples=examples(20), deadline=None)
@given(
    samples=st.dictionaries(names, bodies, max_size=12),
    more=st.dictionaries(names, bodies, max_size=4),
    shard_bytes=st.sampled_from([640, 1 << 20]),
    codec=codecs,
    versions=st.permutations([2, 3]),
)
def test_both_versions_hold_the_same(samples, more, shard_bytes, codec, versions):
    options = PackOptions(shard_bytes=shard_bytes, codec=codec)
    more = {name: body for name, body in more.items() if name not in samples}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a sync costs nothing
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        for number in versions:
            with version(number):
                store.pack(
                    store.Samples(samples.items()), Path(folder, f"{number}"), options=options
                )
        assert content(Path(folder, "2")) == content(Path(folder, "3"))
        for before, after in ((2, 3), (3, 2)) if more else ():
            with version(after):
                store.append(store.Samples(more.items()), Path(folder, f"{before}"))
        assert content(Path(folder, "2")) == content(Path(folder, "3"))


@given(lengths=st.lists(st.sampled_from([0, 1, 7, 8, 63, 64, 65, 200]), max_size=40))
def test_begins_are_aligned_and_tight(lengths):
    begins = aligned_begins(np.array(lengths, np.uint64)).tolist()
    end = 0
    for begin, length in zip(begins, lengths, strict=False):
        step = 8 if length < 64 else 64
        assert begin % step == 0
        assert 0 <= begin - end < step
        end = begin + length
    assert begins[-1] % 64 == 0
    assert 0 <= begins[-1] - end < 64


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "pack"
    samples = ((b"%d/%05d" % (k % 3, k), b"%d" % k) for k in range(MANY))
    store.pack(store.Samples(samples), path)
    return path


def number_of(name):
    return name.split("/")[1].lstrip("0") or "0"


def read_some(pack, samples):
    """Return samples with their labels, or the error that refuses them."""
    try:
        buffer, offsets = pack.read_batch(samples)
        labels = pack.labels_of(samples).tolist()
    except CorruptPack as problem:
        return problem
    views = [bytes(view) for view in pack.views(samples)]
    bodies = [buffer[a:b].tobytes() for a, b in itertools.pairwise(offsets)]
    assert views == bodies
    return list(zip(bodies, labels, strict=True))


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_flipped_byte_of_a_large_index_is_never_trusted(many, verify):
    generator = random.Random(20)
    file = many / "index.pace"
    good = file.read_bytes()
    places = parse_sections(good)
    assert places[Section.CHECKSUMS].length > BLOCK_BYTES
    with open_pack(many) as pack:
        names = list(pack.names)
        expected = [(number_of(name).encode(), int(name[0])) for name in names]
    refused, wheres = 0, set()
    targets = [(0, head_bytes(good)), *((p.offset, p.end) for p in places.values() if p.length)]
    for begin, end in targets * 4:
        flipped = bytearray(good)
        at = generator.randrange(begin, end)
        flipped[at] ^= 1 << generator.randrange(8)
        file.write_bytes(flipped)
        try:
            with open_pack(many, verify=verify) as pack:
                for _ in range(6):
                    samples = generator.sample(range(MANY), 40)
                    found = read_some(pack, samples)
                    if isinstance(found, CorruptPack):
                        wheres.add(found.where)
                        refused += 1
                    else:
                        assert found == [expected[k] for k in samples]
                (problem,) = pack.verify()
                assert problem.where == str(file)
        except CorruptPack as problem:
            wheres.add(problem.where)
            refused += 1
        finally:
            file.write_bytes(good)
    assert refused > len(targets)
    assert wheres == {str(file)}
    with open_pack(many) as pack:
        assert list(pack.verify()) == []


def damage(path, section, at):
    """Flip a byte of a section; return the number of the byte in the file."""
    place = parse_sections(path.read_bytes())[section]
    with path.open("r+b") as file:
        file.seek(place.offset + at)
        byte = file.read(1)[0]
        file.seek(place.offset + at)
        file.write(bytes([byte ^ 1]))


def test_a_loader_touches_neither_names_nor_their_table(many, tmp_path):
    for section in (Section.NAMES, Section.NAME_OFFSETS, Section.NAME_TABLE):
        damage(many / "index.pace", section, 100)
    try:
        options = LoaderOptions(workers=1, seed=3)
        with Loader(many, 64, rank=0, world_size=1, options=options) as loader:
            count = sum(len(labels) for _, labels in loader)
        assert count >= MANY
        with open_pack(many) as pack:
            with pytest.raises(CorruptPack, match=r"section (18|8), bytes 0 to"):
                deque(map(pack.find, (f"{k % 3}/{k:05d}" for k in range(MANY))), maxlen=0)
            with pytest.raises(CorruptPack, match="section 8, bytes 0 to 65535"):
                pack.names[0]
            for read in (lambda: pack.index.name_offsets, pack.index.check):
                with pytest.raises(CorruptPack, match="section 8"):
                    read()
    finally:
        for section in (Section.NAMES, Section.NAME_OFFSETS, Section.NAME_TABLE):
            damage(many / "index.pace", section, 100)


def test_a_loader_may_skip_samples_whose_entries_are_damaged(many):
    damage(many / "index.pace", Section.CHECKSUMS, BLOCK_BYTES + 8)
    damage(many / "index.pace", Section.NAMES, BLOCK_BYTES + 8)
    lost = range(BLOCK_BYTES // 4, MANY)  # the entries of the second block
    try:
        options = LoaderOptions(shuffle="none", workers=1, on_corrupt="skip", numbers=True)
        with Loader(many, 1000, rank=0, world_size=1, options=options) as loader:
            batches, found = iter(loader), []
            for _ in range(lost.start // 1000 + 1):
                found += next(batches)[2].tolist()
            assert found == list(range(lost.start))
            assert loader.stats.skipped == 1000 - lost.start % 1000
            with pytest.raises(CorruptPack, match=r"index\.pace.*section 4, bytes 65536 to"):
                next(batches)  # nothing of it is left
    finally:
        damage(many / "index.pace", Section.CHECKSUMS, BLOCK_BYTES + 8)
        damage(many / "index.pace", Section.NAMES, BLOCK_BYTES + 8)


def test_samples_beside_damaged_entries_are_read_while_others_meet_the_damage(many):
    with open_pack(many) as pack:
        expected = [pack.read(k) for k in range(8)]
    damage(many / "index.pace", Section.CHECKSUMS, BLOCK_BYTES + 8)
    lost = BLOCK_BYTES // 4
    try:
        with open_pack(many) as pack, ThreadPoolExecutor(3) as threads:
            is_over = threading.Event()

            def meet_the_damage():
                while not is_over.is_set():
                    with pytest.raises(CorruptPack, match="section 4, bytes 65536 to"):
                        pack.read(lost)

            others = [threads.submit(meet_the_damage) for _ in range(3)]
            try:
                for _ in range(100):
                    os.utime(many / "index.pace")  # as if it was written: blocks are compared again
                    assert pack.read_batch(range(8))[0].tobytes() == b"".join(expected)
            finally:
                is_over.set()
            for other in others:
                other.result()
    finally:
        damage(many / "index.pace", Section.CHECKSUMS, BLOCK_BYTES + 8)
