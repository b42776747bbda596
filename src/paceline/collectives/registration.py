"""Makes the backend ``paceline`` known to torch, without loading what implements it.

torch has `register` called at the end of its own import, through the entry point that
``src/_paceline_torch.py`` is. So it must be cheap. The implementation (`backend`) is loaded when
the first group is made.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from typing import TYPE_CHECKING, Any

from paceline.core.on_import import on_import

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from paceline.core.plan import CollectivesChoice

NAME = "paceline"
# Set for the ranks of `paceline run --collectives paceline`, and inherited by what these start. Not
# PACELINE_: it is no setting, and `core.config` refuses what it does not know.
REPLACES_GLOO = "_PACELINE_REPLACES_GLOO"
_DEVICES = ["cpu", "cuda"]
_REPLACED = ("gloo", NAME)


def register() -> None:
    """Let ``torch.distributed.init_process_group("paceline")`` find the backend.

    Nothing happens where torch has no distributed package, or on a second call.
    """
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=_DEVICES)
    _allow_monitored_barrier(dist)
    on_import("accelerate.state", _allow_in_accelerate)
    if os.environ.get(REPLACES_GLOO):
        replace_gloo()


def _make_group(options: Any, backend_options: Any) -> Any:
    """Return a group; importlib, because `register` must not load it.

    Its configuration may be given as ``pg_options``; a script that was written for another backend
    gives that one's options.
    """
    backend = importlib.import_module("paceline.collectives.backend")
    return backend.make_group(options, backend_options)


def _allow_monitored_barrier(dist: Any) -> None:
    """Have ``torch.distributed.monitored_barrier`` ask a group of ours, too.

    torch refuses every backend whose name is not gloo (2.10 to 2.14).
    """
    original: Callable[..., Any] = dist.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        asked = dist.group.WORLD if group is None else group
        if hasattr(asked, "serves_monitored_barrier"):
            return asked.monitored_barrier(timeout, wait_all_ranks)
        return original(group, timeout, wait_all_ranks)

    dist.monitored_barrier = monitored_barrier
    dist.distributed_c10d.monitored_barrier = monitored_barrier


def _allow_in_accelerate(module: ModuleType) -> None:
    """Have accelerate, and so Hugging Face's Trainer, take ``ddp_backend="paceline"`` on CPUs.

    There it takes gloo or MPI, and refuses every other backend (accelerate 1.10 to 1.15).
    """
    state = getattr(module, "PartialState", None)
    original: Callable[..., Any] | None = getattr(state, "_prepare_backend", None)
    if original is None:  # another version, or one that is being imported
        return
    prepared: Callable[..., Any] = original

    @functools.wraps(prepared)
    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(prepared).bind(self, *args, **kwargs).arguments.get("backend")
        chosen, *rest = prepared(self, *args, **kwargs)
        ours = NAME in str(given).replace(":", ",").split(",")
        return (given if ours and chosen == "gloo" else chosen, *rest)

    state._prepare_backend = prepare_backend  # type: ignore[union-attr]  # noqa: SLF001  # where it decides


def replace_gloo() -> None:
    """Have ``init_process_group`` make a group of ours where a script asks for gloo, or for none.

    Other backends stay: of ``cpu:gloo,cuda:nccl`` the part for the CPU is replaced. For a script
    that is not changed; `torch.distributed.get_backend` then says "paceline".
    """
    import torch.distributed as dist

    register()
    module = sys.modules["torch.distributed.distributed_c10d"]
    original = dist.init_process_group
    if hasattr(original, "replaces_gloo"):
        return

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return original(replacement(backend, kwargs.get("device_id")), *args, **kwargs)

    init_process_group.replaces_gloo = True  # type: ignore[attr-defined]  # a mark of ours
    dist.init_process_group = init_process_group
    module.init_process_group = init_process_group  # type: ignore[attr-defined]  # torch's own


def variables(collectives: CollectivesChoice) -> dict[str, str]:
    """Return the environment variables by which ranks, and what these start, replace gloo."""
    return {REPLACES_GLOO: "1"} if collectives == "paceline" else {}


def replacement(backend: str | None, device_id: Any = None) -> str | None:
    """Return the backend to use where a script asks for `backend`.

    >>> replacement("gloo"), replacement(None), replacement("nccl")
    ('paceline', 'paceline', 'nccl')
    >>> replacement("cpu:gloo,cuda:nccl")
    'cpu:paceline,cuda:nccl'
    """
    if backend is None:
        return NAME if device_id is None else None
    parts = [part.partition(":") for part in str(backend).lower().split(",")]
    names = [
        f"{device}:{NAME if name in _REPLACED and device == 'cpu' else name}"
        if colon
        else (NAME if device in _REPLACED else device)
        for device, colon, name in parts
    ]
    return ",".join(names)
