"""Pollux's published tables: worked examples of its simulator, and times that nobody can beat."""

import itertools
from dataclasses import replace

import pytest
from support import queues

from paceline.scheduler.formats.adaptdl import read_adaptdl, read_training
from paceline.scheduler.placement import Shape

# application, devices on each node, batch size, epoch: goodput in steps of the initial batch size
# per second, by the simulator of the paper's artifact, and the precision of what is compared.
EXAMPLES = [
    ("cifar10", (4, 4), 2048, 50, 55.6286, 1e-5),
    ("cifar10", (2,), 2048, 0, 1.74748, 1e-5),
    ("bert", (1,), 384, 1, 1.06993, 1e-5),
    ("bert", (4, 2), 300, 0, 4.48569, 1e-5),
    ("deepspeech2", (1,) * 6, 320, 40, 182.8 / 20, 5e-4),
    ("ncf", (1,), 32768, 5, 4307.3, 1e-4),
    ("yolov3", (4,) * 5, 512, 25, 11.965, 0.01),  # between measured nodes: another rule than theirs
]
# Mean seconds with each job alone, always on its best devices and, if adaptive, best batch size.
ALONE_S = {
    True: {1: 860, 2: 948, 3: 845, 6: 907},
    False: {1: 1221, 2: 1531, 3: 1700, 6: 1384},
}


def shapes():
    """Every shape of up to 4 nodes; from 5 on, where only the numbers count, one of each number."""
    for nodes in range(1, 5):
        yield from itertools.combinations_with_replacement((4, 3, 2, 1), nodes)
    for nodes in range(5, 17):
        for devices in range(nodes, 4 * nodes + 1):
            least, more = divmod(devices, nodes)
            yield (least + 1,) * more + (least,) * (nodes - more)


SHAPES = [Shape("gpu", per_node, min(1, len(per_node) - 1)) for per_node in shapes()]


@pytest.mark.parametrize(("name", "per_node", "batch", "epoch", "expected", "precision"), EXAMPLES)
def test_goodput_of_the_published_tables(name, per_node, batch, epoch, expected, precision):
    training = read_training(queues.published("adaptdl", "profiles", name))
    _, goodput = replace(training, batch=batch).goodput(per_node)
    assert goodput[0, epoch] == pytest.approx(expected, rel=precision)


@pytest.mark.parametrize("adaptive", [True, False])
def test_jobs_alone_take_the_published_time(adaptive):
    alone_s = {}
    for number, expected_s in ALONE_S[adaptive].items():
        path = queues.published("adaptdl", "workloads", f"workload-{number}.csv")
        queue = read_adaptdl(path, adaptive=adaptive)
        total_s = 0.0
        for job in queue.jobs:
            if job.profile not in alone_s:
                alone_s[job.profile] = best_seconds(job, queue.rates)
            # Pollux decides at whole minutes, for the first time after one minute.
            wait_s = max(-job.submitted_s % 60, 60 - job.submitted_s)
            total_s += wait_s + job.start_s + alone_s[job.profile]
        assert total_s / len(queue.jobs) == pytest.approx(expected_s, rel=0.01)


def best_seconds(job, rates):
    shapes = [shape for shape in SHAPES if shape.devices <= job.limits[1]]
    seconds = done = 0.0
    while done < job.work:
        until = rates.constant_until(job, done)
        seconds += (until - done) / max(rates.alone(job, shape, done) for shape in shapes)
        done = until
    return seconds
