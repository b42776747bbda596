"""Compressed gradients on real ranks: nothing is lost, ranks agree, states resume exactly."""

import json
from pathlib import Path

import pytest
from support.process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts" / "compressed_ranks.py"
PAIRS = [[0, 1], [2, 3]]


def run(folder, ranks, case, several, backend="gloo"):
    """Return what the ranks found with each of several options: (options, [of each rank])."""
    found = run_ranks(SCRIPT, folder, ranks, case, json.dumps(several), backend)
    return list(zip(several, zip(*found, strict=True), strict=True))


CONSERVED = {
    1: [{}],
    2: [
        {},
        {"exchange": "scatter"},
        {"dtype": "bfloat16"},
        {"density": 0.3, "exchange": "scatter", "dtype": "float16"},
    ],
    4: [
        {"exchange": "gather"},
        {},
        {"hosts": PAIRS},
        {"hosts": PAIRS, "exchange": "scatter", "dtype": "bfloat16"},
        {"density": 1.0, "hosts": PAIRS},
    ],
}


@pytest.mark.parametrize("ranks", CONSERVED)
def test_what_is_sent_and_what_stays_is_what_was_put_in(tmp_path, ranks):
    several = [{"momentum": 0.0, **given} for given in CONSERVED[ranks]]
    for given, found in run(tmp_path, ranks, "conservation", several):
        for rank in found:
            assert rank["equal"], given
            assert rank["wrong"] == [], given
            if given.get("density") != 1.0:
                assert 0 < rank["sent"] <= ranks * 0.3 * 1200, given


def test_each_parameter_is_compressed_by_one_rank_of_a_host(tmp_path):
    uneven = [[0, 1], [2], [3]]
    several = [{"momentum": 0.0, "hosts": hosts} for hosts in (PAIRS, uneven)]
    (_, even), (_, odd) = run(tmp_path, 4, "conservation", several)
    assert [rank["names"] for rank in even] == [["first.weight"], ["second.weight"]] * 2
    both = ["first.weight", "second.weight"]
    assert [rank["names"] for rank in odd] == [both, [], both, both]
    assert all(rank["equal"] for rank in odd)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_step_is_that_of_the_published_algorithm_in_float64(tmp_path, ranks):
    several = [{"nesterov": n, "mask_momentum": m} for n in (False, True) for m in (False, True)]
    for given, found in run(tmp_path, ranks, "reference", several):
        for rank in found:
            assert rank["error"] < 1e-5, given


@pytest.mark.parametrize(("ranks", "hosts"), [(2, None), (4, PAIRS)])
def test_at_density_1_without_masking_training_is_that_of_momentum_sgd(tmp_path, ranks, hosts):
    several = [{"nesterov": nesterov, "hosts": hosts} for nesterov in (False, True)]
    for given, found in run(tmp_path, ranks, "dense_equal", several):
        for rank in found:
            assert rank["error"] < 2e-6, given


@pytest.mark.parametrize(
    ("ranks", "several", "backend"),
    [
        (2, [{}, {"exchange": "scatter", "dtype": "bfloat16"}], "gloo"),
        (2, [{"hosts": "find"}], "paceline"),
        (4, [{"hosts": PAIRS}], "gloo"),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    tmp_path, ranks, several, backend
):
    for given, found in run(tmp_path, ranks, "resumed", several, backend):
        assert found == ({"same": True, "step": 10},) * ranks, given


@pytest.mark.parametrize("ranks", [1, 3])
def test_16_bits_on_the_wire_are_rounded_once(tmp_path, ranks):
    several = [
        {"dtype": "bfloat16", "most": 1.01 * 2**-8},
        {"dtype": "float16", "most": 1.01 * 2**-11},
    ]
    for given, found in run(tmp_path, ranks, "half", several):
        for rank in found:
            assert rank["error"] <= given["most"], given
            assert rank["equal"], given


def test_powersgd_is_torchs(tmp_path):
    ((_, found),) = run(tmp_path, 2, "powersgd", [{}])
    for rank in found:
        assert rank["equal"]
        assert rank["moved"] > 0


@pytest.mark.parametrize("bad", [[0, 1, 2], [1]])
def test_a_gradient_that_is_not_finite_is_refused_by_all_before_any_state_takes_it(tmp_path, bad):
    ((_, found),) = run(tmp_path, 3, "not_finite", [{"bad": bad}])
    for number, rank in enumerate(found):
        who = number if number in bad else bad[0]
        assert f"rank {who}" in rank["message"]
        assert "is not finite" in rank["message"]
        assert ("the gradient of " in rank["message"]) == (number in bad), rank["message"]
        assert rank["names"] == []


def test_a_hook_is_refused_where_averages_of_unused_parameters_would_be_dropped(tmp_path):
    ((_, found),) = run(tmp_path, 2, "unused", [{}])
    assert all("find_unused_parameters" in rank["message"] for rank in found)


def test_a_rank_that_dies_ends_the_others_before_their_timeout(tmp_path):
    ((_, found),) = run(tmp_path, 3, "dies", [{}])
    assert all(rank["message"] for rank in found[:2])


def test_the_measurement_gives_all_ranks_one_answer(tmp_path):
    ((_, (first, second)),) = run(tmp_path, 2, "measured", [{}])
    assert first == second
    assert "300,000 elements" in first["text"]
