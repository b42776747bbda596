"""paceline.step(): nothing without a recorder, a mark from any thread with one."""

import _thread
import subprocess
import sys
import threading

import pytest

import paceline
from paceline.core import step_mark


@pytest.fixture
def marks():
    found = []
    step_mark.set_listener(lambda: found.append(threading.get_ident()))
    yield found
    step_mark.set_listener(None)


def test_without_a_recorder_it_does_nothing():
    assert paceline.step() is None


def test_each_call_is_one_mark_from_whatever_thread(marks):
    paceline.step()
    thread = threading.Thread(target=paceline.step)
    thread.start()
    thread.join()
    assert marks == [threading.get_ident(), thread.ident]


@pytest.fixture
def torch_collector(tmp_path):
    """Return a collector of which nothing but `paceline.step()` is in place."""
    pytest.importorskip("torch")
    from paceline.native import Recorder
    from paceline.trace.collectors.torch import TorchCollector

    recorder = Recorder(str(tmp_path / "rank.trace"), 0, 1)
    collector = TorchCollector(recorder)
    collector.hooks.add(collector.marks.listen)
    yield collector
    collector.pause()
    recorder.close()


def test_a_system_without_a_thread_to_spare_does_not_end_the_loop(
    torch_collector, monkeypatch, caplog
):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    paceline.step()
    torch_collector.marks.delivered(1)
    paceline.step()
    assert torch_collector.recorder.step == 2
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    assert "can't start new thread" in caplog.text


def test_a_mark_that_fails_is_a_warning(torch_collector, monkeypatch, caplog):
    monkeypatch.setattr(torch_collector.marks, "recorder", None)
    paceline.step()
    paceline.step()
    assert caplog.text.count("not recorded from here on") == 1


def test_a_pause_marks_nothing(torch_collector):
    paceline.step()
    torch_collector.pause()
    paceline.step()
    assert torch_collector.recorder.step == 1
    torch_collector.resume()
    paceline.step()
    assert torch_collector.recorder.step == 2


@pytest.mark.campaign("e2e")
def test_in_a_compiled_function_it_has_no_effect_and_breaks_no_graph(tmp_path):
    torch = pytest.importorskip("torch")
    from paceline.native import Recorder
    from paceline.trace.collectors.torch_marks import StepMarks

    recorder = Recorder(str(tmp_path / "rank.trace"), 0, 1)
    StepMarks(recorder).listen()

    @torch.compile(fullgraph=True, backend="eager")
    def doubled(x):
        paceline.step()
        return 2 * x

    try:
        assert doubled(torch.ones(2)).tolist() == [2, 2]
        assert recorder.step == 0
        paceline.step()
        assert recorder.step == 1
    finally:
        step_mark.set_listener(None)
        recorder.close()


def test_it_is_there_without_torch_or_numpy():
    program = "import sys, paceline; paceline.step(); print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
