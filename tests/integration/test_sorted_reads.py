"""Reads of many samples in the order of storage: the same bytes as one by one, in fewer reads."""

import io
import os
import shutil

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline import store
from paceline.core.errors import CorruptPack
from paceline.native import SortedReader, encoding_of
from paceline.store import PackOptions, Samples, open_pack
from paceline.store.format.header import parse_sections
from paceline.store.format.layout import BLOCK_BYTES, Section
from paceline.store.write.index.stored import MANY_SAMPLES

PAGE = 4096


def reader_of(pack, *, direct=False, gap_bytes=16384, read_bytes=65536):
    return SortedReader(
        pack.native_reader,
        gap_bytes=gap_bytes,
        read_bytes=read_bytes,
        threads=3,
        cores=2,
        direct=direct,
    )


def page_aligned(size):
    memory = np.empty(size + PAGE, np.uint8)
    return memory[-memory.ctypes.data % PAGE :][:size]


def read(reader, ids):
    """Return the bytes of each sample, None where it could not be read, and the plan."""
    plan = reader.plan(np.array(ids, np.int64))
    target = page_aligned(plan.target_bytes)
    reader.read(plan, target)
    places = zip(plan.begins.tolist(), plan.lengths.tolist(), strict=True)
    return [None if n < 0 else target[at : at + n].tobytes() for at, n in places], plan


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A pack of raw, compressed, empty and chunked samples in several shards."""
    folder = tmp_path_factory.mktemp("sorted") / "pack"
    generator = np.random.default_rng(5)
    pairs = []
    for k in range(300):
        size = int(generator.integers(0, 3000))
        text = b"".join(b"%d of many words " % (k * j % 997) for j in range(size // 20))
        kinds = [text, generator.bytes(size), npy(generator.normal(9, 0.01, size // 8))]
        body = kinds[k % 3]
        pairs.append((f"{k:04d}", body))
    pairs.append(("chunked", generator.bytes(200_000)))
    options = PackOptions(shard_bytes=64 << 10, codec="zstd-dict")
    store.pack(Samples(pairs), folder, options=options)
    with open_pack(folder) as pack:
        kinds = {encoding_of(int(code)) for code in pack.index.codecs}
        assert kinds == {("none", 0), ("zstd-dict", 0), ("zstd-dict", 3)}
    return folder


@pytest.mark.parametrize("direct", [False, True])
@settings(max_examples=examples(30))
@given(data=st.data())
def test_samples_are_what_reading_one_by_one_gives(path, direct, data):
    with open_pack(path) as pack:
        numbers = st.lists(st.integers(0, len(pack) - 1), max_size=60)
        ids = data.draw(numbers)
        gap_bytes = data.draw(st.sampled_from([0, 100, 16384]))
        reader = reader_of(pack, direct=direct, gap_bytes=gap_bytes)
        found, plan = read(reader, ids)
        assert found == [pack.read(k) for k in ids]
        assert plan.reads <= plan.storage_bytes // 65536 + plan.range_count


@pytest.mark.parametrize("depth", [1, 2, 0])
def test_each_position_has_bytes_of_its_own(path, depth):
    with open_pack(path) as pack:
        reader, ids = reader_of(pack), np.array([7, 3, 7, 300, 3, 300, 7])
        plan = reader.plan(ids)
        target = page_aligned(plan.target_bytes)
        reader.read(plan, target, depth)
        places = list(zip(plan.begins.tolist(), plan.lengths.tolist(), strict=True))
        for number, (begin, length) in zip(ids.tolist(), places, strict=True):
            assert target[begin : begin + length].tobytes() == pack.read(number)
            target[begin : begin + length] ^= 255  # no other position sees it


def test_a_whole_pack_is_one_range_a_shard(path):
    with open_pack(path) as pack:
        found, plan = read(reader_of(pack), range(len(pack)))
        assert found == [pack.read(k) for k in range(len(pack))]
        assert plan.range_count == pack.shard_count
        shard_bytes = sum(int(n) for n in pack.index.shard_lengths)
        assert plan.storage_bytes <= shard_bytes
        assert plan.reads <= -(-plan.storage_bytes // 65536) + plan.range_count


def damage(path, pack, sample):
    extent = pack.extents(sample)[0]
    shard = path / f"shard-{extent.shard:05d}.pace"
    body = bytearray(shard.read_bytes())
    body[extent.offset] ^= 1
    shard.write_bytes(body)


@pytest.mark.parametrize("direct", [False, True])
def test_a_damaged_sample_is_left_out_and_no_other(path, tmp_path, direct):
    copy = tmp_path / "pack"
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    with open_pack(copy) as pack:
        bodies = [pack.read(k) for k in range(len(pack))]
        bad = next(k for k in range(len(pack)) if pack.extents(k)[0].stored_length > 100)
        damage(copy, pack, bad)
    with open_pack(copy) as pack:
        ids = [bad, 0, bad, len(pack) - 1]
        found, _ = read(reader_of(pack, direct=direct), ids)
        assert found == [None, bodies[0], None, bodies[-1]]


def test_what_was_replaced_or_cut_off_is_not_read(path, tmp_path):
    copy = tmp_path / "pack"
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    with open_pack(copy, verify="never") as pack:
        raw = [k for k in range(len(pack)) if len(pack.extents(k)) == 1]
        first = [k for k in raw if pack.extents(k)[0].shard == 0]
        second = [k for k in raw if pack.extents(k)[0].shard == 1]
        shard = copy / "shard-00000.pace"
        shard.rename(copy / "kept")
        shard.write_bytes(bytes((copy / "kept").stat().st_size))
        with (copy / "shard-00001.pace").open("r+b") as cut:
            cut.truncate(64)
        found, _ = read(reader_of(pack), first + second)
        lengths = pack.lengths_of(first + second)
        assert all(body is None for body, n in zip(found, lengths, strict=True) if n)


def test_a_target_that_is_too_small_is_refused(path):
    with open_pack(path) as pack:
        reader = reader_of(pack)
        plan = reader.plan(np.arange(10))
        with pytest.raises(ValueError, match="too small"):
            reader.read(plan, np.empty(plan.target_bytes - 1, np.uint8))
        with pytest.raises(IndexError):
            reader.plan(np.array([len(pack)]))


@pytest.mark.parametrize("direct", [False, True])
def test_no_damaged_block_of_an_index_is_planned_by(tmp_path, direct):
    count = MANY_SAMPLES + 1_000
    with (
        lmdb.open(str(tmp_path / "x.mdb"), subdir=False, map_size=1 << 28) as environment,
        environment.begin(write=True) as transaction,
    ):
        for k in range(count):
            transaction.put(b"%06d" % k, b"%d" % k * (k % 9), append=True)
    with open_pack(tmp_path / "x.mdb") as pack:
        ids = np.random.default_rng(2).permutation(count)[:20_000]
        found, _ = read(reader_of(pack, direct=direct), ids)
        assert found == [b"%d" % k * (k % 9) for k in ids.tolist()]
        side_file = pack.side_file
    content = bytearray(side_file.read_bytes())
    place = parse_sections(content)[Section.OFFSETS]
    content[place.offset + BLOCK_BYTES] ^= 1
    side_file.write_bytes(content)
    lost = range(BLOCK_BYTES // place.width, 2 * BLOCK_BYTES // place.width)
    with open_pack(tmp_path / "x.mdb") as pack:
        reader = reader_of(pack, direct=direct)
        others = [k for k in ids.tolist() if k not in lost]
        found, _ = read(reader, others)
        assert found == [b"%d" % k * (k % 9) for k in others]
        for ids in ([lost.start], [0, lost.stop - 1, 5]):
            with pytest.raises(CorruptPack, match="section 1, bytes 65536 to 131071"):
                reader.plan(np.array(ids))


def test_an_index_that_shrinks_between_plan_and_read_is_an_error(path, tmp_path):
    """An exception on one of the reader's threads ended the process."""
    shutil.copytree(path, tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        reader = reader_of(pack, gap_bytes=0, read_bytes=4096)
        plan = reader.plan(np.arange(0, 300, 2))
        os.truncate(tmp_path / "pack" / "index.pace", 64)
        target = page_aligned(plan.target_bytes)

        def read_until_it_is_seen():
            while True:  # the reader looks at the file a few times a second
                reader.read(plan, target)

        with pytest.raises(CorruptPack, match=r"changed|truncated|shorter"):
            read_until_it_is_seen()
