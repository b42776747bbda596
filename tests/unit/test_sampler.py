"""Names of stacks, and a sampling thread that the script does not see."""

import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.launching import await_true
from support.traces import MS

from paceline.native import Recorder
from paceline.trace.collectors.sampler import NAMES_MAX, StackSampler
from paceline.trace.collectors.torch_hooks import Loop
from paceline.trace.format.events import PYTHON_CODE, Kind
from paceline.trace.format.files import read_trace


class Encoded(json.JSONEncoder):
    """Its method is called by the standard library, which is called by a function of this file."""

    def default(self, o):
        self.frame = sys._getframe()
        self.inner = self.frame.f_back  # a function of json
        return 0


@pytest.fixture
def recorder(tmp_path):
    found = Recorder(str(tmp_path / "rank.trace"), 0, 1)
    yield found
    found.close()


@pytest.fixture
def sampler(recorder):
    return StackSampler(recorder, Loop(main_thread=threading.get_ident()))


def names(tmp_path, recorder, numbers):
    recorder.close()
    known = read_trace(tmp_path / "rank.trace").names
    return [known[number] for number in numbers]


def test_a_sample_has_the_name_of_the_innermost_frame_that_is_not_the_standard_librarys(
    tmp_path, recorder, sampler
):
    encoder = Encoded()
    encoder.encode(object())
    own, inner = sampler.name_of(encoder.frame), sampler.name_of(encoder.inner)
    test = sys._getframe().f_code.co_qualname
    assert names(tmp_path, recorder, [own, inner]) == [
        f"{__name__}.Encoded.default",
        f"{__name__}.{test}",
    ]


def test_a_line_of_the_script_has_its_number(tmp_path, recorder, sampler):
    scope = {"__name__": "__main__", "sys": sys}
    exec(compile("\n\nframe = sys._getframe()\n", "/somewhere/train.py", "exec"), scope)
    assert names(tmp_path, recorder, [sampler.name_of(scope["frame"])]) == ["train.py:3"]


def test_a_path_that_is_not_utf_8_is_escaped(tmp_path, recorder, sampler):
    scope = {"__name__": "__main__", "sys": sys}
    exec(compile("frame = sys._getframe()", "tr\udcff.py", "exec"), scope)
    assert names(tmp_path, recorder, [sampler.name_of(scope["frame"])]) == ["tr\\udcff.py:1"]


@pytest.mark.parametrize(("package", "skipped"), [("torch", True), ("torchvision", False)])
def test_packages_whose_names_begin_like_torch_are_no_part_of_it(
    tmp_path, recorder, sampler, package, skipped
):
    own = f"{package}.ops.<module>"
    path = Path(torch.__file__).parents[1] / package / "ops.py"
    scope = {"__name__": f"{package}.ops", "sys": sys}
    exec(compile("frame = sys._getframe()", str(path), "exec"), scope)
    found = names(tmp_path, recorder, [sampler.name_of(scope["frame"])])
    assert (found != [own]) == skipped  # else it has the name of the caller, this function


def test_python_code_that_kept_the_thread_waiting_is_sampled(tmp_path, recorder):
    """The main thread holds the GIL, enters a phase, and lets the thread have it only there."""
    loop = Loop(main_thread=threading.get_ident())
    sampler = StackSampler(recorder, loop)
    sampler._stop = threading.Lock()  # as while its thread runs, which would sample, too
    sampler._sample(10 * MS, 13 * MS)
    loop.phase = int(Kind.FORWARD)
    sampler._sample(20 * MS, 24 * MS)
    sampler._sample(30 * MS, 30 * MS + 1)
    recorder.close()
    trace = read_trace(tmp_path / "rank.trace")
    found = [(trace.names[e["name"]], e["end_ns"] // MS, e["amount"] // MS) for e in trace.events]
    own = f"{__name__}.test_python_code_that_kept_the_thread_waiting_is_sampled"
    assert found == [(own, 10, 3), (PYTHON_CODE, 20, 4)]


def test_names_are_bounded(tmp_path, recorder, sampler):
    numbers = set()
    for i in range(NAMES_MAX + 50):
        scope = {"__name__": "__main__", "sys": sys}
        exec(compile("frame = sys._getframe()", f"script{i}.py", "exec"), scope)
        numbers.add(sampler.name_of(scope["frame"]))
    assert len(numbers) == NAMES_MAX + 1


def test_the_script_does_not_see_the_thread(tmp_path, recorder):
    loop = Loop(main_thread=threading.get_ident())
    before = threading.enumerate()
    sampler = StackSampler(recorder, loop)
    sampler.start()
    assert threading.enumerate() == before
    await_true(lambda: recorder_has_samples(tmp_path, recorder), "a sample")
    loop.phase = int(Kind.FORWARD)
    sampler.stop()
    recorder.close()
    events = read_trace(tmp_path / "rank.trace").events
    assert set(events["kind"].tolist()) == {Kind.SAMPLE}


def test_sampling_can_stop_and_go_on_before_its_thread_has_ended(recorder, sampler):
    for _ in range(50):
        sampler.start()
        sampler.stop()


def recorder_has_samples(tmp_path, recorder):
    recorder.flush()
    return len(read_trace(tmp_path / "rank.trace").events) > 0
