"""Compressed gradients of a transformer: bytes, time, memory, and what they exclude."""

import pytest

from paceline.core.errors import ConfigError, UsageError
from paceline.core.machine_file import library_machine
from paceline.core.plan import Mesh, Plan
from paceline.perf.transformer import Architecture, estimate_transformer

MODEL = Architecture(layers=12, hidden=1024, heads=16, vocab=32000, sequence=512)


def estimate(**fields):
    plan = Plan(mesh=Mesh(data=4), nodes=4, **fields)
    return estimate_transformer(library_machine("ethernet-1g"), MODEL, plan, 4)


def test_a_slow_network_gains_by_compression_and_a_factor_divides_its_bytes():
    plain, small = estimate(), estimate(compression=100.0)
    assert small.step_time_s < plain.step_time_s / 5
    assert small.link_bytes["network"] == pytest.approx(plain.link_bytes["network"] / 100)
    added = small.memory_bytes["compression"]
    assert added == pytest.approx(4 * MODEL.parameters)
    assert "compression" not in plain.memory_bytes


def test_compressing_costs_more_than_a_fast_network_takes():
    """Selection moves 20 bytes a gradient, and is not hidden by the backward pass."""
    plain, small = (_on_selene(**fields) for fields in ({}, {"compression": 100.0}))
    assert small.breakdown.transfer > plain.breakdown.transfer


def _on_selene(**fields):
    plan = Plan(mesh=Mesh(data=8), precision="bfloat16", **fields)
    return estimate_transformer(library_machine("selene"), MODEL, plan, 64)


def test_one_replica_compresses_nothing():
    plan = Plan(compression=10.0)
    machine = library_machine("laptop")
    found, plain = (estimate_transformer(machine, MODEL, chosen, 1) for chosen in (plan, Plan()))
    assert found.breakdown == plain.breakdown


def test_shared_gradients_and_factors_below_one_are_refused():
    with pytest.raises(UsageError, match="ZeRO-1 shares out are not compressed"):
        estimate(compression=10.0, zero=1)
    with pytest.raises(ConfigError, match=r"'compression' is 0\.5"):
        estimate(compression=0.5)
