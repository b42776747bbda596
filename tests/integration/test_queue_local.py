"""`paceline queue`: a real daemon, real jobs, and daemons that are killed."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess

import pytest
from support.launching import EXAMPLES, SCRIPTS, await_true
from support.local_queues import DEADLINE_S, PYTHON, QueueUnderTest, with_signal

from paceline.scheduler.local.paths import queue_paths

STEPS = str(SCRIPTS / "queue_steps.py")
FOREVER = "1000000"


@pytest.fixture(scope="module")
def shared_queue():
    with QueueUnderTest() as served:
        yield served


@pytest.fixture(scope="module")
def shared_srtf():
    with QueueUnderTest("srtf") as served:
        yield served


@pytest.fixture
def queue(shared_queue):
    """A queue whose daemon is shared by tests, and must not be killed; it has no job that runs."""
    yield shared_queue
    shared_queue.cancel_all()


@pytest.fixture
def srtf(shared_srtf):
    """The same under a policy that preempts."""
    yield shared_srtf
    shared_srtf.cancel_all()


@pytest.fixture
def own_queue():
    """A queue of one test."""
    with QueueUnderTest() as served:
        yield served


def log_of(queue, name, start=1):
    return queue.folder / "jobs" / name / str(start) / "log"


class TestOneJob:
    def test_a_command_runs_with_its_folder_and_variables_and_its_end_is_reported(
        self, queue, tmp_path
    ):
        options = ("--env", "COLOUR=blue", "--cwd", tmp_path, "--wait", "--json")
        script = 'echo "$COLOUR $PWD $PACELINE_QUEUE_JOB $PACELINE_QUEUE_DEVICES"'
        done = queue.run("submit", *options, "--", "sh", "-c", script)
        job = json.loads(done.stdout)
        assert (job["status"], job["exit_code"]) == ("done", 0)
        name = job["name"]
        assert name.startswith("sh-")
        assert log_of(queue, name).read_text() == f"blue {tmp_path} {name} 1\n"

    def test_a_failing_job_ends_with_its_code_and_the_end_of_its_log(self, queue):
        script = "echo first; echo it is broken >&2; exit 7"
        options = ("--name", "fails", "--wait")
        done = queue.run("submit", *options, "--", "sh", "-c", script, check=False)
        assert done.returncode == 7
        assert "it is broken" in done.stderr
        why = queue.run("why", "fails").stdout
        assert "failed" in why
        assert "exit code 7" in why
        assert "it is broken" in why

    def test_a_job_killed_by_a_signal_has_failed_and_the_signal_is_named(self, queue):
        command = ("--name", "crashes", "--wait", "--", "sh", "-c", "kill -SEGV $$")
        assert queue.run("submit", *command, check=False).returncode == 128 + signal.SIGSEGV
        assert "SIGSEGV" in queue.run("why", "crashes").stdout

    def test_nothing_of_a_job_is_left_when_it_has_ended(self, queue, tmp_path):
        pid_file = tmp_path / "pid"
        script = f"tail -f /dev/null & echo $! > {pid_file}"
        queue.run("submit", "--wait", "--", "sh", "-c", script)
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)

    def test_a_job_that_asks_to_be_started_again_is(self, queue):
        script = 'test "$PACELINE_QUEUE_START" = 3 || exit 75'
        done = queue.run("submit", "--wait", "--json", "--", "sh", "-c", script)
        assert json.loads(done.stdout)["starts"] == 3

    def test_a_job_whose_folder_is_away_for_a_moment_waits_for_it(self, queue, tmp_path):
        away, go = tmp_path / "away", tmp_path / "go"
        away.mkdir()
        first = queue.submit("-n", 2, "--", PYTHON, STEPS, go, tmp_path / "done")
        queue.await_status(first, "running")
        name = queue.submit("--cwd", away, "--", "true")
        away.rmdir()
        go.touch()
        queue.await_file(queue.log, f"{name}: waits again")
        why = queue.run("why", name).stdout
        assert "start 1 failed: true cannot be started: No such file or directory" in why
        away.mkdir()
        assert queue.await_status(name, "done", "failed")["status"] == "done"

    def test_two_jobs_run_at_once_on_cores_of_their_own(self, queue, tmp_path):
        names = ("at-once-1", "at-once-2")
        for name in names:
            queue.submit("--name", name, "--", PYTHON, STEPS, FOREVER, tmp_path / "done")
        texts = [queue.await_file(log_of(queue, name), "on cores") for name in names]
        cores = [text.split("on cores ")[1].split() for text in texts]
        assert [len(each) for each in cores] == [1, 1]
        assert cores[0] != cores[1] or len(os.sched_getaffinity(0)) == 1
        third = queue.submit("--name", "third", "--", "true")
        assert queue.jobs()[third]["status"] == "waiting"
        assert "0 cpu" in queue.run("why", third).stdout

    def test_once_ends_when_all_jobs_have_ended_and_says_whether_well(self, own_queue):
        own_queue.kill()
        own_queue.serve("--once")
        own_queue.run("submit", "--", "false")
        assert own_queue.daemon.wait(DEADLINE_S) == 1
        assert "false-1: failed" in own_queue.log.read_text()


class TestSubmitted:
    def test_what_a_user_says_of_a_job_reaches_the_policy(self, root, own_queue):
        run = root / "tests" / "golden" / "run-v1"  # two ranks, steps of 19.9 ms
        options = ("--restart-cost", 30, "--start-cost", 5, "--weight", 2, "--profile", "golden")
        own_queue.submit(
            "--name", "a", *options, "--device-type", "cpu", "--rates", run, "--", "true"
        )
        own_queue.kill()
        with sqlite3.connect(own_queue.folder / "queue.db") as log:
            events = [json.loads(text) for (text,) in log.execute("SELECT event FROM events")]
        rated, submitted = events[:2]
        assert (rated["kind"], rated["profile"]) == ("Rated", "golden")
        assert rated["alone"][""]["2"] == pytest.approx(50.16, rel=1e-3)
        job = submitted["job"]
        assert (job["restart_s"], job["start_s"], job["weight"]) == (30, 5, 2)
        assert (job["profile"], job["device_types"]) == ("golden", ["cpu"])

    def test_a_tenant_waits_for_its_quota_and_the_quota_is_named(self, tmp_path):
        with QueueUnderTest("paceline") as queue:
            queue.kill()
            queue.serve("--quota", "ann=1")
            command = ("--tenant", "ann", "--", PYTHON, STEPS, FOREVER, tmp_path / "done")
            queue.submit("--name", "a", *command)
            queue.submit("--name", "b", *command)
            queue.await_status("a", "running")
            assert "the 1 device of its quota" in queue.run("why", "b").stdout
            done = queue.run("submit", "-n", 2, *command, check=False)
            assert "the quota of ann is 1" in done.stderr


class TestRefusal:
    def test_a_job_that_can_never_fit_is_refused_with_the_reason(self, queue):
        done = queue.run("submit", "-n", 3, "--", "true", check=False)
        assert done.returncode == 2
        assert "needs 3 devices" in done.stderr
        assert "has 2" in done.stderr
        assert not any(job["devices"] == 3 for job in queue.jobs().values())

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            (["--", "no-such-program"], "no program no-such-program"),
            (["--cwd", "/no/such/folder", "--", "true"], "/no/such/folder is not there"),
            (["--memory", "1000000", "--", "true"], "GiB on each device"),
            (["--signal", "SIGKILL", "--", "true"], "SIGKILL"),
            (["--name", "../up", "--", "true"], "../up"),
            (["--device-type", "h200", "--", "true"], "asks for h200, the cluster has cpu"),
        ],
    )
    def test_what_cannot_start_is_refused_before_it_waits(self, queue, arguments, reason):
        before = queue.jobs().keys()
        done = queue.run("submit", *arguments, check=False)
        assert done.returncode == 2
        assert reason in done.stderr
        assert queue.jobs().keys() == before

    def test_a_name_is_given_once(self, queue):
        queue.submit("--name", "mine", "--wait", "--", "true")
        done = queue.run("submit", "--name", "mine", "--", "true", check=False)
        assert done.returncode == 2
        assert "submitted before" in done.stderr

    def test_without_a_daemon_the_error_says_how_to_start_one(self, tmp_path):
        command = [PYTHON, "-m", "paceline", "queue", "ls", "--dir", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 3
        assert f"paceline queue serve --dir {tmp_path}" in done.stderr

    def test_a_second_daemon_of_a_queue_is_refused(self, queue):
        done = queue.run("serve", check=False)
        assert done.returncode == 2
        assert "another daemon" in done.stderr
        assert queue.run("ls").returncode == 0

    def test_only_the_user_may_use_the_socket_and_read_the_log(self, queue):
        for name in ("queue.sock", "queue.db"):
            mode = stat.S_IMODE((queue.folder / name).stat().st_mode)
            assert mode == 0o600, name


class TestPreemption:
    def test_a_preempted_job_saves_its_state_and_goes_on_from_it(self, srtf, tmp_path):
        done = tmp_path / "done"
        command = ("--", PYTHON, STEPS, tmp_path / "go", done)
        srtf.submit("--name", "saves", "-n", 2, "--work", 1000000, *command)
        srtf.await_file(log_of(srtf, "saves"), "begins at step 0")
        srtf.submit("--name", "first", "--work", 1, "--wait", "--", "true")
        (tmp_path / "go").touch()
        saves = srtf.await_status("saves", "done")
        assert saves["starts"] == 2
        stopped = log_of(srtf, "saves").read_text().split("stopped after step ")[1].strip()
        assert f"begins at step {stopped} " in log_of(srtf, "saves", 2).read_text()
        assert done.read_text() == "saves\n"
        assert srtf.replay()["difference"] is None

    def test_a_job_that_ignores_its_signal_is_killed_and_that_is_said(self, srtf, tmp_path):
        command = ("--", PYTHON, STEPS, FOREVER, tmp_path / "done", "ignore")
        srtf.submit("--name", "deaf", "-n", 2, "--work", 1e6, "--grace", 0.2, *command)
        srtf.await_file(log_of(srtf, "deaf"), "begins")
        blocker = ("--name", "b", "-n", 2, "--work", 1, "--", PYTHON, STEPS, FOREVER)
        srtf.submit(*blocker, tmp_path / "done")
        srtf.await_status("b", "running")
        assert "killed after its grace period of 0.2 s" in srtf.jobs()["deaf"]["reason"]
        assert "killed after its grace period" in srtf.run("why", "deaf").stdout

    def test_a_grace_period_ends_on_time_without_a_daemon(self, tmp_path):
        with QueueUnderTest("srtf") as queue:
            command = ("--", PYTHON, STEPS, FOREVER, tmp_path / "done", "ignore")
            queue.submit("--name", "deaf", "-n", 2, "--work", 1e6, "--grace", 1, *command)
            queue.await_file(log_of(queue, "deaf"), "begins")
            queue.submit("--name", "b", "-n", 2, "--work", 1, "--", "true")
            queue.await_file(queue.log, "deaf: asked to stop")
            queue.kill()
            queue.await_file(queue.folder / "jobs" / "deaf" / "1" / "exit.json", '"killed": true')
            queue.serve()
            queue.await_status("b", "done")

    def test_a_job_that_cannot_be_preempted_is_not(self, srtf, tmp_path):
        command = ("--", PYTHON, STEPS, 100, tmp_path / "done")
        srtf.submit("--name", "stays", "-n", 2, "--work", 1e6, "--no-preempt", *command)
        srtf.submit("--name", "behind", "--work", 1, "--wait", "--", "true")
        assert srtf.jobs()["stays"]["starts"] == 1

    def test_training_ends_with_the_weights_of_a_run_that_was_never_stopped(self, srtf, tmp_path):
        example = str(EXAMPLES / "queue_job.py")
        # One thread: two that spin for each other take ten times as long on a busy machine.
        alone = subprocess.Popen(
            [PYTHON, example, "--steps", "200"],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        options = ("--env", "OMP_NUM_THREADS=1", "-n", 2, "--work", 1e6)
        command = ("--", PYTHON, example, "--steps", 200, "--checkpoint-every", 20)
        srtf.submit("--name", "train", *options, *command)
        progress = srtf.folder / "jobs" / "train" / "1" / "progress"
        srtf.await_file(progress, "work_done")
        srtf.submit("--name", "between", "--work", 1, "--wait", "--", "true")
        assert srtf.await_status("train", "done", "failed")["status"] == "done"
        assert srtf.jobs()["train"]["starts"] == 2
        assert log_of(srtf, "train", 2).read_text() == alone.communicate(timeout=DEADLINE_S)[0]

    def test_ranks_are_preempted_together(self, srtf, tmp_path):
        script = ("--", STEPS, tmp_path / "go", tmp_path / "done")
        srtf.submit("--name", "ranks", "-n", 2, "--ranks", "--work", 1e6, *script)
        begins = ["rank-0 begins at step 0 ", "rank-1 begins at step 0 "]
        for text in begins:
            srtf.await_file(log_of(srtf, "ranks"), text)
        srtf.submit("--name", "before-ranks", "--work", 1, "--wait", "--", "true")
        (tmp_path / "go").touch()
        job = srtf.await_status("ranks", "done", "failed")
        assert (job["status"], job["starts"]) == ("done", 2), log_of(srtf, "ranks").read_text()
        again = log_of(srtf, "ranks", 2).read_text()
        assert "rank-0 begins at step " in again
        assert "begins at step 0 " not in again
        assert (tmp_path / "done").read_text() == 2 * "ranks\n"

    @pytest.mark.campaign("e2e")
    def test_ranks_that_train_together_are_preempted_at_one_step(self, tmp_path):
        with QueueUnderTest("srtf") as queue:
            script = ("--", EXAMPLES / "queue_job.py", "--steps", 1500, "--checkpoint-every", 20)
            queue.submit("--name", "train", "-n", 2, "--ranks", "--work", 1e6, *script)
            queue.await_file(queue.folder / "jobs" / "train" / "1" / "progress", "work_done")
            queue.submit("--name", "short", "--work", 1, "--wait", "--", "true")
            train = queue.await_status("train", "done", "failed")
            assert train["status"] == "done", log_of(queue, "train", 1).read_text()
            assert train["starts"] == 2
            assert "1500 steps" in log_of(queue, "train", 2).read_text()


class TestSharing:
    def test_jobs_share_a_core_when_the_rates_say_that_it_pays(self, tmp_path):
        sharing = {"version": 1, "used": {"small": [0.4]}, "most": 2}
        with QueueUnderTest("gandiva", slots=1, sharing=sharing) as queue:
            for name in ("a", "b"):
                options = ("--name", name, "--profile", "small", "--work", 1e6)
                queue.submit(*options, "--", PYTHON, STEPS, FOREVER, tmp_path / "done")
            where = [queue.await_status(name, "running")["where"] for name in ("a", "b")]
            assert where == ["local[0]", "local[0]"]


class TestCancel:
    def test_a_waiting_job_leaves_the_queue(self, queue, tmp_path):
        queue.submit("-n", 2, "--", PYTHON, STEPS, FOREVER, tmp_path / "done")
        name = queue.submit("--", "true")
        assert "cancelled" in queue.run("cancel", name).stdout
        assert queue.jobs()[name]["status"] == "cancelled"

    def test_a_running_job_is_stopped_and_its_devices_are_given_away(self, queue, tmp_path):
        first = queue.submit("-n", 2, "--", PYTHON, STEPS, FOREVER, tmp_path / "done")
        queue.await_file(log_of(queue, first), "begins")
        second = queue.submit("-n", 2, "--", "true")
        queue.run("cancel", first)
        queue.await_status(second, "done")
        assert queue.jobs()[first]["status"] == "cancelled"
        assert not (tmp_path / "done").exists()

    def test_a_job_that_has_ended_stays_as_it_is(self, queue):
        queue.submit("--name", "ended", "--wait", "--", "true")
        assert "ended: done" in queue.run("cancel", "ended").stdout

    def test_an_unknown_job_is_an_error(self, queue):
        done = queue.run("cancel", "nobody", check=False)
        assert done.returncode == 2
        assert "no job 'nobody'" in done.stderr


class TestRequests:
    def test_a_request_that_cannot_be_read_is_answered_with_the_error(self, queue):
        with socket.socket(socket.AF_UNIX) as client, client.makefile() as answers:
            client.settimeout(DEADLINE_S)
            client.connect(str(queue_paths(queue.folder, {}).socket))
            client.sendall(b'{"version": 1, "verb": "ls", "colour": "red"}\n')
            error = json.loads(answers.readline())["error"]
        assert error["code"] == "ConfigError"
        assert "colour" in error["what"]


class TestCrash:
    def test_jobs_survive_the_daemon_and_the_next_one_adopts_them(self, own_queue, tmp_path):
        done = tmp_path / "done"
        own_queue.submit("--name", "runs", "--", PYTHON, STEPS, tmp_path / "go", done)
        own_queue.submit("--name", "ends", "--", PYTHON, STEPS, 1, done)
        own_queue.submit("--name", "waits", "-n", 2, "--", PYTHON, STEPS, 1, done)
        own_queue.await_file(log_of(own_queue, "runs"), "begins")
        own_queue.kill()
        own_queue.await_file(done, "ends")
        own_queue.serve()
        assert own_queue.jobs()["runs"]["status"] == "running"
        (tmp_path / "go").touch()
        for name in ("runs", "ends", "waits"):
            assert own_queue.await_status(name, "done")["starts"] == 1
        assert sorted(done.read_text().split()) == ["ends", "runs", "waits"]
        assert own_queue.replay()["difference"] is None

    def test_a_job_whose_supervisor_was_killed_is_started_again(self, own_queue, tmp_path):
        own_queue.submit("--name", "a", "--", PYTHON, STEPS, tmp_path / "go", tmp_path / "done")
        own_queue.await_file(log_of(own_queue, "a"), "begins")
        claim = json.loads((own_queue.folder / "jobs" / "a" / "1" / "claim.json").read_text())
        with_signal(claim["pid"], signal.SIGKILL)
        own_queue.await_file(log_of(own_queue, "a", 2), "begins")
        (tmp_path / "go").touch()
        job = own_queue.await_status("a", "done")
        assert job["starts"] == 2
        assert "supervisor" in own_queue.log.read_text()

    def test_a_stopped_daemon_leaves_its_jobs_running(self, own_queue, tmp_path):
        go = tmp_path / "go"
        own_queue.submit("--name", "a", "--", PYTHON, STEPS, go, tmp_path / "done")
        own_queue.await_file(log_of(own_queue, "a"), "begins")
        own_queue.daemon.terminate()
        assert own_queue.daemon.wait(DEADLINE_S) == 0
        assert not (own_queue.folder / "queue.sock").exists()
        own_queue.serve()
        assert own_queue.jobs()["a"]["status"] == "running"
        go.touch()
        assert own_queue.await_status("a", "done")["starts"] == 1

    def test_under_another_policy_a_job_goes_on_and_the_log_begins_anew(self, own_queue, tmp_path):
        go = tmp_path / "go"
        own_queue.submit("--name", "a", "--work", 1e6, "--", PYTHON, STEPS, go, tmp_path / "done")
        own_queue.await_file(log_of(own_queue, "a"), "begins")
        own_queue.kill()
        own_queue.options[1] = "srtf"
        own_queue.serve()
        go.touch()
        assert own_queue.await_status("a", "done")["starts"] == 1
        assert (tmp_path / "done").read_text() == "a\n"
        replay = own_queue.replay()
        assert replay["difference"] is None
        assert replay["segments"] == 2

    def test_a_job_waits_for_devices_that_a_restart_did_not_find(self, own_queue, tmp_path):
        go = tmp_path / "go"
        own_queue.submit("--name", "a", "-n", 2, "--", PYTHON, STEPS, go, tmp_path / "done")
        own_queue.await_file(log_of(own_queue, "a"), "begins")
        own_queue.kill()
        own_queue.options[3] = "1"
        own_queue.serve()
        own_queue.await_file(log_of(own_queue, "a"), "stopped after step")
        assert "needs 2 devices" in own_queue.await_status("a", "waiting")["reason"]
        assert "the cluster has 1" in own_queue.run("why", "a").stdout
        own_queue.kill()
        own_queue.options[3] = "2"
        own_queue.serve()
        go.touch()
        assert own_queue.await_status("a", "done")["starts"] == 2
        assert own_queue.replay()["difference"] is None

    def test_a_submission_whose_answer_was_lost_is_accepted_once(self, own_queue):
        from paceline.core.clock import SystemClock
        from paceline.scheduler.job import Job
        from paceline.scheduler.local.jobs.submission import Submission
        from paceline.scheduler.local.paths import queue_paths
        from paceline.scheduler.local.protocol.client import ask
        from paceline.scheduler.local.protocol.messages import Request

        submission = Submission(
            job=Job(name=""), command=("true",), folder="/", environ=dict(os.environ), token="t"
        )
        paths = queue_paths(own_queue.folder, {})
        request = Request(verb="submit", submission=submission)
        names = [ask(paths, request, SystemClock()).jobs[0].name for _ in range(2)]
        assert names == ["true-1", "true-1"]
        assert list(own_queue.jobs()) == ["true-1"]

    def test_a_log_that_was_changed_is_found(self, own_queue):
        own_queue.submit("--wait", "--", "true")
        own_queue.kill()
        with sqlite3.connect(own_queue.folder / "queue.db") as log:
            old, new = '"devices": [0]', '"devices": [1]'
            log.execute("UPDATE decisions SET decision = replace(decision, ?, ?)", (old, new))
        difference = own_queue.replay()["difference"]
        assert '"devices": [1]' in difference["logged"]
        assert '"devices": [0]' in difference["decided"]


def test_nothing_is_left_of_a_queue_whose_jobs_were_cancelled(tmp_path):
    with QueueUnderTest() as queue:
        queue.submit("--name", "a", "--", PYTHON, STEPS, FOREVER, tmp_path / "done")
        queue.await_file(log_of(queue, "a"), "begins")
        queue.run("cancel", "a")
        queue.await_status("a", "cancelled")
        await_true(lambda: not queue.processes(), "the job's processes to end")


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU here")
def test_a_job_sees_the_gpu_that_it_was_given_and_no_other(tmp_path):
    with QueueUnderTest() as queue:
        queue.kill()
        queue.options = ["--gpus"]
        queue.serve()
        script = "nvidia-smi --query-gpu=uuid --format=csv,noheader; echo $CUDA_VISIBLE_DEVICES"
        name = json.loads(queue.run("submit", "--wait", "--json", "--", "sh", "-c", script).stdout)
        *listed, given = log_of(queue, name["name"]).read_text().split()
        assert given in listed
