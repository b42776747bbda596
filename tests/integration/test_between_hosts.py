"""Between hosts a machine file's table decides how a call goes, and `probe` fills the table."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from support.emulated_hosts import require_namespaces, run_on_hosts
from support.launching import paceline
from support.machines import collective, small_machine

from paceline.core.machine import Machine

SCRIPT = Path(__file__).parent / "scripts" / "chosen_paths.py"
KIB = 1024
MIB = 1024 * KIB


def table(*, flat_below=None, flat_above=None):
    """Return costs of an all-reduce: a line and a constant, which cross at the given bytes."""
    crossing = flat_below or flat_above
    line = {"latency_s": 1e-3, "bandwidth_bytes_per_s": crossing / 1e-3}
    level = {"latency_s": 2e-3, "bandwidth_bytes_per_s": 1e15}
    flat, two_level = (line, level) if flat_below else (level, line)
    shape = {"ranks": 3, "hosts": 2}
    return (
        collective("all_reduce", **flat, **shape, algorithm="flat"),
        collective("all_reduce", **two_level, **shape, algorithm="two_level", backend="paceline"),
    )


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return what three ranks on two hosts print of groups with one machine file each."""
    require_namespaces()
    folder = tmp_path_factory.mktemp("tables")
    for name, costs in {
        "flat_below": table(flat_below=MIB),
        "flat_above": table(flat_above=MIB),
        "without": (),
    }.items():
        machine = dataclasses.replace(small_machine(), collectives=costs)
        (folder / name).write_text(machine.to_text())
    (folder / "damaged").write_text("{")
    names = ("flat_below", "flat_above", "without", "damaged", "absent", "without")
    codes, out, err = run_on_hosts([2, 1], [sys.executable, SCRIPT, *names], cwd=folder)
    assert codes == [0, 0], err
    lines = [json.loads(line) for line in "".join(out).splitlines()]
    return sorted(lines, key=lambda line: line["rank"])


def all_reduces(paths):
    return [path for call, path in paths.items() if call.startswith("all_reduce")]


def test_calls_go_as_the_table_says_on_all_ranks(said):
    for line in said:
        paths = line["paths"]
        assert all_reduces(paths["flat_below"]) == ["gloo", "gloo", "two levels"]
        assert all_reduces(paths["flat_above"]) == ["two levels", "two levels", "gloo"]


def test_operations_without_a_table_go_by_the_default(said):
    for line in said:
        for name in ("flat_below", "without"):
            paths = line["paths"][name]
            assert paths[f"broadcast {4 * KIB}"] == "two levels"


def test_a_file_without_a_table_is_one_warning_of_rank_0(said):
    _, warning = said[0]["warned"]
    assert "without has no costs of collectives between hosts" in warning
    assert "paceline probe --collectives" in warning
    assert said[1]["warned"] == said[2]["warned"] == []


def test_hosts_that_are_one_machine_are_one_warning_of_rank_0(said):
    shared, _ = said[0]["warned"]
    assert "ranks 0 and 2 of a group run on one machine but share no memory" in shared


def test_a_file_that_cannot_be_read_is_an_error_on_all_ranks(said):
    for line in said:
        assert "not valid JSON" in line["paths"]["damaged"]
        assert "absent" in line["paths"]["absent"]
        assert ("rank 0 failed" in line["paths"]["damaged"]) == (line["rank"] > 0)


def test_a_run_hands_its_machine_file_to_the_ranks(tmp_path):
    (tmp_path / "m.json").write_text(small_machine().to_text())
    script = tmp_path / "show.sh"
    script.write_text('#!/bin/sh\necho "reads $PACELINE_COLLECTIVES__MACHINE"\n')
    script.chmod(0o755)
    done = paceline(tmp_path, "run", "--no-record", "--machine", "m.json", "./show.sh")
    assert done.code == 0, done.err
    assert f"reads {tmp_path / 'm.json'}" in done.out


@pytest.mark.campaign("launchers")
def test_probe_fills_the_table_and_the_backend_reads_it(tmp_path):
    require_namespaces()
    path = tmp_path / "machine.json"
    path.write_text(small_machine().to_text())
    options = ["--collectives", "--quick", "--out", path]
    command = [sys.executable, "-m", "paceline", "probe", *options]
    codes, out, err = run_on_hosts([2, 2], command)
    assert codes == [0, 0], err
    assert out[1] == ""  # rank 0 speaks for all
    machine = Machine.from_text(path.read_text())
    assert machine.devices == small_machine().devices
    added = machine.collectives[1:]
    assert {(cost.ranks, cost.hosts, cost.level) for cost in added} == {(4, 2, "network")}
    assert {(cost.backend, cost.algorithm) for cost in added} == {
        *(("gloo", "flat"), ("paceline", "two_level"))
    }
    assert {cost.operation for cost in added} >= {"all_reduce", "broadcast", "reduce"}
    for cost in added:
        seconds = [point.seconds.value for point in cost.points]
        assert len(seconds) >= 5
        assert seconds == sorted(seconds)
    assert machine.collective("all_reduce", 4).hosts == 1
    assert machine.collective("all_reduce", 4, hosts=2).algorithm == "flat"
    codes, out, err = run_on_hosts([2, 2], [sys.executable, SCRIPT, path])
    assert codes == [0, 0], err
    warned = [text for line in "".join(out).splitlines() for text in json.loads(line)["warned"]]
    assert not any("no costs" in text for text in warned)


@pytest.mark.campaign("launchers")
def test_ranks_of_one_host_have_nothing_to_measure_between_hosts(tmp_path):
    require_namespaces()
    command = [sys.executable, "-m", "paceline", "probe", "--collectives"]
    codes, _, err = run_on_hosts([2], command, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert codes == [2]
    assert err[0].count("all 2 ranks share memory") == 1
    assert not list(tmp_path.rglob("machine*"))


def test_what_is_wrong_with_the_job_rank_0_alone_says(tmp_path):
    """Each rank said it, in lines between those of the others."""
    probe = ("-m", "paceline", "probe", "--collectives", "--out", "m.json")
    done = paceline(tmp_path, "run", "-n", 2, "--no-record", *probe)
    assert done.code != 0
    assert done.err.count("all 2 ranks share memory") == 1, done.err
    assert "rank 0" in done.err
    assert not (tmp_path / "m.json").exists()


@pytest.mark.campaign("launchers")
@pytest.mark.parametrize(("costs", "path"), [("flat_below", "gloo"), ("flat_above", "two levels")])
def test_a_run_on_two_hosts_takes_the_path_of_its_machine_file(tmp_path, costs, path):
    require_namespaces()
    machine = dataclasses.replace(small_machine(), collectives=table(**{costs: MIB}))
    (tmp_path / "m.json").write_text(machine.to_text())
    script = SCRIPT.with_name("announce_path.py")
    options = "run -n 2 --nnodes 2 --node-rank $RANK --rdzv-endpoint 127.0.0.1:$MASTER_PORT"
    options += f" --no-record --collectives paceline --machine m.json --out RUN {script}"
    command = ["sh", "-c", f"exec {sys.executable} -m paceline {options}"]
    codes, out, err = run_on_hosts([1, 1], command, cwd=tmp_path)
    assert codes == [0, 0], err
    said = sorted(line for line in "".join(out).splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank}: {path}" for rank in range(4)]
