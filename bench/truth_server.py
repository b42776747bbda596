"""The server from which `truth.py` forks ranks on torch: it has torch imported."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import subprocess
from pathlib import Path

COMPILE_S = 60.0
HERE = Path(__file__).parent
MODULES = [
    "torch.distributed",
    "paceline.trace.collectors.torch",
    "truth_ranks",
    "truth_ring_ranks",
]


def compile_slow_files(folder):
    """Return the library that slows calls for files down, compiled into a folder.

    Raises:
        RuntimeError: there is no C compiler.
    """
    library = Path(folder) / "slow_files.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("there is no C compiler for the library that slows files down")
    source = HERE / "slow_files.c"
    command = [compiler, "-O2", "-shared", "-fPIC", source, "-o", library, "-ldl"]
    subprocess.run(command, check=True, timeout=COMPILE_S)
    return library


def start_server(root, slow_files=None):
    """Return the context whose processes are forked from the server.

    Args:
        root: the folder of all cases, in which calls for files do not count.
        slow_files: the library that slows them down; if given, they are recorded.
    """
    from paceline.launch.file_calls import file_call_variables

    os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=str(HERE))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    variables = {}
    if slow_files is not None:
        variables = {"LD_PRELOAD": str(slow_files)}
        variables |= file_call_variables(root, {**os.environ, **variables})
    with _set(variables):
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _set(variables):
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
