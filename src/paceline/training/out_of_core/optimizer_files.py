"""The optimizer's state in the spill file: each parameter is updated while its own state is here.

Torch's optimizers update parameters one by one, with state and gradient of this parameter alone. So
`step` may run with one parameter after the other in its groups, and the outcome is the same to the
bit. A hook before the step does that for all parameters with large state; the step itself comes to
the small ones that are left, so that hooks and schedules see one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import UsageError
from paceline.training.out_of_core.step_order import raw_step, update_one_by_one

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from paceline.training.out_of_core.session import Session


class OptimizerFiles:
    """The state of one optimizer, put away parameter by parameter.

    Args:
        optimizer: its hooks before a step must be registered already: this one comes last.
        session: that moves the state.

    Raises:
        UsageError: another session moves it already.
    """

    def __init__(self, optimizer: Optimizer, session: Session) -> None:
        if is_managed(optimizer):
            raise UsageError(
                "the optimizer's state is kept within a memory budget already",
                where="OptimizerFiles",
                fix="Close the first memory budget, or give the optimizer to one of them only",
            )
        self._optimizer = optimizer
        self._session = session
        self._raw = raw_step(optimizer)
        self._movable = session.movable
        if self._raw is None:
            session.say(
                f"memory: the state of {type(optimizer).__name__} stays in memory, as its update "
                "may need all of it at once"
            )
        self._all: list[list[Any]] | None = None  # the groups' parameters, while a step runs
        self._away: dict[int, dict[str, _Shape]] = {}  # by index of the parameter
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_step_post_hook(self._before_post_hooks),
            optimizer.register_state_dict_pre_hook(self._before_state_dict),
            optimizer.register_state_dict_post_hook(self._after_state_dict),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]
        # Hooks that were registered earlier see the groups whole.
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[2].id, last=False)  # noqa: SLF001  # no public name

    def remove(self) -> None:
        """Bring all state back, and leave the optimizer as it was."""
        self._put_groups_back()
        self._restore()
        for hook in self._hooks:
            hook.remove()

    def come_last(self) -> None:
        """Have the hook before a step called after those that were registered meanwhile.

        Not to be called by a hook of this optimizer; torch's global hooks are called before those.
        """
        self._optimizer._optimizer_step_pre_hooks.move_to_end(self._hooks[0].id)  # noqa: SLF001  # no public name

    # --- a step ----------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_groups_back()  # of a step that failed after this hook
        if self._raw is None:
            return
        if len(args) > 1 or kwargs.get("closure") is not None:
            self._take_back()  # a closure is called several times: all state is here meanwhile
            return
        if next(reversed(optimizer._optimizer_step_pre_hooks)) != self._hooks[0].id:  # noqa: SLF001  # no public name
            raise UsageError(
                "a hook before the optimizer's step would be called after its update",
                where="OutOfCore",
                fix="Register the hook before the memory budget is set (prepare does)",
            )
        self._all = [group["params"] for group in optimizer.param_groups]
        try:
            update_one_by_one(optimizer.param_groups, self._movable.is_large, self._update)
        except BaseException:  # also Ctrl-C: who catches it has the optimizer as it was
            self._put_groups_back()
            raise

    def _update(self, index: int, parameter: Any) -> None:
        state = self._optimizer.state[parameter]
        stored = self._session.need_state(index)
        for (key, shape), (storage, shift) in zip(
            self._away.get(index, {}).items(), stored, strict=True
        ):
            state[key] = shape.tensor(storage, shift)
        assert self._raw is not None
        try:
            self._raw(self._optimizer)
        finally:
            large = self._movable.large_of(state)
            self._away[index] = {key: _Shape(value) for key, value in large.items()}
            for key in large:
                del state[key]
            if large:
                self._session.hand_back_state(index, list(large.values()))

    def _before_post_hooks(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._put_groups_back()

    def _after_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._put_away()  # of a step with a closure
        self._session.end_step()

    def _put_groups_back(self) -> None:
        """Give the groups all of their parameters again."""
        if self._all is not None:
            for group, members in zip(self._optimizer.param_groups, self._all, strict=False):
                group["params"] = members
            self._all = None

    # --- its state_dict --------------------------------------------------------------------------

    def _before_state_dict(self, _optimizer: Optimizer) -> None:
        self._put_groups_back()
        self._restore()

    def _after_state_dict(self, _optimizer: Optimizer, state: dict[str, Any]) -> None:
        # Torch hands out its own dictionaries, which lose here what is put away again.
        state["state"] = {number: dict(values) for number, values in state["state"].items()}
        self._forget()

    def _restore(self) -> None:
        """Put the state where the optimizer expects it."""
        for index, parameter in enumerate(self._parameters()):
            shapes = self._away.get(index)
            if not shapes:
                continue
            stored = self._session.states[index].load()
            state = self._optimizer.state[parameter]
            for (key, shape), (storage, shift) in zip(shapes.items(), stored, strict=True):
                state[key] = shape.tensor(storage, shift)

    def _forget(self) -> None:
        for index, parameter in enumerate(self._parameters()):
            for key in self._away.get(index, ()):
                self._optimizer.state[parameter].pop(key, None)
            managed = self._session.states.get(index)
            if managed is not None:
                managed.drop()

    def _take_back(self) -> None:
        """Put the state where the optimizer expects it, and leave it there."""
        self._restore()
        self._away.clear()
        self._session.forget_states()

    def _before_load(self, _optimizer: Optimizer, _state: Any) -> None:
        self._put_groups_back()

    def _after_load(self, _optimizer: Optimizer) -> None:
        """Put loaded state away, in place of all that was away before."""
        self._away.clear()
        self._session.forget_states()
        self._put_away()

    def _put_away(self) -> None:
        """Put the state away that is with the optimizer."""
        if self._raw is None:  # no step of it would bring the state back
            return
        for index, parameter in enumerate(self._parameters()):
            state = self._optimizer.state.get(parameter, {})
            large = self._movable.large_of(state)
            if not large or not self._movable.is_large(parameter):
                continue
            self._away[index] = {key: _Shape(value) for key, value in large.items()}
            for key in large:
                del state[key]
            self._session.put_state(index, list(large.values()))

    def _parameters(self) -> list[Any]:
        return [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]


def is_managed(optimizer: Optimizer) -> bool:
    """Whether an optimizer's state is moved by an OptimizerFiles already."""
    hooks = optimizer._optimizer_step_pre_hooks.values()  # noqa: SLF001  # no public name
    return any(isinstance(getattr(hook, "__self__", None), OptimizerFiles) for hook in hooks)


class _Shape:
    """How a tensor of the state lies in its memory."""

    __slots__ = ("dtype", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()

    def tensor(self, storage: torch.UntypedStorage, shift: int) -> torch.Tensor:
        """Return the tensor in a storage, `shift` bytes after its begin."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, shift // empty.element_size(), self.size, self.stride)
