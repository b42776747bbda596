"""The daemon's end of jobs' processes: real supervisors, watched without a daemon."""

import os
import select
import selectors

import pytest

from paceline.scheduler.local.attempt import AttemptFolder, Order
from paceline.scheduler.local.records import Attempt
from paceline.scheduler.local.running import Running
from paceline.scheduler.local.turns import Began, Exited
from paceline.scheduler.placement import NodeDevices, Placement

DEADLINE_S = 60.0
ATTEMPT = Attempt(
    job="a", number=1, placement=Placement(parts=(NodeDevices(node="local", devices=(0,)),))
)


@pytest.fixture
def selector():
    with selectors.DefaultSelector() as made:
        yield made


@pytest.fixture
def running(selector):
    watched = Running(selector)
    yield watched
    watched.close()


def order(*command, folder="/"):
    return Order(command=command, folder=folder, environ=dict(os.environ))


class TestReading:
    @pytest.mark.parametrize("first", ["process", "notify"])
    def test_a_job_that_began_and_ended_is_read_alike_whichever_descriptor_comes_first(
        self, running, selector, tmp_path, first
    ):
        folder = AttemptFolder(tmp_path)
        assert list(running.start(ATTEMPT, folder, lambda: order("true"))) == []
        keys = list(selector.get_map().values())
        for key in keys:  # both are ready before the first is read
            assert select.select([key.fd], [], [], DEADLINE_S)[0]
        keys.sort(key=lambda key: (key.fd != getattr(key.data, first), key.fd))
        inputs = [given for key in keys for given in running.read(key.data, key.fd)]
        assert [type(given) for given in inputs] == [Began, Exited]
        assert inputs[1].exit.code == 0
