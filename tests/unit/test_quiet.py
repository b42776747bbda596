"""A probe that checks itself: it repeats what was disturbed, and marks what stays so."""

import dataclasses

import pytest
from support.machines import collective, small_machine

from paceline.core.foreign_cpu import CpuUse, cpu_use, parse_busy_s
from paceline.core.machine import Disturbance, Point, Rate
from paceline.probe import measure
from paceline.probe.measure import summary
from paceline.probe.protocol import CommunicationMeasurement, WorkerMeasurement
from paceline.probe.quiet import QuietParts, slower_with_threads
from paceline.studies.demo import QUIET_RUN_CORES, disturbances

STAT = """\
cpu  150 0 60 1900 20 5 5 30 0 0
cpu0 100 20 50 900 10 3 2 25 7 0
cpu1 50 0 10 1000 10 2 3 5 0 0
intr 12 3
"""


def test_busy_time_counts_work_and_what_the_hypervisor_took():
    assert parse_busy_s(STAT, [0]) == pytest.approx(2.0)
    assert parse_busy_s(STAT, [0, 1]) == pytest.approx(2.7)
    assert parse_busy_s(STAT, [0, 2]) is None
    assert parse_busy_s("cpu0 1 2 3\n", [0]) is None


def test_what_this_process_uses_is_not_foreign():
    begin = CpuUse(at_s=10.0, busy_s=100.0, own_s=3.0)
    end = CpuUse(at_s=12.0, busy_s=103.0, own_s=4.0)
    assert end.foreign_cores(begin) == pytest.approx(1.0)
    assert end.foreign_cores(begin, others_s=1.5) == pytest.approx(0.25)
    assert end.foreign_cores(begin, others_s=5.0) == 0.0


def test_the_kernel_says_how_busy_this_machine_was(tmp_path):
    begin, end = cpu_use(), cpu_use()
    assert end.busy_s >= begin.busy_s > 0
    assert end.own_s >= begin.own_s > 0
    assert cpu_use(root=tmp_path) is None


class Neighbour:
    """A neighbour's CPU use, attempt by attempt, each a second long; one core of our own."""

    def __init__(self, *foreign_cores):
        self.foreign_cores = list(foreign_cores)
        self.attempts = 0
        self.at_s = 0.0
        self.busy_s = 0.0

    def measure(self):
        cores = self.foreign_cores[min(self.attempts, len(self.foreign_cores) - 1)]
        self.attempts += 1
        self.at_s += 1.0
        self.busy_s += 1.0 + cores
        return self.attempts

    def read(self):
        return CpuUse(at_s=self.at_s, busy_s=self.busy_s, own_s=self.at_s)

    def parts(self, repeat_s=5.0):
        return QuietParts(repeat_s=repeat_s, read=self.read, now_s=lambda: self.at_s)


def test_what_was_quiet_is_measured_once():
    neighbour = Neighbour(0.05)
    parts = neighbour.parts()
    assert parts.measure("rates", neighbour.measure) == 1
    assert parts.disturbances("alone") == ()
    assert parts.repetitions("alone") == ""


def test_what_was_disturbed_is_repeated_until_it_is_quiet():
    neighbour = Neighbour(0.8, 0.9, 0.1, 0.7)
    parts = neighbour.parts()
    assert parts.measure("rates", neighbour.measure) == 3
    assert parts.disturbances("alone") == ()
    parts.measure("memory", neighbour.measure)
    assert parts.repetitions("1 thread alone") == (
        "measured again, 1 thread alone: rates 2 times, memory 3 times (5.0 s more), "
        "as other processes used 0.80 cores"
    )


def test_what_stays_disturbed_is_repeated_while_time_is_left_and_marked():
    neighbour = Neighbour(0.8, 0.6, 0.7)
    parts = neighbour.parts(repeat_s=2.5)
    assert parts.measure("rates", neighbour.measure) == 2  # the least disturbed
    assert neighbour.attempts == 3
    (found,) = parts.disturbances("2 threads alone")
    assert (found.where, found.part) == ("2 threads alone", "rates")
    assert found.foreign_cores == pytest.approx(0.6)
    assert found.why == "other processes used 0.60 cores"


def test_repetitions_share_their_time():
    neighbour = Neighbour(0.8)
    parts = neighbour.parts(repeat_s=3.0)
    for name in ("overheads", "rates", "memory"):
        parts.measure(name, neighbour.measure)
    assert neighbour.attempts == 3 + 3
    assert len(parts.disturbances("alone")) == 3


def test_one_quiet_round_of_several_is_enough():
    neighbour = Neighbour(0.8, 0.1, 0.8)
    parts = neighbour.parts(repeat_s=0.0)
    parts.measure_rounds("rates", neighbour.measure, 3, lambda rounds: 1.0)
    assert parts.disturbances("alone") == ()


def test_rounds_that_do_not_agree_are_joined_by_more_and_marked_if_they_never_do():
    neighbour = Neighbour(0.0)
    parts = neighbour.parts()
    seconds = iter([1.0, 2.0, 1.1])
    agreeing = parts.measure_rounds(
        "rates",
        lambda: (neighbour.measure(), next(seconds))[1],
        2,
        lambda rounds: sorted(rounds)[1] / sorted(rounds)[0],
    )
    assert agreeing == [1.0, 2.0, 1.1]
    assert parts.disturbances("alone") == ()
    parts = neighbour.parts(repeat_s=2.0)
    assert len(parts.measure_rounds("rates", neighbour.measure, 2, lambda rounds: 1.5)) == 4
    (found,) = parts.disturbances("alone")
    assert found.why == "the two fastest rounds differ by a factor of 1.50"
    assert parts.repetitions("alone").endswith(f"as {found.why}")


def test_a_probe_says_what_it_measures_again(tmp_path, monkeypatch):
    """A busy machine's probe took twice the time that it names, and nothing said why."""
    communication = CommunicationMeasurement(collectives=(), ddp=(), repeated="measured again, x")
    worker = WorkerMeasurement(torch="2", compute=(), communication=communication)
    monkeypatch.setattr(measure, "_run_workers", lambda ranks, *_, **__: (worker,) * ranks)
    monkeypatch.setattr(measure, "_links", lambda *_, **__: ())
    monkeypatch.setattr(measure, "_tiers", lambda *_, **__: ())
    said = []
    measure.measure(tmp_path, quick=True, on_progress=said.append)
    assert said.count("measured again, x") == 2  # once for one process, once for two


def test_ranks_that_measure_together_decide_as_their_leader_does():
    """Two ranks on cores of their own: the neighbour is on the other one's."""
    sums = []

    def combine(values):  # the other rank's: as busy as it is itself, and a neighbour of 0.5 cores
        others = (1.5, 1.0, 1.0) if len(values) == 3 else (0.0,)
        sums.append([mine + theirs for mine, theirs in zip(values, others, strict=True)])
        return sums[-1]

    neighbour = Neighbour(0.0)
    parts = QuietParts(
        repeat_s=5.0,
        combine=combine,
        leads=False,
        read=neighbour.read,
        now_s=lambda: neighbour.at_s,
    )
    parts.measure("rates", neighbour.measure)
    assert neighbour.attempts == 1  # the leader has no time left
    (found,) = parts.disturbances("2 processes")
    assert found.foreign_cores == pytest.approx(0.5)


def test_a_kernel_that_does_not_say_disturbs_nothing():
    parts = QuietParts(repeat_s=5.0, read=lambda: None)
    assert parts.measure("rates", lambda: 7) == 7
    assert parts.disturbances("alone") == ()


def rate(operator, per_s, phase="forward"):
    return Rate(
        operator=operator,
        phase=phase,
        dtype="float32",
        threads=1,
        processes=1,
        unit="flops",
        source="probe",
        points=(Point(work=1.0, rate_per_s=9.0), Point(work=9.0, rate_per_s=per_s)),
    )


def test_threads_that_are_slower_than_one_are_named():
    one = [rate("matmul", 100.0), rate("softmax", 10.0), rate("embedding", 10.0)]
    quiet = [rate("matmul", 190.0), rate("softmax", 10.0), rate("embedding", 8.0)]
    assert slower_with_threads(one, quiet) == []  # a lookup runs on one thread anyway
    disturbed = [rate("matmul", 60.0), rate("softmax", 20.0), rate("softmax", 1.0, "backward")]
    assert slower_with_threads(one, disturbed) == ["matmul forward float32 0.60 times"]


def test_the_summary_names_what_was_disturbed_and_what_to_do():
    parts = (("1 thread", "rates", 0.4), ("2 threads", "rates", 0.5), ("2 threads", "memory", 0.9))
    disturbed = tuple(
        Disturbance(where=where, part=part, foreign_cores=cores, why=f"used {cores:.1f} cores")
        for where, part, cores in parts
    )
    *_, alone, together, advice = summary(dataclasses.replace(small_machine(), disturbed=disturbed))
    assert alone == "disturbed: 1 thread: rates; worst: rates, used 0.4 cores"
    assert together == "disturbed: 2 threads: rates, memory; worst: memory, used 0.9 cores"
    assert "probe again" in advice
    assert not any("disturbed" in line for line in summary(small_machine()))


def test_costs_between_hosts_are_called_by_the_term_of_the_guide():
    cost = collective("all_reduce", ranks=4, backend="paceline", algorithm="two_level", hosts=2)
    shown = "\n".join(summary(dataclasses.replace(small_machine(), collectives=(cost,))))
    assert "paceline all_reduce two levels between 4 ranks on 2 hosts: " in shown


def test_a_demo_says_what_was_disturbed_its_probe_or_its_training():
    machine = small_machine()
    for cores in (None, 0.0, QUIET_RUN_CORES):
        assert disturbances(machine, cores) == ()
    assert disturbances(machine, 0.8) == ("the training: other processes used 0.80 cores",)
    part = Disturbance(where="2 threads", part="rates", foreign_cores=0.5, why="used 0.5 cores")
    probed = dataclasses.replace(machine, disturbed=(part,))
    (found,) = disturbances(probed, 0.0)
    assert found == "the measurement of this machine, in 1 parts (2 threads, rates: used 0.5 cores)"
