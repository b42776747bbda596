"""The ring cases of `truth.py`: programs on mpi4py and torch/gloo with one planted pattern each.

    late sender   a rank computes 20 ms longer before it sends
    imbalance     a rank computes longer before the all-reduce
    slow loader   opening the file of a batch takes a rank longer
    slow disk     reading it takes a rank longer
    hog           another process takes a rank's core
    stopped       a rank is stopped and continued (SIGSTOP)
    checkpoint    every few steps a rank writes a file

The step grows by 20 to 100 %, for all of the run or for the middle of it. Beside a hog the ranks
are scheduled in real time, as the hog is: else the kernel moves other programs of a busy machine to
the other rank's core, and that rank is late. Half of the programs send and receive by calls that
block, half by requests that they wait for; half of those on MPI mark their steps by MPI_Pcontrol,
all on torch by `paceline.step`. `truth_ring_runs.py` starts them.

From what the ranks note by themselves follows what really happened, whatever else the machine did:

- how long each rank waited in its calls: by MPI's rules, and by what the guide of wait states says
  of a send that is over before its receiver comes;
- by how much the culprit was late. One that was slowed by less than 20 % (of other ranks' step
  without waiting), since other programs slowed the others, is no case, and counted apart. So are
  wait states of a run in which the culprit itself waited longer;
- whether the core of a rank was slower: it needed more CPU time for the work that is the same on
  all ranks. A ring program has no work of which an analysis could know that, so that a clean run
  whose rank was late by that is no false accusation. Such runs are counted apart as well.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
import truth_ring_ranks

PATTERNS = {  # and the cause that the analysis should name
    "late sender": "compute",
    "imbalance": "compute",
    "slow loader": "data",
    "slow disk": "data",
    "hog": "not_running",
    "stopped": "stopped",
    "checkpoint": "checkpoint",
}
STATES = {"late sender": "late sender", "imbalance": "wait at NxN"}
FRAMEWORKS = ("mpi", "gloo")
STEPS, STEPS_OF_LATE_SENDER = 120, 60
BASE_S, BUSY_S = 0.010, 0.003
LATE_SENDER_S = 0.020
LEAST_SLOW, MOST_SLOW = 0.2, 1.0  # by which the culprit's step grows
PERIODS = (3, 4, 5)  # of checkpoints
LEAST_WAITING_S = 0.05  # of a case, for its error to say something
ENTERED, ISSUED, LEFT = range(3)  # times of a call


@dataclass(frozen=True)
class RingCase:
    """One run: which rank is slowed, by which pattern, and how the program communicates."""

    number: int
    seed: int
    framework: str
    ranks: int
    blocking: bool
    marks: bool
    culprit: int | None = None
    pattern: str = ""
    window: bool = False
    slow: float = 0.0
    period: int = 1

    @property
    def steps(self):
        return STEPS_OF_LATE_SENDER if self.pattern == "late sender" else STEPS

    @property
    def base_s(self):
        """Seconds of a step that nobody slows."""
        return LATE_SENDER_S / self.slow if self.pattern == "late sender" else BASE_S

    def seconds(self):
        """Return the seconds by which each step of the culprit is slowed."""
        extra = np.full(self.steps, self.slow * self.base_s * self.period)
        extra[np.arange(self.steps) % self.period != self.period - 1] = 0
        if self.window:
            extra[: self.steps // 4] = extra[-self.steps // 4 :] = 0
        return extra


def make_ring_cases(framework, seed, culprits, clean):
    """Return the cases of a seed: each pattern in turn, then clean runs."""
    random = np.random.default_rng([seed, 2 + FRAMEWORKS.index(framework)])
    cores = len(os.sched_getaffinity(0))
    cases = []
    for number in range(culprits + clean):
        case = {
            "number": number,
            "seed": seed,
            "framework": framework,
            "ranks": 2 + (number // 2 % 2 if cores > 2 else 0),
            "blocking": bool(number // len(PATTERNS) % 2),
            "marks": framework == "gloo" or bool(number // (2 * len(PATTERNS)) % 2),
        }
        if number < culprits:
            pattern = list(PATTERNS)[number % len(PATTERNS)]
            case |= {
                "culprit": int(random.integers(case["ranks"])),
                "pattern": pattern,
                "window": bool(random.integers(2)) and pattern != "checkpoint",
                "slow": float(random.uniform(LEAST_SLOW, MOST_SLOW)),
                "period": int(random.choice(PERIODS)) if pattern == "checkpoint" else 1,
            }
        cases.append(RingCase(**case))
    return cases


# --- the judgement --------------------------------------------------------------------------------


def judge_ring(case, folder):
    """Return what the analysis of a case's traces found beside what happened, as a row."""
    from paceline.trace.analysis import analyse
    from paceline.trace.efficiency import measure_efficiency
    from paceline.trace.merge import load_run

    analysis = analyse(load_run(folder))
    notes = Notes.of(case, folder)
    stragglers = analysis.stragglers
    found = [late.to_json() for late in stragglers]
    row = {**asdict(case), "steps": analysis.steps, "rule": analysis.step_rule, "found": found}
    row["bytes_right"] = bytes_by_pair(analysis) == expected_bytes(case)
    row["waiting_error"], row["waiting_known_within"] = waiting_error(case, notes, analysis)
    if case.culprit is None:
        # As in truth.py, a core that is slower, or that another program takes, is no accusation.
        accused = [late for late in stragglers if late.cause not in ("slow_core", "not_running")]
        row["core_slower"] = any(notes.core_was_slower(late) for late in accused)
        row["accused"] = any(not notes.core_was_slower(late) for late in accused)
        return row
    row["slowed"] = slowed(case.culprit, case.seconds(), notes.step_s)
    main = stragglers[0] if stragglers else None
    row["rank_right"] = main is not None and main.rank == case.culprit
    row["cause_right"] = row["rank_right"] and main.cause == PATTERNS[case.pattern]
    waited_s = true_waiting_s(case, notes, ENTERED)
    if case.pattern in STATES and waited_s[case.culprit] < np.delete(waited_s, case.culprit).min():
        waits = measure_efficiency(analysis).waits
        caused = waits.delays[0].rank if waits.delays else None
        state = waits.calls[0].state if waits.calls else ""
        row["state_right"] = caused == case.culprit and state == STATES[case.pattern]
    return row


@dataclass(frozen=True)
class Notes:
    """What the ranks of a case noted by themselves.

    Attributes:
        calls: of each rank, when it entered, issued and left its calls, by name, each of shape
            (calls, 3), nanoseconds.
        computed_s: CPU time of the work that is the same on all ranks, shape (ranks, steps).
        step_s: time of each step without that in calls, shape (ranks, steps).
    """

    calls: list
    computed_s: np.ndarray
    step_s: np.ndarray

    @classmethod
    def of(cls, case, folder):
        noted = [
            json.loads((folder / f"notes-{rank}.json").read_text()) for rank in range(case.ranks)
        ]
        calls = [
            {
                name: np.array([row[1:] for row in own["calls"] if row[0] == name])
                for name in {row[0] for row in own["calls"]}
            }
            for own in noted
        ]
        return cls(
            calls=calls,
            computed_s=np.array([own["computed_ns"] for own in noted]) / 1e9,
            step_s=np.array([_outside_calls_s(own["calls"], case.steps) for own in noted]),
        )

    def core_was_slower(self, late):
        """Whether a straggler was late since its core needed longer for the same work."""
        steps = np.arange(late.first_step, min(late.last_step + 1, self.step_s.shape[1]))
        own_s, others_s = _own_and_others(self.step_s, late.rank, steps)
        computed_s, usual_s = _own_and_others(self.computed_s, late.rank, steps)
        return late.cause == "compute" and computed_s - usual_s > (own_s - others_s) / 2 > 0


def slowed(culprit, seconds, step_s):
    """Return by which share of a step of the other ranks the culprit was late.

    Args:
        culprit: its rank.
        seconds: by which each step was to be slowed, shape (steps,).
        step_s: time of each step outside of calls in which ranks wait, shape (ranks, steps).
    """
    planted = np.flatnonzero(seconds)
    steps = np.arange(max(0, planted[0] - (planted[1] - planted[0]) + 1), planted[-1] + 1)
    own_s, others_s = _own_and_others(step_s, culprit, steps)
    return own_s / others_s - 1


def _own_and_others(values, rank, steps):
    means = values[:, steps].mean(axis=1)
    return float(means[rank]), float(np.delete(means, rank).mean())


def _outside_calls_s(calls, steps):
    """Return the time of each step outside of calls: from one all-reduce to the next."""
    outside_ns, left_ns = [0], calls[0][-1]
    for name, entered_ns, _, ended_ns in calls[1:]:
        outside_ns[-1] += entered_ns - left_ns
        left_ns = ended_ns
        if name == "all_reduce":
            outside_ns.append(0)
    return np.array(outside_ns[:steps]) / 1e9


def bytes_by_pair(analysis):
    """Return the bytes of messages by (source, destination), as they were recorded."""
    pairs = Counter()
    matches = analysis.matches
    for message in matches.messages[matches.messages["sends"]]:
        source = int(matches.ranks[message["trace"]])
        pairs[source, int(message["peer"])] += int(message["amount"])
    return dict(pairs)


def expected_bytes(case):
    return {
        (rank, (rank + 1) % case.ranks): truth_ring_ranks.message_bytes(rank) * case.steps
        for rank in range(case.ranks)
    }


def waiting_error(case, notes, analysis):
    """Return by how much the waiting of all ranks is off, and how far it is known, as shares.

    It is known but for the time in which the other side issues its call, with torch a tenth of a
    millisecond: it may come at any time within. None if there was little waiting.
    """
    least_s, most_s = (true_waiting_s(case, notes, comes).sum() for comes in (ENTERED, ISSUED))
    if least_s < LEAST_WAITING_S:
        return None, None
    found_s = sum(float((own["ready_ns"] - own["begin_ns"]).sum()) for own in analysis.waits) / 1e9
    return found_s / min(max(found_s, least_s), most_s) - 1, 1 - least_s / most_s


def true_waiting_s(case, notes, comes):
    """Return how long each rank waited for others, from the times that they noted, in seconds.

    Args:
        case: the case.
        notes: what its ranks noted.
        comes: when the other side has come: when it `ENTERED` its call, or when that was `ISSUED`.
    """
    calls = notes.calls

    def until(own, others, *, if_within=False):
        """Return how long each call waited for the other side; of sends only if it came within."""
        others_ns = others[:, comes]
        waited = np.clip(others_ns - own[:, ISSUED], 0, own[:, LEFT] - own[:, ISSUED])
        return np.where(others_ns <= own[:, LEFT], waited, 0) if if_within else waited

    waited_ns = np.zeros(len(calls))
    for name in ("barrier", "all_reduce"):
        came_ns = np.array([own[name][:, comes] for own in calls])
        for rank, own in enumerate(calls):
            waited_ns[rank] += np.maximum(0, came_ns.max(axis=0) - own[name][:, ISSUED]).sum()
    for rank, own in enumerate(calls):
        previous, following = calls[rank - 1], calls[(rank + 1) % case.ranks]
        if case.blocking:
            waited_ns[rank] += until(own["recv"], previous["send"]).sum()
            waited_ns[rank] += until(own["send"], following["recv"], if_within=True).sum()
        else:
            sent = until(own["wait_all"], previous["isend"])
            taken = until(own["wait_all"], following["irecv"], if_within=True)
            waited_ns[rank] += np.maximum(sent, taken).sum()
    return waited_ns / 1e9
