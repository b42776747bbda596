"""The works that the backend's calls return: what torch waits for, or asks for a future.

A `CompletedWork` is over when it is returned: the call ran in the thread that made it. A
`PendingWork` runs on the communication thread of its group, which completes it; any thread may wait
for it. A `MessageWork` is a message on its way through shared memory.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from paceline.collectives.tensors import copy_back, naming_members

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from paceline.native import HostGroup, HostMessage


class CompletedWork(Work):
    """A call that is over.

    Args:
        result: the tensors that it filled; what its future holds.
        source: group rank of a message's sender, for a receive.
    """

    path = "shared memory"  # the recorder asks: which way the call took
    ran_inline = True  # and whether the caller was blocked for all of it

    def __init__(self, result: list[Any], source: int = -1) -> None:
        super().__init__()
        self._result = result
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        del timeout
        return True

    def is_completed(self) -> bool:
        """Return true."""
        return True

    def is_success(self) -> bool:
        """Return true: a call that fails raises."""
        return True

    def exception(self) -> None:
        """Return none: a call that fails raises."""

    def synchronize(self) -> None:
        """Return at once: the host has waited already."""

    def result(self) -> list[Any]:
        """Return the tensors that the call filled."""
        return self._result

    def source_rank(self) -> int:
        """Return the group rank of the sender of a received message; -1 for other calls."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[list[Any]]:
        """Return a future that is done and holds the tensors."""
        future: Future[list[Any]] = Future()
        future.set_result(self._result)
        return future


class PendingWork(Work):
    """A call that the communication thread of a group runs.

    Args:
        result: the tensors that it fills; what its future holds.
    """

    path = "two levels"

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._result = result
        self._over = threading.Event()
        self._problem: BaseException | None = None
        self._future: Future[list[Any]] = Future()

    def run(self, call: Callable[[], None]) -> None:
        """Run the call and complete this work; on the communication thread."""
        try:
            call()
        except BaseException as problem:  # noqa: BLE001  # raised where somebody waits
            self._problem = problem
        self._over.set()
        if self._problem is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(self._problem)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is over.

        Raises:
            PacelineError: the call failed; it has a deadline of its own, so this wait needs none.
        """
        del timeout
        self._over.wait()
        if self._problem is not None:
            raise self._problem
        return True

    def is_completed(self) -> bool:
        """Return whether the call is over."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Return whether the call is over and did not fail."""
        return self._over.is_set() and self._problem is None

    def exception(self) -> BaseException | None:
        """Return why the call failed; none if it did not, or not yet."""
        return self._problem

    def synchronize(self) -> None:
        """Wait until the call is over."""
        self.wait()

    def result(self) -> list[Any]:
        """Return the tensors that the call fills."""
        return self._result

    def get_future(self) -> Future[list[Any]]:
        """Return the future that holds the tensors when the call is over."""
        return self._future


class MessageWork(Work):
    """A send or receive in shared memory that was posted.

    The native group moves its data when somebody waits for any message, or in a thread of its own.

    Args:
        tensor: that is sent or filled.
        dense: its contiguous stand-in, or the tensor itself; the memory of the message.
        message: as the group calls it.
        group: that moves it.
        members: the ranks' numbers in the job, for errors.
        timeout_s: the longest wait, from the call of `wait` on.
    """

    path = CompletedWork.path

    def __init__(
        self,
        tensor: torch.Tensor,
        dense: torch.Tensor,
        message: HostMessage,
        group: HostGroup,
        members: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        super().__init__()
        self._tensor = tensor
        self._dense = dense
        self._message = message
        self._group = group
        self._members = members
        self._timeout_s = timeout_s
        self._problem: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent, or received.

        Raises:
            RankLost: the other rank ended.
            DeadlineExceeded: it did nothing before the deadline.
        """
        seconds = self._timeout_s if not timeout else timeout.total_seconds()
        try:
            with naming_members(self._members):
                self._group.wait(self._message, seconds)
        except BaseException as problem:
            self._problem = problem
            raise
        self._copy_back()
        return True

    def is_completed(self) -> bool:
        """Return whether the message is sent, or received."""
        if not self._group.test(self._message):
            return False
        self._copy_back()
        return True

    def _copy_back(self) -> None:
        dense, self._dense = self._dense, self._tensor
        copy_back(dense, self._tensor)

    def is_success(self) -> bool:
        """Return whether the message is sent, or received."""
        return self._message.over

    def exception(self) -> BaseException | None:
        """Return why a wait failed; none if none did."""
        return self._problem

    def synchronize(self) -> None:
        """Wait until the message is sent, or received."""
        self.wait()

    def result(self) -> list[Any]:
        """Return the tensor."""
        return [self._tensor]

    def source_rank(self) -> int:
        """Return the group rank of the other side; -1 while a receive from any rank goes on."""
        return self._message.peer

    _source_rank = source_rank


class CombinedWork(Work):
    """Several works as one.

    Args:
        works: at least one.
    """

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    @property
    def path(self) -> str:
        """Which way the works went, which the recorder asks."""
        return getattr(self._works[0], "path", "gloo")

    @property
    def ran_inline(self) -> bool:
        """Whether the caller was blocked for all of it, which the recorder asks."""
        return all(getattr(work, "ran_inline", False) for work in self._works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all works."""
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all works are over."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all works are over and none failed."""
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        """Wait for all works."""
        self.wait()

    def result(self) -> list[Any]:
        """Return the tensors that the works fill."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> Future[list[Any]]:
        """Return a future that holds the works' tensors when all are over."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(_joined)


def _joined(futures: Future[list[Future[list[Any]]]]) -> list[Any]:
    """Return what several futures hold as one list."""
    return [tensor for future in futures.value() for tensor in future.value()]
