"""Captures the forward pass of a model whose modules decide in Python, by `torch.export`.

    if attention_mask is None: ...         a Proxy of torch.fx has no shape and no value: a module
    if past is not None and length > 1:    that looks at them, or takes **kwargs apart, stays whole

Models of libraries are of that kind. `torch.export` runs the model on tensors without memory, so
that Python decides as it does for the example, and records operators. What it fixes is freed again:

- Parameters, tied ones too, are read from the model, by its own names.
- The model is exported in both modes. Operators whose arguments differ, such as dropout, take those
  of the mode that their module is in when they run.
- Sizes of dims are unknown numbers, unless the model fixes them; what it asks of them, and those
  that it fixes, `Example.check` asks of every batch.
- Outputs come in the containers that the model returns.

Operators belong to the layer of the last module whose parameters were read before them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import operator
import random
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx, nn
from torch.fx.experimental import _config as _export_config
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from paceline.core.errors import UsageError, first_line
from paceline.training.pipeline.example import Example, SizeGuard, guards_of
from paceline.training.pipeline.microbatches import path_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_PREFIX = "model."
_AUTO = torch.export.Dim.AUTO
_LOGGERS = (
    *("torch.export", "torch.fx.experimental.symbolic_shapes"),
    "torch._subclasses.fake_tensor",
)
# As the functions of torch, so that a schedule can defer the gradients of their weights.
_FUNCTIONS = {
    torch.ops.aten.linear.default: nn.functional.linear,
    torch.ops.aten.conv1d.default: torch.conv1d,
    torch.ops.aten.conv2d.default: torch.conv2d,
    torch.ops.aten.conv3d.default: torch.conv3d,
}
# What is true of the example's dtypes need not be under autocast.
_DROPPED = (torch.ops.aten._assert_tensor_metadata.default,)  # noqa: SLF001  # torch has no other


@dataclass(frozen=True, slots=True, eq=False)
class ExportedGraph:
    """What `export` finds of a forward pass.

    Attributes:
        graph: nodes call operators, and read parameters by their names in the model.
        attributes: what it reads and calls that the model does not have, by name.
        owners: for each node that computes, the module whose layer it belongs to, by its name.
        example: what the graph takes for granted.
        mode: train or not, if the graph is for one mode only.
    """

    graph: fx.Graph
    attributes: dict[str, Any]
    owners: dict[fx.Node, str]
    example: Example
    mode: bool | None


class _Flat(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Takes and returns tensors only; it notes the containers of the model's outputs."""

    def __init__(self, model: nn.Module, given: inspect.BoundArguments, seen: _Seen) -> None:
        super().__init__()
        self.model = model
        self._given, self._seen = (_Held(given), seen)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model with these tensors in place of the example's."""
        given = self._given.value
        leaves, structure = pytree.tree_flatten((given.args, given.kwargs))
        coming = iter(tensors)
        args, kwargs = pytree.tree_unflatten(
            [next(coming) if isinstance(x, torch.Tensor) else x for x in leaves], structure
        )
        self._seen.leaves, self._seen.structure = pytree.tree_flatten(self.model(*args, **kwargs))
        for leaf in self._seen.leaves:
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                raise _returns(leaf)
        return tuple(leaf for leaf in self._seen.leaves if isinstance(leaf, torch.Tensor))


class _Held:
    """Hides a value from those who look for tensors in a module's attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Seen:
    """The outputs of a model: their containers, and what of them is no tensor."""

    leaves: list[Any]
    structure: Any


def _returns(leaf: Any) -> UsageError:
    name = type(leaf).__name__
    return UsageError(
        f"the model returns a {name}, which is no tensor",
        where="example_inputs",
        why="a graph returns tensors and plain values, in lists, tuples and dicts",
        fix=f"Have the model return no {name}, for example with 'use_cache': False among "
        "example_inputs and the inputs of every batch",
    )


class ByMode(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Calls an operator with other arguments where a module of the model does not train.

    Args:
        target: the operator.
        owner: the module, which stays where it is in the model.
        evaluating: the arguments that are others without training, by name.
    """

    def __init__(self, target: Any, owner: nn.Module, evaluating: dict[str, Any]) -> None:
        super().__init__()
        self.target = target
        self._owner, self._evaluating = _Held(owner), evaluating

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the operator returns; the arguments are those of training."""
        if self._owner.value.training:
            return self.target(*args, **kwargs)
        return self.target(**(_by_name(self.target, args, kwargs) | self._evaluating))


class Returned(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Puts tensors into the containers that a model returns."""

    def __init__(self, leaves: list[Any], structure: Any) -> None:
        super().__init__()
        self._plain = [_HERE if isinstance(x, torch.Tensor) else x for x in leaves]
        self._structure = structure

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return what the model returns."""
        coming = iter(tensors)
        leaves = [next(coming) if leaf is _HERE else leaf for leaf in self._plain]
        return pytree.tree_unflatten(leaves, self._structure)


_HERE = object()


def export(model: nn.Module, given: inspect.BoundArguments) -> ExportedGraph:
    """Return the graph of operators of a model's forward pass; nothing is computed.

    Args:
        model: whose parameters the graph reads.
        given: an example of the arguments.

    Raises:
        UsageError: the model returns something that is no tensor, or has no containers of it.
        Exception: whatever torch.export raises for a model that it cannot export.
    """
    given = _without_repeats(_of_two_samples(given))
    modes = {module: module.training for module in model.modules()}
    states = python_random_states()
    seen = _Seen()
    flat = _Flat(model, given, seen)
    try:
        model.train()
        training, guards = _operators(flat, given)
        model.eval()
        evaluating: fx.Graph | None = None
        with contextlib.suppress(Exception):  # the graph is then that of one mode
            other, more = _operators(flat, given)
            evaluating, guards = other.graph, guards + more
        places = None if evaluating is None else _differences(training.graph, evaluating)
        mode = None
        if places is None:
            mode, places = modes[model], {}
            for module, own in modes.items():
                module.training = own
            training, guards = _operators(flat, given)
        if python_random_states() != states:
            raise UsageError(
                "the forward pass of the model draws from Python's random numbers",
                where=type(model).__name__,
                why="its graph would have those of the example for ever",
                fix="Draw from torch: torch.rand(()) in place of random.random()",
            )
    finally:
        set_python_random_states(states)
        for module, own in modes.items():
            module.training = own
    example = Example({}, {}, list({str(guard): guard for guard in guards}.values()))
    return _Builder(model, given, training, places, example).build(seen, mode)


def _of_two_samples(given: inspect.BoundArguments) -> inspect.BoundArguments:
    """Return the example with two samples where it has one: torch.export takes 1 as fixed."""
    leaves = pytree.tree_leaves((given.args, given.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    if not tensors or tensors[0].shape[0] != 1:
        return given

    def two(leaf: Any) -> Any:
        has_one = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == 1
        return torch.cat([leaf, leaf]) if has_one else leaf

    return inspect.BoundArguments(given.signature, pytree.tree_map(two, given.arguments))


def _without_repeats(given: inspect.BoundArguments) -> inspect.BoundArguments:
    """Return the arguments, with copies of tensors given twice, which export takes for one."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_repeated = id(leaf) in seen
        seen.add(id(leaf))
        return leaf.clone() if is_repeated else leaf

    return inspect.BoundArguments(given.signature, pytree.tree_map(own, given.arguments))


class _Operators(NamedTuple):
    """A graph of operators, and what was decided by the sizes of the example."""

    module: fx.GraphModule
    guards: list[SizeGuard]


def _operators(flat: _Flat, given: inspect.BoundArguments) -> _Operators:
    """Return the graph of operators; sizes of all dims are free, or that of the first one."""
    paths, _ = pytree.tree_flatten_with_path(named_arguments(given))
    at = {id(leaf): path_of(path) for path, leaf in paths}
    leaves = pytree.tree_leaves((given.args, given.kwargs))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    names = [at[id(tensor)] for tensor in tensors]
    problem: Exception | None = None
    for free in (lambda tensor: tensor.dim(), lambda tensor: min(1, tensor.dim())):
        # With sizes from 2 on more models can be exported, which then have no batches of 1.
        for from_two in (False, True):
            try:
                return _exported(flat, tensors, names, free, from_two=from_two)
            except UsageError:
                raise
            except Exception as error:  # noqa: BLE001  # whatever a model raises for a free size
                problem = error
    assert problem is not None
    raise problem


def _exported(
    flat: _Flat, tensors: Any, names: list[str], free: Any, *, from_two: bool
) -> _Operators:
    dims = tuple({dim: _AUTO for dim in range(free(x)) if x.shape[dim] > 1} for x in tensors)
    # Otherwise a free size is taken for 2 or more, and what a model asks of a 1 is not noted.
    with quiet(), _export_config.patch(backed_size_oblivious=not from_two):
        program = torch.export.export(flat, tensors, dynamic_shapes=(dims,))
        guards = list(guards_of(program, names, from_two=from_two))
        return _Operators(program.module(check_guards=False), guards)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from saying why an operator does not run without memory, or cannot be exported.

    For a model that asks for values it prints its graph to stderr, up to there.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, was_disabled in zip(loggers, before, strict=True):
            logger.disabled = was_disabled


def _differences(training: fx.Graph, evaluating: fx.Graph) -> dict[str, dict[str, Any]] | None:
    """Return the plain arguments that differ without training, by node; None for other graphs.

    The kernels that torch would choose without dropout need fewer contiguous tensors.
    """
    nodes, evaluated = ([n for n in g.nodes if not _copies(n)] for g in (training, evaluating))
    if len(nodes) != len(evaluated) or len(training.nodes) < len(evaluating.nodes):
        return None
    same: dict[fx.Node, fx.Node] = {}
    found: dict[str, dict[str, Any]] = {}
    for own, other in zip(nodes, evaluated, strict=True):
        if own.op != other.op or (own.op != "output" and own.target != other.target):
            return None
        given = _by_name(own.target, own.args, own.kwargs)
        others = _by_name(other.target, other.args, other.kwargs)
        for name in given.keys() | others.keys():
            if _equal(given.get(name), others.get(name), same):
                continue
            if not isinstance(own.target, torch._ops.OpOverload):  # noqa: SLF001  # its only name
                return None
            if any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(others[name])):
                return None
            found.setdefault(own.name, {})[name] = others[name]
        same[own] = other
    return found


def _by_name(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return arguments by name, with the defaults of an operator; without a schema by place."""
    if not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001  # its only name
        return {str(place): value for place, value in enumerate(args)} | dict(kwargs)
    arguments = target._schema.arguments  # noqa: SLF001  # no accessor
    defaults = {x.name: x.default_value for x in arguments if x.has_default_value()}
    names = (x.name for x in arguments)
    return defaults | dict(zip(names, args, strict=False)) | dict(kwargs)


def _copies(node: fx.Node) -> bool:
    return bool(node.target is torch.ops.aten.contiguous.default)


def _source(node: fx.Node) -> fx.Node:
    while _copies(node):
        node = node.args[0]
    return node


def _equal(own: Any, other: Any, same: dict[fx.Node, fx.Node]) -> bool:
    leaves, structure = pytree.tree_flatten(own)
    others, other_structure = pytree.tree_flatten(other)
    return structure == other_structure and all(
        isinstance(b, fx.Node) and same.get(_source(a)) is _source(b)
        if isinstance(a, fx.Node)
        else not isinstance(b, fx.Node) and a == b
        for a, b in zip(leaves, others, strict=True)
    )


class _Builder:
    """Copies exported operators into a graph of the model's own arguments and parameters."""

    def __init__(
        self,
        model: nn.Module,
        given: inspect.BoundArguments,
        module: fx.GraphModule,
        places: dict[str, dict[str, Any]],
        example: Example,
    ) -> None:
        self._model, self._given, self._module, self._places = model, given, module, places
        self._modules = dict(model.named_modules())
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._graph = fx.Graph()
        self._new: dict[fx.Node, fx.Node] = {}
        self._attributes: dict[str, Any] = {}
        self._owners: dict[fx.Node, str] = {}
        self._owner = ""
        self._example = example

    def build(self, seen: _Seen, mode: bool | None) -> ExportedGraph:
        nodes = list(self._module.graph.nodes)
        tensors = self._arguments([node for node in nodes if node.op == "placeholder"])
        for node in nodes:
            if node.op == "placeholder":
                self._new[node] = tensors[node]
            elif node.op == "get_attr":
                self._new[node] = self._graph.get_attr(self._name_of(node))
                self._new[node].meta = dict(node.meta)
            elif node.op == "output":
                returned = [self._new[value] for value in node.all_input_nodes]
                flat = map_arg(node.args[0], self._new.__getitem__)
                leaves = pytree.tree_leaves(flat)
                assert len(returned) <= len(leaves)
                name = self._keep("_returned", Returned(seen.leaves, seen.structure))
                value = self._graph.call_module(name, tuple(leaves))
                self._owners[value] = self._owner
                self._graph.output(value)
            elif node.target not in _DROPPED:
                self._new[node] = self._copy(node)
        return ExportedGraph(self._graph, self._attributes, self._owners, self._example, mode)

    def _arguments(self, placeholders: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Return the node of each tensor among the arguments; placeholders are whole arguments."""
        named = named_arguments(self._given)
        paths, _ = pytree.tree_flatten_with_path(named)
        order = list(pytree.tree_leaves((self._given.args, self._given.kwargs)))
        at = {id(leaf): path for path, leaf in paths if isinstance(leaf, torch.Tensor)}
        heads = {name: self._graph.placeholder(name) for name in named}
        coming, found = iter(placeholders), {}
        for leaf in order:
            if isinstance(leaf, torch.Tensor):
                node, path = next(coming), at[id(leaf)]
                value = heads[path[0].key]
                for key in path[1:]:
                    step = getattr(key, "idx", getattr(key, "key", None))
                    value = self._graph.call_function(operator.getitem, (value, step))
                    self._owners[value] = self._owner
                found[node] = value
                sizes = node.meta["val"].shape
                self._example.sizes[path_of(path)] = tuple(
                    size if isinstance(size, int) else None for size in sizes
                )
        for path, leaf in paths:
            if not isinstance(leaf, torch.Tensor):
                self._example.values[path_of(path)] = leaf
        return found

    def _name_of(self, node: fx.Node) -> str:
        """Return the name in the model of what a node reads, or a new name for a constant."""
        name = str(node.target)
        own = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and _has(self._model, own):
            return own
        value = functools.reduce(getattr, name.split("."), self._module)
        return self._keep("_constant_" + name.replace(".", "_"), value)

    def _keep(self, name: str, value: Any) -> str:
        while hasattr(self._model, name):
            name += "_"
        self._attributes[name] = value
        return name

    def _copy(self, node: fx.Node) -> fx.Node:
        for used in node.all_input_nodes:
            if used.op == "get_attr":
                name = str(self._new[used].target)
                if name not in self._attributes:
                    value = functools.reduce(getattr, name.split("."), self._model)
                    self._owner = self._names.get(id(value), self._owner + ".").rpartition(".")[0]
        target = node.target
        if node.op == "call_function":
            target = _FUNCTIONS.get(target, target)
        args, kwargs = map_arg((node.args, node.kwargs), self._new.__getitem__)
        places = self._places.get(node.name)
        if places is not None:
            module = ByMode(target, self._module_of(node), places)
            name = self._keep(f"_{node.name}_by_mode", module)
            copied = self._graph.call_module(name, args, kwargs)
        else:
            copied = self._graph.create_node(node.op, target, args, kwargs, name=node.name)
        self._owners[copied] = self._owner
        return copied

    def _module_of(self, node: fx.Node) -> nn.Module:
        """Return the innermost module that a node is part of."""
        stack = [entry[0] for entry in node.meta.get("nn_module_stack", {}).values()]
        for path in reversed(stack):
            own = path.split("@")[0].removeprefix(_PREFIX)
            if path.startswith(_PREFIX) and own in self._modules:
                module: nn.Module = self._modules[own]
                return module
        return self._model


def _has(module: nn.Module, name: str) -> bool:
    path, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        return False
    return isinstance(getattr(owner, last, None), torch.Tensor)


def named_arguments(given: inspect.BoundArguments) -> dict[str, Any]:
    """Return arguments by name: those of *args are numbered, those of **kwargs have their own."""
    found: dict[str, Any] = {}
    for name, value in given.arguments.items():
        kind = given.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found |= {f"{name}_{place}": item for place, item in enumerate(value)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        else:
            found[name] = value
    return found


def python_random_states() -> list[Any]:
    """Return the states of the generators that Python code draws from, which no graph has."""
    states: list[Any] = [random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states.append((name, keys.tobytes(), *rest))
    return states


def set_python_random_states(states: list[Any]) -> None:
    """Set these generators back."""
    random.setstate(states[0])
    for name, keys, *rest in states[1:]:
        numpy = sys.modules["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype="uint32"), *rest))


def reason(problem: Exception) -> str:
    """Return why a model could not be exported, in a line."""
    return problem.what if isinstance(problem, UsageError) else first_line(problem)
