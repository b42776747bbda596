"""One rank: follows its budget of cores, starts the recorder, runs the program.

Started with ``-m`` by the launcher; nothing imports it. A Python script or module runs in this
process and sees what it would see under ``python script.py`` or ``python -m module``: its own argv,
its folder first on the path, its module as ``__main__``. Its traceback goes to a file, so that the
launcher can print the traceback of the first rank to fail. Any other program is a child of
this process.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.core import logs
from paceline.core.config import environment
from paceline.core.errors import PacelineError
from paceline.core.on_import import on_import
from paceline.core.processes import die_with_parent, is_background_job
from paceline.launch import attach
from paceline.launch.budget.apply import follow
from paceline.launch.budget.budget import RankBudget
from paceline.launch.failure_report import write_report
from paceline.launch.guard import guard, leave_like
from paceline.launch.program import ProgramKind
from paceline.launch.startup.sitecustomize import offer_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_BUCKETS = "paceline.launch.worker.ddp_buckets"
_MEMORY = "paceline.training.out_of_core.script"
_INPUT = "paceline.launch.worker.paced_input"
_ORDER = "paceline.launch.worker.ddp_order"
_ENDED = "paceline.launch.worker.ended_groups"
_BALANCE = "paceline.training.balance.script"
_COLLECTIVES = "paceline.collectives.registration"
_TUNING = "paceline.launch.tuning.session"


def main(argv: list[str]) -> int:
    """Run one rank; return its exit code."""
    options = _parse(argv)
    die_with_parent(options.launcher)  # no orphan keeps the cores
    environ = environment()
    rank = int(environ["RANK"])
    logs.configure(rank)
    _take_cores(options)
    if options.record == "on":  # of what this process starts; itself is recorded below
        os.environ.update(attach.child_environment(options.run, options.profile_steps))
    if options.kind == ProgramKind.EXECUTABLE:
        command = [options.program, *options.args]
        return leave_like(guard(options.launcher, command))
    offer_stacks()
    if options.temporary:  # child processes inherit it, as they do a folder that Python has chosen
        config = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001  # no public setting
        config["tempdir"] = options.temporary
    _change_torch(options, rank, environ)
    if options.record == "on":
        try:
            attach.start(options.run, rank, int(environ["WORLD_SIZE"]), options.profile_steps)
        except OSError as problem:  # a full disk, or a folder that this node does not see
            write_report(problem, options.run, rank)
            return 1
    if is_background_job():  # SIGINT, by which the launcher stops a rank, closes its trace
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run = _run_module if options.kind == ProgramKind.MODULE else _run_script
    helpers: list[Any] = []
    try:
        helpers += _helpers(options, rank)
        return _exit_code_of(run, options, rank)
    except PacelineError as problem:  # no spill file can be made
        write_report(problem, options.run, rank)
        return problem.exit_code
    finally:
        # A second Ctrl-C must not interrupt what closes the trace.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for helper in helpers:
                helper.close()
        finally:
            attach.close()


def _helpers(options: argparse.Namespace, rank: int) -> list[Any]:
    """Put in place what works on the script's training from inside; each is to be closed."""
    helpers: list[Any] = []
    if options.memory_budget:
        result = options.run / "memory" / f"rank-{rank:05}.json"
        helpers.append(
            importlib.import_module(_MEMORY).ScriptMemory(
                options.memory_budget, options.spill_folder, result, rank
            )
        )
    if options.rebalance:
        given = [] if options.rebalance == "measured" else options.rebalance.split(",")
        weights = [float(weight) for weight in given]
        balance = importlib.import_module(_BALANCE).ScriptBalance(options.run, weights=weights)
        balance.install()
        helpers.append(balance)
    return helpers


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m paceline.launch.worker")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--launcher", type=int, required=True, help="process id of the launcher")
    parser.add_argument("--budget", default="", help="its budget of cores, in JSON; none: unbound")
    parser.add_argument("--server", default="", help="cores of the node's servers")
    parser.add_argument("--temporary", help="folder for multiprocessing's files")
    parser.add_argument("--record", choices=("on", "off"), default="on")
    parser.add_argument("--profile-steps", type=int, default=0, help="steps to profile")
    parser.add_argument("--collectives", choices=("torch", "paceline"), default="torch")
    parser.add_argument("--pace", choices=("auto", "on", "off"), default="off")
    parser.add_argument("--threads", type=int, help="compute threads of the plan, without a budget")
    parser.add_argument(
        "--buckets", type=int, nargs=2, help="bytes of DDP's buckets, and of the first"
    )
    parser.add_argument("--rebalance", default="", help="weights of the first shares, or measured")
    parser.add_argument("--memory-budget", type=int, help="bytes of the process")
    parser.add_argument("--spill-folder", default="", help="folder of the spill file")
    parser.add_argument("--tune", default="", help="a setting and two values of it, to try")
    parser.add_argument("--kind", choices=tuple(ProgramKind), default=ProgramKind.SCRIPT)
    parser.add_argument("program")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def _change_torch(options: argparse.Namespace, rank: int, environ: Mapping[str, str]) -> None:
    """Change in torch what the plan and the options say; by importlib: these modules import it."""
    if options.buckets:
        importlib.import_module(_BUCKETS).set_bucket_bytes(*options.buckets)
    if options.collectives == "paceline":
        importlib.import_module(_COLLECTIVES).replace_gloo()
    if options.pace != "off":
        on_import(
            "torch",
            lambda _: importlib.import_module(_INPUT).pace_input(options.pace),
        )
    if options.record == "on":  # which imports torch anyway
        importlib.import_module(_ORDER).check_order()
    else:
        on_import("torch", lambda _: importlib.import_module(_ENDED).hold_ended_groups())
    if options.tune:
        seed = int(environ["MASTER_PORT"])  # another one in each run, the same on its ranks
        importlib.import_module(_TUNING).start(options.tune, options.run, rank, seed)


def _take_cores(options: argparse.Namespace) -> None:
    """Give this rank its cores and threads."""
    if options.budget:
        follow(RankBudget.from_text(options.budget), options.server)
    elif options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)


def _exit_code_of(
    run: Callable[[str, list[str]], None], options: argparse.Namespace, rank: int
) -> int:
    """Run Python code as ``__main__``; write what it raises to the run's folder."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__)
    sys.modules["__main__"] = module
    try:
        run(options.program, options.args)
    except SystemExit as stop:
        return _stop_code(stop, options.run, rank)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:  # noqa: BLE001  # whatever the script raises is its failure
        try:
            write_report(error, options.run, rank, own_files=_OWN_FILES)
        except Exception:  # noqa: BLE001  # of torch's handler, as one more worker ended just now
            write_report(error, options.run, rank, own_files=_OWN_FILES)
        return 1
    return 0


_OWN_FILES = (__file__, runpy.__file__, "<frozen runpy>")


def _run_script(script: str, args: list[str]) -> None:
    """Execute a file as `python script` does."""
    path = Path(script)
    module = sys.modules["__main__"]
    module.__dict__.update(__file__=str(path))
    sys.argv = [script, *args]
    sys.path[0] = str(path.resolve().parent)
    # Not with this file's __future__ flags: they would turn the script's annotations to text.
    code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _run_module(name: str, args: list[str]) -> None:
    """Execute a module as `python -m name` does, which calls the same function."""
    sys.argv = ["-m", *args]
    sys.path[0] = str(Path.cwd())
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # noqa: SLF001  # CPython's main calls it by this name


def _stop_code(stop: SystemExit, run: Path, rank: int) -> int:
    if stop.code is None or isinstance(stop.code, int):
        code = stop.code or 0
    else:  # a message, as sys.exit prints it
        sys.stderr.write(f"{stop.code}\n")
        code = 1
    if code:
        write_report(stop, run, rank, exit_code=code, own_files=_OWN_FILES)
    return code


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
