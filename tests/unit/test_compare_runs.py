"""What became slower from one run to another, and what is noise."""

import dataclasses

import numpy as np
from support.traces import Late, data_parallel, write_run

from paceline.report.comparable import unlike_runs
from paceline.report.efficiency import render_run_comparison
from paceline.trace.analysis import analyse
from paceline.trace.efficiency import compare_runs, compare_series, read_series
from paceline.trace.efficiency.comparison import series_of
from paceline.trace.merge import load_run

STEPS = 120


def analysed(folder, seed, *, ranks=2, steps=STEPS, late=()):
    random = np.random.default_rng(seed)
    noise = np.zeros((ranks, steps))
    for step in range(1, steps):  # steps next to each other are alike
        noise[:, step] = 0.8 * noise[:, step - 1] + random.normal(0, 100_000, ranks)
    jitter = np.maximum(0, noise + 1_000_000).astype(int)
    by_rank = data_parallel(ranks, steps, late=late, jitter_ns=jitter)
    return analyse(load_run(write_run(folder, by_rank)))


def changed(found):
    return {(c.part, c.name): c.verdict for c in found.changes if c.verdict != "unchanged"}


def test_a_slower_phase_of_one_rank_is_named(tmp_path):
    before = analysed(tmp_path / "a", 1)
    late = (Late(rank=1, ms=3, first=0, last=STEPS),)
    after = analysed(tmp_path / "b", 2, late=late)
    found = compare_runs(before, after)
    assert found.step.verdict == "slower"
    assert abs(found.step.change_s - 0.003) < 0.0005
    assert found.step.error_s is not None
    assert found.step.error_s < 0.0005
    verdicts = changed(found)
    assert verdicts["phase", "input"] == "slower"
    assert verdicts["rank", "1"] == "slower"
    assert ("rank", "0") not in verdicts
    assert ("phase", "optimizer") not in verdicts
    assert compare_runs(after, before).step.verdict == "faster"


def test_noise_that_wanders_is_no_change(tmp_path):
    for seed in range(4):
        a = analysed(tmp_path / f"a{seed}", 10 + seed)
        b = analysed(tmp_path / f"b{seed}", 20 + seed)
        assert not changed(compare_runs(a, b))


def test_runs_of_few_steps_or_other_ranks_say_less(tmp_path):
    short = compare_runs(analysed(tmp_path / "a", 1, steps=8), analysed(tmp_path / "b", 2, steps=8))
    assert short.step.p_value is None
    assert short.step.verdict == "unchanged"
    other = compare_runs(analysed(tmp_path / "c", 1), analysed(tmp_path / "d", 2, ranks=3))
    assert (other.a_ranks, other.b_ranks) == (2, 3)
    assert not [change for change in other.changes if change.part == "rank"]


def test_unlike_programs_and_models_are_said(tmp_path):
    series = [series_of(analysed(tmp_path / name, 1), name) for name in "ab"]
    train, own = {"script": "/home/me/train.py"}, {"script": "own.py"}
    assert unlike_runs(*series, train, {"script": "train.py"}) == ""
    assert unlike_runs(*series, train, {}) == ""  # a run of before
    assert unlike_runs(*series, train, own) == "A ran /home/me/train.py, B own.py"
    small = dataclasses.replace(series[0], trained_bytes=4096)
    large = dataclasses.replace(series[1], trained_bytes=8192)
    assert unlike_runs(small, series[1], own, own) == ""  # one does not say
    said = unlike_runs(small, large, own, own)
    assert said == "A trained 4,096 bytes of parameters, B 8,192"
    found = dataclasses.replace(compare_series(small, large), unlike=said)
    shown = "".join(str(part) for part in render_run_comparison(found).renderables)
    assert f"These are unlike programs or models, not one that has changed: {said}." in shown


def test_a_run_that_is_read_window_by_window_has_the_same_series(tmp_path):
    late = (Late(rank=1, ms=3, first=20, last=60),)
    whole = series_of(analysed(tmp_path, 1, late=late), "run A")
    parts = read_series(tmp_path, "run A", window_events=150)  # some ten steps
    assert (parts.ranks, parts.world_size) == (whole.ranks, whole.world_size)
    assert parts.trained_bytes == whole.trained_bytes
    assert parts.seconds.keys() == whole.seconds.keys()
    for name, seconds in whole.seconds.items():
        np.testing.assert_allclose(parts.seconds[name], seconds, atol=1e-12, err_msg=str(name))
