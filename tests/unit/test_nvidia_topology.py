"""The matrix of nvidia-smi becomes distances that a mapping can use."""

import numpy as np
import pytest

from paceline.core.errors import CorruptData
from paceline.scheduler.formats.nvidia_topology import gpu_distances
from paceline.scheduler.state.mapping import map_ranks

PAIRS = (  # two GPUs on a bridge below each CPU, and a network card
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tSYS\tNV12\tSYS\tNODE\t0-51,104-155\t0\t\tN/A\n"
    "GPU1\tSYS\t X \tSYS\tNV12\tSYS\t52-103,156-207\t1\t\tN/A\n"
    "GPU2\tNV12\tSYS\t X \tSYS\tNODE\t0-51,104-155\t0\t\tN/A\n"
    "GPU3\tSYS\tNV12\tSYS\t X \tSYS\t52-103,156-207\t1\t\tN/A\n"
    "NIC0\tNODE\tSYS\tNODE\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n"
    "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes\n"
)


def test_distances_are_in_the_order_of_the_links():
    distance = gpu_distances(PAIRS)
    assert distance.shape == (4, 4)
    assert np.array_equal(distance, distance.T)
    assert not distance.diagonal().any()
    assert distance[0, 2] == pytest.approx(1 / 300e9)
    assert distance[0, 1] == pytest.approx(1 / 6e9)


def test_ranks_that_talk_a_lot_get_the_bridged_pairs():
    traffic = np.zeros((4, 4))
    traffic[0, 1] = traffic[1, 0] = traffic[2, 3] = traffic[3, 2] = 1e9  # two pairs
    traffic[0, 2] = traffic[1, 3] = 1e6
    mapping = map_ranks(traffic, gpu_distances(PAIRS))
    assert {frozenset(mapping[:2]), frozenset(mapping[2:])} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }


def test_one_gpu_is_a_matrix_too():
    text = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\t0\n"
    assert gpu_distances(text).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no matrix of GPUs: 0 in the header"),
        ("\tGPU0\tGPU1\nGPU0\t X \tSYS\n", "2 in the header, 1 rows"),
        ("\tGPU0\tGPU1\nGPU0\t X \tQPI\nGPU1\tQPI\t X \n", "'QPI' is no known connection"),
        ("\tGPU0\tGPU1\nGPU0\t X \nGPU1\tSYS\t X \n", "1 cells for 2 GPUs"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(CorruptData, match=message):
        gpu_distances(text)
