"""The backend ``paceline`` of torch.distributed: a group that knows which ranks share a host.

    DDP, FSDP2, DTensor, pipelining, checkpoints, dist.* calls
        |
    PacelineGroup          one method per call of torch's ProcessGroup
        |-- path           CPU tensors: shared memory (`host_path`), or two levels (`two_level`)
        `-- gloo           everything else, and everything where ranks share no memory
            NCCL           tensors on a GPU

Which way a call goes depends only on what is the same on all ranks: the kind of call, data type,
layout, device, reduction. What may differ between ranks (contiguous or not) never decides.

A call on the shared-memory path runs in the thread that makes it and returns a work that is over:
on a host whose cores all compute, a thread gains nothing (bench/step_time.py). So the ranks of a
host call collectives of several groups in one common order, as with MPI and NCCL.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.collectives.host_path import HostPath
from paceline.collectives.options import CollectivesConfig
from paceline.collectives.path import make_path
from paceline.collectives.registration import NAME
from paceline.collectives.tensors import (
    check_parts,
    check_reduced,
    check_sizes,
    joined,
    spread,
)
from paceline.collectives.works import CombinedWork, CompletedWork, PendingWork
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.torch_internals import Capability

if TYPE_CHECKING:
    from collections.abc import Sequence


def make_group(options: Any, backend_options: Any = None) -> PacelineGroup:
    """Return the group that torch asks for; every one of its ranks calls this.

    Args:
        options: torch's ``_DistributedBackendOptions``: store, rank, size, timeout.
        backend_options: a CollectivesConfig, in place of file and environment; others do nothing.

    Raises:
        RankLost, UsageError: a rank did not come in time, or rank 0's settings are not valid.
    """
    _hide_from_dynamo()
    return PacelineGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        tuple(options.global_ranks_in_group) or tuple(range(options.group_size)),
        backend_options if isinstance(backend_options, CollectivesConfig) else None,
    )


class PacelineGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch has no types here
    """A process group whose ranks use shared memory where they share a host.

    torch calls some methods by a new and some by an old name (2.10 to 2.14): both are here.

    Args:
        store: torch's store, where the ranks find each other.
        rank: this rank within the group.
        size: number of ranks.
        timeout: the longest wait for another rank; torch's default for the group.
        members: the global ranks of the group, in order of their rank in it.
        config: in place of what file and environment say.
    """

    serves_monitored_barrier = True

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        members: tuple[int, ...],
        config: CollectivesConfig | None = None,
    ) -> None:
        super().__init__(rank, size)  # torch lets a subclass not pass the store
        self._store = store
        self._timeout = timeout
        self._gloo = _make_gloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():  # pragma: no cover - GPU
            self._register_nccl(store, rank, size)
        self._path = make_path(store, rank, members, timeout.total_seconds(), config)

    def _register_nccl(self, store: Any, rank: int, size: int) -> None:  # pragma: no cover - GPU
        """Give tensors on a GPU to NCCL, which connects with the first of them."""
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = self._timeout  # noqa: SLF001  # torch sets it in this way
        nccl = c10d.ProcessGroupNCCL(dist.PrefixStore("cuda/", store), rank, size, options)
        self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)

    # --- what torch asks about a group ------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks share memory, through which CPU tensors then go."""
        return isinstance(self._path, HostPath)

    @property
    def is_flat(self) -> bool:
        """Whether gloo serves all CPU tensors, as with one rank on each host."""
        return self._path is None

    def broadcast_path(self, tensors: Sequence[torch.Tensor]) -> str:
        """Return which way a broadcast of CPU tensors goes, as its work says it; the recorder asks.

        Args:
            tensors: what is broadcast in one call.
        """
        if self._path is None or not self._path.moves("broadcast", tensors):
            return "gloo"
        return CompletedWork.path if self.shares_memory else PendingWork.path

    def getBackendName(self) -> str:  # noqa: N802  # the name that torch calls
        """Return the name under which the backend is registered."""
        return NAME

    def get_group_store(self) -> Any:
        """Return the store where the ranks found each other."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait for another rank from now on."""
        self._timeout = timeout
        super().set_timeout(timeout)

    def shutdown(self) -> None:
        """Give the shared memory back; the group cannot be used any more."""
        self._close()
        super().shutdown()

    def abort(self) -> None:
        """End what is under way, here and on the other ranks of this host, with an error."""
        if self._path is not None:
            self._path.abort("the group was aborted")
        self._close()
        super().abort()

    def _close(self) -> None:
        path, self._path = self._path, None
        if path is not None:
            path.close()

    # --- which way a call goes --------------------------------------------------------------------

    def _seconds(self, opts: Any) -> float:
        """Return the deadline of a call: its own, or that of the group."""
        timeout = opts.timeout if opts.timeout > timedelta(0) else self._timeout
        return float(timeout.total_seconds())

    def _other(self, tensor: torch.Tensor) -> Any:
        """Return the backend that serves a tensor without our path."""
        return self._gloo if tensor.is_cpu else self._get_backend(tensor.device)

    # --- reductions -------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce each tensor over the ranks, in place."""
        tensors, opts = _listed(tensors), opts or c10d.AllreduceOptions()
        path = self._path
        if path is None or not path.reduces("all_reduce", tensors, opts.reduceOp):
            check_reduced("all_reduce", tensors[0])
            return self._other(tensors[0]).allreduce(tensors, opts)
        return path.run(tensors, path.all_reduce, tensors, opts.reduceOp, self._seconds(opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce each of several tensors over the ranks, in place."""
        opts = opts or c10d.AllreduceCoalescedOptions()
        path = self._path
        if path is None or not path.reduces("all_reduce", tensors, opts.reduceOp):
            check_reduced("all_reduce", tensors[0])
            return self._other(tensors[0]).allreduce_coalesced(tensors, opts)
        return path.run(tensors, path.all_reduce, tensors, opts.reduceOp, self._seconds(opts))

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        """Reduce a tensor over the ranks into that of the root."""
        tensors, opts = _listed(tensors), opts or c10d.ReduceOptions()
        path = self._path
        if path is None or not path.reduces("reduce", tensors, opts.reduceOp):
            check_reduced("reduce", tensors[0])
            return self._other(tensors[0]).reduce(tensors, opts)
        given = (tensors[0], opts.reduceOp, opts.rootRank)
        return path.run(tensors, path.reduce, *given, self._seconds(opts))

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        """Reduce over the ranks; each rank gets its part of the result."""
        opts = opts or c10d.ReduceScatterOptions()
        path = self._path
        check_sizes("reduce_scatter", given, output, self.size())
        if path is None or not path.reduces("reduce_scatter", [output, given], opts.reduceOp):
            check_reduced("reduce_scatter", output)
            return self._other(output)._reduce_scatter_base(output, given, opts)  # noqa: SLF001  # torch's name
        op = opts.reduceOp
        return path.run([output], path.reduce_scatter, output, given, op, self._seconds(opts))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Reduce several tensors over the ranks; each rank gets its part of each result."""
        return CombinedWork(
            [
                self.reduce_scatter_single(output, tensor, opts)
                for output, tensor in zip(outputs, given, strict=True)
            ]
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Reduce each tensor of a list over the ranks; each rank gets the one of its number."""
        opts = opts or c10d.ReduceScatterOptions()
        path = self._path
        fits = len(outputs) == len(given) == 1 and self._is_list_for(given[0], outputs[0])
        if path is None or not fits or not path.reduces("reduce_scatter", outputs, opts.reduceOp):
            check_reduced("reduce_scatter", outputs[0])
            return self._other(outputs[0]).reduce_scatter(outputs, given, opts)
        flat = joined(given[0])
        op = opts.reduceOp
        return path.run(outputs, path.reduce_scatter, outputs[0], flat, op, self._seconds(opts))

    def _is_list_for(self, tensors: Any, tensor: torch.Tensor) -> bool:
        """Return whether `tensors` has a tensor for each rank, all like `tensor`."""
        return len(tensors) == self.size() and all(
            other.numel() == tensor.numel() and other.dtype == tensor.dtype for other in tensors
        )

    # --- copies to all ----------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """Copy the root's tensor to all ranks."""
        tensors, opts = _listed(tensors), opts or c10d.BroadcastOptions()
        path = self._path
        if path is None or not path.moves("broadcast", tensors):
            return self._other(tensors[0]).broadcast(tensors, opts)
        return path.run(tensors, path.broadcast, tensors, opts.rootRank, self._seconds(opts))

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> Any:
        """Copy all ranks' tensors, one after the other, to each rank."""
        opts = opts or c10d.AllgatherOptions()
        path = self._path
        check_sizes("all_gather", output, given, self.size())
        if path is None or not path.moves("all_gather", [output, given]):
            return self._other(output)._allgather_base(output, given, opts)  # noqa: SLF001  # torch's name
        return path.run([output], path.all_gather, output, given, self._seconds(opts))

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Copy all ranks' tensors to each rank, for several tensors."""
        return CombinedWork(
            [
                self.all_gather_single(output, tensor, opts)
                for output, tensor in zip(outputs, given, strict=True)
            ]
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Copy all ranks' tensors to each rank, into a list with a tensor for each rank."""
        opts = opts or c10d.AllgatherOptions()
        path = self._path
        fits = len(outputs) == len(given) == 1 and self._is_list_for(outputs[0], given[0])
        if path is None or not fits or not path.moves("all_gather", given):
            return self._other(given[0]).allgather(outputs, given, opts)
        timeout_s = self._seconds(opts)

        def gather() -> None:
            flat = given[0].new_empty(self.size() * given[0].numel())
            path.all_gather(flat, given[0], timeout_s)
            spread(flat, outputs[0])

        return path.run(outputs[0], gather)

    def allgather_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Copy several tensors of all ranks to each rank; `outputs` has a list for each rank."""
        opts = opts or c10d.AllgatherOptions()
        if self._path is None or not self._path.moves("all_gather", given):
            return self._gloo.allgather_coalesced(outputs, given, opts)
        columns = [list(column) for column in zip(*outputs, strict=True)]
        return CombinedWork(
            [
                self.allgather([column], [tensor], opts)
                for column, tensor in zip(columns, given, strict=True)
            ]
        )

    # --- copies between a root and the others, or between all -------------------------------------

    def gather(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Copy all ranks' tensors to the root, into a list with a tensor for each rank."""
        opts = opts or c10d.GatherOptions()
        path = self._path
        is_root = opts.rootRank == self.rank()
        fits = not is_root or (len(outputs) == 1 and self._is_list_for(outputs[0], given[0]))
        if path is None or not fits or not path.moves("gather", given):
            return self._other(given[0]).gather(outputs, given, opts)
        root, timeout_s = opts.rootRank, self._seconds(opts)

        def gather() -> None:
            flat = given[0].new_empty(self.size() * given[0].numel() if is_root else 0)
            path.gather(flat, given[0], root, timeout_s)
            if is_root:
                spread(flat, outputs[0])

        return path.run(outputs[0] if is_root else [], gather)

    def scatter(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Give each rank one tensor of the root's list."""
        opts = opts or c10d.ScatterOptions()
        path = self._path
        is_root = opts.rootRank == self.rank()
        fits = not is_root or (len(given) == 1 and self._is_list_for(given[0], outputs[0]))
        if path is None or not fits or not path.moves("scatter", outputs):
            return self._other(outputs[0]).scatter(outputs, given, opts)
        flat = joined(given[0]) if is_root else outputs[0]
        root = opts.rootRank
        return path.run(outputs, path.scatter, outputs[0], flat, root, self._seconds(opts))

    def all_to_all_single(
        self, output: Any, given: Any, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Any:
        """Exchange parts: each rank gives every rank one; sizes are along the first dimension."""
        opts = opts or c10d.AllToAllOptions()
        path = self._path
        if path is None or not path.moves("all_to_all", [output, given]):
            return self._other(output).alltoall_base(output, given, output_sizes, input_sizes, opts)
        check_parts(output, output_sizes, self.size())
        check_parts(given, input_sizes, self.size())
        sizes = (output_sizes, input_sizes)
        return path.run([output], path.all_to_all, output, given, *sizes, self._seconds(opts))

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Exchange tensors: each rank gives every rank one of a list."""
        opts = opts or c10d.AllToAllOptions()
        path = self._path
        if path is None or not path.moves("all_to_all", [*outputs, *given]):
            return self._other(outputs[0]).alltoall(outputs, given, opts)
        flat = joined(given)
        filled = flat.new_empty(sum(tensor.numel() for tensor in outputs))
        receives, sends = ([tensor.numel() for tensor in tensors] for tensors in (outputs, given))
        timeout_s = self._seconds(opts)

        def exchange() -> None:
            path.all_to_all(filled, flat, receives, sends, timeout_s)
            spread(filled, outputs)

        return path.run(outputs, exchange)

    # --- barriers and messages --------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        opts = opts or c10d.BarrierOptions()
        device = opts.device
        if device is not None and device.type != "cpu":  # pragma: no cover - GPU
            return self._get_backend(device).barrier(opts)
        if self._path is None or not self._path.moves("barrier", []):
            return self._gloo.barrier(opts)
        return self._path.run([], self._path.barrier, self._seconds(opts))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 names those that do not come."""
        self._gloo.monitored_barrier(timeout or self._timeout, wait_all_ranks)

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        """Send a tensor."""
        path, seconds = self._path, self._timeout.total_seconds()
        if path is None or not path.moves("message", tensors):
            return self._other(tensors[0]).send(tensors, rank, tag)
        return path.send(tensors[0], rank, tag, seconds)

    def recv(self, tensors: Any, rank: int, tag: int) -> Any:
        """Receive a tensor."""
        path, seconds = self._path, self._timeout.total_seconds()
        if path is None or not path.moves("message", tensors):
            return self._other(tensors[0]).recv(tensors, rank, tag)
        return path.receive(tensors[0], rank, tag, seconds)

    def recv_anysource(self, tensors: Any, tag: int) -> Any:
        """Receive a tensor from whichever rank sends one."""
        path, seconds = self._path, self._timeout.total_seconds()
        if path is None or not path.moves("message", tensors):
            return self._other(tensors[0]).recv_anysource(tensors, tag)
        return path.receive(tensors[0], None, tag, seconds)


@functools.cache
def _hide_from_dynamo() -> None:
    """Have Dynamo leave our methods alone: torch's C++ calls them amid a compiled function."""
    if internals.check(Capability.DYNAMO_FRAMES) is None:
        internals.hide_from_dynamo("paceline.collectives")


def _make_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo = c10d.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout)
    gloo._set_sequence_number_for_group()  # noqa: SLF001  # as torch does for gloo
    return gloo


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors
