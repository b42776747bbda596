"""Work in another process, with real processes: each way it can end, and that nothing is left."""

import inspect
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.launching import await_true
from support.worker_calls import Reply, Request

from paceline.core import errors, worker_process
from paceline.core.errors import DeadlineExceeded, PacelineError, WorkerFailed
from paceline.core.worker_process import WorkerCall, call, call_all

TESTS = Path(__file__).parent.parent
CLASSES = [
    name
    for name, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, PacelineError)
]
pytestmark = pytest.mark.usefixtures("importable")


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


def work(act, text="", count=0, **options):
    request = Request(act=act, text=text, count=count)
    return WorkerCall(
        module="support.worker_calls", request=request, answer=Reply, name=act, **options
    )


def ask(act, text="", count=0, *, deadline_s=60.0, **options):
    return call(work(act, text, count, **options), deadline_s=deadline_s)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_answer_comes_from_a_session_of_its_own():
    reply = ask("echo", "grüße")
    pid, group, session = reply.numbers
    assert reply.text == "grüße"
    assert pid == group == session != os.getsid(0)
    assert not is_running(pid)


def test_a_worker_that_answered_ends_its_threads_and_runs_its_exit_handlers(tmp_path):
    ask("tidies", str(tmp_path / "written"))
    assert (tmp_path / "written").read_text() == "thread, then the handler"


def test_a_worker_has_its_own_variables_besides_those_of_its_caller():
    environment = {"WORKER_VARIABLE": "its own"}
    assert ask("variable", "WORKER_VARIABLE", environment=environment).text == "its own"
    assert ask("variable", "PYTHONPATH", environment=environment).text == str(TESTS)


def test_what_others_print_does_not_disturb_the_answer(capfd):
    assert ask("noisy", "this").text == "this"
    assert capfd.readouterr() == ("", "")


def test_what_the_worker_prints_is_shown_on_request(capfd):
    assert ask("noisy", "this", show_output=True).text == "this"
    out, err = capfd.readouterr()
    assert out == ""
    assert "nor this of a child" in err


@pytest.mark.parametrize("count", [0, 1 << 16, 50 << 20])
def test_answers_and_requests_of_any_size(count):
    assert len(ask("huge", count=count).text) == count
    assert ask("echo", "y" * min(count, 5 << 20)).text == "y" * min(count, 5 << 20)


def test_a_message_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(worker_process, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(WorkerFailed, match="no valid answer") as caught:
        ask("huge", count=2000)
    assert "the limit is 1000" in caught.value.why


@pytest.mark.parametrize("name", CLASSES)
def test_each_error_arrives_as_its_own_class(name):
    with pytest.raises(PacelineError) as caught:
        ask("fail", name)
    error = caught.value
    assert type(error).__name__ == name
    assert (error.what, error.where, error.why, error.fix) == (
        *("it broke", "rank 3", "too hot", "Cool it"),
    )


def test_an_unknown_error_class_is_a_paceline_error():
    for code in ("NoSuchError", "annotations", "globals"):
        error = PacelineError.from_json({"error": {"code": code, "what": "w"}})
        assert type(error) is PacelineError


def test_a_foreign_exception_is_told_with_its_class():
    with pytest.raises(WorkerFailed, match="foreign failed") as caught:
        ask("foreign", "by nothing")
    assert caught.value.why == "ZeroDivisionError: by nothing"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        (signal.SIGSEGV, "was killed by SIGSEGV"),
        (34, r"was killed by signal 34 \(SIGRTMIN\)"),
    ],
)
def test_a_killed_worker_names_its_signal_and_last_line(number, words):
    with pytest.raises(WorkerFailed, match=words) as caught:
        ask("killed", "about to\ndivide\n", int(number))
    assert caught.value.why == "divide"


@pytest.mark.parametrize("code", [0, 7])
def test_an_end_without_an_answer_names_code_and_last_line(code):
    with pytest.raises(WorkerFailed, match=f"with exit code {code}") as caught:
        ask("leave", "the last line", code)
    assert caught.value.why == "the last line"


def test_a_hang_meets_the_deadline():
    with pytest.raises(DeadlineExceeded, match="did not end in time") as caught:
        ask("hang", deadline_s=0.5)
    assert caught.value.why == "0.5 s passed"


@pytest.mark.parametrize(
    "sent",
    [
        "00",  # not even a length
        "ffffffffffffffff",  # a length that nobody has
        "0000000000000005" + b"{oops".hex(),
        "0000000000000002" + b"[]".hex(),
        "0000000000000002" + b"{}".hex(),
        "0000000000000002" + b"{}more".hex(),
        "0000000000000002" + "ff80",
    ],
)
def test_garbage_is_no_answer(sent):
    with pytest.raises(WorkerFailed):
        ask("garbage", sent)


def test_an_answer_of_another_type_is_no_answer():
    with pytest.raises(WorkerFailed, match="no valid answer"):
        ask("wrong")


def test_a_module_that_does_not_exist():
    missing = WorkerCall(module="no_such_module", request=Request(act=""), answer=Reply, name="it")
    with pytest.raises(WorkerFailed, match="exit code 1") as caught:
        call(missing, deadline_s=60)
    assert "no_such_module" in caught.value.why


def test_a_process_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(worker_process.sys, "executable", "/no/such/python")
    with pytest.raises(WorkerFailed, match="could not be started"):
        ask("echo")


@pytest.mark.parametrize("how", ["answer", "leave", "hang"])
def test_children_of_a_worker_end_with_it(how):
    """A forked child holds the socket: the answer, or the worker's end, is seen all the same."""
    if how == "answer":
        (pid,) = ask("child", how).numbers
    elif how == "leave":
        with pytest.raises(WorkerFailed, match="exit code 3") as caught:
            ask("child", how)
        pid = int(caught.value.why)
    else:
        before = set(os.listdir("/proc"))  # noqa: PTH208  # names are all that is needed
        with pytest.raises(DeadlineExceeded):
            ask("child", how, deadline_s=2.0)
        left = [int(name) for name in set(os.listdir("/proc")) - before if name.isdecimal()]  # noqa: PTH208
        # A test beside this one may have workers of its own: they end as well.
        await_true(
            lambda: not [p for p in left if is_running(p) and b"worker_calls" in command(p)],
            "the children to end",
        )
        return
    await_true(lambda: not is_running(pid), "the child to end")


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_several_workers_run_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    works = [work("reads", str(tmp_path / "fifo")), work("threads", str(tmp_path / "fifo"))]
    assert [reply.text for reply in call_all(works, deadline_s=60)] == ["here", "met"]


def test_the_first_worker_to_fail_ends_the_others():
    works = [work("hang"), work("leave", "gone", 1)]
    with pytest.raises(WorkerFailed, match="leave ended"):
        call_all(works, deadline_s=60)


def test_no_descriptor_is_left():
    ask("echo")
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    ask("noisy")
    with pytest.raises(WorkerFailed):
        ask("leave")
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_a_worker_dies_with_its_caller():
    code = """
    import os, sys
    from paceline.core.worker_process import WorkerCall, WorkerProcess
    from support.worker_calls import Reply, Request
    request = Request(act="hang")
    worker = WorkerProcess(WorkerCall(
        module="support.worker_calls", request=request, answer=Reply, name="hang"))
    worker.send(10)
    print(worker._process.pid, flush=True)
    sys.stdin.read()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as caller:
        pid = int(caller.stdout.readline())
        await_true(lambda: b"worker_calls" in command(pid), "the worker to run")
        caller.kill()
        await_true(lambda: not is_running(pid), "the worker to end")
