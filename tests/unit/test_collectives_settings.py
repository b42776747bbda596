"""Settings of the backend, the replacement of gloo, and what Horovod's shim asks of launchers."""

import dataclasses
import importlib
import importlib.metadata
import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.machines import collective, small_machine

from paceline.collectives import HostGroup, backend, horovod, registration, settings
from paceline.collectives.choice import Crossover, PathChoice
from paceline.collectives.horovod import ranks
from paceline.collectives.hosts import SegmentAddress, apart, release_first_rank
from paceline.collectives.options import FLAT_BELOW_BYTES, CollectivesConfig
from paceline.collectives.path import make_path
from paceline.collectives.registration import NAME, REPLACES_GLOO, register, replacement
from paceline.collectives.settings import GroupSettings, choose
from paceline.collectives.sharded import ShardedPath
from paceline.collectives.two_level import HostPlace
from paceline.core.config import resolve
from paceline.core.errors import ConfigError, DeadlineExceeded, NotFound, UsageError
from paceline.core.machine_file import machine_path


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


@pytest.mark.parametrize(
    ("asked", "made"),
    [("paceline", "paceline"), ("cpu:paceline,cuda:nccl",) * 2, ("gloo", "gloo"), (None, "gloo")],
)
def test_accelerate_and_the_trainer_of_hugging_face_take_it(asked, made, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    state = importlib.import_module("accelerate.state").PartialState
    backend, kind = state._prepare_backend(None, cpu=True, backend=asked)
    assert (backend, kind.value) == (made, "MULTI_CPU")


def test_torch_is_imported_where_paceline_is_half_installed(monkeypatch):
    (entry,) = importlib.metadata.entry_points(group="torch.backends", name=NAME)
    monkeypatch.setitem(sys.modules, registration.__name__, None)
    with pytest.warns(RuntimeWarning, match=r"not installed correctly .*Install Paceline again"):
        entry.load()()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry.load()()


def test_rank_0_whose_process_may_have_the_store_goes_on_when_the_others_have_read_it():
    store = dist.HashStore()
    release_first_rank(store, "formed", 1, 3, 0.01)
    with pytest.raises(DeadlineExceeded, match="waited for rank 2"):
        release_first_rank(store, "formed", 0, 3, 0.01)
    release_first_rank(store, "formed", 2, 3, 0.01)
    release_first_rank(store, "formed", 0, 3, 0.01)


def test_a_group_bound_to_an_accelerator_keeps_the_backend_that_torch_chooses():
    assert replacement(None, device_id=0) is None


@pytest.mark.parametrize("name", ["FLAT_BELOW_BYTES", "CHUNK_BYTES"])
def test_sizes_that_make_no_sense_are_refused(name):
    with pytest.raises(ConfigError, match=name.lower()):
        resolve(CollectivesConfig, environ={f"PACELINE_COLLECTIVES__{name}": "-1"})


def test_what_a_run_sets_for_its_ranks_is_not_taken_for_a_setting():
    """Rank 0 of `run --collectives paceline` on two hosts raised: an unknown variable."""
    assert resolve(CollectivesConfig, environ={REPLACES_GLOO: "1"}).config == CollectivesConfig()


def test_an_unknown_type_on_the_wire_is_refused():
    with pytest.raises(ConfigError, match="WIRE"):
        resolve(CollectivesConfig, environ={"PACELINE_COLLECTIVES__WIRE": "float8"})


def test_a_number_of_bytes_holds_whatever_was_measured(probed):
    choice = choose(CollectivesConfig(flat_below_bytes=0), 2, 4)
    assert choice.takes_two_levels("all_reduce", 0)


def test_the_probed_machine_of_the_host_is_read_by_default(probed):
    choice = choose(CollectivesConfig(), 2, 4)
    assert not choice.takes_two_levels("all_reduce", 999)
    assert choice.takes_two_levels("all_reduce", 1001)
    assert choice.takes_two_levels("broadcast", FLAT_BELOW_BYTES)
    assert not choice.takes_two_levels("broadcast", FLAT_BELOW_BYTES - 1)


def test_a_damaged_probed_machine_is_a_warning_and_a_damaged_named_one_an_error(probed, caplog):
    probed.write_text("{")
    assert choose(CollectivesConfig(), 2, 4).measured == {}
    assert "not valid JSON" in caplog.text
    with pytest.raises(ConfigError, match="not valid JSON"):
        choose(CollectivesConfig(machine=str(probed)), 2, 4)


@pytest.fixture
def probed(tmp_path, monkeypatch):
    """Return the machine file of this host, with a table that changes at 1000 bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget_tables()
    path = machine_path()
    path.parent.mkdir()
    shape = {"ranks": 4, "hosts": 2}
    line = collective("all_reduce", 1.0, 1e3, algorithm="flat", **shape)
    level = collective("all_reduce", 2.0, 1e15, backend="paceline", algorithm="two_level", **shape)
    machine = dataclasses.replace(small_machine(), collectives=(line, level))
    path.write_text(machine.to_text())
    yield path
    forget_tables()


def forget_tables():
    settings._costs_between_hosts.cache_clear()
    settings._named_table.cache_clear()
    settings._own_table.cache_clear()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("WIR", "bfloat16", "Did you mean 'wire'"), ("WIRE", "bf16", "'bf16' is not one of 'same'")],
)
def test_one_host_refuses_what_several_hosts_would_refuse(monkeypatch, name, value, said):
    """A misspelt setting passed in silence on one host, and failed first on the cluster."""
    monkeypatch.setenv(f"PACELINE_COLLECTIVES__{name}", value)
    with pytest.raises(ConfigError, match=said):
        make_path(dist.HashStore(), 0, (0,), 5.0)


def test_one_host_refuses_a_machine_file_that_is_not_there():
    with pytest.raises(NotFound, match="no such file"):
        choose(CollectivesConfig(machine="absent.json"), 1, 2)


def test_one_host_asks_for_no_table(probed, caplog):
    probed.write_text(small_machine().to_text())
    assert choose(CollectivesConfig(machine=str(probed)), 1, 2).measured == {}
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, "PID namespace"),
        ({"user": 7}, "users 0 and 7"),
        ({"boot_id": "other"}, ""),
    ],
)
def test_ranks_of_one_machine_that_share_no_memory_are_said(other, said):
    first = SegmentAddress(boot_id="boot", user=0, process=1, descriptor=3, nonce="00")
    text = apart([first, dataclasses.replace(first, **other)], [[0], [1]])
    assert said in text
    assert bool(text) == bool(said)


def test_the_path_of_a_broadcast_depends_on_its_bytes(monkeypatch):
    """DDP's broadcasts were recorded as two levels, whatever the table said of their size."""
    group = backend.PacelineGroup(dist.HashStore(), 0, 1, timedelta(seconds=5), (0,))
    assert group.broadcast_path([torch.ones(1)]) == "shared memory"
    place = HostPlace(((0,), (1,)), 0, 0)
    flat_below = PathChoice(otherwise=Crossover(sizes_bytes=(1024.0,)))
    level = GroupSettings(config=CollectivesConfig(), choice=flat_below)
    members = HostGroup.form(dist.HashStore(), 0, 1, 5.0)
    monkeypatch.setattr(group, "_path", ShardedPath(place, members, (0, 1), None, level))
    assert group.broadcast_path([torch.ones(1)]) == "gloo"
    assert group.broadcast_path([torch.ones(512), torch.ones(512)]) == "two levels"
    group._path.close()


def test_a_sum_of_a_type_without_a_kernel_names_call_and_type():
    group = backend.PacelineGroup(dist.HashStore(), 0, 1, timedelta(seconds=5), (0,))
    with pytest.raises(UsageError, match=r"no all_reduce of torch\.uint16"):
        group.allreduce([torch.ones(3, dtype=torch.uint16)])
    group.shutdown()


def test_between_hosts_a_sum_of_a_type_that_gloo_lacks_names_call_and_type(monkeypatch):
    """gloo said "Invalid scalar type"."""
    group = backend.PacelineGroup(dist.HashStore(), 0, 1, timedelta(seconds=5), (0,))
    group.allreduce([torch.ones(3, dtype=torch.int16)])  # through shared memory
    monkeypatch.setattr(group, "_path", None)  # as with one rank per host
    short = torch.ones(3, dtype=torch.int16)
    calls = {
        "all_reduce": lambda: group.allreduce([short]),
        "reduce": lambda: group.reduce([short]),
        "reduce_scatter": lambda: group.reduce_scatter([short], [[short]]),
    }
    for name, call in calls.items():
        with pytest.raises(UsageError, match=rf"no {name} of torch\.int16 .*Convert the tensor"):
            call()
    group.broadcast([short])
    group.shutdown()


def test_what_horovod_has_and_the_shim_has_not_is_said():
    with pytest.raises(AttributeError, match=r"Adasum.*hvd\.Average"):
        _ = horovod.Adasum


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
