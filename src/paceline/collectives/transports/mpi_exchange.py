"""Collectives between hosts over MPI instead of gloo, where a site has tuned MPI to its network.

`MpiExchange` has the calls of torch's ProcessGroupGloo that the two-level paths make, on CPU
tensors; each returns a work. MPI has no wait with a deadline, so works poll their request, with
pauses that grow to a millisecond. MPI knows no float16 and bfloat16: they travel as two bytes, and
torch adds them (an operation of MPI may be a function of Python).

The ranks must have been started by MPI's launcher (mpirun, srun), and MPI must allow calls from any
thread: the exchange runs on the group's communication thread, while the script may use MPI itself.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.collectives.transports.mpi import MPI, has_ended, new_communicator
from paceline.core.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
_OPERATIONS = {
    dist.ReduceOp.SUM: (MPI.SUM, torch.add),
    dist.ReduceOp.PRODUCT: (MPI.PROD, torch.mul),
    dist.ReduceOp.MIN: (MPI.MIN, torch.minimum),
    dist.ReduceOp.MAX: (MPI.MAX, torch.maximum),
}


def problem_of_mpi(rank: int) -> str:
    """Return why MPI cannot serve this process; "" if it can.

    Args:
        rank: global rank of this process in torch's job.
    """
    if MPI.COMM_WORLD.Get_rank() != rank:
        return f"rank {rank} of torch is rank {MPI.COMM_WORLD.Get_rank()} of MPI"
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return "MPI does not allow calls from several threads (MPI_THREAD_MULTIPLE)"
    return ""


class MpiExchange:
    """Collectives between some ranks of the job; any thread, one call at a time.

    Args:
        ranks: their global ranks, in the order of their rank here; all of them call this.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._communicator = new_communicator(ranks)
        self._is_aborted = threading.Event()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _MpiWork:
        """Reduce a tensor over the ranks, in place."""
        (tensor,) = tensors
        operation, buffer = _operation(options.reduceOp, tensor), _typed(tensor)
        request = self._communicator.Iallreduce(MPI.IN_PLACE, buffer, operation)
        return self._work(request, options, tensor)

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> _MpiWork:
        """Reduce a tensor over the ranks into that of the root."""
        (tensor,) = tensors
        operation, buffer = _operation(options.reduceOp, tensor), _typed(tensor)
        given, filled = (MPI.IN_PLACE, buffer) if self._is_root(options) else (buffer, None)
        request = self._communicator.Ireduce(given, filled, operation, options.rootRank)
        return self._work(request, options, tensor)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _MpiWork:
        """Copy the root's tensor to all ranks."""
        (tensor,) = tensors
        request = self._communicator.Ibcast(bytes_of(tensor), options.rootRank)
        return self._work(request, options, tensor)

    def barrier(self, options: Any) -> _MpiWork:
        """Wait for all ranks."""
        return self._work(self._communicator.Ibarrier(), options)

    def allgather(
        self, outputs: list[list[torch.Tensor]], given: list[torch.Tensor], options: Any
    ) -> _MpiWork:
        """Copy all ranks' tensors to each rank."""
        (parts,), (tensor,) = outputs, given
        flat = tensor.new_empty(len(parts) * tensor.numel())
        request = self._communicator.Iallgather(bytes_of(tensor), bytes_of(flat))
        return self._work(request, options, tensor, then=functools.partial(_spread, flat, parts))

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        options: Any,
    ) -> _MpiWork:
        """Exchange equal parts; the sizes are empty."""
        assert not output_sizes
        assert not input_sizes
        request = self._communicator.Ialltoall(bytes_of(given), bytes_of(output))
        return self._work(request, options, output, given)

    def gather(
        self, outputs: list[list[torch.Tensor]], given: list[torch.Tensor], options: Any
    ) -> _MpiWork:
        """Copy all ranks' tensors to the root; `outputs` is empty elsewhere."""
        (tensor,) = given
        root = options.rootRank
        if not self._is_root(options):
            request = self._communicator.Igather(bytes_of(tensor), None, root)
            return self._work(request, options, tensor)
        (parts,) = outputs
        flat = tensor.new_empty(len(parts) * tensor.numel())
        request = self._communicator.Igather(bytes_of(tensor), bytes_of(flat), root)
        return self._work(request, options, tensor, then=functools.partial(_spread, flat, parts))

    def scatter(
        self, outputs: list[torch.Tensor], given: list[list[torch.Tensor]], options: Any
    ) -> _MpiWork:
        """Give each rank one tensor of the root's list; `given` is empty elsewhere."""
        (tensor,) = outputs
        flat = torch.cat([part.view(-1) for part in given[0]]) if given else None
        source = None if flat is None else bytes_of(flat)
        request = self._communicator.Iscatter(source, bytes_of(tensor), options.rootRank)
        return self._work(request, options, tensor, flat)

    def abort(self) -> None:
        """End the waits that are under way, here."""
        self._is_aborted.set()

    def shutdown(self) -> None:
        """Give the communicator back."""
        self._communicator.Free()

    def _is_root(self, options: Any) -> bool:
        return bool(self._communicator.Get_rank() == options.rootRank)

    def _work(
        self, request: MPI.Request, options: Any, *held: Any, then: Callable[[], None] | None = None
    ) -> _MpiWork:
        seconds = options.timeout.total_seconds()
        return _MpiWork(request, seconds, self._is_aborted, held, then)


class _MpiWork:
    """A call that MPI has started.

    Args:
        request: of MPI.
        timeout_s: the longest wait, from now on.
        is_aborted: ends a wait.
        held: the memory that MPI reads and writes.
        then: what is left to do with the result.
    """

    _abandoned: list[_MpiWork] = []  # noqa: RUF012  # of all: MPI may still write to their memory

    def __init__(
        self,
        request: MPI.Request,
        timeout_s: float,
        is_aborted: threading.Event,
        held: tuple[Any, ...],
        then: Callable[[], None] | None,
    ) -> None:
        self._request = request
        self._clock = SystemClock()
        self._timeout_s = timeout_s
        self._deadline_s = self._clock.now_s() + timeout_s
        self._is_aborted = is_aborted
        self._held = held
        self._then = then

    def wait(self) -> None:
        """Wait until the call is over.

        Raises:
            RuntimeError: a rank did not answer before the deadline, MPI failed, or was aborted.
        """
        if not has_ended(self._request, self._deadline_s, self._clock, self._is_aborted):
            self._abandoned.append(self)
            ended = (
                "aborted" if self._is_aborted.is_set() else f"no answer in {self._timeout_s:g} s"
            )
            raise RuntimeError(f"MPI: {ended}")
        if self._then is not None:
            self._then()


def bytes_of(tensor: torch.Tensor) -> list[Any]:
    """Return the memory of a dense tensor on the CPU as MPI takes it."""
    raw = tensor.detach().view(-1).view(torch.uint8).numpy()
    return [raw, MPI.BYTE]


def _typed(tensor: torch.Tensor) -> list[Any]:
    """Return a tensor as MPI reduces it."""
    raw = tensor.detach().view(-1).view(torch.uint8).numpy()
    return [raw, tensor.numel(), _TYPES.get(tensor.dtype) or _two_bytes()]


@functools.cache
def _two_bytes() -> MPI.Datatype:
    return MPI.BYTE.Create_contiguous(2).Commit()


def _operation(op: Any, tensor: torch.Tensor) -> MPI.Op:
    """Return MPI's operation for a reduction of tensors like this one."""
    kind = op.op
    return _OPERATIONS[kind][0] if tensor.dtype in _TYPES else _short_operation(kind, tensor.dtype)


@functools.cache
def _short_operation(kind: Any, dtype: torch.dtype) -> MPI.Op:
    """Return a reduction of float16 or bfloat16, which torch calculates."""
    apply = _OPERATIONS[kind][1]

    def reduce(given: Any, result: Any, _: MPI.Datatype) -> None:
        target = torch.frombuffer(result, dtype=dtype)
        apply(torch.frombuffer(given, dtype=dtype), target, out=target)

    return MPI.Op.Create(reduce, commute=True)


def _spread(flat: torch.Tensor, parts: list[torch.Tensor]) -> None:
    for row, part in zip(flat.view(len(parts), -1), parts, strict=True):
        part.copy_(row.view(part.shape))
