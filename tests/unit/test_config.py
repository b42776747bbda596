"""Configuration: file < environment < flag, with provenance; an unknown key is refused in each."""

import dataclasses
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.config import (
    ENTRY_POINTS,
    Configuration,
    cache_folder,
    environment,
    known_sections,
    resolve,
)
from paceline.core.errors import ConfigError, NotFound


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings(Configuration):
    """One setting of each kind."""

    section: ClassVar[str] = "run"
    ranks: int | None = None
    record: bool = True
    late_s: float = 0.5
    name: str = "x"
    names: tuple[str, ...] = ()
    chunk_bytes: int | None = None


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "paceline.toml"
        path.write_text(text)
        return path

    return write


def test_defaults_without_any_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = resolve(Settings, environ={})
    assert resolved.config == Settings()
    assert set(resolved.provenance.values()) == {"default"}


@given(st.none() | st.integers(1, 9), st.none() | st.integers(1, 9), st.none() | st.integers(1, 9))
def test_the_later_source_wins(tmp_path_factory, in_file, in_environ, in_flag):
    path = tmp_path_factory.mktemp("config") / "some.toml"
    path.write_text("[run]\n" + (f"ranks = {in_file}\n" if in_file else ""))
    environ = {"PACELINE_RUN__RANKS": str(in_environ)} if in_environ else {}
    resolved = resolve(Settings, flags={"ranks": in_flag}, environ=environ, file=path)
    sources = [("flag", in_flag), ("environment", in_environ), ("file", in_file)]
    provenance, value = next((pair for pair in sources if pair[1] is not None), ("default", None))
    assert resolved.config.ranks == value
    assert resolved.provenance["ranks"] == provenance
    assert resolved.to_json()["ranks"] == {"value": value, "provenance": provenance}


def test_a_file_in_the_working_directory_is_read(toml, monkeypatch):
    path = toml("[run]\nlate_s = 2\nnames = ['a', 'b']\n[pack]\nunseen = 1\n")
    monkeypatch.chdir(path.parent)
    resolved = resolve(Settings, environ={})
    assert resolved.config.late_s == 2.0
    assert resolved.config.names == ("a", "b")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("no", False), ("0", False), ("yes", True)]
)
def test_booleans_from_the_environment(text, value):
    resolved = resolve(Settings, environ={"PACELINE_RUN__RECORD": text})
    assert resolved.config.record is value


def test_numbers_and_text_from_the_environment():
    environ = {"PACELINE_RUN__LATE_S": "1e-3", "PACELINE_RUN__NAME": "7", "PACELINE_PACK__X": "1"}
    resolved = resolve(Settings, environ=environ)
    assert resolved.config.late_s == 0.001
    assert resolved.config.name == "7"


def test_an_unknown_key_is_refused_in_each_source(toml):
    path = toml("[run]\nrank = 2\n")
    with pytest.raises(ConfigError, match="unknown key 'rank'") as in_file:
        resolve(Settings, environ={}, file=path)
    with pytest.raises(ConfigError, match="unknown key 'recrod'") as in_environ:
        resolve(Settings, environ={"PACELINE_RUN__RECROD": "1"})
    with pytest.raises(ConfigError, match="unknown key 'nmae'") as in_flag:
        resolve(Settings, environ={}, flags={"nmae": "1"})
    assert "'ranks'" in in_file.value.fix
    assert str(path) in in_file.value.where
    assert "'record'" in in_environ.value.fix
    assert in_environ.value.where == "PACELINE_RUN__RECROD"
    assert "'name'" in in_flag.value.fix
    assert in_flag.value.where == "--nmae"


@pytest.mark.parametrize("name", ["PACELINE_RANKS", "PACELINE_RUN_RANKS"])
def test_a_variable_without_its_section_is_refused(name):
    with pytest.raises(ConfigError, match=f"unknown variable '{name}'") as caught:
        resolve(Settings, environ={name: "2"})
    assert "'PACELINE_RUN__RANKS'" in caught.value.fix


def test_an_unknown_section_is_refused_in_file_and_environment(toml):
    with pytest.raises(ConfigError, match="unknown section 'rnu'") as in_file:
        resolve(Settings, environ={}, file=toml("[rnu]\nranks = 2\n"))
    assert "'run'" in in_file.value.fix
    with pytest.raises(ConfigError, match="unknown section") as in_environ:
        resolve(Settings, environ={"PACELINE_RNU__RANKS": "2"})
    assert in_environ.value.where == "PACELINE_RNU__RANKS"
    assert "'run'" in in_environ.value.fix


@pytest.mark.parametrize("key", ["RANKS", "RECORD", "LATE_S"])
def test_a_value_of_the_wrong_type_names_its_place(key):
    name = f"PACELINE_RUN__{key}"
    with pytest.raises(ConfigError, match="'maybe' is not") as caught:
        resolve(Settings, environ={name: "maybe"})
    assert caught.value.where == name


@pytest.mark.parametrize(
    ("text", "count"), [("1MiB", 1 << 20), ("4096", 4096), ("0.5k", 512), ("2G", 2 << 30)]
)
def test_a_size_may_have_a_binary_unit(toml, text, count):
    environ = {"PACELINE_RUN__CHUNK_BYTES": text}
    assert resolve(Settings, environ=environ).config.chunk_bytes == count
    path = toml(f'[run]\nchunk_bytes = "{text}"\n')
    assert resolve(Settings, environ={}, file=path).config.chunk_bytes == count


@pytest.mark.parametrize("text", ["", "MiB", "1 mile", "1x"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"is not a size .*as 4096 or 256MiB") as caught:
        resolve(Settings, environ={"PACELINE_RUN__CHUNK_BYTES": text})
    assert caught.value.where == "PACELINE_RUN__CHUNK_BYTES"


def test_files_that_are_missing_or_no_toml_are_refused(toml, tmp_path):
    with pytest.raises(NotFound):
        resolve(Settings, environ={}, file=tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        resolve(Settings, environ={}, file=toml("[run"))
    with pytest.raises(ConfigError, match="must be a table"):
        resolve(Settings, environ={}, file=toml("run = 1"))


def test_the_process_environment_is_the_default(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_RUN__RANKS", "3")
    assert environment()["PACELINE_RUN__RANKS"] == "3"
    assert resolve(Settings).config.ranks == 3


def test_the_cache_folder_follows_xdg(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/paceline")
    assert cache_folder({}) == Path("/home/someone/.cache/paceline")


def test_each_configuration_is_registered_under_the_section_that_it_declares(root):
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    loaded = [point.load() for point in points]
    assert [cls.section for cls in loaded] == [point.name for point in points]
    declared = [
        path
        for path in (root / "src").rglob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("class ") and "(Configuration)" in line
    ]
    assert len(declared) == len(loaded) == len(known_sections()) >= 2


def test_sections_of_others_are_known_without_importing_them():
    code = (
        "import sys\n"
        "from paceline.core.config import known_sections\n"
        "assert {'run', 'pack'} <= set(known_sections())\n"
        "loaded = {name.split('.')[1] for name in sys.modules if name.startswith('paceline.')}\n"
        "assert loaded == {'core'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
