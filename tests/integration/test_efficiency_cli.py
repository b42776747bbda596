"""`paceline trace efficiency` and `trace compare` as a user calls them."""

import dataclasses
import json

import pytest
from support.command_line import without_torch
from support.traces import Late, data_parallel, write_run

from paceline.core.machine import Machine
from paceline.core.machine_file import library_machine
from paceline.core.plan import Mesh, Plan
from paceline.perf.simulator import Disturbances, SlowRank, simulate
from paceline.perf.simulator import write_run as write_simulation
from paceline.perf.transformer import Architecture
from paceline.trace.analysis import analyse
from paceline.trace.efficiency import RunComparison, RunEfficiency, measure_efficiency
from paceline.trace.merge import load_run

MODEL = Architecture(layers=24, hidden=2048, heads=16, vocab=51200, sequence=2048)


def _paceline(*arguments):
    return without_torch(*arguments, text=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    late = (Late(1, 18, 0, 60),)
    return [
        write_run(tmp_path_factory.mktemp(name), data_parallel(2, 60, late=delays))
        for name, delays in (("even", ()), ("late", late))
    ]


def test_efficiency_names_what_would_help_and_who_is_waited_for(runs):
    done = _paceline("trace", "efficiency", runs[1])
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("The ranks compute 29 % of their time")
    for words in ("wait at NxN", "all_reduce as ring", "load balance", "rank 1     input"):
        assert words in done.stdout, done.stdout
    data = json.loads(_paceline("trace", "efficiency", runs[1], "--json").stdout)
    assert data.pop("kind") == "efficiency"
    assert data.pop("state")
    found = RunEfficiency.from_json(data)
    assert found.waits.delays[0].rank == 1
    assert found.waits.delays[0].phase == "input"


def test_one_step_and_a_step_that_is_not_there(runs):
    done = _paceline("trace", "efficiency", runs[0], "--step", "3", "--json")
    assert json.loads(done.stdout)["last_step"] == 3
    done = _paceline("trace", "efficiency", runs[0], "--step", "99")
    assert done.returncode == 2
    assert "Give a step from 0 to 59" in done.stderr


def test_compare_names_what_became_slower(runs):
    done = _paceline("trace", "compare", *runs)
    assert done.returncode == 0, done.stderr
    assert "180 % slower, most of it in input of rank 1" in " ".join(done.stdout.split())
    data = json.loads(_paceline("trace", "compare", *runs, "--json").stdout)
    assert data.pop("kind") == "comparison"
    assert RunComparison.from_json(data).step.verdict == "slower"


@pytest.mark.parametrize(
    ("mesh", "zero"),
    [(Mesh(data=2, pipeline=1, tensor=4), 0), (Mesh(data=2, pipeline=4, tensor=1), 0)],
)
def test_free_communication_is_what_a_simulation_without_communication_takes(tmp_path, mesh, zero):
    machine = library_machine("dgx-h100")
    plan = Plan(mesh=mesh, microbatches=8, precision="bfloat16", zero=zero, overlap_pipeline=True)
    slow = Disturbances(slow=(SlowRank(rank=1, factor=1.3),))
    found = simulate(machine, MODEL, plan, 32, slow, steps=8, by="rank", records=True)
    write_simulation(found, tmp_path)
    efficiency = measure_efficiency(analyse(load_run(tmp_path)))
    free = simulate(_free(machine), MODEL, plan, 32, slow, steps=8, by="rank")
    assert efficiency.replay_error == pytest.approx(0, abs=1e-6)
    recorded, without = efficiency.what_ifs[:2]
    assert without.step_s == pytest.approx(free.step_s[1:].mean(), rel=1e-4)
    assert without.shorter > 0.0005, recorded
    if mesh.pipeline == 1:  # the first stage of a pipeline makes all others wait
        assert efficiency.waits.delays[0].rank == 1


def _free(machine: Machine) -> Machine:
    """Return the machine with links on which data take no time."""
    links = tuple(
        dataclasses.replace(
            link,
            latency_s=dataclasses.replace(link.latency_s, value=0.0, low=None, high=None),
            bandwidth_bytes_per_s=dataclasses.replace(
                link.bandwidth_bytes_per_s, value=1e21, low=None, high=None
            ),
        )
        for link in machine.links
    )
    return dataclasses.replace(machine, links=links)
