"""Which linear layers are divided, and how: what exchanges least in place of most gradients."""

from __future__ import annotations

import difflib
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from paceline.core.errors import UsageError
from paceline.training.pipeline.graph import bind_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Computed on each element for itself, so that a rank may compute its columns. Dropout is not among
# them: ranks with the same seed would drop the same of their columns.
ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Identity),
    *(nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
)
_LEAST_SAVED_BYTES = 1 << 20  # of a step: less is not worth the exchanges' latency
Division = Literal["outputs", "inputs"]


class DividedLayer(NamedTuple):
    """A linear layer, and how it is divided.

    Attributes:
        name: in the model.
        division: of its weight.
        first: name of the layer that it takes columns from, if it is the second of a pair.
    """

    name: str
    division: Division
    first: str | None = None


def choose_layers(
    model: nn.Module,
    chosen: str | Sequence[str],
    ranks: int,
    example_inputs: Any,
    *,
    groups: int = 1,
) -> tuple[list[DividedLayer], str]:
    """Return the layers to divide, and a line that says why.

    Args:
        model: with all its parameters.
        chosen: names of linear layers, or ``auto``: those whose gradients have more bytes than the
            activations that are exchanged in their place.
        ranks: that share a layer.
        example_inputs: a batch as each rank gets it, for ``auto``.
        groups: of so many ranks, which reduce the gradients of their parts.

    Raises:
        UsageError: a layer cannot be divided, or there is no example.
    """
    can, why_not = divisible(model, ranks)
    if chosen != "auto":
        names = list(dict.fromkeys(chosen))
        for name in names:
            if name not in can:
                raise not_divisible(model, name, why_not, can)
        layers = _arranged(model, [name for name in can if name in names], can, ranks)
        return layers, _described(layers, can, ranks, groups, None, "as asked")
    rows = _rows_of(model, list(can), example_inputs)
    names = [name for name in can if rows.get(name)]
    while True:  # a layer that does not pay alone may leave a pair of one
        layers = _arranged(model, names, can, ranks)
        keep = _paying(layers, can, rows, ranks, groups)
        if len(keep) == len(names):
            break
        names = [name for name in names if name in keep]
    if not layers:
        return [], (
            "tensor_parallel auto: no linear layer has gradients of more bytes than the "
            "activations that would be exchanged in their place: none is divided"
        )
    return layers, _described(layers, can, ranks, groups, rows, "auto")


def divisible(model: nn.Module, ranks: int) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the linear layers that can be divided, and why others cannot, by name."""
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )
    can: dict[str, nn.Linear] = {}
    why_not: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is not nn.Linear:
            why_not[name] = f"it is a {type(module).__name__}, and nn.Linear is divided"
        elif max(owners[id(p)] for p in module.parameters()) > 1:
            why_not[name] = "another layer uses its parameters too, which needs them whole"
        elif max(module.in_features, module.out_features) < ranks:
            why_not[name] = f"it has fewer rows and columns than {ranks} ranks"
        else:
            can[name] = module
    return can, why_not


def not_divisible(
    model: nn.Module, name: str, why_not: Mapping[str, str], can: Mapping[str, Any]
) -> UsageError:
    """Return the error for a layer that is not among those which can be divided."""
    near = difflib.get_close_matches(name, list(can), n=3) or list(can)[:3]
    return UsageError(
        f"the layer {name!r} cannot be divided",
        where="prepare(tensor_parallel=...)",
        why=why_not.get(name, f"{type(model).__name__} has no such layer"),
        fix=f"Name linear layers, such as {', '.join(near)}" if near else "Leave it out",
    )


def _arranged(
    model: nn.Module, names: Sequence[str], layers: Mapping[str, nn.Linear], ranks: int
) -> list[DividedLayer]:
    """Return how each layer is divided so that least is exchanged; pairs where they pay."""
    first_of: dict[str, str] = {}
    for first, second in neighbours(model, set(names)):
        is_free = not {first, second} & {*first_of, *first_of.values()}
        pair = layers[first].in_features + layers[second].out_features
        alone = sum(_exchanged(layers[name], ranks) for name in (first, second))
        if is_free and pair < alone and layers[first].out_features >= ranks:
            first_of[second] = first
    firsts = set(first_of.values())
    arranged = []
    for name in names:
        before = first_of.get(name)
        division = _division(layers[name], ranks)
        if before is not None or name in firsts:
            division = "outputs" if name in firsts else "inputs"
        arranged.append(DividedLayer(name, division, before))
    return arranged


def _division(layer: nn.Linear, ranks: int) -> Division:
    """Return the division that exchanges less."""
    if layer.in_features < ranks:
        return "outputs"
    if layer.out_features < ranks:
        return "inputs"
    return "inputs" if layer.in_features > layer.out_features else "outputs"


def _exchanged(layer: nn.Linear, ranks: int) -> float:
    """Return the elements that a rank gets for a row of each other rank, in a forward pass."""
    whole, part = float(layer.in_features), float(layer.out_features)
    if _division(layer, ranks) == "inputs":
        whole, part = part, whole
    return whole + part / ranks


def neighbours(model: nn.Module, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield layers that follow each other in an nn.Sequential, but for elementwise functions."""
    for prefix, sequence in model.named_modules():
        if type(sequence) is not nn.Sequential:
            continue
        before: str | None = None
        for key, module in sequence.named_children():
            name = f"{prefix}.{key}" if prefix else key
            if name in names:
                if before is not None:
                    yield before, name
                before = name
            elif type(module) not in ELEMENTWISE:
                before = None


def _paying(
    arranged: Sequence[DividedLayer],
    layers: Mapping[str, nn.Linear],
    rows: Mapping[str, int],
    ranks: int,
    groups: int,
) -> set[str]:
    """Return the layers for which less is exchanged than reduced."""
    units: dict[str, list[str]] = {}
    for layer in arranged:
        units.setdefault(layer.first or layer.name, []).append(layer.name)
    keep: set[str] = set()
    for members in units.values():
        saved = sum(_gradient_bytes(layers[name], ranks, groups) for name in members)
        saved -= _activation_bytes([x for x in arranged if x.name in members], layers, rows, ranks)
        if saved >= _LEAST_SAVED_BYTES:
            keep.update(members)
    return keep


def _gradient_bytes(layer: nn.Linear, ranks: int, groups: int) -> float:
    """Return the bytes of gradients that a rank sends for a whole layer, less those for a part."""
    size_bytes: int = sum(
        p.numel() * p.element_size() for p in layer.parameters() if p.requires_grad
    )
    every = ranks * groups
    return 2 * size_bytes * ((every - 1) / every - (groups - 1) / groups / ranks)


def _activation_bytes(
    arranged: Sequence[DividedLayer],
    layers: Mapping[str, nn.Linear],
    rows: Mapping[str, int],
    ranks: int,
) -> float:
    """Return the bytes that a rank gets in a step, forwards and backwards, for divided layers."""
    firsts = {layer.first for layer in arranged}
    total = 0.0
    for name, division, first in arranged:
        layer = layers[name]
        inputs = 0.0 if first else float(layer.in_features)
        outputs = 0.0 if name in firsts else float(layer.out_features)
        if division == "outputs":
            outputs /= ranks
        else:
            inputs /= ranks
        total += 2 * (ranks - 1) * rows[name] * (inputs + outputs) * layer.weight.element_size()
    return total


def _rows_of(model: nn.Module, names: Sequence[str], example_inputs: Any) -> dict[str, int]:
    """Return the rows that each layer gets of an example batch; none where it is not called.

    Raises:
        UsageError: there is no example, or the model does not take it.
    """
    if example_inputs is None:
        raise UsageError(
            "auto compares gradients with activations, whose size is not known",
            where="prepare(tensor_parallel='auto')",
            fix="Give example_inputs: a batch as each rank gets it; or name the layers",
        )
    arguments = bind_inputs(model, example_inputs)
    rows: dict[str, int] = {}
    modules = dict(model.named_modules())
    modes = {module: module.training for module in modules.values()}

    def count(name: str) -> Callable[..., None]:
        def see(layer: nn.Linear, given: Any) -> None:
            rows[name] = rows.get(name, 0) + given[0].numel() // layer.in_features

        return see

    hooks = [modules[name].register_forward_pre_hook(count(name)) for name in names]
    try:
        model.eval()  # statistics and random numbers stay as they are
        with torch.no_grad():
            model(*arguments.args, **arguments.kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return rows


def _described(
    arranged: Sequence[DividedLayer],
    layers: Mapping[str, nn.Linear],
    ranks: int,
    groups: int,
    rows: Mapping[str, int] | None,
    how: str,
) -> str:
    count = sum(p.numel() for name, *_ in arranged for p in layers[name].parameters())
    names = ", ".join(layer.name for layer in arranged)
    line = f"tensor_parallel {how}: {names} divided among {ranks} ranks, {count:,} parameters"
    if groups > 1:
        line += f", in {groups} groups"
    if rows is None:
        return line
    reduced = sum(_gradient_bytes(layers[name], ranks, groups) for name, *_ in arranged)
    exchanged = _activation_bytes(arranged, layers, rows, ranks)
    return (
        f"{line}; in a step each rank exchanges {exchanged / 1e6:.3g} MB of activations in place "
        f"of {reduced / 1e6:.3g} MB of gradients"
    )
