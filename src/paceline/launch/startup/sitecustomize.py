"""Runs at the start of every Python process below ``paceline run`` and ``paceline record``.

Almost all of these processes are not ranks: launchers, loader workers, compilers. So this module
imports nothing, and only waits for torch: a process is a rank once it has joined a process group,
or runs backward without one. Then, and not before, Paceline is imported (`launch.attach`).

The interpreter may be of another environment, one without Paceline or with an older Python: this
file uses the standard library alone. Where the user has a `sitecustomize`, it runs as well.
"""

import os
import sys

TYPE_CHECKING = False  # that of typing, which is not loaded yet
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any


STACKS_NAME = "/memfd:paceline-stacks"  # of the memory, in /proc/PID/fd


def stacks_signal() -> int:
    """Return the signal by which the launcher asks for a process's stacks (launch/hangs)."""
    # Not signal, which loads enum.
    from _signal import SIGRTMAX  # type: ignore[import-not-found]  # has no stub

    return int(SIGRTMAX) - 3  # programs use SIGUSR1 and 2, and the C library the first ones


def offer_stacks() -> None:
    """Answer `stacks_signal` with the stacks of this process's threads.

    faulthandler writes them without the GIL, which a thread that is blocked may hold, to memory of
    this process.
    """
    import faulthandler

    try:
        memory = os.memfd_create(STACKS_NAME.partition(":")[2])
        faulthandler.register(stacks_signal(), file=memory, all_threads=True)
    except (AttributeError, OSError, RuntimeError, ValueError):  # another system, a small limit
        return


class ModuleWatch:
    """A finder that calls back after a module is executed; until then it finds nothing itself."""

    def __init__(self, name: "str", callback: "Callable[[ModuleType], None]") -> None:
        self.name = name
        self.callback = callback

    def find_spec(self, fullname: "str", path: "Any" = None, target: "Any" = None) -> "Any":
        """Find the module by the other finders, and see to it that its loader calls back."""
        if fullname != self.name:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, callback = spec.loader.exec_module, self.callback

        def exec_module(module: "ModuleType") -> None:
            execute(module)
            callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader is this module's own
        return spec


def _watch_process_group(module: "Any") -> None:
    """Attach when this process has joined a process group: now it knows its rank."""
    import functools

    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: "Any", **kwargs: "Any") -> "Any":
        result = original(*args, **kwargs)
        _attach()
        return result

    module.init_process_group = init_process_group


def _watch_backward(module: "Any") -> None:
    """Attach at the first backward pass: this process trains, alone if it has no process group."""
    import functools

    original = module.backward

    @functools.wraps(original)
    def backward(*args: "Any", **kwargs: "Any") -> "Any":
        if module.backward is not backward:  # bound by its name before the collector came
            return original(*args, **kwargs)
        module.backward = original
        _attach()
        return module.backward(*args, **kwargs)

    module.backward = backward


def _attach() -> None:
    try:
        from paceline.launch import attach
    except ImportError as problem:
        python = sys.executable
        sys.stderr.write(
            f"paceline: this process trains and is not recorded: {python} has no Paceline "
            f"({problem}). Install it there: {python} -m pip install paceline\n"
        )
        return
    attach.on_training()


def _run_the_users_own(folder: "str") -> None:
    """Import the sitecustomize that Python would have found without this one, if there is one."""
    sys.path[:] = [path for path in sys.path if path != folder]
    ours = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  # it runs
    except ImportError as problem:
        if problem.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


if __name__ == "sitecustomize":
    offer_stacks()
    sys.meta_path.insert(0, ModuleWatch("torch.distributed.distributed_c10d", _watch_process_group))
    sys.meta_path.insert(0, ModuleWatch("torch.autograd", _watch_backward))
    _run_the_users_own(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120  # pathlib is not loaded yet
