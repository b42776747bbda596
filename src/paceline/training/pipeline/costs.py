"""What the layers of a captured graph cost, as far as stages are to be balanced by it.

Counted, not measured, so that all ranks and all starts of a program cut a model at the same
places: FLOPs and bytes of each operator that the forward pass dispatches on tensors without
memory. An operator takes what is longer, computing or moving its bytes, on a nominal device; a
backward pass takes twice as long. Stages are balanced by ratios of these times, so that a device
that is faster throughout is cut at the same places. Partitions and replicas of the strategy
``auto`` are chosen by a measured pass (`forward_seconds`).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from paceline.schedules.pipeline import LayerCosts, LayerEdge
from paceline.training.operators import works_of
from paceline.training.pipeline.computing import unchanged_buffers
from paceline.training.pipeline.exported import named_arguments
from paceline.training.pipeline.graph import bind_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.training.pipeline.graph import CapturedGraph, GraphLayer

NOMINAL_FLOPS_PER_S, _BYTES_PER_S = 5e10, 1e10  # of a core
_CALL_S = 2e-6  # of an operator, whatever it computes
COPIES = 4  # of a parameter: with its gradient and two moments


def layer_costs(captured: CapturedGraph, inputs: Any = None) -> LayerCosts:
    """Return what the layers of a graph cost for one example batch.

    Where there is no example, or the forward pass does not run without memory, layers are weighed
    by their parameters.

    Args:
        captured: the graph.
        inputs: an example, as the model takes it; it is not computed with.
    """
    counted: _Interpreter | None = None
    if inputs is not None:
        with contextlib.suppress(Exception):  # whatever an operator raises for a fake tensor
            counted = _count(captured, inputs)
    layer_of = {node: n for n, layer in enumerate(captured.layers) for node in layer.nodes}
    names = [[node.name for node in layer.nodes] for layer in captured.layers]
    seconds = [_CALL_S + _parameter_bytes(captured, x) / _BYTES_PER_S for x in captured.layers]
    saved = [0] * len(names)
    edges: tuple[LayerEdge, ...] = ()
    if counted is not None:
        seconds = [sum(counted.seconds[name] for name in members) for members in names]
        saved = [sum(counted.bytes[name] for name in members) for members in names]
        edges = tuple(edges_of(layer_of, counted.bytes))
    return LayerCosts(
        forward_s=tuple(seconds),
        backward_s=tuple(2 * value for value in seconds),
        parameter_bytes=tuple(COPIES * _parameter_bytes(captured, x) for x in captured.layers),
        activation_bytes=tuple(saved),
        edges=edges,
    )


def forward_seconds(captured: CapturedGraph, inputs: Any) -> list[float] | None:
    """Return the measured seconds of each layer's forward pass; None where it cannot run.

    The faster of two passes after a first one. Buffers and random numbers are as they were
    afterwards, and nothing is kept for a backward pass.

    Args:
        captured: the graph; its parameters have memory.
        inputs: an example, on their device.
    """
    arguments = named_arguments(bind_inputs(captured.root, inputs))
    given = [arguments[name] for name in captured.inputs]
    layer_of = {node.name: n for n, layer in enumerate(captured.layers) for node in layer.nodes}
    module = captured.module()
    with unchanged_buffers(module), torch.random.fork_rng(devices=_devices(module)):
        try:
            runs = [_timed(module, given) for _ in range(3)][1:]
        except Exception:  # noqa: BLE001  # whatever an operator raises for an example
            return None
    found = [0.0] * len(captured.layers)
    for name, layer in layer_of.items():
        found[layer] += min(run[name] for run in runs)
    return found


def _timed(module: fx.GraphModule, given: list[Any]) -> dict[str, float]:
    interpreter = _Stopwatch(module)
    with torch.no_grad():
        interpreter.run(*given)
    return interpreter.seconds


def _devices(module: nn.Module) -> list[torch.device]:
    return list({p.device for p in module.parameters() if p.device.type == "cuda"})


class _Stopwatch(fx.Interpreter):  # type: ignore[misc]  # torch has no types here
    """Runs a graph, and notes the seconds of each node, by its name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = {}
        self._on_gpu = bool(_devices(module))

    def run_node(self, n: fx.Node) -> Any:
        """Return what a node returns."""
        begin_s = time.perf_counter()
        result = super().run_node(n)
        if self._on_gpu:
            torch.cuda.synchronize()
        self.seconds[n.name] = time.perf_counter() - begin_s
        return result


def edges_of(layer_of: dict[fx.Node, int], bytes_of: dict[str, int]) -> Iterator[LayerEdge]:
    """Yield what layers exchange.

    Args:
        layer_of: the layer of each node that computes.
        bytes_of: what each node returns, by its name.
    """
    for node, layer in layer_of.items():
        users = sorted({layer_of[user] for user in node.users if user in layer_of} - {layer})
        if users and bytes_of[node.name]:
            yield LayerEdge(layer, tuple(users), bytes_of[node.name])


def _parameter_bytes(captured: CapturedGraph, layer: GraphLayer) -> int:
    return sum(parameter.nbytes for parameter in captured.parameters(layer))


class _Counting(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Adds up what operators cost."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for work in works_of(func, args, kwargs or {}, result):
            piece_s = max(work.flops / NOMINAL_FLOPS_PER_S, work.bytes / _BYTES_PER_S) + _CALL_S
            self.seconds += work.count * piece_s
        return result


class _Interpreter(fx.Interpreter):  # type: ignore[misc]  # torch has no types here
    """Runs a graph, and notes what each node costs; of equal calls the first one is run.

    Attributes:
        seconds, bytes: of each node and of what it returns, by its name.
    """

    def __init__(self, module: fx.GraphModule, counting: _Counting) -> None:
        super().__init__(module)
        self.counting = counting
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}
        self._known: dict[Any, tuple[float, Any]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Return what a node returns, on tensors without memory."""
        call = self._call(n)
        if call is not None and call in self._known:
            seconds, result = self._known[call]
        else:
            before = self.counting.seconds
            result = super().run_node(n)
            seconds = self.counting.seconds - before
            if call is not None:
                self._known[call] = seconds, result
        self.seconds[n.name] = seconds
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.bytes[n.name] = sum(tensor.nbytes for tensor in tensors)
        return result

    def _call(self, n: fx.Node) -> Any:
        """Return what the cost and the result of a node depend on; None where that is unknown."""
        if n.op not in ("call_module", "call_function", "call_method"):
            return None
        target: Any = n.target
        if n.op == "call_module":
            module = self.fetch_attr(str(n.target))
            if not type(module).__module__.startswith("torch.nn."):
                return None  # what its forward pass depends on need not be in its text
            types = [str(parameter.dtype) for parameter in module.parameters()]
            target = (repr(module), module.training, *types)
        return n.op, target, repr(tree_map(_described, self.fetch_args_kwargs_from_env(n)))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value


def _count(captured: CapturedGraph, inputs: Any) -> _Interpreter:
    """Return the seconds and bytes of each node, by name."""
    arguments = named_arguments(bind_inputs(captured.root, inputs))
    module = captured.module()
    # A buffer that meets no fake tensor is not one itself: batches counted are counted for real.
    with (
        unchanged_buffers(module),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        torch.no_grad(),
    ):
        given = [
            tree_map(
                lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x,
                arguments[name],
            )
            for name in captured.inputs
        ]
        with _Counting() as counting:
            interpreter = _Interpreter(module, counting)
            interpreter.run(*given)
    return interpreter
