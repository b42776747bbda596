"""Derives a Workload from an ordinary model: one training step on fake tensors (without data).

The module is copied with fake tensors in place of its parameters; forward, backward and optimizer
step then run on them under a dispatch mode that sees every operator with its shapes. Nothing is
computed, the model itself is neither run nor changed, and a model that would not fit this machine
can be captured on it.

An operator belongs to the innermost module that runs. In the backward pass no module runs; there
the autograd node's sequence number says which forward call made it, and so which layer.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import UsageError
from paceline.core.workload import (
    Dataset,
    Layer,
    LayerEdge,
    Operation,
    SharedParameter,
    Workload,
)
from paceline.training import lbfgs
from paceline.training.live_memory import LiveMemory
from paceline.training.operators import bytes_of, tensors_in, works_of
from paceline.training.source_line import UNKNOWN_LINE, source_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.core.machine import Phase


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStep:
    """The inputs of one step of a training loop.

    Attributes:
        module: the model; it is not changed.
        inputs: of one batch on one rank: a tensor; a tuple or NamedTuple of the module's arguments;
            a dict of its keyword arguments; a list or dict that its one argument takes.
        target: second argument of `loss_fn`; without it the loss takes the output alone.
        loss_fn: by default the output's ``loss`` if it has one, else the sum of the output.
        optimizer: makes the optimizer from the parameters; None for no update.
        dataset: what is known of the data.
        split_points: names of submodules that make up the model, for a plan that cuts it into
            stages, as `paceline.training.prepare` takes them.
        accumulation: forward and backward passes, each of such a batch, before an update.
    """

    module: torch.nn.Module
    inputs: Any
    target: Any = None
    loss_fn: Callable[..., torch.Tensor] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    dataset: Dataset | None = None
    split_points: tuple[str, ...] = ()
    accumulation: int = 1

    def __post_init__(self) -> None:
        if self.accumulation < 1:
            raise UsageError(
                f"accumulation must be at least 1, got {self.accumulation}",
                where=type(self.module).__name__,
                fix="Give the number of backward passes before an update; 1 for none",
            )


def capture(
    step: TrainingStep,
    *,
    name: str = "",
    record: Callable[..., OperatorRecorder] | None = None,
    runs: bool = False,
) -> Workload:
    """Return the Workload of one training step, without running it.

    Args:
        step: the model and its batch.
        name: of the workload; by default the module's class.
        record: makes the recorder from the module, whose tensors are fake, and the inputs; None:
            one whose layers are the model's submodules.
        runs: whether a copy of the model runs on its batch after all, as one that branches on
            values of tensors has to.

    Raises:
        UsageError: the model needs values, not only shapes, to go on (data-dependent control flow),
            or returns no tensor to differentiate; or the model, the loss function or the optimizer
            raises an error: the message says which, on what, and in which line.
    """
    with _blaming("the model cannot be captured", type(step.module).__name__):
        if runs:
            mode: Any = contextlib.nullcontext()
            module, inputs, target = copy.deepcopy(step.module), step.inputs, step.target
        else:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            module = fake_copy(step.module, mode)
            inputs, target = fake_values(step.inputs, mode), fake_values(step.target, mode)
        recorder = record(module, inputs) if record else OperatorRecorder(module)
        with mode, recorder.watching():
            optimizer = _run(recorder, module, inputs, target, step)
    batch = tensors_in(inputs)
    return Workload(
        name=name or type(step.module).__name__,
        batch=int(batch[0].shape[0]) if batch and batch[0].dim() else 1,
        input_bytes=bytes_of(batch + tensors_in(target)),
        layers=recorder.layers(),
        edges=recorder.edges(),
        shared=recorder.shared(),
        largest_bytes=recorder.largest_bytes,
        peak_bytes=recorder.peak_bytes(_state_bytes(optimizer)),
        accumulation=step.accumulation,
        optimizer=type(optimizer).__name__ if optimizer else "",
        optimizer_bytes=_state_bytes(optimizer),
        dataset=step.dataset,
        measured=("dataset.seconds_per_sample",)
        if step.dataset and step.dataset.seconds_per_sample
        else (),
        derived=("layers", "input_bytes", "optimizer_bytes", "peak_bytes"),
    )


@contextlib.contextmanager
def _blaming(what: str, where: str | Callable[[], str], given: Any = None) -> Iterator[None]:
    """Raise what is raised within as an error that says whose it is.

    Args:
        what: fails, with a verb; where values of tensors are asked for, it cannot be captured.
        where: it fails, or what returns that then; the line of the script is added.
        given: what it was called with, of which the tensors' shapes are said.
    """
    try:
        yield
    except UsageError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as problem:
        raise UsageError(
            "the model cannot be captured",
            where=_place(where, problem),
            why=f"{type(problem).__name__}: {problem}",
            fix="Check that neither a layer nor the loss function branches on tensor values; or "
            "plan with --compute measured, which runs the step",
        ) from problem
    except Exception as problem:
        shapes = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors_in(given)]
        on = f"; it was given {', '.join(shapes)}".replace("torch.", "") if shapes else ""
        raise UsageError(
            what,
            where=_place(where, problem),
            why=f"{type(problem).__name__}: {problem}{on}",
            fix="Check that a training step runs, as the training loop makes it; one whose layers "
            "branch on tensor values may be planned with --compute measured, which runs it",
        ) from problem


def _place(where: str | Callable[[], str], problem: Exception) -> str:
    found = (where if isinstance(where, str) else where(), source_line(problem))
    return "; ".join(part for part in found if part != UNKNOWN_LINE)


def _run(
    recorder: OperatorRecorder,
    module: torch.nn.Module,
    inputs: Any,
    target: Any,
    step: TrainingStep,
) -> torch.optim.Optimizer | None:
    name = type(module).__name__
    with _blaming("the optimizer cannot be made", name):
        optimizer = step.optimizer(module.parameters()) if step.optimizer else None
    passes = step.accumulation * _evaluations(optimizer)
    _pass(recorder, module, inputs, target, step)
    if passes > 1:  # the first pass makes the gradients, the others add to them
        recorder.repeat(passes - 1)
        _pass(recorder, module, inputs, target, step)
        recorder.repeat(1)
    if isinstance(optimizer, torch.optim.LBFGS):
        recorder.count_vectors(lbfgs.vector_calls(optimizer))
    elif optimizer is not None:
        recorder.phase = None  # the first update also makes the state: not what a step costs
        with _blaming("the optimizer's step fails", type(optimizer).__name__):
            optimizer.step()
            recorder.own_gradients()
            recorder.phase = "optimizer"
            optimizer.step()
    recorder.phase = None
    return optimizer


def _pass(
    recorder: OperatorRecorder,
    module: torch.nn.Module,
    inputs: Any,
    target: Any,
    step: TrainingStep,
) -> None:
    """Run one forward and backward pass."""
    recorder.phase = "forward"
    name = type(module).__name__
    with _blaming(
        "the model's forward pass fails on the inputs", lambda: recorder.place_in(name), inputs
    ):
        output = recorder.call(inputs)
    given = (output,) if target is None else (output, target)
    if step.loss_fn is None:
        loss = loss_in(output)
    else:
        called = getattr(step.loss_fn, "__name__", type(step.loss_fn).__name__)
        with _blaming("the loss function fails on the model's output", called, given):
            loss = step.loss_fn(*given)
    del output, given
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        raise UsageError(
            "there is no loss to differentiate",
            where=name,
            fix="Give a loss_fn that returns a tensor which depends on the parameters",
        )
    if loss.numel() != 1:
        raise UsageError(
            "the loss is not one number",
            where=name,
            why=f"it has the shape {tuple(loss.shape)}",
            fix="Give a loss_fn that returns the sum or the mean",
        )
    recorder.phase = "backward"
    with _blaming("the backward pass from the loss fails", name, loss):
        loss.backward()


def call_arguments(module: torch.nn.Module, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments with which a batch calls the module.

    A dict is taken apart where its keys are names of arguments, as of models whose batches come as
    dicts (``model(**batch)``), and is one argument otherwise. A list is one argument, unless the
    module needs as many arguments as it has items.
    """
    if isinstance(inputs, tuple):
        return inputs, {}
    if isinstance(inputs, dict) and _accepts(module, (), inputs):
        return (), inputs
    if isinstance(inputs, list) and not _accepts(module, (inputs,), {}):
        return tuple(inputs), {}
    return (inputs,), {}


def _accepts(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # another signature; or none that is known
        return False
    return True


def loss_in(output: Any) -> Any:
    """Return what an output names its loss, as models do that were given labels; else its sum."""
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor) and named.requires_grad:
        return named
    return sum(tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad)


def _evaluations(optimizer: torch.optim.Optimizer | None) -> int:
    """Return how often an update runs the model: once before it, or as LBFGS does within it.

    Raises:
        UsageError: another optimizer's step cannot be called without a closure.
    """
    if optimizer is None:
        return 1
    if isinstance(optimizer, torch.optim.LBFGS):
        return lbfgs.evaluations(optimizer)
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is not inspect.Parameter.empty:
        return 1
    raise UsageError(
        f"a step of {type(optimizer).__name__} cannot be predicted",
        where=type(optimizer).__name__,
        why="it calls a closure that runs the model, as often as the values of the loss ask for",
        fix="Plan with an optimizer that updates once after each backward pass, for example SGD",
    )


def fake_copy(module: torch.nn.Module, fake: FakeTensorMode) -> torch.nn.Module:
    """Return a copy of a module whose tensors have shapes without data."""
    memo: dict[int, Any] = {}
    attributes = (value for part in module.modules() for value in vars(part).values())
    others = [value for value in attributes if isinstance(value, torch.Tensor)]
    for tensor in [*module.parameters(), *module.buffers(), *others]:
        memo[id(tensor)] = _fake_tensor(tensor, fake)
    return copy.deepcopy(module, memo)


def _fake_tensor(tensor: torch.Tensor, fake: FakeTensorMode) -> Any:
    """Return a tensor without data; one of the meta device becomes one of the CPU.

    On the meta device, torch decomposes attention, which then keeps more activations than the fused
    operator of any device.
    """
    if tensor.device.type != "meta":
        return fake.from_tensor(tensor)
    with fake:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def fake_values(values: Any, fake: FakeTensorMode) -> Any:
    """Return values whose tensors have shapes without data, as deep as they are nested."""
    if isinstance(values, torch.Tensor):
        return _fake_tensor(values, fake)
    if isinstance(values, Mapping):  # also what only behaves like a dict, as tokenizers return
        return {key: fake_values(value, fake) for key, value in values.items()}
    if isinstance(values, tuple) and hasattr(values, "_fields"):  # a NamedTuple takes them singly
        return type(values)(*(fake_values(value, fake) for value in values))
    if isinstance(values, (tuple, list)):
        return type(values)(fake_values(value, fake) for value in values)
    return values


def _state_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    if optimizer is None:
        return 0
    if isinstance(optimizer, torch.optim.LBFGS):
        return lbfgs.state_bytes(optimizer)
    return sum(bytes_of(tensors_in(state)) for state in optimizer.state.values())


class OperatorRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed for us
    """Counts operators per layer and phase, and the bytes that wait for the backward pass.

    Layers are the submodules that run; a subclass may have others.

    Args:
        module: whose step is recorded.

    Attributes:
        phase: of the step that runs; None: operators are not counted.
        largest_bytes: of the largest tensor that the step allocated.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.phase: Phase | None = None
        self.largest_bytes = 0
        self._module = module
        self._stack = [""]
        self._failed = ""
        self._counts: dict[str, Counter[tuple[Any, ...]]] = {"": Counter()}
        self._owner_of = {
            id(parameter): name.rpartition(".")[0] for name, parameter in module.named_parameters()
        }
        self._updating = ""
        # Layer of each forward operator by autograd's sequence number, which only grows.
        self._sequence: list[int] = []
        self._sequence_layer: list[str] = []
        self._saved: dict[str, int] = Counter()
        self._calls = 1  # that one call stands for
        self._saves = True
        self._live = LiveMemory()
        self._peaks: dict[str, int] = Counter()
        for tensor in [*module.parameters(), *module.buffers()]:
            self._live.mark(tensor)

    def place_in(self, model: str) -> str:
        """Return the model, and the layer that raised an error if it is a part of it."""
        return f"{model}, layer {self._failed}" if self._failed else model

    def call(self, inputs: Any) -> Any:
        """Return the module's output for a batch."""
        self._live.add(tensors_in(inputs))
        arguments, keywords = call_arguments(self._module, inputs)
        return self._module(*arguments, **keywords)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch modules, saved tensors and operators."""
        hooks = []
        for name, module in self._module.named_modules():
            hooks.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        saved = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        try:
            with saved, self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def own_gradients(self) -> None:
        """Give each gradient to the layer of its parameter."""
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                self._owner_of[id(parameter.grad)] = self._owner_of[id(parameter)]

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._stack.append(name)
            self._failed = ""
            self._counts.setdefault(name, Counter())

        return enter

    def _leave(self, _module: torch.nn.Module, _given: Any, output: Any) -> None:
        layer = self._stack.pop()
        if output is None:  # it raises, and then so do those that called it
            self._failed = self._failed or layer

    def repeat(self, calls: int) -> None:
        """Let each call from now on stand for so many; the first pass alone keeps activations."""
        self._calls = calls
        self._saves = False

    def count_vectors(self, calls: Iterable[lbfgs.VectorCalls]) -> None:
        """Count an optimizer's operations on vectors of all parameters, which did not run."""
        for equal in calls:
            key = ("optimizer", "elementwise", "float32", 0, equal.bytes, "")
            self._counts[""][key] += equal.calls

    def peak_bytes(self, state_bytes: int) -> int:
        """Return the most bytes that were alive in a step, the optimizer's state included."""
        passes = max(self._peaks["forward"], self._peaks["backward"]) + state_bytes
        return max(passes, self._peaks["optimizer"])

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._live.mark(tensor) and self._saves:
            self._saved[self._stack[-1]] += tensor.untyped_storage().nbytes()
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        works = works_of(func, args, kwargs, result) if self.phase is not None else ()
        if not works:
            return result
        made = tensors_in(result)
        dtype = str(made[0].dtype if made else torch.float32).removeprefix("torch.")
        if works[0].operator != "view":
            self._live.add(made)
            peak = max(self._peaks[self.phase or ""], self._live.now_bytes)
            self._peaks[self.phase or ""] = peak
            largest = max((bytes_of([tensor]) for tensor in made), default=0)
            self.largest_bytes = max(self.largest_bytes, largest)
        # A module whose parameters another one uses is never entered itself.
        counts = self._counts.setdefault(self._layer(args), Counter())
        for work in works:
            key = (self.phase, work.operator, dtype, work.flops, work.bytes, work.name)
            counts[key] += work.count * self._calls
        return result

    def _layer(self, args: Any) -> str:
        if self.phase == "optimizer":
            owners = (self._owner_of.get(id(tensor)) for tensor in tensors_in(args))
            self._updating = next((owner for owner in owners if owner is not None), self._updating)
            return self._updating
        if self.phase == "forward":
            # The node of this operator is made already; it took the number before the next one.
            number = torch.autograd._get_sequence_nr() - 1  # noqa: SLF001  # the only link to a node
            if not self._sequence or self._sequence[-1] != number:
                self._sequence.append(number)
                self._sequence_layer.append(self._stack[-1])
            return self._stack[-1]
        return self._layer_of_node(torch._C._current_autograd_node())  # noqa: SLF001  # as above

    def _layer_of_node(self, node: Any) -> str:
        if node is None:
            return self._stack[0]
        if hasattr(node, "variable"):  # AccumulateGrad
            return str(self._owner_of.get(id(node.variable), self._stack[0]))
        at = bisect.bisect_right(self._sequence, node._sequence_nr()) - 1  # noqa: SLF001
        return self._sequence_layer[at] if at >= 0 else self._stack[0]

    def edges(self) -> tuple[LayerEdge, ...]:
        """Return what the layers exchange; of submodules that is not known."""
        return ()

    def shared(self) -> tuple[SharedParameter, ...]:
        """Return the parameters that several layers use; of submodules that is not known."""
        return ()

    def layers(self) -> tuple[Layer, ...]:
        """Return the layers that did or hold something, in order of their first call."""
        modules = dict(self._module.named_modules())
        seen: set[int] = set()
        found = []
        for name in [*self._counts, *(other for other in modules if other not in self._counts)]:
            module = modules[name]
            parameters = [
                parameter
                for parameter in module.parameters(recurse=False)
                if id(parameter) not in seen
            ]
            seen.update(id(parameter) for parameter in parameters)
            layer = Layer(
                name=name,
                kind=type(module).__name__,
                parameter_bytes=tuple(parameter.nbytes for parameter in parameters),
                frozen=tuple(
                    i for i, parameter in enumerate(parameters) if not parameter.requires_grad
                ),
                buffer_bytes=sum(buffer.nbytes for buffer in module.buffers(recurse=False)),
                saved_bytes=self._saved.get(name, 0),
                operations=operations_of(self._counts.get(name, Counter())),
            )
            if layer.operations or layer.parameter_bytes or layer.buffer_bytes:
                found.append(layer)
        return tuple(found)


def operations_of(counts: Mapping[tuple[Any, ...], int]) -> tuple[Operation, ...]:
    """Return a layer's counted operators."""
    return tuple(
        Operation(
            phase=phase,
            operator=operator,
            dtype=dtype,
            count=count,
            flops=flops,
            bytes=bytes_,
            assumed=name,
        )
        for (phase, operator, dtype, flops, bytes_, name), count in counts.items()
    )
