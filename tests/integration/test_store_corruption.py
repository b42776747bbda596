"""Damaged and hostile packs: every harmful byte is found and its sample named; nothing crashes."""

import os
import random
import shutil
import struct

import pytest

from paceline import store
from paceline.core.errors import CorruptPack, NotFound, StorageError, UsageError
from paceline.native import crc32c
from paceline.store import PackOptions, open_pack
from paceline.store.format.header import parse_sections, resealed

BODIES = {
    "a/empty": b"",
    "a/one": b"1",
    "a/text": b"some text\n" * 7,
    "b/big": bytes(range(256)) * 3,
    "root": b"r" * 65,
}


@pytest.fixture
def pack_path(tmp_path):
    for name, body in BODIES.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    store.pack(
        store.Folder(tmp_path / "source"), tmp_path / "pack", options=PackOptions(shard_bytes=896)
    )
    assert len(list((tmp_path / "pack").iterdir())) == 4
    return tmp_path / "pack"


def read_all(path):
    """Read a pack in every way there is; return its samples by name."""
    with open_pack(path) as pack:
        for problem in pack.verify():
            raise problem
        buffer, offsets = pack.read_batch(range(len(pack)))
        names = list(pack.names)
        samples = {name: pack.read(pack.find(name)) for name in names}
        whole = [buffer[offsets[k] : offsets[k + 1]].tobytes() for k in range(len(pack))]
        assert list(samples.values()) == whole
        assert len(pack.class_names) + len(pack.folder_names) == 4
        return samples


def flip(file, at, mask=0x01):
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ mask]))


def sample_ranges(pack_path):
    """Return (shard file, begin, end, name) of each sample, found without the reader's help."""
    ranges = []
    for shard in sorted(pack_path.glob("shard-*")):
        content = shard.read_bytes()
        for name, body in BODIES.items():
            at = content.find(body, 64)
            if body and at >= 0 and at % 64 == 0:
                ranges.append((shard, at, at + len(body), name))
    assert sorted(name for *_, name in ranges) == sorted(set(BODIES) - {"a/empty"})
    return ranges


def test_each_flipped_byte_of_a_sample_is_detected_and_the_sample_named(pack_path):
    for shard, begin, end, name in sample_ranges(pack_path):
        for at in range(begin, end):
            flip(shard, at, 1 << at % 8)
            with open_pack(pack_path) as pack:
                damaged = pack.find(name)
                with pytest.raises(CorruptPack, match=f"sample {damaged} '{name}'") as caught:
                    pack.read(damaged)
                assert caught.value.where == str(shard)
                assert "expected" in caught.value.why
                assert "found" in caught.value.why
                with pytest.raises(CorruptPack, match=name):
                    pack.read_batch([0, damaged])
                assert [problem.what for problem in pack.verify()] == [caught.value.what]
                others = [k for k in range(len(pack)) if k != damaged]
                pack.read_batch(others)
            flip(shard, at, 1 << at % 8)
    assert read_all(pack_path) == BODIES


def test_each_flipped_byte_of_the_index_is_detected_or_harmless(pack_path):
    index = pack_path / "index.pace"
    detected = 0
    for at in range(index.stat().st_size):
        flip(index, at, 0x80 >> at % 8)
        try:
            assert read_all(pack_path) == BODIES
        except CorruptPack as problem:
            detected += str(index) in problem.where
        flip(index, at, 0x80 >> at % 8)
    assert detected > 64 + 14 * 32
    assert read_all(pack_path) == BODIES


def test_each_flipped_byte_of_a_shards_header_is_detected(pack_path):
    for at in range(64):
        flip(pack_path / "shard-00001.pace", at)
        with pytest.raises(CorruptPack, match=r"shard-00001\.pace"):
            open_pack(pack_path)
        flip(pack_path / "shard-00001.pace", at)


@pytest.mark.parametrize("file", ["index.pace", "shard-00000.pace", "shard-00002.pace"])
def test_a_file_of_another_length_is_an_error(pack_path, file):
    size = (pack_path / file).stat().st_size
    content = (pack_path / file).read_bytes()
    for length in (0, 1, 63, 64, size - 1, size + 1, 4096 * 5):
        (pack_path / file).write_bytes((content + bytes(4096 * 5))[:length])
        with pytest.raises(CorruptPack, match=file):
            open_pack(pack_path)


def test_a_missing_shard_is_named_and_a_missing_index_is_no_pack(pack_path):
    (pack_path / "shard-00001.pace").rename(pack_path / "away")
    with pytest.raises(CorruptPack, match=r"missing.*shard-00001"):
        open_pack(pack_path)
    (pack_path / "index.pace").unlink()
    with pytest.raises(NotFound, match=r"no index\.pace"):
        open_pack(pack_path)
    with pytest.raises(NotFound, match="no pack here"):
        open_pack(pack_path / "nowhere")
    with pytest.raises((NotFound, StorageError), match="away"):
        open_pack(pack_path / "away")
    os.mkfifo(pack_path / "index.pace")
    with pytest.raises(CorruptPack, match="not a regular file"):
        open_pack(pack_path)


def test_swapped_shards_are_detected(pack_path):
    first, second = pack_path / "shard-00000.pace", pack_path / "shard-00001.pace"
    first.rename(pack_path / "x")
    second.rename(first)
    (pack_path / "x").rename(second)
    with pytest.raises(CorruptPack):
        open_pack(pack_path)


def reseal(content):
    """Return an index with its header's and table's checksums made right again."""
    (count,) = struct.unpack_from("<I", content, 12)
    table = bytes(content[64 : 64 + 32 * count])
    struct.pack_into("<I", content, 56, crc32c(table))
    struct.pack_into("<I", content, 60, crc32c(bytes(content[:60])))
    return bytes(content)


def test_a_newer_version_is_refused_with_the_version_needed(pack_path):
    content = bytearray((pack_path / "index.pace").read_bytes())
    struct.pack_into("<I", content, 8, 7)
    (pack_path / "index.pace").write_bytes(reseal(content))
    with pytest.raises(UsageError, match=r"format version 7.*reads up to version 3"):
        open_pack(pack_path)


def test_hostile_indices_are_refused_or_harmless(pack_path):
    generator = random.Random(2024)
    good = (pack_path / "index.pace").read_bytes()
    section_count = good[12]
    assert section_count > 14
    refused = 0
    for round_number in range(400):
        content = bytearray(good)
        for _ in range(generator.randint(1, 3)):
            entry = 64 + 32 * generator.randrange(section_count)
            _, _, offset, length, _, _ = struct.unpack_from("<IIQQII", content, entry)
            wild = generator.choice([0, 1, 63, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 64])
            if round_number % 2:  # a section's content, under a checksum that fits
                if length >= 8:
                    at = offset + generator.randrange(length - 7)
                    struct.pack_into("<Q", content, at, wild)
                body = bytes(content[offset : offset + length])
                struct.pack_into("<I", content, entry + 24, crc32c(body))
            else:  # the header or the table
                struct.pack_into(
                    "<Q", content, generator.randrange(12, 64 + section_count * 32 - 8), wild
                )
        is_sealed = content[12:16] == good[12:16]
        (pack_path / "index.pace").write_bytes(reseal(content) if is_sealed else content)
        try:
            with open_pack(pack_path) as pack:
                problems = list(pack.verify())
                for k, name in enumerate(pack.names):
                    pack.find(name.encode("utf-8", "surrogateescape"))
                    pack.read(k)
                list(pack.folder_names)
                assert sum(len(entries) for _, entries in pack.walk()) <= 2 * len(good)
                # What no read has met: the index contradicts itself.
                assert all(problem.where.endswith("index.pace") for problem in problems)
                refused += bool(problems)
        except (CorruptPack, NotFound):  # NotFound: the names are out of order
            refused += 1
        except UsageError as problem:  # a section that this version does not know
            refused += "newer" in problem.fix
    assert refused > 200


def test_folders_that_do_not_nest_cannot_make_a_walk_endless(tmp_path):
    for k in range(40):  # c0/g, c1/g, ...: 2 ** 40 ways, if each g claimed all that follows
        (tmp_path / "source" / f"c{k:02d}" / "g").mkdir(parents=True)
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack")
    content = bytearray((tmp_path / "pack" / "index.pace").read_bytes())
    place = parse_sections(content)[20]
    ends = list(struct.unpack_from(f"<{place.length // 8}Q", content, place.offset))
    assert ends[:4] == [2, 2, 4, 4]
    ends[1::2] = [len(ends)] * 40
    struct.pack_into(f"<{len(ends)}Q", content, place.offset, *ends)
    (tmp_path / "pack" / "index.pace").write_bytes(resealed(bytes(content)))
    with open_pack(tmp_path / "pack") as pack:
        with pytest.raises(CorruptPack, match="within each other"):
            list(pack.walk())
        assert len(pack.scandir()) == 40


def test_a_pack_that_was_replaced_is_noticed_after_unpickling(pack_path, tmp_path):
    with open_pack(pack_path) as pack:
        make, arguments = pack.__reduce__()
    shutil.rmtree(pack_path)
    (tmp_path / "source" / "new").write_bytes(b"new")
    store.pack(store.Folder(tmp_path / "source"), pack_path)
    again = make(*arguments)
    with pytest.raises(UsageError, match="another pack"):
        len(again)


def test_an_unfinished_pack_is_refused_by_any_name(pack_path, tmp_path):
    pack_path.rename(tmp_path / "pack.partial")
    (tmp_path / "link").symlink_to(tmp_path / "pack.partial")
    for path in (tmp_path / "pack.partial", tmp_path / "link"):
        with pytest.raises(CorruptPack, match="unfinished"):
            open_pack(path)
    with pytest.raises(NotFound, match=r"pack\.partial beside it"):
        open_pack(tmp_path / "pack")
