"""Settings of the backend, the replacement of gloo, and what Horovod's shim asks of launchers."""

import pytest
import torch.distributed as dist

from paceline.collectives.horovod import ranks
from paceline.collectives.options import CollectivesConfig
from paceline.collectives.path import make_path
from paceline.collectives.registration import NAME, register, replacement
from paceline.core.config import resolve
from paceline.core.errors import ConfigError, UsageError


def test_torch_knows_the_backend_without_an_import_of_paceline():
    assert NAME in dist.Backend.backend_list
    register()  # a second time changes nothing
    assert dist.Backend.backend_list.count(NAME) == 1
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("gloo", "paceline"),
        ("GLOO", "paceline"),
        (None, "paceline"),
        ("paceline", "paceline"),
        ("nccl", "nccl"),
        ("mpi", "mpi"),
        ("cpu:gloo,cuda:nccl", "cpu:paceline,cuda:nccl"),
        ("cuda:nccl", "cuda:nccl"),
        ("cuda:gloo", "cuda:gloo"),
    ],
)
def test_gloo_is_replaced_and_nothing_else(asked, made):
    assert replacement(asked) == made


def test_a_group_bound_to_an_accelerator_keeps_the_backend_that_torch_chooses():
    assert replacement(None, device_id=0) is None


@pytest.mark.parametrize("name", ["FLAT_BELOW_BYTES", "CHUNK_BYTES"])
def test_sizes_that_make_no_sense_are_refused(name):
    with pytest.raises(ConfigError, match=name.lower()):
        resolve(CollectivesConfig, environ={f"PACELINE_COLLECTIVES__{name}": "-1"})


def test_an_unknown_type_on_the_wire_is_refused():
    with pytest.raises(ConfigError, match="WIRE"):
        resolve(CollectivesConfig, environ={"PACELINE_COLLECTIVES__WIRE": "float8"})


def test_one_rank_is_a_host_of_its_own():
    path = make_path(dist.HashStore(), 0, (0,), 5.0)
    assert path.moves("broadcast", [])
    path.barrier(5.0)
    path.close()


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6"}, (5, 6)),
    ],
)
def test_horovod_finds_its_rank_with_every_launcher(environ, found):
    assert ranks.find_rank(environ) == found


def test_horovod_says_that_it_was_not_initialized():
    with pytest.raises(UsageError, match=r"hvd\.init"):
        ranks.size()
