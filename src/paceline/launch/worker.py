"""One rank: binds itself to its cores, starts the recorder, runs the script as ``__main__``.

Started with ``-m`` by the launcher; nothing imports it. The script sees what it would see under
``python script.py``: its own argv, its folder first on the path, its module as ``__main__``. Its
traceback goes to a file, so that the launcher can print the traceback of the first rank to fail.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.core import logs
from paceline.core.affinity import core_binding
from paceline.core.clock import SystemClock
from paceline.core.config import environment
from paceline.core.processes import die_with_parent
from paceline.native import Recorder
from paceline.trace.format.files import trace_name

if TYPE_CHECKING:
    from collections.abc import Mapping

_COLLECTOR = "paceline.trace.collectors.torch"
_BUCKETS = "paceline.launch.ddp_buckets"


def main(argv: list[str]) -> int:
    """Run one rank; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.worker")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--launcher", type=int, required=True, help="process id of the launcher")
    parser.add_argument(
        "--cores", default="", help="the node's cores, separated by commas; none: unbound"
    )
    parser.add_argument("--temporary", help="folder for multiprocessing's files")
    parser.add_argument("--record", choices=("on", "off"), default="on")
    parser.add_argument("--threads", type=int, help="compute threads of the plan")
    parser.add_argument(
        "--buckets", type=int, nargs=2, help="bytes of DDP's buckets, and of the first"
    )
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    die_with_parent(options.launcher)  # no orphan keeps the cores
    environ = environment()
    rank = int(environ["RANK"])
    logs.configure(rank)
    _bind(options.cores, environ, options.threads)
    if options.temporary:  # child processes inherit it, as they do a folder that Python has chosen
        config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001  # no public setting
        config["tempdir"] = options.temporary
    if options.buckets:  # importlib, because this module imports torch
        importlib.import_module(_BUCKETS).set_bucket_bytes(*options.buckets)
    if options.record == "off":
        return _run_script(options.script, options.args, options.run, rank)
    path = options.run / "trace" / trace_name(rank)
    try:
        recorder = Recorder(str(path), rank, int(environ["WORLD_SIZE"]))
    except OSError as problem:  # a full disk, or a folder that this node does not see
        _report_failure(problem, options.run, rank)
        return 1
    # importlib, because this module imports torch: only this process may load it, and only after
    # its threads and cores are set.
    module = importlib.import_module(_COLLECTOR)
    collector = module.TorchCollector(recorder)
    collector.install()
    try:
        return _run_script(options.script, options.args, options.run, rank)
    finally:
        collector.close()
        recorder.close()


def _bind(cores: str, environ: Mapping[str, str], threads: int | None) -> None:
    """Give this rank its cores and threads; a plan's `threads` override those of its share."""
    if threads:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if not cores:
        return
    binding = core_binding(
        [int(core) for core in cores.split(",")],
        int(environ["LOCAL_RANK"]),
        int(environ["LOCAL_WORLD_SIZE"]),
        {} if threads else environ,
    )
    if not threads and (binding.cores or "OMP_NUM_THREADS" not in environ):
        os.environ["OMP_NUM_THREADS"] = str(binding.threads)
    if len(binding.cores) >= (threads or 1):  # more threads than cores of its own: unbound
        os.sched_setaffinity(0, binding.cores)


def _run_script(script: str, args: list[str], run: Path, rank: int) -> int:
    """Execute the script as `python script` would; write its exception to the run's folder."""
    path = Path(script)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(path), __builtins__=__builtins__)
    sys.modules["__main__"] = module
    sys.argv = [script, *args]
    sys.path[0] = str(path.resolve().parent)
    try:
        # Not with this file's __future__ flags: they would turn the script's annotations to text.
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit as stop:
        return _exit_code(stop, run, rank)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # noqa: BLE001  # whatever the script raises is its failure
        _report_failure(error, run, rank)
        return 1
    return 0


def _exit_code(stop: SystemExit, run: Path, rank: int) -> int:
    if stop.code is None or isinstance(stop.code, int):
        code = stop.code or 0
    else:  # a message, as sys.exit prints it
        sys.stderr.write(f"{stop.code}\n")
        code = 1
    if code:
        _report_failure(stop, run, rank, exit_code=code)
    return code


def _report_failure(error: BaseException, run: Path, rank: int, *, exit_code: int = 0) -> None:
    """Write the exception that ended the script to a file; an exit has no traceback."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "" if exit_code else "".join(traceback.format_exception(type(error), error, frames))
    collector = sys.modules.get(_COLLECTOR)
    report = {
        "rank": rank,
        "at_ns": int(SystemClock().wall_s() * 1e9),  # comparable between nodes
        "phase": collector.phase_of(error) if collector else "",
        "traceback": text,
        "error": f"exit code {exit_code}{_place(frames)}" if exit_code else repr(error),
    }
    try:
        path = run / "trace" / f"rank-{rank:05d}.failure"
        path.write_text(json.dumps(report), encoding="utf-8")
    except OSError:
        sys.stderr.write(text)


def _place(frames: types.TracebackType | None) -> str:
    """Return the last line of the script in the traceback, in words."""
    if frames is None:
        return ""
    stack = traceback.extract_tb(frames)
    lines = [frame.lineno for frame in stack if frame.filename == stack[0].filename]
    return f", at line {lines[-1]}"


def _leave(code: int) -> NoReturn:
    """End the process as the interpreter does, but without destroying objects and process groups.

    Tearing down a process group at exit races with its threads: it ends in std::terminate now and
    then (3 of 12 exits of a script that shards its model, also without Paceline), and the abort
    would make a successful run fail, or hide the exception of a failed run.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # joins threads, as at exit
    atexit._run_exitfuncs()  # noqa: SLF001  # what comes next at exit
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the script, or its reader left
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
