"""A simulation from trace to figures: by hand, with errors and failures, and as a record."""

import dataclasses
import json
from pathlib import Path

import pytest
from support import queues

from paceline.core.errors import CorruptData, UsageError
from paceline.scheduler.cluster import Cluster, Level
from paceline.scheduler.events import Start
from paceline.scheduler.formats.read import read_queue
from paceline.scheduler.formats.workload import Queue
from paceline.scheduler.job import Job
from paceline.scheduler.placement import NodeDevices, Placement, Shape
from paceline.scheduler.policies.choose import make_policies
from paceline.scheduler.policies.fifo import Fifo
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.rates.muri import LockstepSharing
from paceline.scheduler.simulate.compare import fit_queue, simulate
from paceline.scheduler.simulate.engine import Simulation, World
from paceline.scheduler.simulate.scenario import MisjudgedRates, Scenario, make_world
from paceline.scheduler.simulate.study import decision_lines, run_study, to_json, to_report

GOLDEN = Path(__file__).parents[1] / "golden" / "queue-simulation.json"
CLUSTER = Cluster.of_text("2x4")


def queue_of(*jobs):
    return Queue(tuple(jobs), RateModel({}))


def small():
    """Three jobs for eight devices: the third waits for the first."""
    return queue_of(
        Job(name="wide", devices=8, work=100.0),
        Job(name="half", devices=4, work=50.0, submitted_s=10.0, tenant="a"),
        Job(name="one", devices=1, work=30.0, submitted_s=20.0, restart_s=5.0),
    )


def test_first_in_first_out_by_hand():
    run = simulate(small(), CLUSTER, Fifo(), Scenario())
    ends = {name: job.ended_s for name, job in run.outcome.jobs.items()}
    assert ends == {"wide": 100.0, "half": 150.0, "one": 130.0}
    figures = run.metrics
    assert figures.jct_mean_s == pytest.approx((100 + 140 + 110) / 3)
    assert figures.makespan_s == 150
    assert figures.allocated == pytest.approx((800 + 200 + 30) / (150 * 8))
    assert figures.jct_bound_s == pytest.approx(60)
    assert figures.makespan_bound_s == 100
    assert [(wait.devices, wait.mean_s) for wait in figures.waits] == [(1, 80), (4, 90), (8, 0)]


RATES = """profile,devices,rate,message_bytes,compute_s
heavy,1,1,4e8,0.1
heavy,4,4,,
heavy,8,6,,
light,1,1,1e3,0.1
"""


def completion_s(tmp_path, bandwidth_bytes_per_s, jobs):
    """Return when jobs end, first in first out, on two nodes of four devices and such a link."""
    (tmp_path / "rates.csv").write_text(RATES)
    (tmp_path / "jobs.csv").write_text("name,devices,profile,work\n" + jobs)
    queue = read_queue(tmp_path / "jobs.csv", rates=tmp_path / "rates.csv")
    levels = (
        Level(name="nvlink", bandwidth_bytes_per_s=50e9),
        Level(name="network", bandwidth_bytes_per_s=bandwidth_bytes_per_s),
    )
    cluster = Cluster(nodes=CLUSTER.nodes, levels=levels)
    study = run_study("jobs.csv", queue, cluster, [Fifo()], Scenario())
    return {name: job.ended_s for name, job in study.runs[0].outcome.jobs.items()}


def test_links_of_the_cluster_slow_down_what_exchanges_much_over_them(tmp_path):
    """Three devices of each node are taken: who comes then is on both nodes."""
    jobs = "a,3,light,30\nb,3,light,30\nheavy,2,heavy,10\n"
    slow, fast = (completion_s(tmp_path, bandwidth, jobs) for bandwidth in (1e9, 50e9))
    assert slow["a"] == fast["a"] < 30
    # A step over 4e8 bytes: 0.1 s and, at 1e9 bytes/s, 0.4 s of exchange less the 0.05 hidden.
    assert slow["heavy"] == pytest.approx(fast["heavy"] * 0.45 / 0.1)
    little = jobs.replace("heavy,2,heavy", "light,2,light")
    assert completion_s(tmp_path, 1e9, little) == completion_s(tmp_path, 50e9, little)


def test_a_measured_number_of_devices_was_measured_on_the_nodes_that_it_needs(tmp_path):
    jobs = "eight,8,heavy,60\n"
    assert completion_s(tmp_path, 1e9, jobs) == completion_s(tmp_path, 50e9, jobs) == {"eight": 10}
    # Six were not measured: 5 on the curve inside a node, and slower over the link.
    assert completion_s(tmp_path, 1e9, "six,6,heavy,60\n")["six"] > 2 * 60 / 5


def test_the_spread_of_a_rate_counts_on_more_nodes_than_needed_only():
    profile = Profile(alone={"gpu": {2: 2.0, 8: 8.0}}, spread={("gpu", 2): 0.5, ("gpu", 8): 0.5})
    rates = RateModel({"class": profile}).on(CLUSTER)
    job = Job(name="a", devices=8, profile="class", work=1.0)
    shapes = {"gpu": Shape("gpu", (4, 4), 1), "wide": Shape("gpu", (4, 3, 1), 1)}
    assert {name: rates.alone(job, shape) for name, shape in shapes.items()} == {
        "gpu": 8,
        "wide": 4,
    }
    assert rates.alone(job, Shape("gpu", (1, 1), 1)) == 1
    assert rates.alone(job, Shape("gpu", (2,), 0)) == 2


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("heavy,1,1,4e8,,", "line 2, compute_s"),
        ("heavy,1,1,,0.1,", "line 2, message_bytes"),
        ("heavy,1,1,4e8,0.1,1.5", "line 2, overlap"),
        ("heavy,1,1,4e8,0,", "line 2, compute_s"),
    ],
)
def test_a_wrong_exchange_names_line_and_field(tmp_path, line, where):
    (tmp_path / "jobs.csv").write_text("name,devices,profile,work\na,1,heavy,1\n")
    header = "profile,devices,rate,message_bytes,compute_s,overlap\n"
    (tmp_path / "rates.csv").write_text(header + line + "\n")
    with pytest.raises(CorruptData, match=where):
        read_queue(tmp_path / "jobs.csv", rates=tmp_path / "rates.csv")


def test_groups_of_nodes_of_one_type_are_numbered_on():
    cluster = Cluster.of_text("v100=1x8,v100=2x4,1x2,1x1")
    assert [node.name for node in cluster.nodes] == ["v100-0", "v100-1", "v100-2", "n0", "n1"]


@pytest.mark.parametrize("submitted_s", [1e7, 1.7e9])
def test_a_late_short_job_ends_although_the_clock_cannot_resolve_its_rest(submitted_s):
    for number in range(50):
        rate = 7.3 + number
        rates = RateModel({"m": Profile(alone={"gpu": {1: rate}})})
        only = Job(name="a", submitted_s=submitted_s, work=1.1 * rate, profile="m", start_s=0.3)
        world = World(jobs=[only], cluster=Cluster.of_text("1x1"), rates=rates)
        simulation = Simulation(world, Fifo(), rates)
        for _ in range(100):
            if not simulation.jobs_left:
                break
            simulation.step()
        assert not simulation.jobs_left


def test_the_same_scenario_gives_the_same_log_and_another_seed_another_one():
    # Durations known do not matter to first in, first out; failures do.
    logs = []
    for seed in (1, 1, 2):
        scenario = Scenario(durations=2.0, rate_error=0.3, node_mtbf_s=60.0, seed=seed)
        study = run_study("small", small(), CLUSTER, [Fifo()], scenario)
        logs.append("".join(decision_lines(study)))
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]
    assert '"action": "start"' in logs[0]


@pytest.mark.parametrize(
    ("scenario", "assumed"),
    [
        (
            Scenario(restart_s=0.0),
            "durations known exactly; restarts are free; no node fails",
        ),
        (
            Scenario(durations="unknown", restart_s=60.0, node_mtbf_s=7200.0),
            "durations unknown; a restart costs 60 s; a node fails every 2 h; seed 1",
        ),
    ],
)
def test_the_first_line_says_what_is_assumed(scenario, assumed):
    report = to_report(run_study("small", small(), CLUSTER, [Fifo()], scenario))
    assert report.summary.endswith("; " + assumed)


def test_failures_cost_restarts_and_all_jobs_still_end():
    scenario = Scenario(node_mtbf_s=60.0, restart_s=7.0)
    run = simulate(small(), CLUSTER, Fifo(), scenario)
    assert run.metrics.jobs == 3
    assert run.metrics.restarts > 0
    assert run.metrics.makespan_s > 150


def test_a_scheduler_is_given_wrong_durations_and_the_world_keeps_the_right_ones():
    wrong = make_world(small(), CLUSTER, Scenario(durations=2.0, seed=3))
    unknown = make_world(small(), CLUSTER, Scenario(durations="unknown"))
    for job in small().jobs:
        assert 0.5 <= wrong.told(job).work / job.work <= 2
        assert wrong.told(job).work != job.work
        assert unknown.told(job).work is None
        assert wrong.told(job) == wrong.told(job)
    assert [job.work for job in wrong.jobs] == [100.0, 50.0, 30.0]


def test_wrong_rates_are_wrong_by_the_share_at_most_and_0_stays_0():
    sharing = LockstepSharing({"a": (0.1, 0.2, 0.0)}, {"a": 0.3}, most=2)
    job, shape = Job(name="a", profile="a", work=1.0), Shape("gpu", (1,), 0)
    rates = RateModel({}, sharing)
    for seed in range(20):
        believed = MisjudgedRates(rates, Scenario(rate_error=0.3, seed=seed))
        assert 0.7 <= believed.alone(job, shape) <= 1.3
        assert believed.alone(job, shape) == believed.alone(job, shape)
        kept = rates.kept(job, [job], shape)
        assert 0.7 * kept <= believed.kept(job, [job], shape) <= 1.3 * kept
        assert believed.kept(job, [job, job], shape) == 0
    factors = {
        MisjudgedRates(rates, Scenario(rate_error=0.3, seed=seed)).alone(job, shape)
        for seed in range(20)
    }
    assert len(factors) == 20


def test_a_job_that_can_never_run_is_left_out_with_the_reason():
    jobs = (*small().jobs, Job(name="huge", devices=9, work=1.0))
    queue, refused = fit_queue(queue_of(*jobs), CLUSTER)
    assert [job.name for job in queue.jobs] == ["wide", "half", "one"]
    assert "9 devices" in refused["huge"]
    study = run_study("small", queue_of(*jobs), CLUSTER, [Fifo()], Scenario())
    assert to_json(study)["refused"] == [{"name": "huge", "reason": refused["huge"]}]
    assert "huge" in to_report(study).cautions[0]


def test_device_types_count_only_where_the_cluster_has_types():
    job = Job(name="a", device_types=("a100",), work=1.0)
    assert fit_queue(queue_of(job), CLUSTER)[1] == {}
    typed = Cluster.of_text("v100=2x4")
    assert "a100" in fit_queue(queue_of(job), typed)[1]["a"]
    with pytest.raises(UsageError, match="no job of the trace can run"):
        run_study("small", queue_of(job), typed, [Fifo()], Scenario())


@dataclasses.dataclass
class _Idle:
    """A policy that starts nothing; with `wakes`, it asks to be woken for ever."""

    wakes: bool
    name: str = "idle"

    def choose(self, state, events):
        return iter(())

    def wake_s(self, state):
        return state.now_s + 1 if self.wakes else None


@pytest.mark.parametrize("wakes", [False, True])
def test_a_policy_that_leaves_jobs_waiting_for_ever_is_named(wakes):
    with pytest.raises(UsageError, match=r"idle.*waiting for ever"):
        simulate(small(), CLUSTER, _Idle(wakes), Scenario())


def test_rounds_let_jobs_start_at_multiples_only():
    (policy,) = make_policies(["fifo"], round_s=60.0)
    run = simulate(small(), CLUSTER, policy, Scenario())
    starts = {name: job.started_s for name, job in run.outcome.jobs.items()}
    assert starts == {"wide": 0.0, "half": 120.0, "one": 120.0}


def test_policies_are_found_by_name():
    assert [policy.name for policy in make_policies(["fifo", "fifo"])] == ["fifo"]
    assert "fifo" in [policy.name for policy in make_policies(["all"])]
    with pytest.raises(UsageError, match="fifo"):
        make_policies(["fifoo"])
    with pytest.raises(UsageError, match="can choose its objective"):
        make_policies(["fifo"], objective="makespan")
    with pytest.raises(UsageError, match="makespan"):
        make_policies(["paceline"], objective="makespann")
    (policy,) = make_policies(["paceline"], objective="makespan")
    assert policy.objective != make_policies(["paceline"])[0].objective


class _Together:
    """Starts all jobs at once on the same two devices, one of each node."""

    name = "together"

    def choose(self, state, events):
        parts = (NodeDevices(node="n0", devices=(1, 3)), NodeDevices(node="n1", devices=(0,)))
        for name in list(state.waiting):
            yield Start(name=name, placement=Placement(parts=parts))

    def wake_s(self, state):
        return None


class _HalfEach:
    """Two jobs keep half of their rates on shared devices."""

    most = 2

    def kept(self, job, neighbours, shape):
        return 0.5 ** len(neighbours)


def test_the_report_has_the_devices_of_each_job_numbered_through_all_nodes():
    jobs = [Job(name=name, devices=3, work=10.0) for name in "ab"]
    queue = Queue(tuple(jobs), RateModel({}, _HalfEach()))
    study = run_study("pair", queue, CLUSTER, [_Together()], Scenario())
    (run,) = to_report(study).runs
    pieces = ((1, 1), (3, 1), (4, 1))
    assert sorted((held.name, held.begin_s, held.end_s, held.pieces) for held in run.held) == [
        ("a", 0.0, 20.0, pieces),
        ("b", 0.0, 20.0, pieces),
    ]
    assert run.jct_s.tolist() == [20.0, 20.0]
    assert run.alone_s.tolist() == [10.0, 10.0]
    assert run.figures.allocated == pytest.approx(3 * 20 / (20 * 8))


def test_figures_of_a_small_trace_stay_as_they_were(tmp_path):
    trace, rates = tmp_path / "trace", tmp_path / "rates.json"
    trace.write_text(queues.GAVEL)
    rates.write_text(queues.GAVEL_RATES)
    queue = read_queue(trace, rates=rates)
    scenario = Scenario(durations=2.0, node_mtbf_s=60.0, restart_s=30.0)
    study = run_study("small", queue, Cluster.of_text("v100=2x2"), [Fifo()], scenario)
    assert json.loads(json.dumps(to_json(study))) == json.loads(GOLDEN.read_text())


def test_a_published_trace_is_played_to_its_end():
    queue = read_queue(queues.published("muri", "trace3.csv"))
    run = simulate(queue, Cluster.of_text("8x8"), Fifo(), Scenario(), log=False)
    assert run.metrics.jobs == 992
    # Known of the trace: what jobs take alone, 1.5 % included; starts of 4 to 46 s are added.
    assert run.metrics.jct_bound_s / 3600 == pytest.approx(13.213, abs=0.01)
    assert run.metrics.makespan_s / 3600 >= 2268
