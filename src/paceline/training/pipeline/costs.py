"""What the layers of a captured graph cost, as far as stages are to be balanced by it.

Counted, not measured, so that all ranks and all starts of a program cut a model at the same
places: FLOPs and bytes of each operator that the forward pass dispatches on tensors without
memory. An operator takes what is longer, computing or moving its bytes, on a nominal device; a
backward pass takes twice as long. Stages are balanced by ratios of these times, so that a device
that is faster throughout is cut at the same places.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from paceline.schedules.pipeline import LayerCosts, LayerEdge
from paceline.training.operators import works_of
from paceline.training.pipeline.graph import bind_inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.training.pipeline.graph import CapturedGraph, GraphLayer

_FLOPS_PER_S, _BYTES_PER_S = 5e10, 1e10  # of a core
_CALL_S = 2e-6  # of an operator, whatever it computes
_COPIES = 4  # of a parameter: with its gradient and two moments


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
        parameter_bytes=tuple(_COPIES * _parameter_bytes(captured, x) for x in captured.layers),
        activation_bytes=tuple(saved),
        edges=edges,
    )


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
    root = captured.root
    modules = [root.get_submodule(str(n.target)) for n in layer.nodes if n.op == "call_module"]
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())


class _Counting(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Adds up what operators cost."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for work in works_of(func, args, kwargs or {}, result):
            piece_s = max(work.flops / _FLOPS_PER_S, work.bytes / _BYTES_PER_S) + _CALL_S
            self.seconds += work.count * piece_s
        return result


class _Interpreter(fx.Interpreter):  # type: ignore[misc]  # torch has no types here
    def __init__(self, module: fx.GraphModule, counting: _Counting) -> None:
        super().__init__(module)
        self.counting = counting
        self.seconds: dict[str, float] = {}
        self.bytes: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and note what it cost."""
        before = self.counting.seconds
        result = super().run_node(n)
        self.seconds[n.name] = self.counting.seconds - before
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.bytes[n.name] = sum(tensor.nbytes for tensor in tensors)
        return result


def _count(captured: CapturedGraph, inputs: Any) -> _Interpreter:
    """Return the seconds and bytes of each node, by name."""
    arguments = bind_inputs(captured.root, inputs).arguments
    module = fx.GraphModule(captured.root, captured.graph)
    # A buffer that meets no fake tensor is not one itself: batches counted are counted for real.
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
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
    finally:
        for buffer, values in before:
            buffer.copy_(values)
    return interpreter
