"""Training loops as people write them in plain PyTorch: plain.py NAME STEPS, or NAME,NAME STEPS.

Each trains a small model on synthetic data for STEPS iterations, on any number of ranks. Every rank
writes what came of it into the folder of the variable LOOP_OUT: a digest of its weights, and how
many steps its author would say that it took.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline

WIDTH, BATCH, CLASSES = 384, 32, 10
LOG = logging.getLogger("loop")


class Net(nn.Module):
    """A class of the user's own: torch.compile treats torch's own modules differently."""

    def __init__(self, width=WIDTH, out=CLASSES):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1))
            for _ in range(3)
        )
        self.head = nn.Linear(width, out)
        self.recompute = False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def data(batches, *, seed=1):
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    count = batches * BATCH
    x = torch.randn(count, WIDTH, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (count,), generator=generator))


def loader(batches, **options):
    return DataLoader(data(batches, **options), batch_size=BATCH)


def endless(source):
    return itertools.chain.from_iterable(itertools.repeat(source))


def ddp(steps, model=None, wrap=lambda model: model):
    model = wrap(DistributedDataParallel(Net() if model is None else model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    for x, y in itertools.islice(endless(loader(20)), steps):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    return [model], steps


def ddp_of_compiled(steps):
    return ddp(steps, model=torch.compile(Net(), backend="aot_eager"))


def compiled_ddp(steps):
    return ddp(steps, wrap=lambda model: torch.compile(model, backend="aot_eager"))


def compiled_step(steps):
    """A compiled optimizer runs no hooks."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    for x, y in itertools.islice(endless(loader(20)), steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        step()
    return [model], steps


def accumulation(steps, every=4):
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    batches = enumerate(itertools.islice(endless(loader(20)), steps * every), 1)
    for i, (x, y) in batches:
        last = i % every == 0
        with contextlib.nullcontext() if last else model.no_sync():
            (nn.functional.cross_entropy(model(x), y) / every).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return [model], steps


def lbfgs(steps):
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)
    x, y = data(1)[:]

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return [model], steps


def evaluation(steps, every=5):
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    held_out = loader(4, seed=9)
    for i, (x, y) in enumerate(itertools.islice(endless(loader(20)), steps), 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if i % every == 0:
            model.eval()
            right = count = 0
            with torch.no_grad():
                for inputs, labels in held_out:
                    right += (model(inputs).argmax(1) == labels).sum()
                    count += len(labels)
            LOG.warning("step %d: accuracy %.3f", i, right.item() / count)
            model.train()
    return [model], steps


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        generator = torch.Generator().manual_seed(dist_rank() * 100 + worker.id)
        for i in range(self.count // worker.num_workers):
            yield torch.randn(WIDTH, generator=generator), i % CLASSES


def dist_rank():
    return int(os.environ["RANK"])


def iterable(steps):
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    stream = DataLoader(Stream(2 * steps * BATCH), batch_size=BATCH, num_workers=2)
    for x, y in itertools.islice(stream, steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [model], steps


def all_reduce(steps):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x, y in itertools.islice(endless(loader(20)), steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return [model], steps


def pipeline(steps):
    """Two stages on two ranks: activations forward, gradients back, by calls that block."""
    rank = dist.get_rank()
    first = rank % 2 == 0
    other = rank + 1 if first else rank - 1
    stage = Net(out=WIDTH if first else CLASSES)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-2)
    batches = endless(loader(20))
    for _ in range(steps):
        optimizer.zero_grad()
        x, y = next(batches)
        if first:
            hidden = stage(x)
            dist.send(hidden.detach(), other)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, other)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(BATCH, WIDTH)
            dist.recv(hidden, other)
            hidden.requires_grad_()
            nn.functional.cross_entropy(stage(hidden), y).backward()
            dist.send(hidden.grad, other)
        optimizer.step()
    return [stage], steps


def fsdp(steps):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in itertools.islice(endless(loader(20)), steps):
        nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [model], steps


def gan(steps, critics=1, mark=False):
    generator = DistributedDataParallel(Net(out=WIDTH), broadcast_buffers=False)
    critic = DistributedDataParallel(Net(out=1), broadcast_buffers=False)
    optimizer_d = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
    optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=5e-5)
    batches = endless(loader(20)) if mark else None
    for real, _ in itertools.islice(endless(loader(20)), steps):
        for _ in range(critics):
            if mark:
                real, _ = next(batches)
            with torch.no_grad():
                fake = generator(torch.randn(BATCH, WIDTH))
            optimizer_d.zero_grad()
            (critic(fake).mean() - critic(real).mean()).backward()
            optimizer_d.step()
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.1, 0.1)
        optimizer_g.zero_grad()
        (-critic(generator(torch.randn(BATCH, WIDTH))).mean()).backward()
        optimizer_g.step()
        if mark:
            paceline.step()
    return [generator, critic], steps


def wgan(steps):
    return gan(steps, critics=3)


def marked(steps):
    return gan(steps, critics=3, mark=True)


def no_optimizer(steps):
    """The script updates its parameters by hand."""
    model = DistributedDataParallel(Net())
    for x, y in itertools.islice(endless(loader(20)), steps):
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad
                parameter.grad = None
    return [model], steps


def by_hand(steps):
    """Neither an optimizer nor a loader."""
    model = DistributedDataParallel(Net())
    x, y = data(1)[:]
    for _ in range(steps):
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad
                parameter.grad = None
    return [model], steps


def recomputation(steps):
    model = Net()
    model.recompute = True
    return ddp(steps, model=model)


def update_in_backward(steps):
    model = Net()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=1e-2)

        def update(parameter, optimizer=optimizer):
            dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    for x, y in itertools.islice(endless(loader(20)), steps):
        nn.functional.cross_entropy(model(x), y).backward()
    return [model], steps


def average(steps, every=5):
    """Moving average of the weights, schedule, clipping, logging, checkpoints."""
    model = DistributedDataParallel(Net())
    shadow = torch.optim.swa_utils.AveragedModel(model.module, multi_avg_fn=ema())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for i, (x, y) in enumerate(itertools.islice(endless(loader(20)), steps), 1):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        shadow.update_parameters(model.module)
        LOG.warning("step %d: loss %.4f, rate %.2e", i, loss.item(), schedule.get_last_lr()[0])
        if i % every == 0 and dist.get_rank() == 0:
            torch.save(shadow.state_dict(), Path(os.environ["LOOP_OUT"]) / "shadow.pt")
    return [model, shadow], steps


def ema():
    return torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)


def nested(steps):
    """A teacher and a student: passes without gradients that are part of each step."""
    teacher, model = Net().eval(), DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x, _ in itertools.islice(endless(loader(20)), steps):
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
    return [model], steps


LOOPS = {
    function.__name__: function
    for function in (
        *(ddp, accumulation, lbfgs, evaluation, iterable, all_reduce, pipeline, fsdp),
        *(ddp_of_compiled, compiled_ddp, compiled_step),
        *(gan, wgan, marked, no_optimizer, by_hand),
        *(recomputation, update_in_backward, average, nested),
    )
}


def write_result(name, models, steps):
    """Write the digest of the weights of this rank, and its number of steps."""
    digest = hashlib.sha256()
    for model in models:
        for key, value in sorted(model.state_dict().items()):
            local = value.to_local() if hasattr(value, "to_local") else value
            digest.update(key.encode())
            digest.update(local.detach().cpu().contiguous().numpy().tobytes())
    path = Path(os.environ["LOOP_OUT"]) / f"{name}-{dist_rank()}.json"
    path.write_text(json.dumps({"digest": digest.hexdigest(), "steps": steps}))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1].split(","):
        torch.manual_seed(0)
        write_result(name, *LOOPS[name](int(sys.argv[2])))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
