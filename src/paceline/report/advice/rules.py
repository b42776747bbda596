"""What would make a run faster: rules from measured figures to a change and the time that it saves.

Every rule is a pure function of `Facts`, listed in `RULES`. It estimates what a change saves by a
formula that stands beside it, never more than the phase that the time comes from, and names the
figures that the estimate rests on. A saving below `LEAST_SHARE` of the loop is not worth a change
of somebody's script, and is not proposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.record import Record
from paceline.report.advice.facts import working_s
from paceline.report.delays import at
from paceline.report.pipeline import slowest_stage, with_more_share
from paceline.report.units import format_bytes, format_seconds, format_share, plural
from paceline.report.words import NOTABLE_WAITING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.report.advice.facts import Facts, Scope, StragglerScope

LEAST_SHARE = 0.02  # of the loop
LEAST_STEPS = 20  # of a run: fewer say too little about the next run
MOST_ADVICE = 4
BETWEEN_RANKS = frozenset({"waiting", "transfer"})  # phases that need the traces of all ranks
_LACK_CORES = 0.2  # of what a data set does
MOST_WORKERS = 8  # that one rank is advised to have
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice(Record):
    """A change, and what it would save.

    Attributes:
        rule: name of the rule.
        phase: that the saved time comes from; ``computing`` for all phases of work together.
        action: what to do and what it saves, as a sentence.
        evidence: the figures that it rests on, as a sentence.
        saving_s: seconds of a step that it would save, at most, in the steps that it is about.
        phase_s: seconds of the phase in these steps.
        share: of the whole loop that it would save, 0 to 1.
    """

    rule: str
    phase: str
    action: str
    evidence: str
    saving_s: float
    phase_s: float
    share: float

    @property
    def saving(self) -> str:
        """What it saves of the whole loop, as a sentence."""
        return f"Saves up to {format_share(self.share)} of the loop."

    @property
    def sentence(self) -> str:
        """All that it says."""
        return f"{self.action} {self.saving} {self.evidence}"


def advise(facts: Facts) -> tuple[Advice, ...]:
    """Return what would help, the largest saving first; empty if nothing is worth a change.

    Without the traces of all ranks, nothing is proposed against waiting or communication: which of
    the two a rank did, and for whom, is not known.
    """
    if facts.steps < LEAST_STEPS or facts.loop_s <= 0:
        return ()
    proposals = [advice for rule in RULES for advice in rule(facts)]
    for advice in proposals:
        assert 0 <= advice.saving_s <= advice.phase_s * (1 + 1e-9), advice
    unknown = BETWEEN_RANKS if facts.missing_ranks else frozenset()
    chosen = [
        advice
        for advice in proposals
        if advice.share >= LEAST_SHARE and advice.phase not in unknown
    ]
    return tuple(sorted(chosen, key=lambda advice: -advice.share)[:MOST_ADVICE])


# --- input ------------------------------------------------------------------------------------


def loader_workers(facts: Facts) -> Iterator[Advice]:
    """Propose workers that load the next batches while the ranks compute.

    Workers that load a batch in `production_s` deliver one every `production_s / workers`; a step
    takes that or its own work, whichever is longer, and no less than the cores allow. One number of
    workers is proposed for all steps, the one for those in which most is saved. None is where those
    that there are lack cores: more of them would take them from each other.
    """
    if facts.loader_queued > _LACK_CORES:
        return
    scopes = [late.scope for late in facts.stragglers if late.cause == "data"]
    if facts.undisturbed is not None:
        scopes.append(facts.undisturbed)
    scopes = [scope for scope in scopes if scope.step.input > 0]
    if not scopes:
        return
    best = max(scopes, key=lambda scope: scope.steps * _best_workers(facts, scope)[1])
    workers, saving_s = _best_workers(facts, best)
    saved_s = sum(scope.steps * _saving_by_workers(facts, scope, workers) for scope in scopes)
    whose = "the ranks wait" if best.rank is None else f"rank {best.rank} waits"
    yield Advice(
        rule="loader_workers",
        phase="input",
        saving_s=saving_s,
        phase_s=best.step.input,
        share=facts.share(saved_s),
        action=f"{_workers_action(facts, workers)} would hide {_of(saving_s, best.step.input)} of "
        f"waiting for data{best.words and ' ' + best.words}{_beyond_cores(facts, workers)}.",
        evidence=f"Of a mean step of {format_seconds(best.step.total_s)} {whose} "
        f"{format_seconds(best.step.input)} for data{_workers_words(facts.loader_workers)}.",
    )


def _best_workers(facts: Facts, scope: Scope) -> tuple[int, float]:
    """Return the fewest workers that save all that workers can save, and the seconds they save."""
    if facts.loader_workers is None:
        return 1, _saving_by_workers(facts, scope, 1)
    least = facts.loader_workers + 1
    savings = [
        (workers, _saving_by_workers(facts, scope, workers))
        for workers in range(least, max(least, MOST_WORKERS) + 1)
    ]
    best_s = max(saving_s for _, saving_s in savings)
    return next((n, saving_s) for n, saving_s in savings if saving_s >= 0.98 * best_s)


def _saving_by_workers(facts: Facts, scope: Scope, workers: int) -> float:
    step_s = scope.step.total_s
    bounds = [facts.cpu_s / facts.cores if facts.cores else 0.0]
    for ranks_step in (scope.step, scope.others):
        if ranks_step is None:
            continue
        production_s = ranks_step.input
        if facts.loader_workers and ranks_step.input > 0:
            production_s = step_s * facts.loader_workers
        busy_s = ranks_step.total_s - ranks_step.input
        if ranks_step is scope.others:  # they would wait less, too
            busy_s -= ranks_step.waiting
        bounds += [busy_s, production_s / workers]
    return max(0.0, min(scope.step.input, step_s - max(bounds)))


def _workers_action(facts: Facts, workers: int) -> str:
    if facts.loader_workers is None:
        return "Loading the next batch while the ranks compute"
    count = workers - facts.loader_workers if facts.loader_workers else workers
    more = " more" if facts.loader_workers else ""
    return f"{_number(count).capitalize()}{more} loader worker{'s' if count != 1 else ''}"


def _beyond_cores(facts: Facts, workers: int) -> str:
    """Return what to know of more workers than a rank has cores; empty for no more."""
    cores = max(1, facts.cores // facts.ranks)
    if not facts.cores or facts.loader_workers is None or workers <= cores:
        return ""
    return (
        f" ({workers} workers are more than the {plural(cores, 'core')} of a rank: enough only if "
        "they mostly wait for storage)"
    )


def _workers_words(workers: int | None) -> str:
    if workers is None:
        return ""
    return (
        "; its loader has no workers"
        if not workers
        else f"; its loader has {plural(workers, 'worker')}"
    )


# What makes a stage of the store's loader shorter. Each phrase is the subject of a sentence.
AGAINST_STAGE = {
    "read": "Reading samples in half the time (the pack on faster storage, shuffle='block')",
    "verify": "Verifying half as many bytes (verify='first' verifies once what stays in memory)",
    "decode": "Decoding images in half the time (pip install 'paceline[images]'; "
    "decode=RandomCrop(size), which decodes what it shows; smaller images in the pack)",
    "transform": "Transforming samples in half the time (batched, on the GPU; or "
    "worker_kind='process' if it is Python code that holds the GIL)",
    "collate": "Collating batches in half the time (without a transform, images are decoded "
    "into the batch)",
}


def faster_stage(facts: Facts) -> Iterator[Advice]:
    """Propose to halve the stage in which the store's loader spends most, if the loop waits for it.

    `n` workers that spend `loader_s` for a step produce it in `loader_s / n`; a stage that takes
    the share `f` of that and is halved saves `f / 2` of it, and no more than the loop waits.
    """
    total_s = math.fsum(facts.loader_stages_s.values())
    if not total_s or facts.step.input <= 0:
        return
    stage, spent_s = max(facts.loader_stages_s.items(), key=lambda item: item[1])
    production_s = spent_s / facts.steps / (facts.loader_workers or 1)
    saving_s = min(facts.step.input, production_s / 2)
    shares = [
        f"{name} {format_share(seconds / total_s)}"
        for name, seconds in sorted(facts.loader_stages_s.items(), key=lambda item: -item[1])
        if name != stage
    ]
    rest = f" ({', '.join(shares)})" if shares else ""
    yield Advice(
        rule="faster_stage",
        phase="input",
        saving_s=saving_s,
        phase_s=facts.step.input,
        share=facts.share_of_steps(saving_s),
        action=f"{AGAINST_STAGE[stage]} would hide {_of(saving_s, facts.step.input)} of waiting "
        "for data.",
        evidence=f"{stage.capitalize()} takes {format_share(spent_s / total_s)} of the loader's "
        f"time{rest}.",
    )


# --- waiting ----------------------------------------------------------------------------------

# What to do about a straggler, by cause; {rank} is the straggler. `data` has a rule of its own.
AGAINST_CAUSE = {
    "compute": "Giving rank {rank} as much to compute as the other ranks",
    "slow_core": "Giving rank {rank} a core as fast as the other ranks' (its clock is lower, or "
    "another tenant shares the physical core)",
    "not_running": "Leaving rank {rank} its cores (another process takes them)",
    "blocked": "Taking the lock, sleep or I/O of rank {rank} out of its step",
    "stopped": "Keeping rank {rank} from being stopped",
    "checkpoint": "Writing rank {rank}'s checkpoints in the background, or a part on each rank,",
    "evaluation": "Evaluating a part on each rank, in the same steps,",
    "compilation": "Compiling on all ranks in the same steps (code for shapes of its own: "
    "dynamic=True)",
    "gc": "Collecting garbage on all ranks in the same steps (gc.disable(), then gc.collect() "
    "every n-th step)",
}


def help_straggler(facts: Facts) -> Iterator[Advice]:
    """Propose to remove what makes a rank late: the others stop waiting for as long as it is late.

    They save its skew, and never more than they wait.
    """
    for late in facts.stragglers:
        others = late.scope.others
        if others is None or late.cause not in AGAINST_CAUSE or _evaluates(facts, late):
            continue
        if late.cause == "compute" and facts.bubble is not None:  # for which `even_stages` is
            continue
        saving_s = min(late.late_s, others.waiting)
        if late.cause == "evaluation":  # the others then evaluate for as long as their part takes
            saving_s *= 1 - 1 / late.ranks
        yield Advice(
            rule=f"straggler_{late.cause}",
            phase="waiting",
            saving_s=saving_s,
            phase_s=others.waiting,
            share=facts.share(saving_s * late.scope.steps),
            action=f"{_against(late)} would save "
            f"{_of(saving_s, others.waiting)} of waiting {late.scope.words}.",
            evidence=f"{_lateness(late)}, and the other ranks wait "
            f"{format_seconds(others.waiting)}.",
        )


def _lateness(late: StragglerScope) -> str:
    if late.scope.steps == 1:
        return f"Rank {late.scope.rank} is {format_seconds(late.late_s)} late in this step"
    return (
        f"On average rank {late.scope.rank} is {format_seconds(late.late_s)} late in each of "
        "these steps"
    )


def _against(late: StragglerScope) -> str:
    if not late.place:
        return AGAINST_CAUSE[late.cause].format(rank=late.scope.rank)
    return f"Doing less often, or in a thread, what rank {late.scope.rank} does {at(late.place)}"


def rebalance(facts: Facts) -> Iterator[Advice]:
    """Propose shares of a batch by speed, where a rank is late up to the end of the loop.

    A rank that is busy for `slow_s` in a step and W - 1 others that are for `fast_s` have the same
    work; with shares by their speed all are busy for W / (1 / slow_s + (W - 1) / fast_s).
    """
    if facts.rebalanced or facts.bubble is not None or not (facts.trains and facts.reduced_bytes):
        return
    for late in facts.stragglers:
        others = late.scope.others
        if others is None or not late.is_lasting or late.cause not in _BY_SAMPLE:
            continue
        if late.place:  # which takes as long with fewer samples
            continue
        fast_s = others.total_s - others.waiting - others.transfer
        late_s = min(late.late_s, others.waiting)
        if fast_s <= 0:
            continue
        slow_s = fast_s + late_s
        even_s = late.ranks / (1 / slow_s + (late.ranks - 1) / fast_s)
        saving_s = slow_s - even_s
        yield Advice(
            rule="rebalance",
            phase="waiting",
            saving_s=saving_s,
            phase_s=others.waiting,
            share=facts.share(saving_s * late.scope.steps),
            action=f"Where rank {late.scope.rank} stays slower, fewer samples of each batch for it "
            f"(paceline run --rebalance) would save {_of(saving_s, others.waiting)} of waiting "
            f"{late.scope.words}.",
            evidence=f"It is busy for {format_seconds(slow_s)} of a step, the other ranks for "
            f"{format_seconds(fast_s)} with as many samples.",
        )
        return


# Causes that make each sample take longer; the others are of a step, whatever its samples.
_BY_SAMPLE = ("data", "compute", "slow_core", "not_running", "stopped")


def _evaluates(facts: Facts, late: StragglerScope) -> bool:
    """Return whether a rank is late since it evaluates, for which `share_evaluation` is."""
    uneven, others = facts.uneven_evaluation, late.scope.others
    if uneven is None or others is None or late.scope.rank not in uneven.ranks:
        return False
    return uneven.waiting_s * facts.steps > others.waiting * late.scope.steps / 2


def even_batches(facts: Facts) -> Iterator[Advice]:
    """Propose equal work if ranks wait much although no rank is late for long.

    Ranks that lack a core now and then wait, too, and equal batches would not help them, nor ranks
    that wait for the evaluation of others.
    """
    waiting_s = facts.step.waiting
    if facts.uneven_evaluation is not None:
        waiting_s = max(0.0, waiting_s - facts.uneven_evaluation.mean_waiting_s)
    if facts.bubble is not None:  # its rules know for what the ranks of a pipeline wait
        return
    if facts.stragglers or waiting_s < NOTABLE_WAITING * facts.step.total_s:
        return
    if facts.no_core_s > waiting_s / 2:
        return
    if facts.usual_waiting_s < waiting_s / 3:  # it is in a few steps, which batches do not explain
        return
    yield Advice(
        rule="even_batches",
        phase="waiting",
        saving_s=waiting_s,
        phase_s=facts.step.waiting,
        share=facts.share_of_steps(waiting_s),
        action="Batches that take all ranks equally long (samples of like length together) would "
        f"save up to {format_seconds(waiting_s)} of waiting.",
        evidence="No rank is late for long, yet in each step the ranks wait "
        f"{format_seconds(waiting_s)} for each other.",
    )


def share_evaluation(facts: Facts) -> Iterator[Advice]:
    """Propose that all ranks evaluate a part each, where some evaluate and the others wait.

    Of `n` ranks, `k` of which evaluate, each then evaluates for `k / n` of the time: that much of
    the waiting becomes evaluation, which is what `rarer_evaluation` could still halve.
    """
    uneven = facts.uneven_evaluation
    if uneven is None or uneven.waiting_s < LEAST_SHARE * facts.step.total_s:
        return
    saving_s = uneven.mean_waiting_s
    several = len(uneven.ranks) > 1
    who = f"{len(uneven.ranks)} ranks evaluate" if several else f"Rank {uneven.ranks[0]} evaluates"
    whom = f"the other {uneven.others} ranks wait" if uneven.others > 1 else "the other rank waits"
    waited_s = uneven.waiting_s * facts.steps
    yield Advice(
        rule="share_evaluation",
        phase="waiting",
        saving_s=saving_s,
        phase_s=uneven.waiting_s,
        share=facts.share_of_steps(saving_s),
        action="Letting all ranks evaluate a part each would save "
        f"{_of(saving_s * facts.steps, waited_s)} of waiting.",
        evidence=f"{who} while {whom} {format_seconds(waited_s)} "
        f"({format_share(facts.share(waited_s))} of the loop).",
    )


# --- a model in stages ------------------------------------------------------------------------


def more_microbatches(facts: Facts) -> Iterator[Advice]:
    """Propose twice as many microbatches, if warm-up and drain are shorter then.

    Ranks compute as long as before, and idle for a smaller share `new` of a step in place of
    `old`: of the step `s` that saves `s - s (1 - old) / (1 - new)`.
    """
    use, bubble = facts.pipeline, facts.bubble
    if use is None or bubble is None or not bubble.more_microbatches:
        return
    new = with_more_share(use, bubble)
    saving_s = facts.step.total_s * (1 - (1 - use.step_share) / (1 - new))
    saving_s = min(max(0.0, saving_s), facts.step.waiting)
    if saving_s <= 0:
        return
    yield Advice(
        rule="more_microbatches",
        phase="waiting",
        saving_s=saving_s,
        phase_s=facts.step.waiting,
        share=facts.share_of_steps(saving_s),
        action=f"{bubble.more_microbatches} microbatches (microbatches=) in place of "
        f"{use.microbatches} would save {_of(saving_s, facts.step.waiting)} of waiting, if the "
        "smaller ones take their part of the time.",
        evidence=f"Warm-up and drain of the pipeline are {format_share(bubble.by_schedule)} of a "
        f"batch, and {format_share(bubble.with_more)} with twice as many microbatches.",
    )


def even_stages(facts: Facts) -> Iterator[Advice]:
    """Propose to move layers out of the slowest stage: the others stop waiting for it."""
    use, bubble = facts.pipeline, facts.bubble
    slowest = slowest_stage(use) if use is not None else None
    if use is None or bubble is None or slowest is None:
        return
    stage, factor = slowest
    saving_s = min(bubble.by_stages * use.batch_s, facts.step.waiting)
    yield Advice(
        rule="even_stages",
        phase="waiting",
        saving_s=saving_s,
        phase_s=facts.step.waiting,
        share=facts.share_of_steps(saving_s),
        action=f"Fewer layers in stage {stage.stage} (layers=, or example_inputs of the size of a "
        f"microbatch) would save up to {_of(saving_s, facts.step.waiting)} of waiting.",
        evidence=f"Stage {stage.stage} computes {factor:.1f} times as long for a microbatch as "
        f"{'the other' if len(use.stages) == 2 else 'the others on average'}.",
    )


# --- memory -----------------------------------------------------------------------------------


def faster_spilling(facts: Facts) -> Iterator[Advice]:
    """Propose a larger budget or a faster disk, where steps wait for transfers to and from it."""
    found = facts.spilling
    if found is None or found.exposed_s <= 0:
        return
    worked_s = working_s(facts.step)
    saving_s = min(found.exposed_s, worked_s)
    enough = f" ({format_bytes(found.in_core_peak_bytes)} spill nothing)"
    yield Advice(
        rule="faster_spilling",
        phase="computing",
        saving_s=saving_s,
        phase_s=worked_s,
        share=facts.share_of_steps(saving_s),
        action=f"A larger memory budget{enough if found.in_core_peak_bytes else ''}, a faster disk "
        f"for --spill-folder or smaller batches would save up to {_of(saving_s, worked_s)} of "
        "computing and waiting for spilled tensors.",
        evidence=f"In each step rank {found.rank} writes {format_bytes(found.spilled_bytes)} and "
        f"reads them back, and waits {format_seconds(found.exposed_s)} for it; "
        f"{format_seconds(found.hidden_s)} of the transfers are hidden.",
    )


# --- communication ----------------------------------------------------------------------------


def accumulate_gradients(facts: Facts) -> Iterator[Advice]:
    """Propose to reduce gradients every other batch: half of the exposed all-reduces go away."""
    transfer_s = facts.step.transfer * facts.reduced_share
    if transfer_s <= 0 or not facts.trains:
        return
    yield Advice(
        rule="accumulate_gradients",
        phase="transfer",
        saving_s=transfer_s / 2,
        phase_s=facts.step.transfer,
        share=facts.share_of_steps(transfer_s / 2),
        action="Accumulating gradients over two batches (no_sync(); the global batch doubles) "
        f"would save {_of(transfer_s / 2, facts.step.transfer)} of communication per batch.",
        evidence=f"A rank gives {format_bytes(facts.reduced_bytes)} to all-reduces in each step, "
        f"and {format_seconds(transfer_s)} of their time is not hidden by computation.",
    )


def no_buffer_broadcasts(facts: Facts) -> Iterator[Advice]:
    """Propose to leave out the broadcasts of buffers that DDP makes before each forward pass."""
    transfer_s = facts.step.transfer * facts.broadcast_share
    if transfer_s <= 0 or not facts.trains:
        return
    yield Advice(
        rule="no_buffer_broadcasts",
        phase="transfer",
        saving_s=transfer_s,
        phase_s=facts.step.transfer,
        share=facts.share_of_steps(transfer_s),
        action="Leaving each rank its own buffers, such as the statistics of batch norm "
        "(DistributedDataParallel(broadcast_buffers=False)), would save "
        f"{_of(transfer_s, facts.step.transfer)} of communication.",
        evidence="DDP's broadcasts of buffers in each step take "
        f"{format_seconds(transfer_s)} that is not hidden by computation.",
    )


# --- work that can be done less often -------------------------------------------------------------


def rarer_checkpoints(facts: Facts) -> Iterator[Advice]:
    """Propose to write half as many checkpoints."""
    spent_s = facts.step.checkpoint
    if spent_s <= 0 or facts.checkpoints < 2:
        return
    each_s = spent_s * facts.steps / facts.checkpoints
    yield Advice(
        rule="rarer_checkpoints",
        phase="checkpoint",
        saving_s=spent_s / 2,
        phase_s=spent_s,
        share=facts.share_of_steps(spent_s / 2),
        action="Half as many checkpoints would save "
        f"{_of(spent_s / 2, spent_s)} of writing them per step.",
        evidence=f"The run wrote {plural(facts.checkpoints, 'checkpoint')} of "
        f"{format_seconds(each_s)} each.",
    )


def rarer_evaluation(facts: Facts) -> Iterator[Advice]:
    """Propose to evaluate half as often."""
    spent_s = facts.step.evaluation
    if spent_s <= 0 or facts.evaluations < 2:
        return
    yield Advice(
        rule="rarer_evaluation",
        phase="evaluation",
        saving_s=spent_s / 2,
        phase_s=spent_s,
        share=facts.share_of_steps(spent_s / 2),
        action=f"Evaluating half as often would save {_of(spent_s / 2, spent_s)} per step.",
        evidence=f"The run evaluated {facts.evaluations} times, which takes "
        f"{format_share(spent_s / facts.step.total_s)} of the loop"
        f"{', the mean over ranks' if facts.ranks > 1 else ''}.",
    )


# Named host work that need not be done in each step: what to do, and the share of it that remains.
AGAINST_HOST_WORK = {
    "garbage collection": ("Collecting garbage by hand, once an epoch (gc.disable())", 0.0),
    "logging": ("Logging every tenth time", 0.1),
    "item": ("Reading values of tensors (.item()) every tenth time", 0.1),
}


def rarer_host_work(facts: Facts) -> Iterator[Advice]:
    """Propose to do named work of the script less often."""
    for work in facts.host_work:
        if work.name not in AGAINST_HOST_WORK or facts.step.host <= 0:
            continue
        action, remains = AGAINST_HOST_WORK[work.name]
        spent_s = min(work.measured_s / facts.steps, facts.step.host)
        saving_s = spent_s * (1 - remains)
        yield Advice(
            rule=f"host_{work.name.replace(' ', '_')}",
            phase="host",
            saving_s=saving_s,
            phase_s=facts.step.host,
            share=facts.share_of_steps(saving_s),
            action=f"{action} would save {_of(saving_s, spent_s)} per step.",
            evidence=f"{work.name.capitalize()} takes {format_seconds(spent_s)} of each step.",
        )


# --- cores ------------------------------------------------------------------------------------


def enough_cores(facts: Facts) -> Iterator[Advice]:
    """Propose fewer threads than cores, or cores of one's own: no time without a core is left."""
    worked_s = working_s(facts.step)
    saving_s = min(facts.no_core_s, worked_s)
    if saving_s <= 0 or not facts.cores:
        return
    action = "Keeping other processes off the cores of the run"
    if facts.threads is not None and facts.ranks * facts.threads > facts.cores:
        action = f"At most {plural(facts.cores, 'thread')} on {plural(facts.cores, 'core')}"
    threads = "" if facts.threads is None else f" of {plural(facts.threads, 'thread')}"
    yield Advice(
        rule="enough_cores",
        phase="computing",
        saving_s=saving_s,
        phase_s=worked_s,
        share=facts.share_of_steps(saving_s),
        action=f"{action} would save {_of(saving_s, worked_s)} of computing.",
        evidence=f"{plural(facts.ranks, 'rank')}{threads} run on "
        f"{plural(facts.cores, 'core')}; the training loop was ready without a core for "
        f"{format_seconds(facts.no_core_s)} of each step.",
    )


RULES: tuple[Callable[[Facts], Iterator[Advice]], ...] = (
    loader_workers,
    faster_stage,
    help_straggler,
    rebalance,
    even_batches,
    more_microbatches,
    even_stages,
    share_evaluation,
    faster_spilling,
    accumulate_gradients,
    no_buffer_broadcasts,
    rarer_checkpoints,
    rarer_evaluation,
    rarer_host_work,
    enough_cores,
)


def _of(part_s: float, whole_s: float) -> str:
    """Return both durations in the unit and with the decimals of the whole.

    >>> _of(0.0092, 0.0181), _of(0.0004, 1.2)
    ('9.2 of 18.1 ms', '0.00 of 1.20 s')
    >>> _of(0.0181, 0.0181)
    'all 18.1 ms'
    """
    whole, unit = format_seconds(whole_s).split(" ")
    decimals = len(whole.partition(".")[2])
    factor = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}[unit]
    part = f"{part_s * factor:.{decimals}f}"
    return f"all {whole} {unit}" if part == whole else f"{part} of {whole} {unit}"


def _number(count: int) -> str:
    return _NUMBERS[count] if 0 <= count < len(_NUMBERS) else f"{count:,}"
