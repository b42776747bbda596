"""Checks when names appear in an output, who may write them, and what processes leave."""

import os
import signal
import subprocess
import sys
from pathlib import Path

top = Path(sys.argv[1])


def in_child(work):
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_refused(name, how):
    try:
        open(top / name, how).close()
    except FileExistsError:
        return True
    return False


file = open(top / "x", "w")
file.write("first")
file.flush()
os.fsync(file.fileno())
assert not (top / "x").exists()
assert "x" not in os.listdir(top)
assert is_refused("x", "x")
assert is_refused("x", "w")
assert in_child(lambda: None if is_refused("x", "w") else os.abort()) == 0
assert in_child(lambda: file.close()) == 0  # a copy of the descriptor
assert not (top / "x").exists()
copy = os.dup(file.fileno())
file.close()
assert not (top / "x").exists()
os.close(copy)
assert (top / "x").read_text() == "first"

with open(top / "x", "a") as file:  # the old version until it is closed
    file.write(" second")
    file.flush()
    assert (top / "x").read_text() == "first"
    assert is_refused("x", "w")
    with open(top / "x") as reader:
        pass
assert (top / "x").read_text() == "first second"


def crash():
    file = open(top / "crashed", "w")
    file.write("lost")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


assert in_child(crash) == -signal.SIGKILL
assert not (top / "crashed").exists()
with open(top / "crashed", "x") as file:
    file.write("the next writer")
assert (top / "crashed").read_text() == "the next writer"

# A worker that was forked meanwhile has the descriptor by chance, a program on purpose.
reader, writer = os.pipe()
file = open(top / "log", "w")
child = os.fork()
if child == 0:
    os.close(writer)
    os.read(reader, 1)
    os._exit(0)
file.write("logged")
file.close()
assert (top / "log").read_text() == "logged"
os.close(writer)
os.waitpid(child, 0)

file = open(top / "program", "w")
process = subprocess.Popen(["sh", "-c", "read x; echo $x"], stdin=subprocess.PIPE, stdout=file)
file.close()
assert not (top / "program").exists()
process.communicate(b"by a program\n")
assert (top / "program").read_text() == "by a program\n"

try:
    os.symlink("x", top / "link")
except PermissionError:
    print("all as expected")
