"""What --out may replace, and which file was given in place of another."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.cli.calibrate import calibrate
from paceline.cli.plan import plan
from paceline.cli.probe import probe
from paceline.core.errors import ConfigError, DestinationExists, NotFound
from paceline.core.file_kind import FileKind, prepare_output
from paceline.core.machine import Machine
from paceline.core.plan import Plan
from paceline.core.plan_file import PlanFile, load_plan_file
from paceline.probe.machine_file import known_machine, load_machine

RECORDS = Path(__file__).parent.parent / "golden" / "records"
PLAN = PlanFile(plan=Plan()).to_text()
MACHINE = Machine(name="node", devices=()).to_text()
VERBS = ((plan, "model.py:step"), (calibrate, "RUN"), (probe, "--quick"))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (FileKind.PLAN, PLAN),
        (FileKind.PLAN, PLAN.replace('"version": 1', '"version": 9')),
        (FileKind.PLAN, (RECORDS / "Estimate-v1.json").read_text()),
        (FileKind.PLAN, (RECORDS / "Estimate-v2.json").read_text()),
        (FileKind.MACHINE, MACHINE),
        (FileKind.MACHINE, (RECORDS / "Machine-v1.json").read_text()),
        (FileKind.MACHINE, MACHINE.replace('"version": 2', '"version": 9')),
    ],
)
def test_a_file_of_the_same_kind_may_be_replaced_whatever_its_version(tmp_path, kind, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    prepare_output(path, kind)
    assert path.read_text() == text
    other = FileKind.MACHINE if kind is FileKind.PLAN else FileKind.PLAN
    with pytest.raises(DestinationExists, match=f"not a {other} file"):
        prepare_output(path, other)


@pytest.mark.parametrize(
    "content", [b"", b"import torch\n", b'{"plan": "B"}', b"\xff", b"[" * 5000]
)
def test_other_files_are_never_replaced(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    for kind in FileKind:
        with pytest.raises(DestinationExists):
            prepare_output(path, kind)
    assert path.read_bytes() == content


def test_a_folder_is_not_replaced(tmp_path):
    with pytest.raises(DestinationExists):
        prepare_output(tmp_path, FileKind.PLAN)


def test_a_file_in_place_of_another_kind_is_called_what_it_is(tmp_path):
    """A machine file was said to be a plan of a newer Paceline."""
    path = tmp_path / "file.json"
    path.write_text(MACHINE)
    with pytest.raises(ConfigError, match="this is a machine file, not a plan file") as caught:
        load_plan_file(path)
    assert "--machine" in caught.value.fix
    for text in (PLAN, json.dumps({"mesh": {}})):
        path.write_text(text)
        for load in (load_machine, known_machine):
            with pytest.raises(ConfigError, match="this is a plan file, not a machine") as caught:
                load(path)
            assert caught.value.where == str(path)
            assert "`paceline probe --out`" in caught.value.fix


@pytest.mark.parametrize(("command", "argument"), VERBS)
def test_a_verb_refuses_its_destination_before_it_computes(tmp_path, command, argument):
    """A user's script was overwritten by a plan."""
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    refused = CliRunner().invoke(command, [argument, "--out", str(script)]).exception
    assert isinstance(refused, DestinationExists)
    assert refused.exit_code == 2
    assert script.read_text() == "import torch\n"
    nowhere = tmp_path / "none" / "file.json"
    refused = CliRunner().invoke(command, [argument, "--out", str(nowhere)]).exception
    assert isinstance(refused, NotFound)
    assert refused.fix == "Make it first"
    assert not nowhere.parent.exists()
