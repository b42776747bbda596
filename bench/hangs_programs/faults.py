"""Faults of one rank that make all others wait, and slow work that is no fault."""

import os
import signal
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path


def hold_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def read_fifo():
    path = Path(tempfile.mkdtemp()) / "fifo"
    os.mkfifo(path)
    path.read_bytes()


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def die():
    os._exit(0)


def checkpoint(seconds):
    """Write a file in parts, as a slow file system takes them."""
    with tempfile.TemporaryFile() as file:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.2)


def compile_code(seconds):
    """Work on one core, as a compiler does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        zlib.compress(os.urandom(1 << 16))


def load_slowly(seconds):
    """Wait for many small samples, one after the other."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.1)


def load_in_child(seconds):
    """Wait for a child process that works."""
    if os.fork() == 0:
        compile_code(seconds)
        os._exit(0)
    os.wait()


FAULTS = {"lock": hold_lock, "fifo": read_fifo, "stop": stop, "die": die}
SLOW = {
    "checkpoint": checkpoint,
    "compile": compile_code,
    "loader": load_slowly,
    "child": load_in_child,
}


def commit(name):
    """Do what `name` says; return whether this rank is to skip its collective."""
    print(f"FAULT {time.time()}", flush=True)
    if name.startswith("slow-"):
        _, what, seconds = name.split("-")
        SLOW[what](float(seconds))
    elif name in FAULTS:
        FAULTS[name]()
    sys.stdout.flush()
    return name == "skip"
