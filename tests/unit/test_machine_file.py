"""Which description of a machine is taken, and what is said of one that nobody probed."""

import socket

import pytest

from paceline.core import node
from paceline.core.errors import ConfigError, NotFound
from paceline.core.machine import Machine
from paceline.core.machine_file import machine_path
from paceline.probe.machine_file import known_machine
from paceline.studies.predict import load_machine


def test_each_host_has_its_own_machine(tmp_path, monkeypatch):
    """Nodes that share a home must not take each other's figures."""
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = machine_path(environ)
    assert here.parent == tmp_path / "paceline"
    assert socket.gethostname() in here.name
    here.parent.mkdir()
    (here.parent / "machine-elsewhere.json").write_text(
        Machine(name="elsewhere", devices=()).to_text()
    )
    unknown = known_machine(None)
    assert unknown.name == socket.gethostname()
    memory = unknown.devices[0].memory_bytes
    assert memory.source == "datasheet"  # stated by the kernel, not measured
    assert memory.value == node.memory_bytes()
    with pytest.raises(NotFound):
        load_machine()
    here.write_text(Machine(name="here", devices=()).to_text())
    assert known_machine(None).name == load_machine().name == "here"


def test_a_damaged_machine_in_the_cache_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine_path().parent.mkdir()
    machine_path().write_text('{"version": 1, "name": "old", "devices": [], "gone": 1}')
    machine = known_machine(None)
    assert machine.devices
    assert "unknown key 'gone'" in machine.missing[0]
    with pytest.raises(ConfigError, match="unknown key 'gone'"):
        known_machine(machine_path())
