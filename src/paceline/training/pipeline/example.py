"""What a graph of torch.export takes for granted of its arguments.

    if x.shape[1] > 8:        the graph has the branch of the example's sizes, and no condition:
        ...                   batches of other sizes would pass through the wrong branch

While torch.export runs the model it notes each condition that it decided by the sizes of the
example. The graph of operators has none of them, and so they are checked here, for the sizes that
microbatches have.

Conditions that the model's Python code or torch's Python functions ask are all kept. Of those that
operators ask themselves, such as whether a copy is needed, only equations are: an operator asks
again when it runs. One that removes dims of size 1 changes what follows it: a dim that the example
kept must be kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from paceline.core.errors import UsageError
from paceline.training.pipeline.microbatches import divided_leaves, path_of, sizes_of
from paceline.training.uneven import samples_of

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from torch import fx

    Shapes = Mapping[str, tuple[int, ...]]

_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")  # of `exported._Flat`'s arguments
# Where operators decide: the place of a condition, below torch's folder, begins with one of these.
_OPERATORS = ("_ops.py", "_meta_", "_prims", "_refs", "_decomp", "_subclasses", "fx/")
_REMOVING = ("aten::squeeze", "aten::squeeze_copy")
_MOST_CHECKED = 1024  # sizes of batches that are remembered


@dataclass(frozen=True, slots=True, eq=False)
class SizeGuard:
    """A condition on sizes that was true of the example.

    Attributes:
        condition: of sympy's symbols.
        sizes: the tensor, by the path to it, and the dim of it that each symbol is the size of.
    """

    condition: Any
    sizes: dict[Any, tuple[str, int]]

    def holds(self, shapes: Shapes) -> bool:
        """Return whether the condition is true of other sizes."""
        values = {symbol: shapes[name][dim] for symbol, (name, dim) in self.sizes.items()}
        found = self.condition.subs(values)
        return bool(found.free_symbols) or bool(found)

    def __str__(self) -> str:
        """The condition as Python has it: `x.shape[1] > 8`."""
        relation = getattr(self.condition, "rel_op", None)
        text = str(self.condition)
        if relation is not None:
            text = f"{self.condition.lhs} {relation} {self.condition.rhs}"
        for symbol, (name, dim) in self.sizes.items():
            text = re.sub(rf"\b{symbol}\b", f"{name}.shape[{dim}]", text)
        return text


@dataclass(frozen=True, slots=True)
class Example:
    """What an exported graph takes for granted of its arguments.

    Attributes:
        sizes: of each tensor's dims, by the path to it; None for a dim of any size.
        values: of all that is no tensor, by the path to it.
        guards: what else must be true of the sizes.
    """

    sizes: dict[str, tuple[int | None, ...]]
    values: dict[str, Any]
    guards: list[SizeGuard] = field(default_factory=list)
    _checked: set[Any] = field(default_factory=set)
    _most: dict[Any, int] = field(default_factory=dict)  # microbatches, by shapes and the most

    def most_microbatches(
        self, arguments: dict[str, Any], most: int, whole: frozenset[str] = frozenset()
    ) -> int:
        """Return into how many microbatches a batch can be cut for this graph, up to `most`.

        Torch's graphs, for example, often take no batch of one sample where they take all others.

        Raises:
            UsageError: the graph is not made for these arguments, however they are cut.
        """
        leaves, _ = pytree.tree_flatten_with_path(arguments)
        tensors = ((path_of(path), leaf) for path, leaf in leaves if isinstance(leaf, torch.Tensor))
        key = (most, *((name, tuple(tensor.shape)) for name, tensor in tensors))
        if (known := self._most.get(key)) is not None:
            self.check(arguments, known, whole)  # of values, which the key has not
            return known
        problem: UsageError | None = None
        samples = samples_of(divided_leaves(arguments, whole))
        for count in range(min(most, max(samples, 1)), 0, -1):
            try:
                self.check(arguments, count, whole)
            except UsageError as refused:
                problem = problem or refused
                continue
            if len(self._most) >= _MOST_CHECKED:
                self._most.clear()
            self._most[key] = count
            return count
        assert problem is not None
        raise problem

    def check(
        self, arguments: dict[str, Any], microbatches: int = 1, whole: frozenset[str] = frozenset()
    ) -> None:
        """Raise an error for arguments that the graph is not made for.

        Args:
            arguments: by name.
            microbatches: the most that tensors with the batch's samples along dim 0 are cut into.
            whole: paths of tensors that are not cut.

        Raises:
            UsageError: a size or a value is another one than the example's, or a size has another
                answer to what the model asked.
        """
        leaves, _ = pytree.tree_flatten_with_path(arguments)
        found = {path_of(path): leaf for path, leaf in leaves}
        missing = [name for name in (*self.sizes, *self.values) if name not in found]
        for name in (*missing, *found):
            leaf = found.get(name)
            expected = self.values.get(name)
            is_tensor = isinstance(leaf, torch.Tensor)
            if name in self.sizes if is_tensor else name not in self.sizes and leaf == expected:
                continue
            raise _other(name, _said(leaf), _said(expected, self.sizes.get(name)))
        shapes = {name: tuple(found[name].shape) for name in self.sizes}
        samples = samples_of(divided_leaves(arguments, whole))
        for parts in _parts(shapes, samples, microbatches, whole):
            self._check_sizes(parts)

    def _check_sizes(self, shapes: Shapes) -> None:
        key = tuple(shapes.values())
        if key in self._checked:
            return
        for name, sizes in self.sizes.items():
            if not _fits(shapes[name], sizes):
                raise _other(name, _shape_said(shapes[name]), _shape_said(sizes))
        for guard in self.guards:
            if not guard.holds(shapes):
                raise _other_branch(guard, shapes)
        if len(self._checked) >= _MOST_CHECKED:
            self._checked.clear()
        self._checked.add(key)


def guards_of(program: Any, names: Sequence[str], *, from_two: bool) -> Iterator[SizeGuard]:
    """Yield what torch.export decided by the sizes of an example.

    Args:
        program: exported, of a module whose arguments are `*tensors`.
        names: paths to these tensors among the model's arguments.
        from_two: whether it took free sizes for 2 or more without a note.
    """
    nodes = list(program.graph.nodes)
    values = [node.meta.get("val") for node in nodes if node.op == "placeholder"]
    sizes = [size for x in values if isinstance(x, torch.Tensor) for size in x.shape]
    env = next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)
    if env is None:
        return  # every size is fixed
    dims: dict[Any, tuple[str, int]] = {}
    for source, symbol in env.source_to_var.items():
        place = _SIZE.fullmatch(source)
        if place is not None:
            dims[symbol] = (names[int(place[1])], int(place[2]))
            if from_two:
                yield SizeGuard(symbol >= 2, {symbol: dims[symbol]})
    conditions = [
        guard.expr
        for guard in env.guards
        if getattr(guard.expr, "rel_op", None) == "==" or not _is_of_operator(guard)
    ]
    for node in nodes:
        conditions += _kept_dims(node)
    for condition in conditions:
        symbols = {symbol: dims[symbol] for symbol in condition.free_symbols if symbol in dims}
        if symbols:
            yield SizeGuard(condition, symbols)


def _kept_dims(node: fx.Node) -> Iterator[Any]:
    """Yield that dims, which an operator removes where their size is 1, have another one."""
    if getattr(getattr(node.target, "_schema", None), "name", None) not in _REMOVING:
        return
    from sympy import Ne  # type: ignore[import-untyped]  # torch loads it for an export only

    given, *dims = node.args
    shape = given.meta["val"].shape
    chosen = range(len(shape)) if not dims else [dims[0]] if isinstance(dims[0], int) else dims[0]
    for dim in chosen:
        if isinstance(shape[dim], torch.SymInt):
            yield Ne(shape[dim].node.expr, 1)


def _is_of_operator(guard: Any) -> bool:
    """Return whether an operator asked, and not Python code."""
    frame = guard.sloc.framework_loc
    file = str(getattr(frame, "filename", frame))
    return file.rpartition("/torch/")[2].startswith(_OPERATORS)


def _parts(
    shapes: Shapes, samples: int, microbatches: int, whole: Container[str]
) -> Iterator[Shapes]:
    """Yield the shapes of each size of microbatches; tensors in `whole` are not divided."""
    for size in dict.fromkeys(sizes_of(samples, microbatches) if samples else [0]):
        yield {
            name: (size, *shape[1:])
            if shape and shape[0] == samples and name not in whole
            else shape
            for name, shape in shapes.items()
        }


def _fits(shape: Sequence[int], sizes: Sequence[int | None]) -> bool:
    return len(shape) == len(sizes) and all(
        size in (None, own) for size, own in zip(sizes, shape, strict=True)
    )


def _other(name: str, found: str, expected: str) -> UsageError:
    return UsageError(
        f"the model was captured for another {name}",
        where="example_inputs",
        why=f"{found}, where the graph is for {expected}",
        fix="Give example_inputs whose plain values and fixed sizes are those of the "
        "microbatches; the first dim is the batch's, with 2 samples or more",
    )


def _other_branch(guard: SizeGuard, shapes: Shapes) -> UsageError:
    sizes = ", ".join(
        f"{name}.shape[{dim}] is {shapes[name][dim]}" for name, dim in guard.sizes.values()
    )
    return UsageError(
        "the model was captured for other sizes",
        where="example_inputs",
        why=f"in a microbatch {sizes}; the model asks for it, and its graph is for {guard} only",
        fix="Give example_inputs of the sizes of a microbatch, pad batches to sizes for which "
        "this is true, take other microbatches, or give split_points in place of a graph",
    )


def _said(leaf: Any, sizes: tuple[int | None, ...] | None = None) -> str:
    if sizes is not None or isinstance(leaf, torch.Tensor):
        return _shape_said(leaf.shape if sizes is None else sizes)
    return repr(leaf)


def _shape_said(sizes: Sequence[int | None]) -> str:
    return f"a tensor of shape [{', '.join('any' if n is None else str(n) for n in sizes)}]"
