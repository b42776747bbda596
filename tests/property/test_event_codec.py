"""Packed events are the events again, whatever their fields; damaged bytes are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.native import pack_events, unpack_events
from paceline.trace.format.events import EVENT_DTYPE

# Few distinct values make shapes repeat; extreme ones wrap every difference.
FIELDS = {
    name: st.sampled_from(
        [0, 1, 2, int(np.iinfo(EVENT_DTYPE[name]).min), int(np.iinfo(EVENT_DTYPE[name]).max)]
    )
    | st.integers(int(np.iinfo(EVENT_DTYPE[name]).min), int(np.iinfo(EVENT_DTYPE[name]).max))
    for name in EVENT_DTYPE.names or ()
}
EVENTS = st.lists(st.tuples(*FIELDS.values()), max_size=60).map(
    lambda rows: np.array(rows, EVENT_DTYPE)
)


@given(EVENTS, st.integers(1, 4))
def test_events_come_back(events, repeats):
    events = np.tile(events, repeats)
    packed = pack_events(events.tobytes())
    assert unpack_events(packed, len(events)) == events.tobytes()


@given(EVENTS)
def test_another_count_is_refused(events):
    packed = pack_events(events.tobytes())
    for count in (len(events) + 1, len(events) - 1, 2**40):
        if count >= 0:
            with pytest.raises(ValueError, match="not that many events"):
                unpack_events(packed, count)


@given(st.binary(max_size=200), st.integers(0, 100))
def test_any_bytes_are_events_or_refused(data, count):
    try:
        found = unpack_events(data, count)
    except ValueError:
        return
    assert len(found) == count * EVENT_DTYPE.itemsize


def test_a_training_loop_takes_ten_bytes_an_event():
    random = np.random.default_rng(3)
    events = np.zeros((500, 8), EVENT_DTYPE)
    events["kind"] = events["name"] = np.arange(1, 9)
    events["step"] = np.arange(500)[:, None]
    lengths_ns = random.integers(10_000, 900_000, events.shape).astype(np.uint64)
    events["end_ns"] = 10**15 + np.cumsum(lengths_ns).reshape(events.shape).astype(np.uint64)
    events["begin_ns"] = events["end_ns"] - lengths_ns
    events["sequence"][:, 3] = 1 + np.arange(500)
    events["amount"][:, 3] = 1 << 22
    assert len(pack_events(events.tobytes())) <= 10 * events.size
