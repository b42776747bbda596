"""What a plan settles for a run, and what contradicts it."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from paceline.core.clock import ManualClock
from paceline.core.config import resolve
from paceline.core.errors import ConfigError, UsageError
from paceline.core.plan import Mesh, Plan
from paceline.core.plan_file import PlanFile, load_plan_file
from paceline.launch.options import RunConfig
from paceline.launch.planned import plan_warnings
from paceline.launch.prepare import prepare
from paceline.launch.program import ProgramKind, find_program
from paceline.launch.run import describe

MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
NAMES = ("PMI_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID", "OMP_NUM_THREADS")
GOLDEN = Path(__file__).parents[1] / "golden"
TWO = Plan(mesh=Mesh(data=2), threads=3)


@pytest.fixture
def ready(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "train.py"
    script.write_text("")

    def prepared(plan, **flags):
        resolved = resolve(RunConfig, flags=flags)
        program = find_program(str(script), is_module=False)
        return prepare(program, [], resolved, None, ManualClock(), plan=PlanFile(plan=plan))

    return prepared


def test_a_run_takes_its_ranks_from_the_plan(ready):
    assert ready(TWO).ranks == 2
    assert ready(TWO, ranks=2).ranks == 2


def test_a_run_takes_its_allocator_from_the_plan(ready):
    system = dataclasses.replace(TWO, allocator="system")
    assert ready(system).allocator.in_effect == "system"
    assert ready(system, allocator="system").allocator.in_effect == "system"


def test_a_run_takes_its_collectives_from_the_plan(ready):
    assert ready(TWO).collectives == "torch"
    job = ready(dataclasses.replace(TWO, collectives="paceline"))
    assert job.collectives == describe(job)["collectives"] == "paceline"


def test_what_the_plan_sets_is_kept_with_the_run_as_set_by_the_plan(ready):
    """`config.json`, and so the report, said "torch", by default."""
    values = describe(ready(dataclasses.replace(TWO, collectives="paceline"), ranks=2))["values"]
    assert values["collectives"] == {"value": "paceline", "provenance": "plan"}
    assert values["ranks"] == {"value": 2, "provenance": "flag"}


def test_a_setting_of_the_backend_is_checked_before_the_start_and_kept(ready, monkeypatch):
    monkeypatch.setenv("PACELINE_COLLECTIVES__WIRE", "bfloat16")
    kept = describe(ready(TWO))["collectives_values"]
    assert kept["wire"] == {"value": "bfloat16", "provenance": "environment"}
    monkeypatch.setenv("PACELINE_COLLECTIVES__WIRE", "bf16")
    with pytest.raises(ConfigError, match="'bf16' is not one of 'same', 'bfloat16'"):
        ready(TWO)


@pytest.mark.parametrize(
    ("plan", "flags", "environ", "words"),
    [
        (TWO, {"ranks": 4}, {}, "--ranks is 4, the plan's number of ranks (mesh.data) is 2"),
        (
            TWO,
            {},
            {"PACELINE_RUN__RANKS": "3"},
            "PACELINE_RUN__RANKS is 3, the plan's number of ranks (mesh.data) is 2",
        ),
        (TWO, {}, {"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS is 1, the plan's threads is 3"),
        (TWO, {"allocator": "system"}, {}, "--allocator is system, the plan's allocator is keep"),
        (TWO, {"collectives": "paceline"}, {}, "the plan's collectives is torch"),
        (
            TWO,
            {},
            {"PACELINE_RUN__ALLOCATOR": "system"},
            "PACELINE_RUN__ALLOCATOR is system, the plan's allocator is keep",
        ),
        (
            Plan(mesh=Mesh(data=4)),
            {},
            MPICH,
            "the mpich step's ranks per node is 2, the plan's ranks_per_node is 4",
        ),
        (Plan(mesh=Mesh(data=2), nodes=2), {}, {}, "over 2 nodes"),
        (Plan(mesh=Mesh(tensor=2)), {}, {}, "the plan's mesh has 2 ranks along the axis tensor"),
        (Plan(mesh=Mesh(context=2)), {}, {}, "has 2 ranks along the axis context"),
        (Plan(mesh=Mesh(pipeline=2), stages_per_rank=3), {}, {}, "has 3 stages for each rank"),
        (
            Plan(mesh=Mesh(data=2, pipeline=2)),
            {"ranks": 2},
            {},
            "--ranks is 2, the plan's number of ranks (mesh.data x mesh.pipeline) is 4",
        ),
    ],
)
def test_what_contradicts_the_plan_is_refused_by_both_names(
    ready, monkeypatch, plan, flags, environ, words
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        ready(plan, **flags)
    assert caught.value.fix
    assert "--plan" in caught.value.where


def test_what_only_the_script_can_set_is_said_in_one_line():
    assert plan_warnings(TWO, ProgramKind.SCRIPT) == ()
    (line,) = plan_warnings(Plan(precision="bfloat16", loader_workers=2), ProgramKind.SCRIPT)
    assert "precision = bfloat16, loader_workers = 2" in line
    (line,) = plan_warnings(Plan(mesh=Mesh(pipeline=2)), ProgramKind.SCRIPT)
    assert "mesh.pipeline = 2" in line
    passes = Plan(mesh=Mesh(data=2), microbatches=4)
    (line,) = plan_warnings(passes, ProgramKind.SCRIPT)
    assert "microbatches = 4: only the script itself" in line
    (line,) = plan_warnings(Plan(engine="sharded"), ProgramKind.SCRIPT)
    assert "engine = sharded" in line
    (line,) = plan_warnings(Plan(zero=1, recompute="full"), ProgramKind.SCRIPT)
    assert "zero = 1, recompute = full" in line
    assert "paceline.training.prepare" in line


def test_bucket_sizes_that_do_not_reach_the_ranks_are_said():
    """They were dropped: a shell script's ranks trained with torch's own."""
    plan = Plan(bucket_bytes=1 << 20)
    assert plan_warnings(plan, ProgramKind.MODULE) == ()
    assert plan_warnings(Plan(), ProgramKind.EXECUTABLE) == ()
    (line,) = plan_warnings(plan, ProgramKind.EXECUTABLE)
    assert line == "the plan's bucket sizes do not reach a program that is not Python"


def test_a_plan_written_by_hand_is_taken(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"plan": {"mesh": {"data": 2}, "threads": 3}}')
    assert load_plan_file(path) == PlanFile(plan=TWO)
    path.write_text('{"mesh": {"data": 2}, "threads": 3}')
    assert load_plan_file(path) == PlanFile(plan=TWO)


def test_a_file_that_is_no_plan_is_refused_with_its_place(tmp_path):
    path = tmp_path / "plan.json"
    for text, words in (
        ("{}", "this is no plan"),
        ('{"version": 1}', "this is no plan"),
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"plan": {"threads": 0}}', "threads"),
        ('{"paln": {}}', "unknown key 'paln'"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(words)) as caught:
            load_plan_file(path)
        assert str(path) in caught.value.where


def test_an_estimate_of_another_plan_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text((GOLDEN / "estimate-v1.json").read_text())
    kept = load_plan_file(path)
    assert kept.plan == Plan(mesh=Mesh(data=2))
    assert kept.estimate is not None
    path.write_text(json.dumps({"plan": {"threads": 7}, "estimate": kept.estimate.to_json()}))
    with pytest.raises(ConfigError, match="not for the plan"):
        load_plan_file(path)
