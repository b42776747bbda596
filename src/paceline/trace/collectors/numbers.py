"""Numbers for a script's objects: by them, events tell optimizers, loaders and modules apart."""

from __future__ import annotations

import functools
import weakref
from typing import Any


class ObjectNumbers:
    """Numbers objects from 1 in the order of their first use, and keeps none of them alive.

    By identity: a script's class may define equality as it likes.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[object], int]] = {}
        self._count = 0

    def number_of(self, thing: object, same_as: object = None) -> int:
        """Return the number of `thing`; 0 if it cannot be referred to weakly.

        Args:
            thing: any object.
            same_as: the object whose number a new `thing` gets; None for a number of its own.
        """
        known = self._known.get(id(thing))
        if known is not None:
            return known[1]
        if same_as is not None and same_as is not thing:
            number = self.number_of(same_as)
        else:
            self._count += 1
            number = self._count
        key = id(thing)
        try:
            self._known[key] = weakref.ref(thing, functools.partial(self._forget, key)), number
        except TypeError:
            return 0
        return number

    def living(self) -> list[Any]:
        """Return the numbered objects that still live."""
        things = [reference() for reference, _ in list(self._known.values())]
        return [thing for thing in things if thing is not None]

    def _forget(self, key: int, _: object) -> None:
        self._known.pop(key, None)
