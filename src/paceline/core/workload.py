"""The Workload: the work of one training step of a model, layer by layer.

`training.capture` derives a Workload from a model without running it. A Workload knows nothing of
machines: the same one is predicted on a laptop and on a cluster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from paceline.core.machine import Operator, Phase
from paceline.core.record import Record, digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation(Record):
    """Equal operator calls of one layer in one phase.

    Attributes:
        phase: of the step.
        operator: the class that decides which rate applies.
        dtype: of the result.
        count: calls per step.
        flops: of one call.
        bytes: read and written by one call.
        assumed: name of the operator, if it belongs to none of the classes whose rates the probe
            measures: its predicted time is that of moving its bytes. Else empty.
    """

    phase: Phase
    operator: Operator
    dtype: str
    count: int
    flops: int
    bytes: int
    assumed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer(Record):
    """A module that holds operators of its own; the model's loss is a layer too.

    Attributes:
        name: path in the model, for example ``body.0.conv``; ``""`` is the model itself.
        kind: name of the module's class.
        parameter_bytes: one number for each parameter, in order of registration; a parameter that
            two layers share is counted in the first of them.
        frozen: positions in `parameter_bytes` of the parameters that get no gradient.
        buffer_bytes: of buffers, for example running means.
        saved_bytes: activations kept for the backward pass, each storage counted once.
        operations: of a step.
    """

    name: str
    kind: str
    parameter_bytes: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    buffer_bytes: int = 0
    saved_bytes: int = 0
    operations: tuple[Operation, ...] = ()

    @property
    def trained_bytes(self) -> tuple[int, ...]:
        """One number for each parameter that gets a gradient, in order of registration."""
        return tuple(size for i, size in enumerate(self.parameter_bytes) if i not in self.frozen)


class LayerEdge(NamedTuple):
    """A tensor that one layer computes and later ones use.

    Attributes:
        source: layer that computes it.
        destinations: layers that use it, each higher than `source`.
        bytes: for one microbatch.
    """

    source: int
    destinations: tuple[int, ...]
    bytes: int


class SharedParameter(NamedTuple):
    """A parameter that several layers use (tied weights).

    Attributes:
        layers: that use it, in rising order; it is counted in the first of them.
        bytes: of it.
    """

    layers: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset(Record):
    """Shape and cost of the training data.

    Attributes:
        samples_count: of one epoch.
        sample_bytes: of one sample as stored, on average.
        seconds_per_sample: for one worker to read and prepare one sample, as measured; 0 when the
            data lie in memory, ready.
    """

    samples_count: int
    sample_bytes: int
    seconds_per_sample: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(Record):
    """One training step of one rank; of a model in stages, one microbatch of a step.

    Attributes:
        name: of the model.
        batch: samples that one rank processes per step; of a model in stages, per microbatch.
        input_bytes: of one batch, inputs and targets.
        layers: in the order of the forward pass.
        edges: what these layers exchange, numbered in their order; only known where the layers are
            those of the model's graph, between which it can be cut into stages.
        shared: parameters that several layers use; known where `edges` are.
        largest_bytes: of the largest tensor that a step allocates.
        peak_bytes: of all tensors that are alive at the peak of a step: parameters, gradients,
            optimizer state, activations; 0 if that is not known.
        process_bytes: of a process before it has a model: interpreter, torch, what the user's file
            imports; 0 if that is not known.
        accumulation: forward and backward passes before an update; the operations are those of all.
        optimizer: name of its class.
        optimizer_bytes: state that it keeps between steps.
        dataset: None when the data are not known.
        measured: names of the fields that were measured.
        derived: names of the fields that were computed without running the model.
    """

    version: ClassVar[int] = 2  # version 1 knew no frozen parameters: all of its are trained
    name: str
    batch: int
    input_bytes: int
    layers: tuple[Layer, ...]
    edges: tuple[LayerEdge, ...] = ()
    shared: tuple[SharedParameter, ...] = ()
    largest_bytes: int = 0
    peak_bytes: int = 0
    process_bytes: int = 0
    accumulation: int = 1
    optimizer: str = ""
    optimizer_bytes: int = 0
    dataset: Dataset | None = None
    measured: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return the digest that identifies the model's step.

        What a process has before it has a model is measured, and differs a little each time.
        """
        for known, text in _DIGESTS:
            if known is self:
                return text
        text = digest({k: v for k, v in self.to_json().items() if k != "process_bytes"})
        _DIGESTS.append((self, text))
        return text

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(sum(layer.parameter_bytes) for layer in self.layers)

    @property
    def trained_bytes(self) -> int:
        """Bytes of the parameters that get a gradient: so many gradients there are, too."""
        return sum(sum(layer.trained_bytes) for layer in self.layers)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.buffer_bytes for layer in self.layers)

    @property
    def saved_bytes(self) -> int:
        """Bytes of the activations that wait for the backward pass."""
        return sum(layer.saved_bytes for layer in self.layers)

    @property
    def flops(self) -> int:
        """FLOPs of a step."""
        return sum(
            operation.count * operation.flops
            for layer in self.layers
            for operation in layer.operations
        )


# Of the last few models: plans of one are compared by the thousand, and a large one's takes 50 ms.
_DIGESTS: deque[tuple[Workload, str]] = deque(maxlen=4)
