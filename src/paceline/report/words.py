"""Describes a run's outcome in a few sentences with numbers.

The sentences are made from analyses alone, so that ``paceline run``, ``why``, ``report`` and the
demo print the same verdict.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from paceline.core.breakdown import Breakdown
from paceline.report.delays import brief_steps, late_words, more_words
from paceline.report.units import format_seconds, format_share, plural
from paceline.trace.merge.steps import StepRule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from paceline.runs.result import Failure, RunResult
    from paceline.trace.analysis.blame import Straggler
    from paceline.trace.analysis.nans import NanValue
    from paceline.trace.merge.timing import Violations

DOING = {
    "input": "waiting for data",
    "copy": "copies to and from the device",
    "compilation": "compiling the model",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "transfer": "communication",
    "waiting": "waiting for other ranks",
    "checkpoint": "checkpoints",
    "evaluation": "evaluation",
    "host": "the script's own work between phases",
    "other": "the rest of the loop",
}
_LABELS = {"transfer": "communication"}
_MUCH = 2.0  # times as long as the ranks wait for each other
_LARGE = 0.2  # of the loop
_LOSSES = ("input", "copy", "compilation", "checkpoint", "host")  # phases that train nothing
NOTABLE_WAITING = 0.1  # of a step
_NOTABLE_COMPILATION = 0.05  # of the loop
_NO_STEP = (
    "No step was recorded, so nothing is known about stragglers: the script calls no optimizer, "
    "takes no batch from a DataLoader and makes no backward pass. Call paceline.step() once per "
    "iteration to mark steps."
)
STEP_RULES = {
    StepRule.SCRIPT: "A step ends with each call of paceline.step().",
    StepRule.OPTIMIZER: "A step ends with each step of the optimizer.",
    StepRule.OPTIMIZERS: "A step is one round of several optimizers that step in turn.",
    StepRule.LOADER: "No optimizer stepped: a step is one batch from the loader.",
    StepRule.BACKWARD: "No optimizer stepped: a step is one backward pass.",
    StepRule.PCONTROL: "A step ends with each MPI_Pcontrol(1).",
    StepRule.REPETITION: "A step is one repetition of the collectives of all ranks.",
    StepRule.RUN: "The whole run is one step: no collectives of all ranks repeat.",
    StepRule.NONE: "",
}
_NOT_WRITTEN = "A rank ended before its steps were written, so nothing is known about stragglers."
_ENDED_BEFORE = (
    "The run was ended before a step was recorded, so nothing is known about stragglers. If the "
    "loop had taken steps by then, call paceline.step() once per iteration to mark them."
)
_NONE_COMPLETED = (
    "No step was recorded before, so nothing is known about stragglers. If the loop had taken "
    "steps by then, call paceline.step() once per iteration to mark them."
)
_SEPARATE = (
    "The ranks took part in no common collective: each trained a model of its own, unless they "
    "communicate without torch.distributed. DistributedDataParallel trains one model on all ranks."
)


def summary_line(result: RunResult, run: Path) -> str:
    """Return one line: ranks, steps, step time, share of waiting, and the folder of the run."""
    parts = []
    if result.failure is not None:
        parts.append(failure_words(result.failure).rstrip("."))
    parts.append(plural(result.world_size, "rank"))
    steps = min((rank.steps for rank in result.ranks), default=0)
    if steps:
        parts.append(f"{plural(steps, 'step')}, median {format_seconds(result.step_time_s)}")
        total = mean_breakdown(result)
        if result.world_size > 1 and total.total_s > 0:
            parts.append(f"{format_share(total.waiting / total.total_s)} of the time waiting")
    else:
        parts.append("no step recorded")
    if result.nan is not None:
        parts.append(f"a value was NaN in step {result.nan.step} on rank {result.nan.rank}")
    parts += filter(None, [disk_words(result).rstrip(".")])
    if result.straggler is not None:
        late = result.straggler
        parts.append(f"rank {late.rank} was late {brief_steps(late)}")
    return f"{', '.join(parts)}; folder: {run}"


def disk_words(result: RunResult | None) -> str:
    """Return which ranks' disks were slower than their memory plans; empty if none was."""
    ranks = result.ranks if result is not None else ()
    slow = [rank.rank for rank in ranks if rank.memory is not None and rank.memory.corrected]
    if not slow:
        return ""
    whose = ", ".join(map(str, slow))
    return f"The disk for spilled tensors was slower than planned on rank {whose}: planned again."


def mean_breakdown(result: RunResult) -> Breakdown:
    """Return the seconds of a run by phase, as the mean over its ranks."""
    return Breakdown.mean(
        [
            Breakdown(**{phase.name: phase.measured_s for phase in rank.phases})
            for rank in result.ranks
        ]
    )


def verdict(  # noqa: PLR0913  # a keyword for each thing that a sentence is about
    stragglers: tuple[Straggler, ...],
    *,
    world_size: int,
    steps: int,
    total: Breakdown,
    failure: Failure | None = None,
    place: str = "at every all-reduce",
    most_late_rank: int | None = None,
    missing: tuple[int, ...] = (),
    pipeline: str = "",
    was_ended: bool = False,
) -> str:
    """Return the verdict on a run: one or two sentences, preceded by its failure if it failed.

    Args:
        stragglers: stragglers of an `Analysis`, the costliest first.
        world_size: number of ranks of the run.
        steps: number of steps that all ranks completed.
        total: seconds by phase, the mean over ranks.
        failure: failure of the rank that failed first; None if the run did not fail.
        place: where skew shows, from `sync_place`; empty if the ranks have no common collective.
        most_late_rank: the rank with most of the skew, if one rank stands out.
        missing: ranks that left no trace; nothing is known about them, nor about ranks that waited
            for them.
        pipeline: why the ranks of a model in stages idle, from `pipeline_words`.
        was_ended: whether somebody ended the run.
    """
    sentences = [] if failure is None else [failure_words(failure)]
    if missing:
        sentences.append(_missing_words(missing))
        if total.transfer > 0:
            whom = f"rank {missing[0]}" if len(missing) == 1 else "them"
            sentences.append(f"What is called communication may include waiting for {whom}.")
    if not steps:
        if failure is None:
            sentences.append(_ENDED_BEFORE if was_ended else _NO_STEP)
        else:
            sentences.append(_NOT_WRITTEN if failure.step else _NONE_COMPLETED)
    elif stragglers:
        sentences += _larger_loss(total)
        sentences.append(late_words(stragglers[0], world_size, place))
        if len(stragglers) > 1:
            sentences.append(more_words(stragglers[1:]))
    else:
        present = world_size - len(missing)
        if present > 1 and not place:
            sentences.append(f"{_SEPARATE} In {plural(steps, 'step')} {_spent_words(total)}")
        elif pipeline:
            sentences.append(f"No rank was late in {plural(steps, 'step')}: {_spent_words(total)}")
        else:
            sentences.append(_even_words(present, steps, total, most_late_rank))
    if steps and pipeline:
        sentences.append(pipeline)
    return " ".join(sentences)


def path_words(counts: Mapping[str, int]) -> str:
    """Return which paths moved the collectives, most collectives first; empty if none is known.

    Args:
        counts: collectives by path; an empty path is that of a backend that does not say it.

    >>> path_words({"gloo": 2, "shared memory": 1200})
    'Paths of the collectives: shared memory (1,200), gloo (2).'
    >>> path_words({"": 9})
    ''
    """
    if not any(counts):
        return ""
    paths = sorted(counts.items(), key=lambda item: -item[1])
    names = (f"{path or 'another backend'} ({count:,})" for path, count in paths)
    return f"Paths of the collectives: {', '.join(names)}."


def nan_words(nan: NanValue | None) -> str:
    """Return in which step the script first read a value that was not a number; empty without."""
    if nan is None:
        return ""
    return (
        "A value that the script read from a tensor (the loss, if that is what it logs) was NaN in "
        f"step {nan.step} on rank {nan.rank}. If the script reads it after the optimizer's step, "
        f"it is of step {max(0, nan.step - 1)}."
    )


def gap_words(untimed_count: int, mismatch_count: int, violations: Violations) -> list[str]:
    """Return a sentence for each kind of exchange whose time the trace does not tell.

    Args:
        untimed_count: number of collectives and messages whose completion was not seen.
        mismatch_count: number of collectives on which the ranks that joined do not agree.
        violations: what contradicted causality on the run's clock.
    """
    sentences = []
    if untimed_count:
        sentences.append(
            f"The backend does not show when {plural(untimed_count, 'collective')} completed "
            "(it queues them on the device), so how long they took is not known."
        )
    if mismatch_count:
        sentences.append(
            f"In {plural(mismatch_count, 'collective')} the ranks do not agree on operation or "
            "size: these are left out (paceline trace stats lists them)."
        )
    if violations.messages or violations.collectives:
        sentences.append(
            f"{plural(violations.messages, 'message')} and "
            f"{plural(violations.collectives, 'collective')} seemed to end before their last rank "
            f"began, by up to {format_seconds(violations.largest_ns / 1e9)}: an error of clocks. "
            "They end when that rank began."
        )
    return sentences


def phase_label(name: str) -> str:
    """Return a phase as tables and charts name it.

    >>> phase_label("transfer"), phase_label("input")
    ('communication', 'input')
    """
    return _LABELS.get(name, name)


def sync_place(operations: frozenset[str], syncs_per_step: float) -> str:
    """Return where other ranks notice that a rank is late, in words.

    Args:
        operations: names of the synchronising collectives of the run.
        syncs_per_step: synchronising collectives per step; if there are several, their skews add
            up to the skew of the step, so that none of these collectives shows all of it.
    """
    if operations == {"all_reduce"} and syncs_per_step < 1.5:
        return "at every all-reduce"
    return "in every step"


def failure_words(failure: Failure) -> str:
    """Return what ended a run, as a sentence."""
    where = f"in step {failure.step}, during {DOING.get(failure.phase, failure.phase)}"
    if failure.step == 0 and failure.phase == "other":
        where = "before the end of its first step"
    if failure.error.startswith("the ranks gave unlike tensors"):
        return f"{failure.error[0].upper()}{failure.error[1:]}, {where}."
    who = f"Rank {failure.rank}"
    if failure.child:
        who = f"{failure.child[0].upper()}{failure.child[1:]} of rank {failure.rank}"
    if failure.signal:
        why = f": {failure.error}" if failure.error else ""
        return f"{who} was killed by {failure.signal} {where}{why}."
    if failure.child:
        return f"{who} ended with {failure.error} {where}."
    kind, _, detail = failure.error.partition(": ")  # as launch.failures writes them
    if kind == "worked":
        return f"Rank {failure.rank} worked for longer than the group's timeout {where}: {detail}."
    if kind == "hung":
        return f"Rank {failure.rank} hung {where}: {detail}."
    if kind.startswith("left with"):  # exit code 0, or "without an exception"
        return f"Rank {failure.rank} {failure.error}, {where}."
    text = f"Rank {failure.rank} failed {where}"
    lines = failure.error.strip().splitlines()
    return f"{text}: {printable(lines[-1]).rstrip('.')}." if lines else f"{text}."


def printable(text: str) -> str:
    r"""Return `text` with escape codes and other control characters written out.

    >>> printable("red \x1b[31m")
    'red \\x1b[31m'
    """
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in text
    )


def _missing_words(missing: tuple[int, ...]) -> str:
    if len(missing) == 1:
        return f"Rank {missing[0]} left no trace, so only the other ranks are described."
    left = f"{len(missing)} ranks left no trace (first: {missing[0]})"
    return f"{left}, so only the other ranks are described."


def _even_words(world_size: int, steps: int, total: Breakdown, most_late_rank: int | None) -> str:
    spent = _spent_words(total)
    waiting = total.waiting / max(total.total_s, 1e-12)
    if world_size == 1:
        return f"One rank took {plural(steps, 'step')}: {spent}"
    if waiting >= NOTABLE_WAITING:
        whom = "not always for the same rank"
        if most_late_rank is not None:
            whom = f"mostly for rank {most_late_rank}, but in no regular pattern"
        return (
            f"No rank was late for long in {plural(steps, 'step')}, yet ranks wait for each other "
            f"{format_share(waiting)} of the time, {whom}; {spent}"
        )
    return f"No rank was late in {plural(steps, 'step')}: {spent}"


def _larger_loss(total: Breakdown) -> Iterator[str]:
    """Yield what costs all ranks much more than waiting for a late rank, if something does."""
    losses = {name: seconds for name, seconds in total.items() if name in _LOSSES}
    largest = max(losses, key=lambda name: losses[name])
    share = losses[largest] / max(total.total_s, 1e-12)
    if losses[largest] > _MUCH * total.waiting and share >= _LARGE:
        yield f"The largest loss is {DOING[largest]}: {format_share(share)} of the loop."


def _spent_words(total: Breakdown) -> str:
    """Return the largest phases; compiling, which is done once, comes apart from them."""
    compiled = total.compilation / max(total.total_s, 1e-12)
    begin, rest = "the largest part of a step is", total
    if compiled >= _NOTABLE_COMPILATION:
        rest = dataclasses.replace(total, compilation=0.0)
        begin = (
            f"{DOING['compilation']} took {format_share(compiled)} of the loop, and of the rest "
            "the largest part is"
        )
    shares = {name: seconds / max(rest.total_s, 1e-12) for name, seconds in rest.items()}
    first, second = sorted(shares, key=lambda name: -shares[name])[:2]
    return (
        f"{begin} {DOING[first]} ({format_share(shares[first])}), "
        f"followed by {DOING[second]} ({format_share(shares[second])})."
    )
