"""What must hold of a process group, one function a case; the ranks run them all, in one order.

Written after what torch's own suite (torch/testing/_internal/distributed/distributed_test.py)
checks; docs/guides/collectives.md lists what of it does not apply.

    process_group_cases.py STORE RANK RANKS BACKEND [CASE ...]

Prints {case: "" or what went wrong}.
"""

import contextlib
import json
import sys
import threading
import time
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
RANK, RANKS = int(sys.argv[2]), int(sys.argv[3])
BACKEND = sys.argv[4]
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)  # and int16, which gloo refuses
OPS = {
    "SUM": lambda stacked: stacked.sum(0),
    "PRODUCT": lambda stacked: stacked.prod(0),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}
COUNTS = (0, 1, 7, 1000, 65537)


def values(rank, count=1000, dtype=torch.float32, shape=None):
    """Return the tensor of a rank: small whole numbers, so that sums are exact in every type."""
    numbers = (torch.arange(count) * 7 + rank * 3) % 5 + 1
    return numbers.to(dtype).reshape(shape or (count,))


def all_values(count=1000, dtype=torch.float32, shape=None):
    return [values(rank, count, dtype, shape) for rank in range(RANKS)]


def reduced(op, count, dtype):
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    return OPS[op](torch.stack(all_values(count, wide))).to(dtype)


def same(got, expected):
    assert torch.equal(got, expected), f"got {got}, expected {expected}"


# --- the group -----------------------------------------------------------------------------------


def case_the_group_knows_its_backend_ranks_and_size():
    assert dist.get_backend() == BACKEND
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, RANKS)
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(RANKS))
    assert dist.group.WORLD.group_name
    assert dist.group.WORLD.name() == BACKEND


def case_subgroups_work_alone_and_beside_each_other():
    everyone, alone = dist.new_group(list(range(RANKS))), None
    for rank in range(RANKS):
        group = dist.new_group([rank])
        alone = group if rank == RANK else alone
    tensor = values(RANK)
    dist.all_reduce(tensor, group=alone)
    same(tensor, values(RANK))
    dist.all_reduce(tensor, group=everyone)
    same(tensor, reduced("SUM", 1000, torch.float32))
    assert dist.get_rank(alone) == 0
    for group in (everyone, alone):
        dist.destroy_process_group(group)


def case_a_subgroup_without_some_ranks_leaves_these_alone():
    members = list(range(1, RANKS))
    group = dist.new_group(members)
    tensor = values(RANK)
    if RANK in members:
        dist.all_reduce(tensor, group=group)
        same(tensor, torch.stack(all_values()[1:]).sum(0))
        dist.broadcast(tensor, 1, group=group)
    else:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        same(tensor, values(RANK))


def case_subgroups_are_made_by_size():
    group, groups = dist.new_subgroups(group_size=1)
    assert len(groups) == RANKS
    assert dist.get_world_size(group) == 1


# --- reductions ----------------------------------------------------------------------------------


def case_all_reduce_of_all_types_operations_and_sizes():
    for dtype in FLOATS + INTEGERS:
        for op in OPS:
            for count in COUNTS:
                tensor = values(RANK, count, dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
                same(tensor, reduced(op, count, dtype))


def case_short_integers__beyond_gloo():
    tensor = values(RANK, 9, torch.int16)
    dist.all_reduce(tensor)
    same(tensor, reduced("SUM", 9, torch.int16))
    dist.broadcast(tensor, 0)


def case_all_reduce_averages():
    tensor = values(RANK, 100, torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    torch.testing.assert_close(tensor, reduced("SUM", 100, torch.float64) / RANKS)


def case_all_reduce_of_bits_and_truths():
    for op, combine in (("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or)):
        tensor, expected = values(RANK, 9, torch.int32), values(0, 9, torch.int32)
        for rank in range(1, RANKS):
            expected = combine(expected, values(rank, 9, torch.int32))
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        same(tensor, expected)
    flags = torch.tensor([RANK == 0, True, False])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    same(flags, torch.tensor([True, True, False]))


def case_all_reduce_of_complex_numbers():
    tensor = torch.complex(values(RANK), values(RANK + 1))
    dist.all_reduce(tensor)
    same(tensor, sum(torch.complex(values(rank), values(rank + 1)) for rank in range(RANKS)))
    with raises(ValueError):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)


def case_all_reduce_of_a_sparse_tensor():
    tensor = torch.sparse_coo_tensor([[RANK]], [float(RANK + 1)], (RANKS,))
    dist.all_reduce(tensor)
    same(tensor.to_dense(), torch.arange(1.0, RANKS + 1))


def case_all_reduce_without_waiting():
    tensors = [values(RANK, count) for count in (10, 20, 30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    for tensor in tensors:
        same(tensor, reduced("SUM", len(tensor), torch.float32))


def case_a_work_has_a_future():
    tensor = values(RANK)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    same(doubled.wait(), reduced("SUM", 1000, torch.float32) * 2)
    same(future.value()[0], tensor)
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    assert called.wait(20)


def case_tensors_that_are_not_contiguous__beyond_gloo():
    for view in (lambda base: base.t(), lambda base: base[:, ::2], lambda base: base[:, 3]):
        base = values(RANK, 600, shape=(20, 30))
        untouched = base.clone()
        tensor = view(base)
        # Contiguous on the other ranks: which path is taken must not depend on it.
        tensor = tensor if RANK == 0 else tensor.contiguous()
        dist.all_reduce(tensor)
        same(tensor, sum(view(other) for other in all_values(600, shape=(20, 30))))
        if RANK == 0:
            mask = torch.ones_like(base, dtype=torch.bool)
            view(mask)[...] = False
            same(base[mask], untouched[mask])


def case_conjugate_and_negative_views__beyond_gloo():
    given = torch.complex(values(RANK), values(RANK + 1))
    gathered = [torch.empty(1000) for _ in range(RANKS)]
    dist.all_gather(gathered, given.conj().imag)
    same(gathered[0], -values(1))
    flipped = given.conj().imag
    dist.broadcast(flipped, 0)
    same(flipped, -values(1))
    same(given.imag, values(1))


def case_scalars_and_many_dimensions():
    scalar = torch.tensor(float(RANK))
    dist.all_reduce(scalar)
    assert scalar == sum(range(RANKS))
    box = values(RANK, 24, shape=(2, 3, 4))
    dist.all_reduce(box)
    same(box, sum(all_values(24, shape=(2, 3, 4))))


def case_coalesced_all_reduce():
    tensors = [values(RANK, count) for count in (3, 5)]
    dist.all_reduce_coalesced(tensors)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
    manager.wait()
    for tensor in tensors:
        same(tensor, reduced("SUM", len(tensor), torch.float32))


def case_reduce_to_each_root():
    for root in range(RANKS):
        for op in OPS:
            tensor = values(RANK, 100)
            dist.reduce(tensor, root, getattr(dist.ReduceOp, op))
            if root == RANK:
                same(tensor, reduced(op, 100, torch.float32))


def case_reduce_scatter():
    total = reduced("SUM", 30 * RANKS, torch.float32)
    mine = total[30 * RANK : 30 * (RANK + 1)]
    given = values(RANK, 30 * RANKS)
    output = torch.empty(30)
    dist.reduce_scatter_tensor(output, given)
    same(output, mine)
    same(given, values(RANK, 30 * RANKS))  # the input stays
    dist.reduce_scatter(output, [part.clone() for part in given.split(30)])
    same(output, mine)
    outputs = [torch.empty(30), torch.empty(30)]
    with dist.distributed_c10d._coalescing_manager():
        for filled in outputs:
            dist.reduce_scatter_tensor(filled, given)
    same(outputs[1], mine)


# --- copies --------------------------------------------------------------------------------------


def case_broadcast_from_each_root_of_all_types():
    others = (torch.bool, torch.complex64, torch.complex128)
    for root in range(RANKS):
        for dtype in FLOATS + INTEGERS + others:
            for count in COUNTS[:4]:
                tensor = values(RANK, count, dtype)
                dist.broadcast(tensor, root)
                same(tensor, values(root, count, dtype))


def case_all_gather():
    for dtype in (torch.float32, torch.int64, torch.complex64, torch.bool):
        gathered = [torch.empty(7, dtype=dtype) for _ in range(RANKS)]
        dist.all_gather(gathered, values(RANK, 7, dtype))
        for got, expected in zip(gathered, all_values(7, dtype), strict=True):
            same(got, expected)
    output = torch.empty(RANKS * 3, 4)
    dist.all_gather_into_tensor(output, values(RANK, 12, shape=(3, 4)))
    same(output.flatten(), torch.cat(all_values(12)))
    outputs = [torch.empty(RANKS * 5), torch.empty(RANKS * 6)]
    with dist.distributed_c10d._coalescing_manager():
        for filled in outputs:
            dist.all_gather_into_tensor(filled, values(RANK, len(filled) // RANKS))
    same(outputs[0], torch.cat(all_values(5)))
    lists = [[torch.empty(5), torch.empty(6)] for _ in range(RANKS)]
    dist.all_gather_coalesced(lists, [values(RANK, 5), values(RANK, 6)])
    same(lists[-1][1], values(RANKS - 1, 6))
    empty = [torch.empty(0) for _ in range(RANKS)]
    dist.all_gather(empty, torch.empty(0))


def case_all_gather_into_any_shape__beyond_gloo():
    for shape in ((RANKS * 12,), (RANKS, 12), (RANKS, 3, 4)):
        output = torch.empty(shape)
        dist.all_gather_into_tensor(output, values(RANK, 12, shape=(3, 4)))
        same(output.flatten(), torch.cat(all_values(12)))


def case_gather_and_scatter_at_each_root():
    for root in range(RANKS):
        gathered = [torch.empty(9) for _ in range(RANKS)] if root == RANK else None
        dist.gather(values(RANK, 9), gathered, dst=root)
        if root == RANK:
            same(torch.stack(gathered), torch.stack(all_values(9)))
        output = torch.empty(9)
        dist.scatter(output, all_values(9) if root == RANK else None, src=root)
        same(output, values(RANK, 9))
        complex_output = torch.empty(9, dtype=torch.complex64)
        given = all_values(9, torch.complex64) if root == RANK else None
        dist.scatter(complex_output, given, src=root)
        same(complex_output, values(RANK, 9, torch.complex64))


def case_wrong_lists_are_refused():
    with raises(ValueError):
        dist.scatter(torch.empty(1), [torch.empty(1)] * RANKS if RANK else None, src=0)
    with raises(ValueError):
        dist.gather(torch.empty(1), [torch.empty(1)] * RANKS if RANK else None, dst=0)
    with raises((RuntimeError, ValueError)):
        dist.all_gather([torch.empty(1)] * (RANKS + 1), torch.empty(1))
    with raises((RuntimeError, ValueError)):
        dist.all_gather_into_tensor(torch.empty(RANKS + 1), torch.empty(1))
    with raises((RuntimeError, ValueError)):
        dist.broadcast(torch.empty(1), RANKS)


def case_parts_that_do_not_divide_are_refused__beyond_gloo():
    with raises(ValueError):
        dist.all_to_all_single(torch.empty(RANKS + 1), torch.empty(RANKS + 1))
    with raises(ValueError):
        dist.reduce_scatter_tensor(torch.empty(1), torch.empty(RANKS + 1))


def case_all_to_all():
    for dtype in (torch.float32, torch.int32, torch.complex64):
        output = torch.empty(RANKS * 4, dtype=dtype)
        dist.all_to_all_single(output, values(RANK, RANKS * 4, dtype))
        parts = [whole.split(4)[RANK] for whole in all_values(RANKS * 4, dtype)]
        same(output, torch.cat(parts))
    # Rank r sends r + 1 rows to rank 0, and one more to each following rank.
    sends = [[sender + 1 + receiver for receiver in range(RANKS)] for sender in range(RANKS)]
    given = [values(rank, sum(sends[rank]) * 3, shape=(-1, 3)) for rank in range(RANKS)]
    receives = [sends[sender][RANK] for sender in range(RANKS)]
    output = torch.empty(sum(receives), 3)
    dist.all_to_all_single(output, given[RANK], receives, sends[RANK])
    expected = [given[sender].split(sends[sender])[RANK] for sender in range(RANKS)]
    same(output, torch.cat(expected))
    outputs = [torch.empty(4) for _ in range(RANKS)]
    dist.all_to_all(outputs, list(values(RANK, RANKS * 4).split(4)))
    same(torch.cat(outputs), torch.cat([whole.split(4)[RANK] for whole in all_values(RANKS * 4)]))


def case_all_to_all_of_unequal_tensors__beyond_gloo():
    given = [values(RANK, RANK + 1 + receiver) for receiver in range(RANKS)]
    outputs = [torch.empty(sender + 1 + RANK) for sender in range(RANKS)]
    dist.all_to_all(outputs, given)
    for sender, output in enumerate(outputs):
        same(output, values(sender, sender + 1 + RANK))


def case_objects():
    mine = {"rank": RANK, "text": "x" * (10 * RANK)}
    everyone = [{"rank": rank, "text": "x" * (10 * rank)} for rank in range(RANKS)]
    gathered = [None] * RANKS
    dist.all_gather_object(gathered, mine)
    assert gathered == everyone
    at_root = [None] * RANKS if RANK == 0 else None
    dist.gather_object(mine, at_root, dst=0)
    assert RANK or at_root == everyone
    sent = everyone if RANK == 0 else [None] * RANKS
    dist.broadcast_object_list(sent, 0)
    assert sent == everyone
    got = [None]
    dist.scatter_object_list(got, everyone if RANK == 0 else None, 0)
    assert got == [mine]


# --- messages ------------------------------------------------------------------------------------


def case_messages_in_crossing_orders():
    following, before = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    received = [torch.empty(100_000) for _ in range(2)]
    sends = [dist.isend(values(RANK, 100_000), following, tag=tag) for tag in (1, 2)]
    receives = [dist.irecv(received[tag - 1], before, tag=tag) for tag in (2, 1)]
    for work in [*receives, *sends]:
        work.wait()
    for tensor in received:
        same(tensor, values(before, 100_000))


def case_messages_by_tag_and_from_anyone():
    if RANK == 0:
        for _ in range(RANKS - 1):
            tensor = torch.empty(8)
            source = dist.recv(tensor)
            same(tensor, values(source, 8))
        for rank in range(1, RANKS):
            dist.send(values(0, 8), rank, tag=4)
    else:
        dist.send(values(RANK, 8), 0)
        tensor = torch.empty(8)
        assert dist.recv(tensor, 0, tag=4) == 0
        same(tensor, values(0, 8))


def case_batched_messages_in_a_ring():
    following, before = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    received = torch.empty(5000)
    batch = [
        dist.P2POp(dist.irecv, received, before, tag=3),
        dist.P2POp(dist.isend, values(RANK, 5000), following, tag=3),
    ]
    for work in dist.batch_isend_irecv(batch if RANK else batch[::-1]):
        work.wait()
    same(received, values(before, 5000))


def case_messages_pass_collectives_that_are_under_way():
    work = dist.all_reduce(values(RANK), async_op=True)
    if RANK == 0:
        dist.send(values(0), 1)
    elif RANK == 1:
        dist.recv(torch.empty(1000), 0)
    work.wait()


def case_large_messages_move_while_their_ranks_are_in_a_collective():
    following, before = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    receive = dist.irecv(received := torch.empty(1_000_000), before)
    if RANK % 2:  # the others send only after the collective
        dist.isend(values(RANK, 1_000_000), following).wait()
    dist.barrier()
    if not RANK % 2:
        dist.isend(values(RANK, 1_000_000), following).wait()
    receive.wait()
    same(received, values(before, 1_000_000))


def case_a_later_receive_ends_before_an_earlier_one_of_another_tag():
    if RANK == 0:
        early, late = torch.empty(8), torch.empty(8)
        waiting = dist.irecv(late, 1, tag=1)
        dist.recv(early, 1, tag=2)
        same(early, values(1, 8))
        assert not waiting.is_completed()
        dist.send(early, 1, tag=3)
        waiting.wait()
        same(late, values(1, 8) * 2)
    elif RANK == 1:
        dist.send(values(1, 8), 0, tag=2)
        dist.recv(torch.empty(8), 0, tag=3)
        dist.send(values(1, 8) * 2, 0, tag=1)


def case_messages_are_seen_to_end_without_a_wait__beyond_gloo():
    count = 300_000
    if RANK == 0:
        works = [dist.irecv(torch.empty(count), rank) for rank in range(1, RANKS)]
    else:
        works = [dist.isend(values(RANK, count), 0)]
    deadline = time.monotonic() + 60
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < deadline


def case_many_messages_between_all_ranks():
    peers = [rank for rank in range(RANKS) if rank != RANK]
    received = {(peer, tag): torch.empty(500 * tag) for peer in peers for tag in range(40)}
    works = [dist.isend(values(RANK, 500 * tag), peer, tag=tag) for peer, tag in received]
    works += [dist.irecv(received[key], key[0], tag=key[1]) for key in reversed(received)]
    for work in works:
        work.wait()
    for (peer, tag), tensor in received.items():
        same(tensor, values(peer, 500 * tag))


def case_messages_of_tensors_that_are_not_contiguous__beyond_gloo():
    following, before = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    wide = torch.empty(300, 400)
    receive = dist.irecv(wide.t(), before)
    send = dist.isend(values(RANK, 120_000).reshape(300, 400).t(), following)
    receive.wait()
    send.wait()
    same(wide, values(before, 120_000).reshape(300, 400))
    receive = dist.irecv(row := torch.empty(100_000), before)
    dist.isend(torch.ones(1).expand(100_000), following).wait()  # nothing can be written to it
    receive.wait()
    same(row, torch.ones(100_000))


def case_lists_of_objects_as_messages():
    if RANK == 0:
        dist.send_object_list([{"a": 1}, "b"], 1)
    elif RANK == 1:
        got = [None, None]
        assert dist.recv_object_list(got, 0) == 0
        assert got == [{"a": 1}, "b"]


# --- barriers ------------------------------------------------------------------------------------


def case_no_rank_leaves_a_barrier_before_all_have_come():
    store = dist.distributed_c10d._get_default_store()
    for turn in range(20):
        store.add(f"arrived {turn}", 1)
        dist.barrier()
        assert store.add(f"arrived {turn}", 0) == RANKS
    dist.barrier(async_op=True).wait()
    dist.barrier(group=dist.new_group(list(range(RANKS))))


def case_monitored_barrier():
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)


def case_a_rank_that_does_not_come_is_an_error_by_the_deadline():
    group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=1))
    if RANK == 0:
        with raises(RuntimeError if BACKEND == "gloo" else (RuntimeError, OSError)):
            dist.all_reduce(torch.ones(10), group=group)
    dist.barrier()


@contextlib.contextmanager
def raises(kinds):
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"nothing of {kinds} was raised")


def main():
    store = dist.FileStore(sys.argv[1], RANKS)
    dist.init_process_group(
        BACKEND, store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=30)
    )
    cases = {
        name: call
        for name, call in globals().items()
        if name.startswith("case_") and not (BACKEND == "gloo" and name.endswith("__beyond_gloo"))
    }
    results = {}
    for name in sys.argv[5:] or cases:
        try:
            cases[name]()
            results[name] = ""
        except Exception:  # noqa: BLE001  # whatever it is, the test shows it
            results[name] = traceback.format_exc()
    dist.destroy_process_group()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
