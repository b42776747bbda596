"""Writes, renames and removes in a folder, and prints what it finds."""

import errno
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

top = Path(sys.argv[1])


def code(call, *args):
    try:
        call(*args)
    except OSError as problem:
        return errno.errorcode[problem.errno]
    return "good"


def write(name, body, how="w"):
    with open(top / name, how) as file:
        file.write(body)


write("a", "1")
write("a", "2", "a")
with open(top / "a", "r+b") as file:
    file.seek(1)
    file.write(b"3")
print("changed", (top / "a").read_text(), os.stat(top / "a").st_size)
print("exclusive", code(open, top / "a", "x"), code(os.mkdir, top / "a"))
print(
    "missing", code(open, top / "no"), code(open, top / "no", "r+"), code(open, top / "no/a", "w")
)
print("folder", code(os.open, top, os.O_WRONLY), code(os.unlink, top / "a/b"))

with open(top / "mapped", "w+b") as file:
    file.truncate(4096)
    with mmap.mmap(file.fileno(), 4096) as memory:
        memory[:4] = b"page"
        memory.flush()
    os.fsync(file.fileno())
with (
    open(top / "mapped", "rb") as file,
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
):
    print("mapped", memory[:4], len(memory))

with open(top / "sent", "wb") as to, open(top / "mapped", "rb") as source:
    print("sendfile", os.sendfile(to.fileno(), source.fileno(), 0, 100))
os.truncate(top / "sent", 50)
os.chmod(top / "sent", 0o600)
os.utime(top / "sent", (1, 2))
found = os.stat(top / "sent")
print("sent", found.st_size, oct(found.st_mode), found.st_mtime)

os.makedirs(top / "d" / "e")
write("d/e/f", "deep")
os.rename(top / "d", top / "g")
print(
    "renamed", (top / "g/e/f").read_text(), code(os.rmdir, top / "g"), code(os.listdir, top / "d")
)
shutil.copytree(top / "g", top / "h")
shutil.rmtree(top / "g")
print("walked", sorted(str(Path(at) / name) for at, _, names in os.walk(top) for name in names))
print("scanned", sorted((entry.name, entry.is_file()) for entry in os.scandir(top)))

with tempfile.NamedTemporaryFile(dir=top, delete=False) as file:
    file.write(b"temporary")
    file.flush()
    os.replace(file.name, top / "final")
print("replaced", (top / "final").read_text())
with tempfile.TemporaryDirectory(dir=top) as folder:
    (Path(folder) / "x").write_text("x")
with tempfile.TemporaryFile(dir=top) as file:
    file.write(b"gone")

os.chdir(top / "h")
Path("here").write_text("relative")
print("here", os.getcwd(), sorted(os.listdir(".")), Path("../a").read_text())
folder = os.open(".", os.O_RDONLY)
with os.fdopen(os.open("below", os.O_CREAT | os.O_WRONLY, dir_fd=folder), "w") as file:
    file.write("below")
os.rename("below", "under", src_dir_fd=folder, dst_dir_fd=folder)
print("below", sorted(os.listdir(folder)), os.stat("under", dir_fd=folder).st_size)
os.unlink("under", dir_fd=folder)
os.close(folder)

with open("out", "w") as file:
    subprocess.run(["sh", "-c", "echo shell; cat here"], stdout=file, check=True)
print("out", Path("out").read_text())
process = subprocess.Popen(
    ["sh", "-c", "read x; echo $x"], stdin=subprocess.PIPE, stdout=open("late", "w")
)
process.communicate(b"late\n")
print("late", Path("late").read_text())
print("outside", code(os.rename, "here", "/proc/here"), os.path.realpath("here"))
sys.stdout.flush()
sys.stdout = open("at-exit", "w")
print("by")
