"""Every generator of schedules at a number of ranks, and what each operation must give."""

from __future__ import annotations

import numpy as np

from paceline.schedules import (
    Schedule,
    binomial,
    chain,
    chain_binomial,
    chain_chain,
    groups_of,
    halving_doubling,
    recursive_doubling,
    ring,
    torus,
    two_level_leader,
    two_level_sharded,
)

RANKS = (*range(1, 10), 16, 17)


def schedules(ranks: int) -> list[Schedule]:
    """Return schedules of every generator, with parameters that fit the number of ranks."""
    spread = ("all_reduce", "reduce_scatter", "all_gather")
    cases = [make(operation, ranks) for make in (ring, halving_doubling) for operation in spread]
    cases.append(recursive_doubling(ranks))
    for operation in ("reduce", "broadcast"):
        cases += trees(operation, ranks)
    for size in (1, 2, 3, 4) if ranks < 9 else (3, 4):
        hosts = interleaved(ranks, size)
        cases += [two_level_leader(hosts, across=across) for across in ("ring", "halving")]
        if ranks % size == 0:
            cases += [two_level_sharded(hosts, across=across) for across in ("ring", "halving")]
            cases.append(torus(hosts))
    return cases


def trees(operation: str, ranks: int) -> list[Schedule]:
    """Return reductions or broadcasts; of few ranks, from several roots."""
    cases = []
    for root in sorted({0, ranks // 2, ranks - 1} if ranks < 6 else {ranks // 2}):
        cases += [binomial(operation, ranks, root=root, chunks=chunks) for chunks in (1, 3)]
        cases.append(chain(operation, ranks, root=root, chunks=5))
        for size in (2, 3) if ranks < 9 else (8,):
            groups = groups_of(ranks, size)
            cases.append(chain_binomial(operation, groups, root=root, chunks=4))
            cases.append(chain_chain(operation, groups, root=root, chunks=4))
    return cases


def interleaved(ranks: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Return hosts of up to `size` ranks that are not neighbours."""
    count = -(-ranks // size)
    return tuple(tuple(range(host, ranks, count)) for host in range(count))


def inputs(ranks: int, count: int, dtype: str = "int64") -> list[np.ndarray]:
    """Return a buffer of small numbers for each rank, the same on every call."""
    generator = np.random.default_rng(ranks * 1_000_003 + count)
    return [generator.integers(-9, 9, count).astype(dtype) for _ in range(ranks)]


def expected(schedule: Schedule, buffers: list[np.ndarray], rank: int) -> tuple[slice, np.ndarray]:
    """Return where `rank` must hold a result, and the result there."""
    count = len(buffers[0])
    everything, nothing = slice(0, count), slice(0, 0)
    if schedule.operation == "broadcast":
        return everything, buffers[schedule.root]
    if schedule.operation == "all_gather":
        parts = [buffers[r][owned(schedule, r, count)] for r in range(schedule.ranks)]
        return everything, np.concatenate(parts)
    total = np.sum(buffers, axis=0)
    if schedule.operation == "all_reduce":
        return everything, total
    if schedule.operation == "reduce":
        place = everything if rank == schedule.root else nothing
    else:
        place = owned(schedule, rank, count)
    return place, total[place]


def replay(schedule: Schedule, buffers: list[np.ndarray]) -> list[np.ndarray]:
    """Return the buffers after all transfers, each of which reads data from before its step."""
    after = [buffer.copy() for buffer in buffers]
    before, step = [buffer.copy() for buffer in after], 0
    for transfer in schedule.transfers:
        if transfer.step != step:
            before, step = [buffer.copy() for buffer in after], transfer.step
        count, chunks = len(buffers[0]), schedule.chunks
        place = slice(transfer.begin * count // chunks, transfer.end * count // chunks)
        values = before[transfer.source][place]
        if transfer.reduce:
            after[transfer.destination][place] += values
        else:
            after[transfer.destination][place] = values
    return after


def owned(schedule: Schedule, rank: int, count: int) -> slice:
    """Return the elements of the chunks that a rank owns."""
    chunks = schedule.owned(rank)
    return slice(chunks.start * count // schedule.chunks, chunks.stop * count // schedule.chunks)
