"""Whatever happens to a queue, no policy places what is not there, or loses a job."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.examples import examples
from support.scheduler_worlds import CLUSTERS, Driver

from paceline.scheduler.policies import POLICIES

STEPS = settings(
    max_examples=examples(12),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
RANDOM_EVENTS = 100_000  # over all policies


class QueueMachine(RuleBasedStateMachine):
    """Submissions, ends, cancellations, failures and reports in any order."""

    policy_name = ""

    @initialize(cluster=st.sampled_from(sorted(CLUSTERS)), seed=st.integers(0, 2**32))
    def begin(self, cluster, seed):
        self.rng = np.random.default_rng(seed)
        self.driver = Driver(POLICIES[self.policy_name](), CLUSTERS[cluster])

    @rule(known=st.booleans())
    def submit(self, known):
        self.driver.submit(self.rng, work=known)

    @precondition(lambda self: self.driver.placed)
    @rule(data=st.data())
    def end(self, data):
        self.driver.end(data.draw(st.sampled_from(self.driver.running)))

    @precondition(lambda self: self.driver.placed)
    @rule(data=st.data())
    def stop(self, data):
        self.driver.stop(data.draw(st.sampled_from(self.driver.running)))

    @precondition(lambda self: self.driver.alive)
    @rule(data=st.data())
    def cancel(self, data):
        self.driver.cancel(data.draw(st.sampled_from(sorted(self.driver.alive))))

    @precondition(lambda self: len(self.driver.lost) < len(self.driver.nodes))
    @rule(data=st.data())
    def lose(self, data):
        nodes = sorted(self.driver.nodes.keys() - self.driver.lost)
        self.driver.lose(data.draw(st.sampled_from(nodes)))

    @precondition(lambda self: self.driver.lost)
    @rule(data=st.data())
    def restore(self, data):
        self.driver.restore(data.draw(st.sampled_from(sorted(self.driver.lost))))

    @precondition(lambda self: self.driver.placed)
    @rule(data=st.data(), factor=st.floats(0.2, 1.5))
    def measure(self, data, factor):
        self.driver.measure(data.draw(st.sampled_from(self.driver.running)), factor)

    @rule(seconds=st.floats(0.1, 4000))
    def wait(self, seconds):
        self.driver.wait(seconds)

    def teardown(self):
        if hasattr(self, "driver"):
            again = self.driver.replayed(POLICIES[self.policy_name]())
            assert again == self.driver.decisions


@pytest.mark.parametrize("name", POLICIES)
def test_devices_exist_once_and_no_job_is_lost(name):
    machine = type("Machine", (QueueMachine,), {"policy_name": name})
    machine.TestCase.settings = STEPS
    machine.TestCase("runTest").runTest()


def _random_events(name, cluster, count, seed=0):
    rng = np.random.default_rng(seed)
    driver = Driver(POLICIES[name](), CLUSTERS[cluster])
    while len(driver.instants) < count:
        driver.random_event(rng)
    assert driver.replayed(POLICIES[name]()) == driver.decisions
    return driver


@pytest.mark.parametrize("name", POLICIES)
def test_random_events_keep_the_state_right(name):
    for cluster in CLUSTERS:
        driver = _random_events(name, cluster, 300)
        assert driver.decisions


@pytest.mark.campaign("scheduler")
@pytest.mark.parametrize("name", POLICIES)
def test_a_hundred_thousand_random_events(name):
    for cluster in CLUSTERS:
        _random_events(name, cluster, RANDOM_EVENTS // len(POLICIES) // len(CLUSTERS) + 1, seed=1)
