"""One quick probe of this machine, and what is said when something is not here."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.launching import Launched, await_true

from paceline.cli.probe import probe as verb
from paceline.core.allocator import KEEP, allocator_setting
from paceline.core.errors import DeadlineExceeded, NotFound, StorageError
from paceline.core.machine import Machine
from paceline.probe import measure as probe
from paceline.probe.doctor import diagnose
from paceline.probe.links import measure_links
from paceline.probe.storage import measure_folder

MEASURES = pytest.mark.campaign("measures")  # this machine, of which other tests take a part


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    out = folder / "machine.json"
    arguments = ["--quick", "--json", "--out", str(out), "--folder", str(folder)]
    result = CliRunner().invoke(verb, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert [path.name for path in folder.iterdir()] == ["machine.json"]
    return result, out


@MEASURES
def test_prints_what_it_wrote(outcome):
    result, out = outcome
    machine = Machine.from_text(out.read_text())
    assert json.loads(result.stdout) == machine.to_json()
    assert "two processes; collectives" in result.stderr


@MEASURES
def test_shared_memory_is_faster_and_collectives_of_more_ranks_are_added(outcome, tmp_path):
    machine = Machine.from_text(outcome[1].read_text())
    small = machine.collective("all_reduce").points[1].seconds.value
    assert machine.collective("all_reduce", collectives="paceline").points[1].seconds.value < small
    path = tmp_path / "machine.json"
    path.write_text(outcome[1].read_text())
    arguments = ["--quick", "--collectives", "3", "--out", str(path)]
    result = CliRunner().invoke(verb, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    more = Machine.from_text(path.read_text())
    assert more.devices == machine.devices
    assert more.collectives[:4] == machine.collectives
    added = more.collectives[4:]
    assert {cost.ranks for cost in added} == {3}
    assert {cost.operation for cost in added if cost.backend == "paceline"} == {
        *("all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather")
    }


@pytest.mark.parametrize("text", ["1", "two", "", "2,"])
def test_numbers_of_ranks_that_are_none_are_refused(text):
    result = CliRunner().invoke(verb, ["--collectives", text])
    assert result.exit_code == 2
    assert "numbers of ranks" in result.output


def test_memory_is_touched_for_the_first_time_whatever_the_allocator_keeps():
    code = (
        "import resource; from paceline.probe.compute import touch\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "touch(64 << 20); before = faults(); touch(64 << 20); print(faults() - before)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **KEEP}, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) >= 32  # of 2 MiB each where pages are huge


@MEASURES
def test_measures_compute_links_and_storage(outcome):
    machine = Machine.from_text(outcome[1].read_text())
    assert machine.allocator == allocator_setting("keep", os.environ).in_effect
    assert machine.missing == ()
    (device,) = machine.devices
    classes = {(rate.operator, rate.phase, rate.processes) for rate in device.rates}
    for operator in ("matmul", "convolution", "attention", "batch_norm", "elementwise"):
        for phase in ("forward", "backward"):
            assert {(operator, phase, 1), (operator, phase, 2)} <= classes
    assert {"float32", "bfloat16"} <= {rate.dtype for rate in device.rates}
    assert all(point.rate_per_s > 0 for rate in device.rates for point in rate.points)
    overheads = {
        (overhead.operator, overhead.phase): overhead.seconds.value for overhead in device.overheads
    }
    for key in (("matmul", "forward"), ("elementwise", "optimizer")):
        assert overheads[key] > 0
    frameworks = {
        (overhead.framework, overhead.what, overhead.phase, overhead.backend)
        for overhead in device.framework_overheads
    }
    assert frameworks == {
        *(("torch", "phase", phase, "gloo") for phase in ("forward", "backward", "optimizer")),
        *(("ddp", "wrapper", "forward", backend) for backend in ("gloo", "paceline")),
        *(("ddp", "wrapper", "backward", backend) for backend in ("gloo", "paceline")),
        *(("ddp", "reduction", "backward", backend) for backend in ("gloo", "paceline")),
        *(("ddp", "buffer_broadcast", "forward", backend) for backend in ("gloo", "paceline")),
    }
    assert device.bandwidth_shared_bytes_per_s.value > 0
    assert {link.level for link in machine.links} == {"shared-memory", "loopback"}
    costs = {(cost.backend, cost.operation, cost.ranks) for cost in machine.collectives}
    assert costs == {
        (backend, operation, 2)
        for backend in ("gloo", "paceline")
        for operation in ("all_reduce", "broadcast")
    }
    for cost in machine.collectives:
        seconds = [point.seconds.value for point in cost.points]
        assert len(seconds) >= 5
        assert seconds == sorted(seconds)
    measured = [
        *(overhead.seconds for overhead in device.overheads),
        *(link.latency_s for link in machine.links),
        *(point.seconds for collective in machine.collectives for point in collective.points),
        device.bandwidth_bytes_per_s,
    ]
    assert all(figure.low <= figure.value <= figure.high for figure in measured)
    points = [point for rate in device.rates for point in rate.points]
    assert all(point.low_per_s <= point.rate_per_s <= point.high_per_s for point in points)
    assert any(point.low_per_s < point.high_per_s for point in points)
    (tier,) = machine.tiers
    assert tier.bandwidth_bytes_per_s.value > 0
    assert tier.open_latency_s.value > 0
    lines = probe.summary(machine)
    assert any(line.startswith("gloo all_reduce") for line in lines)
    assert not any("convolution" in line for line in lines)


def test_without_torch_the_rest_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    machine = probe.measure(tmp_path, quick=True)
    assert "torch is not installed" in machine.missing[0]
    assert machine.link("loopback") is not None
    assert machine.devices[0].rates == ()
    assert any("not measured" in line for line in probe.summary(machine))


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(StorageError, match="cannot measure"):
        measure_folder(tmp_path / "none", quick=True)


def test_a_folder_that_is_not_there_is_refused_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "_measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(NotFound, match="no such folder"):
        probe.measure(tmp_path / "none")
    with pytest.raises(NotFound, match="no such folder"):
        diagnose(tmp_path / "none")


def test_what_fails_is_named(monkeypatch):
    def refuse(**_):
        raise OSError("no sockets")

    monkeypatch.setattr(probe, "measure_links", refuse)
    monkeypatch.setattr(probe, "DEADLINE_S", 0.05)
    machine = probe.measure(Path("/proc"), quick=True)  # where nobody can make a folder
    text = "\n".join(machine.missing)
    for words in ("no sockets", "cannot measure the folder", "did not end in time"):
        assert words in text


def test_a_worker_that_fails_says_why(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise SystemExit('no luck')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probe, "measure_links", lambda **_: ())
    monkeypatch.setattr(probe, "WORKER", "broken")
    machine = probe.measure(tmp_path, quick=True)
    assert "no luck" in machine.missing[0]


def test_links_have_a_deadline(monkeypatch):
    monkeypatch.setattr("paceline.core.worker_process.sys.executable", "/bin/false")
    with pytest.raises(DeadlineExceeded, match="no answer"):
        measure_links(rounds=10, deadline_s=0.2)


def test_a_second_process_that_falls_silent_is_told_as_such(monkeypatch):
    monkeypatch.setattr(
        "paceline.probe.links._socket_turn",
        lambda connection, data, *, leads: connection.close if leads else None,
    )
    with pytest.raises(DeadlineExceeded, match="no answer"):
        measure_links(rounds=10, deadline_s=0.5)


def test_a_place_that_cannot_be_written_is_refused_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "measure", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "machine.json"
    with pytest.raises(NotFound, match="no such folder"):
        CliRunner().invoke(verb, ["--out", str(out)], catch_exceptions=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="Name a file"):
        CliRunner().invoke(verb, [], catch_exceptions=False)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_probe_that_is_ended_takes_its_workers_along(tmp_path, name):
    running = Launched(tmp_path, "probe", "--quick", "--out", "machine.json", fresh=True)
    await_true(lambda: any(_is_worker(pid) for pid in running.running()), "a worker")
    running.process.send_signal(getattr(signal, name))
    running.wait()
    assert running.code == (130 if name == "SIGTERM" else -signal.SIGKILL)
    await_true(lambda: not running.running(), "the workers to end")
    if name == "SIGTERM":
        running.assert_nothing_left()


def _is_worker(pid):
    try:
        return b"probe.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False
