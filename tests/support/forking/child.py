"""Turns a fork into the process that the start of a Python program would have made."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import io
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

from support.forking.processes import MARK, set_mark

THREADS = "OMP_NUM_THREADS"  # OpenMP reads it at the start, torch lets it be changed
_FAILED = 120  # the code of the interpreter that cannot flush its streams
_FIRST_FREE = 200  # descriptors above all that a test passes on by number
_PR_SET_PDEATHSIG = 1
_path: list[str] = []


def use_path(path: list[str]) -> None:
    """Have programs find modules here, after the folder of their own."""
    _path[:] = path


def program_of(command):
    """Return (kind, program, arguments, options) of a command of the interpreter.

    None for options that a fork cannot follow.
    """
    words, options = list(command[1:]), []
    while words and words[0] in ("-P", "-u"):
        options.append(words.pop(0))
    if words and words[0] in ("-m", "-c"):
        return (words[0], words[1], words[2:], options) if len(words) > 1 else None
    # Folders and archives, which the interpreter runs too, are started.
    if not words or words[0].startswith("-") or Path(words[0]).suffix != ".py":
        return None
    return "script", words[0], words[1:], options


def fork(order, descriptors) -> int:
    """Fork this process for an order (`become`); return the process id once it is set up."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        become(order, descriptors, lambda: os.write(write, b"1"))
    os.close(write)
    os.read(read, 1)
    os.close(read)
    return pid


def become(order, descriptors, tell):
    """Run a program in this process, and end with it.

    Args:
        order: command, environ, cwd, session (whether it has one of its own), the numbers that the
            descriptors are to have, and, if a server forks for another process, that as `parent`.
        descriptors: open files.
        tell: is called once signals may come.
    """
    code = _FAILED
    try:
        _reset(order)
        tell()
        _take(descriptors, order["targets"])
        _open_streams("-u" in program_of(order["command"])[3])
        code = _run(order["command"])
    except BaseException:  # noqa: BLE001  # an error of this module: shown to the test
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _reset(order) -> None:
    """Undo what the parent has set that a new program does not inherit."""
    for number in signal.valid_signals():
        if signal.getsignal(number) is not signal.SIG_IGN:
            with contextlib.suppress(OSError, ValueError):  # SIGKILL, SIGSTOP
                signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    if order["session"]:
        os.setsid()
    os.chdir(order["cwd"])
    server, os_getppid = os.getppid(), os.getppid
    if "parent" in order:  # programs compare it with what their starter said
        os.getppid = lambda: order["parent"] if os_getppid() == server else os_getppid()
    os.environ.clear()
    os.environ.update(order["environ"])
    if MARK in os.environ:
        set_mark(os.environ[MARK])
    # Nothing of the command line computes, and a second thread would keep ranks from being forked.
    if (torch := sys.modules.get("torch")) and order["command"][1:3] != ["-m", "paceline"]:
        threads = int(os.environ.get(THREADS, 0)) or len(os.sched_getaffinity(0))
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
    subprocess.Popen = sys.modules["support.forking.popen"].Popen
    atexit._clear()
    logging.root.handlers.clear()
    tempfile.tempdir = None  # chosen by the variables of the parent
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _take(descriptors, targets) -> None:
    """Give descriptors the numbers that they are to have, and close all others."""
    high = [fcntl.fcntl(given, fcntl.F_DUPFD, _FIRST_FREE) for given in descriptors]
    os.closerange(0, _FIRST_FREE)
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    for given, target in zip(high, targets, strict=True):
        os.dup2(given, target)
    os.closerange(_FIRST_FREE, most + 1)


def _open_streams(unbuffered: bool) -> None:
    """Open the standard streams as the interpreter does, in UTF-8 mode."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115  # to the end
        stream = io.TextIOWrapper(
            raw,
            encoding="utf-8",
            errors="backslashreplace" if name == "stderr" else "strict",
            line_buffering=name == "stderr" or (number > 0 and raw.isatty()),
            write_through=unbuffered and number > 0,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(command) -> int:
    """Run a program as the interpreter would; return its exit code."""
    sys.orig_argv = list(command)
    code = 0
    try:
        _execute(*program_of(command))
    except SystemExit as stop:
        code = _code_of(stop)
    except KeyboardInterrupt:
        traceback.print_exc()
        code = -signal.SIGINT
    except BaseException as error:  # noqa: BLE001  # as the interpreter does
        shown = error.__traceback__
        while shown and Path(shown.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            shown = shown.tb_next
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _code_of(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return (stop.code or 0) & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _execute(kind, program, arguments, options) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__)
    sys.modules["__main__"] = main
    sys.argv = [program if kind != "-c" else "-c", *arguments]
    own = {"-m": str(Path.cwd()), "-c": "", "script": str(Path(program).resolve().parent)}[kind]
    sys.path[:] = [*([] if "-P" in options else [own]), *_path]
    if kind == "-m":
        runpy._run_module_as_main(program)
    elif kind == "-c":
        exec(compile(program, "<string>", "exec", dont_inherit=True), main.__dict__)
    else:
        main.__file__ = program
        try:
            text = Path(program).read_bytes()
        except OSError as problem:
            print(f"{sys.executable}: can't open file {program!r}: {problem}", file=sys.stderr)
            raise SystemExit(2) from None
        exec(compile(text, program, "exec", dont_inherit=True), main.__dict__)
