"""What recording puts into torch, in one list: all of it can be taken out and put back.

A paused collector leaves torch as it was before `install`: attributes that a wrapper replaced are
the originals again, kernels are off the dispatcher, and the optimizers' hooks are deregistered. So
a process can train recorded and unrecorded steps in turn, which is how bench/record_overhead.py
measures what recording costs.

Used by the main thread alone, between steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class HookRegistry:
    """The hooks of one collector, in the order in which they were put in place."""

    def __init__(self) -> None:
        self._puts: list[Callable[[], Callable[[], None]]] = []
        self._removals: list[Callable[[], None]] = []
        self._are_out = False

    def add(self, put: Callable[[], Callable[[], None]]) -> None:
        """Call `put` now and whenever hooks are put back; it returns what takes the hook out.

        While hooks are out, it is only called when they are put back.
        """
        self._puts.append(put)
        if not self._are_out:
            self._removals.append(put())

    def replace(self, owner: Any, attribute: str, replacement: Any) -> None:
        """Set an attribute of a class or module, until it is removed.

        An attribute that something else has replaced in the meantime is left alone: the script put
        it there, and it may call ours.
        """

        def put() -> Callable[[], None]:
            own = vars(owner)
            is_inherited, original = attribute not in own, own.get(attribute)
            setattr(owner, attribute, replacement)

            def remove() -> None:
                if vars(owner).get(attribute) is not replacement:
                    return
                if is_inherited:
                    delattr(owner, attribute)
                else:
                    setattr(owner, attribute, original)

            return remove

        self.add(put)

    def remove(self) -> None:
        """Take out all hooks, the latest first; nothing if they are out."""
        self._are_out = True
        while self._removals:
            self._removals.pop()()

    def put_back(self) -> None:
        """Put all hooks in place again; nothing if they are in place."""
        if self._are_out:
            self._are_out = False
            self._removals = [put() for put in self._puts]
