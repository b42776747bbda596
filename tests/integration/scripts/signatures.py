"""Calls what a recorder may wrap in every legal way; prints what each call came to."""

import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

STATE = {"a": torch.arange(1000.0)}
TIMEOUT = timedelta(seconds=60)


def saves(folder):
    by_keyword = folder / "keyword.pt"
    torch.save(STATE, folder / "plain.pt")
    torch.save(obj=STATE, f=by_keyword)
    torch.save(STATE, f=str(folder / "mixed.pt"))
    torch.save(STATE, folder / "protocol.pt", pickle_protocol=2)
    with (folder / "stream.pt").open("wb") as stream:
        torch.save(obj=STATE, f=stream)
    return [sorted(torch.load(path)) for path in sorted(folder.glob("*.pt"))]


def copies(_):
    source, target = torch.arange(6.0), torch.zeros(6)
    yield source.to("meta").device.type
    yield source.to(device="meta").device.type
    yield str(source.to(torch.float64).dtype)
    yield str(source.to(dtype=torch.int32).dtype)
    yield str(source.to(torch.device("cpu"), torch.float16, True, True).dtype)
    yield source.to(tensor=torch.zeros(1, dtype=torch.int8)).tolist()
    yield source.to(target, non_blocking=True, copy=True).tolist()
    yield source.cpu().tolist()
    yield source.cpu(memory_format=torch.preserve_format).tolist()
    yield target.copy_(source).tolist()
    yield target.copy_(other=source + 1).tolist()
    yield target.copy_(source, True).tolist()
    yield target.copy_(source, non_blocking=True).tolist()
    yield torch.Tensor.to(source, "meta").device.type
    yield torch.empty(6, device="meta").copy_(other=source).device.type


def gradients(_):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(2, 3)

    def closure():
        loss = model(inputs).sum()
        loss.backward()
        return loss

    model(input=inputs).sum().backward()
    model(inputs).sum().backward(retain_graph=True)
    model(inputs).backward(gradient=torch.ones(2, 1))
    model(inputs).backward(torch.ones(2, 1), inputs=list(model.parameters()))
    torch.autograd.backward(tensors=model(inputs).sum())
    torch.autograd.backward([model(inputs)], grad_tensors=[torch.ones(2, 1)])
    yield nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    yield nn.utils.clip_grad_norm_(
        parameters=model.parameters(), max_norm=0.5, norm_type=1.0, error_if_nonfinite=True
    ).item()
    optimizer.step()
    yield optimizer.step(closure).item()
    yield optimizer.step(closure=closure).item()
    optimizer.zero_grad(False)
    yield model.weight.grad.tolist()
    optimizer.zero_grad(set_to_none=True)
    yield model.weight.grad
    model.zero_grad(False)
    model.zero_grad(set_to_none=True)
    yield model.weight.tolist()
    loader = DataLoader(list(range(4)), batch_size=2)
    yield [batch.tolist() for batch in loader]
    iterator = iter(loader)
    yield next(iterator).tolist()


def collectives(_):
    rank = dist.get_rank()
    group = dist.new_group([0, 1], timeout=TIMEOUT)
    value = torch.full((4,), float(rank))
    dist.all_reduce(value)
    yield value.tolist()
    dist.all_reduce(tensor=value, op=dist.ReduceOp.MAX, group=group)
    yield value.tolist()
    for wait in (
        lambda work: work.wait(),
        lambda work: work.wait(TIMEOUT),
        lambda work: work.wait(timeout=TIMEOUT),
    ):
        work = dist.all_reduce(value, async_op=True)
        yield bool(wait(work)), work.is_completed()
    dist.broadcast(value, 1)
    dist.broadcast(tensor=value, src=0, group=group)
    dist.broadcast(value, group=group, group_src=1)
    dist._broadcast_coalesced(dist.group.WORLD, [value], 1024)
    dist._broadcast_coalesced(
        process_group=dist.group.WORLD, tensors=[value], buffer_size=1024, src=1
    )
    dist.reduce(value, dst=1)
    parts = [torch.empty(4) for _ in range(2)]
    dist.gather(value, parts if rank == 1 else None, dst=1)
    dist.scatter(value, parts if rank == 1 else None, src=1)
    yield value.tolist()
    dist.barrier()
    dist.barrier(group)
    dist.barrier(group=group, async_op=True).wait()
    dist.barrier(device_ids=None)
    dist.monitored_barrier()
    dist.monitored_barrier(group=group, timeout=TIMEOUT, wait_all_ranks=True)


def messages(_):
    rank, value = dist.get_rank(), torch.ones(3)
    if rank == 0:
        dist.send(value, 1)
        dist.send(tensor=value * 2, dst=1, tag=4)
        dist.send(value * 3, group_dst=1)
        yield dist.isend(value * 4, 1, tag=9).wait() is not None
    else:
        yield dist.recv(value, 0), value.tolist()
        yield dist.recv(tensor=value, src=0, tag=4), value.tolist()
        yield dist.recv(value), value.tolist()
        work = dist.irecv(value, 0, tag=9)
        work.wait()
        yield value.tolist()
    kind = dist.isend if rank == 0 else dist.irecv
    for work in dist.batch_isend_irecv([dist.P2POp(kind, value, 1 - rank)]):
        work.wait()
    yield value.tolist()


def main():
    dist.init_process_group("gloo")
    folder = Path(f"{os.environ['SIGNATURES']}-{dist.get_rank()}")
    folder.mkdir()
    found = {
        calls.__name__: list(calls(folder))
        for calls in (saves, copies, gradients, collectives, messages)
    }
    (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
