"""Records grow older: old files are read, and every version of a record has its golden file."""

import dataclasses
import json
from typing import Any, ClassVar

import pytest
from support.records import GOLDEN, golden_name, record_classes

from paceline.core.errors import ConfigError, NewerFormat
from paceline.core.record import Record
from paceline.report.compare import Comparison
from paceline.runs.folder import RunFolder
from paceline.runs.result import RunResult
from paceline.trace.analysis.blame import BlameRules

CLASSES = record_classes()
BY_NAME = {golden_name(cls, 0).rpartition("-v")[0]: cls for cls in CLASSES}
HINT = "run `python -m support.records` in tests/, which writes the golden files that are missing"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part(Record):
    """A part that was renamed: version 1 called `seconds` `duration`."""

    version: ClassVar[int] = 2
    seconds: float

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Rename the field."""
        return {"seconds": data["duration"]}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Whole(Record):
    """A record of version 3: 1 had one part, 2 had several, 3 counts from one."""

    version: ClassVar[int] = 3
    parts: tuple[Part, ...]
    first: int

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Take one step."""
        if from_version == 1:
            return {"parts": [data.pop("part")], **data}
        return {**data, "first": data["first"] + 1}


def test_every_record_has_a_golden_file_of_its_version():
    missing = [
        name for cls in CLASSES if not (GOLDEN / (name := golden_name(cls, cls.version))).exists()
    ]
    assert not missing, f"{missing}: {HINT}"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_a_golden_file_is_read_whatever_its_version(path):
    name, _, version = path.stem.rpartition("-v")
    assert name in BY_NAME, f"{path.name}: no such record; rename the file with its class"
    data = json.loads(path.read_text())
    assert data["version"] == int(version)
    record = BY_NAME[name].from_json(data)
    assert type(record).from_text(record.to_text()) == record
    if int(version) == type(record).version:
        read = set(_leaves(record.to_json()))
        assert set(_leaves(data)) <= read, "a field is gone or means something else: raise version"


def test_an_older_version_takes_every_step_and_so_do_its_parts():
    whole = Whole.from_json({"version": 1, "part": {"duration": 2.0}, "first": 0})
    assert whole == Whole(parts=(Part(seconds=2.0),), first=1)
    assert whole.to_json()["parts"] == [{"version": 2, "seconds": 2.0}]
    assert Whole.from_text(whole.to_text()) == whole


def test_values_of_fields_that_were_renamed_are_kept():
    rules = BlameRules.from_json({"version": 2, "max_chance": 0.002})
    assert rules == BlameRules(max_p_value=0.002)
    old = json.loads((GOLDEN / "Comparison-v1.json").read_text())
    assert Comparison.from_json(old).not_compared == old["unfit"]


@pytest.mark.parametrize("data", [{"version": 1}, {"version": 2, "parts": [], "first": "x"}])
def test_data_that_cannot_be_upgraded_is_refused_with_its_version(data):
    with pytest.raises(ConfigError, match="cannot be read as version") as caught:
        Whole.from_json(data, where="old.json")
    assert caught.value.where == "old.json"


@pytest.mark.parametrize(
    "data",
    [{"version": 4}, {"version": 3, "parts": [{"version": 3, "seconds": 1.0}], "first": 1}],
)
def test_a_newer_version_is_refused_with_the_version_that_is_read(data):
    with pytest.raises(NewerFormat, match="format version") as caught:
        Whole.from_json(data)
    assert "reads versions 1 to" in caught.value.why


def test_a_run_of_a_newer_paceline_says_which_one_wrote_it(tmp_path):
    newer = {"version": RunResult.version + 1, "kind": "run"}
    (tmp_path / "result.json").write_text(json.dumps(newer))
    (tmp_path / "versions.json").write_text(json.dumps({"version": 1, "paceline": "7.2.0"}))
    with pytest.raises(NewerFormat, match="a newer Paceline wrote this run") as caught:
        RunFolder(tmp_path).read_result()
    assert "7.2.0" in caught.value.fix
    assert f"format version {RunResult.version + 1}" in caught.value.why


def _leaves(data, place=""):
    """Yield (place, value) of every number and word; a key that is not in `data` is no leaf."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, f"{place}.{key}")
    elif isinstance(data, list):
        for i, value in enumerate(data):
            yield from _leaves(value, f"{place}[{i}]")
    else:
        yield place, data
