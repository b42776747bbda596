"""Batches are stacked into recycled memory: the same tensors, and never memory that is in use."""

import gc

import numpy as np
import pytest
import torch

from paceline.store.feed.stacking import TensorStack, recycled

LARGE = (3, 200, 300)


def stacked(items):
    stack = TensorStack(len(items))
    for item in items:
        stack.add(item)
    return stack


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided"])
def test_a_stack_equals_that_of_torch(dtype, layout):
    generator = torch.Generator().manual_seed(0)
    items = [torch.randint(0, 200, LARGE, generator=generator).to(dtype) for _ in range(7)]
    if layout == "channels_last":
        items = [item.permute(1, 2, 0).contiguous().permute(2, 0, 1) for item in items]
    elif layout == "strided":
        items = [torch.cat([item, item], dim=2)[:, :, ::2] for item in items]
    stack = stacked(items)
    assert torch.equal(stack.batch, torch.stack(items))
    assert stack.batch.dtype == dtype
    if layout == "channels_last":
        assert stack.batch.is_contiguous(memory_format=torch.channels_last)
    else:
        assert stack.batch.is_contiguous()


def test_fewer_items_than_announced_are_a_smaller_batch():
    stack = TensorStack(9)
    items = [torch.full(LARGE, k, dtype=torch.uint8) for k in range(4)]
    for item in items:
        stack.add(item)
    assert torch.equal(stack.batch, torch.stack(items))


@pytest.mark.parametrize(
    "odd",
    [
        torch.zeros(3, 200, 301),
        torch.zeros(LARGE, dtype=torch.float64),
        torch.zeros(LARGE, requires_grad=True),
        (torch.zeros(LARGE), 3),
        np.zeros(LARGE, np.float32),
        "text",
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_what_is_no_tensor_of_the_same_kind_leaves_a_list(odd, place):
    items = [torch.full(LARGE, float(k)) for k in range(5)]
    items[place] = odd
    stack = stacked(items)
    assert stack.batch is None
    assert len(stack.items) == 5
    # A plain tensor that comes first was copied before another one came.
    assert stack.items[place] is odd or (place == 0 and torch.equal(stack.items[0], odd))
    for k in {0, 1, 2, 3, 4} - {place}:
        assert torch.equal(stack.items[k], torch.full(LARGE, float(k)))


def test_small_batches_are_left_to_torch():
    assert stacked([torch.zeros(10)] * 5).batch is None
    assert stacked([]).items == []


def test_memory_is_used_again_once_nothing_refers_to_it():
    shape = (37, 1000, 1000)
    first = recycled(shape, torch.uint8)
    address = first.data_ptr()
    view = first[5:6].permute(0, 2, 1)
    del first
    second = recycled(shape, torch.uint8)
    assert second.data_ptr() != address  # a view is still there
    view.fill_(7)
    second.fill_(1)
    assert view.eq(7).all()
    del view
    gc.collect()
    assert recycled(shape, torch.uint8).data_ptr() == address


def test_too_much_memory_is_an_error():
    with pytest.raises(MemoryError):
        recycled((2**62,), torch.uint8)
    assert stacked([torch.zeros(LARGE)]).batch is None  # one of them is less than is worth it
    stack = TensorStack(2**45)
    stack.add(torch.zeros(LARGE))
    assert stack.batch is None
    assert len(stack.items) == 1
