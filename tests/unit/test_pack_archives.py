"""Packing tar archives and WebDataset shards: what is taken, and what is refused."""

import bz2
import gzip
import io
import lzma
import tarfile
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from paceline import store
from paceline.core.errors import NotFound, StorageError, UsageError
from paceline.store import PackOptions, open_pack
from paceline.store.write import options as limits_module
from paceline.store.write.sources import archives, member_classes, tar


def write_tar(path, members, **kwargs):
    """Write an archive of (name, body) pairs and of whole `TarInfo`s."""
    with tarfile.open(path, "w", **kwargs) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            name, body = member
            entry = tarfile.TarInfo(name)
            entry.size = len(body)
            archive.addfile(entry, io.BytesIO(body))
    return path


def entry_of(name, kind, **fields):
    entry = tarfile.TarInfo(name)
    entry.type = kind
    for field, value in fields.items():
        setattr(entry, field, value)
    return entry


@pytest.mark.parametrize("name", ["../up", "a/../../up", "/etc/passwd", "a/..", "..", "//abs"])
def test_names_that_lead_out_are_refused(tmp_path, name):
    path = write_tar(tmp_path / "a.tar", [("fine", b"1"), (name, b"2")])
    with pytest.raises(UsageError, match="cannot name a sample"):
        store.pack(store.Archives(path), tmp_path / "pack")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tar"]


def test_a_name_with_nul_is_refused(tmp_path):
    entry = tarfile.TarInfo("x" * 120)
    entry.pax_headers = {"path": "a\0b"}
    write_tar(tmp_path / "a.tar", [entry], format=tarfile.PAX_FORMAT)
    with pytest.raises(UsageError, match="cannot name a sample"):
        store.pack(store.Archives(tmp_path / "a.tar"), tmp_path / "pack")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (tarfile.SYMTYPE, "a symbolic link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.FIFOTYPE, "a named pipe"),
        (b"Z", "unknown kind"),
    ],
)
def test_what_is_neither_file_nor_folder_is_refused(tmp_path, kind, text):
    path = write_tar(tmp_path / "a.tar", [entry_of("odd", kind, linkname="target")])
    with pytest.raises(UsageError, match=rf"a kind that cannot be packed.*a\.tar.*odd.*{text}"):
        store.pack(store.Archives(path), tmp_path / "pack")


def link_to(target, name, **fields):
    return entry_of(name, tarfile.LNKTYPE, linkname=target, **fields)


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_hard_link_has_the_bytes_of_the_file_that_it_leads_to(tmp_path, monkeypatch, kind, form):
    monkeypatch.setattr(archives, "BATCH_BYTES", 1000)
    monkeypatch.setattr(limits_module, "BATCH_BYTES", 1000)
    long = "d" * 90 if form == tarfile.USTAR_FORMAT else "d" * 120 + "/" + "e" * 120
    members = [
        link_to("behind", "ahead", mtime=77, mode=0o600),
        ("file", b"body"),
        link_to("./file", "link"),
        link_to("link", "link to a link"),
        ("behind", b"b" * 5000),
        ("empty", b""),
        link_to("empty", "empty too"),
        ("between", b"x" * 700),
        (long, b"long"),
        link_to(long, "to a long name"),
        ("last", b"z"),
    ]
    path = tmp_path / f"a.{kind}"
    with tarfile.open(path, "w:gz" if kind.endswith("gz") else "w", format=form) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                entry = tarfile.TarInfo(member[0])
                entry.size = len(member[1])
                archive.addfile(entry, io.BytesIO(member[1]))
    summary = store.pack(store.Archives(path), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        bodies = {name: pack.read(k) for k, name in enumerate(pack.names)}
        assert list(pack.verify()) == []
        assert pack.mtimes_ns[pack.find("ahead")] == 77_000_000_000
        assert pack.modes[pack.find("ahead")] == 0o100600
    assert summary.sample_count == len(members) == len(bodies)
    assert bodies["ahead"] == bodies["behind"] == b"b" * 5000
    assert bodies["link"] == bodies["link to a link"] == bodies["file"] == b"body"
    assert bodies["empty too"] == b""
    assert bodies["to a long name"] == b"long"
    assert (bodies["between"], bodies["last"]) == (b"x" * 700, b"z")


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([("x", b"1"), link_to("absent", "odd")], "leads to 'absent', which is no file"),
        ([link_to("odd", "odd")], "leads back to itself"),
        ([link_to("other", "odd"), link_to("odd", "other")], "leads back to itself"),
        ([entry_of("d/", tarfile.DIRTYPE), link_to("d", "odd")], "leads to 'd', which is no file"),
        ([link_to("next", "odd"), link_to("absent", "next")], "leads to 'absent'"),
    ],
)
def test_a_hard_link_that_leads_to_no_file_is_refused(tmp_path, members, text):
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(UsageError, match=rf"link leads to no file.*a\.tar.*odd.*{text}"):
        store.pack(store.Archives(path), tmp_path / "pack")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.tar"]


def test_a_hard_link_stays_within_its_archive_and_its_group(tmp_path):
    first = [("a.jpg", b"image"), ("a.cls", b"7"), ("b.jpg", b"other"), link_to("a.cls", "b.cls")]
    one = write_tar(tmp_path / "1.tar", first)
    store.pack(store.Archives(one), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert (list(pack.names), pack.class_names[7:]) == (["a.jpg", "b.jpg"], ("7",))
        assert pack.labels.tolist() == [7, 7]
    two = write_tar(tmp_path / "2.tar", [("c", b"c"), link_to("a.jpg", "d")])
    with pytest.raises(UsageError, match=r"no file of the archive.*2\.tar.*'a\.jpg'"):
        store.pack(store.Archives([one, two]), tmp_path / "other")


def test_an_archive_that_looks_like_a_webdataset_is_said_to_be_split(tmp_path, caplog):
    members = [("1.jpg", b"a"), ("1.json", b"{}"), ("2.jpg", b"b"), ("2.json", b"{}")]
    store.pack(store.Archives(write_tar(tmp_path / "a.tar", members)), tmp_path / "pack")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "each member becomes a sample of its own (1.jpg, 1.json)" in said
    caplog.clear()
    frames = [(f"f.{k}.png", b"x") for k in range(3)]
    store.pack(store.Archives(write_tar(tmp_path / "b.tar", frames)), tmp_path / "other")
    assert not caplog.records


def test_names_are_normalised_and_folders_kept(tmp_path):
    members = [
        entry_of("./", tarfile.DIRTYPE),
        entry_of("./empty/within/", tarfile.DIRTYPE),
        ("./a//b/./c", b"1"),
        ("d", b"2"),
    ]
    store.pack(store.Archives(write_tar(tmp_path / "a.tar", members)), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert list(pack.names) == ["a/b/c", "d"]
        assert list(pack.folder_names) == ["a", "a/b", "empty", "empty/within"]
        assert pack.class_names == ("a", "empty")
        assert pack.labels.tolist() == [0, -1]


def test_two_samples_of_one_name_are_refused(tmp_path):
    one = write_tar(tmp_path / "a.tar", [("x/y", b"1"), ("x/z", b"1")])
    two = write_tar(tmp_path / "b.tar", [("./x/y", b"2")])
    with pytest.raises(UsageError, match=r"two samples have one name.*x/y"):
        store.pack(store.Archives([one, two]), tmp_path / "pack")
    assert not (tmp_path / "pack").exists()
    three = write_tar(tmp_path / "c.tar", [("x", b"2")])
    with pytest.raises(UsageError, match="named like a folder"):
        store.pack(store.Archives([one, three]), tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "b.tar", "c.tar"]


def test_damage_is_named(tmp_path):
    path = write_tar(tmp_path / "a.tar", [("x", b"1" * 3000), ("y", b"2" * 3000)])
    whole = path.read_bytes()
    cases = {
        "truncated within a member": whole[:2000],
        "its end mark is missing": whole[: 2 * (512 + 3072)],
        "checksum": whole[:3584] + b"\1" + whole[3585:],
        "not hold a number": whole[: 3584 + 148] + b"zz" + whole[3584 + 150 :],
    }
    for k, (text, data) in enumerate(cases.items()):
        path.write_bytes(data)
        with pytest.raises(StorageError, match=rf"archive is damaged.*a\.tar.*{text}"):
            store.pack(store.Archives(path), tmp_path / f"pack{k}")
    write_tar(tmp_path / "b.tar", [("x" * 200, b"")], format=tarfile.PAX_FORMAT)
    data = (tmp_path / "b.tar").read_bytes()
    (tmp_path / "b.tar").write_bytes(data[:512] + b"9" + data[513:])
    with pytest.raises(StorageError, match="malformed"):
        store.pack(store.Archives(tmp_path / "b.tar"), tmp_path / "pack")
    compressed = tmp_path / "c.tar.gz"
    with tarfile.open(compressed, "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("x"))
    compressed.write_bytes(compressed.read_bytes()[:-20])
    with pytest.raises(StorageError, match=r"archive is damaged.*c\.tar\.gz"):
        store.pack(store.Archives(compressed), tmp_path / "pack")


def test_compressed_archives_are_checked_to_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tar, "READ_BYTES", 512)  # the end mark is not the stream's
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=0) as archive:
        entry = tarfile.TarInfo("x")
        entry.size = 3000
        archive.addfile(entry, io.BytesIO(b"1" * 3000))
    data = bytearray(path.read_bytes())
    data[data.index(b"1" * 3000) + 1500] ^= 1  # stored as it is: only the checksum tells
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"archive is damaged.*a\.tar\.gz.*CRC"):
        store.pack(store.Archives(path), tmp_path / "pack")


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        ("negative length", {"size": "-1"}),
        ("impossible time", {"mtime": "9" * 30}),
        ("malformed time", {"mtime": "1e30"}),
        ("malformed time", {"mtime": "inf"}),
        ("malformed time", {"mtime": "nan"}),
        ("malformed time", {"mtime": ".5"}),
    ],
)
def test_impossible_numbers_are_damage(tmp_path, text, headers):
    entry = entry_of("x", tarfile.REGTYPE, pax_headers=headers)
    path = write_tar(tmp_path / "a.tar", [entry, ("y", b"1")], format=tarfile.PAX_FORMAT)
    with pytest.raises(StorageError, match=rf"archive is damaged.*{text}"):
        store.pack(store.Archives(path), tmp_path / "pack")


def test_times_before_1970_are_kept(tmp_path):
    entry = entry_of("x", tarfile.REGTYPE, mtime=-5)
    store.pack(
        store.Archives(write_tar(tmp_path / "a.tar", [entry], format=tarfile.GNU_FORMAT)),
        tmp_path / "pack",
    )
    with open_pack(tmp_path / "pack") as pack:
        assert pack.mtimes_ns.tolist() == [-5_000_000_000]


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("1700000000.123456789", 1_700_000_000_123_456_789),
        ("1700000000.1", 1_700_000_000_100_000_000),
        ("1700000000.1234567899", 1_700_000_000_123_456_789),
        ("1700000000.", 1_700_000_000_000_000_000),
        ("-1.000000001", -1_000_000_001),
        ("9007199254.740993001", 9_007_199_254_740_993_001),
    ],
)
def test_pax_times_are_exact_to_the_nanosecond(tmp_path, text, expected_ns):
    entry = entry_of("x", tarfile.REGTYPE, pax_headers={"mtime": text})
    path = write_tar(tmp_path / "a.tar", [entry], format=tarfile.PAX_FORMAT)
    store.pack(store.Archives(path), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert pack.mtimes_ns.tolist() == [expected_ns]


@pytest.mark.parametrize("ending", ["", "gz", "bz2", "xz", "zst"])
def test_archives_that_were_joined_are_read_to_the_last_member(tmp_path, ending):
    """The first of them was all that there was, in silence."""
    parts = [write_tar(tmp_path / f"{k}", [(f"{k}.bin", k.encode() * 900)]) for k in "abc"]
    joined = b"".join(part.read_bytes() for part in parts)
    compress = {"": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
    compress["zst"] = lambda data: b"".join(map(zstandard.compress, (data[:5000], data[5000:])))
    path = tmp_path / f"all.tar{'.' * bool(ending)}{ending}"
    path.write_bytes(compress[ending](joined))
    store.pack(store.find_source(path), tmp_path / "pack")
    for opened in (tmp_path / "pack", *([] if ending else [path])):
        with open_pack(opened) as pack:
            assert {name: pack.read(k) for k, name in enumerate(pack.names)} == {
                f"{k}.bin": k.encode() * 900 for k in "abc"
            }
    if ending:
        return
    path.write_bytes(joined + b"no archive" * 60)
    with pytest.raises(StorageError, match=r"all\.tar.*no archive follows its end mark"):
        store.pack(store.find_source(path), tmp_path / "other")
    path.write_bytes(joined[:-5120] + parts[0].read_bytes()[:700])
    with pytest.raises(StorageError, match=r"all\.tar.*truncated"):
        store.pack(store.find_source(path), tmp_path / "other")


def test_damaged_zstd_is_an_error_of_the_archive(tmp_path):
    body = zstandard.compress(
        write_tar(tmp_path / "a", [("a", bytes(range(256)) * 90)]).read_bytes()
    )
    path = tmp_path / "a.tar.zst"
    path.write_bytes(body[:40] + bytes([body[40] ^ 255]) + body[41:])
    with pytest.raises(StorageError, match=r"damaged .*a\.tar\.zst"):
        store.pack(store.find_source(path), tmp_path / "pack")


def link(name, target):
    return entry_of(name, tarfile.SYMTYPE, linkname=target)


def test_symbolic_links_are_refused_followed_or_left_out(tmp_path, caplog):
    members = [
        link("d/first", "sub/../b"),
        ("d/b", b"body"),
        link("d/sub/second", "../first"),
        entry_of("d/pipe", tarfile.FIFOTYPE),
        entry_of("label", b"V"),
    ]
    path = write_tar(tmp_path / "a.tar", members)
    with pytest.raises(UsageError, match=r"d/first.*symbolic link.*--symlinks skip, or"):
        store.pack(store.Archives(path), tmp_path / "pack")
    options = PackOptions(symlinks="skip")
    store.pack(store.Archives(path), tmp_path / "pack", options=options)
    with open_pack(tmp_path / "pack") as pack:
        assert list(pack.names) == ["d/b"]
    text = "left out 3 symbolic link(s) and special file(s) ('d/first', 'd/sub/second', 'd/pipe')"
    assert text in caplog.text
    options = PackOptions(symlinks="follow")
    with pytest.raises(UsageError, match=r"d/pipe.*named pipe.*--symlinks skip"):
        store.pack(store.Archives(path), tmp_path / "other", options=options)
    path = write_tar(tmp_path / "b.tar", [m for m in members if m is not members[3]])
    store.pack(store.Archives(path), tmp_path / "followed", options=options)
    for opened in (tmp_path / "followed", path):  # what is read in place is followed
        with open_pack(opened) as pack:
            assert {name: pack.read(k) for k, name in enumerate(pack.names)} == dict.fromkeys(
                ("d/b", "d/first", "d/sub/second"), b"body"
            )
    for target in ("/d/b", "../../d/b", "nothing", "sub"):
        path = write_tar(tmp_path / "c.tar", [("d/b", b""), link("d/x", target)])
        with pytest.raises(UsageError, match=r"link leads to no file of the archive.*d/x"):
            store.pack(store.Archives(path), tmp_path / "other", options=options)


def group(key, label, **others):
    return [(f"{key}.cls", label), *((f"{key}.{ext}", body) for ext, body in others.items())]


def labels_of(pack):
    return dict(zip(pack.names, pack.labels.tolist(), strict=True))


def test_cls_members_label_their_group(tmp_path, caplog):
    members = [
        ("d.x/no-extension", b"0"),
        *group("d.x/1", b"10\n", jpg=b"a", json=b"{}"),
        ("d.x/2.seg.png", b"p"),
        ("d.x/2.cls", b"9"),
        ("d.x/3.jpg", b"q"),
        ("d.x/4.cls", b"alone"),
    ]
    store.pack(store.Archives(write_tar(tmp_path / "a.tar", members)), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert pack.class_names == tuple(str(k) for k in range(11))
        labels = labels_of(pack)
    assert labels == {
        "d.x/1.jpg": 10,
        "d.x/1.json": 10,
        "d.x/2.seg.png": 9,
        "d.x/3.jpg": -1,
        "d.x/no-extension": -1,
    }
    assert "1 .cls member(s) name the class of no sample ('d.x/4.cls')" in caplog.text
    assert "1 sample(s) of " in caplog.text
    assert "have no .cls member and the label -1 ('d.x/3')" in caplog.text


def test_files_that_end_in_cls_are_samples_where_there_are_no_others(tmp_path):
    members = [("a/article.cls", b"% LaTeX" * 100), ("a/notes.cls", b"short"), ("b/x.txt", b"1")]
    store.pack(store.Archives(write_tar(tmp_path / "a.tar", members)), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert pack.class_names == ("a", "b")
        assert labels_of(pack) == {"a/article.cls": 0, "a/notes.cls": 0, "b/x.txt": 1}


@given(
    st.dictionaries(st.integers(0, 9), st.integers(-1, 12), min_size=1),
    st.sets(st.integers(0, 9)),
    st.randoms(),
    st.booleans(),
)
def test_members_of_one_key_have_its_class_wherever_they_stand(classes, others, random, in_place):
    members = [(f"x/{key}.cls", b"%d" % name) for key, name in classes.items()]
    keys = sorted(classes.keys() | others)
    members += [(f"x/{key}.{ending}", b"") for key in keys for ending in ("jpg", "a.txt")]
    random.shuffle(members)
    expected = {name: classes.get(int(name[2]), -1) for name, _ in members if name[3:] != ".cls"}
    with tempfile.TemporaryDirectory() as folder:
        path = write_tar(Path(folder) / "a.tar", members)
        if not in_place:
            store.pack(store.Archives(path), Path(folder) / "pack")
        with open_pack(path if in_place else Path(folder) / "pack") as pack:
            assert labels_of(pack) == expected
            assert len(pack.class_names) == max(classes.values()) + 1


@pytest.mark.parametrize(
    ("numbers", "text"), [((-2, 0), "says -2, which is no label"), ((0, 1 << 20), "no label")]
)
def test_a_number_that_is_no_label_is_refused(tmp_path, numbers, text):
    members = [m for n in numbers for m in group(f"k{n}", b"%d" % n, jpg=b"")]
    with pytest.raises(UsageError, match=text):
        store.pack(store.Archives(write_tar(tmp_path / "a.tar", members)), tmp_path / "pack")


def test_a_key_with_two_classes_is_refused(tmp_path):
    members = [*group("1", b"7", jpg=b""), ("1.x.cls", b"8")]
    with pytest.raises(UsageError, match=r"'1\.x\.cls' names a second class.*'7'"):
        store.pack(store.Archives(write_tar(tmp_path / "a.tar", members)), tmp_path / "pack")


def test_one_name_in_two_archives_is_refused_with_both(tmp_path):
    for members in ([("0.jpg", b"")], group("0", b"1", jpg=b"")):
        one, two = (write_tar(tmp_path / f"{k}.tar", members) for k in "ab")
        text = r"one name \('0\.jpg', in .*a\.tar and .*b\.tar\)"
        with pytest.raises(UsageError, match=text):
            store.pack(store.Archives([one, two]), tmp_path / "pack")
        with pytest.raises(UsageError, match=text):
            open_pack(tmp_path / "?.tar")


def test_appended_numbers_keep_their_labels_or_are_refused(tmp_path):
    first = write_tar(tmp_path / "a.tar", group("1", b"3", jpg=b""))
    store.pack(store.Archives(first), tmp_path / "pack")
    more = write_tar(tmp_path / "b.tar", group("2", b"10", jpg=b"") + group("3", b"1", jpg=b""))
    store.append(store.Archives(more), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert labels_of(pack) == {"1.jpg": 3, "2.jpg": 10, "3.jpg": 1}
    words = write_tar(tmp_path / "c.tar", group("4", b"dog", jpg=b""))
    store.pack(store.Archives(words), tmp_path / "words")
    with pytest.raises(UsageError, match="say 0, and label 0 of the pack is 'dog'"):
        store.append(store.Archives(more), tmp_path / "words")


def test_classes_that_are_words_are_sorted(tmp_path):
    members = group("1", b"dog", jpg=b"") + group("2", b"10", jpg=b"") + group("3", b"9", jpg=b"")
    store.pack(store.Archives(write_tar(tmp_path / "a.tar", members)), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert pack.class_names == ("10", "9", "dog")
        assert pack.labels.tolist() == [2, 0, 1]


def test_keys_do_not_gather_in_memory(tmp_path, monkeypatch):
    """A class that comes after its members were forgotten is refused, not missed."""
    monkeypatch.setattr(member_classes, "_MAX_KEYS", 4)
    monkeypatch.setattr(member_classes, "_MAX_OPEN_SLOTS", 6)
    frames = [(f"shot{k}.png", b"x") for k in range(12)]
    path = write_tar(tmp_path / "a.tar", [*group("key", b"7", jpg=b"j"), *frames])
    store.pack(store.Archives(path), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert labels_of(pack) == {**{name: -1 for name, _ in frames}, "key.jpg": 7}
    for members in (
        [*frames, ("shot0.cls", b"7")],  # no slot any more
        [*group("key", b"7", jpg=b"j"), *frames, ("shot0.cls", b"7")],  # its key is forgotten
    ):
        late = write_tar(tmp_path / "b.tar", members)
        with pytest.raises(UsageError, match=r"'shot0\.cls' stands too far from the members"):
            store.pack(store.Archives(late), tmp_path / "other")


@pytest.mark.parametrize("label", [b"", b"x" * 300, b"a\0b"])
def test_a_cls_member_that_names_no_class_is_refused(tmp_path, label):
    path = write_tar(tmp_path / "a.tar", group("1", label, jpg=b""))
    with pytest.raises(UsageError, match="names no class"):
        store.pack(store.Archives(path), tmp_path / "pack")


def test_large_members_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "BATCH_BYTES", 1000)
    monkeypatch.setattr(limits_module, "BATCH_BYTES", 1000)
    bodies = {f"{k}.bin": bytes([k]) * (700 * k) for k in range(6)}
    path = write_tar(tmp_path / "a.tar", bodies.items())
    options = PackOptions(shard_bytes=2048)
    planned = store.plan_pack(store.find_source(path), tmp_path / "pack", options=options)
    summary = store.pack(store.find_source([str(path)]), tmp_path / "pack", options=options)
    assert (planned.pack_bytes, planned.shard_count) == (summary.pack_bytes, summary.shard_count)
    with open_pack(tmp_path / "pack") as pack:
        assert {name: pack.read(k) for k, name in enumerate(pack.names)} == bodies
        assert list(pack.verify()) == []
        assert len(pack.extents(5)) == 2


def test_paths_name_archives(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for k in range(8, 12):
        write_tar(shards / f"s-{k:03d}.tar", [(f"{k}", b"x")])
    every = [str(shards / f"s-{k:03d}.tar") for k in range(8, 12)]
    assert archives.find_archives([str(shards)]) == every
    assert archives.find_archives([str(shards / "s-{008..011}.tar")]) == every
    assert archives.find_archives([str(shards / "s-*.tar")]) == every
    assert archives.find_archives([str(shards / "s-{008,010}.tar")]) == every[::2]
    assert archives.find_archives([str(tmp_path)]) == []
    assert store.pack(store.find_source([str(shards)]), tmp_path / "pack").sample_count == 4
    with pytest.raises(UsageError, match="only if all are archives"):
        store.pack(store.find_source([str(shards), str(tmp_path)]), tmp_path / "other")
    with pytest.raises(UsageError, match="not a tar archive"):
        store.pack(store.Archives(tmp_path), tmp_path / "other")
    with pytest.raises(NotFound, match="no such archive"):
        store.pack(store.Archives(tmp_path / "none.tar"), tmp_path / "other")
    with pytest.raises(NotFound, match="nothing matches the pattern"):
        store.pack(
            store.find_source([str(shards / "s-008.tar"), str(shards / "t-*.tar")]),
            tmp_path / "other",
        )
    odd = tmp_path / "odd [v2]"
    odd.mkdir()
    alone = write_tar(odd / "a.tar", [("x", b"1")])
    assert archives.find_archives([str(alone)]) == [str(alone)]
