"""``paceline run --output``: programs write to local storage, and find it in the shared folder."""

import json
import os
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from support.launching import TWO_NODES, Launched, await_true, launch_nodes, paceline
from support.networks import network, require_networks

from paceline import store
from paceline.core.processes import stat_fields
from paceline.store.posix.mounts import variables
from paceline.store.serve.drain import HIDDEN, Drain, DrainRoom

SCRIPTS = Path(__file__).parent / "scripts"
POINT = "/paceline-out"


def run(folder, target, *words, options=(), **more):
    """Run a program to its end, with `target` as the folder that it writes to."""
    return paceline(
        folder,
        *("run", "--no-record", "--out", "RUN", "--output", f"{target}:{POINT}", *options),
        *words,
        **more,
    )


def run_nodes(folder, target, *words, hosts=TWO_NODES, **more):
    """Run a program on nodes, with a launcher and local storage of its own on each."""
    tasks = launch_nodes(folder, hosts, "--output", f"{target}:{POINT}", *words, **more)
    done = [task.wait() for task in tasks]
    for task in done:
        assert task.running() == []
        assert list(task.temporary.glob("paceline-output-*")) == []
    return done


def start_script(folder, text):
    """Start a script on two nodes; return the launchers, a folder for its flags, and the target."""
    flags, target, script = folder / "flags", folder / "shared", folder / "script.py"
    flags.mkdir()
    script.write_text(text)
    output = ("--output", f"{target}:{POINT}")
    tasks = launch_nodes(folder, TWO_NODES, *output, script, POINT, flags, fresh=True)
    return tasks, flags, target


def on_rank(rank):
    """Return words before a program that only one rank runs."""
    return ("/bin/sh", "-c", f'[ "$RANK" != {rank} ] || exec "$@"', "sh")


def tree(folder):
    """Return the content of each file below a folder, by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def servers(task):
    """Return the processes of a fresh run that drain, and those that start them again."""
    parents = {}
    for pid in task.running():
        with suppress(OSError):  # it has ended since
            if b"paceline.store.serve.output_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                parents[pid] = int(stat_fields(pid)[1])
    return (
        [pid for pid, parent in parents.items() if parent in parents],
        [pid for pid, parent in parents.items() if parent not in parents],
    )


def test_what_a_program_writes_is_read_back_and_drained(tmp_path):
    target = tmp_path / "shared"
    script = (
        'set -e; cd "$1"; mkdir -p a/b; cp /bin/sh a/b/sh; cmp /bin/sh a/b/sh; echo x >a/x; ls a'
    )
    done = run(tmp_path, target, "/bin/sh", "-c", script, "sh", POINT)
    assert (done.code, done.out) == (0, "b\nx\n"), done.err
    assert tree(target) == {"a/b/sh": Path("/bin/sh").read_bytes(), "a/x": b"x\n"}
    done.assert_nothing_left()
    assert not Path(POINT).exists()
    report = json.loads((tmp_path / "RUN" / "output" / "shared-00000.json").read_text())
    size = sum(len(body) for body in tree(target).values())
    assert (report["files"], report["bytes"], report["problems"]) == (2, size, {})


@pytest.mark.parametrize("name", ["output_calls.py", "output_commands.sh"])
def test_programs_find_an_output_as_they_find_a_folder(tmp_path, name):
    """The script runs in a plain folder first: it prints and leaves the same."""
    words = ("/bin/sh",) if name.endswith(".sh") else ()
    plain = tmp_path / "plain"
    plain.mkdir()
    script = SCRIPTS / name
    first = paceline(tmp_path, "run", "--no-record", "--out", "A", *words, script, plain)
    assert first.code == 0, first.err
    done = run(tmp_path, tmp_path / "shared", *words, script, POINT)
    assert (done.code, done.out) == (0, first.out.replace(str(plain), POINT)), done.err
    assert tree(tmp_path / "shared") == tree(plain)
    done.assert_nothing_left()


@pytest.mark.campaign("e2e")
@pytest.mark.parametrize("rank", [0, 1])  # one of both orders the changes
@pytest.mark.parametrize("name", ["output_calls.py", "output_commands.sh"])
def test_a_program_of_one_node_of_two_finds_a_folder(tmp_path, name, rank):
    interpreter = "/bin/sh" if name.endswith(".sh") else sys.executable
    plain = tmp_path / "plain"
    plain.mkdir()
    words = (interpreter, SCRIPTS / name)
    first = subprocess.run([*words, plain], capture_output=True, text=True, check=True)
    done = run_nodes(tmp_path, tmp_path / "shared", *on_rank(rank), *words, POINT)
    assert [task.code for task in done] == [0, 0], done[0].err + done[1].err
    assert done[rank].out == first.stdout.replace(str(plain), POINT)
    assert tree(tmp_path / "shared") == tree(plain)


@pytest.mark.campaign("e2e")
@pytest.mark.parametrize("rank", [0, 1])
def test_names_on_one_node_of_two_have_one_writer(tmp_path, rank):
    words = (sys.executable, SCRIPTS / "output_publishing.py", POINT)
    done = run_nodes(tmp_path, tmp_path / "shared", *on_rank(rank), *words)
    assert [task.code for task in done] == [0, 0], done[0].err + done[1].err
    assert done[rank].out == "all as expected\n"


@pytest.mark.parametrize(
    "where", ["here", pytest.param("network", marks=pytest.mark.campaign("e2e"))]
)
def test_what_one_node_does_the_other_finds(tmp_path, where):
    flags = tmp_path / "flags"
    flags.mkdir()
    words = (SCRIPTS / "output_two_nodes.py", POINT, flags)
    if where == "network":
        require_networks()
    with network(2) if where == "network" else nullcontext((("127.0.0.1", ()),) * 2) as hosts:
        done = run_nodes(tmp_path, tmp_path / "shared", *words, hosts=hosts)
    assert [(task.code, task.out) for task in done] == [(0, "as expected\n")] * 2, (
        done[0].err + done[1].err
    )
    assert tree(tmp_path / "shared") == {"z/e/c": b"version 9"}


def test_checkpoints_rotate_on_two_nodes(tmp_path):
    target = tmp_path / "shared"
    for number in range(2):
        done = run_nodes(tmp_path / str(number), target, SCRIPTS / "output_checkpoints.py", POINT)
        assert [task.code for task in done] == [0, 0], done[0].err + done[1].err
        assert [task.out for task in done] == [f"{k} from step {4 * number}\n" for k in range(2)]
    names = {"step7.pt", "step8.pt", "last.pt", "log.txt", "arrays.npz"}
    assert set(tree(target)) == names
    assert (target / "log.txt").read_text().split() == [str(step) for step in range(1, 9)]


@pytest.mark.campaign("e2e")
def test_sharded_checkpoints_are_saved_and_loaded_on_two_nodes(tmp_path):
    target = tmp_path / "shared"
    done = run_nodes(tmp_path, target, SCRIPTS / "output_sharded.py", POINT)
    assert [task.code for task in done] == [0, 0], done[0].err + done[1].err
    assert [task.out for task in done] == ["['step2']\n"] * 2
    files = {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert set(tree(target)) == {f"step2/{name}" for name in files}


@pytest.mark.campaign("launchers")
def test_tasks_of_a_slurm_step_share_the_output_of_their_node(tmp_path):
    """Four tasks on two hosts, with the variables that srun would give them."""
    require_networks()
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "x").write_text("data")
    store.pack(store.Folder(tmp_path / "plain"), tmp_path / "pack")
    script = (
        'cat /mnt/x/x >"$1/$SLURM_PROCID"; while [ $(ls "$1" | wc -l) -lt 4 ]; do sleep 0.05; done'
    )
    words = ("/bin/sh", "-c", f'{script}; cat "$1"/*', "sh", POINT)
    with network(2) as hosts:
        step = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "1",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_STEP_NODELIST": hosts[0][0],
        }
        tasks = [
            Launched(
                tmp_path,
                *("run", "--no-record", "--out", "RUN", "--data", f"{tmp_path / 'pack'}:/mnt/x"),
                *("--output", f"{tmp_path / 'shared'}:{POINT}", *words),
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
    assert [(task.code, task.out) for task in done] == [(0, "data" * 4)] * 4, done[0].err
    assert tree(tmp_path / "shared") == {str(number): b"data" for number in range(4)}
    assert all(task.running() == [] for task in done)


WRITES = """
import os, signal, sys
from pathlib import Path

top, flags, rank = Path(sys.argv[1]), Path(sys.argv[2]), os.environ["RANK"]
(flags / rank).touch()
lost = 0
for number in range(1000):
    if (flags / "end").exists():
        break
    path = top / f"{rank}-{number}"
    try:
        path.write_text(rank)
        path.rename(top / f"{rank}-kept-{number}")
        assert (top / f"{rank}-kept-{number}").read_text() == rank
    except (OSError, AssertionError):
        lost += 1
    signal.sigtimedwait([], 0.01)
(flags / f"ended{rank}").touch()
while not all((flags / f"ended{k}").exists() for k in range(2)):
    signal.sigtimedwait([], 0.02)
for path in sorted(top.iterdir()):
    print(path.name, path.read_text())
print(rank, "lost", lost, file=sys.stderr)
"""


@pytest.mark.campaign("faults")
@pytest.mark.parametrize("node", [0, 1])
def test_servers_of_two_nodes_are_killed_and_go_on(tmp_path, node):
    """No write, rename or read fails, and all nodes have the same names in the end."""
    tasks, flags, target = start_script(tmp_path, WRITES)
    with tasks[0], tasks[1]:
        await_true(lambda: len(list(flags.iterdir())) == 2, "both programs to start")
        for count in (15, 30):
            await_true(lambda count=count: len(tree(target)) >= count, "files to be drained")
            # The other node's server may have drained them before a killed one is started again.
            await_true(lambda: servers(tasks[node])[0], "the node's server to run")
            os.kill(servers(tasks[node])[0][0], signal.SIGKILL)
        (flags / "end").touch()
        done = [task.wait() for task in tasks]
    assert [task.code for task in done] == [0, 0], done[0].err + done[1].err
    assert done[0].out == done[1].out != "", done[0].err + done[1].err
    drained = {name: body.decode() for name, body in tree(target).items()}
    assert dict(line.split() for line in done[0].out.splitlines()) == drained
    for rank, task in enumerate(done):
        (said,) = [line for line in task.err.splitlines() if line.startswith(f"{rank} lost")]
        assert said.endswith(" lost 0"), task.err


LOST = """
import os, signal, sys, time
from pathlib import Path

top, flags, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(os.environ["RANK"])

def wait_for(name):
    while not (flags / name).exists():
        signal.sigtimedwait([], 0.02)

if rank == 0:
    (top / "drained").write_text("drained")
    (flags / "written").touch()
    wait_for("read")
else:
    wait_for("killed")
    print((top / "drained").read_text(), os.listdir(top))
    (flags / "read").touch()
"""


def test_the_path_of_local_storage_may_be_long(tmp_path):
    """The servers' sockets lie there, and the address of a socket has 107 bytes at most."""
    local = tmp_path / ("a" * 150) / ("b" * 150)
    local.mkdir(parents=True)
    script = (
        'echo "$RANK" >"$1/$RANK" || exit; '
        'while [ ! -e "$1/$((1 - RANK))" ]; do sleep 0.02; done; cat "$1"/*'
    )
    words = ("/bin/sh", "-c", script, "sh", POINT)
    done = run_nodes(tmp_path, tmp_path / "shared", "--data-folder", local, *words)
    assert [(task.code, task.out) for task in done] == [(0, "0\n1\n")] * 2, (
        done[0].err + done[1].err
    )
    assert tree(tmp_path / "shared") == {"0": b"0\n", "1": b"1\n"}
    assert list(local.iterdir()) == []


def test_what_a_lost_node_wrote_is_read_from_the_shared_folder(tmp_path):
    tasks, flags, target = start_script(tmp_path, LOST)
    with tasks[0], tasks[1]:
        await_true((flags / "written").exists, "the program to write")
        await_true((target / "drained").exists, "the file to be drained")
        for pid in [*servers(tasks[0])[1], *servers(tasks[0])[0]]:
            os.kill(pid, signal.SIGKILL)
        (flags / "killed").touch()
        done = [task.wait() for task in tasks]
    assert done[1].out == "drained ['drained']\n", done[1].err
    assert done[0].code == 1
    assert "the server that drains it has ended" in done[0].err


def test_a_full_disk_is_an_error_of_the_write_and_of_nothing_else(tmp_path):
    local = tmp_path / "local"
    local.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", local]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no mount of a small file system here")
    script = (
        'head -c 300000 /dev/zero >"$1/fits"; head -c 3000000 /dev/zero >"$1/large"; echo $?; '
        'rm "$1/large"; echo after >"$1/after"; cat "$1/after"'
    )
    try:
        words = ("/bin/sh", "-c", script, "sh", POINT)
        done = run(tmp_path, tmp_path / "shared", *words, options=("--data-folder", local))
        assert (done.code, done.out) == (0, "1\nafter\n"), done.err
        assert "No space left on device" in done.err
        assert {name: len(body) for name, body in tree(tmp_path / "shared").items()} == {
            "fits": 300_000,
            "after": 6,
        }
        assert list(local.iterdir()) == []
    finally:
        subprocess.run(["umount", local], check=True)


def test_data_stays_read_only_beside_an_output(tmp_path):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "x").write_text("data")
    store.pack(store.Folder(tmp_path / "plain"), tmp_path / "pack")
    script = (
        'cp /mnt/x/x "$1/copy"; cat "$1/copy"; echo no >/mnt/x/x; echo no >/mnt/x/y; rm /mnt/x/x; '
        'mv "$1/copy" /mnt/x/z; mv /mnt/x/x "$1/w"; ls "$1"'
    )
    options = ("--data", f"{tmp_path / 'pack'}:/mnt/x")
    words = ("/bin/sh", "-c", script, "sh", POINT)
    done = run(tmp_path, tmp_path / "shared", *words, options=options)
    assert done.out == "datacopy\nw\n", done.err
    assert done.err.count("Read-only file system") == 5, done.err


RACE = """
import os, sys
won = 0
for number in range(200):
    try:
        with open(f"{sys.argv[1]}/{number}", "x") as file:
            file.write(os.environ["RANK"])
        won += 1
    except FileExistsError:
        pass
print(won)
"""


def test_of_two_nodes_that_create_a_name_one_does(tmp_path):
    script = tmp_path / "race.py"
    script.write_text(RACE)
    done = run_nodes(tmp_path, tmp_path / "shared", script, POINT)
    assert [task.code for task in done] == [0, 0], done[0].err + done[1].err
    won = [int(task.out) for task in done]
    assert sum(won) == 200
    found = list(tree(tmp_path / "shared").values())
    assert [found.count(b"0"), found.count(b"1")] == won


@pytest.mark.campaign("faults")
def test_of_processes_on_one_node_that_create_a_name_one_does(tmp_path):
    script = tmp_path / "race.py"
    script.write_text(RACE)
    done = run(tmp_path, tmp_path / "shared", script, POINT, options=("-n", 4))
    assert done.code == 0, done.err
    won = [int(line) for line in done.out.split()]
    assert (len(won), sum(won)) == (4, 200)
    assert len(tree(tmp_path / "shared")) == 200


def test_a_name_is_there_when_its_file_is_closed_and_has_one_writer(tmp_path):
    done = run(tmp_path, tmp_path / "shared", SCRIPTS / "output_publishing.py", POINT)
    assert (done.code, done.out) == (0, "all as expected\n"), done.out + done.err
    done.assert_nothing_left()


@pytest.mark.campaign("e2e")
def test_checkpoints_of_an_unchanged_script_rotate(tmp_path):
    script = SCRIPTS / "output_checkpoints.py"
    target = tmp_path / "shared"
    for number in range(2):  # the second run resumes from what the first one drained
        done = paceline(
            tmp_path,
            *("run", "-n", 2, "--no-record", "--out", f"RUN{number}"),
            *("--output", f"{target}:{POINT}", script, POINT),
        )
        assert done.code == 0, done.err
        assert f"0 from step {4 * number}" in done.out
        assert f"1 from step {4 * number}" in done.out
        steps = (4 * number + 3, 4 * number + 4)
        names = {f"step{step}.pt" for step in steps} | {"last.pt", "log.txt", "arrays.npz"}
        assert set(tree(target)) == names
        done.assert_nothing_left()
    assert (target / "log.txt").read_text().split() == [str(step) for step in range(1, 9)]


WAITING = 'echo kept >"$1/kept"; exec 3>"$1/open"; echo lost >&3; touch "$2"; sleep 600'


def test_a_writer_that_is_killed_leaves_nothing(tmp_path):
    words = ("/bin/sh", "-c", WAITING, "sh", POINT, tmp_path / "started")
    options = ("run", "--no-record", "--out", "RUN", "--output", f"{tmp_path}/shared:{POINT}")
    with Launched(tmp_path, *options, *words) as task:
        await_true((tmp_path / "started").exists, "the program to write")
        await_true((tmp_path / "shared" / "kept").exists, "what is closed to be drained")
        os.killpg(os.getpgid(task.process.pid), 0)
        for pid in task.running():
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"/bin/sh\0-c"):
                os.kill(pid, signal.SIGKILL)
        task.wait()
    assert task.code == 5, task.err
    assert tree(tmp_path / "shared") == {"kept": b"kept\n"}
    task.assert_nothing_left()


def test_a_server_that_is_killed_goes_on(tmp_path):
    script = (
        'echo 1 >"$1/1"; touch "$2/started"; while [ ! -e "$2/go" ]; do sleep 0.02; done; '
        'echo 2 >"$1/2"'
    )
    words = ("/bin/sh", "-c", script, "sh", POINT, tmp_path)
    options = ("run", "--no-record", "--out", "RUN", "--output", f"{tmp_path}/shared:{POINT}")
    with Launched(tmp_path, *options, *words, fresh=True) as task:
        await_true((tmp_path / "started").exists, "the program to start")
        os.kill(servers(task)[0][0], signal.SIGKILL)
        (tmp_path / "go").touch()
        task.wait()
    assert task.code == 0, task.err
    assert "was killed by SIGKILL; it is started again" in task.err
    assert tree(tmp_path / "shared") == {"1": b"1\n", "2": b"2\n"}
    task.assert_nothing_left()


def test_what_a_kill_of_everything_left_is_drained_by_the_next_run(tmp_path):
    target = tmp_path / "shared"
    target.mkdir()
    words = ("/bin/sh", "-c", WAITING, "sh", POINT, tmp_path / "started")
    options = ("run", "--no-record", "--output", f"{target}:{POINT}")
    with Launched(tmp_path, *options, "--out", "A", *words) as task:
        await_true((tmp_path / "started").exists, "the program to write")
        task.kill()
        task.process.communicate(timeout=60)
        await_true(lambda: not task.running(), "all processes to end")
        assert len(list(task.temporary.glob("paceline-output-*"))) == 1
        (target / "kept").unlink(missing_ok=True)
        env = {"TMPDIR": str(task.temporary)}
        done = paceline(tmp_path, *options, "--out", "B", "/bin/cat", f"{POINT}/kept", env=env)
        assert (done.code, done.out) == (0, "kept\n"), done.err
        assert tree(target) == {"kept": b"kept\n"}
        assert list(task.temporary.glob("paceline-output-*")) == []


def test_what_cannot_be_drained_is_an_error_that_names_the_file_and_keeps_it(tmp_path):
    target = tmp_path / "shared"
    (target / "lost").mkdir(parents=True)
    (target / "lost" / "file").touch()
    script = 'rm -r "$1/lost"; echo fine >"$1/fine"; echo x >"$1/lost"; touch "$2/lost/another"'
    env = {"PACELINE_RUN__OUTPUT_END_S": "1"}
    done = run(tmp_path, target, "/bin/sh", "-c", script, "sh", POINT, target, env=env)
    assert done.code == 1
    assert "a file that the run wrote could not be drained" in done.err
    assert f"where: {target}/lost" in done.err
    (kept,) = done.temporary.glob("paceline-output-*")
    assert (kept / "tree" / "lost").read_text() == "x\n"
    assert (target / "fine").read_text() == "fine\n"
    assert json.loads((tmp_path / "RUN" / "result.json").read_text())["exit_code"] == 1


def test_close_waits_for_room_and_fails_when_there_is_none(tmp_path):
    """Nobody drains here until the first file was refused."""
    (tmp_path / "tree").mkdir()
    room = DrainRoom(tmp_path / "room", most_bytes=1000, wait_s=0.2)
    # The programs of a run find its outputs by this variable.
    environ = {**os.environ, **variables((), os.environ, outputs=[(str(tmp_path), POINT, False)])}

    def write(name, size):
        words = ["/bin/dd", f"of={POINT}/{name}", "if=/dev/zero", f"bs={size}", "count=1"]
        return subprocess.run(words, env=environ, capture_output=True, text=True)

    assert write("first", 900).returncode == 0
    refused = write("second", 200)
    assert refused.returncode != 0
    assert (
        f"{POINT}/second is not published: 900 bytes wait to be drained, 1000 may" in refused.stderr
    )
    assert sorted(path.name for path in (tmp_path / "tree").iterdir()) == ["first"]
    target = tmp_path / "target"
    target.mkdir()
    drain = Drain(tmp_path, target, room)
    drain.begin()
    assert drain.step() == 0
    assert write("second", 200).returncode == 0
    assert write("larger", 5000).returncode != 0
    assert drain.step() == 0
    assert write("larger", 5000).returncode == 0  # alone, it may be larger than the room
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(HIDDEN)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "shared"], "names no folder and path"),
        (["--output", "shared:/"], "cannot be /"),
        (["--output", "shared:shared/x"], "hide its own folder"),
        (["--output", "a:/x", "--output", "b:/x/y"], "overlap"),
        (["--output", "file:/x"], "a file is where a folder is needed"),
        (["--output", "a:/x", "--output-limit", "-1"], "-1"),
    ],
)
def test_misuse_is_told_before_the_start(tmp_path, words, said):
    (tmp_path / "file").touch()
    done = paceline(tmp_path, "run", *words, "/bin/true")
    assert said in done.err
    assert done.code == 2
