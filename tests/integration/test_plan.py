"""A user's model, from its file to a table; and each way to get it wrong."""

import json

import pytest
from click.testing import CliRunner
from support.machines import small_machine

from paceline.cli.plan import plan
from paceline.core.allocator import KEEP
from paceline.core.errors import (
    CorruptPack,
    DeadlineExceeded,
    NotFound,
    ScriptFailed,
    UsageError,
)
from paceline.core.machine import Machine
from paceline.core.plan import Mesh, Plan
from paceline.core.plan_file import load_plan_file
from paceline.studies.predict import StrategyOptions, load_machine, predict
from paceline.training.capture_process import capture_file

pytest.importorskip("torch")

BEHIND = pytest.mark.campaign("e2e")

MODEL = """
import os
import torch
from torch import nn

def step():
    print("building")
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    target = torch.zeros(32, dtype=torch.long)
    loss = nn.functional.cross_entropy
    return module, torch.zeros(32, 64), target, loss, torch.optim.Adam

def named():
    return {"module": nn.Linear(4, 4), "inputs": torch.zeros(2, 4)}

def large():
    with torch.device("meta"):
        module = nn.Linear(1 << 17, 1 << 17)
    return module, torch.zeros(1, 1 << 17, device="meta")

def kept():
    print("at most", os.environ.get("MALLOC_MMAP_MAX_"), "blocks from the system")
    return named()

def misnamed():
    return {"module": nn.Linear(4, 4), "input": torch.zeros(2, 4)}

def nothing():
    return 3

def raises():
    raise ValueError("no such data")

def hangs():
    import threading
    threading.Event().wait()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("plan")
    (place / "model.py").write_text(MODEL)
    (place / "machine.json").write_text(small_machine().to_text())
    return place


def test_predicts_a_file_and_writes_the_plan(folder, tmp_path):
    out = tmp_path / "plan.json"
    arguments = [f"{folder}/model.py:step", "-n", "2", "--machine", f"{folder}/machine.json"]
    runner = CliRunner()
    result = runner.invoke(plan, [*arguments, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "2 ranks of 2 threads" in " ".join(result.stdout.split())
    for words in ("forward", "communication", "parameters", "limited by"):
        assert words in result.stdout
    planned = load_plan_file(out)
    estimate = planned.estimate
    assert planned.plan == Plan(mesh=Mesh(data=2), threads=2)
    assert estimate.workload_digest == planned.workload.digest()
    machine = Machine.from_text((folder / "machine.json").read_text())
    assert estimate.machine_digest == machine.digest()
    assert estimate.memory_bytes["parameters"] == 4 * (64 * 128 + 128 + 128 * 10 + 10)
    data = runner.invoke(plan, [*arguments, "--json"], catch_exceptions=False)
    assert without_memory(json.loads(data.stdout)) == without_memory(estimate.to_json())


def test_a_stored_workload_is_predicted_as_the_model_was(folder, tmp_path):
    out = tmp_path / "plan.json"
    arguments = ["--machine", f"{folder}/machine.json", "-n", "2", "--out", str(out)]
    CliRunner().invoke(plan, [f"{folder}/model.py:step", *arguments], catch_exceptions=False)
    planned = load_plan_file(out)
    again = predict(str(out), ranks=2, machine_path=folder / "machine.json")
    assert again.estimate == planned.estimate
    alone = tmp_path / "workload.json"
    alone.write_text(planned.workload.to_text())
    assert predict(str(alone), ranks=2, machine_path=folder / "machine.json") == again
    with pytest.raises(UsageError, match="--batch needs the model itself"):
        predict(
            str(out),
            ranks=2,
            machine_path=folder / "machine.json",
            strategy=StrategyOptions(batch=64),
        )


def without_memory(data):
    """Leave out what the captured process has before the model: it differs by some pages."""
    return {name: value for name, value in data.items() if "memory_bytes" not in name}


def test_a_model_that_does_not_fit_is_predicted_and_says_so(folder, tmp_path):
    out = tmp_path / "plan.json"
    arguments = [f"{folder}/model.py:large", "--machine", f"{folder}/machine.json"]
    result = CliRunner().invoke(plan, [*arguments, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "does not fit: a rank needs" in result.stdout
    data = json.loads(out.read_text())["estimate"]
    assert data["fits"] is False
    assert data["needed_memory_bytes"] > 2 * 4 * (1 << 34) > data["available_memory_bytes"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partitions": 3}, "2 ranks cannot be divided into 3 partitions"),
        ({"strategy": "hybrid"}, "needs a number of partitions"),
        ({"strategy": "data", "partitions": 2}, "the strategy data divides 2 ranks by 1, not by 2"),
        (
            {"strategy": "model", "partitions": 1},
            "the strategy model divides 2 ranks by 2, not by 1",
        ),
    ],
)
def test_ranks_that_cannot_be_divided_are_refused_before_the_model_is_captured(
    folder, options, words
):
    machine, strategy = folder / "machine.json", StrategyOptions(**options)
    with pytest.raises(UsageError, match=words) as caught:
        predict(f"{folder}/none.py:step", ranks=2, machine_path=machine, strategy=strategy)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 4}, "microbatches has no effect on a model that is not divided"),
        ({"schedule": "zero_bubble"}, "schedule has no effect on a model that is not divided"),
        ({"fit_bytes": 0}, "a memory budget must be at least 1 byte, got 0"),
    ],
)
def test_options_without_effect_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        StrategyOptions(**options)


def test_a_dict_will_do(folder):
    workload = capture_file(f"{folder}/model.py:named")
    assert (workload.name, workload.parameter_bytes) == ("named", 4 * 20)


def test_the_models_code_runs_under_the_ranks_allocator(folder, capfd, monkeypatch):
    for name in ("LD_PRELOAD", "GLIBC_TUNABLES", *KEEP):
        monkeypatch.delenv(name, raising=False)
    capture_file(f"{folder}/model.py:kept")
    assert "at most 0 blocks from the system" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        ("stop", UsageError, "Did you mean 'step'"),
        pytest.param("misnamed", UsageError, "Did you mean 'inputs'", marks=BEHIND),
        pytest.param("nothing", UsageError, "must return", marks=BEHIND),
        ("raises", ScriptFailed, "failed"),
        ("no-name", UsageError, r"FILE\.py:FUNCTION"),
    ],
)
def test_wrong_functions_are_explained(folder, function, error, words):
    with pytest.raises(error, match=words):
        capture_file(f"{folder}/model.py:{function}")


def test_a_model_that_never_comes(folder):
    with pytest.raises(DeadlineExceeded, match="in time"):
        capture_file(f"{folder}/model.py:hangs", deadline_s=0.1)


def test_what_is_not_there(folder, tmp_path, monkeypatch):
    with pytest.raises(NotFound, match="no such file"):
        capture_file(f"{folder}/none.py:step")
    with pytest.raises(UsageError, match=r"FILE\.py:FUNCTION"):
        capture_file("model.py")
    with pytest.raises(UsageError, match=r"FILE\.py:FUNCTION"):
        predict(f"{folder}/model.py", ranks=1, machine_path=tmp_path / "none.json")
    with pytest.raises(NotFound, match="paceline probe"):
        predict(f"{folder}/model.py:step", ranks=1, machine_path=tmp_path / "none.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NotFound, match="paceline probe"):
        load_machine()


def test_a_banner_is_passed_over_and_an_early_end_is_explained(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(
        "import os, torch\n"
        "def loud():\n"
        "    os.write(1, b'welcome\\n')\n"  # past Python's stdout, as a library does
        "    return torch.nn.Linear(2, 2), torch.ones(1, 2)\n"
        "def ends():\n"
        "    os._exit(0)\n"
    )
    assert capture_file(f"{path}:loud").name == "loud"
    with pytest.raises(ScriptFailed, match="ended the process"):
        capture_file(f"{path}:ends")


def test_a_corrupt_pack_is_told_as_such(tmp_path):
    """What the user's code met keeps its class, and with it the exit code: 4, not 2."""
    pack = tmp_path / "train.pack"
    pack.mkdir()
    (pack / "index.pace").write_bytes(b"not an index" * 100)
    path = tmp_path / "model.py"
    path.write_text(
        f"from paceline.store import open_pack\ndef step():\n    open_pack({str(pack)!r})\n"
    )
    with pytest.raises(CorruptPack) as caught:
        capture_file(f"{path}:step")
    assert caught.value.exit_code == 4
    assert str(pack) in caught.value.where
    assert caught.value.fix
