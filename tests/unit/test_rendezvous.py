"""The rendezvous over real sockets and files on this host, and what a stranger can send it."""

import dataclasses
import doctest
import errno
import json
import os
import resource
import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launching import await_true

from paceline.core import handshake
from paceline.core.clock import SystemClock
from paceline.core.errors import DeadlineExceeded, RankLost
from paceline.core.handshake import NONCE_BYTES, PROOF_BYTES, prove
from paceline.core.processes import StopRequested
from paceline.core.token import find_token
from paceline.launch.exits import (
    RankExit,
    exit_of,
    explaining_exits,
    interrupted_exit,
    interruption,
    lost_exit,
)
from paceline.launch.rendezvous import addresses, job, links, shares
from paceline.launch.rendezvous.job import TaskRendezvous
from paceline.launch.rendezvous.links import FolderLink
from paceline.launch.rendezvous.messages import (
    MAX_MESSAGE_BYTES,
    BadMessage,
    JobEnd,
    JobPhase,
    Notice,
    StartInfo,
    TaskReport,
    parse_notice,
    parse_report,
)
from paceline.launch.rendezvous.root import Deadlines
from paceline.launch.rendezvous.shares import core_shares
from paceline.launch.task import run_task
from paceline.launch.task_placement import TaskPlacement
from paceline.runs.result import Failure

FAST = Deadlines(
    rendezvous_timeout_s=60, heartbeat_interval_s=0.5, heartbeat_timeout_s=20, stop_timeout_s=20
)
HERE = TaskReport(
    job="job", run="", task="t", rank=1, world_size=2, host="node", cores=(0, 1, 255), ended=None
)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "RUN"
    folder.mkdir()
    return folder


def task(
    run,
    rank,
    size=2,
    *,
    deadlines=FAST,
    cores=(0, 1),
    host="node",
    name="",
    first_host="",
    local=None,
    token_file="",
):
    placement = TaskPlacement(
        source="mpich",
        task_number=rank,
        task_count=size,
        local_task_number=rank % (local or size),
        local_task_count=local or size,
        job_name=name,
        first_host=first_host,
    )
    return TaskRendezvous(
        run,
        placement,
        host=host,
        cores=cores,
        deadlines=deadlines,
        clock=SystemClock(),
        token_file=token_file,
    )


def ended_well(outcome):
    """Whether a member of a good run ended as it should.

    It leaves as soon as rank 0 knows that its rank ended; one that had to connect again on a busy
    machine may hear how the whole run ended first.
    """
    return outcome in (None, JobEnd(exit_code=0))


def in_threads(*functions):
    """Run functions at the same time; return what they returned or raised, in order."""
    outcomes = [None] * len(functions)

    def call(index, function):
        try:
            outcomes[index] = function()
        except Exception as error:  # noqa: BLE001  # the test looks at it
            outcomes[index] = error

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    return outcomes


def member(rendezvous, code=0, wait_for=None, seen=None):
    """Return what a task other than rank 0 does: start, end with `code`, learn of the end."""

    def body():
        with rendezvous:
            rendezvous.start()
            start = rendezvous.await_start()
            if seen is not None:
                seen[rendezvous.task_number] = start
            if wait_for is not None:
                await_true(wait_for, "the moment to end")
            stopped = bool(rendezvous.stop_reason())
            rendezvous.report(exit_of(rendezvous.task_number, code, stopped=stopped, at_s=1.0))
            return rendezvous.await_end()

    return body


def root(rendezvous, code=0, seen=None):
    """Return what rank 0 does: as a member, and gather and announce."""

    def body():
        with rendezvous:
            rendezvous.start()
            start = rendezvous.await_start()
            if seen is not None:
                seen[0] = start
            rendezvous.report(exit_of(0, code, at_s=2.0))
            exits = rendezvous.gather()
            worst = exits[0].code if exits else 0
            rendezvous.announce(JobEnd(exit_code=worst))
            return exits

    return body


def test_tasks_start_together_and_share_the_cores_that_they_have_in_common(run):
    seen = {}
    others = [task(run, rank, 3, cores=(0, 1) if rank < 2 else (2,)) for rank in (1, 2)]
    zero = task(run, 0, 3)
    outcomes = in_threads(root(zero, seen=seen), *(member(other, seen=seen) for other in others))
    assert outcomes[0] == ()
    assert all(map(ended_well, outcomes[1:]))
    assert len({(start.address, start.port) for start in seen.values()}) == 1
    assert {rank: (start.share_index, start.share_count) for rank, start in seen.items()} == {
        0: (0, 2),
        1: (1, 2),
        2: (0, 1),
    }
    assert list(run.iterdir()) == []


def test_a_failed_rank_stops_the_others_at_once_and_all_learn_the_end(run):
    one, two = task(run, 1, 3), task(run, 2, 3)
    outcomes = in_threads(
        root(task(run, 0, 3)), member(one, code=7), member(two, code=1, wait_for=two.stop_reason)
    )
    assert outcomes[0] == (RankExit(rank=1, code=7, at_s=1.0),)
    assert outcomes[1] == outcomes[2] == JobEnd(exit_code=7)
    assert two.stop_reason() == "rank 1 failed"


class EndedRanks:
    """Stands for `LocalRanks` of a node whose ranks have ended."""

    def __init__(self, *exits):
        self.exits = lambda: exits

    def wait(self, _stop_reason):
        """All have ended."""


def test_a_rank_that_left_a_node_early_is_known_to_rank_0(run):
    """A node reported one exit, of the rank that then lost a peer: that rank was blamed."""
    ranks = [
        EndedRanks(exit_of(0, 1, at_s=10.2), exit_of(1, 1, at_s=10.3)),
        EndedRanks(exit_of(3, 0, at_s=10.0), exit_of(2, 1, at_s=10.1)),
    ]

    def node(number):
        place = TaskPlacement(
            source="nodes",
            task_number=number,
            task_count=2,
            local_task_number=0,
            local_task_count=1,
            identity="job",
            ranks_per_task=2,
        )
        rendezvous = TaskRendezvous(
            run, place, host="node", cores=(0,), deadlines=FAST, clock=SystemClock()
        )
        with rendezvous:
            exits = run_task(number, ranks[number], lambda _: None, rendezvous, SystemClock())
            if number == 0:
                rendezvous.announce(JobEnd(exit_code=1))
            return exits

    zero, _ = in_threads(lambda: node(0), lambda: node(1))
    assert zero == explaining_exits([*ranks[0].exits(), *ranks[1].exits()], ())
    assert zero[-1] == exit_of(3, 0, at_s=10.0)


def test_a_task_that_dies_is_lost(run):
    deadlines = Deadlines(
        rendezvous_timeout_s=60, heartbeat_interval_s=0.2, heartbeat_timeout_s=0.9, stop_timeout_s=5
    )
    one = task(run, 1, deadlines=deadlines)

    def dies():
        one.start()
        one.await_start()
        client = one._client
        client._state = None  # its thread ends with an error, as the process would
        client.put(None)

    quiet = threading.excepthook
    threading.excepthook = lambda _: None
    try:
        outcomes = in_threads(root(task(run, 0, deadlines=deadlines)), dies)
    finally:
        threading.excepthook = quiet
    assert outcomes[0] == (lost_exit(1),)


def test_tasks_that_do_not_arrive_are_named_with_where_the_root_listened(run):
    deadlines = Deadlines(rendezvous_timeout_s=0.5, stop_timeout_s=5)
    zero = task(run, 0, 4, deadlines=deadlines)
    (error,) = in_threads(root(zero))
    assert isinstance(error, DeadlineExceeded)
    assert error.what == "3 of 4 tasks did not arrive: rank 1, 2, 3"
    assert "of 127.0.0.1, written to" in error.where
    assert error.why == "0.5 s passed; rank 0 arrived"


def test_a_member_without_rank_0_says_where_it_looked(run):
    deadlines = Deadlines(rendezvous_timeout_s=0.5)
    (error,) = in_threads(member(task(run, 1, deadlines=deadlines)))
    assert isinstance(error, DeadlineExceeded)
    assert error.what == "rank 0 did not arrive"
    assert str(run) in error.why


def test_a_task_that_fails_before_all_have_arrived_stops_the_others(run):
    def fails():
        with task(run, 1, 3) as one:
            one.start()
            await_true((run / "rendezvous").exists, "rank 0")
            raise RankLost("no such script")

    outcomes = in_threads(root(task(run, 0, 3)), fails)
    assert outcomes[0].what == "another task failed before all had arrived"


def test_an_interruption_stops_all(run):
    one, zero = task(run, 1), task(run, 0)
    stop = interrupted_exit(0, StopRequested("SIGTERM"), 1.5)

    def interrupted():
        with zero:
            zero.start()
            zero.await_start()
            zero.report(exit_of(0, 0))
            zero.interrupt(stop)
            exits = zero.gather()
            zero.announce(JobEnd(exit_code=130, signal="SIGTERM"))
            return exits

    outcomes = in_threads(interrupted, member(one, code=1, wait_for=one.stop_reason))
    assert interruption(outcomes[0]) == stop
    assert outcomes[1] == JobEnd(exit_code=130, signal="SIGTERM")
    assert one.stop_reason() == "rank 0 was interrupted by SIGTERM"


# --- how the root is found --------------------------------------------------------------------


def test_a_named_job_needs_no_file_to_find_its_root(run, tmp_path):
    elsewhere = tmp_path / "another file system"
    outcomes = in_threads(
        root(task(run, 0, name="slurm-7.0")), member(task(elsewhere, 1, name="slurm-7.0"))
    )
    assert outcomes[0] == ()
    assert ended_well(outcomes[1])


def test_a_root_whose_ports_are_taken_is_found_through_its_file(run, monkeypatch):
    with ExitStack() as stack:
        ports = []
        for _ in range(2):
            taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            ports.append(taken.getsockname()[1])
        monkeypatch.setattr(addresses, "agreed_ports", lambda _job: tuple(ports))
        seen = {}
        outcomes = in_threads(root(task(run, 0), seen=seen), member(task(run, 1), seen=seen))
    assert outcomes[0] == ()
    assert ended_well(outcomes[1])


def test_where_tcp_is_blocked_messages_go_through_files(run, monkeypatch):
    # Nothing listens where the file says, and the address is not known without it.
    monkeypatch.setattr(job, "listening_hosts", lambda _task: ("127.0.0.2",))
    monkeypatch.setattr(links, "_FOLDER_FROM_ATTEMPT", 3)
    one = task(run, 1, local=1)
    seen = {}
    outcomes = in_threads(root(task(run, 0), seen=seen), member(one, code=3, seen=seen))
    assert outcomes[0] == (RankExit(rank=1, code=3, at_s=1.0),)
    assert outcomes[1] == JobEnd(exit_code=3)
    assert isinstance(one._client._link, FolderLink)
    assert not (run / "rendezvous").exists()


@given(st.text(min_size=1))
def test_agreed_ports_are_the_same_everywhere_and_not_ephemeral(name):
    ports = addresses.agreed_ports(name)
    assert ports == addresses.agreed_ports(name)
    assert ports
    assert all(20_000 <= port < 32_000 for port in ports)


def test_a_root_without_descriptors_accepts_again_later(run, monkeypatch):
    class Full(socket.socket):
        refused = 0

        def accept(self):
            if Full.refused < 2:
                Full.refused += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    listen = job.open_listener
    monkeypatch.setattr(job, "open_listener", lambda *args: Full(fileno=listen(*args).detach()))
    assert in_threads(root(task(run, 0)), member(task(run, 1))) == [(), None]
    assert Full.refused == 2


# --- strangers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\n",
        b"[]\n",
        b"{}\n",
        b'{"version": 1}\n',
        b"[" * 50_000 + b"\n",
        b"x" * (2 * MAX_MESSAGE_BYTES),
        HERE.to_line().replace(b'"rank":1', b'"rank":-1'),
        HERE.to_line().replace(b'"rank":1', b'"rank":1e99'),
        HERE.to_line().replace(b'"version":1', b'"version":2'),
        HERE.to_line().replace(b'"ended":null', b'"ended":{"at_s":' + b"9" * 400 + b"}"),
        HERE.to_line(),  # of another job
    ],
)
@pytest.mark.parametrize("has_token", [False, True])
def test_a_stranger_loses_its_connection_and_nothing_more(run, sent, has_token, monkeypatch):
    if not has_token:
        monkeypatch.setattr(handshake, "PATIENCE_S", 0.5)
    zero, one = task(run, 0), task(run, 1)
    with zero:
        zero.start()
        await_true((run / "rendezvous/root.json").exists, "the root")
        port = json.loads((run / "rendezvous/root.json").read_text())["port"]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as stranger:
            if has_token:
                prove(stranger, find_token(), 60)
                stranger.settimeout(60)
            stranger.sendall(sent)
            answer = b""
            try:
                while chunk := stranger.recv(1 << 16):
                    answer += chunk
            except ConnectionResetError:  # closed before all of it was read
                pass
        if has_token:
            assert not answer or parse_notice(answer).refusal
        else:
            assert len(answer) in (NONCE_BYTES, NONCE_BYTES + PROOF_BYTES)
            assert not answer[NONCE_BYTES:].strip(b"\0")
        with one:
            one.start()
            assert one.await_start().port == zero.await_start().port
            one.report(exit_of(1, 0))
            assert one.await_end() is None
        zero.report(exit_of(0, 0))
        assert zero.gather() == ()


def other_token(tmp_path):
    path = tmp_path / "another-token"
    path.write_text("of a node without the user's home\n")
    path.chmod(0o600)
    return str(path)


def test_nodes_that_share_no_home_meet_by_the_token_in_the_runs_folder(run, tmp_path):
    one = task(run, 1, token_file=other_token(tmp_path))
    assert in_threads(root(task(run, 0)), member(one)) == [(), None]


def test_a_task_with_another_token_says_so(run, tmp_path, caplog):
    """It shares neither the user's home nor the run's folder."""
    deadlines = dataclasses.replace(FAST, rendezvous_timeout_s=3)
    elsewhere = tmp_path / "elsewhere" / "RUN"
    elsewhere.mkdir(parents=True)
    zero = task(run, 0, deadlines=deadlines, name="a job")
    one = task(elsewhere, 1, deadlines=deadlines, name="a job", token_file=other_token(tmp_path))
    found = in_threads(root(zero), member(one))
    assert isinstance(found[0], DeadlineExceeded)
    assert isinstance(found[1], DeadlineExceeded)
    assert "refused the token of this task" in str(found[1])
    assert "--token-file" in str(found[1])
    assert "waits: the server has another token" in caplog.text


def test_what_lies_in_the_runs_folder_is_this_users_alone(run):
    before = os.umask(0)
    try:
        with task(run, 0) as zero:
            zero.start()
            await_true((run / "rendezvous/root.json").exists, "the root")
            assert (run / "rendezvous").stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data):
    for parse in (parse_report, parse_notice):
        with pytest.raises(BadMessage):
            parse(data)


@given(st.data())
def test_a_message_with_any_value_in_any_field_is_a_message_or_refused(data):
    ended = exit_of(1, -9, at_s=3.0)
    message = data.draw(st.sampled_from([TaskReport(**{**fields(HERE), "ended": ended}), NOTICE]))
    plain = json.loads(message.to_line())
    plain[data.draw(st.sampled_from(sorted(plain)))] = data.draw(JSON)
    line = json.dumps(plain).encode()
    parse = parse_report if isinstance(message, TaskReport) else parse_notice
    with suppress(BadMessage):
        assert parse(line).to_line()


def fields(record):
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


NOTICE = Notice(
    run="r",
    phase=JobPhase.FINISHED,
    heard_end=True,
    start=StartInfo(address="node", port=4711, share_index=1, share_count=2),
    end=JobEnd(exit_code=5, signal="", failure=Failure(rank=1, signal="SIGKILL", step=7)),
    refusal="",
    reason="rank 1 failed",
)


@pytest.mark.parametrize(
    "report",
    [
        HERE,
        TaskReport(**{**fields(HERE), "ended": exit_of(1, -34, at_s=3.5), "leaving": True}),
        TaskReport(
            **{**fields(HERE), "ended": exit_of(2, 1, at_s=3.5), "others": (exit_of(3, 0),)}
        ),
        TaskReport(**{**fields(HERE), "ended": interrupted_exit(1, StopRequested("SIGTERM"), 2.0)}),
    ],
)
def test_reports_round_trip(report):
    assert parse_report(report.to_line()) == report


def test_notices_round_trip():
    assert parse_notice(NOTICE.to_line()) == NOTICE
    plain = Notice(run="r", phase=JobPhase.GATHERING)
    assert parse_notice(plain.to_line()) == plain


# --- many tasks, and shares of cores ------------------------------------------------------------


def test_several_hundred_tasks_over_loopback(run):
    size = 300
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8 * size + 200  # a socket on each side, and a wake-up pair for each member
    if hard != resource.RLIM_INFINITY and hard < wanted:
        size = (hard - 200) // 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, hard)), hard))
    # All of them share one interpreter: on a busy machine a heartbeat takes its time.
    patient = dataclasses.replace(FAST, heartbeat_interval_s=2, heartbeat_timeout_s=120)
    try:
        tasks = [task(run, rank, size, deadlines=patient) for rank in range(size)]
        outcomes = in_threads(root(tasks[0]), *map(member, tasks[1:]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert outcomes[0] == ()
    assert all(map(ended_well, outcomes[1:]))
    assert not [thread for thread in threading.enumerate() if thread.name in ("paceline-root",)]


def test_the_examples_in_the_module_run():
    result = doctest.testmod(shares)
    assert result.attempted
    assert not result.failed


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([(0, 1), (2, 3), (0,)]))))
def test_shares_of_a_set_of_cores_are_complete_and_used_once(bindings):
    by_binding = {}
    for binding, (index, count) in zip(bindings, core_shares(bindings), strict=True):
        by_binding.setdefault(binding, []).append((index, count))
    for given_shares in by_binding.values():
        assert given_shares == [(index, len(given_shares)) for index in range(len(given_shares))]


def test_the_address_file_is_small(run):
    addresses.write_address(run, "0" * 32, ("node-0", "node-0.cluster.example"), 20_000)
    assert os.path.getsize(run / "rendezvous/root.json") < 200  # noqa: PTH202  # one small file
    assert addresses.read_address(run)[0] == ("node-0", 20_000)
    (run / "rendezvous/root.json").write_text("{")
    assert addresses.read_address(run) == ()


@pytest.mark.parametrize(
    ("first_host", "reached"), [("::1", ["::1"]), ("node0", ["::1", "127.0.0.1"])]
)
def test_the_root_is_reached_by_ipv6(first_host, reached):
    """An endpoint may be [IPV6]:PORT, and a host's name may stand for an address of either kind."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    nodes = TaskPlacement(
        source="nodes",
        task_number=0,
        task_count=2,
        local_task_number=0,
        local_task_count=1,
        first_host=first_host,
        port=port,
    )
    with addresses.open_listener(nodes, "job"):
        for host in reached:
            socket.create_connection((host, port), timeout=10).close()
