"""The daemon's end of jobs' processes: real supervisors, watched without a daemon."""

import contextlib
import os
import resource
import select
import selectors
import subprocess

import pytest

from paceline.scheduler.local.jobs.records import Attempt
from paceline.scheduler.local.machine.attempt import AttemptFolder, Order
from paceline.scheduler.local.machine.running import Running
from paceline.scheduler.local.queue.turns import Began, Exited
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


@pytest.fixture
def small_disk(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def order_of(*command, folder="/"):
    return Order(command=command, folder=folder, environ=dict(os.environ))


ORDER = order_of("true")


def run_to_end(running, selector, path, order):
    """Run an attempt in a folder; return how it ended."""
    make = order if callable(order) else lambda: order
    inputs = list(running.start(ATTEMPT, AttemptFolder(path), make))
    while not any(isinstance(given, Exited) for given in inputs):
        ready = selector.select(DEADLINE_S)
        assert ready, inputs
        for key, _ in ready:
            inputs += running.read(key.data, key.fd)
    return inputs[-1].exit


class TestReading:
    @pytest.mark.parametrize("first", ["process", "notify"])
    def test_a_job_that_began_and_ended_is_read_alike_whichever_descriptor_comes_first(
        self, running, selector, tmp_path, first
    ):
        folder = AttemptFolder(tmp_path)
        assert list(running.start(ATTEMPT, folder, lambda: ORDER)) == []
        keys = list(selector.get_map().values())
        for key in keys:  # both are ready before the first is read
            assert select.select([key.fd], [], [], DEADLINE_S)[0]
        keys.sort(key=lambda key: (key.fd != getattr(key.data, first), key.fd))
        inputs = [given for key in keys for given in running.read(key.data, key.fd)]
        assert [type(given) for given in inputs] == [Began, Exited]
        assert inputs[1].exit.code == 0


class TestFailedStarts:
    def test_without_descriptors_a_start_fails_for_now_and_later_succeeds(
        self, running, selector, tmp_path
    ):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)  # the next one that would be given away
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            inputs = list(running.start(ATTEMPT, AttemptFolder(tmp_path / "1"), lambda: ORDER))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert [given.exit.passing for given in inputs] == [True]
        assert "Too many open files" in inputs[0].exit.error
        assert run_to_end(running, selector, tmp_path / "2", ORDER).code == 0

    def test_a_folder_that_is_away_for_a_moment_may_be_back_later(
        self, running, selector, tmp_path
    ):
        order = order_of("true", folder=str(tmp_path / "away"))
        ended = run_to_end(running, selector, tmp_path / "1", order)
        assert ended.passing
        assert "No such file" in ended.error
        (tmp_path / "away").mkdir()
        assert run_to_end(running, selector, tmp_path / "2", order).code == 0

    def test_a_file_that_is_no_program_fails_for_good(self, running, selector, tmp_path):
        program = tmp_path / "program"
        program.write_text("neither a binary nor a script\n")
        program.chmod(0o755)
        ended = run_to_end(running, selector, tmp_path / "1", order_of(str(program)))
        assert not ended.passing
        assert "Exec format error" in ended.error

    def test_a_full_disk_is_a_failed_start_and_no_reason_to_lose_how_a_job_ended(
        self, running, selector, small_disk
    ):
        folder, filler = small_disk / "1", small_disk / "filler"
        begin = AttemptFolder(folder)
        begin.order(order_of("sh", "-c", f"cat /dev/zero > {filler}; exit 7"))
        ended = run_to_end(running, selector, folder, begin.read_order())
        assert (ended.code, ended.error) == (7, "")  # its own end, on a disk without a free byte
        ended = run_to_end(running, selector, small_disk / "2", ORDER)
        assert ended.passing
        assert "No space left" in ended.error
        filler.unlink()
        assert run_to_end(running, selector, small_disk / "3", ORDER).code == 0

    def test_a_disk_that_is_full_before_the_supervisor_begins_is_said_by_it(
        self, running, selector, small_disk
    ):
        (small_disk / "1").mkdir()

        def order():
            with (small_disk / "filler").open("wb") as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    file.flush()
            return ORDER

        AttemptFolder(small_disk / "1").order(ORDER)
        ended = run_to_end(running, selector, small_disk / "1", order)
        assert ended.passing
        assert "No space left" in ended.error
