"""What is sent and what stays is what was accumulated, and the native kernel does as torch does."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.training.compression.selection import (
    Accumulation,
    Entries,
    Sample,
    accumulate,
    accumulate_and_select,
    add_entries,
    largest,
    sample_of,
    select_with_torch,
    wanted_count,
)

CASES = {
    "count": st.integers(1, 6000),
    "density": st.sampled_from((0.001, 0.01, 0.1, 0.5)),
    "nesterov": st.booleans(),
    "mask": st.booleans(),
    "seed": st.integers(0, 2**31),
    "sparse": st.booleans(),
}


def state_of(count, seed, sparse):
    """Return gradient, velocity and residual; sparse ones are mostly zeros, with many ties."""
    random = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(count, generator=random) for _ in range(3)]
    if sparse:
        tensors = [tensor.where(tensor > 1.5, 0.0).round() for tensor in tensors]
    return tensors


@settings(deadline=None, max_examples=examples(150))
@given(**CASES)
def test_the_native_kernel_gives_the_bits_of_torch_and_loses_nothing(
    count, density, nesterov, mask, seed, sparse
):
    how = Accumulation(momentum=0.9, nesterov=nesterov, mask_momentum=mask)
    wanted, sample = wanted_count(count, density), sample_of(count, density, "layer", seed % 97)
    gradient, velocity, residual = state_of(count, seed, sparse)
    other_velocity, other_residual = velocity.clone(), residual.clone()
    plain_velocity, accumulated = velocity.clone(), residual.clone()
    options = {"how": how, "wanted": wanted, "sample": sample, "scale": 0.7}

    sent = accumulate_and_select(gradient, velocity, residual, **options)
    expected = select_with_torch(gradient, other_velocity, other_residual, **options)
    accumulate(gradient, plain_velocity, accumulated, how=how, scale=0.7)

    assert torch.equal(sent.indices, expected.indices)
    assert torch.equal(sent.values, expected.values)
    assert torch.equal(velocity, other_velocity)
    assert torch.equal(residual, other_residual)
    assert sent.indices.numel() <= wanted
    assert bool((sent.indices.diff() > 0).all())
    assert bool((sent.values != 0).all())
    whole = residual.clone()
    whole[sent.indices] += sent.values
    assert torch.equal(whole, accumulated)
    kept = torch.ones(count, dtype=torch.bool)
    kept[sent.indices] = not mask
    assert torch.equal(velocity, plain_velocity * kept)


@settings(deadline=None, max_examples=examples(100))
@given(
    values=st.lists(st.integers(-5, 5), min_size=1, max_size=60),
    wanted=st.integers(1, 60),
)
def test_the_largest_are_those_of_a_stable_sort(values, wanted):
    magnitudes = torch.tensor(values, dtype=torch.float32).abs()
    order = np.argsort(-magnitudes.numpy(), kind="stable")[:wanted]
    assert largest(magnitudes, wanted).tolist() == sorted(order.tolist())


@settings(deadline=None, max_examples=examples(300))
@given(count=st.integers(1, 10**8), density=st.floats(1e-4, 1.0), step=st.integers(0, 10**6))
def test_a_sample_lies_in_the_tensor_and_is_large_enough(count, density, step):
    sample = sample_of(count, density, "name", step)
    assert 0 <= sample.start < min(sample.stride, count)
    assert sample.stride == 1 or sample.stride % 2
    assert 1 <= sample.wanted <= count
    assert sample == sample_of(count, density, "name", step)
    if sample.stride > 1:
        assert count // sample.stride >= min(count / 100, 2 / density) - 1


@pytest.mark.parametrize("density", [0.001, 0.01])
def test_a_sampled_threshold_takes_about_as_many_as_wanted(density):
    count = 1_000_000
    gradient, velocity, residual = state_of(count, 5, sparse=False)
    sent = accumulate_and_select(
        gradient,
        velocity,
        residual,
        how=Accumulation(momentum=0.9),
        wanted=wanted_count(count, density),
        sample=sample_of(count, density, "layer", 0),
    )
    assert 0.8 * density * count <= sent.indices.numel() <= density * count
    assert float(residual.abs().max()) <= 1.2 * float(sent.values.abs().min())


@settings(deadline=None, max_examples=examples(50))
@given(count=st.integers(1, 500), seed=st.integers(0, 1000))
def test_entries_are_added_as_torch_adds_them(count, seed):
    random = torch.Generator().manual_seed(seed)
    target, plain = torch.randn(2, 500, generator=random).unbind()
    plain.copy_(target)
    entries = Entries(
        torch.randperm(500, generator=random)[:count], torch.randn(count, generator=random)
    )
    add_entries(target, entries, 0.25)
    plain[entries.indices] += 0.25 * entries.values
    assert torch.equal(target, plain)


def test_a_threshold_that_is_far_too_high_is_lowered():
    """The sample sees the only large element; the others are found by lowering."""
    gradient = torch.ones(1000)
    gradient[0] = 6.0
    options = {"how": Accumulation(momentum=0.0), "wanted": 500, "sample": Sample(999, 0, 1)}
    for select in (accumulate_and_select, select_with_torch):
        residual = torch.zeros(1000)
        sent = select(gradient, torch.zeros(1000), residual, **options)
        assert sent.indices.tolist() == list(range(500))
