"""Reads a folder in every way that data sets are read: `posix_probes.py make|read FOLDER`.

`read` prints a JSON object: for each probe what it found, or null where its library is missing.
What is found does not depend on where the folder is.
"""

# The functions of os are what is tested.
# ruff: noqa: PTH109, PTH110, PTH112, PTH113, PTH208

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

PROBES = {}


def probe(name, *libraries):
    def add(function):
        PROBES[name] = (libraries, function)
        return function

    return add


def library(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def make(top):
    (top / "b").mkdir(parents=True)
    (top / "t.txt").write_text("some text\n" * 10)
    (top / "m.py").write_text("V = 42\n")
    numbers = np.arange(1000, dtype=np.float32)
    numbers.tofile(top / "x.raw")
    np.save(top / "b" / "x.npy", numbers)
    np.savez(top / "b" / "x.npz", a=numbers)
    if image := library("PIL.Image"):
        picture = image.fromarray(
            (np.arange(64 * 48 * 3) % 251).astype(np.uint8).reshape(48, 64, 3)
        )
        for kind in ("jpg", "png"):
            picture.save(top / f"x.{kind}")
    if torch := library("torch"):
        torch.save({"a": torch.arange(1000.0)}, top / "x.pt")
    if h5py := library("h5py"):
        with h5py.File(top / "x.h5", "w") as file:
            file["d"] = numbers
    if pyarrow := library("pyarrow"):
        importlib.import_module("pyarrow.parquet").write_table(
            pyarrow.table({"a": numbers}), top / "x.parquet"
        )


probe("open and read text")(lambda top: (top / "t.txt").read_text())
probe("os.listdir")(lambda top: sorted(os.listdir(top)))
probe("os.scandir and stat")(
    lambda top: sum(e.stat().st_size for e in os.scandir(top) if e.is_file())
)
probe("os.walk")(lambda top: sorted(name for _, _, names in os.walk(top) for name in names))
probe("pathlib.glob")(lambda top: sorted(path.name for path in top.glob("**/*.*")))
probe("os.access")(
    lambda top: [os.access(top / "t.txt", mode) for mode in (os.F_OK, os.R_OK, os.X_OK)]
)
probe("numpy.load")(lambda top: float(np.load(top / "b" / "x.npy").sum()))
probe("numpy.load mapped")(lambda top: float(np.load(top / "b" / "x.npy", mmap_mode="r").sum()))
probe("numpy.load npz")(lambda top: float(np.load(top / "b" / "x.npz")["a"].sum()))
probe("numpy.fromfile")(lambda top: float(np.fromfile(top / "x.raw", np.float32).sum()))
probe("numpy.memmap")(lambda top: float(np.memmap(top / "x.raw", np.float32, "r").sum()))


@probe("seek and readinto")
def _(top):
    with (top / "t.txt").open("rb") as file:
        file.seek(5)
        target = bytearray(4)
        return file.readinto(target), target.decode(), file.tell()


@probe("exists, isdir, isfile")
def _(top):
    paths = (top / "t.txt", top, top / "nope", top / "t.txt" / "x")
    return [(os.path.exists(path), os.path.isdir(path), os.path.isfile(path)) for path in paths]


@probe("os.dup shares the position")
def _(top):
    first = os.open(top / "t.txt", os.O_RDONLY)
    head = os.read(first, 3)
    second = os.dup(first)
    return (head + os.read(second, 3) + os.read(first, 3)).decode()


@probe("mmap")
def _(top):
    import mmap

    with (top / "t.txt").open("rb") as file:
        maps = [mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=flags) for flags in (1, 2)]
        return [mapped[5:9].decode() for mapped in maps]


@probe("PIL of JPEG", "PIL.Image")
def _(top):
    with library("PIL.Image").open(top / "x.jpg") as image:
        return image.size, image.convert("RGB").getpixel((3, 4))


@probe("PIL of PNG", "PIL.Image")
def _(top):
    with library("PIL.Image").open(top / "x.png") as image:
        return image.size, image.convert("RGB").getpixel((3, 4))


@probe("h5py", "h5py")
def _(top):
    with library("h5py").File(top / "x.h5", "r") as file:
        return float(file["d"][:].sum())


@probe("cv2.imread", "cv2")
def _(top):
    return library("cv2").imread(str(top / "x.png")).shape


@probe("torch.load", "torch")
def _(top):
    return float(library("torch").load(top / "x.pt")["a"].sum())


@probe("torch.load mapped", "torch")
def _(top):
    return float(library("torch").load(top / "x.pt", mmap=True)["a"].sum())


@probe("torch.from_file", "torch")
def _(top):
    return float(library("torch").from_file(str(top / "x.raw"), size=100).sum())


@probe("pyarrow of Parquet", "pyarrow.parquet")
def _(top):
    return library("pyarrow.parquet").read_table(top / "x.parquet").num_rows


@probe("pyarrow.memory_map", "pyarrow")
def _(top):
    return library("pyarrow").memory_map(str(top / "t.txt")).read(4).decode()


@probe("shutil.copy")
def _(top):
    import shutil

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copy2(top / "t.txt", folder))
        return copy.read_text(), copy.stat().st_mtime_ns == (top / "t.txt").stat().st_mtime_ns


@probe("os.sendfile")
def _(top):
    with (top / "t.txt").open("rb") as source, tempfile.TemporaryFile() as target:
        sent = os.sendfile(target.fileno(), source.fileno(), 5, 4)
        target.seek(0)
        return sent, target.read().decode()


@probe("import of a module")
def _(top):
    sys.path.insert(0, str(top))
    return importlib.import_module("m").V


@probe("cat in a subprocess")
def _(top):
    import subprocess

    return subprocess.check_output(["cat", top / "t.txt"], text=True)


@probe("stdin of a subprocess")
def _(top):
    import subprocess

    with (top / "t.txt").open() as file:
        return subprocess.check_output(["cat"], stdin=file, text=True)


# Beyond the 29 of the prototypes' table.


@probe("descriptor inherited by exec")
def _(top):
    import subprocess

    with (top / "t.txt").open("rb", buffering=0) as file:
        file.read(5)
        os.set_inheritable(file.fileno(), True)
        line = f"import os; print(os.read({file.fileno()}, 4).decode())"
        command = [sys.executable, "-c", line]
        return subprocess.check_output(command, close_fds=False, text=True)


@probe("eight threads and four forked children")
def _(top):
    import multiprocessing
    import threading

    wrong = []

    def read():
        for _ in range(50):
            with (top / "x.raw").open("rb") as file:
                body = file.read(100) + file.read()
            if body != np.arange(1000, dtype=np.float32).tobytes():
                wrong.append(len(body))
            if (top / "t.txt").stat().st_size != 100 or len(os.listdir(top / "b")) != 2:
                wrong.append("status")

    threads = [threading.Thread(target=read) for _ in range(8)]
    children = [multiprocessing.get_context("fork").Process(target=read) for _ in range(4)]
    for worker in [*threads, *children]:
        worker.start()
    for worker in [*threads, *children]:
        worker.join()
    return wrong, [child.exitcode for child in children]


@probe("working folder")
def _(top):
    before = os.getcwd()
    os.chdir(top / "b")
    try:
        inside = Path.cwd().relative_to(Path(before) / top)
        return str(inside), sorted(os.listdir()), Path("../t.txt").stat().st_size
    finally:
        os.chdir(before)


@probe("select.poll")
def _(top):
    import select

    poll = select.poll()
    with (top / "t.txt").open("rb") as file:
        poll.register(file, select.POLLIN)
        return [event for _, event in poll.poll(1000)]


@probe("statvfs and lockf")
def _(top):
    import fcntl

    with (top / "t.txt").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        fcntl.lockf(file, fcntl.LOCK_SH)
    return os.statvfs(top).f_namemax


@probe("the C library's glob and nftw")
def _(top):
    import ctypes

    class Glob(ctypes.Structure):
        _fields_ = (
            ("count", ctypes.c_size_t),
            ("paths", ctypes.POINTER(ctypes.c_char_p)),
            ("offset", ctypes.c_size_t),
            ("flags", ctypes.c_int),
            ("functions", ctypes.c_void_p * 5),
        )

    library_c = ctypes.CDLL(None)
    found = Glob()
    library_c.glob(os.fsencode(top / "*.txt"), 0, None, ctypes.byref(found))
    walked = []
    visit = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p
    )(lambda path, _, kind, __: walked.append((path.decode(), kind)) or 0)
    physical, depth = 1, 8
    codes = [library_c.nftw(os.fsencode(top), visit, 9, flags) for flags in (physical, depth)]
    return [path.decode() for path in found.paths[: found.count]], codes, sorted(walked)


def read(top):
    found = {}
    for name, (libraries, function) in PROBES.items():
        if any(library(needed) is None for needed in libraries):
            found[name] = None
            continue
        try:
            found[name] = function(top)
        except BaseException as problem:  # noqa: BLE001  # every one is a result
            found[name] = f"{type(problem).__name__}: {problem}"
    return found


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
    else:
        print(json.dumps(read(Path(sys.argv[2]))))
