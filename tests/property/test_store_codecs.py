"""Compressed samples: every codec, shuffled or not, gives back what was packed, on every path."""

import contextlib
import io
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline import store
from paceline.core.errors import CorruptPack, UsageError
from paceline.native import EncodedSamples, SampleEncoding, decode_s, encode, encoding_of
from paceline.store import PackOptions, open_pack
from paceline.store.care.repair import repair_pack
from paceline.store.format.header import parse_sections, resealed
from paceline.store.format.index import IndexFile
from paceline.store.format.layout import Section
from paceline.store.read.describe import describe_pack
from paceline.store.read.extract import extract
from paceline.store.write import encoder as encoder_module
from paceline.store.write import encoding as encoding_module

CODECS = ("lz4", "zstd", "zstd-dict")


class Stop(Exception):
    """Stands for whatever ends a run early."""


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def records(count):
    """Return small samples that are alike, and that no codec makes much smaller one by one."""
    return {
        f"{k % 3}/{k:05d}": f'{{"id": {k * 7919 % 10007}, "kind": "a common word"}}'.encode()
        for k in range(count)
    }


def arrays(count):
    generator = np.random.default_rng(3)
    return {
        f"{k:03d}.npy": npy(generator.normal(100, 0.01, 500).astype("<f4")) for k in range(count)
    }


def kinds(path):
    """Return how the samples of a pack are stored: codec, and log2 of the bytes of an element."""
    with open_pack(path) as pack:
        return {encoding_of(code) for code in np.unique(pack.index.codecs).tolist()}


def content(path):
    with open_pack(path) as pack:
        return {name: pack.read(k) for k, name in enumerate(pack.names)}


def memory():
    """Return a folder where a sync costs nothing."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


texts = st.integers(0, 400).map(lambda count: b"the same words " * count)
tables = st.tuples(
    st.sampled_from(["<f2", ">f4", "<f8", "<i2", "u1", "<c8"]), st.integers(0, 300)
).map(lambda drawn: npy(np.arange(drawn[1]).astype(drawn[0])))
bodies = st.binary(max_size=100) | texts | tables
samples = st.dictionaries(st.integers(0, 999).map(lambda k: f"{k:03d}"), bodies, max_size=15)
compressions = st.builds(
    PackOptions,
    codec=st.sampled_from(CODECS),
    codec_level=st.sampled_from([1, 3, 19]),
    shuffle=st.sampled_from(["auto", "none", "2", "4", "8"]),
    shard_bytes=st.sampled_from([640, 20_000]),
)


@settings(max_examples=examples(30), deadline=None)
@given(first=samples, options=compressions, more=samples, others=compressions)
def test_packs_give_back_what_went_in_on_every_path(first, options, more, others):
    more = {name: body for name, body in more.items() if name not in first}
    with tempfile.TemporaryDirectory(dir=memory()) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder_module, "train_dictionary", lambda *_: b"the same words " * 20)
        patch.setattr(encoder_module, "_MIN_DICTIONARY_BYTES", 0)
        path = Path(folder, "pack")
        store.pack(store.Samples(first.items()), path, options=options)
        if more:
            store.append(store.Samples(more.items()), path, options=others)
        expected = dict(sorted((first | more).items()))
        with open_pack(path) as pack:
            numbers = range(len(pack))
            assert list(pack.names) == list(expected)
            assert [pack.read(k) for k in numbers] == list(expected.values())
            batch, _ = pack.read_batch(numbers)
            assert batch.tobytes() == b"".join(expected.values())
            assert [bytes(view) for view in pack.views(numbers)] == list(expected.values())
            assert list(pack.verify()) == []
            extract(pack, Path(folder, "files"))
            stored = int(pack.index.stored_lengths.sum())
            assert stored <= sum(map(len, expected.values()))
        for name, body in expected.items():
            assert Path(folder, "files", name).read_bytes() == body


@pytest.mark.parametrize("codec", CODECS)
def test_floats_are_shuffled_where_that_makes_them_smaller(tmp_path, codec):
    whole = arrays(20) | {"text": b"words, and again words " * 100}
    for shuffle in ("auto", "none"):
        options = PackOptions(codec=codec, shuffle=shuffle)
        path = tmp_path / shuffle
        summary = store.pack(store.Samples(whole.items()), path, options=options)
        assert content(path) == dict(sorted(whole.items()))
        assert summary.choice.chosen.decode_bytes_per_s > 0
    assert (codec, 2) in kinds(tmp_path / "auto") or ("zstd", 2) in kinds(tmp_path / "auto")
    assert {bits for _, bits in kinds(tmp_path / "none")} == {0}
    sizes = [describe_pack(open_pack(tmp_path / name)).stored_bytes for name in ("auto", "none")]
    assert sizes[0] < 0.85 * sizes[1]


def test_other_elements_are_shuffled_as_asked_for(tmp_path):
    raw = np.linspace(1, 2, 4000).tobytes()  # without a header
    for shuffle in ("auto", "8"):
        options = PackOptions(codec="zstd", shuffle=shuffle)
        store.pack(store.Samples([("raw", raw)]), tmp_path / shuffle, options=options)
        assert content(tmp_path / shuffle) == {"raw": raw}
    assert kinds(tmp_path / "auto") == {("zstd", 0)}
    assert kinds(tmp_path / "8") == {("zstd", 3)}


def test_what_version_2_knows_is_written_as_before(tmp_path):
    body = {"a": b"text " * 100}
    for codec, version in (("zstd", 2), ("lz4", 3)):
        store.pack(store.Samples(body.items()), tmp_path / codec, options=PackOptions(codec=codec))
        with open_pack(tmp_path / codec) as pack:
            assert pack.index.version == version
            assert pack.index.dictionary == b""


def test_incompressible_samples_stay_as_they_are(tmp_path):
    noise = {f"{k}": np.random.default_rng(k).bytes(3000) for k in range(5)}
    for codec in CODECS:
        path = tmp_path / codec
        store.pack(store.Samples(noise.items()), path, options=PackOptions(codec=codec))
        assert kinds(path) == {("none", 0)}
        with open_pack(path) as pack:
            assert pack.view(0).obj is not None  # of the mapping, not of a copy
            assert (pack.index.version, pack.index.dictionary) == (2, b"")


# The dictionary


def test_a_dictionary_makes_small_alike_samples_smaller(tmp_path):
    whole = records(2000)
    factors = {}
    for codec in ("zstd", "zstd-dict"):
        options = PackOptions(codec=codec)
        summary = store.pack(store.Samples(whole.items()), tmp_path / codec, options=options)
        assert content(tmp_path / codec) == dict(sorted(whole.items()))
        factors[codec] = summary.capacity_factor
        stat = describe_pack(open_pack(tmp_path / codec))
        assert stat.dictionary_bytes == summary.dictionary_bytes
        assert stat.capacity_factor == summary.capacity_factor
        assert (stat.decode_bytes_per_s > 0) == (stat.codecs.keys() != {"none"})
    assert factors["zstd-dict"] > 1.5 * factors["zstd"]
    assert IndexFile.open(tmp_path / "zstd").dictionary == b""


def test_appended_samples_use_the_dictionary_that_is_there(tmp_path):
    whole = records(2000)
    options = PackOptions(codec="zstd-dict")
    store.pack(store.Samples(whole.items()), tmp_path / "pack", options=options)
    dictionary = IndexFile.open(tmp_path / "pack").dictionary
    more = {f"new/{name}": body for name, body in records(30).items()}
    store.append(store.Samples(more.items()), tmp_path / "pack", options=options)
    store.append(store.Samples([("plain", b"no codec")]), tmp_path / "pack")
    index = IndexFile.open(tmp_path / "pack")
    assert index.dictionary == dictionary != b""
    assert content(tmp_path / "pack") == dict(
        sorted((whole | more | {"plain": b"no codec"}).items())
    )
    with open_pack(tmp_path / "pack") as pack:
        extent = pack.extents(pack.find("new/0/00000"))[0]
        assert encoding_of(extent.codec) == ("zstd-dict", 0)
    # A pack without one gets one.
    store.pack(store.Samples([("first", b"1")]), tmp_path / "late")
    store.append(store.Samples(whole.items()), tmp_path / "late", options=options)
    assert IndexFile.open(tmp_path / "late").dictionary != b""
    assert content(tmp_path / "late") == dict(sorted((whole | {"first": b"1"}).items()))


@pytest.mark.parametrize("lost", [False, True])
def test_a_killed_packing_goes_on_with_its_dictionary(tmp_path, monkeypatch, lost):
    monkeypatch.setattr(encoding_module, "LEARNING_BYTES", 40_000)
    whole = records(1500)
    for name, body in whole.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes(body)
    options = PackOptions(codec="zstd-dict", shard_bytes=4096)
    monkeypatch.setattr("paceline.store.write.sources.folder.BATCH_SAMPLES", 200)
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "whole", options=options)

    def stop(progress):
        if progress.sample_count >= 1400:
            raise Stop

    with pytest.raises(Stop):
        store.pack(
            store.Folder(tmp_path / "source"), tmp_path / "pack", options=options, on_progress=stop
        )
    kept = tmp_path / "pack.partial" / encoder_module.DICTIONARY_NAME
    if lost:
        kept.write_bytes(kept.read_bytes()[:-9])
    summary = store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack", options=options)
    assert (summary.reused_sample_count > 0) != lost
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "pack" / file.name).read_bytes() == file.read_bytes()
    assert len(list((tmp_path / "pack").iterdir())) == len(list((tmp_path / "whole").iterdir()))


def test_a_dictionary_is_learned_after_large_samples_too(tmp_path):
    first = {"empty": b"", "large": bytes(range(256)) * 600}
    whole = first | records(2000)
    options = PackOptions(codec="zstd-dict", shard_bytes=64 << 10)
    summary = store.pack(store.Samples(whole.items()), tmp_path / "pack", options=options)
    assert content(tmp_path / "pack") == dict(sorted(whole.items()))
    assert summary.dictionary_bytes > 0


# Damage


def flip(path, extent, at):
    shard = path / f"shard-{extent.shard:05d}.pace"
    data = bytearray(shard.read_bytes())
    data[extent.offset + at] ^= 0x10
    shard.write_bytes(data)


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_compressed_samples_are_named_and_repaired(tmp_path, codec):
    whole = records(1500) | arrays(3)
    for name, body in whole.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes(body)
    options = PackOptions(codec=codec, shard_bytes=16_000, parity_group=3)
    path = tmp_path / "pack"
    store.pack(store.Folder(tmp_path / "source"), path, options=options)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with open_pack(path) as pack:
        encoded = [k for k in range(len(pack)) if pack.extents(k)[0].codec]
        bad = encoded[:: max(len(encoded) // 3, 1)]
        extents = [pack.extents(k)[0] for k in bad]
    for origin in ({"source": tmp_path / "source"}, {}):  # else by parity
        for extent in extents if origin else extents[:1]:
            flip(path, extent, extent.stored_length // 2)
        with open_pack(path) as pack:
            damaged = bad if origin else bad[:1]
            found = [problem.what for problem in pack.verify()]
            assert [int(what.split()[1]) for what in found] == sorted(damaged)
            for k in damaged:
                with pytest.raises(CorruptPack, match=f"sample {k} "):
                    pack.read(k)
        assert repair_pack(path, **origin).ok
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "pack"
    options = PackOptions(codec="zstd-dict")
    store.pack(store.Samples((records(1500) | arrays(2)).items()), path, options=options)
    return path


def changed(good, target, change):
    """Copy a pack with a change of its index: a function of its bytes and their sections."""
    target.mkdir()
    for file in good.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    index = bytearray((good / "index.pace").read_bytes())
    change(index, parse_sections(bytes(index)))
    (target / "index.pace").write_bytes(resealed(bytes(index)))
    return target


@pytest.mark.parametrize("code", [0x04, 0x0F, 0x10, 0x30, 0x41, 0x81, 0xFF])
def test_codes_that_no_version_has_are_refused(good, tmp_path, code):
    def change(index, places):
        index[places[Section.CODECS].offset + 7] = code

    path = changed(good, tmp_path / "pack", change)
    with open_pack(path) as pack:
        with pytest.raises(UsageError, match=f"extent 7 has codec {code}, which is unknown"):
            pack.read(7)
        assert pack.read(8)
    with pytest.raises(UsageError, match="newer"):
        IndexFile.open(path)


@pytest.mark.parametrize("code", [0x01, 0x02, 0x13, 0x32])
def test_a_wrong_codec_is_damage_of_the_sample(good, tmp_path, code):
    def change(index, places):
        index[places[Section.CODECS].offset + 7] = code

    with open_pack(changed(good, tmp_path / "pack", change)) as pack:
        with pytest.raises(CorruptPack, match="sample 7 "):
            pack.read(7)
        assert [problem.what.split()[1] for problem in pack.verify()] == ["7"]


def test_a_dictionary_that_cannot_be_is_refused(good, tmp_path):
    def without(index, places):
        struct.pack_into("<II", index, 64 + 32 * list(places).index(27), 999, 0)

    def empty(index, places):
        struct.pack_into("<Q", index, 64 + 32 * list(places).index(27) + 16, 0)

    def other(index, places):
        place = places[27]
        index[place.offset + 8 : place.offset + place.length] = bytes(place.length - 8)

    def content(index, places):  # alike enough to be taken for one
        place = places[27]
        end = place.offset + place.length
        index[end - 400 : end] = index[end - 400 : end][::-1]

    with open_pack(changed(good, tmp_path / "none", without)) as pack:
        coded = int(np.flatnonzero(pack.index.codecs)[0])
        with pytest.raises(CorruptPack, match="needs a dictionary"):
            pack.read(coded)
    for name, change in (("empty", empty), ("other", other)):
        with pytest.raises(CorruptPack, match=r"section 2[67]"):
            open_pack(changed(good, tmp_path / name, change))
    with open_pack(changed(good, tmp_path / "content", content)) as pack:
        bad = {int(problem.what.split()[1]) for problem in pack.verify()}
        assert bad
        for k in range(len(pack)):
            with contextlib.suppress(CorruptPack):
                assert pack.read(k) == open_pack(good).read(k)


@pytest.mark.parametrize(
    ("library", "package", "codec"),
    [("liblz4.so.1", "liblz4-1", "lz4"), ("libzstd.so.1", "libzstd1", "zstd-dict")],
)
def test_a_library_that_is_missing_is_said_with_its_package(tmp_path, library, package, codec):
    noise = np.random.default_rng(1).bytes(500)
    whole = {"noise": noise, "text": b"words, and words again " * 50}
    store.pack(store.Samples(whole.items()), tmp_path / "pack", options=PackOptions(codec=codec))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / library).write_bytes(b"no library")
    script = (
        "import sys\n"
        "from paceline.core.errors import Missing\n"
        "from paceline.store import open_pack\n"
        "pack = open_pack(sys.argv[1])\n"
        "assert len(pack.read(0)) == 500\n"
        "for act in (lambda: pack.read(1), lambda: pack.read_batch([0, 1]),\n"
        "            lambda: list(pack.verify())):\n"
        "    try:\n"
        "        act()\n"
        "    except Missing as problem:\n"
        "        print(problem)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "pack")],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path / "broken")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"apt-get install {package}") == 3


@pytest.mark.parametrize("codec", CODECS)
def test_the_time_to_decode_is_of_samples_that_can_be_decoded(codec):
    body = np.frombuffer(b"some words " * 500, np.uint8)
    begins, lengths = np.zeros(1, np.uint64), np.array([len(body)], np.uint64)
    dictionary = b"words " * 50
    encoded = encode(body, begins, lengths, SampleEncoding(codec=codec, dictionary=dictionary))
    assert encoding_of(int(encoded.codecs[0])) == (codec, 0)
    assert 0 <= decode_s(encoded, lengths, dictionary) < 1
    damaged = EncodedSamples(encoded.data, encoded.positions, encoded.lengths - 1, encoded.codecs)
    assert decode_s(damaged, lengths, dictionary) < 0
