"""Files of a pack that shrink or change while they are read: errors, not signals or wrong bytes."""

import os
import subprocess
import sys
import time

import pytest

from paceline import store
from paceline.core.errors import CorruptPack
from paceline.store import PackOptions, open_pack
from paceline.store.format.header import parse_sections
from paceline.store.format.layout import Section

COUNT = 24
BODY_BYTES = 40_000


@pytest.fixture
def path(tmp_path):
    samples = [(f"{k % 2}/{k:02d}", bytes([k]) * BODY_BYTES) for k in range(COUNT)]
    options = PackOptions(shard_bytes=COUNT * BODY_BYTES // 2)
    store.pack(store.Samples(samples), tmp_path / "pack", options=options)
    return tmp_path / "pack"


# What a child process does while its pack is cut off; the parts are put together below.
OPEN = """
import os, sys
from paceline.core.errors import CorruptPack
from paceline.store import open_pack
pack, file = open_pack(sys.argv[1]), os.path.join(sys.argv[1], sys.argv[2])
for _ in range(3):
    pack.read_batch(range(len(pack)))
"""
READ = """
os.truncate(file, 100)
try:
    pack.read_batch(range(len(pack)))
except CorruptPack as problem:
    print("error", problem.where)
"""
LOAD = """
from paceline.store import Loader, LoaderOptions
options = LoaderOptions(shuffle="none", workers=2, on_corrupt=sys.argv[3], batches_ahead=1)
with Loader(pack, 4, rank=0, world_size=1, options=options) as loader:
    batches = iter(loader)
    next(batches)
    os.truncate(file, 100)
    try:
        print("delivered", 1 + len(list(batches)), "skipped", loader.stats.skipped)
    except CorruptPack as problem:
        print("error", problem.where)
"""
HANDLERS = {
    "none": "",
    "faulthandler before": "import faulthandler; faulthandler.enable()\n",
    # Reads go on until the guard has found the other handler, which takes 20 ms.
    "faulthandler after": """
import faulthandler, time
faulthandler.enable()
until = time.monotonic() + 0.1
while time.monotonic() < until:
    pack.read(0)
""",
}


def run(script, path, file, on_corrupt="raise"):
    return subprocess.run(
        [sys.executable, "-c", script, str(path), file, on_corrupt],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("handler", "file"),
    [*((name, "shard-00001.pace") for name in HANDLERS), ("none", "index.pace")],
)
def test_a_file_that_is_cut_off_behind_a_read_ends_no_process(path, file, handler):
    before, after = HANDLERS[handler], ""
    if handler.endswith("after"):
        before, after = "", HANDLERS[handler]
    ended = run(before + OPEN + after + READ, path, file)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"error {path / file}\n"


@pytest.mark.parametrize(
    "file", ["shard-00001.pace", pytest.param("index.pace", marks=pytest.mark.campaign("faults"))]
)
def test_a_loader_says_that_a_file_was_cut_off(path, file):
    ended = run(OPEN + LOAD, path, file)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"error {path / file}\n"


def test_a_loader_can_skip_what_was_cut_off(path):
    with open_pack(path) as pack:
        held = int((pack.shards == 1).sum())
    ended = run(OPEN + LOAD, path, "shard-00001.pace", "skip")
    assert (ended.returncode, ended.stderr) == (0, "")
    if ended.stdout.startswith("error"):  # a batch of which all samples are gone
        assert ended.stdout == f"error {path / 'shard-00001.pace'}\n"
    else:
        delivered, skipped = map(int, ended.stdout.split()[1::2])
        assert delivered == COUNT // 4
        assert 0 < skipped <= held


def test_touching_a_view_of_what_was_cut_off_ends_the_process(path):
    """It is what the documents say: no one can be asked before memory is touched."""
    view = "view = pack.view(pack.shards.tolist().index(1))\n"
    script = OPEN + view + "os.truncate(file, 100)\nbytes(view)\n"
    assert run(script, path, "shard-00001.pace").returncode == -7  # SIGBUS


WRITER = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
    mapped[:] = mapped[:]  # the same bytes: from here on the pages are dirty
    print("dirty", flush=True)
    for line in sys.stdin:
        at = int(line)
        mapped[at] ^= 1
        print("done", flush=True)
"""


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_writer_that_has_mapped_dirty_pages_is_found_out(path, verify):
    shard = path / "shard-00000.pace"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(shard)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer, open_pack(path, verify=verify) as pack:
        assert writer.stdout.readline() == "dirty\n"
        bodies = [pack.read(0) for _ in range(3)]
        before = shard.stat()
        print(pack.extents(0)[0].offset + 5000, file=writer.stdin, flush=True)
        assert writer.stdout.readline() == "done\n"
        after = shard.stat()
        assert before.st_mtime_ns == after.st_mtime_ns  # nothing tells of it
        with pytest.raises(CorruptPack, match="checksum"):
            pack.read(0)
        print(pack.extents(0)[0].offset + 5000, file=writer.stdin, flush=True)
        assert writer.stdout.readline() == "done\n"
        assert pack.read(0) == bodies[0]
        writer.stdin.close()


def swap(path, section, first, second, width):
    """Swap two values of a section of the index in place, as no program of ours does."""
    content = (path / "index.pace").read_bytes()
    begin = parse_sections(content)[section].offset
    values = [content[begin + k * width : begin + (k + 1) * width] for k in (first, second)]
    with (path / "index.pace").open("r+b") as file:
        for k, value in zip((second, first), values, strict=True):
            file.seek(begin + k * width)
            file.write(value)


def read_until_refused(pack, deadline):
    while time.monotonic() < deadline:
        pack.read(0)


def test_entries_that_are_swapped_in_an_open_index_are_noticed(path):
    with open_pack(path) as pack:
        pack.read_batch(range(COUNT))
        swap(path, Section.OFFSETS, 0, 1, 8)
        swap(path, Section.CHECKSUMS, 0, 1, 4)
        with pytest.raises(CorruptPack, match=r"index\.pace.*section 1 was changed while"):
            pack.read_batch([0, 1])  # at once: a batch asks for the file's times
        with pytest.raises(CorruptPack, match="changed while it was open"):
            read_until_refused(pack, time.monotonic() + 10)
        swap(path, Section.OFFSETS, 0, 1, 8)
        swap(path, Section.CHECKSUMS, 0, 1, 4)
        assert pack.read_batch([0, 1])[0].tobytes() == b"\0" * BODY_BYTES + b"\2" * BODY_BYTES


def test_an_index_of_which_only_the_times_changed_is_as_good_as_before(path):
    with open_pack(path) as pack:
        pack.read_batch(range(COUNT))
        os.utime(path / "index.pace")
        os.utime(path / "shard-00000.pace")
        buffer, _ = pack.read_batch(range(COUNT))
        assert len(buffer) == COUNT * BODY_BYTES


def test_a_buffer_that_fails_is_not_taken_for_a_damaged_pack(path, tmp_path):
    """A SIGBUS of the target's own file is the caller's, and ends the process as before."""
    script = (
        OPEN
        + """
import mmap, numpy as np
with open(sys.argv[3], "w+b") as target:
    target.truncate(1 << 20)
    out = np.frombuffer(mmap.mmap(target.fileno(), 0), np.uint8)
    target.truncate(4096)
    try:
        pack.read_batch(range(20), out)
    except CorruptPack:
        print("blamed the pack")
"""
    )
    ended = run(script, path, "index.pace", str(tmp_path / "target"))
    assert (ended.returncode, ended.stdout) == (-7, "")
