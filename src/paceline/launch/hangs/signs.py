"""What the operating system says of a rank's processes, from ``/proc``."""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.core.processes import descendants, stat_fields
from paceline.launch.hangs.detector import Signs

_PROC = Path("/proc")


def signs_of(
    process: int, thread: int, own_bytes: int, stack: str = "", *, thread_alone: bool = False
) -> Signs:
    """Return the signs of work of a rank.

    Args:
        process: the rank's process; its descendants (loader workers, compilers) count with it.
        thread: of the training loop.
        own_bytes: that its recorder has written.
        stack: of that thread, if it was taken.
        thread_alone: whether the process's other threads are passed over: those of a
            `multiprocessing.Pool` spin once one of its processes was killed.
    """
    try:
        state = stat_fields(process)[0].decode()
    except OSError:
        return Signs(state="")
    below = descendants(process)
    tree = [process, *below]
    on_cores, ready = _scheduled_ns(process, thread)
    if not thread_alone:
        on_cores = _cpu_ns(process)
    return Signs(
        state=state,
        # Threads that wake now and then wait long for a core on a busy machine: the main one alone.
        cpu_ns=on_cores + ready + sum(_cpu_ns(pid) for pid in below),
        io_bytes=sum(_io_bytes(pid) for pid in tree) - own_bytes,
        switches=_switches(process, thread),
        stack=stack,
    )


def kernel_place(process: int, thread: int) -> tuple[str, ...]:
    """Return where a thread is in the kernel, as far as the kernel tells: lines for people."""
    folder = _PROC / str(process) / "task" / str(thread)
    lines = []
    with contextlib.suppress(OSError, IndexError):
        lines.append(f"state {stat_fields(process)[0].decode()}")
    for name in ("wchan", "syscall", "stack"):
        with contextlib.suppress(OSError):
            text = (folder / name).read_text(encoding="utf-8", errors="replace").strip()
            lines += [f"{name}: {line}" for line in text.splitlines() if line != "0"]
    return tuple(lines)


def _cpu_ns(process: int) -> int:
    """Return the time that a process's threads were on cores."""
    total = 0
    with contextlib.suppress(OSError):
        for folder in (_PROC / str(process) / "task").iterdir():
            total += _scheduled_ns(process, int(folder.name))[0]
    return total


def _scheduled_ns(process: int, thread: int) -> tuple[int, int]:
    """Return the time that a thread was on a core, and that it was ready without one."""
    path = _PROC / str(process) / "task" / str(thread) / "schedstat"
    with contextlib.suppress(OSError, ValueError):
        on_core, ready, *_ = path.read_text("ascii").split()
        return int(on_core), int(ready)
    return 0, 0


def _io_bytes(process: int) -> int:
    """Return the bytes that a process has read and written by system calls."""
    with contextlib.suppress(OSError, ValueError):
        text = (_PROC / str(process) / "io").read_text("ascii")
        fields = dict(line.split(": ") for line in text.splitlines())
        return int(fields["rchar"]) + int(fields["wchar"])
    return 0


def _switches(process: int, thread: int) -> int:
    path = _PROC / str(process) / "task" / str(thread) / "status"
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text("utf-8", "replace").splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                return int(line.split()[1])
    return 0
