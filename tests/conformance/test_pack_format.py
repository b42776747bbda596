"""What the writer writes is what the page of the format says, read by a parser of that page."""

import importlib.util
import io
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline import store
from paceline.native import codec_available
from paceline.store import PackOptions, open_pack
from paceline.store.write import encoder as encoder_module
from paceline.store.write.index import build as index_module
from paceline.store.write.index import name_table as table_module
from paceline.store.write.index import sorted_runs as runs_module
from paceline.store.write.index import stored as stored_module

_spec = importlib.util.spec_from_file_location(
    "pack_parser", Path(__file__).with_name("pack_parser.py")
)
pack_parser = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pack_parser)

parts = st.sampled_from([b"a", b"b", b"a-", b"a.", b"\xff", b"z" * 30]) | st.binary(
    min_size=1, max_size=12
).filter(lambda part: not {0, 47} & set(part) and part not in (b".", b".."))
names = st.lists(parts, min_size=1, max_size=4).map(b"/".join)
bodies = st.binary(max_size=200) | st.integers(0, 3000).map(lambda size: b"ab" * size)


@st.composite
def sample_sets(draw):
    """Samples in any order, none named like a folder."""
    drawn = draw(st.dictionaries(names, bodies, max_size=25))
    above = {name.rsplit(b"/", k)[0] for name in drawn for k in range(1, name.count(b"/") + 1)}
    kept = [(name, body) for name, body in drawn.items() if name not in above]
    return draw(st.permutations(kept))


codecs = st.sampled_from(
    [name for name in ("none", "zstd", "lz4", "zstd-dict") if codec_available(name)]
)
options = st.builds(
    PackOptions,
    shard_bytes=st.sampled_from([128, 640, 5000, 1 << 20]),
    codec=codecs,
    shuffle=st.sampled_from(["auto", "2", "4", "8"]),
    parity_group=st.sampled_from([0, 2, 3]),
)


def check(path, expected):
    """Compare a pack with what it should hold, by both readers."""
    parsed = pack_parser.ParsedPack(path, stored_module.MANY_SAMPLES)
    assert (
        dict(zip(parsed.names, map(parsed.read, range(len(parsed.names))), strict=True)) == expected
    )
    with open_pack(path) as pack:
        assert pack.identity == parsed.identity
        assert {n.encode("utf-8", "surrogateescape") for n in pack.names} == set(expected)
        for name, body in expected.items():
            assert pack.read(pack.find(name)) == body
        assert list(pack.verify()) == []
    assert not [entry for entry in path.iterdir() if entry.name.endswith(".partial")]
    return parsed


@pytest.fixture(params=[False, True], ids=["in memory", "in many runs"])
def few(request, monkeypatch):
    """Let runs, pieces of the merge and parts of the name table be tiny."""
    if request.param:
        monkeypatch.setattr(runs_module, "SORTED_RUN_SAMPLES", 3)
        monkeypatch.setattr(index_module, "BLOCK_SAMPLES", 4)
        monkeypatch.setattr(table_module, "BUCKET_SAMPLES", 2)
        monkeypatch.setattr(table_module, "_BLOCK_SLOTS", 8)
        monkeypatch.setattr(stored_module, "MANY_SAMPLES", 4)


@pytest.fixture
def _dictionary(monkeypatch):
    """Have so few samples a dictionary: any bytes are one."""
    monkeypatch.setattr(encoder_module, "train_dictionary", lambda *_: b"ab" * 9 + bytes(40))
    monkeypatch.setattr(encoder_module, "_MIN_DICTIONARY_BYTES", 0)


@pytest.mark.usefixtures("few", "_dictionary")
@settings(max_examples=examples(60), deadline=None)
@given(samples=sample_sets(), options=options, cut=st.integers(0, 25))
def test_packs_are_as_the_page_says_also_when_appended_to(samples, options, cut):
    first, second = samples[:cut], samples[cut:]
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        path = Path(folder, "pack")
        store.pack(store.Samples(iter(first)), path, options=options)
        parsed = check(path, dict(first))
        classes = sorted({name.split(b"/")[0] for name, _ in first if b"/" in name})
        assert parsed.classes == classes
        if second and first:
            store.append(store.Samples(second), path, options=options)
            parsed = check(path, dict(samples))
            assert parsed.classes[: len(classes)] == classes
        for name, label in zip(parsed.names, parsed.sections[5].tolist(), strict=True):
            top = name.split(b"/")[0] if b"/" in name else None
            assert (parsed.classes[label] if label >= 0 else None) == top


def test_each_way_to_compress_is_as_the_page_says():
    path = Path(__file__).parents[1] / "golden" / "pack-v3-codecs"
    parsed = pack_parser.ParsedPack(path)
    assert {code & 15 for code in parsed.sections[16].tolist()} == {0, 1, 2, 3}
    assert {code >> 4 for code in parsed.sections[16].tolist()} == {0, 1, 2, 3}
    with open_pack(path) as pack:
        for number in range(len(pack)):
            assert pack.read(number) == parsed.read(number)


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_archives_of_all_formats(tmp_path, suffix):
    expected = {}
    for number, form in enumerate([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]):
        mode = "w:" + suffix.removeprefix("tar").removeprefix(".")
        with tarfile.open(tmp_path / f"{number}.{suffix}", mode, format=form) as archive:
            for k in range(20):
                name = f"./n{number}/{'deep/' * (k if form != tarfile.USTAR_FORMAT else 3)}é{k}"
                body = bytes([k]) * (k * 300)
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime, entry.mode = len(body), 1_700_000_000 + k, 0o640
                archive.addfile(entry, io.BytesIO(body))
                expected[name.removeprefix("./").encode()] = body
    store.pack(store.Archives(tmp_path.glob(f"*.{suffix}")), tmp_path / "pack")
    parsed = check(tmp_path / "pack", expected)
    assert set(parsed.sections[6].tolist()) == {0o100640}
    assert {t // 10**9 for t in parsed.sections[7].tolist()} == {
        1_700_000_000 + k for k in range(20)
    }


def _memory():
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
