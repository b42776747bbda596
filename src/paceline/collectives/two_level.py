"""Collectives of a group on several hosts: inside a host through memory, between hosts over gloo.

What all two-level paths share. A call takes a tensor in chunks: while chunks are on the wire, the
host works on the next one. Of each host one rank at least takes part in the exchange between hosts:

    `sharded`   hosts with equally many ranks: each rank exchanges its share, all at once
    `leader`    any hosts: the first rank of each host exchanges everything

All calls run on one communication thread, in the order in which they were made.

Source: A. A. Awan et al., S-Caffe, PPoPP 2017 (hierarchical reduction and broadcast).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.collectives.communication_thread import CommunicationThread
from paceline.collectives.host_group import ReduceOp
from paceline.collectives.tensors import (
    copy_back,
    decisive_bytes,
    dense_of,
    is_plain,
    naming_members,
    native_type,
    size_bytes,
)
from paceline.collectives.torch_arrays import divide
from paceline.collectives.transports.torch_p2p import lost_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from paceline.collectives.host_group import HostGroup
    from paceline.collectives.settings import GroupSettings
    from paceline.collectives.transports.mpi_messages import MpiMessages, MpiMessageWork

REDUCTIONS = {
    dist.ReduceOp.SUM: ReduceOp.SUM,
    dist.ReduceOp.AVG: ReduceOp.SUM,  # divided by the number of ranks in between
    dist.ReduceOp.MIN: ReduceOp.MINIMUM,
    dist.ReduceOp.MAX: ReduceOp.MAXIMUM,
    dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
}
# What both the native kernels and gloo reduce.
_TYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)
SUMS = frozenset({dist.ReduceOp.SUM, dist.ReduceOp.AVG})
_CHUNKS_ON_WIRE = 2  # gloo has two threads


class HostPlace(NamedTuple):
    """Where a group's ranks are.

    Attributes:
        hosts: the group ranks of each host.
        host: number of this rank's host.
        local_rank: number of this rank on its host.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    local_rank: int

    def of(self, rank: int) -> tuple[int, int]:
        """Return host and index of a rank."""
        for host, ranks in enumerate(self.hosts):
            if rank in ranks:
                return host, ranks.index(rank)
        raise ValueError(rank)

    def has(self, rank: int) -> bool:
        """Return whether `rank` is this rank."""
        return self.hosts[self.host][self.local_rank] == rank

    def is_own(self, ranks: tuple[int, ...]) -> bool:
        """Return whether `ranks` are those of this rank's host."""
        return ranks == self.hosts[self.host]


class TwoLevelPath(ABC):
    """The collectives of a group on several hosts.

    Calls may come from any thread; all run on the communication thread. What serves a chunk of a
    tensor is a generator: it yields gloo's work once (none on a rank that exchanges nothing), and
    goes on when that is over.

    Args:
        place: where the ranks are.
        group: shared memory of this host's ranks.
        members: the numbers of the group's ranks in the job, for errors.
        cross: gloo between ranks of different hosts, by host; none on a rank that has none.
        settings: sizes, data types on the wire, and which calls run here.

    Attributes:
        messages: what carries those between two ranks; None: the backend's gloo.
    """

    reduced: ClassVar[frozenset[str]] = frozenset({"all_reduce", "reduce"})
    moved: ClassVar[frozenset[str]] = frozenset({"broadcast"})

    def __init__(
        self,
        place: HostPlace,
        group: HostGroup,
        members: tuple[int, ...],
        cross: Any,
        settings: GroupSettings,
    ) -> None:
        self._place = place
        self._group = group
        self._members = members
        self._own_members = tuple(members[rank] for rank in place.hosts[place.host])
        self._cross = cross
        self._config = settings.config
        self._choice = settings.choice
        self._size = sum(map(len, place.hosts))
        self._thread = CommunicationThread("paceline-collectives")
        self.messages: MpiMessages | None = None

    def run(self, result: list[Any], call: Callable[..., None], *args: Any) -> Any:
        """Have the communication thread run a call; return its work."""

        def named() -> None:
            # The caller's tensors may be of its inference mode, which only another may write to.
            with naming_members(self._own_members), torch.inference_mode():
                call(*args)

        return self._thread.submit(result, named)

    def reduces(self, call: str, tensors: Sequence[torch.Tensor], op: Any) -> bool:
        """Return whether a reduction of tensors like these runs here; the same on all ranks."""
        return (
            call in self.reduced
            and op.op in REDUCTIONS
            and self._choice.takes_two_levels(call, decisive_bytes(call, tensors))
            and all(is_plain(tensor) and tensor.dtype in _TYPES for tensor in tensors)
        )

    def moves(self, call: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether a copy of tensors like these runs here; the same on all ranks."""
        if call == "message":
            return self.messages is not None and all(map(is_plain, tensors))
        return call == "barrier" or (
            call in self.moved
            and self._choice.takes_two_levels(call, decisive_bytes(call, tensors))
            and all(map(is_plain, tensors))
        )

    # --- calls ------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout_s: float) -> MpiMessageWork:
        """Start to send a tensor to a rank; only where `moves` says so."""
        assert self.messages is not None
        return self.messages.send(tensor, peer, tag, timeout_s)

    def receive(
        self, tensor: torch.Tensor, peer: int | None, tag: int, timeout_s: float
    ) -> MpiMessageWork:
        """Start to receive a tensor from a rank, or with `peer` None from any."""
        assert self.messages is not None
        return self.messages.receive(tensor, peer, tag, timeout_s)

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Any, timeout_s: float) -> None:
        """Reduce each tensor over the ranks, in place.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        for tensor in tensors:
            dense = dense_of(tensor)
            self._overlap(
                self._all_reduce_chunk(chunk, op, timeout_s) for chunk in self._chunks(dense)
            )
            copy_back(dense, tensor)

    def reduce(self, tensor: torch.Tensor, op: Any, root: int, timeout_s: float) -> None:
        """Reduce a tensor over the ranks into that of `root`.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        dense = dense_of(tensor)
        self._overlap(
            self._reduce_chunk(chunk, op, root, timeout_s) for chunk in self._chunks(dense)
        )
        if self._place.has(root):
            copy_back(dense, tensor)

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, timeout_s: float) -> None:
        """Copy the tensors of `root` to all ranks: once to each host, then inside it.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        for tensor in tensors:
            dense = dense_of(tensor)
            self._overlap(
                self._broadcast_chunk(chunk.view(torch.uint8), root, timeout_s)
                for chunk in self._chunks(dense)
            )
            copy_back(dense, tensor)

    def barrier(self, timeout_s: float) -> None:
        """Wait for all ranks: those of the host, the first ranks of all hosts, those of the host.

        Raises:
            RankLost: a rank did not call this before the deadline, or ended.
        """
        self._group.barrier(timeout_s)
        if self._place.local_rank == 0:
            self._wait(self._cross.barrier(timed(c10d.BarrierOptions(), timeout_s)))
        self._group.barrier(later(timeout_s))

    # --- chunks -----------------------------------------------------------------------------------

    @abstractmethod
    def _speaker(self, index: int) -> int:
        """Return which rank of each host exchanges the data of a root with that local index."""

    @abstractmethod
    def _all_reduce_chunk(self, chunk: torch.Tensor, op: Any, timeout_s: float) -> Iterator[Any]:
        """Reduce a chunk over the ranks, in place."""

    def _reduce_chunk(
        self, chunk: torch.Tensor, op: Any, root: int, timeout_s: float
    ) -> Iterator[Any]:
        """Reduce a chunk on each host, then between hosts, into that of the root."""
        host, index = self._place.of(root)
        speaker = self._speaker(index)
        part = chunk if self._place.has(root) else chunk.clone()  # only the root's changes
        self._reduce_inside(part, op, speaker, timeout_s)
        sent = work = None
        if self._place.local_rank == speaker:
            sent = self._for_wire(part, op)
            options = timed(c10d.ReduceOptions(), timeout_s)
            options.reduceOp, options.rootRank = gloo_reduction(op), host
            work = self._cross.reduce([sent], options)
        yield work
        if self._place.host != host:
            return
        if sent is not None:
            part.copy_(sent)
        if speaker != index:
            self._group.broadcast(part.data_ptr(), size_bytes(part), speaker, later(timeout_s))
        if self._place.has(root):
            self._average(part, op)

    def _broadcast_chunk(self, raw: torch.Tensor, root: int, timeout_s: float) -> Iterator[Any]:
        """Copy a chunk to the root's host, then from there to other hosts, then inside them."""
        host, index = self._place.of(root)
        speaker = self._speaker(index)
        is_source = self._place.host == host
        if is_source:
            self._group.broadcast(raw.data_ptr(), raw.numel(), index, timeout_s)
        work = None
        if self._place.local_rank == speaker:
            options = timed(c10d.BroadcastOptions(), timeout_s)
            options.rootRank = host
            work = self._cross.broadcast([raw], options)
        yield work
        if not is_source:
            self._group.broadcast(raw.data_ptr(), raw.numel(), speaker, later(timeout_s))

    # --- what serves chunks -----------------------------------------------------------------------

    def _overlap(self, chunks: Iterable[Iterator[Any]]) -> None:
        """Serve chunks: while two are on the wire, the next one is started."""
        under_way: deque[tuple[Iterator[Any], Any]] = deque()
        for chunk in chunks:
            under_way.append((chunk, next(chunk)))
            if len(under_way) > _CHUNKS_ON_WIRE:
                self._finish(*under_way.popleft())
        while under_way:
            self._finish(*under_way.popleft())

    def _finish(self, chunk: Iterator[Any], work: Any) -> None:
        if work is not None:
            self._wait(work)
        next(chunk, None)

    def _wait(self, work: Any) -> None:
        """Wait for other hosts; if that fails, let the ranks of this one know, which wait for us.

        Raises:
            RankLost: gloo failed; the error names the ranks that this one exchanges data with.
        """
        try:
            work.wait()
        except RuntimeError as problem:
            place = self._place
            peers = [ranks[place.local_rank] for ranks in place.hosts if not place.is_own(ranks)]
            names = ", ".join(str(self._members[rank]) for rank in peers)
            what = f"no answer between hosts from global rank {names}"
            lost = lost_rank(problem, self._own_members[place.local_rank], what)
            self._group.abort(str(lost))
            raise lost from problem

    def _chunks(self, dense: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the chunks of a contiguous tensor: of one length on all hosts.

        Hosts with equally many ranks can divide them.
        """
        flat = dense.detach().view(-1)
        ranks = len(self._place.hosts[0])
        chunk_bytes = self._config.chunk_bytes * len(self._place.hosts)
        count = max(chunk_bytes // flat.element_size() // ranks, 1) * ranks
        return flat.split(count) if flat.numel() else ()

    def _for_wire(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """Return a tensor in the type in which it travels; the tensor itself where that is its."""
        rounded = self._config.wire == "bfloat16" and tensor.dtype == torch.float32
        return tensor.to(torch.bfloat16) if rounded and op.op in SUMS else tensor

    def _reduce_inside(self, tensor: torch.Tensor, op: Any, root: int, timeout_s: float) -> None:
        """Reduce a contiguous tensor over the ranks of the host into that of local rank `root`."""
        dtype, factor = native_type(tensor.dtype)
        count = tensor.numel() * factor
        self._group.reduce(tensor.data_ptr(), count, dtype, REDUCTIONS[op.op], root, timeout_s)

    def _average(self, total: torch.Tensor, op: Any) -> None:
        """Divide the sum of all ranks where the average was asked for."""
        if op.op == dist.ReduceOp.AVG:
            divide(total, self._size)

    # --- the end ----------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """End what the ranks have under way with an error that gives the reason."""
        self._group.abort(reason)
        if self._cross is not None:
            self._cross.abort()
        if self.messages is not None:
            self.messages.abort(reason)

    def close(self) -> None:
        """End the thread, and give the memory back."""
        self._thread.close()
        if self._cross is not None:
            self._cross.shutdown()
        if self.messages is not None:
            self.messages.close()
        self._group.close()


def timed(options: Any, timeout_s: float) -> Any:
    """Return gloo's options of a call, with a deadline."""
    options.timeout = timedelta(seconds=timeout_s)
    return options


def later(timeout_s: float) -> float:
    """Return the longest wait, after an exchange, for a rank of this host.

    That rank may wait until the deadline for its own exchange; then it says why that failed.
    """
    return 2 * timeout_s


def gloo_reduction(op: Any) -> Any:
    """Return what gloo does between hosts for a reduction; averages are divided afterwards."""
    return dist.ReduceOp.SUM if op.op in SUMS else op
