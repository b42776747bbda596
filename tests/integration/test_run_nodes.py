"""Several nodes without Slurm or MPI: two launchers on this host, at an endpoint on loopback."""

import json
import socket

import pytest
from support.launching import SCRIPTS, Launched, await_true, free_endpoint, launch_node, paceline

from paceline.runs.folder import RunFolder

TRAIN = SCRIPTS / "train.py"
PLACE = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
# One write: under PYTHONUNBUFFERED print writes piece by piece, and ranks share a pipe.
sys.stdout.write(" ".join(os.environ[name] for name in names) + "\\n")
"""


def nodes(folder, endpoint, *args, ranks=1, outs=("RUN", "RUN"), env=None):
    """Start the launchers of two nodes."""
    return [
        launch_node(folder, node, endpoint, "-n", ranks, *args, out=out, env=env)
        for node, out in enumerate(outs)
    ]


def test_two_nodes_make_one_run_in_a_shared_folder(tmp_path):
    zero, one = (task.wait() for task in nodes(tmp_path, free_endpoint(), "--json", TRAIN))
    assert (zero.code, one.code) == (0, 0), zero.err + one.err
    result = RunFolder(tmp_path / "RUN").read_result()
    assert [(rank.rank, rank.steps) for rank in result.ranks] == [(0, 20), (1, 20)]
    assert json.loads(zero.out)["world_size"] == 2
    assert one.out == ""  # node 0 knows of all
    assert not (tmp_path / "RUN" / "rendezvous").exists()
    zero.assert_nothing_left()


def test_ranks_are_numbered_by_node_and_folders_need_not_be_shared(tmp_path):
    script = tmp_path / "place.py"
    script.write_text(PLACE)
    outs = ("RUN", "OTHER")
    tasks = nodes(tmp_path, free_endpoint(), "--no-record", script, ranks=2, outs=outs)
    zero, one = (task.wait() for task in tasks)
    assert (zero.code, one.code) == (0, 0), zero.err + one.err
    assert sorted(zero.out.splitlines()) == ["0 4 0 2 0 2", "1 4 1 2 0 2"]
    assert sorted(one.out.splitlines()) == ["2 4 0 2 1 2", "3 4 1 2 1 2"]
    assert (tmp_path / "RUN" / "result.json").exists()
    assert not (tmp_path / "OTHER" / "result.json").exists()


def test_a_rank_that_fails_on_one_node_ends_the_run_on_all(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "if os.environ['RANK'] == '3': raise ValueError('no data')\n"
        "while True: signal.pause()\n"
    )
    tasks = nodes(tmp_path, free_endpoint(), "--no-record", script, ranks=2)
    zero, one = (task.wait() for task in tasks)
    assert (zero.code, one.code) == (1, 1), zero.err + one.err
    for node in (zero, one):
        assert "rank 3 failed first" in node.err
    assert RunFolder(tmp_path / "RUN").read_result().failure.rank == 3
    zero.assert_nothing_left()


@pytest.mark.campaign("launchers")
def test_a_node_that_does_not_come_is_named(tmp_path):
    environ = {"PACELINE_RUN__RENDEZVOUS_TIMEOUT_S": "2"}
    options = ("--nnodes", 2, "--rdzv-endpoint", free_endpoint(), "--out", "RUN")
    done = paceline(tmp_path, "run", *options, TRAIN, env=environ)
    assert done.code == 5
    assert "1 of 2 tasks did not arrive: node 1" in done.err


@pytest.mark.campaign("launchers")
def test_two_launchers_of_one_node_are_misuse(tmp_path):
    options = ("run", "--nnodes", 2, "--rdzv-endpoint", free_endpoint(), TRAIN)
    environ = {"PACELINE_RUN__RENDEZVOUS_TIMEOUT_S": "5"}
    outs = (("--out", "A"), ("--out", "B"))
    first, second = (
        Launched(tmp_path, options[0], *out, *options[1:], env=environ) for out in outs
    )
    codes = {first.wait().code, second.wait().code}
    assert codes == {2, 5}, first.err + second.err
    assert "its own --node-rank" in first.err + second.err


@pytest.mark.campaign("launchers")
def test_a_node_of_another_job_is_not_taken_for_one_of_this(tmp_path):
    """Two jobs at one endpoint, both without --rdzv-id: the second one's node comes first."""
    script = tmp_path / "say.py"
    script.write_text("import sys; print(sys.argv[1])")
    endpoint, short = free_endpoint(), {"PACELINE_RUN__RENDEZVOUS_TIMEOUT_S": "3"}
    with launch_node(tmp_path, 0, endpoint, "--no-record", script, "this") as zero:
        address = tmp_path / "RUN" / "rendezvous" / "root.json"
        await_true(address.exists, "node 0 to listen")
        words = ("--no-record", script, "other")
        stranger = launch_node(tmp_path, 1, endpoint, *words, out="OTHER", env=short).wait()
        one = launch_node(tmp_path, 1, endpoint, "--no-record", script, "this").wait()
        zero.wait()
    assert stranger.code == 5
    assert "the root of another job: say.py [" in stranger.err
    assert f"which writes {tmp_path / 'RUN'}" in stranger.err
    assert "--rdzv-endpoint HOST:PORT --rdzv-id NAME" in stranger.err
    assert (zero.code, one.code) == (0, 0), zero.err + one.err
    assert [zero.out, one.out] == ["this\n", "this\n"]


@pytest.mark.campaign("launchers")
def test_a_job_with_a_name_may_have_arguments_by_node(tmp_path):
    script = tmp_path / "say.py"
    script.write_text("import sys; print(sys.argv[1])")
    endpoint, words = free_endpoint(), ("--no-record", "--rdzv-id", "named", script)
    zero = launch_node(tmp_path, 0, endpoint, *words, "first")
    one = launch_node(tmp_path, 1, endpoint, *words, "second")
    assert [zero.wait().code, one.wait().code] == [0, 0], zero.err + one.err
    assert [zero.out, one.out] == ["first\n", "second\n"]


def test_an_endpoint_that_is_taken_is_named(tmp_path):
    """Two runs of one machine at the same endpoint: the second says so, and does not wait."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ("--nnodes", 2, "--node-rank", 0, "--rdzv-endpoint", f"127.0.0.1:{port}")
        done = paceline(tmp_path, "run", *options, "--no-record", "--out", "RUN", TRAIN)
    assert done.code == 2
    assert f"port {port} of 127.0.0.1" in done.err
    assert "Address already in use" in done.err
    assert "a port that is free on node 0" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nnodes", "2"), "--rdzv-endpoint is missing"),
        (("--nnodes", "2", "--node-rank", "2"), "node-rank is 2, nnodes is 2"),
        (("--nnodes", "1:4"), "not a number of nodes"),
        (("--nnodes", "2", "--rdzv-endpoint", "a:b"), "not an address"),
        (("--nnodes", "2", "--rdzv-endpoint", "a:1"), "--rdzv-id does not name the job"),
    ],
)
def test_misuse_is_told_before_anything_is_written(tmp_path, arguments, said):
    done = paceline(tmp_path, "run", *arguments, TRAIN)
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "paceline-runs").exists()
