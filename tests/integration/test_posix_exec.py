"""``paceline store exec`` and ``paceline run --mount``: exit codes, and what cannot be mounted."""

import json
import os
import stat
import subprocess
import sys

import pytest
from support.command_line import without_torch
from support.mounts import DEADLINE_S, Twins

STATIC = "int main() { return 0; }"

SPAWNS = """
import os
words = ["outer", "e"]
child = os.posix_spawn("/data/bin/outer", words, os.environ)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    found = Twins(tmp_path_factory.mktemp("exec"))
    (found.plain / "data" / "cat").mkdir(parents=True)
    (found.plain / "data" / "cat" / "1.txt").write_text("meow\n")
    scripts = {
        "run.sh": '#!/bin/sh\necho "$0 $*"; . "${0%/*}/lib.sh"',
        "outer": "#!/data/bin/run.sh -x y \nignored",
        "self": "#!/data/bin/self",
        "lib.sh": "echo beside",
    }
    (found.plain / "data" / "bin").mkdir()
    for name, text in scripts.items():
        (found.plain / "data" / "bin" / name).write_text(f"{text}\n")
        (found.plain / "data" / "bin" / name).chmod(0o644 if name == "lib.sh" else 0o755)
    found.make_pack()
    return found


def store_exec(twins, *words):
    return subprocess.run(
        [sys.executable, "-m", "paceline", "store", "exec", *words],
        cwd=twins.top,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_cat_reads_a_sample_through_the_mount(twins):
    done = store_exec(twins, "--mount", "pack:/data", "--", "cat", "/data/cat/1.txt")
    assert (done.returncode, done.stdout, done.stderr) == (0, "meow\n", "")


def test_it_exits_as_the_program_does(twins):
    words = ("--mount", "pack:/data", "--", "sh", "-c")
    assert store_exec(twins, *words, "test -f /data/cat/1.txt && exit 7").returncode == 7
    assert store_exec(twins, *words, "kill -9 $$").returncode == -9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/data/bin/run.sh", "a", "b"], "/data/bin/run.sh a b\nbeside\n"),
        (["/data/cat/../bin/run.sh"], "/data/bin/run.sh \nbeside\n"),
        (["sh", "-c", "cd /data/bin && ./run.sh c"], "./run.sh c\nbeside\n"),
        (["sh", "-c", "/data/bin/outer d"], "/data/bin/run.sh -x y /data/bin/outer d\nbeside\n"),
        ([sys.executable, "-c", SPAWNS], "/data/bin/run.sh -x y /data/bin/outer e\nbeside\n"),
    ],
)
def test_scripts_of_a_mount_know_their_names(twins, words, said):
    """They were /proc/self/fd/3, and a program in a mount was none."""
    done = store_exec(twins, "--mount", "pack:/data", "--", *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["/data/bin/nothing"], 127, "No such file"),
        (["/data/bin/lib.sh"], 126, "Permission denied"),
        (["/data/bin/self"], 126, "Too many levels"),
        ([sys.executable, "-c", SPAWNS.replace("outer", "self")], 1, "Too many levels"),
    ],
)
def test_what_is_no_program_of_a_mount_fails_as_elsewhere(twins, words, code, said):
    done = store_exec(twins, "--mount", "pack:/data", "--", *words)
    assert done.returncode == code
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--mount", "pack", "--", "cat"], 2, "names no pack and path"),
        (["--mount", "pack:", "--", "cat"], 2, "names no pack and path"),
        (["--mount", "pack:/", "--", "cat"], 2, "cannot be mounted as /"),
        (["--mount", "nope:/data", "--", "cat"], 2, "nope"),
        (["--mount", "pack:/data", "--mount", "pack:/data/x", "--", "cat"], 2, "overlap"),
        (["--mount", "pack:.", "--", "cat"], 2, "would hide the pack"),
        (["--mount", "pack:plain/data/cat/1.txt", "--", "cat"], 2, "a file is where"),
        (["--mount", "pack:/data", "--", "no-such-program"], 2, "no program"),
        (["--mount", "pack:/data", "--only", "/bin/cat", "--", "cat"], 2, "not the name"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(twins, words, code, said):
    done = store_exec(twins, *words)
    assert done.returncode == code
    assert said in done.stderr, done.stderr


def test_static_and_setuid_programs_are_named(twins, tmp_path):
    (tmp_path / "static.c").write_text(STATIC)
    program = tmp_path / "static"
    subprocess.run(["cc", "-static", "-o", program, tmp_path / "static.c"], check=True)
    done = store_exec(twins, "--mount", "pack:/data", "--", str(program))
    assert done.returncode == 2
    assert str(program) in done.stderr
    assert "static" in done.stderr
    assert "FUSE" in done.stderr
    script = tmp_path / "script"
    script.write_text(f"#!{program}\n")
    script.chmod(0o755)
    assert "static" in store_exec(twins, "--mount", "pack:/data", "--", str(script)).stderr
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755 | stat.S_ISUID)
    done = store_exec(twins, "--mount", "pack:/data", "--", str(program))
    assert done.returncode == 2
    assert "setuid" in done.stderr


def test_dry_run_prints_the_variables(twins):
    words = ("--mount", "pack:/data", "--dry-run", "--json", "cat")
    done = without_torch("store", "exec", *words, cwd=twins.top)
    shown = json.loads(done.stdout)
    assert shown["version"] == 1
    assert shown["variables"]["_PACELINE_MOUNTS"] == f"{twins.top / 'pack'}\t/data"


def test_a_damaged_sample_is_an_error_that_names_it(twins, tmp_path):
    broken = Twins(tmp_path)
    (broken.plain / "data").mkdir(parents=True)
    for name in ("good", "bad"):
        (broken.plain / "data" / name).write_bytes(name.encode() * 5000)
    broken.make_pack()
    shard = tmp_path / "pack" / "shard-00000.pace"
    body = bytearray(shard.read_bytes())
    body[body.index(b"badbad") + 1000] ^= 1
    shard.write_bytes(body)
    code, out, complaint = broken.shell("cat data/good | wc -c; cat data/bad", is_mounted=True)
    assert (code, out) == (1, b"20000\n")
    assert b"bad: checksum" in complaint
    assert b"Input/output error" in complaint
    # In parts, by mmap and by a stream.
    for read in ("f.read(10)", "mmap.mmap(f.fileno(), 0, prot=1)"):
        line = f"import mmap; f = open('data/bad', 'rb', buffering=0); {read}"
        done = broken.run([sys.executable, "-c", line], is_mounted=True)
        assert done.returncode == 1
        assert b"Input/output error" in done.stderr


def test_a_shard_is_opened_when_it_is_read(tmp_path):
    """Who asks for names only does not pay for shards; if one is missing, its files fail."""
    broken = Twins(tmp_path)
    (broken.plain / "data").mkdir(parents=True)
    (broken.plain / "data" / "file").write_text("text\n")
    broken.make_pack()
    (tmp_path / "pack" / "shard-00000.pace").unlink()
    code, out, complaint = broken.shell("stat -c %s data/file; cat data/file", is_mounted=True)
    assert (code, out) == (1, b"5\n")
    assert b"No such file or directory (" in complaint
    assert b"shard-00000.pace)" in complaint
    assert b"Input/output error" in complaint


def test_a_pack_that_is_gone_is_said_once(twins):
    environ = {**os.environ, **twins.variables()}
    environ["_PACELINE_MOUNTS"] = f"/no/such/pack\t{twins.mount}"
    done = twins.run(["cat", "data/a", "data/b"], is_mounted=True, env=environ)
    assert done.returncode == 1
    assert done.stderr.count(b"cannot be mounted") == 1


def test_ranks_of_a_run_see_the_mount(twins):
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--no-record", "--out", "run"]
    program = ["sh", "-c", 'test "$(cat /data/cat/1.txt)" = meow && exit 0; exit 9']
    done = subprocess.run(
        [*command, "--mount", "pack:/data", *program],
        cwd=twins.top,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    config = json.loads((twins.top / "run" / "config.json").read_text())
    assert config["values"]["mounts"] == {"value": ["pack:/data"], "provenance": "flag"}
