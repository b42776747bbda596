"""Side files of both versions of the index: a large one is verified where it is touched."""

import logging
import os
import random
import tarfile

import lmdb
import numpy as np
import pytest

from paceline.core.errors import CorruptPack
from paceline.store import Loader, LoaderOptions, add_checksums, open_pack
from paceline.store.format.header import head_bytes, parse_sections
from paceline.store.format.layout import BLOCK_BYTES, Section
from paceline.store.write.index.stored import MANY_SAMPLES, IndexLayout

MANY = MANY_SAMPLES + 4_000


def settle(path):
    """Let a file be older than the step in which times advance, for which indexing would wait."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))


def value_of(k):
    return b"%d" % k * (k % 5)


def name_of(k):
    return f"{'ab'[k % 2]}/{k:05d}"


def expected(count):
    return sorted((name_of(k), value_of(k)) for k in range(count))


def database(path, count):
    with (
        lmdb.open(str(path), subdir=False, map_size=1 << 28) as environment,
        environment.begin(write=True) as transaction,
    ):
        for name, value in expected(count):
            transaction.put(name.encode(), value, append=True)
    settle(path)
    return path


def folder(path, count):
    for name, value in expected(count):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(value)
        settle(path / name)
    return path


def archive(path, count):
    files = folder(path.with_suffix(""), count)
    with tarfile.open(path, "w") as tar:
        for name, _ in expected(count):
            tar.add(files / name, name)
    settle(path)
    return path


MAKERS = {"x.mdb": database, "x": folder, "x.tar": archive}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("has_checksums", [False, True])
def test_both_versions_say_the_same(tmp_path, monkeypatch, name, has_checksums):
    path = MAKERS[name](tmp_path / name, 60)
    found = {}
    for version in (2, 3):
        monkeypatch.setattr(IndexLayout, "needs_version_3", version == 3)
        with open_pack(path) as pack:
            if has_checksums:
                add_checksums(pack)
        with open_pack(path) as pack:
            assert (pack.index.version, pack.is_verified) == (version, has_checksums)
            pack.index.check()
            index = pack.index
            columns = (index.offsets, index.lengths, index.shards, index.labels, index.mtimes_ns)
            buffer, offsets = pack.read_batch(range(len(pack)))
            found[version] = (
                list(pack.names),
                [(str(column.dtype), column.tolist()) for column in columns],
                [bytes(view) for view in pack.views(range(len(pack)))],
                buffer.tobytes(),
                offsets.tolist(),
                index.checksums.tolist(),
                [os.fspath(index.shard_path(k)) for k in range(pack.shard_count)],
            )
            assert index.extent_count == len(pack)
            pack.side_file.unlink()
    assert found[2] == found[3]
    names, _, bodies, *_ = found[2]
    assert list(zip(names, bodies, strict=True)) == expected(60)


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A database whose side file has several blocks of most columns."""
    path = database(tmp_path_factory.mktemp("many") / "x.mdb", MANY)
    with open_pack(path) as pack:
        assert pack.index.version == 3
    return path


@pytest.fixture
def side_file(many):
    """The side file of `many`, which is put back after the test."""
    path = many.with_name("x.mdb.pace")
    content = path.read_bytes()
    yield path
    path.write_bytes(content)


def flipped(good, at):
    content = bytearray(good)
    content[at] ^= 1
    return bytes(content)


def places_of(side_file):
    return parse_sections(side_file.read_bytes())


def test_a_small_side_file_is_read_whole_and_a_large_one_is_narrow(tmp_path, many, side_file):
    with open_pack(database(tmp_path / "x.mdb", 100)) as pack:
        assert pack.index.version == 2
    places = places_of(side_file)
    assert places[Section.SHARDS].length == places[Section.SHARDS].width == 1  # one file
    assert places[Section.OFFSETS].length == 4 * MANY > 3 * BLOCK_BYTES
    assert Section.CHECKSUMS not in places
    wanted = expected(MANY)
    with open_pack(many) as pack:
        assert [bytes(view) for view in pack.views(range(MANY))] == [body for _, body in wanted]
        assert list(pack.names) == [name for name, _ in wanted]
        for k in range(0, MANY, 997):
            assert pack.find(wanted[k][0]) == k
        assert list(pack.verify()) == []


def refusal(act, side_file):
    """Return what an error says; it is of the side file."""
    with pytest.raises(CorruptPack) as caught:
        act()
    assert caught.value.where == str(side_file)
    assert caught.value.what == "the index of the data is damaged"
    assert "Delete it" in caught.value.fix
    return caught.value.why


def test_a_flipped_byte_of_any_block_is_found(many, side_file, caplog):
    wanted = expected(MANY)
    good = side_file.read_bytes()
    generator = random.Random(4)
    places = [place for place in parse_sections(good).values() if place.length]
    blocks = [(0, head_bytes(good))]
    for place in places:
        begins = range(place.offset, place.end, BLOCK_BYTES)
        blocks += [(begin, min(begin + BLOCK_BYTES, place.end)) for begin in begins]
    assert len(blocks) > 40
    refused = made_again = 0
    found_in = set()
    for begin, end in blocks:
        bad = flipped(good, generator.randrange(begin, end))
        side_file.write_bytes(bad)
        with caplog.at_level(logging.ERROR), open_pack(many) as pack:
            samples = generator.sample(range(MANY), 50)
            if side_file.read_bytes() != bad:  # found on opening
                made_again += 1
                assert list(pack.verify()) == []
                assert [pack.read(k) for k in samples] == [wanted[k][1] for k in samples]
                continue
            try:
                found = [bytes(view) for view in pack.views(samples)]
            except CorruptPack as damage:
                found_in.add(damage.where)
                refused += 1
            else:
                assert found == [wanted[k][1] for k in samples]
            (damage,) = pack.verify()
            found_in.add(damage.where)
    assert made_again >= 3  # the header, and the sections of files
    assert refused >= 5
    assert found_in == {str(side_file)}
    side_file.unlink()
    open_pack(many).close()
    assert side_file.read_bytes() == good


def test_what_lies_in_other_blocks_is_read(many, side_file):
    wanted = expected(MANY)
    good = side_file.read_bytes()
    place = parse_sections(good)[Section.OFFSETS]
    lost = range(BLOCK_BYTES // place.width, 2 * BLOCK_BYTES // place.width)
    side_file.write_bytes(flipped(good, place.offset + BLOCK_BYTES + 9))
    with open_pack(many) as pack:
        for k in (0, lost.start - 1, lost.stop, MANY - 1):
            assert pack.read(k) == wanted[k][1]
        for read in (
            lambda: pack.read(lost.start),
            lambda: pack.read_batch([0, lost.stop - 1]),
            lambda: pack.views([lost.start + 70, 0]),
            lambda: pack.checksums(lost.start - 5, lost.start + 5),
            lambda: pack.index.offsets,
            pack.index.check,
        ):
            assert refusal(read, side_file).startswith("section 1, bytes 65536 to 131071: checksum")


def test_checksums_are_not_added_by_a_damaged_index(many, side_file):
    good = side_file.read_bytes()
    for section in (Section.OFFSETS, Section.NAMES, Section.NAME_TABLE):
        bad = flipped(good, parse_sections(good)[section].offset + BLOCK_BYTES)
        side_file.write_bytes(bad)
        with open_pack(many) as pack:
            refusal(lambda pack=pack: add_checksums(pack), side_file)
        assert side_file.read_bytes() == bad


def test_checksums_of_many_samples(many, side_file):
    with open_pack(many) as pack:
        identity = pack.identity
        add_checksums(pack)
    place = places_of(side_file)[Section.CHECKSUMS]
    assert (place.length, place.width) == (4 * MANY, 0)
    side_file.write_bytes(flipped(side_file.read_bytes(), place.offset + BLOCK_BYTES))
    with open_pack(many) as pack:
        assert (pack.identity, pack.index.version, pack.is_verified) == (identity, 3, True)
        assert pack.read(BLOCK_BYTES // 4 - 1) == expected(MANY)[BLOCK_BYTES // 4 - 1][1]
        why = refusal(lambda: pack.read(BLOCK_BYTES // 4), side_file)
        assert why.startswith("section 4, bytes 65536")


def test_a_loader_reads_no_names(many, side_file):
    good = side_file.read_bytes()
    places = parse_sections(good)
    bad = good
    for section in (Section.NAMES, Section.NAME_OFFSETS, Section.NAME_TABLE):
        bad = flipped(bad, places[section].offset + 100)
    side_file.write_bytes(bad)
    options = LoaderOptions(workers=1, seed=3, numbers=True)
    with Loader(many, 4000, rank=0, world_size=1, options=options) as loader:
        numbers = np.concatenate([batch[2].numpy() for batch in loader])
    assert set(numbers.tolist()) == set(range(MANY))
    assert side_file.read_bytes() == bad
