"""Each machine that Paceline describes: complete, possible, and with the source of every number."""

import dataclasses
import json

import pytest

from paceline.core.errors import ConfigError, NotFound
from paceline.core.machine import Machine, Quantity
from paceline.core.machine_file import library_machine, library_names
from paceline.core.plan import Mesh, Plan
from paceline.perf.transformer import Architecture, estimate_transformer

ASKED = {
    "summit", "summitdev", "frontera", "stampede2-knl", "stampede2-skx", "blues", "bebop",
    "frontier", "perlmutter", "selene", "jean-zay-v100", "jean-zay-a100", "dgx-h100", "tpu-v2-pod",
    "tpu-v3-pod", "p40-cluster", "k80-cluster", "gtx1080ti-cluster", "ethernet-1g", "laptop",
}  # fmt: skip
MODEL = Architecture(layers=8, hidden=512, heads=8, vocab=1000, sequence=128)


def quantities(record, place=""):
    """Yield each number of a record with the path to it."""
    if isinstance(record, Quantity):
        yield place, record
    elif dataclasses.is_dataclass(record):
        for field in dataclasses.fields(record):
            yield from quantities(getattr(record, field.name), f"{place}.{field.name}")
    elif isinstance(record, tuple):
        for index, item in enumerate(record):
            yield from quantities(item, f"{place}[{index}]")


def test_the_library_has_what_was_asked_for():
    assert set(library_names()) >= ASKED


@pytest.mark.parametrize("name", library_names())
def test_every_number_has_a_source(name):
    found = list(quantities(library_machine(name), name))
    assert found
    assert [place for place, number in found if len(number.reference) < 10] == []
    assert {number.source for _, number in found} <= {"recalled", "datasheet", "fit"}


@pytest.mark.parametrize("name", library_names())
def test_every_machine_predicts(name):
    machine = library_machine(name)
    nodes = min(2, machine.nodes)
    ranks = nodes * machine.devices[0].count
    found = estimate_transformer(
        machine, MODEL, Plan(mesh=Mesh(data=ranks), nodes=nodes, precision="bfloat16"), ranks
    )
    assert 0 < found.low_s < found.step_time_s < found.high_s


def changed(change):
    data = json.loads(library_machine("selene").to_text())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "where", "key"),
    [
        (lambda data: data["links"][0]["latency_s"].pop("value"), "links[0]", "value"),
        (lambda data: data["links"][2].pop("bandwidth_bytes_per_s"), "links[2]", "bandwidth"),
        (
            lambda data: data["links"][0]["bandwidth_bytes_per_s"].update(value=0.0),
            "links[0]",
            "bandwidth_bytes_per_s",
        ),
        (lambda data: data["links"][0]["latency_s"].update(value=-1.0), "links[0]", "latency_s"),
        (
            lambda data: data["devices"][0]["peaks"][0]["flops_per_s"].update(value=-5.0),
            "peaks[0]",
            "flops_per_s",
        ),
        (
            lambda data: data["devices"][0]["memory_bytes"].update(value=0.0),
            "devices[0]",
            "memory_bytes",
        ),
    ],
)
def test_a_missing_or_impossible_number_names_file_and_key(change, where, key):
    with pytest.raises(ConfigError) as raised:
        Machine.from_json(changed(change), where="mine.json")
    assert raised.value.where.startswith("mine.json")
    assert where in raised.value.where
    assert key in raised.value.what


def test_an_unknown_name_lists_the_nearest():
    with pytest.raises(NotFound, match="selenee") as raised:
        library_machine("selenee")
    assert "selene" in raised.value.fix
