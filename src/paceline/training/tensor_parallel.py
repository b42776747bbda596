"""Large linear layers divided among the ranks, in a model whose other layers each rank has whole.

    rank 0  x0 --conv--conv--+                          +-- y0 -- loss of its own batch
                             |   W, by its columns      |
                             +-> rank 0: x W0^T         |
            exchange of      |   rank 1: x W1^T         +   exchange of outputs
            inputs           +-> each for all rows -----+
    rank 1  x1 --conv--conv--+                          +-- y1

A convolution has few parameters and large activations: its gradients are reduced. A fully connected
layer has many parameters and small activations: these are exchanged in place of gradients, and each
rank keeps, updates and computes only its part of the weights, for the rows of all ranks' batches.

    division    a rank has               inputs      outputs      bytes of a pass, n rows a rank
    outputs     rows of the weight       all-gather  all-to-all   (R - 1) n (in + out / R)
    inputs      columns of the weight    all-to-all  sum          (R - 1) n (in / R + out)
    pair        outputs, then inputs     all-gather  sum          (R - 1) n (in + out)

A pair is two layers of an `nn.Sequential` with elementwise functions between, which are computed on
the parts. The parameters stay the objects that they were, with their part of the values; the state
dict has whole layers, under the names of the model.

Each rank's gradients are those of its own mean loss, times R after the sum over ranks that the
products make: the parts' gradients are divided by R, as the engine divides what it sums.
Sources: A. Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014;
M. Shoeybi et al., Megatron-LM, 2019 (outputs, then inputs).
"""

from __future__ import annotations

import difflib
import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from paceline.core.errors import UsageError
from paceline.training.engine.data_parallel import check_equal
from paceline.training.engine.exchange import (
    EVALUATING,
    SAVING,
    TRAINING,
    GatherRows,
    RowExchange,
    SumRows,
    ToColumns,
    ToRows,
)
from paceline.training.engine.modes import check_stateless
from paceline.training.optimizers.layerwise import LayerwiseOptimizer
from paceline.training.optimizers.norms import DividedNorms, squared_norms
from paceline.training.pipeline.graph import bind_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.training.engine.ranks import Ranks
    from paceline.training.health import GradientCheck
    from paceline.training.optimizer_state import State
    from paceline.training.options import TrainingOptions

# Computed on each element for itself, so that a rank may compute its columns. Dropout is not among
# them: ranks with the same seed would drop the same of their columns.
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Identity),
    *(nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish),
)
_WHOLE_MATRIX = ("LBFGS", "Adafactor", "Muon")  # whose updates are not elementwise
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


# --- what is divided -----------------------------------------------------------------------------


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
    can, why_not = _divisible(model, ranks)
    if chosen != "auto":
        names = list(dict.fromkeys(chosen))
        for name in names:
            if name not in can:
                raise _not_divisible(model, name, why_not, can)
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


def _divisible(model: nn.Module, ranks: int) -> tuple[dict[str, nn.Linear], dict[str, str]]:
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


def _not_divisible(
    model: nn.Module, name: str, why_not: Mapping[str, str], can: Mapping[str, Any]
) -> UsageError:
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
    for first, second in _neighbours(model, set(names)):
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


def _neighbours(model: nn.Module, names: set[str]) -> Iterator[tuple[str, str]]:
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
            elif type(module) not in _ELEMENTWISE:
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


# --- the layers ----------------------------------------------------------------------------------


class _Product(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """x W^T + b, whose weights' gradients are multiplied: `apply(x, weight, bias, factor)`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        factor: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        scaled = gradient * ctx.factor if needs_weight or needs_bias else gradient
        return (
            gradient @ weight if needs_x else None,
            scaled.t() @ x if needs_weight else None,
            scaled.sum(0) if needs_bias else None,
            None,
        )


@dataclass(slots=True)
class _Passed:
    """What the first layer of a pair hands to the second one beside its columns."""

    rows: list[int]
    shape: torch.Size
    is_finite: torch.Tensor


@dataclass(slots=True, eq=False)
class _Part:
    """This rank's part of a linear layer, and how it computes.

    Attributes:
        layer: the module, whose forward pass is `compute`.
        name: in the model.
        number: in the order of the divided layers.
        division: of the weight.
        bounds: first element of each rank's part, and the end of the last one.
        first: the layer whose columns it takes, when both are called in their sequence.
        keeps_columns: whether the second of a pair follows, in the call that is being made.
        passed: between the two.
    """

    layer: nn.Linear
    name: str
    number: int
    division: Division
    bounds: list[int]
    first: _Part | None = None
    keeps_columns: bool = False
    passed: _Passed | None = None
    finite: list[torch.Tensor] = field(default_factory=list)

    @property
    def widths(self) -> list[int]:
        return [end - begin for begin, end in zip(self.bounds, self.bounds[1:], strict=False)]

    def dims(self) -> dict[str, int]:
        """Return the dim along which each divided parameter is, by its name in the layer."""
        if self.division == "inputs":
            return {"weight": 1}
        return {"weight": 0} if self.layer.bias is None else {"weight": 0, "bias": 0}


class TensorParallel:
    """The divided layers of a model, and what of a training must know of them.

    Args:
        model: whose parameters are whole, and equal on all ranks; the divided ones become parts.
        optimizer: without state.
        layers: to divide; of `choose_layers`, on all ranks the same.
        ranks: of the job.
        options: of `prepare`.
        check: sees whether this rank's own part of a gradient is finite.

    Attributes:
        names: of the divided parameters.

    Raises:
        UsageError: the ranks' models differ, or the optimizer cannot update parts.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layers: Sequence[DividedLayer],
        ranks: Ranks,
        *,
        options: TrainingOptions,
        check: GradientCheck,
    ) -> None:
        _check_optimizer(optimizer)
        check_equal(list(model.named_parameters()), ranks)
        shared_by = options.tensor_parallel_ranks or ranks.size
        groups = [
            list(range(begin, begin + shared_by)) for begin in range(0, ranks.size, shared_by)
        ]
        self._exchange = RowExchange(ranks, groups, deadline_s=options.deadline_s)
        replicas = [list(range(place, ranks.size, shared_by)) for place in range(shared_by)]
        self._replicas = (
            RowExchange(ranks, replicas, deadline_s=options.deadline_s) if len(groups) > 1 else None
        )
        self._check = check
        self._names = [layer.name for layer in layers]
        modules = dict(model.named_modules())
        self._parts: dict[str, _Part] = {}
        self._dims: dict[str, tuple[_Part, int]] = {}
        for number, (name, division, first) in enumerate(layers):
            module = modules[name]
            length = module.in_features if division == "inputs" else module.out_features
            size = self._exchange.size
            bounds = [rank * length // size for rank in range(size + 1)]
            part = _Part(module, name, number, division, bounds)
            part.first = self._parts[first] if first else None
            self._parts[name] = part
            self._divide(part, ranks)
        self.names = frozenset(self._dims)
        divided = {
            id(parameter) for name, parameter in model.named_parameters() if name in self.names
        }
        self.norms = DividedNorms(self._exchange.group, divided)
        if isinstance(optimizer, LayerwiseOptimizer):
            optimizer.layer_norms = self.norms
        self._join_pairs(model)

    def _divide(self, part: _Part, ranks: Ranks) -> None:
        """Keep this rank's part of a layer's parameters, and compute with it from now on."""
        layer = part.layer
        for key, dim in part.dims().items():
            parameter = getattr(layer, key)
            name = f"{part.name}.{key}" if part.name else key
            dist.broadcast(parameter.detach(), group=ranks.group, group_src=0)
            self._dims[name] = (part, dim)
            parameter.grad = None
            parameter.data = self._own(parameter.detach(), part, dim)
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(self._take_gradient, name, part))
        # torch's fused layers of transformers use the weights of layers without hooks themselves.
        layer.register_forward_pre_hook(_is_called)
        layer.forward = functools.wraps(layer.forward)(functools.partial(self._compute, part))
        layer.register_state_dict_post_hook(functools.partial(self._save, part))
        layer.register_load_state_dict_pre_hook(functools.partial(self._load, part))

    def _own(self, whole: torch.Tensor, part: _Part, dim: int) -> torch.Tensor:
        begin, end = part.bounds[self._exchange.rank : self._exchange.rank + 2]
        return whole.narrow(dim, begin, end - begin).clone(memory_format=torch.contiguous_format)

    # --- computing ---------------------------------------------------------------------------

    def _compute(self, part: _Part, x: torch.Tensor) -> torch.Tensor:
        """Return what the whole layer returns for this rank's input.

        Within a pair the first layer returns its columns for all ranks' rows, shape (rows of all
        ranks, columns), and the second one takes them.
        """
        layer, exchange = part.layer, self._exchange
        is_second = part.first is not None and part.first.passed is not None
        weight, bias = layer.weight, layer.bias
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            if is_second:
                assert part.first is not None
                passed, part.first.passed = part.first.passed, None
                assert passed is not None
            else:
                passed = self._meet(part, x)
                x = x.reshape(-1, layer.in_features)
                if part.division == "outputs":
                    x = GatherRows.apply(x, exchange, passed.rows)
                else:
                    x = ToColumns.apply(x, exchange, passed.rows, part.widths)
            if part.division == "outputs":
                y = _Product.apply(x, weight, bias, 1 / exchange.size)
                if part.keeps_columns:
                    part.passed = passed
                    return y
                y = ToRows.apply(y, exchange, passed.rows, part.widths)
            else:
                y = SumRows.apply(
                    _Product.apply(x, weight, None, 1 / exchange.size), exchange, passed.rows
                )
        if y.requires_grad:
            # The first layer of a pair has its part of this contribution too.
            members = [part, part.first] if is_second and part.first is not None else [part]
            y.register_hook(functools.partial(_note, members, passed.is_finite))
        if part.division == "inputs" and bias is not None:
            y = y + bias
        return y.view(*passed.shape[:-1], layer.out_features)

    def _meet(self, part: _Part, x: torch.Tensor) -> _Passed:
        """Agree with the other ranks on the rows that each brings."""
        if x.shape[-1] != part.layer.in_features:
            raise UsageError(
                f"the input has {x.shape[-1]} features, and the layer takes "
                f"{part.layer.in_features}",
                where=part.name,
                fix="Look at the layer before this one",
            )
        is_training = torch.is_grad_enabled()
        kind = TRAINING if is_training else EVALUATING
        rows = x.numel() // part.layer.in_features
        counts = self._exchange.meet(rows, (part.number, kind), self._names, x.device)
        finite = torch.isfinite(squared_norms([x.detach()])[0]) if is_training else torch.empty(0)
        return _Passed(counts, x.shape, finite)

    def _take_gradient(self, name: str, part: _Part, gradient: torch.Tensor) -> Any:
        """Show the check whether this rank's own rows made a gradient that is not finite.

        A part's gradient is of all ranks' rows: a NaN of one rank is in the parts of all of them.
        """
        norm = squared_norms([gradient])[0].sqrt()
        none = torch.zeros_like(norm)
        seen = torch.where(torch.isfinite(norm), norm, none)
        if part.finite:
            own = torch.stack(part.finite).all()
            seen = torch.where(own, seen, torch.full_like(norm, torch.nan))
            if name.endswith("weight"):
                part.finite.clear()
        self._check.observe([name], [seen.reshape(1)])
        if self._replicas is None:
            return None
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        self._replicas.run(dist.all_reduce, gradient, what=f"the gradient of {name}")
        return gradient.div_(self._replicas.size)

    def _join_pairs(self, model: nn.Module) -> None:
        """Have sequences leave columns where they are between the layers of a pair."""
        followed = {id(p.first.layer): p.first for p in self._parts.values() if p.first}
        seconds = {id(p.layer): p for p in self._parts.values() if p.first}
        for sequence in model.modules():
            if type(sequence) is not nn.Sequential:
                continue
            firsts: dict[int, _Part] = {}
            begin: tuple[int, _Part] | None = None
            for place, module in enumerate(sequence):
                if id(module) in seconds and begin and seconds[id(module)].first is begin[1]:
                    firsts[begin[0]] = begin[1]
                if id(module) in followed:
                    begin = (place, followed[id(module)])
                elif type(module) not in _ELEMENTWISE:
                    begin = None
            if firsts:
                sequence.forward = functools.partial(_run_pairs, sequence, firsts)

    # --- state -------------------------------------------------------------------------------

    def _whole(self, own: torch.Tensor, part: _Part, dim: int) -> torch.Tensor:
        """Return a whole tensor of what all ranks have parts of; all ranks call this."""
        matrix = own.detach().reshape(len(own), -1)
        matrix = (matrix.t() if dim else matrix).contiguous()
        self._exchange.meet(len(matrix), (part.number, SAVING), self._names, own.device)
        whole = self._exchange.gathered(matrix, part.widths)
        shape = list(own.shape)
        shape[dim] = part.bounds[-1]
        return (whole.t().contiguous() if dim else whole).view(shape)

    def _save(
        self, part: _Part, layer: nn.Module, state: dict[str, Any], prefix: str, _: Any
    ) -> None:
        for key, dim in part.dims().items():
            state[prefix + key] = self._whole(getattr(layer, key), part, dim)

    def _load(
        self, part: _Part, _layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any
    ) -> None:
        for key, dim in part.dims().items():
            value = state.get(prefix + key)
            if value is not None and value.shape[dim] == part.bounds[-1]:
                state[prefix + key] = self._own(value, part, dim)

    def whole_state(self, state: State) -> State:
        """Return the optimizer's state of whole parameters, by name; all ranks call this."""
        found = {name: dict(values) for name, values in state.items()}
        for name, (part, dim) in self._dims.items():
            shape = getattr(part.layer, name.rpartition(".")[2]).shape
            for key, value in state.get(name, {}).items():
                if key != "step" and isinstance(value, torch.Tensor) and value.shape == shape:
                    found[name][key] = self._whole(value, part, dim)
        return found

    def own_state(self, state: State) -> State:
        """Return what this rank's optimizer needs of the state of whole parameters."""
        found = dict(state)
        for name, (part, dim) in self._dims.items():
            shape = list(getattr(part.layer, name.rpartition(".")[2]).shape)
            shape[dim] = part.bounds[-1]
            found[name] = {
                key: self._own(value, part, dim)
                if key != "step" and isinstance(value, torch.Tensor) and list(value.shape) == shape
                else value
                for key, value in state.get(name, {}).items()
            }
        return {name: values for name, values in found.items() if name in state}


def check_tensor_parallel(options: TrainingOptions, ranks: Ranks) -> None:
    """Raise an error for options that a model with divided layers does not have.

    Raises:
        UsageError: it has one of them.
    """
    given = {
        "engine": (options.engine not in (None, "allreduce"), "Use the engine allreduce"),
        "compression": (options.compression is not None, "Leave it out"),
        "memory_budget": (options.memory_budget is not None, "Leave it out"),
        "overlap": (
            bool(options.overlap) and ranks.heap is not None,
            "Leave it out: within a host ranks would wait in different reductions",
        ),
    }
    for name, (is_given, fix) in given.items():
        if is_given:
            raise UsageError(
                f"a model with divided layers has no {name} {getattr(options, name)!r}",
                where=f"prepare({name}=..., tensor_parallel=...)",
                fix=fix,
            )
    shared_by = options.tensor_parallel_ranks
    if shared_by is not None and ranks.size % shared_by:
        raise UsageError(
            f"{ranks.size} ranks do not divide into groups of {shared_by}",
            where="prepare(tensor_parallel_ranks=...)",
            fix="Give a divisor of the number of ranks, such as the ranks of a host",
        )


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    check_stateless(optimizer)
    if type(optimizer).__name__ in _WHOLE_MATRIX:
        raise UsageError(
            f"{type(optimizer).__name__} updates whole matrices, of which each rank has a part",
            where="prepare(tensor_parallel=...)",
            fix="Use SGD, Adam, LARS, LAMB, or another one that updates each element for itself",
        )


def _is_called(_layer: nn.Module, _given: Any) -> None:
    """Do nothing: a layer with a hook is called, and not replaced by a fused operator."""


def _note(parts: Sequence[_Part], is_finite: torch.Tensor, gradient: torch.Tensor) -> None:
    """Keep whether this rank's rows of a layer's inputs and of its outputs' gradient are finite."""
    found = is_finite & torch.isfinite(squared_norms([gradient])[0])
    for part in parts:
        if part.layer.weight.requires_grad:  # else no gradient takes it out again
            part.finite.append(found)


def _run_pairs(sequence: nn.Sequential, firsts: Mapping[int, _Part], x: Any) -> Any:
    """Run a sequence's layers, as nn.Sequential does, with columns kept within pairs."""
    for place, module in enumerate(sequence):
        first = firsts.get(place)
        if first is None:
            x = module(x)
            continue
        first.keeps_columns = True
        try:
            x = module(x)
        finally:
            first.keeps_columns = False
    return x
