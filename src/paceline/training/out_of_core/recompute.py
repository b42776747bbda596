"""Modules whose forward pass can run a second time, in place of keeping what it saves.

Candidates are the elements of the model's outermost sequences (`nn.Sequential`, `nn.ModuleList`):
its layers, mostly. While a step is recorded, hooks tell the session which of them runs. Those that
the plan recomputes get `torch.utils.checkpoint` around their forward pass, which saves their inputs
alone and the state of the random generators, so that dropout drops the same elements again.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from paceline.training.out_of_core.managed import version_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.hooks import RemovableHandle

    from paceline.training.out_of_core.session import Session


class ModuleListener(Protocol):
    """What learns which module runs: a session, or a capture."""

    def enter_module(self, name: str, inputs: list[torch.Tensor]) -> None:
        """Note that a module begins which may be recomputed."""

    def leave_module(self, *, is_changed: bool) -> None:
        """Note that it ended, and whether it changed its buffers."""


class Recomputing:
    """The modules of one model that may be recomputed, and those that are.

    Args:
        model: whose modules' forward methods are replaced where the plan says so.
        session: that learns which module runs.
    """

    def __init__(self, model: nn.Module, session: Session) -> None:
        self._modules = candidates(model)
        self._wrapped: list[nn.Module] = []
        self._hooks = watch_modules(self._modules, session)

    def apply(self, names: tuple[str, ...]) -> None:
        """Recompute these modules from now on, and no others."""
        for module in self._wrapped:
            del module.forward
        self._wrapped = [self._modules[name] for name in names]
        for module in self._wrapped:
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)

    def remove(self) -> None:
        """Leave the model as it was."""
        self.apply(())
        for hook in self._hooks:
            hook.remove()


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Return the elements of the outermost sequences by name, without those that appear twice.

    A module with a forward method of its own instance is left out: somebody else replaced it.
    """
    found: dict[str, nn.Module] = {}
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        is_sequence = isinstance(module, (nn.Sequential, nn.ModuleList)) and len(module) > 1
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            # A layer without children saves little more than its input, which must be kept.
            if is_sequence and any(True for _ in child.children()):
                found[path] = child
            else:
                waiting.append((path, child))
    counts: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        counts[id(module)] = counts.get(id(module), 0) + 1
    return {
        name: module
        for name, module in found.items()
        if counts[id(module)] == 1 and "forward" not in vars(module)
    }


def recomputable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the candidates that may compute their forward pass again in every step, by name.

    Those that contain batch normalisation are left out: a second pass would move its running
    statistics twice.
    """
    return {
        name: module
        for name, module in candidates(model).items()
        if not any(isinstance(part, _BatchNorm) for part in module.modules())
    }


def recompute_always(model: nn.Module) -> tuple[str, ...]:
    """Have the layers of a model keep their inputs alone; return their names.

    They are those of `recomputable`: this is what ``recompute="full"`` of a plan means for a model
    that is not divided.
    """
    found = recomputable(model)
    for module in found.values():
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return tuple(found)


@contextlib.contextmanager
def recomputed(model: nn.Module) -> Iterator[tuple[str, ...]]:
    """Have the layers of a model compute their forward pass again, as `recompute_always` does."""
    names = recompute_always(model)
    try:
        yield names
    finally:
        for name in names:
            del model.get_submodule(name).forward


def watch_modules(modules: dict[str, nn.Module], listener: ModuleListener) -> list[RemovableHandle]:
    """Tell a listener when each of the modules runs; return the hooks that do."""
    hooks: list[RemovableHandle] = []
    for name, module in modules.items():
        watch = _Watch(listener, name)
        hooks.append(module.register_forward_pre_hook(watch.enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(watch.leave, always_call=True))
    return hooks


class _Watch:
    """Tells a listener when a module runs, and whether its buffers changed."""

    def __init__(self, listener: ModuleListener, name: str) -> None:
        self._listener = listener
        self._name = name
        self._before: list[int | None] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        self._before = _versions(module)
        self._listener.enter_module(self._name, inputs)

    def leave(self, module: nn.Module, *_: Any) -> None:
        self._listener.leave_module(is_changed=_versions(module) != self._before)


def _versions(module: nn.Module) -> list[int | None]:
    return [version_of(buffer) for buffer in module.buffers()]
