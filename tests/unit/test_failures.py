"""Which rank failed first, from exits, reports and traces as runs leave them."""

import json

import pytest
from support.traces import Event, write_run, write_trace

from paceline.core.errors import Interrupted, Preempted, RankLost, ScriptFailed
from paceline.core.processes import StopRequested
from paceline.launch.exits import RankExit, exit_of, explaining_exits, interrupted_exit
from paceline.launch.failures import exit_code, first_failure, first_traceback, raise_failure
from paceline.native import Recorder
from paceline.report.words import failure_words
from paceline.runs.result import Failure
from paceline.trace.format.events import Kind
from paceline.trace.format.files import trace_name

RAISED = "RuntimeError('the loss is not finite')"
LOST = "RuntimeError('[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer')"


def report(run, rank, at_ns, error, phase="", child=None):
    text = f"Traceback (most recent call last):\n{error}\n"
    body = {"rank": rank, "at_ns": at_ns, "phase": phase, "traceback": text, "error": error}
    body["child"] = child
    (run / "trace").mkdir(exist_ok=True)
    (run / "trace" / f"rank-{rank:05d}.failure").write_text(json.dumps(body))


def test_the_first_to_raise_failed_first(tmp_path):
    report(tmp_path, 0, 200, LOST)
    report(tmp_path, 1, 100, RAISED, "backward")
    exits = (RankExit(rank=0, code=1), RankExit(rank=1, code=1))
    failure = first_failure(tmp_path, exits)
    assert failure == Failure(rank=1, error=RAISED, phase="backward")
    assert exit_code(exits, failure) == 1
    assert first_traceback(tmp_path).startswith("rank 1:\nTraceback")
    with pytest.raises(ScriptFailed, match="rank 1 failed first") as caught:
        raise_failure(tmp_path, "train.py", exits, failure)
    assert caught.value.why == RAISED
    assert caught.value.where.endswith("train.py")
    assert caught.value.fix == (
        f"See the traceback above, and the steps before it: paceline report {tmp_path}"
    )


@pytest.mark.parametrize(("step", "command"), [(0, "python x.py --a"), (0, ""), (3, "python x.py")])
def test_one_rank_that_fails_at_its_start_may_be_one_that_torchruns_variables_mislead(
    tmp_path, step, command
):
    exits = (RankExit(rank=0, code=1),)
    failure = Failure(rank=0, error=RAISED, step=step)
    with pytest.raises(ScriptFailed) as caught:
        raise_failure(tmp_path, "x.py", exits, failure, command)
    has_hint = "RANK and WORLD_SIZE" in caught.value.fix
    assert has_hint is (step == 0 and bool(command))
    assert caught.value.fix.endswith(f"paceline record -- {command}" if has_hint else str(tmp_path))


WORKER = {"name": "a loader worker", "signal": "SIGKILL", "code": 0, "by_oom": False}


def test_a_childs_death_comes_before_what_ranks_raise_whoever_noticed_first(tmp_path):
    report(tmp_path, 0, 100, LOST)
    report(tmp_path, 2, 150, RAISED)
    report(tmp_path, 1, 200, LOST, "backward", WORKER)
    exits = tuple(RankExit(rank=rank, code=1) for rank in range(3))
    failure = first_failure(tmp_path, exits)
    who = {"rank": 1, "signal": "SIGKILL", "phase": "backward", "child": "a loader worker"}
    assert failure == Failure(**who)
    assert exit_code(exits, failure) == 5
    assert first_traceback(tmp_path).startswith("rank 1:")
    with pytest.raises(RankLost, match=r"^a loader worker of rank 1 was killed by SIGKILL"):
        raise_failure(tmp_path, "train.py", exits, failure)


def test_what_a_rank_raised_comes_before_the_loss_of_a_peer_whoever_noticed_first(tmp_path):
    report(tmp_path, 0, 100, LOST)
    report(tmp_path, 1, 200, RAISED)
    exits = (RankExit(rank=0, code=1), RankExit(rank=1, code=1))
    assert first_failure(tmp_path, exits) == Failure(rank=1, error=RAISED)


def test_a_child_that_the_oom_killer_ended_or_that_exited_is_said_so(tmp_path):
    exits = (RankExit(rank=0, code=1),)
    report(tmp_path, 0, 100, RAISED, child={**WORKER, "by_oom": True})
    with pytest.raises(RankLost, match="its memory limit was reached"):
        raise_failure(tmp_path, "train.py", exits, first_failure(tmp_path, exits))
    report(tmp_path, 0, 100, RAISED, child={**WORKER, "signal": "", "code": 3})
    with pytest.raises(ScriptFailed, match="a loader worker of rank 0 ended with exit code 3"):
        raise_failure(tmp_path, "train.py", exits, first_failure(tmp_path, exits))


def test_a_killed_rank_comes_before_those_that_lost_it(tmp_path):
    report(tmp_path, 0, 100, LOST)
    exits = (RankExit(rank=0, code=1), RankExit(rank=1, code=-9, signal="SIGKILL"))
    failure = first_failure(tmp_path, exits)
    assert failure == Failure(rank=1, signal="SIGKILL")
    assert exit_code(exits, failure) == 5


def test_where_a_killed_rank_was_stands_in_its_trace(tmp_path):
    write_run(tmp_path, [[Event(Kind.STEP, 0, 1)]])
    recorder = Recorder(str(tmp_path / "trace" / trace_name(1)), 1, 2)
    for _ in range(17):
        recorder.end_step()
    recorder.begin(int(Kind.BACKWARD))
    exits = (RankExit(rank=1, code=-11, signal="SIGSEGV"),)
    failure = first_failure(tmp_path, exits)
    assert failure == Failure(rank=1, signal="SIGSEGV", step=17, phase="backward")
    with pytest.raises(RankLost, match="rank 1 was killed by SIGSEGV") as caught:
        raise_failure(tmp_path, "train.py", exits, failure)
    assert caught.value.where == "step 17, phase backward"
    assert "native code crashed" in caught.value.why
    recorder.begin(int(Kind.WAIT))
    assert first_failure(tmp_path, exits).phase == "waiting"
    recorder.close()


def test_a_rank_that_the_agent_stopped_is_no_culprit(tmp_path):
    report(tmp_path, 0, 100, RAISED)
    exits = (RankExit(rank=0, code=1), RankExit(rank=1, code=-15, signal="SIGTERM"))
    assert first_failure(tmp_path, exits) == Failure(rank=0, error=RAISED)


def test_a_rank_that_did_not_listen_to_the_agent_is_no_culprit(tmp_path):
    report(tmp_path, 1, 100, RAISED)
    exits = (RankExit(rank=1, code=1), RankExit(rank=0, code=-9, signal="SIGKILL"))
    assert first_failure(tmp_path, exits) == Failure(rank=1, error=RAISED)


def test_a_rank_that_crashed_is_the_culprit_whatever_others_say_of_it(tmp_path):
    report(tmp_path, 0, 100, "TimeoutError('where is rank 1?')")
    exits = (RankExit(rank=0, code=1), RankExit(rank=1, code=-11, signal="SIGSEGV"))
    assert first_failure(tmp_path, exits) == Failure(rank=1, signal="SIGSEGV")


def test_a_rank_that_left_without_a_word_failed_before_those_that_lost_it(tmp_path):
    report(tmp_path, 0, 100, LOST)
    exits = (RankExit(rank=0, code=1), RankExit(rank=1, code=7))
    assert first_failure(tmp_path, exits) == Failure(rank=1, error="exit code 7")


def test_a_rank_that_somebody_terminated_is_the_culprit(tmp_path):
    """The agent ends ranks only after another failed, but all that failed lost this one."""
    report(tmp_path, 0, 100, LOST)
    exits = (
        RankExit(rank=0, code=1),
        RankExit(rank=1, code=-15, signal="SIGTERM"),
        RankExit(rank=2, code=-15, signal="SIGTERM"),
    )
    failure = first_failure(tmp_path, exits)
    assert failure == Failure(rank=1, signal="SIGTERM")
    with pytest.raises(RankLost, match="SIGTERM") as caught:
        raise_failure(tmp_path, "train.py", exits, failure)
    assert "another process sent the signal" in caught.value.why


def test_a_rank_that_raised_and_crashed_on_its_way_out_raised(tmp_path):
    report(tmp_path, 1, 100, RAISED)
    exits = (RankExit(rank=1, code=-6, signal="SIGABRT"),)
    assert first_failure(tmp_path, exits) == Failure(rank=1, error=RAISED)


def test_an_exit_without_a_report_is_told_by_its_code(tmp_path):
    exits = (RankExit(rank=1, code=7),)
    failure = first_failure(tmp_path, exits)
    assert failure == Failure(rank=1, error="exit code 7")
    assert exit_code(exits, failure) == 1
    assert first_traceback(tmp_path) == ""
    with pytest.raises(ScriptFailed) as caught:
        raise_failure(tmp_path, "train.py", exits, failure)
    assert caught.value.fix == (
        f"See what the rank printed, and the steps before it: paceline report {tmp_path}"
    )


def test_a_report_cut_short_by_a_full_disk_is_skipped(tmp_path):
    report(tmp_path, 1, 100, RAISED)
    (tmp_path / "trace" / "rank-00000.failure").write_text('{"rank": 0, "at_ns"')
    assert first_failure(tmp_path, (RankExit(rank=0, code=1),)).rank == 1
    assert first_traceback(tmp_path)


def test_all_well(tmp_path):
    assert first_failure(tmp_path, ()) is None
    assert exit_code((), None) == 0
    raise_failure(tmp_path, "train.py", (), None)


def test_a_stopped_run_is_interrupted_whatever_the_ranks_said(tmp_path):
    report(tmp_path, 0, 100, LOST)
    exits = (interrupted_exit(None, StopRequested("SIGINT"), 0.0),)
    failure = first_failure(tmp_path, exits)
    assert exit_code(exits, failure) == 130
    with pytest.raises(Interrupted, match="stopped by SIGINT"):
        raise_failure(tmp_path, "train.py", exits, failure)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (9, "SIGKILL"),
        (33, "signal 33"),
        (34, "signal 34 (SIGRTMIN)"),
        (40, "signal 40 (SIGRTMIN+6)"),
        (64, "signal 64 (SIGRTMIN+30)"),
    ],
)
def test_a_rank_killed_by_any_signal_has_a_result(tmp_path, number, name):
    """Real-time signals have no name in Python: the launcher ended with ValueError (B5)."""
    exits = (exit_of(1, -number),)
    failure = first_failure(tmp_path, exits)
    assert (failure.rank, failure.signal) == (1, name)
    assert exit_code(exits, failure) == 5
    with pytest.raises(RankLost) as caught:
        raise_failure(tmp_path, "train.py", exits, failure)
    assert caught.value.what == f"rank 1 was killed by {name}"


def test_a_rank_that_left_early_is_the_culprit_and_not_its_victim(tmp_path):
    """It was the victim: the rank that raised "connection closed" had failed first."""
    report(tmp_path, 0, 100, LOST)
    left = RankExit(rank=1, code=0, at_s=10.0)
    exits = explaining_exits([left, RankExit(rank=0, code=1, at_s=10.1)], ())
    failure = first_failure(tmp_path, exits)
    assert failure == Failure(rank=1, error="left with exit code 0 while rank 0 still needed it")
    assert exit_code(exits, failure) == 1
    with pytest.raises(ScriptFailed, match="rank 1 left with exit code 0") as caught:
        raise_failure(tmp_path, "train.py", exits, failure)
    assert "same number of steps" in caught.value.fix


def test_a_rank_that_left_is_no_culprit_of_what_another_raises_itself(tmp_path):
    report(tmp_path, 0, 100, RAISED)
    exits = explaining_exits(
        [RankExit(rank=1, code=0, at_s=10.0), RankExit(rank=0, code=1, at_s=10.1)], ()
    )
    assert first_failure(tmp_path, exits) == Failure(rank=0, error=RAISED)


def test_a_killed_rank_is_the_culprit_even_if_another_had_left(tmp_path):
    report(tmp_path, 0, 100, LOST)
    exits = explaining_exits(
        [
            RankExit(rank=2, code=0, at_s=9.0),
            RankExit(rank=1, code=-9, signal="SIGKILL", at_s=10.0),
            RankExit(rank=0, code=1, at_s=10.1),
        ],
        (),
    )
    assert first_failure(tmp_path, exits) == Failure(rank=1, signal="SIGKILL")


def test_a_rank_that_its_launcher_stopped_is_no_culprit(tmp_path):
    """A rank that hangs is stopped when another has failed: the signal is ours."""
    report(tmp_path, 0, 100, LOST)
    stopped = exit_of(1, -9, stopped=True, at_s=13.0)
    exits = explaining_exits([exit_of(0, 1, at_s=10.0), stopped], ())
    assert first_failure(tmp_path, exits) == Failure(rank=0, error=LOST)


@pytest.mark.parametrize(("phase", "culprit"), [(Kind.FORWARD, 1), (Kind.WAIT, 0)])
def test_a_rank_that_hangs_is_the_culprit_of_a_timeout(tmp_path, phase, culprit):
    """The launcher stops it when its peer has raised: that signal says nothing."""
    error = "RuntimeError('[gloo/transport/tcp/buffer.cc:72] Timed out waiting 1000ms for recv')"
    report(tmp_path, 0, 100, error, "backward")
    recorder = Recorder(str(tmp_path / "trace" / trace_name(1)), 1, 2)
    recorder.end_step()
    recorder.begin(int(phase))
    exits = explaining_exits(
        [exit_of(0, 1, at_s=10.0), exit_of(1, -9, stopped=True, at_s=13.0)], ()
    )
    failure = first_failure(tmp_path, exits)
    assert failure.rank == culprit
    if culprit == 1:
        why = "hung: rank 0 waited for it until the timeout"
        assert failure == Failure(rank=1, step=1, phase="forward", error=why)
        assert exit_code(exits, failure) == 5
        with pytest.raises(RankLost, match="rank 1 hung") as caught:
            raise_failure(tmp_path, "train.py", exits, failure)
        assert caught.value.where == "step 1, phase forward"
        assert "--hang-timeout" in caught.value.fix
    recorder.close()


def gave(run, rank, amount, element="float32", sequence=27, word="all_reduce"):
    """Leave the trace of a rank of three whose last collective was given so much."""
    (run / "trace").mkdir(exist_ok=True)
    recorder = Recorder(str(run / "trace" / trace_name(rank)), rank, 3)
    group = recorder.define_group("group 0", [0, 1, 2])
    recorder.record(int(Kind.HOST), 0, 0, 1, 2)
    numbers = (recorder.intern(word), group, sequence, -1, amount, recorder.intern(element))
    recorder.enter(int(Kind.COLLECTIVE), *numbers)
    recorder.close()


@pytest.mark.parametrize("signal", ["SIGABRT", ""])
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"amount": 6000}, "rank 2 gave 6,000 bytes of float32"),
        ({"amount": 4000, "element": "int32"}, "rank 2 gave 4,000 bytes of int32"),
    ],
)
def test_unlike_tensors_of_a_collective_are_compared(tmp_path, odd, said, signal):
    """Gloo aborts a rank that receives more than it expects; the others lose it."""
    for rank in (0, 1):
        gave(tmp_path, rank, 4000)
    gave(tmp_path, 2, **odd)
    report(tmp_path, 1, 100, LOST)
    exits = [exit_of(1, 1, at_s=10.0)]
    if signal:
        exits.insert(0, RankExit(rank=0, code=-6, signal=signal, at_s=9.0))
    failure = first_failure(tmp_path, tuple(exits))
    assert exit_code(tuple(exits), failure) == 1
    with pytest.raises(ScriptFailed, match="the ranks gave unlike tensors") as caught:
        raise_failure(tmp_path, "train.py", tuple(exits), failure)
    others = "rank 0, 1 gave 4,000 bytes of float32"
    assert caught.value.why.startswith(f"to all_reduce 27 of group 0, {said} and {others}; ")
    assert "unlike tensors" in failure_words(failure)


@pytest.mark.parametrize(
    "odd",
    [{"amount": 4000}, {"amount": 6000, "sequence": 26}, {"amount": 6000, "word": "broadcast"}],
)
def test_only_what_ranks_gave_to_the_same_collective_is_compared(tmp_path, odd):
    for rank in (0, 1):
        gave(tmp_path, rank, 4000)
    gave(tmp_path, 2, **odd)
    exits = (RankExit(rank=0, code=-6, signal="SIGABRT"),)
    assert first_failure(tmp_path, exits) == Failure(rank=0, signal="SIGABRT")


@pytest.mark.parametrize(("last_s", "code"), [(7, 1), (3, 5)])
def test_a_rank_that_worked_for_longer_than_the_timeout_did_not_hang(tmp_path, last_s, code):
    """It evaluates alone: its passes are in its trace until the other rank gives up."""
    error = "RuntimeError('[gloo/transport/tcp/buffer.cc:72] Timed out waiting 8000ms for recv')"
    report(tmp_path, 0, 100, error, "backward")
    waited = Event(Kind.WAIT, 0, 8 * 10**9, "all_reduce")
    write_trace(tmp_path / "trace" / trace_name(0), 0, 2, [waited])
    passes = [Event(Kind.EVALUATION, s * 10**9, (s + 1) * 10**9) for s in range(last_s)]
    write_trace(tmp_path / "trace" / trace_name(1), 1, 2, passes)
    exits = explaining_exits(
        [exit_of(0, 1, at_s=10.0), exit_of(1, -9, stopped=True, at_s=13.0)], ()
    )
    failure = first_failure(tmp_path, exits)
    assert failure.rank == 1
    assert exit_code(exits, failure) == code
    with pytest.raises(ScriptFailed if code == 1 else RankLost) as caught:
        raise_failure(tmp_path, "train.py", exits, failure)
    if code == 1:
        assert caught.value.what == "rank 1 worked for longer than the timeout of the process group"
        assert "timeout=" in caught.value.fix
        assert "worked for longer than the group's timeout" in failure_words(failure)


def test_ranks_that_ask_to_be_started_again_were_preempted(tmp_path):
    report(tmp_path, 0, 100, "SystemExit(75)")
    exits = (RankExit(rank=0, code=75), RankExit(rank=1, code=75))
    failure = first_failure(tmp_path, exits)
    assert exit_code(exits, failure) == 75
    with pytest.raises(Preempted, match="preempted") as caught:
        raise_failure(tmp_path, "train.py", exits, failure)
    assert caught.value.exit_code == 75


def test_a_rank_that_raised_failed_although_another_was_preempted(tmp_path):
    report(tmp_path, 1, 100, RAISED)
    exits = (RankExit(rank=1, code=1), RankExit(rank=0, code=75))
    failure = first_failure(tmp_path, exits)
    assert exit_code(exits, failure) == 1
    with pytest.raises(ScriptFailed, match="rank 1"):
        raise_failure(tmp_path, "train.py", exits, failure)
