"""The number by which ranks see whether they have the same batch."""

import pytest
import torch

from paceline.training.uneven import checksum


def test_any_one_label_tells_two_batches_apart():
    images = torch.zeros(4000, 2)
    for place in (0, 1023, 1024, 3999):
        labels = torch.zeros(4000, dtype=torch.int64)
        labels[place] = 1
        assert checksum([images, labels]) != checksum([images, torch.zeros_like(labels)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_all_parts_of_a_large_tensor_count(dtype):
    plain = torch.zeros(300, 700, dtype=dtype)
    for row in (0, 2, 150, 299):
        other = plain.clone()
        other[row] = 1
        assert checksum(other) != checksum(plain)
    last = plain.clone()
    last[-1, -1] = 1
    assert checksum(last) != checksum(plain)


def test_equal_values_have_one_number_however_they_lie_in_memory():
    values = torch.randn(300, 700)
    assert checksum(values.t().contiguous().t()) == checksum(values)
    column = values[:, :5].clone()[:, 1]
    assert checksum(column) == checksum(column.clone())


def test_shapes_and_types_count():
    values = torch.zeros(6, 4)
    same = [values.view(4, 6), values.int(), values[:0], torch.zeros(())]
    assert len({checksum(other) for other in [values, *same]}) == 5
