"""Messages between the ranks of a pipeline: posted early, matched by tag, awaited with a deadline.

A value that crosses a boundary between stages is a tensor, or tensors and plain values in lists,
tuples and dicts. Its description (structure, shapes, data types, plain values) is sent once for
each shape of a microbatch, and again never: both sides keep it, and from then on the receiver can
post its receives before the sender has computed anything.

    first microbatch of a shape     description, tensors
    all others                      tensors; the sender checks that they fit the description

Source of matching by edge and microbatch: the deadlocks of pipelines that rely on the order of
blocking sends, see `paceline.schedules.pipeline`.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from paceline.core.errors import DeadlineExceeded, RankLost, UsageError, first_line
from paceline.training.engine.ranks import new_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MOST_TENSORS = 32  # of one value
_KINDS = ("length", "description", "tensor", "agreement")
_GRACE_S = 3.0  # for another rank to write whom it waited for


_ONE_LEAF = pytree.treespec_dumps(pytree.tree_structure(0))  # of a value that is one tensor


class TensorForm(NamedTuple):
    """What a receiver must know of a tensor before it arrives."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """Return that of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Return a tensor to receive into."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class ValueForm:
    """The description of a value: what of it does not differ between microbatches of one shape.

    Attributes:
        structure: of lists, tuples and dicts, as torch writes it.
        leaves: a `TensorForm` for each tensor, and each plain value as it is.
    """

    structure: str
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> list[TensorForm]:
        """Of the tensors, in their order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorForm)]

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value with these tensors."""
        if self.structure == _ONE_LEAF and len(tensors) == 1:
            return tensors[0]
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, TensorForm) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, pytree.treespec_loads(self.structure))

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        return json.dumps([self.structure, [_leaf_to_json(leaf) for leaf in self.leaves]]).encode()

    @staticmethod
    def from_bytes(data: bytes) -> ValueForm:
        """Return what `to_bytes` wrote."""
        structure, leaves = json.loads(data)
        return ValueForm(structure, tuple(_leaf_from_json(kind, x) for kind, x in leaves))


def form_of(value: Any, where: str) -> tuple[ValueForm, list[torch.Tensor]]:
    """Return the description of a value, and its tensors.

    Args:
        value: that one stage hands to another one.
        where: names it in errors.

    Raises:
        UsageError: it is or has something that cannot be sent.
    """
    if isinstance(value, torch.Tensor):  # nearly always; a description as JSON takes longer
        return ValueForm(_ONE_LEAF, (TensorForm.of(value),)), [value]
    leaves, structure = pytree.tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise UsageError(
                f"a {type(leaf).__name__} crosses the boundary between two stages",
                where=where,
                why="stages send each other tensors, numbers, strings, lists, tuples and dicts",
                fix="Choose other sizes of the partitions, so that it stays within a stage",
            )
    if len(tensors) > _MOST_TENSORS:
        raise UsageError(
            f"{len(tensors)} tensors in one value cross the boundary between two stages",
            where=where,
            fix=f"Stack them: at most {_MOST_TENSORS} are sent",
        )
    forms = (TensorForm.of(x) if isinstance(x, torch.Tensor) else x for x in leaves)
    return ValueForm(pytree.treespec_dumps(structure), tuple(forms)), tensors


_PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device)


def _leaf_to_json(leaf: Any) -> list[Any]:
    if isinstance(leaf, TensorForm):
        return ["tensor", [list(leaf.shape), _name(leaf.dtype), leaf.requires_grad]]
    if isinstance(leaf, torch.Size):
        return ["size", list(leaf)]
    if isinstance(leaf, torch.dtype):
        return ["dtype", _name(leaf)]
    if isinstance(leaf, torch.device):
        return ["device", leaf.type]
    return ["plain", leaf]


def _leaf_from_json(kind: str, value: Any) -> Any:
    if kind == "tensor":
        shape, dtype, requires_grad = value
        return TensorForm(tuple(shape), getattr(torch, dtype), requires_grad)
    if kind == "size":
        return torch.Size(value)
    if kind == "dtype":
        return getattr(torch, value)
    return torch.device(value) if kind == "device" else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Tags:
    """Numbers that match a send with its receive.

    Args:
        edges: of the pipeline.
        microbatches: the most of a batch.
    """

    def __init__(self, edges: int, microbatches: int) -> None:
        self._edges, self._microbatches = edges, microbatches

    def tensor(self, edge: int, microbatch: int, place: int, *, is_gradient: bool) -> int:
        """Return the tag of a value's tensor."""
        number = (place * self._microbatches + microbatch) * self._edges + edge
        return (number * 2 + is_gradient) * len(_KINDS) + _KINDS.index("tensor")

    def description(self, edge: int, shape: int, kind: str, *, is_gradient: bool) -> int:
        """Return the tag of a description, or of its length; `shape` is 0 or 1."""
        number = shape * self._edges + edge
        return (number * 2 + is_gradient) * len(_KINDS) + _KINDS.index(kind)


def _agreement_tag(number: int) -> int:
    return number * len(_KINDS) + _KINDS.index("agreement")


class Transfers:
    """Sends and receives tensors for one rank of a group.

    Args:
        group: torch's; None: the default one.
        deadline_s: the longest wait for another rank.
    """

    def __init__(self, group: Any, deadline_s: float) -> None:
        self.group = group
        self._deadline = timedelta(seconds=deadline_s)
        self._rank = dist.get_rank(group)
        self._store = new_store(group, "pipeline")

    def send(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Any:
        """Start to send a tensor, which must stay unchanged until the work is over."""
        with self._naming(peer, what):
            return dist.isend(tensor, group=self.group, tag=tag, group_dst=peer)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int, what: str) -> Any:
        """Start to receive a tensor."""
        with self._naming(peer, what):
            return dist.irecv(tensor, group=self.group, tag=tag, group_src=peer)

    def wait(self, work: Any, peer: int, what: str) -> None:
        """Wait for a work.

        Raises:
            DeadlineExceeded: a rank did not answer; the error names it.
            RankLost: a rank ended; the error names it.
        """
        with self._naming(peer, what):
            work.wait(self._deadline)

    def send_description(self, form: ValueForm, peer: int, tags: tuple[int, int]) -> list[Any]:
        """Start to send a description; return the works with their tensors."""
        data = torch.frombuffer(bytearray(form.to_bytes()), dtype=torch.uint8)
        length = torch.tensor([data.numel()])
        return [
            (self.send(tensor, peer, tag, "a description"), tensor)
            for tensor, tag in zip((length, data), tags, strict=True)
        ]

    def receive_description(self, peer: int, tags: tuple[int, int], what: str) -> ValueForm:
        """Wait for a description."""
        length = torch.zeros(1, dtype=torch.int64)
        self.wait(self.receive(length, peer, tags[0], what), peer, what)
        data = torch.zeros(int(length), dtype=torch.uint8)
        self.wait(self.receive(data, peer, tags[1], what), peer, what)
        return ValueForm.from_bytes(data.numpy().tobytes())

    def agree(self, own: Sequence[int], peers: Sequence[int], what: str) -> list[list[int]]:
        """Return the numbers of all ranks of a pipeline; all of them call this.

        Not by a collective: an error names the rank that is missing.
        Cost: a message to the first rank, and one back.

        Args:
            own: numbers of this rank, as many as others have.
            peers: the ranks of the pipeline, by their places.
            what: it is for.

        Raises:
            DeadlineExceeded, RankLost: as for `wait`.
        """
        up, down = _agreement_tag(0), _agreement_tag(1)
        every = torch.zeros(len(peers), len(own), dtype=torch.int64)
        first = peers[0]
        if self._rank != first:
            sent = torch.tensor(own)
            works = [self.send(sent, first, up, what), self.receive(every, first, down, what)]
            for work in works:
                self.wait(work, first, what)
        else:
            every[0] = torch.tensor(own)
            coming = [
                (peer, self.receive(every[place + 1], peer, up, what))
                for place, peer in enumerate(peers[1:])
            ]
            for peer, work in coming:
                self.wait(work, peer, what)
            for peer, work in [(peer, self.send(every, peer, down, what)) for peer in peers[1:]]:
                self.wait(work, peer, what)
        numbers: list[list[int]] = every.tolist()
        return numbers

    def share(
        self, values: torch.Tensor, root: int, peers: Sequence[int], what: str
    ) -> Callable[[], None]:
        """Begin to give all ranks of a pipeline what one of them will have; return what ends it.

        The others receive from now on, so that the root need not wait for them at the end.

        Args:
            values: of the root, once the end is called there; the others have them afterwards.
            root: the rank that has them.
            peers: the ranks of the pipeline.
            what: they are.

        Raises:
            DeadlineExceeded, RankLost: as for `wait`; also at the end.
        """
        tag = _agreement_tag(2)
        if self._rank != root:
            work = self.receive(values, root, tag, what)
            return lambda: self.wait(work, root, what)

        def send() -> None:
            others = [peer for peer in peers if peer != root]
            for peer, work in [(peer, self.send(values, peer, tag, what)) for peer in others]:
                self.wait(work, peer, what)

        return send

    @contextlib.contextmanager
    def _naming(self, peer: int | None, what: str) -> Iterator[None]:
        """Turn a backend's error into one that names the rank which ended or hangs.

        That is not always the peer: where rank 0 is killed, rank 1 fails first and ends, and then
        rank 2. Rank 1 writes to the store whom it waited for, and rank 2 reads it.
        """
        try:
            yield
        except (RuntimeError, RankLost) as problem:
            raise self._lost(peer, what, problem) from problem

    def fail(self, why: str) -> None:
        """Say why this rank sends nothing more; other ranks read it where a wait of theirs ends."""
        with contextlib.suppress(RuntimeError):  # as in `_follow`
            self._store.set(f"failed/{self._rank}", why)

    def wait_for_all(self, work: Any, what: str) -> None:
        """Wait for a collective.

        Raises:
            DeadlineExceeded: a rank did not answer; the error names it if any rank knows which.
            RankLost: a rank ended; the same.
        """
        with self._naming(None, what):
            work.wait(self._deadline)

    def _lost(self, peer: int | None, what: str, problem: Exception) -> RankLost:
        text = first_line(problem)
        is_late = isinstance(problem, DeadlineExceeded) or "imed out" in text or "imeout" in text
        culprit = self._follow(peer)
        kind = DeadlineExceeded if is_late else RankLost
        why = f"waited {self._deadline.total_seconds():g} s" if is_late else text
        did = "did not answer" if is_late else "ended"
        failure = self._failure_of(culprit)
        if failure is not None:
            did, why = "failed", failure
        who = "a rank" if culprit is None else f"rank {culprit}"
        via = "" if peer in (culprit, None) else f", which rank {peer} waits for,"
        return kind(
            f"{who}{via} {did}",
            where=f"rank {self._rank}; {what}",
            why=why,
            fix=f"Look at the end of the log of {who}",
        )

    def _failure_of(self, rank: int | None) -> str | None:
        """Return what a rank said when it failed; None where it said nothing."""
        with contextlib.suppress(RuntimeError):  # as in `_follow`
            if rank is not None and self._store.check([f"failed/{rank}"]):
                return str(self._store.get(f"failed/{rank}").decode())
        return None

    def _follow(self, peer: int | None) -> int | None:
        """Return the rank at the end of the chain of those that wait for each other."""
        with contextlib.suppress(RuntimeError):  # the store's host may be what is lost
            if peer is not None:
                self._store.set(f"waited/{self._rank}", str(peer))
                if not self._store.check(["first"]):
                    self._store.set("first", str(peer))
            seen = {self._rank}
            while peer is not None and peer not in seen:
                seen.add(peer)
                key = f"waited/{peer}"
                self._store.wait([key], timedelta(seconds=_GRACE_S))
                peer = int(self._store.get(key))
            if peer is None:
                self._store.wait(["first"], timedelta(seconds=_GRACE_S))
                peer = int(self._store.get("first"))
        return peer
