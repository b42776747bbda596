"""Chooses what is kept, recomputed and spilled.

`greedy` begins with everything kept, and gives up the tensor or module that frees most memory over
the budget for the time that it adds, until the budget holds. `milp` gives HiGHS the same choice as
a mixed-integer linear program, with the waiting for the disk as two variables: it writes what was
saved after an event in the time from there to the peak, and reads what is needed until an event in
the time from the peak to there. What either chooses is judged by `replay`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from paceline.core.errors import MemoryExceeded
from paceline.schedules.memory.records import MemoryPlan
from paceline.schedules.memory.timeline import replay, resident_bytes, transfers

if TYPE_CHECKING:
    from paceline.schedules.memory.records import SpillTier, StepProfile, TensorAction
    from paceline.schedules.memory.timeline import Replayed

Method = Literal["auto", "greedy", "milp"]

_MIB = 1 << 20
MILP_MOST_TENSORS = 400
MILP_MOST_ROWS = 120
MILP_TIME_LIMIT_S = 2.0
# Parts of the budget that a choice leaves free for tensors on their way; the best one is taken.
RESERVES = (0.0, 0.02, 0.05, 0.1)


SLACK_PART = 1 / 32  # of the budget, for objects of Python, small blocks, and freed memory


class Choice(NamedTuple):
    """Which tensors are kept, and which modules are recomputed; by index in the profile."""

    kept: frozenset[int]
    recomputed: frozenset[int]


class _Judged(NamedTuple):
    choice: Choice
    actions: tuple[TensorAction, ...]
    replayed: Replayed
    method: Literal["greedy", "milp"]


def least_budget_bytes(profile: StepProfile) -> int:
    """Return the smallest budget that a plan exists for: everything away that can be."""
    return max(profile.floor_bytes, default=0)


def target_budget_bytes(profile: StepProfile, budget_bytes: int) -> int:
    """Return what a plan may use of a process's budget.

    Beside what is in use there is freed memory: without room for it, a step asks the system for the
    same pages again and again.
    """
    slack = min(int(SLACK_PART * budget_bytes), (budget_bytes - least_budget_bytes(profile)) // 2)
    return budget_bytes - max(slack, 0)


def plan_memory(
    profile: StepProfile, tier: SpillTier, budget_bytes: int, *, method: Method = "auto"
) -> MemoryPlan:
    """Return the plan with the shortest predicted step that holds the budget.

    Args:
        profile: of a recorded step.
        tier: where tensors are spilled to.
        budget_bytes: of the process's memory.
        method: ``greedy``, ``milp`` (HiGHS through SciPy), or ``auto``: the better one of the two
            where SciPy is installed and the profile small, otherwise ``greedy``.

    Raises:
        MemoryExceeded: no plan holds the budget.
    """
    check_budget(profile, budget_bytes)
    everything = Choice(frozenset(range(len(profile.tensors))), frozenset())
    in_core = resident_bytes(profile, everything.kept)
    in_core_peak = int(in_core.max(initial=0))
    if in_core_peak <= budget_bytes:
        actions = transfers(profile, everything.kept, budget_bytes)
        assert actions is not None
        return _plan(
            profile, budget_bytes, in_core_peak, everything, actions,
            replay(profile, actions, tier), "fits",
        )  # fmt: skip
    # A choice that recomputes can turn out too large; this one never does.
    candidates = [(Choice(frozenset(), frozenset()), "greedy")]
    for reserve in RESERVES:
        limit = int(budget_bytes * (1 - reserve))
        if limit < least_budget_bytes(profile):
            break
        if method != "milp":
            candidates.append((greedy(profile, tier, limit), "greedy"))
        if method == "milp" or (method == "auto" and _is_small(profile) and _has_scipy()):
            candidates.append((milp(profile, tier, limit), "milp"))
    judged = []
    for choice, name in candidates:
        actions = transfers(profile, choice.kept, budget_bytes, choice.recomputed)
        if actions is not None:
            replayed = replay(profile, actions, tier, choice.recomputed)
            judged.append(
                _Judged(choice, actions, replayed, "milp" if name == "milp" else "greedy")
            )
    best = min(judged, key=lambda judged: _price_s(profile, tier, judged))
    return _plan(
        profile, budget_bytes, in_core_peak, best.choice, best.actions, best.replayed, best.method
    )


def _price_s(profile: StepProfile, tier: SpillTier, judged: _Judged) -> float:
    """Return the step's time, and a little for hidden transfers, which wear and share the disk."""
    return judged.replayed.step_s + 1e-3 * tier.transfer_s(_spilled(profile, judged.actions))


def _spilled(profile: StepProfile, actions: tuple[TensorAction, ...]) -> int:
    pairs = zip(profile.tensors, actions, strict=True)
    return sum(tensor.bytes for tensor, action in pairs if action.action == "spill")


def check_budget(profile: StepProfile, budget_bytes: int) -> None:
    """Raise an error that says by how much a budget is too small.

    Raises:
        MemoryExceeded: not even with everything away does the step fit.
    """
    least = least_budget_bytes(profile)
    if least > budget_bytes:
        raise MemoryExceeded(
            f"no plan fits a memory budget of {_size(budget_bytes)}",
            where="out of core",
            why="what always stays (the process itself, parameters, gradients, one operation's "
            f"tensors) takes {_size(least)}, {_size(least - budget_bytes)} more",
            fix=f"Give at least {_size(least)}, or make the batch smaller",
        )


def _size(count: int) -> str:
    """Return bytes as a message has them, rounded up: a budget of what it says is enough.

    >>> _size(1000), _size(100 << 20), _size((100 << 20) + 1)
    ('1,000 bytes', '100 MiB', '101 MiB')
    """
    return f"{-(-count // _MIB):,} MiB" if count >= _MIB else f"{count:,} bytes"


def _plan(
    profile: StepProfile,
    budget_bytes: int,
    in_core_peak_bytes: int,
    choice: Choice,
    actions: tuple[TensorAction, ...],
    replayed: Replayed,
    method: Literal["fits", "greedy", "milp"],
) -> MemoryPlan:
    return MemoryPlan(
        budget_bytes=budget_bytes,
        method=method,
        actions=actions,
        recomputed=tuple(profile.modules[i].name for i in sorted(choice.recomputed)),
        peak_bytes=replayed.peak_bytes,
        in_core_peak_bytes=in_core_peak_bytes,
        step_s=replayed.step_s,
        in_core_step_s=profile.step_s,
        exposed_s=replayed.exposed_s,
        spilled_bytes=_spilled(profile, actions),
    )


def greedy(profile: StepProfile, tier: SpillTier, budget_bytes: int) -> Choice:
    """Return the choice that gives up most excess memory for the time, one by one.

    Cost: one pass over tensors and intervals for each tensor that is given up.
    """
    tensors = profile.tensors
    kept = set(range(len(tensors)))
    recomputed: set[int] = set()
    module_of = {t: m for m, module in enumerate(profile.modules) for t in module.tensors}
    begin = np.array([tensor.idle for tensor in tensors], dtype=np.int64)
    end = np.array([tensor.needed for tensor in tensors], dtype=np.int64)
    size = np.array([tensor.bytes for tensor in tensors], dtype=np.int64)
    cost = np.array([_spill_s(profile, tier, i) for i in range(len(tensors))])
    while True:
        excess = resident_bytes(profile, kept, recomputed) - budget_bytes
        if excess.max(initial=0) <= 0:
            break
        freed = np.where(_in(kept, len(tensors)), _freed(excess, begin, end, size), 0.0)
        by_tensor = freed / np.maximum(cost, 1e-12)
        best = int(by_tensor.argmax()) if len(tensors) else -1
        module, gain = _best_module(profile, excess, kept, freed)
        if best < 0 or max(float(by_tensor[best]), gain) <= 0:
            break
        if gain > by_tensor[best]:
            recomputed.add(module)
            kept.difference_update(profile.modules[module].tensors)
        else:
            kept.discard(best)
    spilled = set(range(len(tensors))) - kept - {t for t in module_of if module_of[t] in recomputed}
    return Choice(
        _kept_again(profile, kept, recomputed, spilled, budget_bytes), frozenset(recomputed)
    )


def _spill_s(profile: StepProfile, tier: SpillTier, index: int) -> float:
    """Return the time that spilling a tensor adds, roughly: more where less can hide it."""
    tensor = profile.tensors[index]
    transfer = tier.transfer_s(tensor.bytes)
    return transfer + tensor.bytes * tier.cpu_s_per_byte / tier.cores


def _in(kept: set[int], count: int) -> np.ndarray:
    mask = np.zeros(count, dtype=bool)
    mask[list(kept)] = True
    return mask


def _freed(excess: np.ndarray, begin: np.ndarray, end: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the excess that each tensor frees, summed over intervals, shape (tensors,)."""
    positive = np.maximum(excess, 0)
    found = np.zeros(len(size))
    for low in np.unique(size):
        sums = np.concatenate([[0], np.cumsum(np.minimum(positive, low))])
        rows = np.flatnonzero(size == low)
        first, last = np.maximum(begin[rows], 0), np.maximum(end[rows], 0)
        found[rows] = sums[last] - sums[np.minimum(first, last)]
        wrapped = rows[begin[rows] < 0]
        found[wrapped] += sums[-1] - sums[begin[wrapped] + len(excess)]
    return found


def _best_module(
    profile: StepProfile, excess: np.ndarray, kept: set[int], freed: np.ndarray
) -> tuple[int, float]:
    """Return the module that frees most for its time while all of its tensors are kept."""
    best, best_gain = -1, 0.0
    for i, module in enumerate(profile.modules):
        if not kept.issuperset(module.tensors):
            continue
        back = sum(
            float(np.minimum(np.maximum(excess[module.needed : profile.tensors[t].needed], 0),
                             profile.tensors[t].bytes).sum())
            for t in module.tensors
        )  # fmt: skip
        gain = (sum(float(freed[t]) for t in module.tensors) - back) / max(module.compute_s, 1e-12)
        if gain > best_gain:
            best, best_gain = i, gain
    return best, best_gain


def _kept_again(
    profile: StepProfile,
    kept: set[int],
    recomputed: set[int],
    spilled: set[int],
    budget_bytes: int,
) -> frozenset[int]:
    """Return `kept` with the largest of the `spilled` that fit after all."""
    resident = resident_bytes(profile, kept, recomputed)
    for i in sorted(spilled, key=lambda i: -profile.tensors[i].bytes):
        with_it = resident + resident_bytes(profile, [i]) - np.asarray(profile.floor_bytes)
        if with_it.max(initial=0) <= budget_bytes:
            resident = with_it
            kept = kept | {i}
    return frozenset(kept)


def milp(profile: StepProfile, tier: SpillTier, budget_bytes: int) -> Choice:
    """Return the choice of HiGHS. The arguments are those of `greedy`.

    Raises:
        Missing: SciPy is not installed.
    """
    optimize = importlib.import_module("scipy.optimize")
    tensors, modules = profile.tensors, profile.modules
    count = len(tensors)
    columns = count + len(modules) + 2  # spilled tensors, recomputed modules, two waiting times
    wait_write, wait_read = columns - 2, columns - 1
    cost = np.zeros(columns)
    cost[:count] = [
        tensor.bytes * tier.cpu_s_per_byte / tier.cores + 1e-3 * tier.transfer_s(tensor.bytes)
        for tensor in tensors
    ]
    cost[count : count + len(modules)] = [module.compute_s for module in modules]
    cost[-2:] = 1.0
    rows, limits = _memory_rows(profile, budget_bytes, columns)
    for matrix_row, limit in _waiting_rows(profile, tier, columns, wait_write, wait_read):
        rows.append(matrix_row)
        limits.append(limit)
    for i, module in enumerate(modules):
        for t in module.tensors:  # recomputed or spilled, not both
            row = np.zeros(columns)
            row[t] = row[count + i] = 1
            rows.append(row)
            limits.append(1.0)
    upper = np.ones(columns)
    upper[-2:] = np.inf
    integrality = np.ones(columns)
    integrality[-2:] = 0
    solved: Any = optimize.milp(
        cost,
        constraints=optimize.LinearConstraint(np.array(rows), -np.inf, np.array(limits)),
        bounds=optimize.Bounds(np.zeros(columns), upper),
        integrality=integrality,
        options={"time_limit": MILP_TIME_LIMIT_S, "mip_rel_gap": 0.01},
    )
    if solved.x is None:  # out of time before any solution
        return greedy(profile, tier, budget_bytes)
    spilled = {i for i in range(count) if solved.x[i] > 0.5}
    recomputed = {i for i in range(len(modules)) if solved.x[count + i] > 0.5}
    again = {t for i in recomputed for t in modules[i].tensors}
    return Choice(frozenset(set(range(count)) - spilled - again), frozenset(recomputed))


def _memory_rows(
    profile: StepProfile, budget_bytes: int, columns: int
) -> tuple[list[np.ndarray], list[float]]:
    """Return one row for each interval that can be over the budget: what must be given up there.

    Intervals with the same tensors have one row, that of the largest floor. Of many rows neighbours
    are joined: a row with the tensors that cover both, and the larger excess, is safe for both.
    """
    count = len(profile.tensors)
    events = profile.events
    covers = np.zeros((events, columns))
    for i, tensor in enumerate(profile.tensors):
        add_column(covers[:, i], tensor.idle, tensor.needed, tensor.bytes)
    for i, module in enumerate(profile.modules):
        for t in module.tensors:
            tensor = profile.tensors[t]
            add_column(covers[:, count + i], tensor.idle, tensor.needed, tensor.bytes)
            add_column(covers[:, count + i], module.needed, tensor.needed, -tensor.bytes)
    excess = resident_bytes(profile, range(count)) - budget_bytes
    over = np.flatnonzero(excess > 0)
    groups = np.array_split(over, min(len(over), MILP_MOST_ROWS))
    rows, limits = [], []
    for group in groups:
        rows.append(-covers[group].min(axis=0) / (1 << 20))
        limits.append(-float(excess[group].max()) / (1 << 20))
    return rows, limits


def add_column(column: np.ndarray, begin: int, end: int, count: int) -> None:
    """Add bytes to the intervals of a gap; see `timeline.add`."""
    if begin < 0:
        column[begin:] += count
        begin = 0
    column[begin:end] += count


def _waiting_rows(
    profile: StepProfile, tier: SpillTier, columns: int, wait_write: int, wait_read: int
) -> list[tuple[np.ndarray, float]]:
    """Return the rows that make the waiting times at least what the disk cannot hide."""
    tensors = profile.tensors
    at_s = np.concatenate([[0.0], np.cumsum(profile.compute_s)])
    peak = int(np.argmax(resident_bytes(profile, range(len(tensors)))))
    saved = sorted({t.saved for t in tensors if t.saved <= peak})
    needed = sorted({t.needed for t in tensors if t.needed > peak})
    found = []
    for event in _spread(saved):
        row = np.zeros(columns)
        for i, tensor in enumerate(tensors):
            if event <= tensor.saved <= peak:
                row[i] = tensor.bytes / tier.write_bytes_per_s
        row[wait_write] = -1
        begin_s = at_s[event] if event >= 0 else at_s[event + profile.events] - at_s[-1]
        found.append((row, float(at_s[peak] - begin_s)))
    for event in _spread(needed):
        row = np.zeros(columns)
        for i, tensor in enumerate(tensors):
            if peak < tensor.needed <= event:
                row[i] = tensor.bytes / tier.read_bytes_per_s
        row[wait_read] = -1
        found.append((row, float(at_s[event] - at_s[peak])))
    return found


def _spread(events: list[int]) -> list[int]:
    """Return at most `MILP_MOST_ROWS` of the events, evenly, with first and last."""
    if len(events) <= MILP_MOST_ROWS:
        return events
    return [events[i] for i in np.linspace(0, len(events) - 1, MILP_MOST_ROWS).astype(int)]


def load_solver() -> bool:
    """Import SciPy's solver now; return whether it is installed.

    Its modules take memory, which belongs to the floor of a profile: import it before recording.
    """
    if not _has_scipy():
        return False
    importlib.import_module("scipy.optimize")
    return True


def _is_small(profile: StepProfile) -> bool:
    return len(profile.tensors) + len(profile.modules) <= MILP_MOST_TENSORS


def _has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None
