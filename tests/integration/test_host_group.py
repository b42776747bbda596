"""Collectives over shared memory, between real processes."""

import random
import signal
from pathlib import Path

import pytest
from support import host_ranks

SHARED_MEMORY = Path("/dev/shm")


def shared_files():
    """Return the files that bear our name; those of other programs come and go."""
    return sorted(path.name for path in SHARED_MEMORY.glob("*paceline*") if path.is_file())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_all_operations_agree_with_numpy(ranks):
    assert host_ranks.run("correctness", ranks) == [{"value": "ok"}] * ranks


def test_processes_that_can_map_each_other_are_one_host():
    assert host_ranks.run("hosts", 3) == [{"value": [[0, 1, 2]]}] * 3


def test_forming_a_group_names_the_rank_that_does_not_come():
    first, second, _ = host_ranks.run("absent", 3)
    assert first["error"] == second["error"] == "DeadlineExceeded"
    assert "waited for rank 2" in first["where"]


def test_different_collectives_are_shown_from_both_sides():
    for outcome in host_ranks.run("differing", 3):
        assert outcome["error"] == "CollectiveMismatch"
        assert "all_reduce of 2 float32" in outcome["text"]
        assert "broadcast of 12 bytes" in outcome["text"]


def test_ranks_that_each_take_themselves_for_the_root_are_found_at_the_next_wait():
    """A root waits for nobody: all went on with data of their own, without an error."""
    for outcome in host_ranks.run("several_roots", 3):
        assert outcome["error"] == "CollectiveMismatch", outcome
        assert outcome["text"].count("broadcast of 12 bytes (root ") == 2


def test_ranks_that_are_ahead_of_others_are_not_taken_for_different():
    assert host_ranks.run("ahead", 4) == [{"value": "ok"}] * 4


def test_a_forked_child_gets_an_error_and_leaves_the_group_to_its_parent():
    for rank, outcome in enumerate(host_ranks.run("forked", 2)):
        assert outcome["value"]["error"] == "UsageError", outcome
        assert "belongs to the parent of this process" in outcome["value"]["text"]
        assert outcome["value"]["where"] == f"rank {rank}"


def check_survivors(ranks, number, victim, seed):
    outcomes = host_ranks.run(
        "disturbed", ranks, number=number, victim=victim, deadline_s=1.0, seed=seed
    )
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert outcome is None
            continue
        expected = "RankLost" if number == signal.SIGKILL else "DeadlineExceeded"
        assert outcome["error"] == expected, outcome
        assert outcome["where"] == f"rank {victim}", outcome
        assert f"rank {victim}" in outcome["text"]
    assert not shared_files()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("ranks", [2, 3])
def test_survivors_of_a_signal_name_the_rank_that_it_hit(ranks, number):
    check_survivors(ranks, number, victim=ranks - 1, seed=ranks)


@pytest.mark.campaign("faults")
@pytest.mark.parametrize("seed", range(200))
def test_survivors_of_random_signals_name_the_rank_that_they_hit(seed):
    rng = random.Random(seed)
    ranks = rng.randint(2, 5)
    number = rng.choice((signal.SIGKILL, signal.SIGSTOP))
    check_survivors(ranks, number, victim=rng.randrange(ranks), seed=seed)
