"""An index with right checksums and wrong content: every door answers, or refuses with an error."""

import contextlib
import shutil
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline import store
from paceline.cli.app import main
from paceline.core.errors import CorruptPack, MemoryExceeded, NotFound, PacelineError
from paceline.native import encoding_of
from paceline.store import Loader, LoaderOptions, PackOptions, open_pack
from paceline.store.care.damage import verify_files
from paceline.store.care.repair import repair_pack
from paceline.store.format.header import parse_sections, resealed
from paceline.store.format.layout import COLUMN_TYPES, Section
from paceline.store.read.describe import describe_name, describe_pack
from paceline.store.read.extract import extract
from paceline.store.write import encoder
from paceline.store.write.index.stored import IndexLayout

BODIES = {
    "a/empty": b"",
    "a/large": bytes(range(256)) * 12,  # larger than a shard
    "a/text": b"some text\n" * 70,
    "b/c/deep": b"d" * 300,
    "root": b"r" * 65,
}
WILD = (
    0,
    1,
    2,
    5,
    63,
    64,
    65,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**62,
    2**63,
    2**64 - 64,
    2**64 - 1,
)
OF_A_PACK = [int(section) for section in Section if section not in (Section.FILES, Section.SOURCES)]
OF_VERSION_3 = {Section.BLOCK_SUMS, Section.DICTIONARY}
HEADER_FIELDS = {
    "samples": (24, "<Q"),
    "folders": (32, "<Q"),
    "shards": (40, "<I"),
    "classes": (44, "<I"),
}


def all_doors(path, place, more):
    """Return what a user may do with a pack, by name; each raises a PacelineError at most."""

    def read():
        with open_pack(path) as pack:
            for name in list(pack.names):
                with contextlib.suppress(NotFound):  # names are out of order
                    pack.read(pack.find(name))
            pack.read_batch(range(len(pack)))
            pack.views(range(len(pack)))
            pack.labels_of(range(len(pack)))
            return list(pack.shards), list(pack.lengths), pack.class_names

    def ls():
        with open_pack(path, index_only=True) as pack:
            return [entries for _, entries in pack.walk()]

    def verify():
        with open_pack(path) as pack:
            list(pack.verify())
        verify_files(path)

    def stat():
        with open_pack(path, index_only=True) as pack:
            describe_pack(pack)
            for name in (*BODIES, "a", "b/c"):
                with contextlib.suppress(NotFound):
                    describe_name(pack, name)

    def unpack():
        shutil.rmtree(place / "out", ignore_errors=True)
        with open_pack(path) as pack:
            extract(pack, place / "out")

    def load():
        options = LoaderOptions(shuffle="none", workers=1, on_corrupt="skip")
        with (
            open_pack(path) as pack,
            Loader(pack, 2, rank=0, world_size=1, options=options) as loader,
        ):
            for _ in loader:
                pass

    return {
        "open": lambda: open_pack(path).close(),
        "read": read,
        "ls": ls,
        "verify": verify,
        "stat": stat,
        "extract": unpack,
        "load": load,
        "repair": lambda: repair_pack(path, source=place / "source"),
        "append": lambda: store.append(more, path, options=PackOptions(shard_bytes=1024)),
    }


@pytest.fixture(scope="module", params=[2, 3])
def place(tmp_path_factory, request):
    """Return a folder with a pack in each version of the format."""
    place = tmp_path_factory.mktemp("hostile")
    for name, body in BODIES.items():
        path = place / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    codec = "zstd" if request.param == 2 else "zstd-dict"
    options = PackOptions(shard_bytes=1024, codec=codec, parity_group=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IndexLayout, "needs_version_3", request.param == 3)
        patch.setattr(encoder, "train_dictionary", lambda *_: b"some text\n" * 9)  # any will do
        patch.setattr(encoder, "_MIN_DICTIONARY_BYTES", 0)
        store.pack(store.Folder(place / "source"), place / "good", options=options)
    index = (place / "good" / "index.pace").read_bytes()
    missing = OF_VERSION_3 if request.param == 2 else set()
    assert set(parse_sections(index)) == set(OF_A_PACK) - missing
    return place


def broken(index, change):
    """Return the index with a change of a section's or the header's values, and right checksums."""
    content = bytearray(index)
    where, position, value, width = change
    if isinstance(where, tuple):  # the width of that section's entries
        numbers = list(parse_sections(content))
        if where[0] in numbers:
            struct.pack_into("<I", content, 64 + 32 * numbers.index(where[0]) + 28, value % 9)
        return resealed(bytes(content))
    if isinstance(where, str):
        offset, form = HEADER_FIELDS[where]
        struct.pack_into(form, content, offset, value % (1 << 32 if form == "<I" else 1 << 64))
        return resealed(bytes(content))
    place = parse_sections(content).get(where)
    if place is None or place.length < width:
        return index
    at = place.offset + position % (place.length // width) * width
    content[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    return resealed(bytes(content))


changes = st.tuples(
    st.sampled_from([*OF_A_PACK, *HEADER_FIELDS, *((int(section),) for section in COLUMN_TYPES)]),
    st.integers(0, 200),
    st.one_of(st.sampled_from(WILD), st.integers(0, 400)),
    st.sampled_from([1, 4, 8]),
)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(change=changes, second=st.none() | changes)
def test_no_door_ends_with_anything_but_an_error_of_ours(place, change, second):
    index = broken((place / "good" / "index.pace").read_bytes(), change)
    if second is not None:
        index = broken(index, second)
    more = store.Samples([("new/sample", b"new")])
    pack = place / "pack"
    for act in all_doors(pack, place, more).values():
        shutil.rmtree(pack, ignore_errors=True)
        shutil.copytree(place / "good", pack)
        (pack / "index.pace").write_bytes(index)
        with contextlib.suppress(PacelineError):
            act()


def poke(place, section, position, value, width):
    shutil.rmtree(place / "pack", ignore_errors=True)
    shutil.copytree(place / "good", place / "pack")
    index = (place / "good" / "index.pace").read_bytes()
    width = parse_sections(index)[section].width or width
    (place / "pack" / "index.pace").write_bytes(
        broken(index, (int(section), position, value, width))
    )
    return place / "pack"


@pytest.mark.parametrize(
    ("section", "position", "value", "width"),
    [
        (Section.NAME_OFFSETS, 2, 2**40, 8),
        (Section.FIRST_EXTENTS, 1, 9, 8),
        (Section.LABELS, 0, 77, 4),
        (Section.SHARDS, 1, 99, 4),
        (Section.FOLDER_OFFSETS, 1, 2**50, 8),
        (Section.CLASS_OFFSETS, 1, 2**50, 8),
        (Section.PARITY, 1, 2**60, 8),
    ],
)
def test_appending_to_an_index_that_contradicts_itself_exits_with_4(
    place, section, position, value, width, capsys, monkeypatch
):
    pack = poke(place, section, position, value, width)
    before = {path.name: path.read_bytes() for path in pack.iterdir()}
    monkeypatch.setattr(
        "sys.argv", ["paceline", "pack", "--append", str(place / "source"), str(pack)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == CorruptPack.exit_code
    said = capsys.readouterr().err
    assert "index.pace" in said
    assert "Traceback" not in said
    assert {path.name: path.read_bytes() for path in pack.iterdir()} == before


def test_a_sample_that_claims_too_much_is_named_and_can_be_skipped(place):
    with open_pack(place / "good") as pack:
        is_narrow = pack.index.version == 3
        sample = pack.find("a/text")
        assert encoding_of(pack.extents(sample)[0].codec)[0].startswith("zstd")
        extent = int(pack.index.first_extents[sample])
    claim, why = 1 << 30, "claims 1073741824 bytes.*at most"
    if is_narrow:  # the most that 2 bytes can claim
        claim, why = (1 << 16) - 1, "zstd"
    path = poke(place, Section.LENGTHS, extent, claim, 8)
    with open_pack(path) as pack:
        with pytest.raises(CorruptPack, match=rf"'a/text'.*{why}") as caught:
            pack.read_batch(range(len(pack)))
        assert ("index.pace" in caught.value.where) != is_narrow
        assert [problem.what for problem in pack.verify()] == [caught.value.what]
        options = LoaderOptions(shuffle="none", workers=1, on_corrupt="skip")
        with Loader(pack, 5, rank=0, world_size=1, options=options) as loader:
            ((bodies, _),) = list(loader)
        assert len(bodies) == 4
        assert loader.stats.skipped_names == ["a/text"]


def test_a_batch_beyond_the_memory_that_is_free_is_an_error_that_says_so(tmp_path):
    source = store.Samples([("huge", b"x" * 1000), ("small", b"y" * 64)])
    store.pack(source, tmp_path / "pack")
    with (tmp_path / "pack" / "shard-00000.pace").open("r+b") as shard:
        shard.truncate(1 << 38)  # a file with a hole
    index = (tmp_path / "pack" / "index.pace").read_bytes()
    content = bytearray(index)
    places = parse_sections(content)
    struct.pack_into("<Q", content, places[Section.LENGTHS].offset, (1 << 38) - 64)
    struct.pack_into("<Q", content, places[Section.SHARD_LENGTHS].offset, 1 << 38)
    (tmp_path / "pack" / "index.pace").write_bytes(resealed(bytes(content)))
    with open_pack(tmp_path / "pack") as pack:
        for read in (lambda: pack.read(0), lambda: pack.read_batch([0, 1])):
            with pytest.raises(
                MemoryExceeded, match=r"sample 0 'huge' is the largest.*274877906880"
            ):
                read()
        assert pack.read(1) == b"y" * 64
        options = LoaderOptions(shuffle="none", workers=1, on_corrupt="skip")
        with (
            Loader(pack, 2, rank=0, world_size=1, options=options) as loader,
            pytest.raises(MemoryExceeded, match="sample 0 'huge' is the largest"),
        ):
            next(iter(loader))
