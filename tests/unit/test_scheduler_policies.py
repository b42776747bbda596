"""Each policy on a queue of a few jobs, computed by hand."""

import dataclasses

import pytest

from paceline.scheduler.cluster import Cluster, Node
from paceline.scheduler.decide import decide
from paceline.scheduler.events import (
    Ended,
    Measured,
    NodeBack,
    NodeLost,
    Preempt,
    Refuse,
    Start,
    Submitted,
    Timer,
)
from paceline.scheduler.job import Job
from paceline.scheduler.placement import Shape
from paceline.scheduler.policies import POLICIES
from paceline.scheduler.policies.fifo import Fifo
from paceline.scheduler.policies.gandiva import Gandiva
from paceline.scheduler.policies.las import LeastAttained
from paceline.scheduler.policies.marble import Marble
from paceline.scheduler.policies.muri import Muri, match
from paceline.scheduler.policies.optimus import Optimus
from paceline.scheduler.policies.srtf import ShortestRemaining
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.rates.sharing import PairKey, PairTable
from paceline.scheduler.simulate.engine import Simulation, World
from paceline.scheduler.simulate.metrics import alone_times_s, metrics
from paceline.scheduler.simulate.synthetic import (
    CLASSES,
    FAST_LEVELS,
    SLOW_LEVELS,
    summit_cluster,
    summit_trace,
)
from paceline.scheduler.state.inventory import Inventory
from paceline.scheduler.state.state import State

ONE_NODE = Cluster.of_text("1x4")
PLAIN = RateModel({})


def job(name, work, devices=1, *, at_s=0.0, **fields):
    return Job(name=name, work=work, devices=devices, submitted_s=at_s, **fields)


def play(policy, jobs, *, cluster=ONE_NODE, rates=PLAIN, **world):
    return Simulation(World(jobs=jobs, cluster=cluster, rates=rates, **world), policy, rates).run()


def ends(policy, jobs, **settings):
    outcome = play(policy, jobs, **settings)
    return {name: end.ended_s for name, end in outcome.jobs.items()}


def test_fifo_lets_the_head_of_the_queue_block_those_behind_it():
    jobs = [job("a", 10, 3), job("b", 10, 4), job("c", 1, 1)]
    assert ends(Fifo(), jobs) == {"a": 10, "b": 20, "c": 21}


def test_the_time_at_which_a_policy_is_asked_is_among_the_inputs_of_its_decisions():
    """A deadline or a round that passes changes what is decided although nothing else happened."""

    def inputs(*events):
        state = State(ONE_NODE, PLAIN)
        for event in [Submitted(at_s=0.0, job=job("a", 10)), *events]:
            state.apply(event)
        return state.inputs

    digests = [inputs(), inputs(Timer(at_s=60.0)), inputs(Timer(at_s=61.0))]
    assert len(set(digests)) == 3
    assert inputs(Timer(at_s=60.0)) == digests[1]


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "fifo-nodes"])
def test_a_job_goes_to_the_node_that_holds_its_data_if_another_one_is_no_better(name):
    cluster = Cluster.of_text("2x4")
    state = State(cluster, PLAIN)
    policy, round_s = POLICIES[name](), 600.0

    def submitted(at_s, *jobs):
        made = decide(policy, state, [Submitted(at_s=at_s, job=each) for each in jobs])
        starts = {each.action.name: each.action for each in made if isinstance(each.action, Start)}
        return [starts[each.name].placement.parts[0].node for each in jobs]

    first, second = submitted(0.0, job("a", 1e6, 4), job("b", 1e6, 4, dataset="images"))
    decide(policy, state, [Ended(at_s=round_s, name="a")])
    decide(policy, state, [Ended(at_s=2 * round_s, name="b")])
    assert submitted(3 * round_s, job("other", 1e6, 4)) == [first]
    decide(policy, state, [Ended(at_s=4 * round_s, name="other")])
    decide(
        policy,
        state,
        [NodeLost(at_s=4 * round_s, node=first), NodeBack(at_s=4 * round_s, node=first)],
    )
    assert submitted(5 * round_s, job("c", 1e6, 2, dataset="images")) == [second]


def test_a_tighter_node_comes_before_one_that_holds_the_data():
    inventory = Inventory(Cluster.of_text("3x4"))
    assert inventory.find("gpu", 2, prefer=[2]) == ((2, 0b0011),)
    inventory.take(((1, 0b0011),))
    assert inventory.find("gpu", 2, prefer=[2]) == ((1, 0b1100),)
    assert inventory.find("gpu", 4, prefer=[1, 2]) == ((2, 0b1111),)
    assert inventory.find("gpu", 6, prefer=[2]) == ((0, 0b0011), (2, 0b1111))


def test_a_lost_node_holds_no_data():
    state = State(Cluster.of_text("2x4"), PLAIN)
    policy = Fifo()
    decide(policy, state, [Submitted(at_s=0.0, job=job("a", 10, 8, dataset="images"))])
    assert list(state.data_nodes["images"]) == [0, 1]
    decide(policy, state, [NodeLost(at_s=1.0, node="n1")])
    assert list(state.data_nodes["images"]) == [0]


def test_a_batch_system_gives_whole_nodes_although_jobs_use_one_device_of_them():
    cluster = Cluster.of_text("2x4")
    jobs = [job(name, 10, 1) for name in "abc"]
    assert ends(Fifo(whole_nodes=True), jobs, cluster=cluster) == {"a": 10, "b": 10, "c": 20}
    assert ends(Fifo(), jobs, cluster=cluster) == {"a": 10, "b": 10, "c": 10}
    wide = [job("a", 10, 5), job("b", 5, 1)]  # five devices: two nodes
    assert ends(Fifo(whole_nodes=True), wide, cluster=cluster) == {"a": 10, "b": 15}


def test_srtf_preempts_for_less_time_left_and_srsf_for_less_service():
    # At 4 s a has 6 s left: b (5 s, 4 devices) is shorter in time, but not in service.
    jobs = [job("a", 10, 1), job("b", 5, 4, at_s=4)]
    assert ends(ShortestRemaining(), jobs) == {"a": 15, "b": 9}
    assert ends(ShortestRemaining(service=True), jobs) == {"a": 10, "b": 15}


def test_srtf_fills_gaps_with_shorter_jobs_and_keeps_running_ones_in_place():
    jobs = [job("a", 10, 3), job("b", 11, 4), job("c", 32, 1)]
    outcome = play(ShortestRemaining(), jobs)
    assert {n: j.ended_s for n, j in outcome.jobs.items()} == {"a": 10, "b": 21, "c": 43}
    # c ran beside a, was stopped for b, and ended after it; a and b were never stopped.
    assert {name: end.starts for name, end in outcome.jobs.items()} == {"a": 1, "b": 1, "c": 2}


def test_jobs_that_must_not_be_preempted_keep_their_devices():
    jobs = [job("a", 10, 1, preemptible=False), job("b", 1, 4, at_s=4)]
    for name in POLICIES:
        assert ends(POLICIES[name](), jobs)["a"] == 10, name


def test_las_lets_new_jobs_pass_those_that_attained_more():
    # a reaches level 1 at 8 s (first_s = 8 device seconds) only if it ran on one device so long.
    policy = LeastAttained(first_s=8, levels=2)
    jobs = [job("a", 20, 1), job("b", 4, 4, at_s=4), job("c", 2, 4, at_s=10)]
    # Both in level 0 at 4 s: a came first and goes on. At 8 s a is in level 1: b runs until it has
    # 8 device seconds itself, 2 s later; then both are in level 1 and a came first. c arrives
    # at that moment in level 0 and ends when it would change the level.
    assert ends(policy, jobs) == {"a": 24, "c": 12, "b": 26}


def test_las_promotes_a_job_that_waited_long_for_what_it_ran():
    # a attains 16 device seconds in 4 s; then a new job comes whenever one ends.
    jobs = [job("a", 8, 4)] + [job(f"s{i}", 4, 4, at_s=4 * i + 4) for i in range(6)]
    assert ends(LeastAttained(first_s=16, levels=2), jobs)["a"] == 32
    # Promoted after 2 x 4 s, it is the first in level 0 until it has 16 device seconds more.
    assert ends(LeastAttained(first_s=16, levels=2, promote=2), jobs)["a"] == 16


def test_optimus_gives_the_next_device_where_the_time_left_falls_most():
    curves = {"linear": {1: 1.0, 2: 2.0, 4: 4.0}, "flat": {1: 1.0, 2: 1.1, 4: 1.2}}
    rates = RateModel({name: Profile(alone={"gpu": curve}) for name, curve in curves.items()})
    jobs = [
        job("a", 100, 1, max_devices=4, profile="linear"),
        job("b", 100, 1, max_devices=4, profile="flat"),
    ]
    outcome = play(Optimus(), jobs, rates=rates)
    first = {d.action.name: d.action.placement.devices for d in outcome.decisions[:2]}
    assert first == {"a": 3, "b": 1}
    assert outcome.jobs["a"].ended_s == pytest.approx(100 / 3)


def test_optimus_asks_at_its_interval_only():
    jobs = [job("a", 10), job("b", 10, at_s=100)]
    assert ends(POLICIES["optimus"](), jobs) == {"a": 10, "b": 610}


def pair_rates(kept):
    profiles = {name: Profile(alone={"gpu": {4: 1.0}}) for name in "xy"}
    factors = {
        PairKey("gpu", 4, first, other): kept for first in "xy" for other in "xy" if first != other
    }
    return RateModel(profiles, PairTable(factors))


def test_gandiva_keeps_a_pair_that_pays():
    rates = pair_rates(0.75)
    jobs = [job("a", 750, 4, profile="x"), job("b", 750, 4, profile="y")]
    assert ends(Gandiva(), jobs, rates=rates) == {"a": 1000, "b": 1000}


def test_gandiva_parts_a_pair_after_three_slow_measurements_and_tries_it_no_more():
    jobs = [job("a", 2000, 4, profile="x"), job("b", 700, 4, profile="y")]
    outcome = play(Gandiva(trial_s=100, slow=3), jobs, rates=pair_rates(0.4))
    # 300 s together at 0.4 of the rate, then a alone, then b: 300 + 1880 and 580 more.
    assert outcome.jobs["a"].ended_s == pytest.approx(2180)
    assert outcome.jobs["b"].ended_s == pytest.approx(2760)
    stops = [d for d in outcome.decisions if isinstance(d.action, Preempt)]
    assert [(d.at_s, d.action.name) for d in stops] == [(300, "b")]
    assert "total of 0.80" in stops[0].action.reason


def test_gandiva_measures_what_jobs_report_and_not_what_was_estimated():
    believed, true = pair_rates(0.75), pair_rates(0.4)
    jobs = [job("a", 2000, 4, profile="x"), job("b", 700, 4, profile="y")]
    world = World(jobs=jobs, cluster=ONE_NODE, rates=true, report_s=50)
    outcome = Simulation(world, Gandiva(trial_s=100, slow=3), believed).run()
    assert [d.at_s for d in outcome.decisions if isinstance(d.action, Preempt)] == [300]


KNEE = {1: 1.0, 2: 1.7, 3: 2.25, 4: 2.5}  # gains 1, 0.7, 0.55, 0.25: three pay at theta = 0.5


def knee_rates(**sharing):
    return RateModel({"m": Profile(alone={"gpu": KNEE})}, **sharing)


def test_marble_gives_the_devices_that_pay_and_lets_jobs_share_a_node():
    first, second = (job(n, 100, 4, min_devices=1, max_devices=4, profile="m") for n in "ab")
    outcome = play(Marble(), [first, second], rates=knee_rates())
    sizes = [d.action.placement.devices for d in outcome.decisions if isinstance(d.action, Start)]
    assert sizes[:2] == [3, 1]  # g* of the first; the largest that is left for the second
    # b gets the other devices when a has ended: 100 / 2.25 s later, its 44.4 units done.
    grown = outcome.decisions[-1]
    assert grown.at_s == pytest.approx(100 / 2.25)
    assert grown.action.placement.devices == 4
    assert outcome.jobs["b"].ended_s == pytest.approx(100 / 2.25 + (100 - 100 / 2.25) / 2.5)


def test_marble_resizes_only_for_more_than_two_restarts():
    jobs = [job(n, 100, 4, min_devices=1, max_devices=4, profile="m", restart_s=100) for n in "ab"]
    outcome = play(Marble(), jobs, rates=knee_rates())
    assert [type(d.action) for d in outcome.decisions] == [Start, Start]


def test_marble_takes_back_what_does_not_pay_when_somebody_waits():
    jobs = [
        job("a", 100, 4, min_devices=1, max_devices=4, profile="m"),
        job("b", 10, 1, at_s=5, profile="m"),
    ]
    outcome = play(Marble(), jobs, rates=knee_rates())
    actions = [(type(d.action).__name__, d.action.name, d.at_s) for d in outcome.decisions]
    # Alone, a grows from 3 to 4 at once; at 5 s it returns to 3, so that b starts.
    assert actions[:3] == [("Start", "a", 0), ("Preempt", "a", 0), ("Start", "a", 0)]
    assert ("Start", "b", 5) in actions
    assert outcome.jobs["b"].ended_s == 15


def test_marble_takes_back_what_does_not_pay_although_the_next_job_would_fit_worse():
    jobs = [
        job("a", 100, 4, min_devices=1, max_devices=4, profile="m"),
        job("b", 10, 4, at_s=5, min_devices=1, max_devices=4, profile="m"),
    ]
    outcome = play(Marble(), jobs, cluster=Cluster.of_text("1x5"), rates=knee_rates())
    starts = [
        (d.action.name, d.action.placement.devices)
        for d in outcome.decisions
        if d.at_s == 5 and isinstance(d.action, Start)
    ]
    # One device was free, and a had grown from its 3 to 4.
    assert starts == [("a", 3), ("b", 2)]


def test_marble_knees_follow_theta():
    state = State(ONE_NODE, knee_rates())
    from_one = job("a", 1, 4, min_devices=1, max_devices=4, profile="m")
    state.apply(Submitted(at_s=0.0, job=from_one))
    waiting = state.waiting["a"]
    knees = {theta: Marble(theta=theta).knee(state, waiting, "gpu") for theta in (0.2, 0.6, 0.9)}
    assert knees == {0.2: 4, 0.6: 2, 0.9: 1}


def test_marble_shares_devices_only_in_its_second_mode():
    rates = pair_rates(0.7)
    jobs = [job("a", 70, 4, profile="x"), job("b", 70, 4, profile="y")]
    assert ends(Marble(), jobs, rates=rates) == {"a": 70, "b": 140}
    assert ends(Marble(share=True), jobs, rates=rates) == {"a": 100, "b": 100}
    assert ends(Marble(share=True), jobs, rates=pair_rates(0.52)) == {"a": 70, "b": 140}


def stage_rates():
    """Two classes whose steps of 4 s fit: a round of 5 s does both, one of 7 s two equal ones."""
    names = ("cpu", "gpu")
    factors = {
        PairKey("gpu", 4, own, other): 4 / (7 if own == other else 5)
        for own in names
        for other in names
    }
    profiles = {name: Profile(alone={"gpu": {4: 0.25}}) for name in names}
    return RateModel(profiles, PairTable(factors))


def test_marble_parts_a_job_that_stands_still_from_its_neighbour():
    rates = RateModel(
        {"m": Profile(alone={"gpu": {1: 1.0}})},
        PairTable({PairKey("gpu", 1, "m", "m"): 0.7}),
    )
    policy, state = Marble(share=True), State(Cluster.of_text("1x2"), rates)
    submitted = [Submitted(at_s=0.0, job=job(name, 100, profile="m")) for name in "abc"]
    decide(policy, state, submitted)
    assert [other.name for other in state.running["c"].neighbours] == ["a"]
    decide(policy, state, [Measured(at_s=2.0, name="c", work_done=0.0, rate=0.0)])
    decide(policy, state, [Ended(at_s=3.0, name="b")])
    assert state.running["c"].neighbours == []


def test_muri_pairs_jobs_whose_stages_fit_and_only_if_devices_are_short():
    jobs = [
        job("a", 25, 4, profile="cpu"),
        job("b", 25, 4, profile="cpu"),
        job("c", 25, 4, profile="gpu"),
        job("d", 25, 4, profile="gpu"),
    ]
    two = Cluster.of_text("2x4")
    outcome = play(Muri(most=2), jobs, cluster=two, rates=stage_rates())
    assert {j.ended_s for j in outcome.jobs.values()} == {125}
    places = _places(outcome)
    assert places["a"] != places["b"]
    assert {places["c"], places["d"]} == {places["a"], places["b"]}
    enough = play(Muri(), jobs, cluster=Cluster.of_text("4x4"), rates=stage_rates())
    assert len(set(_places(enough).values())) == 4


def test_muri_orders_by_attained_service_where_durations_are_not_known():
    jobs = [job("a", 100, 4), job("b", 10, 4, at_s=50)]
    nothing = {"told": lambda told: dataclasses.replace(told, work=None)}
    assert ends(Muri(), jobs, **nothing) == {"a": 110, "b": 60}
    assert ends(Muri(), [job("a", 55, 4), job("b", 10, 4, at_s=50)])["a"] == 55


def test_a_matching_exchanges_partners_where_the_best_pair_first_is_wrong():
    # Best first takes (1, 2) and is left with (0, 3): 10 + 1. The other way gives 9 + 9.
    weights = {(1, 2): 10.0, (0, 1): 9.0, (2, 3): 9.0, (0, 3): 1.0}
    assert match(4, weights) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("name", POLICIES)
def test_a_job_that_can_never_run_is_refused_with_the_reason(name):
    memory = Cluster(nodes=(Node(name="n", device_type="gpu", devices=4, memory_bytes=8 << 30),))
    jobs = [
        job("wide", 1, 5),
        job("type", 1, 1, device_types=("tpu",)),
        job("memory", 1, 1, memory_bytes=9 << 30),
        job("ok", 1, 4),
    ]
    outcome = play(POLICIES[name](), jobs, cluster=memory)
    assert outcome.jobs["wide"].refused == "it needs 5 devices of one type, the cluster has 4"
    assert outcome.jobs["type"].refused == "it asks for tpu, the cluster has gpu"
    assert "9.0 GiB on each device, the largest has 8.0 GiB" in outcome.jobs["memory"].refused
    assert outcome.jobs["ok"].ended_s == 1
    assert sum(isinstance(d.action, Refuse) for d in outcome.decisions) == 3


def test_a_type_with_rates_needs_the_devices_and_one_with_devices_the_rates():
    rates = RateModel({"m": Profile(alone={"v100": {4: 1.0}})})
    cluster = Cluster.of_text("v100=1x4,k80=1x8")
    outcome = play(Fifo(), [job("m", 1, 8, profile="m"), job("b", 1)], cluster=cluster, rates=rates)
    assert outcome.jobs["m"].refused == "its class 'm' was never measured on k80"
    assert outcome.jobs["b"].ended_s == 1


@pytest.mark.parametrize("name", POLICIES)
def test_an_elastic_job_that_asks_for_too_much_gets_what_there_is(name):
    jobs = [job("a", 8, 8, min_devices=2), job("b", 1, 1)]
    outcome = play(POLICIES[name](), jobs)
    assert all(end.ended_s is not None for end in outcome.jobs.values())


@pytest.mark.parametrize("name", POLICIES)
def test_starts_name_their_reason(name):
    outcome = play(POLICIES[name](), [job(f"j{i}", 10, 3) for i in range(3)])
    assert all(decision.action.reason for decision in outcome.decisions)


def test_a_start_names_the_job_that_it_was_preferred_to():
    outcome = play(ShortestRemaining(), [job("a", 3600, 4), job("b", 7200, 4)])
    start = outcome.decisions[0].action
    assert (start.name, start.rejected) == ("a", "b on 4 devices: 2.00 h left, rank 2 of 2")


def test_the_bound_counts_the_whole_cluster_of_an_elastic_job():
    rates = RateModel({"m": Profile(alone={"gpu": {1: 1.0, 6: 6.0}})})
    wide = job("a", 60, 1, max_devices=16, profile="m")
    assert alone_times_s([wide], Cluster.of_text("1x6"), rates) == pytest.approx(10)


@pytest.mark.parametrize("seed", range(2))
def test_marble_beats_the_batch_system_and_optimus_on_the_drawn_trace(seed):
    queue, cluster = summit_trace(seed), summit_cluster()
    work = sum(j.work / CLASSES[j.profile].samples_per_s for j in queue.jobs)
    figures = {}
    for name in ("fifo-nodes", "optimus", "marble", "marble-share"):
        outcome = play(POLICIES[name](), queue.jobs, cluster=cluster, rates=queue.rates)
        figures[name] = metrics(outcome, queue.rates)
    throughput = {name: work / figure.makespan_s for name, figure in figures.items()}
    for name in ("marble", "marble-share"):
        assert throughput[name] > 1.2 * throughput["fifo-nodes"]
        assert figures[name].jct_mean_s < figures["optimus"].jct_mean_s


@pytest.mark.parametrize("seed", range(2))
def test_locality_gains_on_slow_links_and_about_nothing_on_fast_ones(seed):
    """What MARBLE found on Summit, and what it would not have found on Ethernet."""
    gains = {}
    for name, levels in (("fast", FAST_LEVELS), ("slow", SLOW_LEVELS)):
        queue, cluster = summit_trace(seed, levels=levels), summit_cluster(levels=levels)
        anywhere, near = (
            metrics(
                play(
                    ShortestRemaining(consolidate=near),
                    queue.jobs,
                    cluster=cluster,
                    rates=queue.rates,
                ),
                queue.rates,
            ).jct_mean_s
            for near in (False, True)
        )
        gains[name] = anywhere / near - 1
    assert gains["fast"] < 0.02
    assert gains["slow"] > 0.1


def test_equal_seeds_draw_equal_traces():
    assert summit_trace(3).jobs == summit_trace(3).jobs != summit_trace(4).jobs
    rates = summit_trace(3).rates
    shape = Shape("v100", (6,), 0)
    speedups = {
        name: rates.alone(Job(name="a", profile=name), shape) / kind.samples_per_s
        for name, kind in CLASSES.items()
    }
    assert speedups == pytest.approx(
        {"resnet50": 4.26, "inception3": 3.83, "vgg16": 2.51, "lstm": 2.14, "alexnet": 1.84},
        abs=0.02,
    )


def _places(outcome):
    starts = [d.action for d in outcome.decisions if isinstance(d.action, Start)]
    return {start.name: start.placement.parts for start in starts}
