"""What an Estimate says of its own limits: data and sentences."""

import dataclasses

import pytest
from support.machines import collective, small_machine

from paceline.core.errors import UsageError
from paceline.core.machine import Disturbance
from paceline.core.plan import Mesh, Plan
from paceline.core.workload import Layer, Operation, Workload
from paceline.perf import estimate

GIB = 1 << 30


def workload(*operations, parameter_bytes=1024):
    layer = Layer(
        name="0", kind="Linear", parameter_bytes=(parameter_bytes,), operations=operations
    )
    return Workload(name="w", batch=1, input_bytes=0, layers=(layer,))


def operation(bytes_, *, count=1, assumed=""):
    return Operation(
        phase="forward",
        operator="elementwise",
        dtype="float32",
        count=count,
        flops=0,
        bytes=bytes_,
        assumed=assumed,
    )


SMALL = workload(operation(1000))


def test_an_ordinary_prediction_says_nothing():
    result = estimate(small_machine(), SMALL, Plan(mesh=Mesh(data=2)))
    assert result.fits
    assert result.unpriced == ()
    assert result.warnings == ()
    assert result.needed_memory_bytes == 2 * sum(result.memory_bytes.values())


@pytest.mark.parametrize(
    ("measured", "planned", "warned"),
    [
        ("keep", "keep", False),
        ("keep", "system", False),
        ("", "keep", False),
        ("own", "keep", True),
    ],
)
def test_a_machine_measured_under_another_allocator_is_said(measured, planned, warned):
    machine = dataclasses.replace(small_machine(), allocator=measured)
    found = estimate(machine, SMALL, Plan(allocator=planned)).warnings
    assert any("under the allocator 'own'" in warning for warning in found) == warned


def test_a_model_that_does_not_fit_says_what_is_needed_and_what_there_is():
    result = estimate(small_machine(), workload(parameter_bytes=GIB), Plan(mesh=Mesh(data=2)))
    assert not result.fits
    assert result.needed_memory_bytes == 2 * 3 * GIB  # parameters, gradients, DDP's buckets
    assert result.available_memory_bytes == int(1e9)
    assert result.warnings == ("does not fit: 2 ranks need 6.0 GiB, cpu has 0.9 GiB",)


@pytest.mark.parametrize(("count", "fits"), [(1, False), (2, True)])
def test_ranks_of_a_node_share_its_accelerators(count, fits):
    machine = small_machine()
    gpu = dataclasses.replace(machine.devices[0], kind="gpu", count=count)
    machine = dataclasses.replace(machine, devices=(gpu,))
    plan = Plan(mesh=Mesh(data=2))
    assert estimate(machine, workload(parameter_bytes=GIB // 4), plan).fits == fits


def test_operators_without_a_price_are_named_with_their_share():
    given = workload(
        operation(3000, assumed="aten.sort"),
        operation(1000, count=2, assumed="aten._cdist_forward"),
        operation(5000),
    )
    result = estimate(small_machine(), given, Plan())
    assert [(found.name, found.count) for found in result.unpriced] == [
        ("aten.sort", 1),
        ("aten._cdist_forward", 2),
    ]
    assert [found.share for found in result.unpriced] == pytest.approx([0.3, 0.2])
    (warning,) = result.warnings
    assert "aten.sort (1), aten._cdist_forward (2)" in warning
    assert "3 of 4 operator calls" in warning
    assert "50.0%" in warning


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(mesh=Mesh(data=4)), ["collectives of 4 ranks from those between 2"]),
        (
            Plan(mesh=Mesh(data=1024)),
            ["1024 ranks x 1 threads on a node of 4 cores", "256 times as slow", "1024 ranks"],
        ),
        (
            Plan(mesh=Mesh(data=2), nodes=2),
            ["2 nodes, m has 1", "collectives over its loopback"],
        ),
    ],
)
def test_what_goes_beyond_the_measured_machine_is_called_extrapolated(plan, words):
    text = "\n".join(estimate(small_machine(), SMALL, plan).warnings)
    assert "extrapolated" in text
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    ("ranks", "warned", "source"),
    [
        (1, "as fast as with 4 threads", ""),
        (2, "2 times as slow", "oversubscription factor 2"),
        (6, "6 times as slow", "oversubscription factor 6"),
    ],
)
def test_the_warning_and_the_source_of_too_many_threads_agree(ranks, warned, source):
    """The warning said 99 times as slow, the source a factor of 2, which was predicted."""
    plan = Plan(mesh=Mesh(data=ranks), threads=99)
    result = estimate(small_machine(), SMALL, plan)
    assert f"compute is taken to be {warned}, and" in "\n".join(result.warnings)
    assert result.sources["forward"].endswith(source)
    assert bool(source) == ("oversubscription" in result.sources["forward"])


def test_as_many_ranks_as_were_measured_are_not_extrapolated():
    machine = dataclasses.replace(small_machine(), collectives=(collective("all_reduce", ranks=4),))
    assert estimate(machine, SMALL, Plan(mesh=Mesh(data=4))).warnings == ()


def test_a_machine_without_rates_says_why_it_has_none():
    machine = small_machine()
    device = dataclasses.replace(machine.devices[0], rates=())
    machine = dataclasses.replace(machine, devices=(device,), missing=("it did not end in time",))
    with pytest.raises(UsageError, match="no compute rates") as caught:
        estimate(machine, SMALL, Plan())
    assert caught.value.why == "it did not end in time"


def test_a_disturbed_probe_is_carried_to_the_plan():
    disturbed = (
        Disturbance(where="1 thread", part="rates", foreign_cores=0.3, why="other processes"),
        Disturbance(where="2 threads", part="rates", foreign_cores=0.8, why="used 0.80 cores"),
    )
    machine = dataclasses.replace(small_machine(), disturbed=disturbed)
    (warning,) = estimate(machine, SMALL, Plan()).warnings
    assert "in 2 parts (2 threads, rates: used 0.80 cores)" in warning
    assert "paceline probe" in warning
