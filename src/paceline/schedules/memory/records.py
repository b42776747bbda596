"""What a memory plan is made from, and the plan.

A step is a cycle of events, in the order in which the first step had them: a tensor is saved for
the backward pass, a saved tensor is needed, the optimizer comes to the state of a parameter.
Interval ``i`` lies between event ``i`` and the next event; the last one ends with the next step's
first event::

    event      0        1        2                 9        10
               |save a  |save b  |save c    ...    |need b  |need a      | next step
    interval   |---0----|---1----|                 |---9----|----10------|

What is counted is the memory of the whole process: `StepProfile.floor_bytes` was measured while
every tensor of the profile was away whenever it could be, so that a plan adds to it the tensors
that it keeps, and those that are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.record import Record
from paceline.core.workload import Operation

ASSUMED_BYTES_PER_S = 1e9  # of a disk that was not measured, or that nothing was moved to

Action = Literal["keep", "spill", "recompute"]
TensorKind = Literal["activation", "optimizer"]


class ManagedTensor(NamedTuple):
    """A tensor that a step has no use for between two events.

    Attributes:
        name: for people.
        kind: ``activation`` is saved for the backward pass; ``optimizer`` is state of a parameter,
            which is away from one step's update to the next one's.
        bytes: of its storage.
        saved: event at which its bytes are there; state was saved in the step before: negative.
        idle: first interval in which its memory is free unless it is kept.
        needed: event at which its bytes must be in memory again.
    """

    name: str
    kind: TensorKind
    bytes: int
    saved: int
    idle: int
    needed: int


class RecomputedModule(NamedTuple):
    """A module whose forward pass can run again instead of keeping what it saves.

    Attributes:
        name: in the model.
        compute_s: seconds of its forward pass.
        needed: event at which its first tensor is needed: it is recomputed there.
        tensors: indices of the tensors that come from it, in the profile.
    """

    name: str
    compute_s: float
    needed: int
    tensors: tuple[int, ...]


class TensorAction(NamedTuple):
    """What becomes of one tensor.

    Attributes:
        action: `keep`, `spill` or `recompute`.
        written_by: event at which the step waits until the tensor is written, because its memory
            is needed; of optimizer state negative when that is in the step before.
        read_at: event at which reading starts, at most `ManagedTensor.needed`.
    """

    action: Action
    written_by: int
    read_at: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpillTier(Record):
    """Where tensors are spilled to, as measured.

    Attributes:
        name: for people, for example the file system's mount point.
        write_bytes_per_s: of one writer.
        read_bytes_per_s: of one reader.
        cpu_s_per_byte: time of a core that a byte takes on its way there and back, in which the
            model cannot compute on this core.
        cores: that compute.
    """

    name: str = ""
    write_bytes_per_s: float
    read_bytes_per_s: float
    cpu_s_per_byte: float = 0.0
    cores: int = 1

    def __post_init__(self) -> None:
        if not min(self.write_bytes_per_s, self.read_bytes_per_s, self.cores) > 0:
            raise ConfigError(
                "rates and cores of a tier must be above 0",
                where="SpillTier",
                fix="Give rates as measured",
            )

    def transfer_s(self, size_bytes: int) -> float:
        """Return the seconds that writing and reading `size_bytes` take."""
        return size_bytes * (1 / self.write_bytes_per_s + 1 / self.read_bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile(Record):
    """One training step as it was recorded.

    Attributes:
        compute_s: seconds of each interval, without any transfer.
        floor_bytes: most memory in each interval with every tensor away that can be.
        tensors: that may be away.
        modules: that may be recomputed; no two share a tensor.
    """

    compute_s: tuple[float, ...]
    floor_bytes: tuple[int, ...]
    tensors: tuple[ManagedTensor, ...]
    modules: tuple[RecomputedModule, ...] = ()

    def __post_init__(self) -> None:
        events = len(self.floor_bytes)
        if len(self.compute_s) != events:
            raise ConfigError(
                "compute_s and floor_bytes have different lengths",
                where="StepProfile",
                fix="Give a value for each event",
            )
        for tensor in self.tensors:
            is_ordered = tensor.saved <= tensor.idle <= tensor.needed < events
            if not is_ordered or tensor.needed - tensor.saved > events or tensor.bytes < 0:
                raise ConfigError(
                    f"the events of {tensor} are not in order",
                    where="StepProfile",
                    fix="Give saved <= idle <= needed, at most one step apart",
                )

    @property
    def events(self) -> int:
        """Number of events of a step."""
        return len(self.floor_bytes)

    @property
    def step_s(self) -> float:
        """Seconds of a step in which nothing is spilled."""
        return sum(self.compute_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvents(Record):
    """A training step as it was captured: what `StepProfile` has, with work in place of seconds.

    Attributes:
        profile: of the step, without seconds; memory is that of tensors alone.
        work: the operators of each interval.
        modules: of each module of the profile: events at which its forward pass begins and ends.
        process_bytes: that a process has beside its tensors.
        parameter_bytes: of all parameters.
        gradient_bytes: of all gradients.
    """

    profile: StepProfile
    work: tuple[tuple[Operation, ...], ...]
    modules: tuple[tuple[int, int], ...] = ()
    process_bytes: int
    parameter_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan(Record):
    """What becomes of each tensor of a step, and what that costs.

    Attributes:
        budget_bytes: that the process's memory stays under.
        method: that chose: ``greedy``, ``milp`` (HiGHS), or ``fits`` when nothing need be chosen.
        actions: of the tensors of the profile, in its order.
        recomputed: names of the modules that are recomputed.
        peak_bytes: predicted.
        in_core_peak_bytes: predicted of a step that keeps everything.
        step_s: predicted.
        in_core_step_s: predicted of a step that keeps everything.
        exposed_s: seconds of a step in which it waits for transfers, predicted.
        spilled_bytes: written in a step; as many are read.
    """

    budget_bytes: int
    method: Literal["fits", "greedy", "milp"]
    actions: tuple[TensorAction, ...]
    recomputed: tuple[str, ...] = ()
    peak_bytes: int
    in_core_peak_bytes: int
    step_s: float
    in_core_step_s: float
    exposed_s: float
    spilled_bytes: int

    @property
    def slowdown(self) -> float:
        """The predicted time of a step, over that of a step which keeps everything."""
        return self.step_s / self.in_core_step_s if self.in_core_step_s else 1.0
