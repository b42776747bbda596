"""Cuts a captured graph into stages, and finds what one stage computes and another one uses.

    graph     stem | block1 | block2 | head        head adds what stem computed
    stages    0 ---- stem ----> 1                  edges carry values, each from the stage that
              0 ---- stem ------------> 3          computes it directly to each stage that uses it
              1 ---- block1 --> 2 ...

Each stage is a GraphModule of the model's own submodules: named inputs to named outputs. Model
inputs and parameters are no edges: a stage takes the inputs that it uses from the batch, and a
parameter that several stages use (tied weights) is a parameter of each.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx, nn
from torch.fx.node import map_arg

from paceline.training.pipeline.example import Example

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.training.pipeline.graph import CapturedGraph, GraphLayer


class ValueEdge(NamedTuple):
    """A value that one stage computes and another one uses.

    Attributes:
        value: name of the graph's node.
        source: stage that computes it.
        destination: stage that uses it, higher than `source`.
    """

    value: str
    source: int
    destination: int


@dataclass(frozen=True, slots=True, eq=False)
class ModelStage:
    """Consecutive layers that one rank computes.

    Attributes:
        number: in the order of data flow, from 0.
        module: takes `inputs` and then `received`, by position; returns a tuple of `outputs`, and
            in the last stage after them what the model returns.
        inputs: names of the model's arguments that it uses.
        received: names of the values that earlier stages compute.
        outputs: names of the values that later stages use.
        layers: names of its layers.
        parameters: by their names in the model.
        is_last: whether it returns what the model returns.
        shared_inputs: those of `inputs` that other stages use too.
    """

    number: int
    module: nn.Module
    inputs: tuple[str, ...]
    received: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: tuple[str, ...]
    parameters: dict[str, nn.Parameter]
    is_last: bool
    shared_inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StagedModel:
    """A model in stages.

    Attributes:
        stages: in the order of data flow.
        edges: between them, sorted.
        stages_of: for each parameter's name, the stages that hold it: several for tied weights.
        mode, inputs, example: as those of the graph.
        lines: what is computed, a line for each node; equal on ranks whose models are.
        whole: paths of the inputs that all microbatches get as they are.
    """

    stages: tuple[ModelStage, ...]
    edges: tuple[ValueEdge, ...]
    stages_of: dict[str, tuple[int, ...]]
    mode: bool | None = None
    inputs: tuple[str, ...] = ()
    example: Example | None = None
    lines: tuple[str, ...] = ()
    whole: frozenset[str] = frozenset()


def cut(captured: CapturedGraph, cuts: Sequence[int]) -> StagedModel:
    """Return a model in stages.

    Args:
        captured: the model's graph.
        cuts: first layer of each stage but the first, in rising order.
    """
    bounds = itertools.pairwise([0, *cuts, len(captured.layers)])
    groups = [captured.layers[begin:end] for begin, end in bounds]
    stage_of = {
        node: number
        for number, layers in enumerate(groups)
        for layer in layers
        for node in layer.nodes
    }
    names = {id(p): name for name, p in captured.root.named_parameters()}
    edges = _edges_of(captured.graph, stage_of, len(groups) - 1)
    last = len(groups) - 1
    stages = tuple(
        _build(captured, number, layers, edges, names, is_last=number == last)
        for number, layers in enumerate(groups)
    )
    users = Counter(name for stage in stages for name in stage.inputs)
    stages = tuple(
        replace(stage, shared_inputs=tuple(name for name in stage.inputs if users[name] > 1))
        for stage in stages
    )
    used = {name for stage in stages for name in stage.parameters}
    for name, parameter in captured.root.named_parameters():
        if name not in used:  # the forward pass does not use it: it only has to be saved
            stages[0].parameters[name] = parameter
    holders: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.parameters:
            holders.setdefault(name, []).append(stage.number)
    stages_of = {name: tuple(numbers) for name, numbers in holders.items()}
    return StagedModel(
        stages,
        edges,
        stages_of,
        captured.mode,
        captured.inputs,
        captured.example,
        _lines(captured, stage_of),
    )


def _lines(captured: CapturedGraph, stage_of: dict[fx.Node, int]) -> tuple[str, ...]:
    return tuple(
        f"stage {stage}: {node.name} = {getattr(node.target, '__name__', node.target)}"
        f"{node.args}, {node.kwargs}, {type(captured.attribute(node)).__name__}"
        for node, stage in stage_of.items()
    )


def _edges_of(graph: fx.Graph, stage_of: dict[fx.Node, int], last: int) -> tuple[ValueEdge, ...]:
    edges = set()
    for node in graph.nodes:
        user = last if node.op == "output" else stage_of.get(node)
        for used in node.all_input_nodes if user is not None else ():
            source = stage_of.get(used)
            if source is not None and user is not None and source != user:
                edges.add(ValueEdge(used.name, source, user))
    return tuple(sorted(edges, key=lambda edge: (edge.source, edge.destination, edge.value)))


def _build(
    captured: CapturedGraph,
    number: int,
    layers: Sequence[GraphLayer],
    edges: Sequence[ValueEdge],
    names: dict[int, str],
    *,
    is_last: bool,
) -> ModelStage:
    """Return the stage of some layers, as a graph of its own."""
    received = tuple(edge.value for edge in edges if edge.destination == number)
    outputs = tuple(dict.fromkeys(edge.value for edge in edges if edge.source == number))
    end = next(iter(reversed(captured.graph.nodes)))
    nodes = [node for layer in layers for node in layer.nodes]
    users = [*nodes, end] if is_last else nodes
    used = list(dict.fromkeys(source for node in users for source in node.all_input_nodes))
    given = [node for node in used if node.op == "placeholder"]
    by_name = {node.name: node for node in captured.graph.nodes}
    graph = fx.Graph()
    new = {node: graph.placeholder(node.name) for node in given}
    new |= {by_name[value]: graph.placeholder(value) for value in received}
    new |= {node: graph.node_copy(node) for node in used if node.op == "get_attr"}
    for node in nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    results: list[Any] = [new[by_name[value]] for value in outputs]
    if is_last:
        results.append(map_arg(end.args[0], new.__getitem__))
    graph.output(tuple(results))
    module = captured.module(graph)
    return ModelStage(
        number=number,
        module=module,
        inputs=tuple(str(node.target) for node in given),
        received=received,
        outputs=outputs,
        layers=tuple(layer.name for layer in layers),
        parameters={names[id(p)]: p for p in module.parameters() if id(p) in names},
        is_last=is_last,
    )
