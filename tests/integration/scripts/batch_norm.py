"""A rank of a model with batch normalisation over all ranks: STORE RANK RANKS BACKEND CASE..."""

import copy
import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from paceline.core.errors import PacelineError
from paceline.training import prepare

RANK, RANKS = int(sys.argv[2]), int(sys.argv[3])
BACKEND, *CASES = sys.argv[4:]
SAMPLES = [5, 2, 4, 3]


class Net(nn.Module):
    """Layers of each kind; one has neither weights nor running statistics, one averages these."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 3, 3), norm(3), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4, momentum=None), nn.Tanh())
        self.third = nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.BatchNorm1d(7, affine=False))
        self.plain = nn.BatchNorm1d(7, track_running_stats=False)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.plain(torch.relu(self.third(self.second(self.first(x))))))


def batch(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 2, 8, 8, generator=generator)
    return images, torch.randint(0, 3, (samples,), generator=generator)


def net(norm=nn.BatchNorm2d):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Net(norm)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def far(state, other):
    assert list(state) == list(other)
    return max(float((state[name] - other[name]).abs().max()) for name in state)


def trained_alone(model, steps, samples):
    optimizer = sgd(model)
    for step in range(steps):
        images, target = batch(samples, step)
        optimizer.zero_grad()
        functional.cross_entropy(model(images), target).backward()
        optimizer.step()
    return model


def training(parts, replica, norm=nn.BatchNorm2d, **options):
    """Return how far unequal batches of replicas bring a model from one process."""
    counts = SAMPLES[:parts]
    model = net(norm)
    alone = trained_alone(net(), 3, sum(counts))
    prepared = prepare(
        model,
        sgd(model),
        loss_fn=functional.cross_entropy,
        example_inputs=batch(2, 0)[0],
        deadline_s=60.0,
        **options,
    )
    own = slice(sum(counts[:replica]), sum(counts[: replica + 1]))
    for step in range(3):
        images, target = batch(sum(counts), step)
        prepared.optimizer.zero_grad()
        prepared.forward_backward(images[own], target[own])
        prepared.optimizer.step()
    state = prepared.state_dict()["model"]
    error = far(state, alone.state_dict()) if RANK == 0 or not prepared.is_divided else 0.0
    return {"error": error, "evaluated": evaluated(prepared, model, alone)}


def evaluated(prepared, model, alone):
    """Return how far the outputs of an evaluation are, on one rank after the other."""
    if prepared.is_divided:
        return 0.0
    model.eval()
    alone.eval()
    images, _ = batch(4 + RANK, 9)
    error = 0.0
    with torch.no_grad():
        for parts in ("first", "second"):  # no message: each rank has another number of images
            model_part, alone_part = getattr(model, parts), getattr(alone, parts)
            x = images if parts == "first" else alone.first(images)
            for _ in range(RANK + 1):
                error = max(error, float((model_part(x) - alone_part(x)).abs().max()))
    return error


def case_data():
    return training(RANKS, RANK, sync_batch_norm=True)


def case_synchronised():
    """SyncBatchNorm needs no option; the other layers are as they were given."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.SyncBatchNorm(3), nn.Flatten(), nn.Linear(108, 3))
    alone = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, 3))
    alone.load_state_dict(model.state_dict())
    values = [list(model.state_dict().values())]
    dist.broadcast_object_list(values)
    alone.load_state_dict(dict(zip(alone.state_dict(), values[0], strict=True)))
    trained_alone(alone, 3, RANKS * 3)
    prepared = prepare(model, sgd(model), loss_fn=functional.cross_entropy)
    for step in range(3):
        images, target = batch(RANKS * 3, step)
        prepared.optimizer.zero_grad()
        prepared.forward_backward(images.chunk(RANKS)[RANK], target.chunk(RANKS)[RANK])
        prepared.optimizer.step()
    return {"error": far(model.state_dict(), alone.state_dict())}


def case_ended():
    """The loaders end at different steps: a rank that repeats its last batch does not count."""
    model, alone = net(), net()
    own = sgd(alone)
    prepared = prepare(model, sgd(model), sync_batch_norm=True)
    loader = [batch(SAMPLES[RANK], 10 * RANK + step) for step in range(2 + (RANK == 0))]
    for images, target in prepared.batches(loader):
        prepared.optimizer.zero_grad()
        functional.cross_entropy(prepared.model(images), target).backward()
        prepared.optimizer.step()
    for step in range(3):
        ranks = range(RANKS if step < 2 else 1)
        parts = [batch(SAMPLES[rank], 10 * rank + step) for rank in ranks]
        images, target = (torch.cat(values) for values in zip(*parts, strict=True))
        own.zero_grad()
        functional.cross_entropy(alone(images), target).backward()
        own.step()
    return {"error": far(model.state_dict(), alone.state_dict())}


def case_stages():
    """Two stages of two replicas, a batch at once."""
    found = {}
    forms = {
        "1f1b": {"sync_batch_norm": True},
        "zero_bubble": {"sync_batch_norm": True, "schedule": "zero_bubble"},
        "interleaved": {"sync_batch_norm": True, "schedule": "interleaved"},
        "recompute": {"sync_batch_norm": True, "recompute": True},
    }
    for name, options in forms.items():
        found[name] = training(2, RANK % 2, partitions=2, replicas=2, microbatches=1, **options)
    found["sync"] = training(
        2,
        RANK % 2,
        nn.SyncBatchNorm,
        partitions=2,
        replicas=2,
        microbatches=1,
        sync_batch_norm=True,
    )
    return found


def case_offset():
    """In float32, with a mean of a thousand deviations, the variance keeps its digits."""
    whole = batch(sum(SAMPLES), 1)[0].float() + 1000
    model, alone = nn.BatchNorm2d(2).float(), nn.BatchNorm2d(2).double()
    prepared = prepare(model, sgd(model), sync_batch_norm=True)
    prepared.model(whole.chunk(RANKS)[RANK])
    alone(whole.double())
    return {"error": float((model.running_var - alone.running_var).abs().max())}


def error_of(call):
    try:
        call()
    except PacelineError as problem:
        return f"{problem} {problem.where}"
    return ""


def case_wide():
    """More channels than the first message has room for, with gradients."""
    whole = torch.randn(sum(SAMPLES), 300, generator=torch.Generator().manual_seed(1))
    layer, alone = nn.BatchNorm1d(300), nn.BatchNorm1d(300)
    prepared = prepare(layer, sgd(layer), sync_batch_norm=True)
    own, other = whole.chunk(RANKS)[RANK].clone(), whole.clone()
    prepared.model(own.requires_grad_()).pow(3).sum().backward()
    alone(other.requires_grad_()).pow(3).sum().backward()
    error = (own.grad - other.grad.chunk(RANKS)[RANK]).abs().max()
    return {"error": float(error)}


def case_parted():
    """Ranks call other layers, of other sizes, and one goes backwards while others do not."""
    model = net()
    prepared = prepare(model, sgd(model), sync_batch_norm=True)
    images = batch(2, RANK)[0]

    def other_layer():
        if RANK == 1:
            model.second[1](torch.zeros(2, 4, 3, 3))
        else:
            model.first[1](torch.zeros(2, 3, 3, 3))

    def goes_back():
        outputs = prepared.model(images)
        if RANK == 1:
            prepared.model(images)
        else:
            outputs.sum().backward()

    return {"layer": error_of(other_layer), "back": error_of(goes_back)}


def case_refused():
    """What layers that are synchronised without an option do not go with."""
    model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
    found = {
        name: error_of(lambda given=given: prepare(model, sgd(model), **given))
        for name, given in {
            "budget": {"memory_budget": 1 << 30},
            "overlap": {"overlap": True},
        }.items()
    }
    other = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) if RANK == 1 else model
    found["other"] = error_of(lambda: prepare(other, sgd(other)))
    return found


def case_single():
    """One sample on one rank: there is no variance; and an option that does not go with it."""
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    prepared = prepare(layer, sgd(layer), sync_batch_norm=True)
    found = {}
    try:
        prepared.model(torch.zeros(1 if RANK == 0 else 0, 3))
    except PacelineError as problem:
        found["one"] = str(problem)
    try:
        prepare(layer, sgd(layer), sync_batch_norm=True, memory_budget=1 << 30)
    except PacelineError as problem:
        found["budget"] = str(problem)
    return found


def main():
    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(sys.argv[1], RANKS),
        rank=RANK,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    found = {case: globals()[f"case_{case}"]() for case in CASES}
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(copy.deepcopy(found)))


if __name__ == "__main__":
    main()
