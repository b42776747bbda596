"""Packs that are repaired from their source or a copy; what cannot be is named; nothing is left."""

import contextlib
import errno
import fcntl
import json
import os
import random
import shutil
import signal

import pytest
from support.command_line import without_torch

from paceline import store
from paceline.core.errors import CorruptPack, NotFound, StorageError, UsageError
from paceline.store import PackOptions, open_pack
from paceline.store.care.damage import verify_files
from paceline.store.care.repair import repair_pack
from paceline.store.format.index import IndexFile


def make(folder, options):
    generator = random.Random(5)
    for k in range(24):
        path = folder / "source" / f"class{k % 3}" / f"{k}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generator.randbytes(k * 700) if k % 2 else b"compressible " * 50 * k)
    store.pack(store.Folder(folder / "source"), folder / "pack", options=options)
    shutil.copytree(folder / "pack", folder / "copy")
    assert len(shards(folder)) >= 5
    return folder


@pytest.fixture
def made(tmp_path):
    return make(tmp_path, PackOptions(shard_bytes=30_000))


@pytest.fixture
def rich(tmp_path):
    """A pack with all that the format has: chunks, zstd and parity."""
    options = PackOptions(shard_bytes=12_000, codec="zstd", parity_group=3)
    folder = make(tmp_path, options)
    index = IndexFile.open(folder / "pack")
    assert len(index.first_extents)
    assert set(index.codecs.tolist()) == {0, 1}
    assert len(index.parity_lengths) >= 3
    return folder


def shards(folder):
    return sorted((folder / "pack").glob("shard-*.pace"))


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def is_as_before(folder):
    names = sorted(path.name for path in (folder / "copy").iterdir())
    assert sorted(path.name for path in (folder / "pack").iterdir()) == names
    return all(
        (folder / "pack" / name).read_bytes() == (folder / "copy" / name).read_bytes()
        for name in names
    )


def damage_everything(folder):
    first, second, third, fourth, *_ = shards(folder)
    index = IndexFile.open(folder / "copy")
    extent = int(next(index.extents_by_shard())[-1])
    flip(first, int(index.offsets[extent]))
    flip(first, 1)  # of the header
    os.truncate(second, second.stat().st_size // 2)
    third.unlink()
    with fourth.open("ab") as file:
        file.write(b"more")
    for name in ("shard-00077.pace", "shard-00000.pace.partial", "index.pace.partial"):
        (folder / "pack" / name).write_bytes(b"left by somebody who was killed")
    return open_pack(folder / "copy").names[index.sample_of(extent)]


@pytest.mark.parametrize("origin", ["source", "replica"])
def test_all_kinds_of_damage_are_repaired_byte_for_byte(made, origin):
    name = damage_everything(made)
    given = {origin: made / ("source" if origin == "source" else "copy")}
    planned = repair_pack(made / "pack", **given, dry_run=True)
    assert not is_as_before_or_smaller(made)
    report = repair_pack(made / "pack", **given)
    assert report.ok
    assert is_as_before(made)
    assert (report.repaired, report.stale_files) == (planned.repaired, planned.stale_files)
    assert len(report.stale_files) == 3
    assert any(
        repr(name) in finding.what and finding.recovered_from == origin
        for finding in report.repaired
    )
    again = repair_pack(made / "pack")
    assert (again.repaired, again.lost, again.stale_files) == ((), (), ())


def is_as_before_or_smaller(folder):
    return len(list((folder / "pack").iterdir())) <= len(list((folder / "copy").iterdir()))


@pytest.mark.parametrize("dry_run", [True, False])
def test_parity_that_a_killed_append_left_pending_repairs_a_shard(rich, dry_run):
    """Between its two renames: the new index is in place, the new parity is not."""
    old = {path.name: path.read_bytes() for path in (rich / "pack").glob("parity-*.pace")}
    more = rich / "more" / "z"
    more.mkdir(parents=True)
    (more / "new").write_bytes(random.Random(6).randbytes(9_000))
    store.append(
        store.Folder(rich / "more"), rich / "pack", options=PackOptions(shard_bytes=12_000)
    )
    shutil.rmtree(rich / "copy")
    shutil.copytree(rich / "pack", rich / "copy")
    pending = {
        path.name: path
        for path in (rich / "pack").glob("parity-*.pace")
        if old.get(path.name) != path.read_bytes()
    }
    assert pending
    for name, path in pending.items():
        path.rename(path.with_name(name + ".partial"))
        if name in old:
            path.write_bytes(old[name])
    shards(rich)[-1].unlink()  # only the pending parity can bring it back
    report = repair_pack(rich / "pack", dry_run=dry_run)
    assert report.ok, report.lost
    assert report.stale_files == ()
    found = {finding.file: finding.recovered_from for finding in report.repaired}
    assert found == {**dict.fromkeys(pending, "append"), shards_name(rich): "parity"}
    if dry_run:
        assert sorted((rich / "pack").glob("*.partial"))
        report = repair_pack(rich / "pack")
    assert is_as_before(rich)


def shards_name(folder):
    return sorted(path.name for path in (folder / "copy").glob("shard-*.pace"))[-1]


def test_what_cannot_be_repaired_is_named_and_the_rest_is_repaired(made):
    name = damage_everything(made)
    (made / "source" / name).write_bytes(b"changed since")
    report = repair_pack(made / "pack", source=made / "source")
    assert not report.ok
    assert [finding.file for finding in report.lost] == ["shard-00000.pace"]
    assert name in report.lost[0].what
    with open_pack(made / "pack") as pack:  # it opens again, and says so itself
        assert [problem.what for problem in pack.verify()] == [report.lost[0].what + " is damaged"]
    assert repair_pack(made / "pack", replica=made / "copy").ok
    assert is_as_before(made)


def test_a_shard_of_which_nothing_is_left_stays_missing(made):
    shards(made)[1].unlink()
    report = repair_pack(made / "pack")
    assert [finding.what for finding in report.lost] == ["shard 1"]
    assert not (made / "pack" / "shard-00001.pace").exists()
    assert not list((made / "pack").glob("*.partial"))


def test_two_copies_that_are_damaged_in_different_places_repair_each_other(made):
    index = IndexFile.open(made / "pack")
    flip(shards(made)[0], int(index.offsets[1]))
    flip(made / "copy" / "shard-00001.pace", 64)
    whole = {path.name: path.read_bytes() for path in (made / "copy").iterdir()}
    assert repair_pack(made / "pack", replica=made / "copy").ok
    assert repair_pack(made / "copy", replica=made / "pack").ok
    assert is_as_before(made)
    assert whole != {path.name: path.read_bytes() for path in (made / "copy").iterdir()}


@pytest.mark.parametrize("how", ["flip", "cut", "missing"])
def test_the_index_comes_from_a_copy_that_fits(made, how):
    index = made / "pack" / "index.pace"
    if how == "flip":
        flip(index, 300)
    elif how == "cut":
        os.truncate(index, 100)
    else:
        index.unlink()
    with pytest.raises(CorruptPack, match="only a copy"):
        repair_pack(made / "pack", source=made / "source")
    assert repair_pack(made / "pack", replica=made / "copy", dry_run=True).ok
    report = repair_pack(made / "pack", replica=made / "copy")
    assert [finding.file for finding in report.repaired] == ["index.pace"]
    assert is_as_before(made)


def test_a_copy_of_another_pack_is_refused(made):
    (made / "source" / "new").write_bytes(b"new")
    store.pack(
        store.Folder(made / "source"), made / "other", options=PackOptions(shard_bytes=30_000)
    )
    with pytest.raises(UsageError, match="of another pack"):
        repair_pack(made / "pack", replica=made / "other")
    (made / "pack" / "index.pace").unlink()
    with pytest.raises(CorruptPack, match="does not fit"):
        repair_pack(made / "pack", replica=made / "other")
    assert not (made / "pack" / "index.pace").exists()


def test_misuse(made):
    with pytest.raises(NotFound, match="no pack here"):
        repair_pack(made / "nowhere")
    with pytest.raises(NotFound, match="no pack here"):
        repair_pack(made / "source")
    with pytest.raises(NotFound, match="no such source"):
        repair_pack(made / "pack", source=made / "nowhere")
    (made / "pack").rename(made / "pack.partial")
    with pytest.raises(CorruptPack, match="unfinished"):
        repair_pack(made / "pack.partial")


def test_a_pack_that_somebody_writes_to_is_left_alone(made):
    descriptor = os.open(made / "pack", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="appended to or repaired"):
            repair_pack(made / "pack")
    finally:
        os.close(descriptor)


def test_an_open_pack_reads_what_was_repaired(made):
    index = IndexFile.open(made / "pack")
    last = len(index.offsets) - 1
    with open_pack(made / "pack") as pack:
        body = pack.read(last)
        flip(made / "pack" / f"shard-{index.shards[last]:05d}.pace", int(index.offsets[last]))
        pack.evict()
        with pytest.raises(CorruptPack):
            pack.read(last)
        repair_pack(made / "pack", source=made / "source")
        pack.evict()
        assert pack.read(last) == body


CALLS = ("open", "pwrite", "ftruncate", "fsync", "rename")


class Interruption:
    """Does `action` in place of the `at`-th call that repair makes, or counts them."""

    def __init__(self, monkeypatch, at, action):
        self.count = 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name), at, action))

    def wrap(self, function, at, action):
        def call(*args, **kwargs):
            self.count += 1
            if self.count - 1 == at:
                action()
            return function(*args, **kwargs)

        return call


def count_repair_calls(made):
    with pytest.MonkeyPatch.context() as patch:
        counter = Interruption(patch, -1, None)
        assert repair_pack(made / "pack", source=made / "source").ok
    assert is_as_before(made)
    return counter.count


def test_killed_at_any_call_repair_can_be_run_again(made):
    damage_everything(made)
    total = count_repair_calls(made)
    assert total > 20
    for at in range(total):
        damage_everything(made)
        child = os.fork()
        if child == 0:
            try:
                with pytest.MonkeyPatch.context() as patch:
                    Interruption(patch, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
                    repair_pack(made / "pack", source=made / "source")
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert repair_pack(made / "pack", source=made / "source").ok
        assert is_as_before(made)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_call_that_fails_makes_nothing_worse(made, code):
    damage_everything(made)
    total = count_repair_calls(made)

    def fail():
        raise OSError(code, os.strerror(code))

    for at in range(total):
        damage_everything(made)
        with pytest.MonkeyPatch.context() as patch:
            Interruption(patch, at, fail)
            with contextlib.suppress(StorageError, NotFound, CorruptPack):
                repair_pack(made / "pack", source=made / "source")
        assert not list((made / "pack").glob("shard-00001.pace.partial"))
        assert repair_pack(made / "pack", source=made / "source").ok
        assert is_as_before(made)


def paceline(folder, *args):
    return without_torch("store", *args, cwd=folder)


def test_the_verb_repairs_and_reports(made):
    name = damage_everything(made)
    done = paceline(made, "repair", "pack", "--source", "source", "--dry-run", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["dry_run"]
    done = paceline(made, "repair", "pack", "--json")
    assert done.returncode == 4
    assert not json.loads(done.stdout)["ok"]
    done = paceline(made, "repair", "pack", "--source", "source")
    assert done.returncode == 0, done.stderr
    assert b"recovered from source" in done.stdout
    assert paceline(made, "repair", "pack").stdout == b"the pack is intact\n"
    assert name
    done = paceline(made, "verify", "pack", "--shards")
    assert done.returncode == 0
    assert b"all intact" in done.stdout


def test_damage_beside_the_samples_is_seen_by_digests_alone_and_repaired(made):
    index = IndexFile.open(made / "pack")
    extents = next(index.extents_by_shard())
    gap = int(index.offsets[extents[0]]) + int(index.stored_lengths[extents[0]])
    assert gap % 64
    flip(shards(made)[0], gap)
    with open_pack(made / "pack") as pack:
        assert list(pack.verify()) == []
    count, damaged = verify_files(made / "pack")
    assert count == len(shards(made))
    assert [problem.what for problem in damaged] == ["shard-00000.pace is damaged"]
    assert paceline(made, "verify", "pack", "--shards").returncode == 4
    assert repair_pack(made / "pack").ok
    assert is_as_before(made)


@pytest.mark.parametrize("origin", ["source", "replica", None])
def test_chunks_and_encoded_samples_are_repaired(rich, origin):
    index = IndexFile.open(rich / "pack")
    places = {"source": rich / "source", "replica": rich / "copy"}
    given = {origin: places[origin]} if origin else {}
    encoded = index.codecs.tolist().index(1)
    last = len(index.offsets) - 1
    for extent in (encoded, last):
        flip(rich / "pack" / f"shard-{index.shards[extent]:05d}.pace", int(index.offsets[extent]))
    missing = next(k for k in range(3, 6) if k not in index.shards[[encoded, last]])
    (rich / "pack" / f"shard-{missing:05d}.pace").unlink()
    report = repair_pack(rich / "pack", **given)
    assert report.ok, report.lost
    assert is_as_before(rich)
    assert {finding.recovered_from for finding in report.repaired} == {origin or "parity"}


def test_parity_makes_each_lost_shard_again(rich):
    for shard in shards(rich):
        shard.unlink()
        assert repair_pack(rich / "pack").ok
        assert is_as_before(rich)


def test_of_two_lost_shards_of_a_group_one_must_come_from_elsewhere(rich):
    for shard in shards(rich)[:2]:
        shard.unlink()
    report = repair_pack(rich / "pack")
    assert [finding.what for finding in report.lost] == ["shard 0", "shard 1"]
    shutil.copy(rich / "copy" / "shard-00001.pace", rich / "pack")
    assert repair_pack(rich / "pack").ok
    assert is_as_before(rich)


def test_different_places_of_one_group_repair_each_other(rich):
    index = IndexFile.open(rich / "pack")
    firsts = list(index.extents_by_shard())
    first, second = int(firsts[0][0]), int(firsts[1][-1])
    flip(shards(rich)[0], int(index.offsets[first]))
    flip(shards(rich)[1], int(index.offsets[second]) + int(index.stored_lengths[second]) - 1)
    assert repair_pack(rich / "pack").ok
    assert is_as_before(rich)


def test_the_last_shard_comes_from_a_copy_and_then_parity_repairs_the_first(rich):
    shards(rich)[0].unlink()
    shards(rich)[1].unlink()
    (rich / "copy" / "shard-00000.pace").unlink()
    report = repair_pack(rich / "pack", replica=rich / "copy")
    assert report.ok
    assert [finding.recovered_from for finding in report.repaired] == ["replica", "parity"]
    assert repair_pack(rich / "copy").ok
    assert is_as_before(rich)


@pytest.mark.parametrize("how", ["flip", "cut", "missing"])
def test_parity_files_are_made_anew(rich, how):
    parity = rich / "pack" / "parity-00001.pace"
    if how == "flip":
        flip(parity, 4000)
    elif how == "cut":
        os.truncate(parity, 70)
    else:
        parity.unlink()
    assert [problem.what for problem in verify_files(rich / "pack")[1]] == [
        "parity-00001.pace is damaged"
    ]
    assert repair_pack(rich / "pack", dry_run=True).ok
    report = repair_pack(rich / "pack")
    assert [finding.what for finding in report.repaired] == ["parity file 1"]
    assert is_as_before(rich)


def test_a_damaged_shard_and_its_damaged_parity(rich):
    index = IndexFile.open(rich / "pack")
    flip(shards(rich)[0], int(index.offsets[next(index.extents_by_shard())[0]]))
    (rich / "pack" / "parity-00000.pace").unlink()
    report = repair_pack(rich / "pack")
    assert sorted(finding.file for finding in report.lost) == [
        "parity-00000.pace",
        "shard-00000.pace",
    ]
    assert not list((rich / "pack").glob("*.partial"))
    assert repair_pack(rich / "pack", source=rich / "source").ok
    assert is_as_before(rich)


def test_a_pack_of_version_1_is_repaired(root, tmp_path):
    for name in ("pack", "copy"):
        shutil.copytree(root / "tests" / "golden" / "pack-v1", tmp_path / name)
    index = IndexFile.open(tmp_path / "pack")
    extent = int(index.lengths.argmax())
    flip(tmp_path / "pack" / f"shard-{index.shards[extent]:05d}.pace", int(index.offsets[extent]))
    (tmp_path / "pack" / f"shard-{1 - min(index.shards[extent], 1):05d}.pace").unlink()
    assert verify_files(tmp_path / "pack") == (0, [])
    assert repair_pack(tmp_path / "pack", replica=tmp_path / "copy").ok
    assert is_as_before(tmp_path)
