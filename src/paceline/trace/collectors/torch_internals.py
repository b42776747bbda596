"""What the collector needs of torch beyond its public interface, in one place.

Each such thing is a *capability*: a name that torch may rename, or a behaviour that it may change.
`available` checks all of them once, when recording starts. What is missing costs the recording of
one kind of thing, with one warning that says what is lost; the script trains as if unrecorded.
tests/conformance/test_torch_internals.py has a test for each, which names what broke under another
version of torch. Supported and tested: 2.10 to 2.14.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import logging
import sys
import threading
from dataclasses import dataclass
from enum import Enum
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_LOG = logging.getLogger(__name__)
F = TypeVar("F")


class Capability(Enum):
    """A thing that recording needs, by what is lost without it."""

    LOADER_ITERATOR = "waiting for a DataLoader's batches (it counts as other time)"
    WORKER_LOOP = "what a DataLoader's workers do for a batch, and with it the loader's ceiling"
    OPTIMIZER_HOOKS = "optimizer steps, and with them where a step ends: no phases per step"
    STEP_CODE = "that an optimizer's step raised: later steps may count as part of it"
    DISPATCHER = "collectives and messages"
    WORKS = "waits for collectives and messages (they count as other time)"
    FUTURES = "when collectives complete, where the script does not wait for them"
    ENGINE_CALLBACK = "the wait at the end of a backward pass (it counts as backward)"
    BUFFER_BROADCAST = "DDP's wait for its broadcast of buffers (it counts as forward)"
    FUNCTIONAL_WAIT = "waits for functional collectives (they count as other time)"
    GROUP_MEMBERS = "which ranks form a group, and with them roots and peers"
    BACKENDS = "whether completion is seen: collectives of accelerators count as not seen"
    GRADIENT_HOOKS = "when gradients become ready"
    THREAD_STATE = "nothing, but completions cost 45 us more on the backend's threads"
    DYNAMO_FRAMES = (
        "nothing, but Dynamo sees the recorder: a compiled script may get other graphs and weights"
    )


# --- names ---------------------------------------------------------------------------------------


@functools.cache  # the statement alone takes microseconds amid a step
def c10d() -> Any:
    """Return the module of torch's process groups and works."""
    from torch._C import _distributed_c10d

    return _distributed_c10d


def loader_iterator() -> type:
    """Return the class of all iterators of DataLoaders."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    iterator: type = _BaseDataLoaderIter
    return iterator


WORKER_LOOP = "_worker_loop"  # of `worker_module`: what a DataLoader starts its workers on


def worker_module() -> Any:
    """Return the module of what a DataLoader's workers run."""
    from torch.utils.data._utils import worker

    return worker


def worker_loop() -> Callable[..., None]:
    """Return what torch has a DataLoader's workers run."""
    loop: Callable[..., None] = vars(worker_module())[WORKER_LOOP]
    return loop


def worker_arguments(loop: Callable[..., None]) -> dict[str, int]:
    """Return the places of the arguments with which torch starts a worker, by name."""
    return {name: place for place, name in enumerate(inspect.signature(loop).parameters)}


def fetchers() -> tuple[type, ...]:
    """Return the classes of what fetches a loader's batches, each with a method `fetch`."""
    from torch.utils.data._utils import fetch

    return fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher  # noqa: SLF001  # no public names


def delivered_number(iterator: Any) -> int | None:
    """Return the number of the batch that a loader's workers delivered last; None without them."""
    count = getattr(iterator, "_rcvd_idx", None)
    return count - 1 if isinstance(count, int) else None


def hook_optimizer_steps(
    before: Callable[..., None], after: Callable[..., None]
) -> tuple[Any, Any]:
    """Have each optimizer step call `before` and, unless it raises, `after`; return the handles."""
    register_before, register_after = _optimizer_hooks()
    return register_before(before), register_after(after)


def _optimizer_hooks() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    return register_optimizer_step_pre_hook, register_optimizer_step_post_hook


def step_code() -> CodeType:
    """Return the code that torch wraps around the step of each class of optimizers: one for all."""
    code: CodeType = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__
    return code


def frames_of(code: CodeType) -> int:
    """Return how many calls of `code` are on this thread's stack."""
    count = 0
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # the stack is what is asked for
    while frame is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count


def operators(namespace: str) -> dict[str, Any]:
    """Return the operators of a namespace of the dispatcher, by name."""
    prefix = namespace + "::"
    names = [
        name.removeprefix(prefix)
        for name in torch._C._dispatch_get_all_op_names()  # noqa: SLF001  # no public list of operators
        if name.startswith(prefix)
    ]
    packets = getattr(torch.ops, namespace)
    return {name: getattr(packets, name).default for name in names if "." not in name}


def redispatch_of(overload: Any) -> Callable[..., Any]:
    """Return what calls an operator as `overload` does, without a frame of Python."""
    call: Callable[..., Any] = overload._op  # noqa: SLF001  # what an OpOverload calls
    return call


@functools.cache
def traced_types() -> tuple[type, ...]:
    """Return the types of tensors that stand for others while a graph is made: they hold no data.

    Dynamo and AOTAutograd run the code that they compile on such tensors: nothing is sent.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FakeTensor, FunctionalTensor


def argument_names(overload: Any) -> list[str]:
    """Return the names of an operator's arguments, in order."""
    return [argument.name for argument in overload._schema.arguments]  # noqa: SLF001  # no public schema


def below_autograd() -> Any:
    """Return a context in which calls go below the autograd keys: what a redispatch is."""
    return torch._C._AutoDispatchBelowAutograd()  # noqa: SLF001  # no public name


def is_below_autograd() -> bool:
    """Return whether this thread is where `below_autograd` goes."""
    key = torch._C.DispatchKey.AutogradFunctionality  # noqa: SLF001  # no public name
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(key))  # noqa: SLF001  # no public name


def queue_engine_callback(callback: Callable[[], None]) -> None:
    """Have the autograd engine call `callback` when the running backward pass has computed all.

    Raises:
        RuntimeError: this thread runs no backward pass.
    """
    _engine().queue_callback(callback)


@functools.cache
def _engine() -> Any:
    return torch.autograd.Variable._execution_engine  # noqa: SLF001  # as FSDP2 does


def remove_kernels(library: torch.library.Library) -> None:
    """Take a library's kernels off the dispatcher."""
    library._destroy()  # noqa: SLF001  # otherwise only at some collection of garbage


def see_gradient(
    parameter: torch.Tensor, hook: Callable[[torch.Tensor], None]
) -> Callable[[], None]:
    """Have `hook` called when a parameter's gradient is accumulated; return what ends that."""
    handle = parameter.register_post_accumulate_grad_hook(hook)

    def remove() -> None:
        handle.remove()
        # Else torch goes on asking an empty table, at each accumulation.
        if not parameter._post_accumulate_grad_hooks:  # noqa: SLF001  # no public name
            parameter._post_accumulate_grad_hooks = None  # noqa: SLF001  # no public name

    return remove


def compiles_backward() -> bool:
    """Return whether backward passes are compiled (compiled autograd), hooks with them."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "compiled_autograd_enabled", False))


def unbox_group(argument: Any) -> Any:
    """Return the process group that an operator was given: boxed, by name, or as it is."""
    if isinstance(argument, str):
        return c10d()._resolve_process_group(argument)  # noqa: SLF001  # no public way from the name
    if isinstance(argument, torch.ScriptObject):
        return c10d().ProcessGroup.unbox(argument)
    return argument


def work_of(result: Any) -> Any:
    """Return the work in an operator's result, None if it has none."""
    boxed = result[-1] if isinstance(result, (tuple, list)) and result else result
    return c10d().Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None


def source_of(work: Any) -> int:
    """Return whose message a completed receive got, as a rank within its group; -1 if unknown."""
    try:
        return int(work._source_rank())  # noqa: SLF001  # no public name
    except (RuntimeError, AttributeError):  # the backend does not say
        return -1


def members_of(group: Any) -> dict[int, int]:
    """Return the global ranks of a group with their rank in it; empty if they are not known.

    The object is the same for the same group, and not for another one of the same name.
    """
    ranks = dist.distributed_c10d._world.pg_group_ranks  # noqa: SLF001  # the public call copies
    found: dict[int, int] = ranks.get(group, {})
    return found


def backend_of(group: Any, device_type: str) -> str:
    """Return the name of the backend that serves a group's tensors on a type of device."""
    return str(group._get_backend(torch.device(device_type)).name())  # noqa: SLF001  # no public name


def backend_name(group: Any) -> str:
    """Return what a group's backend is called; empty if torch does not say."""
    try:
        return str(dist.get_backend(group))
    except (RuntimeError, ValueError, AttributeError):  # a group that torch does not know
        return ""


# --- behaviour -----------------------------------------------------------------------------------

# Of backends that take an accelerator's tensors, those whose works end on the host. Others queue
# work on a stream of the device: NCCL's futures run their callbacks when the work is queued.
_END_ON_HOST = frozenset({"gloo", "mpi"})


def completion_is_seen(backend: str, device_type: str) -> bool:
    """Return whether a work's future, or its wait, ends when the work is done."""
    return device_type == "cpu" or backend.lower() in _END_ON_HOST


class _Holder:
    """Holds an object as the table of works does."""

    __slots__ = ("keep",)

    def __init__(self, keep: object) -> None:
        self.keep = keep


def _references_of_holder() -> int:
    holder = _Holder(object())
    return sys.getrefcount(holder.keep)


# What getrefcount says of an object that one attribute holds and nobody else: Python's own matter.
_ONE_HOLDER = _references_of_holder()


def is_held_elsewhere(holder: Any) -> bool:
    """Return whether Python objects other than `holder`, by its `keep`, hold what it holds."""
    return sys.getrefcount(holder.keep) > _ONE_HOLDER


def tensor_identity(tensor: torch.Tensor) -> int:
    """Return what identifies the result of a functional collective until it is waited for.

    The tensor object is another one by then; its memory is not, as long as the result lives.
    """
    address: int = tensor.data_ptr()
    return address


_kept_threads: set[int] = set()


def keep_thread_state() -> None:
    """Have Python remember the backend's thread that calls this.

    Python forgets a foreign thread after each call, and maps and unmaps memory to greet it again at
    the next: 45 us a collective, which stop the main thread too. One reference too many keeps the
    state of the backend's few threads; it is never given back.
    """
    thread = threading.get_ident()
    if thread not in _kept_threads:
        _kept_threads.add(thread)
        ctypes.pythonapi.PyGILState_Ensure()


# --- Dynamo -------------------------------------------------------------------------------------

# While a compiled function runs, Dynamo's hook in the interpreter looks at each new Python frame
# and compiles it. It leaves torch's files alone, and would take ours for the script's: a wrapper
# around torch's Module.__call__ made it compile modules that it skips otherwise, with other
# rounding. Each code object can say what becomes of its frames and of what they call.

# What Dynamo traces from the script's code (a hook of an optimizer, a module's call) it inlines,
# whatever that says; there, `at_run_time` is false.

_calls_the_script: set[CodeType] = set()
_compiler: Any = torch.compiler


def at_run_time() -> bool:
    """Return whether the caller runs, rather than being made into a graph."""
    # `torch.compiler.is_compiling` is two more functions around the same flag: amid a step, whose
    # data have taken the caches, a microsecond each.
    return not _compiler._is_compiling_flag  # noqa: SLF001  # see above


def _while_traced() -> bool:
    return False


# Dynamo traces this attribute in place of the function. Of `is_compiling` alone it would know the
# same, but compile each frame that asks for it, even one that it skips otherwise for want of
# operators.
at_run_time._torchdynamo_inline = _while_traced  # type: ignore[attr-defined]  # noqa: SLF001  # no public name


def calls_the_script(function: Callable[..., object]) -> None:
    """Note that a function of the recorder calls what the script called: Dynamo must see that."""
    _calls_the_script.add(function.__code__)


def disable(function: Callable[..., F]) -> Callable[..., F]:
    """Return `function` as torch's own functions that must not be compiled are decorated."""
    disabled: Callable[..., F] = torch._disable_dynamo(function)  # noqa: SLF001  # loads no part of Dynamo
    return disabled


def inside_disable(function: Callable[..., F]) -> Callable[..., F] | None:
    """Return what torch decorated by `disable`; None if it did not."""
    if getattr(function, "__code__", None) is not disable(len).__code__:
        return None
    inner: Callable[..., F] | None = getattr(function, "__wrapped__", None)
    return inner


def hide_from_dynamo(package: str) -> None:
    """Have Dynamo leave alone the functions of a package's loaded modules, and what they call.

    What functions noted by `calls_the_script` call is not hidden. Loads no part of Dynamo: a script
    that does not compile must not wait for that.
    """
    set_strategy, strategy, action = _dynamo_frames()
    hidden = strategy(action.SKIP, action.SKIP)
    passing = strategy(action.SKIP, action.DEFAULT)
    for name, module in list(sys.modules.items()):
        if name.startswith(package + "."):
            for code in _codes_of(module):
                set_strategy(code, passing if code in _calls_the_script else hidden)


def _dynamo_frames() -> tuple[Callable[..., None], Any, Any]:
    from torch._C._dynamo.eval_frame import (
        _FrameAction,
        _FrameExecStrategy,
        set_code_exec_strategy,
    )

    return set_code_exec_strategy, _FrameExecStrategy, _FrameAction


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of all functions that a module defines, nested ones and methods included."""
    values = list(vars(module).values())
    for owner in values.copy():
        if isinstance(owner, type) and owner.__module__ == module.__name__:
            values += vars(owner).values()
    for value in values:
        for function in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
            # By its globals: an Enum has methods of the module enum in its own dict.
            if isinstance(function, FunctionType) and function.__globals__ is vars(module):
                yield from _with_nested(function.__code__)


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


# --- checks --------------------------------------------------------------------------------------


def _check_dispatcher() -> None:
    allreduce = operators("c10d")["allreduce_"]
    if "process_group" not in argument_names(allreduce):
        raise AttributeError("c10d::allreduce_ has no argument process_group")
    with below_autograd():
        if not is_below_autograd():
            raise AttributeError("below_autograd excludes no key")
    _ = torch.library.Library, c10d().ProcessGroup.unbox, c10d().Work.unbox


def _check_workers() -> None:
    arguments = worker_arguments(worker_loop())
    if not {"data_queue", "worker_id"} <= set(arguments):
        raise AttributeError(f"the loop of a worker takes {', '.join(arguments)}")
    for fetcher in fetchers():
        _ = vars(fetcher)["fetch"]


def _check_functional_wait() -> None:
    arguments = argument_names(operators("_c10d_functional")["wait_tensor"])
    if len(arguments) != 1:
        raise AttributeError(f"wait_tensor takes {arguments}")


def _check_engine_callback() -> None:
    if not callable(_engine().queue_callback):
        raise AttributeError("the engine takes no callbacks")


def _check_gradient_hooks() -> None:
    # No backward pass: its threads would not survive a fork of the script's.
    tensor = torch.zeros((), requires_grad=True)
    see_gradient(tensor, lambda _: None)()
    if tensor._post_accumulate_grad_hooks is not None:  # noqa: SLF001  # see_gradient
        raise AttributeError("the hook cannot be taken out")


def _check_dynamo_frames() -> None:
    set_strategy, strategy, action = _dynamo_frames()
    set_strategy(_check_dynamo_frames.__code__, strategy(action.SKIP, action.DEFAULT))


def _check_thread_state() -> None:
    if not callable(ctypes.pythonapi.PyGILState_Ensure):
        raise AttributeError("PyGILState_Ensure")


_CHECKS: dict[Capability, Callable[[], object]] = {
    Capability.LOADER_ITERATOR: lambda: loader_iterator().__next__,  # type: ignore[attr-defined]  # that it is there is checked
    Capability.WORKER_LOOP: _check_workers,
    Capability.OPTIMIZER_HOOKS: _optimizer_hooks,
    Capability.STEP_CODE: step_code,
    Capability.DISPATCHER: _check_dispatcher,
    Capability.WORKS: lambda: c10d().Work.wait,
    Capability.FUTURES: lambda: c10d().Work.get_future,
    Capability.ENGINE_CALLBACK: _check_engine_callback,
    Capability.BUFFER_BROADCAST: lambda: dist._broadcast_coalesced,  # noqa: SLF001  # what DDP calls
    Capability.FUNCTIONAL_WAIT: _check_functional_wait,
    Capability.GROUP_MEMBERS: lambda: dist.distributed_c10d._world.pg_group_ranks.get,  # noqa: SLF001  # see members_of
    Capability.BACKENDS: lambda: c10d().ProcessGroup._get_backend,  # noqa: SLF001  # see backend_of
    Capability.GRADIENT_HOOKS: _check_gradient_hooks,
    Capability.THREAD_STATE: _check_thread_state,
    Capability.DYNAMO_FRAMES: _check_dynamo_frames,
}


@dataclass(frozen=True)
class CapabilityGap:
    """A capability that this torch lacks, and how that showed."""

    capability: Capability
    why: str


def check(capability: Capability) -> CapabilityGap | None:
    """Return what is wrong with a capability; None if it is there."""
    try:
        _CHECKS[capability]()
    except Exception as problem:  # noqa: BLE001  # whatever a changed torch raises
        return CapabilityGap(capability, f"{type(problem).__name__}: {problem}")
    return None


def available() -> frozenset[Capability]:
    """Return the capabilities of this torch; log one warning for each that is missing."""
    found = set()
    for capability in Capability:
        if not dist.is_available() and capability in _DISTRIBUTED:
            continue  # such a script has nothing to record there
        gap = check(capability)
        if gap is None:
            found.add(capability)
        else:
            warn_lost(capability, gap.why)
    return frozenset(found)


_DISTRIBUTED = frozenset(Capability) - {
    Capability.LOADER_ITERATOR,
    Capability.WORKER_LOOP,
    Capability.OPTIMIZER_HOOKS,
    Capability.STEP_CODE,
    Capability.ENGINE_CALLBACK,
    Capability.GRADIENT_HOOKS,
    Capability.THREAD_STATE,
    Capability.DYNAMO_FRAMES,
}


def warn_lost(capability: Capability, why: str) -> None:
    """Say what this run's trace will lack."""
    _LOG.warning(
        "not recorded: %s; torch %s differs from what the recorder knows (%s: %s)",
        capability.value,
        torch.__version__,
        capability.name.lower(),
        why,
    )
