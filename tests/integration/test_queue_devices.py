"""Devices that are lost while a queue is served: cores of a cpuset, and GPUs of an nvidia-smi."""

import os
import selectors
import sqlite3

import pytest
from support.launching import SCRIPTS
from support.local_queues import PYTHON, QueueUnderTest

from paceline.scheduler.local.jobs.devices import gpus_of
from paceline.scheduler.local.machine.device_watch import DeviceWatch
from paceline.scheduler.local.queue.turns import DevicesSeen

STEPS = str(SCRIPTS / "queue_steps.py")
GPUS = ("GPU-a, NVIDIA H200, 143771", "GPU-b, NVIDIA H200, 143771")


class Machine:
    """A machine of which nvidia-smi says what a test wants: its driver is in a file."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        self.driver = folder / "driver"
        self.script = folder / "nvidia-smi"
        self.says(f"cat {self.driver}")
        self.has(*GPUS)

    def says(self, command):
        partial = self.folder / "partial"
        partial.write_text(f"#!/bin/sh\n{command}\n")
        partial.chmod(0o755)
        partial.replace(self.script)

    def has(self, *lines):
        partial = self.folder / "partial"
        partial.write_text("".join(f"{line}\n" for line in lines))
        partial.replace(self.driver)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine")


@pytest.fixture
def gpu_queue(machine):
    queue = QueueUnderTest()
    queue.environ["PATH"] = f"{machine.folder}:{queue.environ['PATH']}"
    queue.environ.pop("CUDA_VISIBLE_DEVICES", None)
    queue.options = ["--gpus", "--check-devices", "0.1"]
    with queue:
        yield queue


def start_two(queue, tmp_path, go):
    """Start a job on each device; return the names by device."""
    for name in ("a", "b"):
        queue.submit("--name", name, "--", PYTHON, STEPS, go, tmp_path / "done")
    return {queue.await_status(name, "running")["where"][-2]: name for name in ("a", "b")}


class TestQueue:
    def test_a_job_of_a_lost_gpu_waits_for_it_with_its_progress(self, gpu_queue, machine, tmp_path):
        go = tmp_path / "go"
        by_gpu = start_two(gpu_queue, tmp_path, go)
        lost, stays = by_gpu["1"], by_gpu["0"]
        gpu_queue.await_file(gpu_queue.folder / "jobs" / lost / "1" / "log", "begins")
        machine.has(GPUS[0])
        job = gpu_queue.await_status(lost, "waiting")
        assert "GPU GPU-b was lost: nvidia-smi does not list it any more" in job["reason"]
        why = gpu_queue.run("why", lost).stdout
        assert "GPU GPU-b lost" in why
        assert gpu_queue.jobs()[stays]["status"] == "running"
        machine.has(*GPUS)
        gpu_queue.await_status(lost, "running")
        log = gpu_queue.folder / "jobs" / lost / "2" / "log"
        assert "begins at step 0 " not in gpu_queue.await_file(log, "begins")
        go.touch()
        assert gpu_queue.await_status(lost, "done")["starts"] == 2
        assert gpu_queue.await_status(stays, "done")["starts"] == 1
        assert gpu_queue.replay()["difference"] is None

    def test_a_job_that_dies_with_its_gpu_has_not_failed(self, machine, gpu_queue, tmp_path):
        gpu_queue.kill()
        gpu_queue.options[-1] = "3600"  # so that only the end of a job makes the daemon look
        gpu_queue.serve()
        dies = f"until test -e {tmp_path}/dies; do :; done; exit 1"
        gpu_queue.submit("--name", "a", "-n", 2, "--", "sh", "-c", dies)
        gpu_queue.await_status("a", "running")
        machine.has(GPUS[1])
        (tmp_path / "dies").touch()
        job = gpu_queue.await_status("a", "waiting", "failed")
        assert job["status"] == "waiting"
        assert "GPU GPU-a was lost" in job["reason"]
        assert "it ended with exit code 1" in job["reason"]
        gpu_queue.run("cancel", "a")
        done = gpu_queue.run("submit", "--wait", "--", "sh", "-c", "exit 3", check=False)
        assert done.returncode == 3  # of a GPU that is there, it is the job's own failure

    def test_when_nvidia_smi_fails_time_after_time_all_gpus_are_lost(self, gpu_queue, machine):
        machine.says("echo Driver/library version mismatch; exit 18")
        gpu_queue.submit("--name", "a", "--", "true")
        gpu_queue.await_file(gpu_queue.log, "2 devices lost")
        gpu_queue.submit("--name", "b", "--", "true")
        why = gpu_queue.run("why", "b").stdout
        assert "2 devices lost, 0 h200 left" in why
        machine.says(f"cat {machine.driver}")
        gpu_queue.await_status("b", "done")
        with sqlite3.connect(gpu_queue.folder / "queue.db") as log:
            texts = [text for (text,) in log.execute("SELECT event FROM events")]
        (lost,) = [text for text in texts if '"DevicesLost"' in text]
        assert "nvidia-smi failed 3 times: Driver/library version mismatch" in lost

    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core here")
    def test_a_job_of_a_core_that_the_daemon_may_not_use_any_more_waits(self, tmp_path):
        with QueueUnderTest() as queue:
            queue.kill()
            queue.serve("--check-devices", "0.1")
            go = tmp_path / "go"
            by_slot = start_two(queue, tmp_path, go)
            log = queue.folder / "jobs" / by_slot["1"] / "1" / "log"
            queue.await_file(log, "begins")
            cores = os.sched_getaffinity(queue.daemon.pid)
            last = int(log.read_text().split("on cores ")[1])
            os.sched_setaffinity(queue.daemon.pid, cores - {last})
            reason = queue.await_status(by_slot["1"], "waiting")["reason"]
            assert f"core {last} was lost: its core may not be used any more" in reason
            os.sched_setaffinity(queue.daemon.pid, cores)
            go.touch()
            assert queue.await_status(by_slot["1"], "done")["starts"] == 2


class TestWatch:
    @pytest.fixture
    def watch(self, machine, monkeypatch):
        monkeypatch.setenv("PATH", f"{machine.folder}:{os.environ['PATH']}")
        with selectors.DefaultSelector() as selector:
            found = DeviceWatch(gpus_of("\n".join(GPUS)), selector, check_s=10, deadline_s=20)
            yield found, selector
            found.close()

    def read(self, watch, selector):
        assert selector.select(60)
        return watch.read()

    def test_a_query_that_hangs_is_given_up_at_its_deadline(self, machine, watch):
        watch, selector = watch
        machine.says("exec tail -f /dev/null")
        for begin_s in (0.0, 100.0, 200.0):
            assert watch.look(begin_s) is None
            assert watch.wake_s == begin_s + 20
            assert watch.look(begin_s + 19) is None
            seen = watch.look(begin_s + 20)
        assert seen == DevicesSeen(
            frozenset(), "nvidia-smi failed 3 times: it did not end within 20 s"
        )
        assert not selector.get_map()
        machine.says(f"cat {machine.driver}")
        assert watch.look(300.0) is None
        assert self.read(watch, selector).present == {0, 1}

    @pytest.mark.parametrize("output", ["", "garbage", "No devices were found"])
    def test_what_is_no_list_of_gpus_is_a_failure_or_a_machine_without_any(
        self, machine, watch, output
    ):
        watch, selector = watch
        machine.has(output)
        watch.look(0.0)
        seen = self.read(watch, selector)
        assert seen is None or seen.present == frozenset()

    def test_a_program_that_is_not_there_any_more_is_a_failure(self, machine, watch):
        watch, _ = watch
        machine.script.unlink()
        seen = [watch.look(float(now_s)) for now_s in (0, 100, 200)]
        assert seen[:2] == [None, None]
        assert "No such file" in seen[2].reason
