"""The figures of a run that advice rests on; `gather` takes them from an analysis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.core.breakdown import PHASES, Breakdown
from paceline.report.out_of_core import Spilling
from paceline.report.pipeline import Bubble
from paceline.trace.analysis.host import HostTime
from paceline.trace.analysis.pipeline import PipelineUse

_NOT_WORKING = {"input", "transfer", "waiting", "checkpoint"}
_WORKING = tuple(phase for phase in PHASES if phase not in _NOT_WORKING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Steps that a rule may be about; seconds are means over them.

    Attributes:
        steps: how many.
        words: which, as they end a sentence: ``in steps 40 to 80``.
        rank: whose step; None for the mean over all ranks.
        step: seconds of its step by phase.
        others: the same of the other ranks; None without other ranks.
    """

    steps: int
    words: str
    rank: int | None
    step: Breakdown
    others: Breakdown | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerScope:
    """A straggler.

    Attributes:
        scope: its steps.
        cause: why it was late.
        late_s: its skew in these steps, the mean over them.
        place: the line or function between phases where it was late; or empty.
        is_lasting: whether it was late in most of them, for as long as the loop went on.
        ranks: of the run.
    """

    scope: Scope
    cause: str
    late_s: float
    place: str = ""
    is_lasting: bool = False
    ranks: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class UnevenEvaluation:
    """Ranks that evaluate while the other ranks wait; seconds are per step, means over the loop.

    Attributes:
        ranks: that evaluate; the others do not, or less than half as often.
        others: how many ranks wait for them.
        waiting_s: that each of the others waits, the mean over them.
    """

    ranks: tuple[int, ...]
    others: int
    waiting_s: float

    @property
    def mean_waiting_s(self) -> float:
        """The waiting as the mean over all ranks, as `Facts.step` has it."""
        return self.waiting_s * self.others / (self.others + len(self.ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the rules read; seconds are per step and the mean over ranks where nothing else is said.

    Attributes:
        steps: of the run.
        step: the mean step.
        undisturbed: the steps in which no rank was late by its data; None if there are none.
        stragglers: the ranks that were late.
        uneven_evaluation: ranks for whose evaluation the other ranks wait; None without.
        usual_waiting_s: what the ranks wait in the median step, the mean over them.
        host_work: named work of the script, seconds of the whole run.
        checkpoints: how many the run wrote.
        loader_workers: of the loader that the script iterates over; None if that is not known.
        loader_queued: share of what a data set does in which its worker lacked a core; 0 if that is
            not known.
        loader_stages_s: seconds that the workers of the store's loader spent by stage, in the whole
            run, by name of the stage; empty for other loaders.
        ranks: on one node.
        threads: of each rank; None if that is not known.
        cores: of the node; 0 if not known.
        cpu_s: seconds that the threads of a node's ranks ran.
        no_core_s: seconds that a rank's main thread was runnable without a core.
        reduced_bytes: that a rank gives to all-reduces.
        reduced_share: of the transfers of all collectives that all-reduces take, 0 to 1.
        missing_ranks: whether some ranks left no trace: waiting for them counts as communication.
        broadcast_share: the same of broadcasts of a model's buffers that DDP makes in each step.
        evaluations: how many the run made, on the rank that made most.
        pipeline: how the ranks of a model in stages spend a batch; None without stages.
        bubble: why they idle.
        spilling: what a memory budget takes; None without one.
        rebalanced: whether the run had the ranks' shares of a batch follow their speed.
    """

    steps: int
    step: Breakdown
    undisturbed: Scope | None = None
    stragglers: tuple[StragglerScope, ...] = ()
    uneven_evaluation: UnevenEvaluation | None = None
    usual_waiting_s: float = 0.0
    host_work: tuple[HostTime, ...] = ()
    checkpoints: int = 0
    loader_workers: int | None = None
    loader_queued: float = 0.0
    loader_stages_s: Mapping[str, float] = field(default_factory=dict)
    ranks: int = 1
    threads: int | None = None
    cores: int = 0
    cpu_s: float = 0.0
    no_core_s: float = 0.0
    reduced_bytes: float = 0.0
    reduced_share: float = 0.0
    broadcast_share: float = 0.0
    evaluations: int = 0
    missing_ranks: bool = False
    pipeline: PipelineUse | None = None
    bubble: Bubble | None = None
    spilling: Spilling | None = None
    rebalanced: bool = False

    @property
    def loop_s(self) -> float:
        """Seconds of the whole loop."""
        return self.step.total_s * self.steps

    @property
    def trains(self) -> bool:
        """Whether a step has passes of a model: one of an MPI program, recorded alone, has none."""
        return self.step.forward + self.step.backward > 0

    def share(self, saved_s: float) -> float:
        """Return the share of the loop that so many seconds in all steps together are."""
        return min(1.0, saved_s / self.loop_s)

    def share_of_steps(self, saving_s: float) -> float:
        """Return the share of the loop that so many seconds in each step are."""
        return self.share(saving_s * self.steps)


def working_s(step: Breakdown) -> float:
    """Return the seconds of a step in which a rank works, in all such phases together."""
    return math.fsum(getattr(step, phase) for phase in _WORKING)
