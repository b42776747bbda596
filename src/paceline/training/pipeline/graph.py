"""Captures a model's forward pass as a graph whose layers can be divided among stages.

    model                          graph (torch.fx), in the order of execution
    forward(x):                    x     placeholder
      x = self.stem(x)             stem  call_module      layer "stem"
      y = self.block(x)            block call_module      layer "block"
      return self.head(x + y)      add   call_function      (of the same layer)
                                   head  call_module      layer "head"

The nodes call the model's own submodules and read its own parameters, by their names: modes of
dropout and batch normalisation, hooks and state dicts stay what they were.

A submodule whose forward pass cannot be traced (its control flow depends on values, or it switches
autograd, autocast or its mode by itself) stays whole: it is one node of the graph. Where that would
be most of the model, or its outermost forward pass, an example is exported instead, as a graph of
operators (`exported`). A model that cannot be exported either has no graph. Then the user can name
submodules that are called one after another (`split_points`).
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import operator
import os
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from paceline.core.errors import UsageError, first_line
from paceline.training.pipeline.example import Example
from paceline.training.pipeline.exported import (
    ByMode,
    ExportedGraph,
    export,
    python_random_states,
    reason,
    set_python_random_states,
)
from paceline.training.source_line import source_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# What a forward pass that uses these names does is not in the graph that tracing it would give, and
# cannot be seen while it is traced. All else is seen when it happens, also in what is called.
_HIDDEN_FROM_TRACE = frozenset({"checkpoint", "is_tensor"})
_CONTEXTS = (
    (torch.no_grad, "__enter__"),
    (torch.enable_grad, "__enter__"),
    (torch.inference_mode, "__enter__"),
    (torch.set_grad_enabled, "__init__"),
    (torch.autocast, "__enter__"),
)
_QUESTIONS = ("is_grad_enabled", "is_autocast_enabled")
# They take no Proxy by themselves.
_CONSTRUCTORS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")
_TORCH_FOLDER = os.path.dirname(torch.__file__)  # noqa: PTH120  # compared with names of frames


@dataclass(frozen=True, slots=True, eq=False)
class GraphLayer:
    """Consecutive nodes that no cut separates.

    Attributes:
        name: of the submodule, or of the first node where it is none.
        nodes: in the order of execution.
    """

    name: str
    nodes: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CapturedGraph:
    """A model's forward pass.

    Attributes:
        root: the model.
        graph: of its forward pass.
        inputs: names of the arguments that the graph takes.
        layers: all nodes that compute, in the order of execution.
        opaque: names of submodules that are one node each because they cannot be traced, with the
            reason.
        mode: the model's, train or not, if its outermost forward pass asks for it: the graph is
            that of this mode. None: it follows the mode.
        attributes: what the graph reads or calls that the model does not have, by name.
        example: what an exported graph takes for granted of its arguments; None: it is traced.
    """

    root: nn.Module
    graph: fx.Graph
    inputs: tuple[str, ...]
    layers: tuple[GraphLayer, ...]
    opaque: dict[str, str] = field(default_factory=dict)
    mode: bool | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    example: Example | None = None

    def module(self, graph: fx.Graph | None = None) -> fx.GraphModule:
        """Return a module that computes this graph, or one of nodes of it."""
        graph = graph or self.graph
        if not self.attributes:
            return fx.GraphModule(self.root, graph)
        used = {str(n.target): n for n in graph.nodes if n.op in ("get_attr", "call_module")}
        return fx.GraphModule({name: self.attribute(node) for name, node in used.items()}, graph)

    def attribute(self, node: fx.Node) -> Any:
        """Return the module that a node calls, or what it reads; None where it does neither."""
        if node.op not in ("get_attr", "call_module"):
            return None
        name = str(node.target)
        if name in self.attributes:
            return self.attributes[name]
        return functools.reduce(getattr, name.split("."), self.root)

    def parameters(self, layer: GraphLayer) -> Iterator[nn.Parameter]:
        """Yield the parameters that a layer uses, each once."""
        seen: set[int] = set()
        for node in layer.nodes:
            for used in (node, *node.all_input_nodes):
                value = self.attribute(used) if used is node or used.op == "get_attr" else None
                own = value.parameters() if isinstance(value, nn.Module) else [value]
                for parameter in own:
                    if isinstance(parameter, nn.Parameter) and id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield parameter


def bind_inputs(model: nn.Module, inputs: Any) -> inspect.BoundArguments:
    """Return a model's arguments by name.

    Args:
        model: whose forward pass takes them.
        inputs: a tuple or list of the positional arguments; a dict of arguments by name, if its
            keys are names of arguments; anything else is the only argument.

    Raises:
        UsageError: the forward pass does not take them.
    """
    signature = inspect.signature(model.forward)
    names = set(signature.parameters)
    try:
        if isinstance(inputs, dict) and inputs and set(inputs) <= names:
            return signature.bind(**inputs)
        if isinstance(inputs, dict) and inputs:
            with contextlib.suppress(TypeError):  # **kwargs takes them, or the dict is one argument
                return signature.bind(**inputs)
        if isinstance(inputs, tuple | list):
            return signature.bind(*inputs)
        return signature.bind(inputs)
    except TypeError as problem:
        raise UsageError(
            "the model does not take these inputs",
            where=f"{type(model).__name__}.forward{signature}",
            why=str(problem),
            fix="Give a tensor, a tuple of positional arguments, or a dict of arguments by name",
        ) from None


def capture(
    model: nn.Module, inputs: Any = None, *, split_points: Sequence[str] = ()
) -> CapturedGraph:
    """Return the graph of a model's forward pass; the model is not run.

    Args:
        model: whose parameters the graph uses.
        inputs: an example, as `bind_inputs` takes it: arguments that it leaves out have their
            defaults in the graph. None: all arguments with a default are left out.
        split_points: names of submodules that make up the model if each is called with the output
            of the one before: the model's own forward pass is then not looked at.

    Raises:
        UsageError: the forward pass cannot be captured; the error names line and operator.
    """
    if split_points:
        return _chained(model, split_points)
    arguments = _required(model) if inputs is None else bind_inputs(model, inputs)
    try:
        traced = _traced(model, arguments)
    except UsageError as problem:
        if inputs is None:
            raise
        try:
            return _exported(model, inputs)
        except Exception as other:
            if isinstance(other, UsageError):
                raise
            why = f"{problem.why}; torch.export: {reason(other)}"
            raise UsageError(problem.what, where=problem.where, why=why, fix=problem.fix) from None
    if inputs is None or not _is_mostly_opaque(traced):
        return traced
    try:
        return _exported(model, inputs)
    except Exception as other:  # noqa: BLE001  # whatever torch raises for what it cannot export
        opaque = {
            name: f"{why}; torch.export: {reason(other)}" for name, why in traced.opaque.items()
        }
        return replace(traced, opaque=opaque)


def _traced(model: nn.Module, arguments: inspect.BoundArguments) -> CapturedGraph:
    """Return the graph of a model's own submodules.

    Raises:
        UsageError: the outermost forward pass cannot be traced.
    """
    _check_traceable(model)
    tracer = _Tracer(arguments)
    before = _random_states()
    try:
        with _constructors_take_proxies(), _watched(tracer):
            graph = tracer.trace(model)
        if _random_states() != before:
            raise _Hidden("random numbers")
    except UsageError:
        raise
    except Exception as problem:
        raise _capture_error(model, problem) from problem
    return CapturedGraph(
        root=model,
        graph=graph,
        inputs=_inputs_of(graph),
        layers=_layers_of(graph, model),
        opaque=tracer.opaque,
        mode=model.training if tracer.asks_mode else None,
    )


class _Hidden(Exception):
    """A forward pass does what is not in its graph."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it uses {name}, which a graph does not have")


def _random_states() -> tuple[Any, ...]:
    return (*python_random_states(), torch.get_rng_state().numpy().tobytes())


def _set_random_states(states: tuple[Any, ...]) -> None:
    *python, own = states
    set_python_random_states(python)
    torch.set_rng_state(torch.frombuffer(bytearray(own), dtype=torch.uint8))


def _class_of_no_proxy(value: Any, kinds: Any, _original: Any = isinstance) -> bool:
    """Return what `isinstance` returns, but for a Proxy, whose class is not that of its value."""
    if _original(value, fx.Proxy) and not _original(value, kinds):
        file = sys._getframe(1).f_code.co_filename  # noqa: SLF001  # inspect's take the whole stack
        if not file.startswith(_TORCH_FOLDER):  # torch knows of proxies
            raise _Hidden("isinstance")
    return bool(_original(value, kinds))


@contextlib.contextmanager
def _watched(tracer: _Tracer) -> Iterator[None]:
    """Raise `_Hidden` where what is traced, or what it calls, does what a graph does not have.

    Only the outermost forward pass may ask for the mode of the model.
    """

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise _Hidden(name)

        return refused

    def mode_of(module: nn.Module) -> bool:
        if tracer.module_stack:
            raise _Hidden("training")
        tracer.asks_mode = True
        return bool(module.__dict__["training"])

    def set_mode(module: nn.Module, mode: bool) -> None:
        module.__dict__["training"] = mode

    changed: list[tuple[Any, str]] = [*_CONTEXTS, *((torch, name) for name in _QUESTIONS)]
    originals = [(owner, name, getattr(owner, name)) for owner, name in changed]
    originals.append((builtins, "isinstance", isinstance))
    for owner, name in changed:
        setattr(owner, name, refuse(name if owner is torch else owner.__name__))
    builtins.isinstance = _class_of_no_proxy
    nn.Module.training = property(mode_of, set_mode)
    try:
        yield
    finally:
        del nn.Module.training
        for owner, name, original in originals:
            setattr(owner, name, original)


def _exported(model: nn.Module, inputs: Any) -> CapturedGraph:
    """Return the graph of the operators of an example."""
    found: ExportedGraph = export(model, bind_inputs(model, inputs))
    nodes = list(found.owners)
    tied = _places_tied(nodes, lambda node: _changed(node, found.attributes))
    layers: list[tuple[str, list[fx.Node]]] = []
    for place, node in enumerate(nodes):
        owner = found.owners[node]
        if not layers or (owner != layers[-1][0] and place not in tied):
            layers.append((owner, []))
        layers[-1][1].append(node)
    if len(layers) > 1 and not layers[0][0]:  # what comes before the first parameter
        (_, first), (name, second), *others = layers
        layers = [(name, first + second), *others]
    return CapturedGraph(
        root=model,
        graph=found.graph,
        inputs=_inputs_of(found.graph),
        layers=tuple(GraphLayer(name or "inputs", tuple(members)) for name, members in layers),
        mode=found.mode,
        attributes=found.attributes,
        example=found.example,
    )


def _inputs_of(graph: fx.Graph) -> tuple[str, ...]:
    return tuple(node.target for node in graph.nodes if node.op == "placeholder")


def _is_mostly_opaque(captured: CapturedGraph) -> bool:
    """Return whether one layer that could not be traced has most of the model's parameters."""
    whole = sum(parameter.numel() for parameter in captured.root.parameters())
    sizes = (
        sum(p.numel() for p in captured.root.get_submodule(name).parameters())
        for name in captured.opaque
    )
    return bool(max(sizes, default=0) > whole / 2)


class _Tracer(fx.Tracer):  # type: ignore[misc]  # torch has no types here
    """Traces a model; submodules that cannot be traced stay whole."""

    def __init__(self, arguments: inspect.BoundArguments) -> None:
        super().__init__()
        self.trace_asserts = True
        self.opaque: dict[str, str] = {}
        self.asks_mode = False
        self._arguments = arguments

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Return the forward pass, and a placeholder for each argument that is given."""
        del is_module, concrete_args
        given: inspect.BoundArguments = self._arguments
        for name, value in given.arguments.items():
            if given.signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                numbered = [f"{name}_{place}" for place in range(len(value))]
                given.arguments[name] = tuple(map(self._placeholder, numbered))
            elif given.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                given.arguments[name] = {key: self._placeholder(key) for key in value}
            else:
                given.arguments[name] = self._placeholder(name)
        return functools.partial(root_fn, self.root, *given.args, **given.kwargs), []

    def _placeholder(self, name: str) -> fx.Proxy:
        return self.create_proxy("placeholder", name, (), {})

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a submodule is one node."""
        if super().is_leaf_module(m, module_qualified_name):
            return True
        hidden = _hidden_names(m)
        if hidden:
            self.opaque[module_qualified_name] = f"its forward pass uses {', '.join(hidden)}"
        return bool(hidden)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Trace a submodule; where that fails, it becomes one node."""
        last = next(iter(reversed(self.graph.nodes)), None)
        stack: Any = self.module_stack.copy()
        states = _random_states()
        try:
            traced = super().call_module(m, forward, args, kwargs)
            if _random_states() != states:
                raise _Hidden("random numbers")  # as what a forward pass raises
            return traced
        except Exception as problem:  # noqa: BLE001  # whatever a forward pass raises for a Proxy
            for node in list(reversed(self.graph.nodes)):
                if node is last:
                    break
                self.graph.erase_node(node)
            self.module_stack: Any = stack  # torch pops no module whose forward pass raises
            _set_random_states(states)
            name = self.path_of_module(m)
            self.opaque[name] = f"{source_line(problem)}: {first_line(problem)}"
            return self.create_proxy("call_module", name, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Return a node that reads a parameter: a new one, as `call_module` may erase others."""
        del parameter_proxy_cache
        return super().getattr(attr, attr_val, {})


def _required(model: nn.Module) -> inspect.BoundArguments:
    """Return None for each argument without a default."""
    signature = inspect.signature(model.forward)
    empty = inspect.Parameter.empty
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p for p in signature.parameters.values() if p.default is empty]
    if not needed or any(p.kind in kinds for p in needed):
        raise UsageError(
            "the arguments of the model are not known",
            where=f"{type(model).__name__}.forward{signature}",
            fix="Give example_inputs to prepare",
        )
    return inspect.BoundArguments(signature, dict.fromkeys((p.name for p in needed), None))


def _hidden_names(module: nn.Module) -> list[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return sorted(_HIDDEN_FROM_TRACE & set(code.co_names)) if code is not None else []


def _check_traceable(model: nn.Module) -> None:
    """Raise an error where a trace of the outermost forward pass would silently be wrong."""
    hidden = _hidden_names(model)
    if hidden:
        code = inspect.unwrap(type(model).forward).__code__
        raise UsageError(
            "the forward pass of the model cannot be captured as a graph",
            where=f"{code.co_filename}:{code.co_firstlineno}",
            why=f"it uses {', '.join(hidden)}, which a graph does not have",
            fix=_offer(model),
        )


@contextlib.contextmanager
def _constructors_take_proxies() -> Iterator[None]:
    """Let torch.arange and its like be traced with sizes that are not known yet."""
    originals = {name: getattr(torch, name) for name in _CONSTRUCTORS}

    def traced(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, fx.Proxy):
                    return leaf.tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(torch, name, traced(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _capture_error(model: nn.Module, problem: Exception) -> UsageError:
    return UsageError(
        "the forward pass of the model cannot be captured as a graph",
        where=source_line(problem),
        why=first_line(problem),
        fix=_offer(model),
    )


def _offer(model: nn.Module) -> str:
    names = [name for name, _ in model.named_children()]
    return (
        "If the model calls its submodules one after another, name them: "
        f"split_points={names}. Otherwise move this code into a submodule, which is not traced then"
    )


def _chained(model: nn.Module, names: Sequence[str]) -> CapturedGraph:
    """Return a graph that calls each submodule with the output of the one before.

    Raises:
        UsageError: there is no such submodule, or a parameter is in none of them.
    """
    modules = dict(model.named_modules())
    for name in names:
        if not name or name not in modules:
            raise UsageError(
                f"the model has no submodule {name!r}",
                where="split_points",
                fix=f"Name some of {', '.join(list(modules)[1:20])}",
            )
    covered = {id(p) for name in names for p in modules[name].parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in covered:
            raise UsageError(
                f"the parameter {name} is in none of the split points",
                where=f"split_points={list(names)}",
                fix="Name all submodules that the model calls, in their order",
            )
    graph = fx.Graph()
    argument = next(iter(inspect.signature(model.forward).parameters), "inputs")
    value = graph.placeholder(argument)  # by this name `bind_inputs` passes it
    for name in names:
        value = graph.call_module(name, (value,))
    graph.output(value)
    return CapturedGraph(
        root=model, graph=graph, inputs=(argument,), layers=_layers_of(graph, model)
    )


def _layers_of(graph: fx.Graph, root: nn.Module) -> tuple[GraphLayer, ...]:
    """Return the computing nodes in layers: each begins with a submodule or a parameter.

    What comes before the first of these, such as sizes of the inputs, belongs to its layer.
    """
    nodes = [n for n in graph.nodes if n.op in ("call_module", "call_function", "call_method")]
    tied = _places_tied(
        nodes, lambda node: node.all_input_nodes[:1] if _is_in_place(node, root) else ()
    )
    layers: list[list[fx.Node]] = []
    has_begun = False
    for place, node in enumerate(nodes):
        begins = node.op == "call_module" or any(n.op == "get_attr" for n in node.all_input_nodes)
        if not layers or (begins and has_begun and place not in tied):
            layers.append([])
        has_begun = has_begun or begins
        layers[-1].append(node)
    return tuple(GraphLayer(_name_of(members), tuple(members)) for members in layers)


def _name_of(nodes: Sequence[fx.Node]) -> str:
    modules = [str(node.target) for node in nodes if node.op == "call_module"]
    return modules[0] if modules else nodes[0].name


def _places_tied(
    nodes: Sequence[fx.Node], changed_by: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[int]:
    """Return places before which no cut may be, as it would part an in-place operator's tensor.

    Args:
        nodes: in the order of execution.
        changed_by: returns the nodes whose values a node changes.
    """
    places = {node: place for place, node in enumerate(nodes)}
    tied: set[int] = set()
    for place, node in enumerate(nodes):
        for changed in changed_by(node):
            tied.update(range(places.get(changed, place) + 1, place + 1))
    return tied


def _changed(node: fx.Node, attributes: dict[str, Any]) -> Iterator[fx.Node]:
    """Yield the nodes whose values an exported operator changes, through views of them too."""
    target = attributes.get(str(node.target)) if node.op == "call_module" else node.target
    target = target.target if isinstance(target, ByMode) else target
    if not isinstance(target, torch._ops.OpOverload):  # noqa: SLF001  # its only name
        return
    for place, argument in enumerate(target._schema.arguments):  # noqa: SLF001  # no accessor
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            while isinstance(value, fx.Node):
                yield value
                viewed = value.args[0] if value.args and _is_view(value) else None
                value = viewed


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(x.alias_info is not None for x in schema.returns)


def _is_in_place(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    is_operator = getattr(node.target, "__module__", "") == "_operator"
    if is_operator:
        return str(name) == "setitem" or (str(name).startswith("i") and name in _IN_PLACE)
    return str(name).endswith("_") and not str(name).endswith("__")


_IN_PLACE = frozenset(
    f"i{name}"
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"),
        *("matmul", "lshift", "rshift"),
    )
)
