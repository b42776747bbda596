"""Deep Gradient Compression: momentum is accumulated where the gradient is, and little is sent.

For each parameter of two and more dimensions, with its velocity u and residual v:

    g = g * min(1, clip / (sqrt(N) |g|))      local clipping
    u = m u + g;   v = v + u                  momentum correction
    (Nesterov: u = m (u + g); v = v + u + g)
    send the k largest |v|;  v = 0 there      k by a sampled threshold
                             u = 0 there      momentum factor masking
    the gradient is the sum of what all ranks sent, over N

The optimizer then applies a gradient that already has momentum, so its own must be 0
(`momentum.MomentumTakeover`). Parameters of one dimension are averaged densely, and get their
momentum afterwards. u and v are keyed by the parameter's name: DistributedDataParallel makes its
buckets anew after the first step, and what is keyed by bucket would be lost.

Nothing is lost: what is sent and what stays add up to what was accumulated. That is exact on a
rank; where owners of a sparse reduce-scatter return what they cut off, additions in float32 round.

Source: Lin, Han, Mao, Wang, Dally, Deep Gradient Compression: Reducing the Communication Bandwidth
for Distributed Training, ICLR 2018. Different here: of more candidates than wanted, always the
largest are sent (the authors' code sends the first ones up to 1.3 k); zeros are never sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.errors import ConfigError, UsageError
from paceline.training.compression.density import DensitySchedule
from paceline.training.compression.exchange import Part, SparseAllReduce, method_for
from paceline.training.compression.groups import ExchangeGroups, form, hosts_of
from paceline.training.compression.selection import (
    Accumulation,
    Entries,
    accumulate,
    accumulate_and_select,
    add_entries,
    sample_of,
    wanted_count,
)
from paceline.training.compression.wire import rounded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import ProcessGroup

_STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DGCOptions:
    """How to compress; equal on all ranks.

    Attributes:
        density: share of the entries to send, by step.
        momentum: of the optimizer, whose own is 0.
        nesterov: whether the momentum is Nesterov's.
        mask_momentum: clear the velocity of what is sent (momentum factor masking).
        clip_norm: limit of the norm of each parameter's gradient, over all hosts; a host clips
            its own at this over the square root of the number of hosts. None: no clipping.
        value_dtype: on the wire. What rounding takes off stays in the residual.
        exchange: ``gather``, ``scatter`` (see `exchange`), or the better for the number of hosts.
    """

    density: DensitySchedule = field(default_factory=DensitySchedule)
    momentum: float = 0.9
    nesterov: bool = False
    mask_momentum: bool = True
    clip_norm: float | None = None
    value_dtype: torch.dtype = torch.float32
    exchange: Literal["auto", "gather", "scatter"] = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError(
                f"momentum must be at least 0 and below 1, got {self.momentum:g}",
                where="DGCOptions",
                fix="Give the momentum of the optimizer, for example 0.9",
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(
                f"clip_norm must be above 0, got {self.clip_norm:g}",
                where="DGCOptions",
                fix="Give None for no clipping",
            )


class _Span(NamedTuple):
    """Where a parameter's gradient lies in the flat buffer of its bucket."""

    name: str
    start: int
    length: int
    is_sparse: bool

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.length]


class DeepGradientCompression:
    """Averages gradients over ranks, of which each host sends the largest entries.

    All ranks call `reduce` (or `reduce_buffer`) for the same buckets in the same order, and
    `end_step` after the last bucket of a step. Gradients must be finite and unscaled: check before,
    as a residual that has taken an infinity never recovers. One thread at a time.

    Args:
        options: equal on all ranks.
        hosts: ranks of the group by host: gradients are averaged densely inside a host. None:
            each rank is a host. ``find``: ranks that share memory are of one host.
    """

    accumulates = False  # momentum would be applied once for each pass

    def __init__(
        self,
        options: DGCOptions | None = None,
        *,
        hosts: Sequence[Sequence[int]] | Literal["find"] | None = None,
    ) -> None:
        self.options = options or DGCOptions()
        self.step = 0
        self._hosts = hosts
        self._group: ProcessGroup | None = None
        self._groups: ExchangeGroups | None = None
        self._how = Accumulation(
            momentum=self.options.momentum,
            nesterov=self.options.nesterov,
            mask_momentum=self.options.mask_momentum,
        )
        self._velocity: dict[str, Tensor] = {}
        self._residual: dict[str, Tensor] = {}
        self._columns: dict[str, int] = {}  # which column compresses a parameter
        self._loads: dict[int, int] = {}  # elements of each column's parameters

    @property
    def density(self) -> float:
        """The share of entries that the current step sends."""
        return self.options.density.at(self.step)

    def form(self, group: ProcessGroup | None = None) -> ExchangeGroups:
        """Make the groups of ranks, together with all ranks of `group`; `reduce` does it, too.

        Raises:
            UsageError: the groups were made for another group.
        """
        if self._groups is None:
            several = dist.is_available() and dist.is_initialized()
            hosts = None if self._hosts == "find" and not several else self._hosts
            self._groups = form(group, hosts_of(group) if hosts == "find" else hosts)
            self._group = group
        elif group is not self._group:
            raise UsageError(
                "gradients are compressed for one group of ranks, and this is another",
                where="DeepGradientCompression",
                fix="Make a compressor for each group",
            )
        return self._groups

    def reduce(
        self, named_gradients: Iterable[tuple[str, Tensor]], group: ProcessGroup | None = None
    ) -> None:
        """Replace gradients by the average over ranks of what the ranks send.

        Args:
            named_gradients: parameter names, and gradients in the shapes of the parameters, on one
                device; the same on all ranks.
            group: of the ranks; None for all ranks, or for one process.

        Cost: about 8 k bytes per host each way for k entries, by `exchange` and `value_dtype`.
        """
        gradients = list(named_gradients)
        flat = torch.cat([gradient.reshape(-1) for _, gradient in gradients])
        sizes = [gradient.numel() for _, gradient in gradients]
        views = [
            (name, view.view(gradient.shape))
            for (name, gradient), view in zip(gradients, flat.split(sizes), strict=True)
        ]
        self.reduce_buffer(flat, views, group)
        for (_, gradient), (_, view) in zip(gradients, views, strict=True):
            gradient.copy_(view)

    def reduce_buffer(
        self,
        buffer: Tensor,
        named_gradients: Iterable[tuple[str, Tensor]],
        group: ProcessGroup | None = None,
    ) -> None:
        """Do what `reduce` does for gradients that are views of one flat buffer, in place.

        Args:
            buffer: flat; nothing else than these gradients keeps its values.
            named_gradients: parameter names, and views of the buffer in the parameters' shapes.
            group: of the ranks; None for all ranks, or for one process.
        """
        groups = self.form(group)
        spans = _spans(buffer, named_gradients)
        flat = buffer if buffer.dtype is torch.float32 else buffer.to(torch.float32)
        if groups.inside is not None:
            dist.all_reduce(flat, group=groups.inside)
            flat.mul_(groups.hosts / groups.ranks)
        for span in spans:
            self._assign(span, groups)
        if self.density >= 1:
            self._reduce_whole(flat, spans, groups)
        else:
            self._reduce_sparse(flat, spans, groups)
        for span in spans:
            if not span.is_sparse:
                self._add_momentum(span, flat)
        if flat is not buffer:
            buffer.copy_(flat)

    def end_step(self) -> None:
        """Count a step: the density follows."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state by parameter name; the tensors are not copies.

        Each rank has residuals of its own: a checkpoint keeps the state of every rank.
        """
        return {
            "version": _STATE_VERSION,
            "step": self.step,
            "velocity": dict(self._velocity),
            "residual": dict(self._residual),
            "columns": dict(self._columns),
            "loads": dict(self._loads),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state that `state_dict` returned on the same rank; copies the tensors.

        Raises:
            UsageError: the state has another version.
        """
        if state.get("version") != _STATE_VERSION:
            raise UsageError(
                f"a state of version {state.get('version')} cannot be loaded",
                where="DeepGradientCompression",
                fix=f"Give a state of version {_STATE_VERSION}",
            )
        self.step = int(state["step"])
        self._velocity = {name: value.clone() for name, value in state["velocity"].items()}
        self._residual = {name: value.clone() for name, value in state["residual"].items()}
        self._columns = dict(state["columns"])
        self._loads = dict(state["loads"])

    def _assign(self, span: _Span, groups: ExchangeGroups) -> None:
        """Give a new parameter to the column with the fewest elements; all ranks find the same."""
        if not span.is_sparse or span.name in self._columns:
            return
        column = min(range(groups.columns), key=lambda column: self._loads.get(column, 0))
        self._columns[span.name] = column
        self._loads[column] = self._loads.get(column, 0) + span.length

    def _state_of(self, span: _Span, flat: Tensor) -> tuple[Tensor, Tensor]:
        for state in (self._velocity, self._residual):
            known = state.get(span.name)
            if known is None:
                state[span.name] = torch.zeros(span.length, device=flat.device)
            elif known.device != flat.device:
                state[span.name] = known.to(flat.device)
        return self._velocity[span.name], self._residual[span.name]

    def _clip_scale(self, gradient: Tensor, groups: ExchangeGroups) -> float:
        if self.options.clip_norm is None:
            return 1.0
        limit = self.options.clip_norm / math.sqrt(groups.hosts)
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        return limit / norm if norm > limit else 1.0

    def _reduce_sparse(self, flat: Tensor, spans: list[_Span], groups: ExchangeGroups) -> None:
        is_source = groups.column == 0
        dense = [span for span in spans if not span.is_sparse]
        means = torch.cat([span.of(flat) for span in dense]) if dense else flat[:0]
        work = None
        if dense and is_source and groups.across is not None:
            work = dist.all_reduce(means, group=groups.across, async_op=True)
        by_column: dict[int, list[_Span]] = {}
        for span in spans:
            if span.is_sparse:
                by_column.setdefault(self._columns[span.name], []).append(span)
        own = by_column.get(-1 if groups.column is None else groups.column, [])
        entries = self._select(flat, own, groups)
        flat.zero_()
        for column, parts in sorted(by_column.items()):
            self._exchange(flat, column, parts, entries, groups)
        if work is not None:
            work.wait()
        if dense:
            if groups.inside is not None:
                dist.broadcast(means, groups.peers[0], group=groups.inside)
            means.div_(groups.hosts)
            for span, mean in zip(dense, means.split([s.length for s in dense]), strict=True):
                span.of(flat).copy_(mean)

    def _select(self, flat: Tensor, spans: list[_Span], groups: ExchangeGroups) -> Entries:
        """Accumulate gradients; return what to send, rounded, by its place in the buffer."""
        indices, values = [flat.new_empty(0, dtype=torch.int64)], [flat.new_empty(0)]
        for span in sorted(spans, key=lambda span: span.start):
            velocity, residual = self._state_of(span, flat)
            gradient = span.of(flat)
            found = accumulate_and_select(
                gradient,
                velocity,
                residual,
                how=self._how,
                wanted=wanted_count(span.length, self.density),
                sample=sample_of(span.length, self.density, span.name, self.step),
                scale=self._clip_scale(gradient, groups),
            )
            sent = rounded(found.values, self.options.value_dtype)
            if sent is not found.values:
                residual[found.indices] = found.values - sent
            indices.append(found.indices + span.start)
            values.append(sent)
        return Entries(torch.cat(indices), torch.cat(values))

    def _exchange(
        self,
        flat: Tensor,
        column: int,
        spans: list[_Span],
        entries: Entries,
        groups: ExchangeGroups,
    ) -> None:
        """Add the average of what all hosts send of a column's parameters to the buffer."""
        plan = self._plan(flat, spans, groups)
        if column == groups.column:
            block, kept = plan.run(entries, groups.across)
            self._keep(kept, spans)
        else:
            block = torch.empty(plan.result_bytes, dtype=torch.uint8, device=flat.device)
        if groups.inside is not None:
            dist.broadcast(block, groups.peers[column], group=groups.inside)
        for found in plan.entries_of(block):
            add_entries(flat, found, 1 / groups.hosts)

    def _plan(self, flat: Tensor, spans: list[_Span], groups: ExchangeGroups) -> SparseAllReduce:
        chosen = self.options.exchange
        return SparseAllReduce(
            ranks=groups.hosts,
            length=flat.numel(),
            parts=tuple(
                Part(span.start, span.length, wanted_count(span.length, self.density))
                for span in sorted(spans, key=lambda span: span.start)
            ),
            dtype=self.options.value_dtype,
            method=method_for(groups.hosts) if chosen == "auto" else chosen,
        )

    def _keep(self, kept: Entries, spans: list[_Span]) -> None:
        """Put what an owner cut off into the residuals, for the next step."""
        if not kept.indices.numel():
            return
        indices, order = kept.indices.sort()
        values = kept.values[order]
        for span in spans:
            ends = indices.new_tensor([span.start, span.start + span.length])
            begin, end = torch.searchsorted(indices, ends).tolist()
            places = indices[begin:end] - span.start
            self._residual[span.name].index_add_(0, places, values[begin:end])

    def _reduce_whole(self, flat: Tensor, spans: list[_Span], groups: ExchangeGroups) -> None:
        """Send all that is accumulated: at a density of 1 there is nothing to select."""
        for span in spans:
            owner = self._columns[span.name] if span.is_sparse else 0
            if owner != groups.column:
                span.of(flat).zero_()
            elif span.is_sparse:
                velocity, residual = self._state_of(span, flat)
                gradient = span.of(flat)
                scale = self._clip_scale(gradient, groups)
                accumulate(gradient, velocity, residual, how=self._how, scale=scale)
                gradient.copy_(residual)
                residual.zero_()
                if self.options.mask_momentum:
                    velocity.zero_()
        if groups.across is not None:
            dist.all_reduce(flat, group=groups.across)
        if groups.inside is not None:
            dist.all_reduce(flat, group=groups.inside)
        flat.div_(groups.hosts)

    def _add_momentum(self, span: _Span, flat: Tensor) -> None:
        """Apply momentum to an averaged gradient, equally on all ranks."""
        if not self.options.momentum:
            return
        mean = span.of(flat)
        velocity = self._velocity.get(span.name)
        if velocity is None:
            velocity = torch.zeros_like(mean)
        self._velocity[span.name] = velocity = velocity.to(mean.device)
        velocity.mul_(self.options.momentum).add_(mean)
        if self.options.nesterov:
            mean.add_(velocity, alpha=self.options.momentum)
        else:
            mean.copy_(velocity)


def _spans(buffer: Tensor, named_gradients: Iterable[tuple[str, Tensor]]) -> list[_Span]:
    spans = []
    for name, gradient in named_gradients:
        if not gradient.numel():  # has nothing to send, and no address
            continue
        start = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size()
        assert 0 <= start <= buffer.numel() - gradient.numel(), "gradients are views of the buffer"
        spans.append(_Span(name, start, gradient.numel(), gradient.dim() > 1))
    return spans
