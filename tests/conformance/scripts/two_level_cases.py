"""The two-level paths between pretended hosts, which are given as "0,2/1,3": by host, its ranks.

    two_level_cases.py STORE RANK RANKS WIRE HOSTS[;HOSTS...] [CASE ...]

Prints {"HOSTS case": "" or what went wrong}.
"""

import json
import sys
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pretended_hosts import Hosts, rank_of

from paceline.collectives import backend
from paceline.core.errors import RankLost

RANK, RANKS = rank_of(sys.argv[2]), int(sys.argv[3])
WIRE = sys.argv[4]
LAYOUTS = sys.argv[5].split(";")
COUNTS = (1, 2, 3, 1000, 5003)  # a chunk has 2048 bytes of each host
ROW_COUNTS = (0, 1, 7, 1100)  # of a rank's part: a chunk has 1024 bytes of it, or less
OPS = ("SUM", "PRODUCT", "MIN", "MAX")


hosts = None  # of the cases that run now


def values(rank, count=1000, dtype=torch.float32):
    return ((torch.arange(count) * 7 + rank * 3) % 5 + 1).to(dtype)


def all_values(count, dtype):
    return torch.stack([values(rank, count, dtype) for rank in range(RANKS)])


def same(got, expected):
    assert torch.equal(got, expected), f"got {got}, expected {expected}"


def case_all_reduce_of_types_operations_and_sizes():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64):
        for count in COUNTS:
            tensor = values(RANK, count, dtype)
            dist.all_reduce(tensor)
            same(tensor, all_values(count, torch.int64).sum(0).to(dtype))
            tensor = values(RANK, count, dtype)
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            same(tensor, all_values(count, dtype).amax(0))
            tensor = values(RANK, count, dtype)
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            mean = all_values(count, torch.int64).sum(0).to(dtype)
            mean.div_(RANKS, rounding_mode=None if dtype.is_floating_point else "trunc")
            same(tensor, mean)


def case_all_reduce_of_what_is_not_contiguous():
    base = values(RANK, 600).reshape(20, 30)
    dist.all_reduce(base[:, ::2])
    total = all_values(600, torch.float32).sum(0).reshape(20, 30)
    same(base[:, ::2], total[:, ::2])
    same(base[:, 1::2], values(RANK, 600).reshape(20, 30)[:, 1::2])


def case_sums_on_the_wire_have_the_same_bits_everywhere():
    torch.manual_seed(RANK)
    tensor = torch.randn(10_001)
    exact = tensor.clone()
    dist.all_reduce(tensor)
    gathered = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(gathered, tensor)
    for other in gathered:
        same(other, tensor)
    gloo = dist.new_group(backend="gloo")
    dist.all_reduce(exact, group=gloo)
    error = (tensor - exact).abs().max() / exact.abs().max()
    assert error < (2**-7 if WIRE == "bfloat16" else 1e-6), error
    assert WIRE != "bfloat16" or error > 1e-6  # it was rounded indeed


def case_works_complete_in_order_and_apart_from_the_caller():
    tensors = [values(RANK, count) for count in (10, 1000, 100)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    doubled = works[1].get_future().then(lambda done: done.value()[0] * 2)
    works[2].wait()
    assert all(work.is_completed() for work in works)
    same(doubled.wait(), all_values(1000, torch.float32).sum(0) * 2)


def case_broadcast_and_reduce_at_each_root():
    for root in range(RANKS):
        for dtype in (torch.float32, torch.complex64, torch.bool):
            tensor = values(RANK, 501, dtype)
            dist.broadcast(tensor, root)
            same(tensor, values(root, 501, dtype))
        tensor = values(RANK, 501)
        dist.reduce(tensor, root)
        same(tensor, all_values(501, torch.float32).sum(0) if root == RANK else values(RANK, 501))


def case_reduce_scatter_of_types_operations_and_sizes():
    gloo = dist.new_group(backend="gloo")
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.uint8)
    cases = [(dtype, op, 7) for dtype in dtypes for op in OPS]
    cases += [(torch.float32, "SUM", count) for count in ROW_COUNTS]
    for dtype, op, count in cases:
        given = values(RANK, count * RANKS, dtype)
        if op == "PRODUCT":
            given = torch.ones_like(given) * (RANK % 2 + 1)
        expected = given.clone()
        dist.all_reduce(expected, getattr(dist.ReduceOp, op), group=gloo)
        got = torch.empty(count, dtype=dtype)
        dist.reduce_scatter_tensor(got, given, getattr(dist.ReduceOp, op))
        same(got, expected.view(RANKS, -1)[RANK])


def case_reduce_scatter_averages():
    if not hosts.are_even:
        return  # gloo's, which has no average of integers
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        total = sum(values(rank, 9 * RANKS, torch.int64) - 4 for rank in range(RANKS))
        mean = total.to(dtype)
        mean.div_(RANKS, rounding_mode=None if dtype.is_floating_point else "trunc")
        got = torch.empty(9, dtype=dtype)
        given = values(RANK, 9 * RANKS, dtype) - 4
        dist.reduce_scatter_tensor(got, given, dist.ReduceOp.AVG)
        same(got, mean.view(RANKS, -1)[RANK])


def case_reduce_scatter_of_lists():
    got = torch.empty(5)
    dist.reduce_scatter(got, list(values(RANK, 5 * RANKS).view(RANKS, 5).unbind(0)))
    same(got, all_values(5 * RANKS, torch.float32).sum(0).view(RANKS, 5)[RANK])


def case_reduce_scatter_of_what_is_not_contiguous():
    if not hosts.are_even:
        return  # gloo's, which fills other memory
    base = torch.zeros(5, 2)
    dist.reduce_scatter_tensor(base[:, 0], values(RANK, 10 * RANKS)[::2])
    same(base[:, 0], all_values(10 * RANKS, torch.float32).sum(0)[::2].view(RANKS, 5)[RANK])
    assert not base[:, 1].any()


def case_all_gather_of_types_and_sizes():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for count in ROW_COUNTS:
            if not count and not hosts.are_even:
                continue  # gloo refuses it
            gathered = torch.empty(RANKS * count, dtype=dtype)
            dist.all_gather_into_tensor(gathered, values(RANK, count, dtype))
            same(gathered, all_values(count, dtype).flatten())
            rows = [torch.empty(count, dtype=dtype) for _ in range(RANKS)]
            dist.all_gather(rows, values(RANK, count, dtype))
            same(torch.stack(rows), all_values(count, dtype))


def case_all_gather_of_complex_numbers_and_of_what_is_not_contiguous():
    if not hosts.are_even:
        return  # gloo's
    base = torch.zeros(RANKS * 300, 2, dtype=torch.complex64)
    given = torch.complex(values(RANK, 600), values(RANK + 1, 600))[::2]
    dist.all_gather_into_tensor(base[:, 0], given)
    numbers = [torch.complex(values(rank, 600), values(rank + 1, 600)) for rank in range(RANKS)]
    same(base[:, 0], torch.cat([rank_numbers[::2] for rank_numbers in numbers]))
    assert not base[:, 1].any()


def case_gather_and_scatter_at_each_root():
    for root in range(RANKS):
        for count in (7, 1100):
            rows = [torch.zeros(count) for _ in range(RANKS)] if root == RANK else None
            dist.gather(values(RANK, count), rows, dst=root)
            if rows:
                same(torch.stack(rows), all_values(count, torch.float32))
            given = [values(rank + root, count) for rank in range(RANKS)] if root == RANK else None
            got = torch.zeros(count)
            dist.scatter(got, given, src=root)
            same(got, values(RANK + root, count))


def case_barrier_after_calls_that_are_under_way():
    tensor = values(RANK, 5000)
    work = dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    assert work.is_completed()  # the barrier ran after it
    same(tensor, all_values(5000, torch.float32).sum(0))


def case_works_say_their_path():
    row, rows = values(RANK, 10), torch.empty(10 * RANKS)
    works = {
        "all_reduce": dist.all_reduce(row.clone(), async_op=True),
        "broadcast": dist.broadcast(row.clone(), 0, async_op=True),
        "barrier": dist.barrier(async_op=True),
        "all_gather": dist.all_gather_into_tensor(rows, row, async_op=True),
        "all_gather of a list": dist.all_gather(
            list(torch.empty(RANKS, 10).unbind(0)), row, async_op=True
        ),
        "reduce_scatter": dist.reduce_scatter_tensor(row.clone(), rows.clone(), async_op=True),
        "all_to_all": dist.all_to_all_single(rows.clone(), rows, async_op=True),
    }
    message = dist.isend if RANK == 0 else dist.irecv
    if RANK < 2:
        works["message"] = message(row.clone(), 1 - RANK)
    for work in works.values():
        work.wait()
    said = {call: getattr(work, "path", "gloo") for call, work in works.items()}
    two_levels = {"all_reduce", "broadcast", "barrier"}
    if hosts.are_even:
        two_levels |= {"all_gather", "all_gather of a list", "reduce_scatter"}
    expected = {call: "two levels" if call in two_levels else "gloo" for call in works}
    if RANK < 2 and WIRE == "mpi":
        expected["message"] = "mpi"
    assert said == expected, said


def case_all_of_it_on_tensors_of_inference_mode():
    with torch.inference_mode():
        tensor = values(RANK, 7)
        dist.all_reduce(tensor)
        same(tensor, all_values(7, torch.float32).sum(0))
        dist.broadcast(tensor, 1)
        dist.reduce(tensor, 0)
        row, rows = values(RANK, 7), torch.zeros(7 * RANKS)
        dist.all_gather_into_tensor(rows, row)
        same(rows, all_values(7, torch.float32).flatten())
        dist.reduce_scatter_tensor(row, rows)
        same(row, values(RANK, 7) * RANKS)


def check_losses(make_model, width):
    """Compare the last losses of a model on the group and on gloo."""
    losses = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        torch.manual_seed(7)
        model = make_model(group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(RANK)
        for _ in range(3):
            loss = model(torch.randn(8, width)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-2 if WIRE == "bfloat16" else 1e-5, atol=1e-6)


def case_fsdp2_trains_as_on_gloo():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    def make_model(group):
        model = torch.nn.Sequential(torch.nn.Linear(17, 63), torch.nn.Linear(63, 5))
        mesh = DeviceMesh.from_group(group, "cpu")
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        return model

    check_losses(make_model, 17)


def case_ddp_trains_as_on_gloo():
    def make_model(group):
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 4))
        return torch.nn.parallel.DistributedDataParallel(model, process_group=group)

    check_losses(make_model, 16)


def case_a_rank_that_does_not_come_is_an_error_where_it_is_waited_for():
    calls = {
        "all_reduce": lambda group: dist.all_reduce(torch.ones(10), group=group, async_op=True),
        "barrier": lambda group: dist.barrier(group, async_op=True),
        "all_gather": lambda group: dist.all_gather_into_tensor(
            torch.empty(10 * RANKS), torch.ones(10), group=group, async_op=True
        ),
    }
    if not hosts.are_even:
        del calls["all_gather"]  # gloo's
    everyone, limit = list(range(RANKS)), timedelta(seconds=2)
    groups = [dist.new_group(everyone, timeout=limit) for _ in calls]
    for group, call in zip(groups, calls.values(), strict=True):
        if RANK == 1:
            continue
        work = call(group)
        with pytest.raises(RankLost, match="rank"):
            work.wait()
        assert not work.is_success()
    dist.barrier()


def run_cases(layout, store):
    global hosts
    hosts = Hosts(layout, WIRE)
    backend.make_path = hosts.make_path
    dist.init_process_group(
        "paceline", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=30)
    )
    cases = {name: call for name, call in globals().items() if name.startswith("case_")}
    results = {}
    for name in sys.argv[6:] or cases:
        try:
            cases[name]()
            results[f"{layout} {name}"] = ""
        except Exception:  # noqa: BLE001  # whatever it is, the test shows it
            results[f"{layout} {name}"] = traceback.format_exc()
    dist.destroy_process_group()
    return results


def main():
    store = dist.FileStore(sys.argv[1], RANKS)
    results = {}
    for layout in LAYOUTS:
        results |= run_cases(layout, dist.PrefixStore(f"{layout}/", store))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
