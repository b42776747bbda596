"""Which rank of which job `paceline probe --collectives` is, and what it measures next."""

import pytest
from click.testing import CliRunner

from paceline.cli.job import find_job
from paceline.cli.probe import probe
from paceline.core.errors import UsageError
from paceline.probe.between_hosts import _gains_s, _rising, next_size

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[07-08]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


@pytest.mark.parametrize(
    ("environ", "rank", "ranks", "init_method"),
    [
        (TORCHRUN, 3, 4, "env://"),
        (SRUN, 2, 4, "tcp://n07:29500"),
        ({**SRUN, "MASTER_ADDR": "x", "MASTER_PORT": "5"}, 2, 4, "tcp://x:5"),
        ({**SRUN, **TORCHRUN}, 3, 4, "env://"),  # paceline run within a Slurm step
        ({**MPIRUN, "MASTER_ADDR": "x"}, 1, 2, "tcp://x:29500"),
    ],
)
def test_a_rank_finds_its_job(environ, rank, ranks, init_method):
    place = find_job(environ)
    assert (place.rank, place.ranks, place.init_method) == (rank, ranks, init_method)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({}, "not a rank of a job.*srun"),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, "1 rank"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "first"}, "RANK is not a number: 'first'"),
        (MPIRUN, "MASTER_ADDR"),
    ],
)
def test_a_process_that_is_no_rank_of_such_a_job_is_refused(environ, text):
    with pytest.raises(UsageError, match=text):
        find_job(environ)


def test_without_a_number_the_verb_wants_a_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(probe, ["--collectives", "--quick"])
    assert isinstance(result.exception, UsageError)


def test_the_interval_in_which_the_faster_way_changes_is_halved_until_it_is_short():
    def is_two_level_faster(size):
        return size >= 50_000

    gains_s = {size: 1.0 if is_two_level_faster(size) else -1.0 for size in (4096, 1 << 20)}
    while (size := next_size(gains_s, 2)) is not None:
        assert size % 4 == 0
        gains_s[size] = 1.0 if is_two_level_faster(size) else -1.0
    below = max(size for size in gains_s if gains_s[size] < 0)
    above = min(size for size in gains_s if gains_s[size] > 0)
    assert below < 50_000 <= above <= 2 * below
    assert len(gains_s) < 8


def test_a_disturbed_size_does_not_raise_the_sizes_above_it():
    sizes = (4096, 65536, 1 << 20)
    seconds = {"flat": (1.0, 9.0, 3.0), "two_level": (2.0, 2.0, 2.0)}
    curves = {
        size: {way: [seconds[way][index]] * 4 for way in seconds}
        for index, size in enumerate(sizes)
    }
    assert _rising(curves, "flat")[:, 0].tolist() == [1.0, 3.0, 3.0]
    assert _gains_s(curves) == {4096: -1.0, 65536: 1.0, 1 << 20: 1.0}
