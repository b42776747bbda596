"""Calls for files, counted by the preloaded library in the trace of the process that makes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.file_calls import file_call_variables
from paceline.native import io_library
from paceline.trace.analysis.files import file_uses
from paceline.trace.format.events import Kind
from paceline.trace.format.files import read_trace

pytestmark = pytest.mark.skipif(not io_library().is_file(), reason="no glibc here")

RECORDED = """
import os, sys
from paceline.native import Recorder
recorder = Recorder(sys.argv[1] + "/trace/rank-00000.trace", 0, 1)
assert recorder.attach_io()
data = sys.argv[2]
{body}
recorder.detach_io()
recorder.close()
"""


def record(folder, body, data):
    """Run `body` recorded, with `data` as the path of a file; return the trace of the process."""
    run = folder / "RUN"
    (run / "trace").mkdir(parents=True)
    environ = {**os.environ, **file_call_variables(run, os.environ)}
    done = subprocess.run(
        [sys.executable, "-c", RECORDED.format(body=body), run, data],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return read_trace(run / "trace" / "rank-00000.trace")


def uses(trace):
    return {use.path: use for use in file_uses([trace])}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data" / "a"
    path.parent.mkdir()
    path.write_bytes(bytes(10_000))
    return path


def test_every_call_counts_with_its_bytes(tmp_path, data):
    body = """
for _ in range(3):
    with open(data, "rb", buffering=0) as file:
        assert len(file.read(4000)) == 4000
        os.pread(file.fileno(), 1000, 5000)
    os.stat(data)
os.listdir(os.path.dirname(data))
with open(data + ".out", "wb", buffering=0) as file:
    file.write(b"x" * 700)
    os.fsync(file.fileno())
"""
    found = uses(record(tmp_path, body, data))
    read = found[str(data)]
    assert read.calls["open"] == 3
    assert read.calls["read"] == 6
    assert read.calls["close"] == 3
    assert read.calls["stat"] >= 3
    assert read.read_bytes == 3 * 5000
    assert read.at_once == 1
    assert found[str(data.parent)].calls["list"] >= 1
    written = found[f"{data}.out"]
    assert (written.calls["write"], written.calls["sync"], written.written_bytes) == (1, 1, 700)
    assert not any("RUN" in path for path in found)


def test_relative_paths_and_forked_processes_count_too(tmp_path, data):
    body = """
os.chdir(os.path.dirname(data))
child = os.fork()
with open("./a", "rb") as file:
    assert len(file.read()) == 10000
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    found = uses(record(tmp_path, body, data))
    assert found[str(data)].calls["open"] == 2
    assert found[str(data)].read_bytes == 20_000


def test_a_long_call_is_an_event_of_the_main_thread(tmp_path, data):
    """Of a pipe with a name: its reader waits until the writer comes."""
    fifo = data.with_name("fifo")
    os.mkfifo(fifo)
    body = """
import threading
def give():
    with open(data, "wb") as file:
        file.write(b"abc")
thread = threading.Thread(target=give)
with open(os.path.dirname(data) + "/large", "wb", buffering=0) as file:
    file.write(bytes(64 << 20))
    os.fsync(file.fileno())
thread.start()
with open(data, "rb", buffering=0) as file:
    assert file.read(3) == b"abc"
thread.join()
"""
    trace = record(tmp_path, body, fifo)
    writes = trace.events_of(Kind.WRITE)
    paths = {trace.names[tag] for tag in writes["tag"]}
    assert str(data.with_name("large")) in paths
    assert {trace.names[name] for name in writes["name"]} <= {"write", "sync", "close"}
    assert (writes["end_ns"] - writes["begin_ns"] >= 20_000).all()
    assert set(trace.events_of(Kind.READ, Kind.WRITE)["location"]) == {0}


def test_results_of_calls_stay_as_they_are(tmp_path):
    body = """
import errno
for call in (open, os.stat, os.listdir, lambda path: os.read(99, 1)):
    try:
        call(data)
    except OSError as problem:
        assert problem.errno in (errno.ENOENT, errno.EBADF), problem
    else:
        raise SystemExit("no error")
"""
    missing = tmp_path / "missing"
    found = uses(record(tmp_path, body, missing))
    assert found[str(missing)].calls["open"] >= 1


def test_a_process_that_is_not_recorded_runs_as_without(tmp_path, data):
    environ = {**os.environ, **file_call_variables(tmp_path / "RUN", os.environ)}
    command = ["/bin/sh", "-c", f"cat {data} | wc -c && ls {data.parent} && stat -c %s {data}"]
    with_it = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    plain = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (with_it.stdout, with_it.stderr) == (plain.stdout, plain.stderr)
    assert not Path(tmp_path / "RUN").exists()


def test_pages_of_a_mapped_file_count_as_fetched_from_storage(tmp_path, data):
    size = 4 << 20
    body = f"""
import mmap, resource
with open(data, "wb") as file:
    file.write(os.urandom({size}))
    os.fsync(file.fileno())
descriptor = os.open(data, os.O_RDONLY)
os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
recorder.end_step()
before = resource.getrusage(resource.RUSAGE_THREAD)
mapped = mmap.mmap(descriptor, {size}, prot=mmap.PROT_READ)
sum(mapped[at] for at in range(0, {size}, 4096))
after = resource.getrusage(resource.RUSAGE_THREAD)
recorder.end_step()
print(after.ru_inblock - before.ru_inblock)
"""
    trace = record(tmp_path, body, data)
    counters = trace.events_of(Kind.COUNTER)
    fetched = {
        trace.names[event["name"]]: int(event["amount"])
        for event in counters[counters["step"] == 1]
    }
    if "storage_bytes" not in fetched:
        pytest.skip("this file system stays in memory")
    assert fetched["storage_bytes"] == size
    assert fetched["major_faults"] >= 1
    assert uses(trace)[str(data)].calls["map"] == 1
