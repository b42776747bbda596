"""The ceiling of each stage of a loader, from hand-made traces."""

import pytest
from support.traces import MS, Event, write_run

from paceline.report.loader import loader_rows, loader_words
from paceline.trace.analysis import analyse
from paceline.trace.analysis.loader import infinite_loader_s
from paceline.trace.format.events import (
    DATALOADER_COUNTERS,
    LOADER_SAMPLES,
    LOADER_STAGES,
    LOADER_WORKERS,
    Kind,
)
from paceline.trace.merge import load_run

STEPS = 10


def counter(at_ns, step, name, amount, tag=1):
    return Event(Kind.COUNTER, at_ns, at_ns, name, step, amount, tag=tag)


def training(*, input_ms, work_ms, counts, workers=2, copy_ms=0.0):
    """Return a rank's events: steps that wait for a batch, copy it, and compute.

    Args:
        input_ms: that each step waits for its batch.
        work_ms: that each step computes.
        counts: counters of each step, by name.
        workers: of the loader.
        copy_ms: of the batch to a device.
    """
    events = [counter(0, 0, LOADER_WORKERS, workers)]
    now = 0
    for step in range(STEPS):
        ready = now + round(input_ms * MS)
        copied = ready + round(copy_ms * MS)
        end = copied + round(work_ms * MS)
        events += [
            Event(Kind.INPUT, now, ready, "next", step, tag=1),
            *(counter(ready, step, name, amount) for name, amount in counts.items()),
            Event(Kind.FORWARD, copied, end, "forward", step),
            Event(Kind.STEP, now, end, "step", step),
        ]
        if copy_ms:
            events.append(Event(Kind.COPY, ready, copied, "copy to", step))
        now = end
    return events


def torch_counts(**amounts):
    return {DATALOADER_COUNTERS[stage]: round(amount) for stage, amount in amounts.items()}


def ceiling_of(tmp_path, *ranks):
    return analyse(load_run(write_run(tmp_path, list(ranks)))).loader


def test_a_dataloader_s_stages_have_ceilings_and_its_slowest_is_named(tmp_path):
    counts = torch_counts(
        batches=1, samples=32, fetch=30 * MS, core=6 * MS, collate=10 * MS, hand_over=1 * MS
    )
    # Two workers make a batch in 40 ms: one comes every 20 ms. The loop computes for 5 ms.
    found = ceiling_of(tmp_path, training(input_ms=15, work_ms=5, counts=counts))
    assert (found.source, found.workers, found.samples) == ("torch", 2, 32)
    by_name = {stage.stage: stage.batches_per_s for stage in found.stages}
    assert list(by_name) == ["read and decode", "collate", "hand over"]
    assert list(by_name.values()) == pytest.approx([2 / 0.030, 2 / 0.010, 1 / 0.001])
    assert found.ceiling_per_s == pytest.approx(2 / 0.040)
    assert found.batches_per_s == pytest.approx(1 / 0.020)
    assert found.wanted_per_s == pytest.approx(1 / 0.005)
    assert found.slowest == "read and decode"
    assert found.off_core == pytest.approx(0.8)
    assert found.shorter == pytest.approx(15 / 20)
    assert loader_words(found) == (
        "With an infinitely fast loader a step would be 75 % shorter: its 2 workers deliver at "
        "most 1,600 samples/s, the steps would take 6,400 samples/s; the slowest stage is read and "
        "decode, 30.0 ms of a batch (on no core for 80 % of it: it waited, as for storage, or "
        "lacked a core; --record-io tells reading from decoding)."
    )
    names, rows = loader_rows(found)
    assert names[-3:] == ["all stages", "the run took", "without waiting for it"]
    assert rows[0] == ["30.0 ms", "2", "2,133 samples/s"]


@pytest.mark.parametrize(
    ("queued_ms", "said"),
    [
        (24, "it lacked a core for 80 % of it"),
        (15, "it waited for 30 % of it, as for storage; it lacked a core for 50 % of it"),
        (0.3, "it waited for 79 % of it, as for storage"),
        (99, "it lacked a core for 80 % of it"),  # no more than it was on none
    ],
)
def test_a_worker_that_lacked_a_core_did_not_wait_for_storage(tmp_path, queued_ms, said):
    counts = torch_counts(
        batches=1, samples=32, fetch=30 * MS, core=6 * MS, queued=queued_ms * MS, collate=10 * MS
    )
    found = ceiling_of(tmp_path, training(input_ms=15, work_ms=5, counts=counts))
    words = loader_words(found)
    assert f"30.0 ms of a batch ({said}; --record-io tells" in words


def test_calls_for_files_tell_reading_from_decoding(tmp_path):
    counts = torch_counts(
        batches=1, samples=8, fetch=30 * MS, core=29 * MS, files=20 * MS, collate=5 * MS
    )
    found = ceiling_of(tmp_path, training(input_ms=15, work_ms=5, counts=counts))
    assert {stage.stage: stage.seconds for stage in found.stages} == pytest.approx(
        {"read": 0.020, "decode": 0.010, "collate": 0.005}
    )
    assert found.slowest == "read"
    assert "--record-io" not in loader_words(found)


def test_the_stages_of_the_store_s_loader_and_the_copy_to_a_device(tmp_path):
    counts = {LOADER_STAGES["read"]: 2 * MS, LOADER_STAGES["decode"]: 8 * MS, LOADER_SAMPLES: 16}
    found = ceiling_of(
        tmp_path, training(input_ms=5, work_ms=3, copy_ms=2, counts=counts, workers=1)
    )
    assert found.source == "store"
    assert {stage.stage: stage.seconds for stage in found.stages} == pytest.approx(
        {"read": 0.002, "decode": 0.008, "copy": 0.002}
    )
    assert (found.slowest, found.off_core) == ("decode", None)
    assert found.ceiling_per_s == pytest.approx(1 / 0.010)
    assert "the slowest stage is decode, 8.00 ms of a batch." in loader_words(found)


def test_the_slowest_rank_counts_for_all(tmp_path):
    fast = torch_counts(batches=1, samples=8, fetch=5 * MS, collate=1 * MS)
    slow = torch_counts(batches=1, samples=8, fetch=25 * MS, collate=1 * MS)
    found = ceiling_of(
        tmp_path,
        training(input_ms=1, work_ms=19, counts=fast, workers=1),
        training(input_ms=15, work_ms=5, counts=slow, workers=1),
    )
    assert found.ranks == 2
    fetch = found.stages[0]
    assert (fetch.seconds, fetch.batches_per_s) == pytest.approx((0.025, 2 / 0.025))
    assert found.saving_s == pytest.approx(0.001)  # the other rank has 19 ms to compute


def test_a_loader_without_workers_loads_in_the_loop(tmp_path):
    counts = torch_counts(batches=1, samples=8, fetch=9 * MS, collate=1 * MS)
    found = ceiling_of(tmp_path, training(input_ms=10, work_ms=10, counts=counts, workers=0))
    assert found.ceiling_per_s == pytest.approx(1 / 0.010)
    assert "it has no workers, so that the loop itself loads" in loader_words(found)


def test_workers_that_keep_up_leave_the_hand_over(tmp_path):
    counts = torch_counts(batches=1, samples=8, fetch=1 * MS, collate=1 * MS, hand_over=3 * MS)
    found = ceiling_of(tmp_path, training(input_ms=3, work_ms=7, counts=counts))
    assert found.slowest == "hand over"
    assert "but the loop waits 3.00 ms to hand over each batch" in loader_words(found)


def test_a_loader_that_costs_little_is_in_tables_alone(tmp_path):
    counts = torch_counts(batches=1, samples=8, fetch=1 * MS, collate=1 * MS)
    found = ceiling_of(tmp_path, training(input_ms=0.1, work_ms=10, counts=counts))
    assert found is not None
    assert loader_words(found) == loader_words(None) == ""


def test_samples_that_were_not_counted_leave_batches(tmp_path):
    counts = torch_counts(batches=1, fetch=10 * MS, collate=1 * MS)
    found = ceiling_of(tmp_path, training(input_ms=10, work_ms=2, counts=counts))
    assert "batches/s" in loader_words(found)


def test_without_a_loader_there_is_no_ceiling(tmp_path):
    trace = load_run(write_run(tmp_path, [training(input_ms=1, work_ms=2, counts={})]))
    analysis = analyse(trace)
    assert analysis.loader is None
    step_s, saving_s = infinite_loader_s(analysis.phases, 0, STEPS)
    assert (step_s, saving_s) == pytest.approx((0.003, 0.001))
