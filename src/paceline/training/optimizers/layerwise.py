"""What LARS and LAMB share: groups, the parameters of a step, and norms over whole layers.

A step collects the norms of all layers of all groups and asks for them at once: one all-reduce when
layers are sharded, one transfer from the device. The rates are then numbers of Python, which the
foreach operators take as a list: a fused kernel for each kind of operation, not one for each layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from paceline.core.errors import UsageError
from paceline.training.local_tensors import local
from paceline.training.optimizers.groups import is_adapted
from paceline.training.optimizers.norms import LayerNorms, TensorNorms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Work = list[tuple[dict[str, Any], list[torch.Tensor]]]


class LayerwiseOptimizer(Optimizer):  # type: ignore[misc]  # torch is not typed for us
    """An optimizer whose layers take a rate from the norms of their weights and updates.

    `layer_norms` can be replaced at any time, for example when parameters become slices.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], norms: LayerNorms | None) -> None:
        self.layer_norms: LayerNorms = norms or TensorNorms()
        super().__init__(params, {**defaults, "layer_adaptation": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch copies and unpickles an optimizer without what a subclass adds.
        self.__dict__.setdefault("layer_norms", TensorNorms())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; one that does not say ``layer_adaptation`` is split by shape into two.

        Biases and other parameters of at most one dim then form the second, which keeps the
        group's own decay. `parameter_groups` knows normalisation layers too, and says it.
        """
        params = param_group["params"]
        if param_group.get("layer_adaptation") is not None or isinstance(params, set):
            super().add_param_group(param_group)
            return
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        for flag in (True, False):
            chosen = [entry for entry in params if is_adapted(_tensor_of(entry)) is flag]
            if chosen:
                super().add_param_group({**param_group, "params": chosen, "layer_adaptation": flag})

    @torch.no_grad()  # type: ignore[untyped-decorator]  # torch is not typed for us
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; without any, touch no state.

        Args:
            closure: computes the loss again, with its gradients.

        Returns:
            What `closure` returned.

        Raises:
            UsageError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work: Work = []
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in parameters):
                raise UsageError(
                    f"{type(self).__name__} does not take sparse gradients",
                    fix="Make the embedding with sparse=False",
                )
            if parameters:
                work.append((group, parameters))
        if work:
            self._update(work)
        return loss

    def _update(self, work: Work) -> None:
        raise NotImplementedError

    def _norms(
        self, work: Work, updates: Sequence[torch.Tensor]
    ) -> dict[torch.Tensor, tuple[float, float]]:
        """Return the norms of the weights and of the update, by adapted parameter.

        Args:
            work: the groups of the step with their parameters.
            updates: of the parameters of all groups of `work`, in their order.
        """
        everything = [(group, p) for group, parameters in work for p in parameters]
        pairs = [
            (p, update)
            for (group, p), update in zip(everything, updates, strict=True)
            if group["layer_adaptation"]
        ]
        if not pairs:
            return {}
        weights = [p for p, _ in pairs]
        norms = self.layer_norms.squared(
            [*weights, *(update for _, update in pairs)], [*weights, *weights]
        )
        values: list[float] = norms.double().sqrt().tolist()
        return {p: (values[index], values[len(pairs) + index]) for index, p in enumerate(weights)}


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank holds of each tensor."""
    return [local(tensor) for tensor in tensors]


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Check a hyper-parameter: low <= value < high.

    Raises:
        UsageError: it is outside, or not a number.
    """
    if not low <= value < high:
        raise UsageError(
            f"{name} must be at least {low:g} and less than {high:g}, got {value}",
            fix=f"Pass another {name}",
        )


def _tensor_of(entry: Any) -> torch.Tensor:
    """Return the tensor of an entry of a group, which may be a pair of name and tensor."""
    return entry[1] if isinstance(entry, tuple) else entry
