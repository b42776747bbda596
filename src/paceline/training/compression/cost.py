"""Whether compressing pays: what it takes against the communication that it saves.

    compress iff t_select + t_sparse < t_dense_exposed

t_dense_exposed is the part of the dense all-reduce that backward does not hide. t_sparse counts in
full: the sparse exchange of a bucket can only begin when its selection has ended, and the selection
competes with backward for the processor.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from paceline.core.errors import UsageError
from paceline.training.compression.density import DensitySchedule
from paceline.training.compression.dgc import DeepGradientCompression, DGCOptions
from paceline.training.compression.exchange import Part, SparseAllReduce, method_for
from paceline.training.compression.selection import (
    Accumulation,
    accumulate_and_select,
    sample_of,
    wanted_count,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from paceline.core.machine import Machine

_MEASURED_COUNT = 4 << 20  # elements of a measurement, at most
_ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionEstimate:
    """The two sides of the decision, seconds per step.

    Attributes:
        select_s: accumulation and selection.
        sparse_s: exchange of what is selected.
        dense_s: all-reduce of the whole gradient.
        hidden_s: of that, what backward hides.
        source: of the figures: a measurement, or a machine's name.
    """

    select_s: float
    sparse_s: float
    dense_s: float
    hidden_s: float = 0.0
    source: str = ""

    @property
    def dense_exposed_s(self) -> float:
        """What the dense all-reduce adds to a step."""
        return max(0.0, self.dense_s - self.hidden_s)

    @property
    def compressed_s(self) -> float:
        """What selection and sparse exchange add to a step."""
        return self.select_s + self.sparse_s

    @property
    def pays(self) -> bool:
        """Whether compression makes steps shorter."""
        return self.compressed_s < self.dense_exposed_s

    def __str__(self) -> str:
        verdict = "pays" if self.pays else "does not pay"
        return (
            f"gradient compression {verdict}: selecting {1e3 * self.select_s:.1f} ms + sparse "
            f"exchange {1e3 * self.sparse_s:.1f} ms against {1e3 * self.dense_exposed_s:.1f} ms of "
            f"the dense all-reduce ({1e3 * self.dense_s:.1f} ms, of which backward hides "
            f"{1e3 * (self.dense_s - self.dense_exposed_s):.1f} ms)"
            + (f", from {self.source}" if self.source else "")
        )


def estimate(
    machine: Machine,
    count: int,
    *,
    hosts: int,
    ranks: int | None = None,
    density: float = 0.001,
    hidden_s: float = 0.0,
    value_dtype: torch.dtype = torch.float32,
) -> CompressionEstimate:
    """Return what a machine's figures say of compressing gradients.

    Selection is limited by memory: three streams read and two written, the written lines read
    first. The sparse exchange is the link between hosts, one message per peer and phase. The dense
    all-reduce is the machine's measured curve, or a ring over that link.

    Args:
        machine: with a link between hosts, or among the ranks of one.
        count: gradient elements, float32.
        hosts: between which gradients are sparse; for one host, `ranks` of it.
        ranks: of all hosts; default: one per host.
        density: share of entries sent.
        hidden_s: of the dense all-reduce, what backward hides.
        value_dtype: on the wire.

    Raises:
        UsageError: fewer than two ranks, or the machine has no links or memory bandwidth.
    """
    ranks = ranks or hosts
    ends = hosts if hosts > 1 else ranks
    if ends < 2:
        raise UsageError("one rank sends nothing", where="compression.estimate", fix="Give 2 ranks")
    levels = ("network", "loopback") if hosts > 1 else ("shared-memory", "loopback")
    links = [link for level in levels for link in machine.links if link.level == level]
    memory = machine.devices[0].bandwidth_bytes_per_s if machine.devices else None
    if not links or memory is None:
        raise UsageError(
            "a machine without links or memory bandwidth says nothing about compression",
            where=f"machine {machine.name}",
            fix="Measure it: paceline probe --out MACHINE",
        )
    latency_s = links[0].latency_s.value
    rate = links[0].bandwidth_bytes_per_s.value
    method = method_for(ends)
    plan = SparseAllReduce(
        ranks=ends,
        length=count,
        parts=(Part(0, count, wanted_count(count, density)),),
        dtype=value_dtype,
        method=method,
    )
    own_bytes = plan.result_bytes / ends
    phases = 1 if method == "gather" else 3  # sizes, entries to their owners, sums to all
    sent = own_bytes * (ends - 1) * (1 if method == "gather" else 2)
    cost = machine.collective("all_reduce", ranks, hosts=hosts)
    ring_s = 2 * (ends - 1) * (latency_s + 4 * count / ends / rate)
    return CompressionEstimate(
        select_s=5 * 4 * count / memory.value,
        sparse_s=phases * (ends - 1) * latency_s + sent / rate,
        dense_s=cost.seconds_at(4 * count) if cost else ring_s,
        hidden_s=hidden_s,
        source=f"machine {machine.name}",
    )


def measure(
    count: int,
    group: ProcessGroup | None = None,
    *,
    options: DGCOptions | None = None,
    hidden_s: float = 0.0,
    average: Callable[[torch.Tensor], None] | None = None,
    hosts: Sequence[Sequence[int]] | Literal["find"] | None = None,
) -> CompressionEstimate:
    """Return what a short measurement says; equal on all ranks, which call this together.

    Times a dense all-reduce, the selection, and the whole of a compressed one, of up to 4 Mi
    elements; longer ones are extrapolated in proportion. The shortest of three rounds counts, and
    the slowest rank.

    Args:
        count: gradient elements.
        group: of the ranks; None for all ranks.
        options: of compression; its final density counts.
        hidden_s: of the dense all-reduce, what backward hides.
        average: the dense all-reduce that training has; None: that of the group.
        hosts: as `DeepGradientCompression` has them.
    """
    options = options or DGCOptions()
    density = options.density.density
    measured = min(count, _MEASURED_COUNT)
    gradient = torch.randn(measured, generator=torch.Generator().manual_seed(0))
    steady = DensitySchedule(density=density, steps_per_stage=0)
    compressor = DeepGradientCompression(replace(options, density=steady), hosts=hosts)
    buffer = gradient.clone()
    # The ranks of a host share the work by parameters, so that each gets one here.
    parts = buffer.chunk(compressor.form(group).columns)
    matrices = [(str(number), part.view(1, -1)) for number, part in enumerate(parts)]
    own = gradient[: parts[0].numel()]
    velocity, residual = torch.zeros_like(own), torch.zeros_like(own)
    how = Accumulation(momentum=options.momentum)
    wanted, sample = wanted_count(len(own), density), sample_of(len(own), density, "", 0)

    def select() -> None:
        accumulate_and_select(own, velocity, residual, how=how, wanted=wanted, sample=sample)

    forms: tuple[Callable[[], object], ...] = (
        select,
        lambda: compressor.reduce_buffer(buffer, matrices, group),
        lambda: average(gradient) if average else dist.all_reduce(gradient, group=group),
    )
    seconds = torch.tensor([_shortest(form, group) for form in forms], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    select_s, whole_s, dense_s = (seconds * (count / measured)).tolist()
    return CompressionEstimate(
        select_s=select_s,
        sparse_s=max(0.0, whole_s - select_s),
        dense_s=dense_s,
        hidden_s=hidden_s,
        source=f"a measurement of {measured:,} elements",
    )


def _shortest(call: Callable[[], object], group: ProcessGroup | None) -> float:
    call()  # connections, pages
    times = []
    for _ in range(_ROUNDS):
        dist.barrier(group=group)
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)
