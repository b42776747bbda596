"""Executes a PipelineSchedule on one rank.

    for each action of this rank, in order:
        post the receives of this action and of the next ones
        wait for what it needs; compute
        send what it brought, without waiting

Sends stay alive until the step ends, or until it is known that they have arrived. The thread that
calls `run` does all of this; the backend's own threads move the data meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.core.errors import UsageError
from paceline.schedules.pipeline import PipelineAction, PipelineSchedule
from paceline.training.pipeline.microbatches import shape_of, split
from paceline.training.pipeline.transfers import Tags, TensorForm, ValueForm, form_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.training.pipeline.computing import StageComputing
    from paceline.training.pipeline.mesh import StageMesh
    from paceline.training.pipeline.stages import ValueEdge
    from paceline.training.pipeline.transfers import Transfers

_AHEAD = 2  # actions whose receives are posted before they are due


class _Message(NamedTuple):
    """One value of one microbatch on its way along an edge, or its gradient on the way back."""

    edge: int
    microbatch: int
    is_gradient: bool


@dataclass(slots=True)
class _Posted:
    """Receives of a message, and the tensors that they fill."""

    form: ValueForm
    works: list[Any]
    tensors: list[torch.Tensor]


@dataclass(slots=True)
class _Step:
    """What belongs to one batch."""

    schedule: PipelineSchedule
    inputs: list[dict[str, Any]]
    targets: list[Any]
    weights: list[float]
    shapes: list[int]  # of each microbatch: 0 as the first one, 1 as the last one
    keys: list[Any]  # the two shapes
    number: int = 0  # of the batch, from 1
    is_training: bool = True  # whether backward passes follow
    defers: bool = False  # whether they are split
    posted: dict[_Message, _Posted] = field(default_factory=dict)
    local: dict[_Message, Any] = field(default_factory=dict)
    sending: dict[_Message, list[tuple[Any, torch.Tensor]]] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    backwards: dict[int, int] = field(default_factory=dict)  # ended, by stage


class PipelineRuntime:
    """Runs batches through the stages of this rank, together with the other ranks of a pipeline.

    Args:
        stages: that this rank computes, by number.
        edges: of the whole model.
        mesh: of the ranks.
        transfers: to the peers; None where this rank has all stages.
        microbatches: the most of a batch.
        device: on which tensors are received.
        on_stage_end: called with a stage whose last backward pass of a batch has ended.
        whole: paths of the inputs that all microbatches get as they are.
    """

    def __init__(
        self,
        stages: dict[int, StageComputing],
        edges: Sequence[ValueEdge],
        mesh: StageMesh,
        transfers: Transfers | None,
        *,
        microbatches: int,
        device: torch.device,
        on_stage_end: Callable[[int], None] = lambda stage: None,
        whole: frozenset[str] = frozenset(),
    ) -> None:
        self._whole = whole
        self._stages, self._edges = stages, tuple(edges)
        self._peers, self._rank, self._transfers = mesh.pipeline, mesh.place, transfers
        self._device, self._on_stage_end = device, on_stage_end
        self._tags = Tags(max(1, len(self._edges)), microbatches)
        self._into = {n: self._numbers("destination", n) for n in stages}
        self._out_of = {n: self._numbers("source", n) for n in stages}
        self._forms: dict[tuple[int, bool, Any], ValueForm] = {}
        self._batches = 0

    def _numbers(self, end: str, stage: int) -> list[int]:
        return [n for n, edge in enumerate(self._edges) if getattr(edge, end) == stage]

    def run(
        self,
        schedule: PipelineSchedule,
        inputs: dict[str, Any],
        target: Any,
        sizes: list[int],
    ) -> torch.Tensor | None:
        """Run a batch forwards and backwards; return the mean loss on the rank of the last stage.

        Args:
            schedule: of as many microbatches as there are sizes.
            inputs: of the model, by name.
            target: for the loss.
            sizes: samples of each microbatch.

        Raises:
            RankLost: another rank ended, or does not answer; the error names it.
            UsageError: a value has another form than those of earlier microbatches of its shape.
        """
        actions = schedule.actions[self._rank]
        step = self._step(schedule, inputs, target, sizes)
        step.defers = any(action.kind == "backward_weight" for action in actions)
        try:
            self._perform_all(step, actions)
        finally:
            self._forget()
        return torch.stack(step.losses).sum() if step.losses else None

    def run_forward(
        self, schedule: PipelineSchedule, inputs: dict[str, Any], sizes: list[int]
    ) -> list[Any]:
        """Run a batch forwards; return what the model returns, on the rank of the last stage.

        Args:
            schedule: says which rank has which stage.
            inputs: of the model, by name.
            sizes: samples of each microbatch.

        Returns:
            An entry for each microbatch; none on other ranks.

        Raises:
            RankLost, UsageError: as for `run`.
        """
        step = self._step(schedule, inputs, None, sizes)
        step.is_training = False
        # All ranks take the microbatches in this order, and stages in the order of data flow.
        actions = [
            PipelineAction("forward", stage, microbatch)
            for microbatch in range(len(sizes))
            for stage in sorted(self._stages)
        ]
        try:
            self._perform_all(step, actions)
            return [value for part in self._stages.values() for value in part.returned]
        finally:
            self._forget()

    def _step(
        self, schedule: PipelineSchedule, inputs: dict[str, Any], target: Any, sizes: list[int]
    ) -> _Step:
        parts = split(inputs, sizes, self._whole)
        keys = [shape_of(parts[0]), shape_of(parts[-1])]
        self._batches += 1
        return _Step(
            schedule=schedule,
            inputs=parts,
            targets=split(target, sizes),
            weights=[size / sum(sizes) for size in sizes],
            shapes=[0 if shape_of(part) == keys[0] else 1 for part in parts],
            keys=keys,
            number=self._batches,
        )

    def _perform_all(self, step: _Step, actions: Sequence[PipelineAction]) -> None:
        for place, action in enumerate(actions):
            for coming in actions[place : place + 1 + _AHEAD]:
                self._post(step, coming)
            self.perform(step, action)
        for message in list(step.sending):
            self._end_send(step, message)

    def _forget(self) -> None:
        for computing in self._stages.values():
            computing.forget()

    # --- actions -----------------------------------------------------------------------------

    def perform(self, step: _Step, action: PipelineAction) -> None:
        """Perform an action of this rank: wait for what it needs, compute, send what it brought.

        A recorder sees actions here.
        """
        if action.kind == "forward":
            self._forward(step, action.stage, action.microbatch)
        elif action.kind == "backward_weight":
            self._stages[action.stage].backward_weight(action.microbatch)
        else:
            self._backward(step, action.stage, action.microbatch)
        if action.kind in ("backward", "backward_weight"):
            self._count_backward(step, action.stage)

    def _count_backward(self, step: _Step, stage: int) -> None:
        step.backwards[stage] = step.backwards.get(stage, 0) + 1
        if step.backwards[stage] == step.schedule.microbatches:
            self._on_stage_end(stage)

    def _forward(self, step: _Step, stage: int, microbatch: int) -> None:
        computing = self._stages[stage]
        received = {}
        for number in self._into[stage]:
            message = _Message(number, microbatch, False)
            form, tensors = self._take(step, message)
            leaves = [
                tensor.requires_grad_(tensor_form.requires_grad)
                for tensor, tensor_form in zip(tensors, form.tensors, strict=True)
            ]
            received[self._edges[number].value] = form.build(leaves)

        def loss_of(outputs: Any) -> torch.Tensor:
            loss = computing.options.loss_fn(outputs, step.targets[microbatch])
            return loss * step.weights[microbatch]

        values = computing.forward(
            microbatch,
            step.inputs[microbatch],
            received,
            loss_of if step.is_training else None,
            defers=step.defers,
        )
        if computing.stage.is_last and step.is_training:
            step.losses.append(computing.loss(microbatch))
        for number in self._out_of[stage]:
            form, tensors = form_of(values[self._edges[number].value], self._edges[number].value)
            self._hand(step, _Message(number, microbatch, False), form, tensors)

    def _backward(self, step: _Step, stage: int, microbatch: int) -> None:
        gradients: dict[str, list[Any]] = {}
        for number in self._out_of[stage]:
            form, tensors = self._take(step, _Message(number, microbatch, True))
            brought = form.build(tensors)
            value = self._edges[number].value
            gradients[value] = _sums(gradients.get(value), brought)
            if tensors:  # their sender has received what they are the gradients of
                self._end_send(step, _Message(number, microbatch, False))
        brought = self._stages[stage].backward(microbatch, gradients)
        for number in self._into[stage]:
            message, value = _Message(number, microbatch, True), self._edges[number].value
            gradients_of = self._filled(brought[value], self._known(step, message))
            form, tensors = form_of(gradients_of, value)
            self._hand(step, message, form, tensors)

    def _filled(self, gradients: list[Any], known: ValueForm | None) -> list[Any]:
        """Return gradients with zeros where there is none, and other microbatches had one."""
        if known is None or len(known.leaves) != len(gradients):
            return gradients
        return [
            form.empty(self._device).zero_()
            if gradient is None and isinstance(form, TensorForm)
            else gradient
            for gradient, form in zip(gradients, known.leaves, strict=True)
        ]

    # --- messages ----------------------------------------------------------------------------

    def _hand(
        self, step: _Step, message: _Message, form: ValueForm, tensors: list[torch.Tensor]
    ) -> None:
        """Give a value to the stage at the other end of an edge."""
        edge = self._edges[message.edge]
        receiver = edge.source if message.is_gradient else edge.destination
        known = self._known(step, message)
        if known is not None:
            self._check_form(form, known, edge)
        if receiver in self._stages:
            self._learn(step, message, form)
            step.local[message] = [tensor.detach() for tensor in tensors]
            return
        assert self._transfers is not None
        peer = self._peers[step.schedule.rank_of[receiver]]
        works = step.sending.setdefault(message, [])
        if known is None:
            tags = self._description_tags(step, message)
            works += self._transfers.send_description(form, peer, tags)
            self._learn(step, message, form)
        what = self._named(message)
        for place, tensor in enumerate(tensors):
            sent = tensor.detach().contiguous()
            tag = self._tag(message, place)
            works.append((self._transfers.send(sent, peer, tag, what), sent))

    def _post(self, step: _Step, action: PipelineAction) -> None:
        """Post the receives of an action, as far as the forms of its values are known."""
        is_gradient = action.kind in ("backward", "backward_input")
        into = (self._out_of if is_gradient else self._into)[action.stage]
        for number in () if action.kind == "backward_weight" else into:
            message = _Message(number, action.microbatch, is_gradient)
            if message not in step.posted and not self._is_local(message):
                form = self._known(step, message)
                if form is not None:
                    self._receive(step, message, form)

    def _receive(self, step: _Step, message: _Message, form: ValueForm) -> None:
        assert self._transfers is not None
        peer, what = self._peer(step, message), self._named(message)
        tensors = [tensor_form.empty(self._device) for tensor_form in form.tensors]
        works = [
            self._transfers.receive(tensor, peer, self._tag(message, place), what)
            for place, tensor in enumerate(tensors)
        ]
        step.posted[message] = _Posted(form, works, tensors)

    def _take(self, step: _Step, message: _Message) -> tuple[ValueForm, list[torch.Tensor]]:
        """Return the form and the tensors of a message; wait for it."""
        if self._is_local(message):
            form = self._known(step, message)
            assert form is not None
            return form, step.local.pop(message)
        assert self._transfers is not None
        peer, what = self._peer(step, message), self._named(message)
        if message not in step.posted:
            form = self._known(step, message)
            if form is None:
                tags = self._description_tags(step, message)
                form = self._transfers.receive_description(peer, tags, what)
                self._learn(step, message, form)
            self._receive(step, message, form)
        posted = step.posted.pop(message)
        for work in posted.works:
            self._transfers.wait(work, peer, what)
        return posted.form, posted.tensors

    def _end_send(self, step: _Step, message: _Message) -> None:
        """Release what was sent; it has arrived, or the step is over."""
        for work, _tensor in step.sending.pop(message, ()):
            assert self._transfers is not None
            edge = self._edges[message.edge]
            receiver = edge.source if message.is_gradient else edge.destination
            peer = self._peers[step.schedule.rank_of[receiver]]
            self._transfers.wait(work, peer, self._named(message))

    # --- what is known of a message ----------------------------------------------------------

    def _is_local(self, message: _Message) -> bool:
        edge = self._edges[message.edge]
        return edge.source in self._stages and edge.destination in self._stages

    def _peer(self, step: _Step, message: _Message) -> int:
        """Return the rank that sends a message to this one."""
        edge = self._edges[message.edge]
        sender = edge.destination if message.is_gradient else edge.source
        return self._peers[step.schedule.rank_of[sender]]

    def _key(self, step: _Step, message: _Message) -> tuple[int, bool, Any]:
        shape = step.keys[step.shapes[message.microbatch]]
        return message.edge, message.is_gradient, (step.is_training, shape)

    def _known(self, step: _Step, message: _Message) -> ValueForm | None:
        return self._forms.get(self._key(step, message))

    def _learn(self, step: _Step, message: _Message, form: ValueForm) -> None:
        self._forms[self._key(step, message)] = form

    def _tag(self, message: _Message, place: int) -> int:
        edge, microbatch, is_gradient = message
        return self._tags.tensor(edge, microbatch, place, is_gradient=is_gradient)

    def _description_tags(self, step: _Step, message: _Message) -> tuple[int, int]:
        shape = step.shapes[message.microbatch]
        tags = [
            self._tags.description(message.edge, shape, kind, is_gradient=message.is_gradient)
            for kind in ("length", "description")
        ]
        return tags[0], tags[1]

    def _named(self, message: _Message) -> str:
        edge = self._edges[message.edge]
        of = "the gradient of " if message.is_gradient else ""
        stages = f"stage {edge.source} to {edge.destination}"
        return f"{of}{edge.value}, {stages}, microbatch {message.microbatch}"

    def _check_form(self, form: ValueForm, known: ValueForm, edge: ValueEdge) -> None:
        """Refuse a value of another form than the receiver expects.

        Raises:
            UsageError: it has another form.
        """
        if form == known:
            return
        raise UsageError(
            f"{edge.value} has another form than before",
            where=f"stage {edge.source} to {edge.destination}",
            why=f"{form.leaves} after {known.leaves}, for microbatches of one shape; shapes and "
            "plain values that depend on the data cannot cross the boundary between two stages",
            fix="Choose other sizes of the partitions, so that it stays within a stage; after "
            "layers were frozen, prepare the model again",
        )


def _sums(before: list[Any] | None, brought: list[Any]) -> list[Any]:
    """Return the sums of gradients of several users of a value; None where no user has one."""
    if before is None:
        return brought
    return [
        other if own is None else own if other is None else own + other
        for own, other in zip(before, brought, strict=True)
    ]
