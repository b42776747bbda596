"""Messages of sparse gradients: what is encoded is decoded, in the bytes that both ends expect."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.core.errors import CorruptData, UsageError
from paceline.training.compression.exchange import Ownership, Part, SparseAllReduce, method_for
from paceline.training.compression.selection import Entries
from paceline.training.compression.wire import VALUE_TYPES, Codec, rounded


def entries_of(length, count, seed):
    random = torch.Generator().manual_seed(seed)
    indices = torch.randperm(length, generator=random)[:count].sort().values
    return Entries(indices, torch.randn(count, generator=random) * 1e-3)


@settings(deadline=None, max_examples=examples(200))
@given(
    length=st.one_of(st.integers(1, 500), st.integers(60_000, 400_000)),
    share=st.sampled_from((0.0, 0.0001, 0.001, 0.02, 0.2, 1.0)),
    spare=st.integers(0, 50),
    dtype=st.sampled_from(VALUE_TYPES),
    seed=st.integers(0, 1000),
)
def test_a_message_gives_back_its_entries(length, share, spare, dtype, seed):
    count = int(length * share)
    codec = Codec(length=length, capacity=min(length, count + spare), dtype=dtype)
    entries = entries_of(length, count, seed)
    for message in (codec.encode(entries), codec.padded(entries)):
        assert message.dtype is torch.uint8
        assert message.numel() <= codec.max_bytes
        indices, values = codec.decode(message)
        assert torch.equal(indices, entries.indices)
        assert torch.equal(values, rounded(entries.values, dtype))
    assert codec.padded(entries).numel() == codec.max_bytes


def test_the_code_is_the_smallest_for_a_density():
    length = 1_000_000
    sizes = {
        density: Codec(length=length, capacity=int(density * length)).code_bytes
        for density in (0.0001, 0.001, 0.02, 0.06, 0.25, 1.0)
    }
    assert sizes == {0.0001: 2, 0.001: 2, 0.02: 1, 0.06: 1, 0.25: 0, 1.0: 0}
    codec = Codec(length=length, capacity=1000, dtype=torch.bfloat16)
    assert codec.max_bytes <= 1000 * 4 + 8 + 2 * 16


def test_entries_that_lie_further_apart_than_a_code_reaches():
    codec = Codec(length=1_000_000, capacity=3)
    entries = Entries(torch.tensor([0, 65_535, 999_999]), torch.tensor([1.0, 2.0, 3.0]))
    indices, values = codec.decode(codec.padded(entries))
    assert indices.tolist() == [0, 65_535, 999_999]
    assert values.tolist() == [1.0, 2.0, 3.0]


@settings(deadline=None, max_examples=examples(200))
@given(
    bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50),
    dtype=st.sampled_from((torch.float16, torch.bfloat16)),
)
def test_what_rounding_takes_off_is_exact(bits, dtype):
    """So that the residual and the message add up to the value, bit by bit."""
    values = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    values = values[values.isfinite() & (values.abs() < 6e4) & (values.abs() > 1e-30)]
    sent = rounded(values, dtype)
    rest = values - sent
    exact = values.to(torch.float64) - sent.to(torch.float64)
    assert torch.equal(rest.to(torch.float64), exact)
    assert torch.equal(rest + sent, values)


def test_float16_saturates():
    assert rounded(torch.tensor([1e9, -1e9]), torch.float16).tolist() == [65504.0, -65504.0]


@pytest.mark.parametrize("at", [0, 4])
def test_a_damaged_message_is_refused(at):
    codec = Codec(length=100_000, capacity=10)
    message = codec.padded(entries_of(100_000, 10, 0))
    message[at] = 200
    with pytest.raises(CorruptData, match="damaged"):
        codec.decode(message)
    with pytest.raises(CorruptData, match="3 bytes"):
        codec.decode(message[:3])


def test_an_index_beyond_the_tensor_is_refused():
    message = Codec(length=1000, capacity=10).padded(entries_of(1000, 10, 0))
    with pytest.raises(CorruptData, match="damaged"):
        Codec(length=500, capacity=10).decode(message)


def test_values_of_another_dtype_are_refused():
    with pytest.raises(UsageError, match="float64"):
        Codec(length=10, capacity=1, dtype=torch.float64)


@settings(deadline=None, max_examples=examples(100))
@given(
    lengths=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9)), min_size=1, max_size=4),
    ranks=st.integers(1, 9),
)
def test_each_element_has_one_owner_and_one_place(lengths, ranks):
    parts, start = [], 0
    for length, gap in lengths:
        parts.append(Part(start + gap, length, 1))
        start += gap + length
    owned = Ownership(parts, ranks, torch.device("cpu"))
    indices = torch.cat([torch.arange(part.start, part.start + part.length) for part in parts])
    owners, local = owned.owner(indices), owned.to_local(indices)
    for rank in range(ranks):
        own = local[owners == rank]
        assert bool((own.diff() > 0).all())
        assert not own.numel() or int(own[-1]) < owned.local_length
        assert torch.equal(owned.to_global(own, rank), indices[owners == rank])


def test_ownership_is_balanced_where_one_layer_has_most_entries():
    owned = Ownership([Part(0, 1_000_000, 1000)], 8, torch.device("cpu"))
    layer = torch.arange(300_000, 400_000)
    counts = torch.bincount(owned.owner(layer), minlength=8)
    assert counts.max() <= 1.3 * counts.min()


def volume(ranks, method):
    """Return the bytes that a rank sends in an all-reduce of 11 M elements, 0.1 % of them."""
    length, wanted = 11_000_000, 11_000
    plan = SparseAllReduce(
        ranks=ranks,
        length=length,
        parts=(Part(0, length, wanted),),
        dtype=torch.float32,
        method=method,
    )
    results = plan.result_bytes // ranks * (ranks - 1)
    if method == "gather":
        return results
    random = torch.Generator().manual_seed(0)
    indices = torch.randperm(length, generator=random)[:wanted].sort().values
    messages = plan._to_owners(Entries(indices, torch.ones(wanted)), None)
    return results + sum(message.numel() for message in messages[1:])


def test_the_volume_does_not_grow_with_the_ranks():
    volumes = [volume(ranks, "scatter") for ranks in (4, 16, 64)]
    assert max(volumes) < 2.2 * 6 * 11_000
    assert volume(64, "gather") > 20 * max(volumes)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_chosen_method_compresses_more_than_270_times(ranks):
    """Against the ring all-reduce, with indices and headers."""
    dense = 2 * (ranks - 1) / ranks * 4 * 11_000_000
    assert dense / volume(ranks, method_for(ranks)) > 600
