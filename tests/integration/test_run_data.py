"""``paceline run --data``: nodes keep parts of a pack, and programs on each see all of it."""

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from support.launching import TWO_NODES, Launched, await_true, free_endpoint, launch_nodes, paceline
from support.networks import network, require_networks

from paceline import store
from paceline.core.errors import NotFound
from paceline.core.processes import stat_fields
from paceline.native import ExtentPlan
from paceline.store.read.pack import open_packed
from paceline.store.serve.remote_pack import open_remote

COMPARE = 'diff -r "$1" "$2" && cat $(find "$1" -type f | sort) | cksum'
READ = """
import os, sys
from pathlib import Path
from paceline.store.serve.remote_pack import open_remote

source = Path(sys.argv[1])
with open_remote(sys.argv[2]) as pack:
    same = [pack.read(i) == (source / pack.names[i]).read_bytes() for i in range(len(pack))]
print(os.environ["RANK"], len(same), all(same))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a folder with a tree of files, `plain`, and two packs of it."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(5)
    for number in range(60):
        place = folder / "plain" / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        body = random.bytes(int(random.integers(0, 60_000)))
        (place / f"{number:03d}.bin").write_bytes(body if number % 2 else body[:100] * 300)
    (folder / "plain" / "class0" / "large.bin").write_bytes(random.bytes(3_500_000))
    options = store.PackOptions(shard_bytes=300_000)
    store.pack(store.Folder(folder / "plain"), folder / "pack", options=options)
    compressed = store.PackOptions(shard_bytes=300_000, codec="zstd")
    store.pack(store.Folder(folder / "plain"), folder / "compressed", options=compressed)
    return folder


def shard_bytes(pack):
    return sum(path.stat().st_size for path in pack.glob("shard-*"))


def assert_gone(task):
    """Check for processes and files: all that servers share lies in memory without a name."""
    assert task.running() == []
    assert list(task.temporary.rglob("paceline*")) == []


def reports(run):
    return [json.loads(path.read_text()) for path in sorted((run / "data").iterdir())]


@pytest.mark.parametrize(("name", "tls"), [("pack", False), ("compressed", True)])
def test_programs_on_two_hosts_see_the_whole_tree_wherever_files_lie(data, tmp_path, name, tls):
    require_networks()
    (tmp_path / "token").write_text("correct horse battery staple\n")
    (tmp_path / "token").chmod(0o600)
    encryption = ("--data-tls", "--token-file", tmp_path / "token") if tls else ()
    words = (*encryption, "--data", f"{data / name}:/mnt/x", "/bin/sh", "-c", COMPARE, "sh")
    with network(2) as hosts:
        tasks = launch_nodes(tmp_path, hosts, *words, "/mnt/x", data / "plain")
        done = [task.wait() for task in tasks]
    assert [task.code for task in done] == [0, 0], done[0].err + done[1].err
    assert done[0].out == done[1].out != ""
    found = reports(tmp_path / "RUN")
    copied = sum(report["source_bytes"] for report in found)
    assert copied == shard_bytes(data / name), (found, done[0].err + done[1].err)
    assert all(report["peer_bytes"] > 0 for report in found)
    # Also of the file that lies in many shards, of which each node has some.
    assert all(report["program_source_bytes"] == 0 for report in found)
    assert sorted(report["node"].split(":")[0] for report in found) == [host for host, _ in hosts]
    for task in done:
        assert_gone(task)


def test_python_finds_the_nodes_by_the_name_of_the_pack(data, tmp_path):
    script = tmp_path / "read.py"
    script.write_text(READ)
    words = ("--data", data / "pack", script, data / "plain", data / "pack")
    done = paceline(tmp_path, "run", "-n", 2, "--no-record", "--out", "RUN", *words)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == ["0 61 True", "1 61 True"]
    assert_gone(done)
    with pytest.raises(NotFound, match="no node serves this pack"):
        open_remote(data / "pack")


def test_a_folder_that_is_given_keeps_its_part_for_the_next_run(data, tmp_path):
    options = ("--no-record", "--data-folder", tmp_path / "local")
    words = ("/bin/sh", "-c", COMPARE, "sh", "/mnt/x", data / "plain")
    for number, expected in enumerate((shard_bytes(data / "pack"), 0)):
        data_options = ("--out", f"RUN{number}", "--data", f"{data / 'pack'}:/mnt/x")
        done = paceline(tmp_path, "run", *data_options, *options, *words)
        assert done.code == 0, done.err
        # Files that were read before their shard had come were waited for, not read twice.
        assert reports(tmp_path / f"RUN{number}")[0]["source_bytes"] == expected


PAUSED = """
import os, signal, sys
from pathlib import Path

mount, plain, flag = map(Path, sys.argv[1:])
files = sorted(path.relative_to(plain) for path in plain.rglob("*.bin"))
first = (mount / files[0]).read_bytes() == (plain / files[0]).read_bytes()
(flag / f"ready{os.environ['RANK']}").touch()
while not (flag / "go").exists():
    signal.sigtimedwait([], 0.02)
wrong = []
for path in files:
    try:
        if (mount / path).read_bytes() != (plain / path).read_bytes():
            wrong.append(f"{path}: other bytes")
    except OSError as problem:
        wrong.append(f"{path}: {problem.strerror}")
print(os.environ["RANK"], first, len(files), len(wrong), sorted({line[-18:] for line in wrong}))
"""


def servers(task):
    """Return the data servers of a fresh run, and the processes that start them again."""

    def is_server(pid):
        try:
            return b"paceline.store.serve.run_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    found = [pid for pid in task.running() if is_server(pid)]
    parents = {pid: int(stat_fields(pid)[1]) for pid in found}
    return (
        [pid for pid in found if parents[pid] in found],
        [pid for pid in found if parents[pid] not in found],
    )


def copied_shards(task):
    """Return the shards that lie whole in the folder of a node."""
    paths = task.temporary.glob("paceline-data-*/shard-*.pace")
    return {int(path.stem.removeprefix("shard-")) for path in paths}


def files_elsewhere(pack, shards):
    """Return how many files of a pack do not lie in these shards alone."""
    with open_packed(pack) as opened:
        files = range(len(opened))
        return sum(
            not shards.issuperset(ExtentPlan(opened.native_reader, np.array([file])).shards)
            for file in files
        )


def start_paused(data, tmp_path, *options):
    script = tmp_path / "paused.py"
    script.write_text(PAUSED)
    flags = tmp_path / "flags"
    flags.mkdir()
    words = (*options, script, "/mnt/x", data / "plain", flags)
    tasks = launch_nodes(tmp_path, TWO_NODES, *words, fresh=True)  # see servers()
    await_true(lambda: len(list(flags.glob("ready*"))) == 2, "both programs to read")
    return tasks, flags


@pytest.mark.parametrize(
    ("which", "said"), [(0, "was killed by SIGKILL; it is started again"), (1, "ended by SIGKILL")]
)
def test_a_server_that_is_killed_is_named_and_costs_no_file(data, tmp_path, which, said):
    tasks, flags = start_paused(data, tmp_path, "--data", f"{data / 'pack'}:/mnt/x")
    with tasks[0], tasks[1]:
        (killed,) = servers(tasks[1])[which]
        os.kill(killed, signal.SIGKILL)
        (flags / "go").touch()
        done = [task.wait() for task in tasks]
    assert [task.code for task in done] == [0, 0], done[0].err + done[1].err
    assert [task.out.split(maxsplit=1)[1] for task in done] == ["True 61 0 []\n"] * 2
    assert re.search(r"data server.* 127\.0\.0\.1:\d+", done[1].err)
    assert said in done[1].err
    found = reports(tmp_path / "RUN")  # also of the server that was killed
    assert [report["server_starts"] for report in found] == [1, 2 - which]
    for task in done:
        assert_gone(task)


def test_what_nobody_has_is_an_error_that_names_the_file(data, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in (data / "pack").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tasks, flags = start_paused(data, tmp_path, "--data", f"{source}:/mnt/x")
    with tasks[0], tasks[1]:
        shards = {int(path.stem.removeprefix("shard-")) for path in source.glob("shard-*")}
        await_true(
            lambda: set.union(*map(copied_shards, tasks)) == shards, "all shards to be copied"
        )
        expected = [files_elsewhere(source, copied_shards(task)) for task in tasks]
        for path in source.glob("shard-*"):
            path.unlink()
        for task in tasks:
            os.kill(servers(task)[1][0], signal.SIGKILL)
        (flags / "go").touch()
        done = [task.wait() for task in tasks]
    assert min(expected) < 61 <= sum(expected)
    for task, wrong in zip(done, expected, strict=True):
        assert task.code == 0
        # What lies on the node itself is still there.
        assert task.out.split(maxsplit=1)[1] == f"True 61 {wrong} ['Input/output error']\n"
        assert task.err.count("has ended; what is not on this node is read from here") == 1
        assert task.err.count("; in the source: No such file") == wrong, task.err


def test_nothing_is_left_when_a_launcher_is_killed(data, tmp_path):
    tasks, _ = start_paused(data, tmp_path, "--data", f"{data / 'pack'}:/mnt/x")
    with tasks[0], tasks[1]:
        for task in tasks:
            task.process.kill()
        for task in tasks:
            task.process.communicate(timeout=60)
        for task in tasks:
            await_true(lambda task=task: not task.running(), "all processes to end")
            assert list(task.temporary.glob("paceline-data-*")) == []


def test_what_a_kill_of_everything_left_is_removed_by_the_next_run(data, tmp_path):
    options = ("run", "--no-record", "--data", f"{data / 'pack'}:/mnt/x")
    sleeper = ("/bin/sh", "-c", "touch started; sleep 600")
    with Launched(tmp_path, *options, "--out", "A", *sleeper, fresh=True) as task:
        await_true((tmp_path / "started").exists, "the program to start")
        # The launcher last: the others would see its end, and clean up.
        guarded, guards = servers(task)
        for pid in [*guards, *guarded, task.process.pid]:
            with contextlib.suppress(ProcessLookupError):  # it ended with its guard
                os.kill(pid, signal.SIGKILL)
        task.process.communicate(timeout=60)
        await_true(lambda: not task.running(), "all processes to end")
        assert len(list(task.temporary.glob("paceline-data-*"))) == 1
        env = {"TMPDIR": str(task.temporary)}
        done = paceline(tmp_path, *options, "--out", "B", "/bin/true", env=env)
        assert done.code == 0, done.err
        assert list(task.temporary.glob("paceline-data-*")) == []


def test_a_damaged_copy_on_the_node_is_read_elsewhere(data, tmp_path):
    options = ("--no-record", "--data", f"{data / 'pack'}:/mnt/x")
    local = ("--data-folder", tmp_path / "local")
    true = ("/bin/true",)
    words = ("/bin/sh", "-c", COMPARE, "sh", "/mnt/x", data / "plain")
    assert paceline(tmp_path, "run", "--out", "A", *options, *local, *words).code == 0
    shard = next((tmp_path / "local").glob("*/shard-00001*"))
    body = bytearray(shard.read_bytes())
    body[64:] = bytes(255 - byte for byte in body[64:])
    shard.write_bytes(body)
    done = paceline(tmp_path, "run", "--out", "B", *options, *local, *words)
    assert done.code == 0, done.err
    assert reports(tmp_path / "B")[0]["source_bytes"] > 0
    assert paceline(tmp_path, "run", "--out", "C", *options, *local, *true).code == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--data", "nope"], 2, "no pack"),
        (["--data", "nope:/mnt/x"], 2, "nope"),
        (["--data", "pack:/"], 2, "cannot be mounted as /"),
        (["--data", "pack:/mnt/x", "--mount", "pack:/mnt"], 2, "overlap"),
        (["--data", "pack:/mnt/x", "--data", "pack:/mnt/y"], 2, "given twice"),
        (["--data", "pack", "--data-replicas", "0"], 2, "at least 1 replica"),
    ],
)
def test_misuse_is_told_before_the_start(data, words, code, said):
    done = paceline(data, "run", *words, "/bin/true")
    assert said in done.err
    assert done.code == code


def test_two_nodes_that_share_a_folder_are_misuse(data, tmp_path):
    tasks = launch_nodes(
        tmp_path,
        TWO_NODES,
        *("--data", data / "pack", "--data-folder", tmp_path / "local", "/bin/true"),
        env={"PACELINE_RUN__RENDEZVOUS_TIMEOUT_S": "3"},
    )
    done = [task.wait() for task in tasks]
    assert 2 in [task.code for task in done]
    assert "another data server uses this node's folder" in done[0].err + done[1].err


def test_tasks_of_a_slurm_step_share_the_server_of_their_node(data, tmp_path):
    """Four tasks on two hosts, with the variables that srun would give them."""
    require_networks()
    words = ("/bin/sh", "-c", COMPARE, "sh", "/mnt/x", data / "plain")
    with network(2) as hosts:
        step = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_STEP_NODELIST": hosts[0][0],
        }
        tasks = [
            Launched(
                tmp_path,
                *("run", "--no-record", "--out", "RUN", "--data", f"{data / 'pack'}:/mnt/x"),
                *words,
                prefix=hosts[number // 2][1],
                env={
                    **step,
                    "SLURM_PROCID": str(number),
                    "SLURM_LOCALID": str(number % 2),
                    "SLURM_NODEID": str(number // 2),
                },
            )
            for number in range(4)
        ]
        done = [task.wait() for task in tasks]
    assert [task.code for task in done] == [0] * 4, [task.err for task in done]
    found = reports(tmp_path / "RUN")
    assert len(found) == 2
    assert sum(report["source_bytes"] for report in found) == shard_bytes(data / "pack")
    for task in done:
        assert_gone(task)


def test_replicas_serve_what_a_killed_server_held(data, tmp_path):
    """Three nodes, of which two have each shard: who still has a server needs no source."""
    script = tmp_path / "paused.py"
    script.write_text(PAUSED)
    flags = tmp_path / "flags"
    flags.mkdir()
    options = ("--data", f"{data / 'pack'}:/mnt/x", "--data-replicas", 2)
    endpoint = free_endpoint()
    tasks = [
        Launched(
            tmp_path,
            *("run", "--no-record", "--out", "RUN", "--nnodes", 3, "--node-rank", number),
            *("--rdzv-endpoint", endpoint, *options, "--data-folder", tmp_path / f"l{number}"),
            *(script, "/mnt/x", data / "plain", flags),
            fresh=True,
        )
        for number in range(3)
    ]
    with tasks[0], tasks[1], tasks[2]:
        count = len(list((data / "pack").glob("shard-*")))
        await_true(
            lambda: len(list(tmp_path.glob("l*/*/shard-*.pace"))) == 2 * count,
            "all copies to be made",
        )
        await_true(lambda: len(list(flags.glob("ready*"))) == 3, "all programs to read")
        os.kill(servers(tasks[2])[1][0], signal.SIGKILL)
        (flags / "go").touch()
        done = [task.wait() for task in tasks]
    assert [task.code for task in done] == [0] * 3, [task.err for task in done]
    assert [task.out.split(maxsplit=1)[1] for task in done] == ["True 61 0 []\n"] * 3
    found = reports(tmp_path / "RUN")  # also of the server that was killed
    assert [report["program_source_bytes"] > 0 for report in found] == [False, False, True]
    copied = sum(report["source_bytes"] - report["program_source_bytes"] for report in found)
    assert copied == shard_bytes(data / "pack")
