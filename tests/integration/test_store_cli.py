"""The verbs pack and store as a user meets them: output, exit codes, and never torch."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest
from support.command_line import without_torch

from paceline.cli import pack as pack_verb
from paceline.cli.app import VERBS
from paceline.cli.store import store
from paceline.core.clock import ManualClock
from paceline.store import PackProgress, open_pack

ODD = "cat/\u00e9\n\\\udcff.txt"


@pytest.fixture
def folder(tmp_path):
    for name, body in (("cat/a.bin", bytes(range(256))), ("dog/b.txt", b"wuff"), (ODD, b"odd")):
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return tmp_path


def paceline(folder, *args, **options):
    return without_torch(*args, cwd=folder, **options)


def test_pack_ls_cat_verify(folder):
    done = paceline(folder, "pack", "source", "pack", "--shard-size", "1KiB")
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "packed 3 samples in 2 classes, 263 B, into 1 shard" in text
    assert "files/s" in text
    assert "MB/s" in text
    assert "opens per epoch: 3 -> 2" in text
    utf8 = {**os.environ, "PYTHONUTF8": "1"}
    listing = paceline(folder, "store", "ls", "pack", "--recursive", env=utf8)
    assert listing.returncode == 0
    top = ["           -      - cat/", "           -      - dog/"]
    assert listing.stdout.decode().splitlines() == [
        *top,
        "         256      0 cat/a.bin",
        "           3      0 cat/\u00e9\\n\\\\\\xff.txt",
        "           4      1 dog/b.txt",
    ]
    assert paceline(folder, "store", "ls", "pack").stdout.decode().splitlines() == top
    below = paceline(folder, "store", "ls", "pack", "dog")
    assert below.stdout.decode().splitlines() == ["           4      1 dog/b.txt"]
    assert paceline(folder, "store", "ls", "pack", "cow").returncode == 2
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert b"cat/\\xe9\\n" in paceline(folder, "store", "ls", "pack", "cat", env=ascii_only).stdout
    body = paceline(folder, "store", "cat", "pack", "cat/a.bin")
    assert body.stdout == bytes(range(256))
    assert paceline(folder, "store", "cat", "pack", os.fsencode(ODD)).stdout == b"odd"
    whole = paceline(folder, "store", "verify", "pack")
    assert (whole.returncode, whole.stdout) == (0, b"3 samples, 263 B: all intact\n")


def test_json_is_one_object_with_a_version(folder):
    plan = paceline(folder, "pack", "source", "pack", "--dry-run", "--json")
    planned = json.loads(plan.stdout)
    assert planned["dry_run"] is True
    assert not (folder / "pack").exists()
    packed = json.loads(paceline(folder, "pack", "source", "pack", "--json").stdout)
    assert packed["version"] == 1
    assert packed["pack_bytes"] == planned["pack_bytes"]
    listed = json.loads(paceline(folder, "store", "ls", "pack", "--json").stdout)
    assert listed["version"] == 1
    assert listed["class_names"] == listed["folder_names"] == ["cat", "dog"]
    assert listed["samples"] == []
    listed = json.loads(paceline(folder, "store", "ls", "pack", "-r", "--json").stdout)
    assert listed["samples"][1].items() >= {
        ("name", "cat/\u00e9\n\\\\xff.txt"),
        ("bytes", 3),
        ("label", 0),
    }
    assert listed["sample_bytes"] == 263
    body = json.loads(paceline(folder, "store", "cat", "pack", "dog/b.txt", "--json").stdout)
    assert body["base64"] == "d3VmZg=="
    verified = json.loads(paceline(folder, "store", "verify", "pack", "--json").stdout)
    assert (verified["ok"], verified["damaged"], verified["sample_count"]) == (True, [], 3)


def test_stat_says_what_is_there_and_where(folder):
    paceline(folder, "pack", "source", "pack")
    text = paceline(folder, "store", "stat", "pack").stdout.decode()
    assert "3 in 2 classes and 2 folders" in text
    assert "263 B, stored as 263 B (capacity factor 1.00)" in text
    stat = json.loads(paceline(folder, "store", "stat", "pack", "--json").stdout)
    with open_pack(folder / "pack") as pack:
        assert stat["identity"] == pack.identity
        extent = pack.extents(pack.find("dog/b.txt"))[0]
    assert (stat["sample_count"], stat["shard_count"], stat["codecs"]) == (3, 1, {"none": 3})
    text = paceline(folder, "store", "stat", "pack", "dog/b.txt").stdout.decode()
    assert f"shard-00000.pace at {extent.offset}: 4 bytes, codec none" in text
    assert f"checksum 0x{extent.checksum:08x}" in text
    one = json.loads(paceline(folder, "store", "stat", "pack", os.fsencode(ODD), "--json").stdout)
    assert one["name"] == "cat/\u00e9\n\\\\xff.txt"
    assert (one["bytes"], one["class_name"], len(one["extents"])) == (3, "cat", 1)
    below = json.loads(paceline(folder, "store", "stat", "pack", "cat", "--json").stdout)
    assert (below["sample_count"], below["sample_bytes"]) == (2, 259)
    assert b"2, 259 B" in paceline(folder, "store", "stat", "pack", "cat").stdout
    missing = paceline(folder, "store", "stat", "pack", "cow")
    assert missing.returncode == 2
    assert b"no sample or folder named 'cow'" in missing.stderr


def test_the_help_names_every_command_of_store():
    named = VERBS["store"].rpartition("(")[2].rstrip(").").split(", ")
    assert sorted(named) == sorted(store.commands)


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_an_empty_folder_is_packed_with_a_warning(tmp_path, flags):
    (tmp_path / "empty" / "below").mkdir(parents=True)
    done = paceline(tmp_path, "pack", "empty", "pack", *flags)
    assert done.returncode == 0
    assert b"warning: nothing was found to pack in empty: each file" in done.stderr
    assert b"0 samples in 1 class," in done.stdout


def test_a_dry_run_says_what_it_would_do(folder):
    done = paceline(folder, "pack", "source", "pack", "--dry-run")
    assert done.stdout.startswith(b"would pack 3 samples")
    assert not (folder / "pack").exists()


def test_damage_is_named_with_exit_code_4(folder):
    paceline(folder, "pack", "source", "pack")
    shard = folder / "pack" / "shard-00000.pace"
    content = bytearray(shard.read_bytes())
    content[content.index(bytes(range(256)))] ^= 1
    content[content.index(b"wuff")] ^= 1
    shard.write_bytes(content)
    done = paceline(folder, "store", "verify", "pack")
    assert done.returncode == 4
    assert b"sample 0 'cat/a.bin' is damaged" in done.stderr
    assert b"sample 2 'dog/b.txt' is damaged" in done.stderr
    assert b"2 of 3 samples are damaged" in done.stderr
    done = paceline(folder, "store", "verify", "pack", "--json")
    assert done.returncode == 4
    report = json.loads(done.stdout)
    assert not report["ok"]
    assert [error["code"] for error in report["damaged"]] == ["CorruptPack", "CorruptPack"]
    done = paceline(folder, "store", "cat", "pack", "dog/b.txt")
    assert (done.returncode, done.stdout) == (4, b"")
    assert b"expected" in done.stderr
    done = paceline(folder, "store", "cat", "pack", "dog/b.txt", "--json")
    assert done.returncode == 4
    assert json.loads(done.stdout)["error"]["code"] == "CorruptPack"
    done = paceline(folder, "store", "extract", "pack", "out", "--json")
    error = json.loads(done.stdout)["error"]
    assert error["what"] == "sample 0 'cat/a.bin' is damaged"
    assert error["where"] == str(shard)
    assert re.fullmatch("checksum 0x[0-9a-f]{8} expected, 0x[0-9a-f]{8} found", error["why"])
    assert f"paceline store repair {folder / 'pack'} --source" in error["fix"]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("pack", "nowhere", "pack"), 2, b"no such folder to pack"),
        (("pack", "source", "source"), 2, b"the destination exists"),
        (("pack", "source", "source/pack"), 2, b"inside the source"),
        (("pack", "source", "pack", "--shard-size", "huge"), 2, b"not a size"),
        (("pack", "source", "pack", "--shard-size", "1"), 2, b"below the minimum of 128 B"),
        (("store", "ls", "nowhere"), 2, b"no pack here"),
        (("store", "cat", "nowhere", "x"), 2, b"no pack here"),
        (("store", "verify", "nowhere"), 2, b"no pack here"),
    ],
)
def test_misuse_has_exit_code_2(folder, args, code, text):
    done = paceline(folder, *args)
    assert done.returncode == code
    assert text in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["source"]


def test_the_environment_and_the_file_set_options(folder):
    (folder / "paceline.toml").write_text("[pack]\nshard_bytes = 128\n")
    paceline(folder, "pack", "source", "one")
    environment = {**os.environ, "PACELINE_PACK__SHARD_BYTES": "1000000"}
    paceline(folder, "pack", "source", "two", env=environment)
    paceline(folder, "pack", "source", "three", "--shard-size", "320", env=environment)
    counts = []
    for name in ("one", "two", "three"):
        with open_pack(folder / name) as pack:
            counts.append(pack.shard_count)
    assert counts == [5, 1, 2]  # what is larger than a shard is stored in chunks


def test_codecs_are_chosen_and_said(folder):
    (folder / "text").mkdir()
    for k in range(600):
        body = b'{"number": %d, "kind": "a record like all others"}' % (k * 7919 % 9973)
        (folder / "text" / f"{k}").write_bytes(body * 2)
    options = ("--codec", "auto", "--feed-rate", "0.5kB/s", "--feed", "sync", "--shuffle", "none")
    done = paceline(folder, "pack", "text", "auto", *options)
    assert done.returncode == 0, done.stderr
    assert re.search(rb"codec zstd-dict: smallest .*; feeds .*, 0 MB/s needed", done.stdout)
    assert re.search(rb"\n  lz4: capacity factor \d\.\d\d, decodes .*, feeds", done.stdout)
    stat = paceline(folder, "store", "stat", "auto").stdout
    assert re.search(rb"codecs  zstd-dict: 600\n", stat)
    assert re.search(rb"decoding  .*B/s on one thread, measured, with a dictionary of", stat)
    found = json.loads(paceline(folder, "store", "stat", "auto", "--json").stdout)
    assert found["capacity_factor"] > 1.5
    assert found["decode_bytes_per_s"] > 0
    done = paceline(folder, "pack", "text", "lz4", "--codec", "lz4", "--json")
    found = json.loads(done.stdout)
    assert found["choice"]["codec"] == "lz4"
    assert found["choice"]["rates"][0]["decode_bytes_per_s"] > 0
    assert found["capacity_factor"] == found["sample_bytes"] / found["stored_bytes"]
    for wrong in ("fast", "1..2", "-5", "3 GiB/s"):
        done = paceline(folder, "pack", "text", "other", "--codec", "auto", "--feed-rate", wrong)
        assert done.returncode == 2
        assert b"200MB/s" in done.stderr


def test_archives_codec_parity_append_and_resume(folder):
    subprocess.run(["tar", "cf", "a.tar", "-C", "source", "cat"], cwd=folder, check=True)
    subprocess.run(["tar", "czf", "b.tar.gz", "-C", "source", "dog"], cwd=folder, check=True)
    (folder / "more" / "bird").mkdir(parents=True)
    (folder / "more" / "bird" / "flat").write_bytes(bytes(100_000))
    options = ("--parity", "2", "--shard-size", "1k")
    done = paceline(folder, "pack", "a.tar", "b.tar.gz", "pack", *options)
    assert done.returncode == 0, done.stderr
    assert b"packed 3 samples in 2 classes" in done.stdout
    done = paceline(folder, "pack", "--append", "more", "pack", "--codec", "auto")
    assert done.returncode == 0, done.stderr
    assert b"appended 1 sample to 3 in 3 classes" in done.stdout
    assert b"compressed: 97.6 KiB less, capacity factor" in done.stdout
    assert b"opens per epoch: 4 -> 3" in done.stdout
    whole = paceline(folder, "store", "verify", "pack")
    assert whole.returncode == 0
    done = paceline(folder, "pack", "--append", "more", "pack")
    assert done.returncode == 2
    assert b"two samples have one name" in done.stderr
    for other in (("--dry-run",), ("--parity", "4"), ("--restart",)):
        done = paceline(folder, "pack", "--append", *other, "more", "pack", "--json")
        assert done.returncode == 2
        assert f"--append and {other[0]}" in json.loads(done.stdout)["error"]["what"]
    script = (
        "import os; from paceline import store\n"
        "from paceline.store.write import pack as packing\n"
        "packing.write_index = lambda *a: os._exit(9)\n"
        "store.pack(store.Folder('source'), 'killed')"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=folder).returncode == 9
    done = paceline(folder, "pack", "source", "killed")
    assert done.returncode == 0, done.stderr
    assert b"resuming after 3 samples" in done.stderr
    assert b"3 samples were packed by an earlier `paceline pack`" in done.stdout


def test_a_terminal_gets_a_bar_on_stderr_alone(folder):
    controller, terminal = pty.openpty()
    options = {"stderr": terminal, "check": True}
    done = paceline(folder, "pack", "source", "pack", "--json", **options)
    assert json.loads(done.stdout)["sample_count"] == 3
    done = paceline(folder, "store", "verify", "pack", "--json", **options)
    assert json.loads(done.stdout)["ok"]
    os.close(terminal)
    shown = os.read(controller, 1 << 16)
    os.close(controller)
    assert b"packing" in shown
    assert b"verified 3 of 3 samples" in shown


def test_without_a_terminal_a_line_comes_every_ten_seconds(capsys):
    clock = ManualClock()
    show = pack_verb._line_printer(clock)
    for k in range(41):
        show(PackProgress(sample_count=k, sample_total=40, byte_count=k * 1000, byte_total=40_000))
        clock.advance(1)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line.split()[1] for line in lines] == ["10", "20", "30", "40"]
    assert lines[0] == "packing: 10 of 40 samples, 9.77 KiB of 39.1 KiB, 0.0 MB/s, 30 s left"


def test_sizes_read_and_written():
    assert pack_verb.size_bytes("256 MiB".replace(" ", "")) == 256 << 20
    assert [pack_verb.size_bytes(text) for text in ("7", "2k", "1G", "1.5KB")] == [
        7,
        2048,
        1 << 30,
        1536,
    ]


INTERRUPTED = """
import sys
from paceline.store.write import append, pack
def interrupt(*_):
    raise KeyboardInterrupt
append.write_index = pack.write_index = interrupt
from paceline.cli.app import main
main()
"""


def test_an_interrupted_packing_says_that_the_same_command_resumes(folder):
    command = [sys.executable, "-c", INTERRUPTED, "pack", "source", "pack", "--shard-size", "300"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=120)
    assert done.returncode == 130
    assert b"pack.partial" in done.stderr
    assert b"Run the same command again to resume" in done.stderr
    done = paceline(folder, *command[3:])
    assert done.returncode == 0
    assert b"resuming after 3 samples" in done.stderr


def test_an_interrupt_that_leaves_nothing_promises_nothing(folder):
    command = [sys.executable, "-c", INTERRUPTED, "pack", "--append", "source", "pack"]
    assert paceline(folder, "pack", "source/cat", "pack").returncode == 0
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=120)
    assert done.returncode == 130
    assert done.stderr.strip() == b"interrupted"
