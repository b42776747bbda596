"""A transformer within a memory budget of its devices: what leaves first, what it costs, limits."""

import dataclasses

import pytest

from paceline.core.errors import MemoryExceeded, UsageError
from paceline.core.machine_file import library_machine
from paceline.core.plan import Mesh, Plan
from paceline.perf.transformer import Architecture, estimate_transformer

SELENE = library_machine("selene")
MODEL = Architecture(layers=32, hidden=4096, heads=32, vocab=50304, sequence=2048)
GIB = 2**30


def fitted(budget_gib, machine=SELENE, **fields):
    plan = Plan(
        mesh=Mesh(tensor=8, pipeline=fields.pop("pipeline", 1)),
        nodes=fields.pop("nodes", 1),
        microbatches=fields.pop("microbatches", 8),
        precision="bfloat16",
        **fields,
    )
    budget = None if budget_gib is None else round(budget_gib * GIB)
    found = estimate_transformer(machine, MODEL, plan, 64, budget_bytes=budget)
    return found.memory_fit, found


def with_host_rate(rate, sharing="device"):
    links = tuple(
        dataclasses.replace(
            link,
            sharing=sharing,
            bandwidth_bytes_per_s=dataclasses.replace(link.bandwidth_bytes_per_s, value=rate),
        )
        if link.level == "host"
        else link
        for link in SELENE.links
    )
    return dataclasses.replace(SELENE, links=links)


def test_a_budget_that_holds_all_spills_nothing():
    fit, found = fitted(80)
    assert fit.peak_bytes == fit.in_core_peak_bytes == found.needed_memory_bytes
    assert (fit.spilled_bytes, fit.exposed_s, fit.slowdown) == (0, 0.0, 1.0)
    assert fitted(None)[0] is None


def test_activations_that_the_passes_hide_leave_first_and_cost_nothing():
    _, found = fitted(None)
    need = found.needed_memory_bytes / GIB
    fit, _ = fitted(need - 1)
    assert fit.kinds["activations"]["spill"] == pytest.approx(GIB, rel=1e-6)
    assert fit.kinds["optimizer state"]["spill"] == 0
    assert fit.exposed_s == 0
    assert fit.peak_bytes == pytest.approx((need - 1) * GIB, rel=1e-6)
    assert fit.disk_source.startswith("host link")


def test_then_the_optimizer_leaves_and_each_byte_waits_for_the_link_once():
    slow = with_host_rate(1e6)  # hides next to nothing
    _, found = fitted(None)
    need = found.needed_memory_bytes / GIB
    fit, _ = fitted(need - 1, slow)
    assert fit.kinds["optimizer state"]["spill"] == pytest.approx(GIB, rel=0.01)
    assert fit.exposed_s == pytest.approx(GIB / 1e6, rel=0.01)
    assert fit.step_s == pytest.approx(fit.in_core_step_s + fit.exposed_s)


def test_a_smaller_budget_takes_longer_and_the_smallest_is_named():
    _, found = fitted(None)
    need = found.needed_memory_bytes / GIB
    least = fitted(need)[0].least_bytes / GIB
    slow = with_host_rate(1e9)
    steps = [fitted(need - part * (need - least), slow)[0] for part in (0.2, 0.5, 0.9, 1.0)]
    times = [fit.step_s for fit in steps]
    assert times == sorted(times)
    assert times[-1] > times[0]
    with pytest.raises(MemoryExceeded, match="no plan keeps") as raised:
        fitted(least - 0.5)
    assert f"Give {least:.1f} GiB or more" in raised.value.fix


def test_devices_that_share_a_host_link_have_a_part_of_it():
    fit, _ = fitted(40, with_host_rate(8e9, sharing="node"))
    assert fit.disk_bytes_per_s == 1e9


def test_the_rank_of_a_pipeline_that_waits_longest_answers():
    slow, stages = with_host_rate(1e9), {"pipeline": 2, "nodes": 2}
    least = fitted(80, **stages)[0].least_bytes
    fit, found = fitted(least / GIB + 0.1, slow, **stages)
    assert fit.in_core_peak_bytes <= found.needed_memory_bytes
    assert fit.exposed_s > 0


def test_a_machine_without_a_host_link_says_so():
    links = tuple(link for link in SELENE.links if link.level != "host")
    with pytest.raises(UsageError, match="link to the host, of which the machine says nothing"):
        fitted(8, dataclasses.replace(SELENE, links=links))
