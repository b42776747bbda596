"""What torch builds on process groups, trained on two groups: one of ``paceline``, one of gloo.

    framework_cases.py STORE RANK RANKS FOLDER [CASE ...]

Prints {case: [numbers on paceline, numbers on gloo]}, or {case: what went wrong}.
"""

import contextlib
import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import paceline.collectives.horovod as hvd
from paceline.training import prepare

warnings.simplefilter("ignore")
RANK, RANKS = int(sys.argv[2]), int(sys.argv[3])
FOLDER = Path(sys.argv[4])
STEPS = 4


def mlp(norm=False):
    torch.manual_seed(7)
    middle = [nn.BatchNorm1d(32)] if norm else []
    return nn.Sequential(nn.Linear(16, 32), *middle, nn.ReLU(), nn.Linear(32, 4))


def batches(count=STEPS, rank=RANK):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)


def train(model, parameters=None, optimizer=None, count=STEPS):
    parameters = list(model.parameters()) if parameters is None else parameters
    optimizer = optimizer or torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for given, wanted in batches(count):
        loss = nn.functional.mse_loss(model(given), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def case_ddp(group):
    return train(DistributedDataParallel(mlp(), process_group=group, bucket_cap_mb=0.001))


def case_ddp_with_buffers(group):
    model = DistributedDataParallel(mlp(norm=True), process_group=group)
    losses = train(model)
    return [*losses, float(model.module[1].running_mean.sum())]


def case_ddp_with_unused_parameters(group):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = mlp(), mlp()

        def forward(self, given):
            return (self.first if RANK else self.second)(given)

    model = DistributedDataParallel(Branches(), process_group=group, find_unused_parameters=True)
    return train(model)


def case_ddp_accumulates_without_sync(group):
    model = DistributedDataParallel(mlp(), process_group=group)
    for number, (given, wanted) in enumerate(batches()):
        loss = nn.functional.mse_loss(model.module(given), wanted)
        if number < STEPS - 1:
            with model.no_sync():
                nn.functional.mse_loss(model(given), wanted).backward()
        else:
            loss = nn.functional.mse_loss(model(given), wanted)
            loss.backward()
    return [float(parameter.grad.sum()) for parameter in model.parameters()]


def case_ddp_with_hooks(group):
    losses = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = DistributedDataParallel(mlp(), process_group=group)
        model.register_comm_hook(group, hook)
        losses += train(model)
    return losses


def case_ddp_with_uneven_inputs(group):
    model = DistributedDataParallel(mlp(), process_group=group)
    with Join([model]):
        return train(model, count=2 + RANK)[:2]


def case_ddp_of_a_static_graph(group):
    return train(DistributedDataParallel(mlp(), process_group=group, static_graph=True))


def case_ddp_refuses_models_that_differ(group):
    model = mlp() if RANK else nn.Linear(16, 4)
    try:
        DistributedDataParallel(model, process_group=group)
    except RuntimeError:
        return [1.0]
    return [0.0]


def case_zero(group):
    model = DistributedDataParallel(mlp(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, process_group=group, lr=0.01
    )
    return train(model, optimizer=optimizer)


def case_fsdp2(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model)


def case_dtensor(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(8.0 * RANKS).reshape(2 * RANKS, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    turned = sharded.redistribute(mesh, [Shard(1)])  # an all-to-all
    doubled = sharded @ sharded.t().redistribute(mesh, [Replicate()])
    partial = DTensor.from_local(whole, mesh, [torch.distributed.tensor.Partial()])
    parts = [
        turned.full_tensor(),
        doubled.full_tensor(),
        partial.redistribute(mesh, [Replicate()]).to_local(),
        partial.redistribute(mesh, [Shard(0)]).to_local(),
    ]
    return [float((part * part).sum()) for part in parts]


def case_tensor_parallel(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    given, wanted = next(batches(rank=0))
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(given), wanted)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def case_pipelines(group):
    losses = []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        whole = mlp()
        part = [whole[0], whole[1:]][RANK]
        stage = PipelineStage(part, RANK, RANKS, torch.device("cpu"), group=group)
        run = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        given, wanted = next(batches(rank=0))
        reported = []
        if RANK == 0:
            run.step(given)
        else:
            run.step(target=wanted, losses=reported)
        losses += [float(loss) for loss in reported]
        losses += [float(parameter.grad.sum()) for parameter in part.parameters()]
    return losses


def case_stages_of_prepare(group):
    model, losses = mlp(), []
    prepared = prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        group=group,
        loss_fn=nn.functional.mse_loss,
        partitions=RANKS,
        microbatches=4,
    )
    for given, wanted in batches(rank=0):
        prepared.optimizer.zero_grad()
        losses.append(float(prepared.forward_backward(given, wanted)))
        prepared.optimizer.step()
    return losses


def case_checkpoints(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    model = fully_shard(mlp(), mesh=mesh)
    losses = train(model)
    folder = FOLDER / dist.get_backend(group)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)
    other = fully_shard(mlp(), mesh=mesh)
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=folder, process_group=group)
    other.load_state_dict(state["model"])
    return [*losses, *train(other)]


def case_functional_collectives(group):
    functional = torch.distributed._functional_collectives
    mine = torch.arange(4.0 * RANKS) + RANK
    results = [
        functional.all_reduce(mine, "sum", group),
        functional.all_gather_tensor(mine, 0, group),
        functional.reduce_scatter_tensor(mine, "sum", 0, group),
        functional.all_to_all_single(mine, None, None, group),
        functional.broadcast(mine, 0, group),
        *functional.all_reduce_coalesced([mine, mine + 1], "sum", group),
        *functional.all_gather_into_tensor_coalesced([mine, mine + 1], group),
        *functional.reduce_scatter_tensor_coalesced([mine, mine + 1], "sum", [0, 0], group),
    ]
    return [float((result * (1 + torch.arange(len(result)))).sum()) for result in results]


def case_compiled_collectives(group):
    functional = torch.distributed._functional_collectives

    def step(given):
        total = functional.all_reduce(given * 2, "sum", group)
        return functional.all_gather_tensor(total.sin(), 0, group).sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    return [float(compiled(torch.arange(6.0) + RANK)) for _ in range(2)]


def case_compiled_ddp(group):
    model = DistributedDataParallel(mlp(), process_group=group)
    return train(torch.compile(model, backend="aot_eager"))


def case_horovod_trains_as_ddp(group):
    if dist.get_backend(group) == "gloo":
        return [*train(DistributedDataParallel(mlp(), process_group=group)), 1e-4]
    hvd.init()
    model = mlp()
    if RANK:
        with torch.no_grad():
            model[0].weight.fill_(5.0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(plain, STEPS)  # puts a step of its own into the optimizer
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert isinstance(optimizer, torch.optim.SGD)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, STEPS, 1e-3)
    losses = train(model, optimizer=optimizer)
    for _ in range(STEPS):
        schedule.step()
    return [*losses, optimizer.param_groups[0]["lr"]]


def case_calls_of_horovod(group):
    if dist.get_backend(group) == "gloo":
        return [1.0]
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (RANK, RANKS)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (
        *(RANK, RANKS),
        *(0, 1),
    )
    mine = torch.arange(4.0) + RANK
    mean = torch.arange(4.0) + (RANKS - 1) / 2
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        assert torch.equal(hvd.allreduce(mine, compression=compression), mean)
    assert torch.equal(mine, torch.arange(4.0) + RANK)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5), mean * RANKS / 2)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max), torch.arange(4.0) + RANKS - 1)
    handle = hvd.allreduce_async_(inside := mine.clone())
    assert hvd.synchronize(handle) is inside
    assert hvd.poll(handle)
    assert torch.equal(inside, mean)
    assert torch.equal(hvd.grouped_allreduce([mine, mine])[1], mean)
    rows = hvd.allgather(torch.full((RANK + 1, 2), float(RANK)))
    assert rows[:, 0].tolist() == [float(rank) for rank in range(RANKS) for _ in range(rank + 1)]
    assert torch.equal(hvd.broadcast(mine, root_rank=1), torch.arange(4.0) + 1)
    got, counts = hvd.alltoall(torch.arange(3.0), torch.tensor([1, 2]))
    assert counts.tolist() == [RANK + 1] * RANKS
    assert got.tolist() == [0.0] * RANKS if RANK == 0 else [1.0, 2.0] * RANKS
    assert hvd.broadcast_object({"rank": RANK}, root_rank=1) == {"rank": 1}
    assert hvd.allgather_object(RANK) == list(range(RANKS))
    with contextlib.suppress(ValueError):
        hvd.allreduce(mine, op=2)
        raise AssertionError("Adasum was not refused")
    return [1.0]


def main():
    store = dist.FileStore(sys.argv[1], RANKS)
    dist.init_process_group(
        "paceline", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    gloo = dist.new_group(backend="gloo")
    cases = {name: call for name, call in globals().items() if name.startswith("case_")}
    results = {}
    for name in sys.argv[5:] or cases:
        try:
            results[name] = [cases[name](dist.group.WORLD), cases[name](gloo)]
        except Exception:  # noqa: BLE001  # whatever it is, the test shows it
            results[name] = traceback.format_exc()
    dist.destroy_process_group()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
