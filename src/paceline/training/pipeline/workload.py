"""Captures the Workload of one microbatch, layer by layer of the graph that stages are cut from.

The same layers as `graph.capture` finds for `prepare`: a plan that gives each stage a number of
them is followed by the runtime as it is. The whole step runs once on fake tensors, node by node;
operators, saved tensors and parameters belong to the layer whose node runs, and in the backward
pass to the layer whose forward call made them. The loss belongs to the last layer.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from paceline.core.errors import UsageError
from paceline.core.workload import Layer, LayerEdge, SharedParameter
from paceline.training.capture import OperatorRecorder, TrainingStep, capture, operations_of
from paceline.training.operators import bytes_of
from paceline.training.pipeline.batch_inputs import inputs_without_samples
from paceline.training.pipeline.costs import edges_of
from paceline.training.pipeline.exported import named_arguments
from paceline.training.pipeline.graph import bind_inputs
from paceline.training.pipeline.graph import capture as capture_graph
from paceline.training.pipeline.microbatches import path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.core.workload import Workload
    from paceline.training.pipeline.graph import CapturedGraph, GraphLayer


def capture_layers(step: TrainingStep, *, name: str = "") -> Workload:
    """Return the Workload of a step whose batch is one microbatch, with edges between its layers.

    Args:
        step: the model and a microbatch.
        name: of the workload; by default the module's class.

    Raises:
        UsageError: the model's forward pass cannot be captured as a graph, or see `capture`.
    """

    def record(module: nn.Module, inputs: Any) -> OperatorRecorder:
        return _GraphRecorder(module, inputs, step.split_points)

    return capture(step, name=name, record=record)


def resized(step: TrainingStep, samples: int) -> TrainingStep:
    """Return the step with a batch of so many samples, as `ResizableBatch.with_shape` does."""
    return ResizableBatch(step).with_shape(samples)


class ResizableBatch:
    """The batch of a step, of which other numbers of samples can be made.

    Tensors with the samples along dim 0 are resized; all others stay. Which of several inputs have
    samples takes a capture of the model's graph, which is made once.

    Args:
        step: with the batch.
    """

    def __init__(self, step: TrainingStep) -> None:
        self._step = step

    def with_shape(self, samples: int) -> TrainingStep:
        """Return the step with so many samples, 1 or more; only shapes matter, not values."""
        return self._resized(samples, lambda leaf: leaf.new_empty((samples, *leaf.shape[1:])))

    def with_values(self, samples: int) -> TrainingStep:
        """Return the step with so many samples: those of its own batch in turn."""
        return self._resized(samples, lambda leaf: leaf[torch.arange(samples) % leaf.shape[0]])

    def _resized(
        self, samples: int, resize: Callable[[torch.Tensor], torch.Tensor]
    ) -> TrainingStep:
        whole, before = self._found
        if before in (0, samples):
            return self._step

        def part(leaf: Any) -> Any:
            has_samples = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == before
            return resize(leaf) if has_samples and id(leaf) not in whole else leaf

        inputs, target = tree_map(part, self._step.inputs), tree_map(part, self._step.target)
        return replace(self._step, inputs=inputs, target=target)

    @functools.cached_property
    def _found(self) -> tuple[set[int], int]:
        """Inputs without samples, by `id`, and the samples of the others."""
        whole = _whole_inputs(self._step)
        leaves = [x for x in tree_leaves(self._step.inputs) if isinstance(x, torch.Tensor)]
        divided = [x for x in leaves if x.ndim and id(x) not in whole]
        return whole, divided[0].shape[0] if divided else 0


def _whole_inputs(step: TrainingStep) -> set[int]:
    """Return the inputs that all microbatches get whole, by `id`; none where that is not known."""
    if sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(step.inputs)) < 2:
        return set()
    try:
        captured = capture_graph(step.module, step.inputs, split_points=step.split_points)
    except UsageError:
        return set()
    names = inputs_without_samples(captured, step.inputs)
    leaves, _ = tree_flatten_with_path(named_arguments(bind_inputs(step.module, step.inputs)))
    return {id(leaf) for path, leaf in leaves if path_of(path) in names}


def arguments_of(captured: CapturedGraph, inputs: Any) -> dict[str, Any]:
    """Return the arguments of a graph by name, from inputs as the model takes them."""
    arguments = named_arguments(bind_inputs(captured.root, inputs))
    if captured.inputs == ("inputs",) and "inputs" not in arguments:
        return {"inputs": next(iter(arguments.values()))}  # split points take one
    return arguments


class _GraphRecorder(OperatorRecorder):
    """Counts operators per layer of the graph; a layer's name is its number until `layers`."""

    def __init__(self, module: nn.Module, inputs: Any, split_points: Sequence[str]) -> None:
        super().__init__(module)
        self._captured = capture_graph(module, inputs, split_points=split_points)
        self._layer_of = {
            node: number
            for number, layer in enumerate(self._captured.layers)
            for node in layer.nodes
        }
        self._bytes: dict[str, int] = {}
        self._users = self._find_users()
        self._stack = [str(len(self._captured.layers) - 1)]  # what no node does: the loss
        self._updating = self._stack[0]
        self._owner_of = {key: str(users[0]) for key, users in self._users.items()}

    def _find_users(self) -> dict[int, list[int]]:
        """Return the layers that use each parameter, by its `id`; in rising order."""
        users: dict[int, set[int]] = {id(p): set() for p in self._module.parameters()}
        for number, layer in enumerate(self._captured.layers):
            for tensor in self._tensors_of(layer, buffers=False):
                users[id(tensor)].add(number)
        # What the forward pass does not use is in the first stage, which saves it.
        return {key: sorted(layers) or [0] for key, layers in users.items()}

    def _tensors_of(self, layer: GraphLayer, *, buffers: bool) -> Iterator[torch.Tensor]:
        for node in layer.nodes:
            for used in (node, *node.all_input_nodes):
                value = None
                if used is node or used.op == "get_attr":
                    value = self._captured.attribute(used)
                if isinstance(value, nn.Module):
                    yield from value.buffers() if buffers else value.parameters()
                elif isinstance(value, torch.Tensor) and (
                    isinstance(value, nn.Parameter) != buffers
                ):
                    yield value

    def call(self, inputs: Any) -> Any:
        """Return the module's output for a batch; each node runs as a part of its layer."""
        arguments = arguments_of(self._captured, inputs)
        return _LayerInterpreter(self._captured.module(), self).run(
            *map(arguments.__getitem__, self._captured.inputs)
        )

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch saved tensors and operators; modules are not watched, but nodes."""
        saved = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)
        with saved, self:
            yield

    @contextlib.contextmanager
    def running(self, node: fx.Node) -> Iterator[None]:
        """Give what runs to the layer of a node."""
        number = self._layer_of.get(node)
        if number is None:
            yield
            return
        self._stack.append(str(number))
        try:
            yield
        finally:
            self._stack.pop()

    def returned(self, node: fx.Node, value: Any) -> None:
        """Note the bytes of what a node returns."""
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        self._bytes[node.name] = bytes_of(tensors)

    def edges(self) -> tuple[LayerEdge, ...]:
        """Return what the layers exchange."""
        return tuple(edges_of(self._layer_of, self._bytes))

    def shared(self) -> tuple[SharedParameter, ...]:
        """Return the parameters that several layers use."""
        return tuple(
            SharedParameter(tuple(self._users[id(parameter)]), parameter.nbytes)
            for parameter in self._module.parameters()
            if len(self._users[id(parameter)]) > 1
        )

    def layers(self) -> tuple[Layer, ...]:
        """Return all layers of the graph, in its order."""
        owned: dict[int, list[nn.Parameter]] = {}
        for parameter in self._module.parameters():
            owned.setdefault(self._users[id(parameter)][0], []).append(parameter)
        seen: set[int] = set()
        found = []
        for number, layer in enumerate(self._captured.layers):
            key, parameters = str(number), owned.get(number, [])
            buffers = {id(b): b.nbytes for b in self._tensors_of(layer, buffers=True)}
            new = {name: size for name, size in buffers.items() if name not in seen}
            seen |= new.keys()
            found.append(
                Layer(
                    name=layer.name,
                    kind=self._kind(layer),
                    parameter_bytes=tuple(parameter.nbytes for parameter in parameters),
                    frozen=tuple(i for i, p in enumerate(parameters) if not p.requires_grad),
                    buffer_bytes=sum(new.values()),
                    saved_bytes=self._saved.get(key, 0),
                    operations=operations_of(self._counts.get(key, {})),
                )
            )
        return tuple(found)

    def _kind(self, layer: GraphLayer) -> str:
        first = layer.nodes[0]
        if first.op == "call_module":
            return type(self._captured.attribute(first)).__name__
        return str(getattr(first.target, "__name__", first.target))


class _LayerInterpreter(fx.Interpreter):  # type: ignore[misc]  # torch has no types here
    def __init__(self, module: fx.GraphModule, recorder: _GraphRecorder) -> None:
        super().__init__(module)
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        """Run a node as a part of its layer."""
        with self._recorder.running(n):
            value = super().run_node(n)
        self._recorder.returned(n, value)
        return value
