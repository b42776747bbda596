"""Which codec `auto` chooses: the smallest that feeds the loop, and the fastest where none does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import store
from paceline.store import PackOptions, open_pack
from paceline.store.write.codec_choice import (
    ASYNC_MARGIN,
    CANDIDATES,
    SYNC_SHARE,
    CodecRate,
    choose,
    feed_rate,
    reason,
)

READ = 400e6


def rates_of(measured, read=READ):
    """Return the rates of codecs, of their capacity factors and rates of decoding."""
    return [
        CodecRate(
            codec=codec,
            capacity_factor=factor,
            decode_bytes_per_s=decode,
            feed_bytes_per_s=feed_rate(factor, decode, read),
        )
        for codec, (factor, decode) in measured.items()
    ]


USUAL = {"none": (1.0, 20e9), "lz4": (1.5, 4e9), "zstd": (2.0, 1e9), "zstd-dict": (2.5, 0.5e9)}


@pytest.mark.parametrize(
    ("required", "is_sync", "expected"),
    [
        (100e6, False, "zstd-dict"),
        (299e6, False, "zstd-dict"),  # 0.9 / (1 / 1000 + 1 / 500) = 300e6
        (301e6, False, "zstd"),
        (399e6, False, "zstd"),  # 0.9 / (1 / 800 + 1 / 1000) = 400e6
        (401e6, False, "lz4"),
        (600e6, False, "lz4"),  # none feeds: the fastest
        (1e6, True, "zstd-dict"),
        (90e6, True, "zstd-dict"),  # longer by 0.45 ns a byte, where 0.55 are allowed
        (125e6, True, "zstd"),
    ],
)
def test_the_smallest_codec_that_feeds_is_chosen(required, is_sync, expected):
    chosen = choose(rates_of(USUAL), required_bytes_per_s=required, is_sync=is_sync)
    assert chosen.codec == expected


factors = st.floats(0.5, 20)
decodes = st.floats(1e6, 1e11)


@given(
    measured=st.fixed_dictionaries({name: st.tuples(factors, decodes) for name in CANDIDATES}),
    required=st.floats(1e3, 1e11),
    read=st.floats(1e5, 1e11),
    is_sync=st.booleans(),
)
def test_what_is_chosen_feeds_if_anything_does(measured, required, read, is_sync):
    rates = rates_of(measured | {"none": (1.0, measured["none"][1])}, read)
    chosen = choose(rates, required_bytes_per_s=required, is_sync=is_sync)
    plain = next(rate for rate in rates if rate.codec == "none")

    def feeds(rate):
        if is_sync:
            added_s = 1 / rate.feed_bytes_per_s - 1 / plain.feed_bytes_per_s
            return added_s <= SYNC_SHARE / required
        return rate.feed_bytes_per_s * (1 - ASYNC_MARGIN) >= required

    feeding = [rate for rate in rates if feeds(rate)]
    if feeding:
        assert feeds(chosen)
        assert chosen.capacity_factor == max(rate.capacity_factor for rate in feeding)
    else:
        assert chosen.feed_bytes_per_s == max(rate.feed_bytes_per_s for rate in rates)
    why = reason(chosen, required_bytes_per_s=required, is_sync=is_sync, is_given=True)
    assert ("the most of all" in why) == (not feeding)


def test_the_limits_of_the_storage():
    slow = choose(rates_of(USUAL, 1.0), required_bytes_per_s=1e9, is_sync=False)
    assert slow.codec == "zstd-dict"
    free = choose(rates_of(USUAL, 1e15), required_bytes_per_s=1e12, is_sync=False)
    assert free.codec == "none"


SAMPLES = {
    f"{k:04d}": f"{k * 7919 % 9973} words, as all samples have them".encode() * 3
    for k in range(900)
}


@pytest.mark.parametrize("feed", ["async", "sync"])
def test_packing_measures_and_chooses(tmp_path, feed):
    chosen = {}
    for required in (1, 10**15):
        path = tmp_path / str(required)
        options = PackOptions(codec="auto", feed_bytes_per_s=required, feed=feed)
        summary = store.pack(store.Samples(SAMPLES.items()), path, options=options)
        choice = summary.choice
        assert [rate.codec for rate in choice.rates] == list(CANDIDATES)
        assert choice.required_bytes_per_s == required
        assert choice.read_bytes_per_s > 0
        assert choice.why
        chosen[required] = choice
        with open_pack(path) as pack:
            assert [pack.read(k) for k in range(len(pack))] == list(SAMPLES.values())
        assert not list(tmp_path.glob("*/*.partial"))
    easy, hard = chosen[1], chosen[10**15]
    assert easy.chosen.capacity_factor == max(rate.capacity_factor for rate in easy.rates) > 1.5
    if feed == "async":
        assert hard.chosen.feed_bytes_per_s == max(rate.feed_bytes_per_s for rate in hard.rates)
    else:
        assert hard.chosen.feed_bytes_per_s >= hard.rates[0].feed_bytes_per_s


def test_without_a_rate_the_storage_says_how_much_is_needed(tmp_path):
    options = PackOptions(codec="auto")
    summary = store.pack(store.Samples(SAMPLES.items()), tmp_path / "pack", options=options)
    plain = summary.choice.rates[0]
    assert plain.codec == "none"
    assert 0 < plain.feed_bytes_per_s <= summary.choice.read_bytes_per_s
    assert summary.choice.required_bytes_per_s == plain.feed_bytes_per_s
    assert summary.choice.chosen.feed_bytes_per_s >= plain.feed_bytes_per_s
    assert "what it is without a codec" in summary.choice.why


def test_nothing_is_measured_where_there_is_nothing(tmp_path):
    for name, samples in (("none", []), ("empty", [("a", b""), ("b", b"")])):
        options = PackOptions(codec="auto")
        summary = store.pack(store.Samples(samples), tmp_path / name, options=options)
        assert summary.choice is None
        assert summary.capacity_factor == 1.0
