"""Any record survives JSON, and a key or version that it does not know never passes silently."""

import dataclasses
import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.breakdown import PHASES, Breakdown
from paceline.core.errors import ConfigError
from paceline.core.record import Record, nearest
from paceline.runs.folder import RunFolder
from paceline.runs.result import Failure, PhaseTime, RankResult, RunResult
from paceline.trace.analysis.blame import Straggler


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Inner(Record):
    """A record within a record."""

    value: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Everything(Record):
    """A field of each type that records may have."""

    version = 3
    count: int
    share: float
    on: bool
    text: str
    word: Literal["a", "b"] = "a"
    maybe: int | None = None
    either: Inner | None = None
    many: tuple[Inner, ...] = ()
    table: dict[str, float] = dataclasses.field(default_factory=dict)
    nested: tuple[tuple[int, ...], ...] = ()


FLOAT = st.floats(allow_nan=False, allow_infinity=False)
INNER = st.builds(Inner, value=FLOAT)
EVERYTHING = st.builds(
    Everything,
    count=st.integers(),
    share=FLOAT,
    on=st.booleans(),
    text=st.text(),
    word=st.sampled_from(["a", "b"]),
    maybe=st.none() | st.integers(),
    either=st.none() | INNER,
    many=st.lists(INNER, max_size=3).map(tuple),
    table=st.dictionaries(st.text(), FLOAT, max_size=3),
    nested=st.lists(st.lists(st.integers(), max_size=2).map(tuple), max_size=2).map(tuple),
)
SECONDS = st.floats(0, 1e6)
BREAKDOWN = st.builds(Breakdown, **dict.fromkeys(PHASES, SECONDS))
STRAGGLER = st.builds(
    Straggler,
    rank=st.integers(0, 4096),
    cause=st.sampled_from(["data", "compute", "not_running"]),
    late_ms=SECONDS,
    first_step=st.integers(0, 1000),
    last_step=st.integers(0, 1000),
    others_wait=st.floats(0, 1),
)
FAILURE = st.builds(Failure, rank=st.integers(0, 9), signal=st.text(), error=st.text())
RANK = st.builds(
    RankResult,
    rank=st.integers(0, 9),
    steps=st.integers(0, 9),
    loop_wall_s=SECONDS,
    peak_memory_bytes=st.integers(0, 2**50),
    phases=st.lists(
        st.builds(PhaseTime, name=st.sampled_from(PHASES), measured_s=SECONDS), max_size=3
    ).map(tuple),
)
RESULT = st.builds(
    RunResult,
    exit_code=st.integers(0, 130),
    world_size=st.integers(1, 9),
    step_time_s=SECONDS,
    loop_wall_s=SECONDS,
    ranks=st.lists(RANK, max_size=2).map(tuple),
    straggler=st.none() | STRAGGLER,
    failure=st.none() | FAILURE,
)
RECORD = EVERYTHING | BREAKDOWN | STRAGGLER | RESULT


@given(RECORD)
def test_survives_json(record):
    data = json.loads(record.to_text())
    assert data["version"] == type(record).version
    assert type(record).from_json(data) == record
    assert type(record).from_text(record.to_text()) == record


@given(RECORD, st.data())
def test_an_unknown_key_is_refused_wherever_it_is(record, data):
    plain = record.to_json()
    places = [plain, *(value for value in plain.values() if isinstance(value, dict) and value)]
    if isinstance(record, Everything):
        places = [plain]  # its table takes any key
    place = data.draw(st.sampled_from(places))
    place["no such key"] = 1
    with pytest.raises(ConfigError, match="unknown key 'no such key'"):
        type(record).from_json(plain)


@given(RECORD, st.integers(1, 100))
def test_a_newer_version_is_refused(record, ahead):
    newer = {**record.to_json(), "version": type(record).version + ahead}
    with pytest.raises(ConfigError, match="format version") as caught:
        type(record).from_json(newer, where="some.json")
    assert "some.json" in str(caught.value)
    assert "newer Paceline" in caught.value.fix
    assert f"versions 1 to {type(record).version}" in caught.value.why


def test_an_older_version_and_missing_defaults_are_read():
    old = Everything.from_json({"version": 1, "count": 1, "share": 2, "on": True, "text": ""})
    assert old == Everything(count=1, share=2.0, on=True, text="")
    assert isinstance(old.share, float)


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"count": 1.5}, "count"),
        ({"count": True}, "count"),
        ({"count": "1"}, "count"),
        ({"share": True}, "share"),
        ({"share": None}, "share"),
        ({"on": 1}, "on"),
        ({"text": 1}, "text"),
        ({"word": "c"}, "word"),
        ({"maybe": "1"}, "maybe"),
        ({"either": 1}, "either"),
        ({"many": {}}, "many"),
        ({"many": [{"value": 1.0}, {"value": "x"}]}, r"many\[1\]: value"),
        ({"table": {"a": "x"}}, r"table\.a"),
        ({"nested": [[1], ["x"]]}, r"nested\[1\]\[0\]"),
        ({"version": "1"}, "version"),
        ({"version": None}, "version"),
        ({"version": 0}, "version"),
        ({"version": True}, "version"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_its_place(wrong, place):
    good = Everything(count=1, share=1.0, on=True, text="").to_json()
    with pytest.raises(ConfigError, match=place):
        Everything.from_json({**good, **wrong})


def test_a_missing_key_and_what_is_no_object_are_refused():
    with pytest.raises(ConfigError, match="'share' is missing"):
        Everything.from_json({"count": 1})
    for other in ([], 1, None, "x"):
        with pytest.raises(ConfigError, match="must be a JSON object"):
            Everything.from_json(other)
    with pytest.raises(ConfigError, match="not valid JSON") as caught:
        Everything.from_text("{", where="f.json")
    assert caught.value.where == "f.json"


def test_the_nearest_key_is_named():
    with pytest.raises(ConfigError) as caught:
        Straggler.from_json({"rnak": 1})
    assert caught.value.fix == "Did you mean 'rank'?"
    assert nearest("zzz", ["b", "a"]) == "Known: a, b"


@given(BREAKDOWN, BREAKDOWN, st.floats(0, 100))
def test_a_breakdown_adds_and_scales_phase_by_phase(one, other, factor):
    assert dict((one + other).items()) == {
        name: getattr(one, name) + getattr(other, name) for name in PHASES
    }
    assert (one + other).total_s == pytest.approx(one.total_s + other.total_s)
    assert one.scaled(factor).total_s == pytest.approx(one.total_s * factor)


def test_phases_are_those_of_the_design():
    assert PHASES == (
        "input",
        "copy",
        "compilation",
        "forward",
        "backward",
        "optimizer",
        "transfer",
        "waiting",
        "checkpoint",
        "evaluation",
        "host",
        "other",
    )


def test_a_result_that_cannot_be_understood_is_corrupt(tmp_path):
    from paceline.core.errors import CorruptData, NotFound

    with pytest.raises(NotFound):
        RunFolder.open(tmp_path / "none")
    assert RunFolder(tmp_path).read_result() is None
    (tmp_path / "result.json").write_text('{"version": 1, "exit_code": "none"}')
    with pytest.raises(CorruptData, match="exit_code") as caught:
        RunFolder(tmp_path).read_result()
    assert caught.value.exit_code == 4
