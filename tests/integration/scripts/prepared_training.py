"""A rank that trains by `prepare`: STORE RANK RANKS CASE. Prints what the case found, as JSON."""

import copy
import json
import sys
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import PacelineError
from paceline.core.plan import Mesh, Plan
from paceline.training import Trainer, prepare
from paceline.training.compression import DensitySchedule, DGCOptions
from paceline.training.optimizers import LARS, parameter_groups


def net(dtype=torch.float64):
    torch.manual_seed(3)
    inner = nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40))
    return nn.Sequential(inner, nn.Tanh(), nn.Linear(40, 3)).to(dtype)


def data(step, samples, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    shape = (samples, 6)
    return torch.randn(shape, generator=generator, dtype=dtype), torch.randn(
        samples, 3, generator=generator, dtype=dtype
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)


def train(prepared, rank, ranks, steps, spoil=None, dtype=torch.float64):
    """Train on this rank's part of each step's 8 samples per rank; return the losses."""
    model, optimizer = prepared
    losses = []
    for step in range(steps):
        given, wanted = (part.chunk(ranks)[rank] for part in data(step, 8 * ranks, dtype))
        if spoil is not None:
            given = spoil(step, given)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(given), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(model, optimizer, steps, ranks, clip=None):
    """Train in one process on the samples of all ranks."""
    for step in range(steps):
        given, wanted = data(step, 8 * ranks)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(given), wanted).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def far(model, other):
    states = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    pairs = [(a, b) for a, b in states if a.numel()]
    return max(float((full(a).double() - full(b).double()).abs().max()) for a, b in pairs)


def case_planned(rank, ranks, engine):
    """Three steps by a plan of four passes, whose layers are computed again."""
    model, forwards = net(), []
    model[0][0].register_forward_pre_hook(lambda *_: forwards.append(1))
    plan = Plan(mesh=Mesh(data=ranks), engine=engine, microbatches=4, recompute="full")
    prepared = prepare(model, sgd(model), plan, loss_fn=nn.functional.mse_loss)
    for step in range(3):
        given, wanted = (part.chunk(ranks)[rank] for part in data(step, 8 * ranks))
        prepared.optimizer.zero_grad()
        prepared.forward_backward(given, wanted)
        prepared.optimizer.step()
    reference = net()
    alone(reference, sgd(reference), 3, ranks)
    trained = prepared.state_dict()["model"]
    expected = reference.state_dict()
    return {
        "passes": prepared.options.microbatches,
        "forwards": len(forwards),
        "far": max(float((full(trained[key]) - expected[key]).abs().max()) for key in expected),
    }


def case_nan(rank, ranks, engine):
    """Rank 1 meets a NaN in step 2."""
    model = net()
    prepared = prepare(model, sgd(model), engine=engine)
    train(prepared, rank, ranks, 2)
    before = {key: full(v).clone() for key, v in prepared.model.state_dict().items()}

    def spoil(step, given):
        return given * float("nan") if rank == 1 else given

    try:
        train(prepared, rank, ranks, 1, spoil)
    except PacelineError as problem:
        after = prepared.model.state_dict()
        same = all(torch.equal(full(after[key]), value) for key, value in before.items())
        return {"what": problem.what, "where": problem.where, "same": same}
    return {}


def case_overflow(rank, ranks, engine):
    """In float16, the gradients of rank 0 overflow in step 1: no rank makes that step."""
    model = net(torch.float32)
    prepared = prepare(model, sgd(model), engine=engine, precision="float16")

    def spoil(step, given):
        return given * 3e4 if rank == 0 and step == 1 else given

    losses = train(prepared, rank, ranks, 6, spoil, torch.float32)
    values = torch.cat([full(v).flatten() for v in prepared.model.state_dict().values()])
    every = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(every, values)
    return {
        "skipped": prepared.before_step.skipped,
        "finite": bool(values.isfinite().all()),
        "equal": all(torch.equal(every[0], other) for other in every),
        "types": [str(prepared.model(data(0, 2, torch.float32)[0]).dtype)],
        "loss": [losses[0], losses[-1]],
    }


def case_clip(rank, ranks, engine):
    model, reference = net(), net()
    alone(reference, sgd(reference), 4, ranks, clip=0.1)
    prepared = prepare(model, sgd(model), engine=engine, clip_norm=0.1)
    train(prepared, rank, ranks, 4)
    return {"error": far(prepared.model, reference)}


def case_lars(rank, ranks, engine):
    def lars(model):
        return LARS(parameter_groups(model, weight_decay=0.01), 0.5, trust_coefficient=0.02)

    model, reference = net(), net()
    alone(reference, lars(reference), 4, ranks)
    prepared = prepare(model, lars(model), engine=engine)
    train(prepared, rank, ranks, 4)
    return {"error": far(prepared.model, reference)}


def case_compressed(rank, ranks, engine):
    """With all entries sent and no masking, compressed training is momentum SGD."""
    model, reference = net(torch.float32), net(torch.float32)
    optimizer = sgd(reference)
    for step in range(4):
        given, wanted = data(step, 8 * ranks, torch.float32)
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(given), wanted).backward()
        optimizer.step()
    options = DGCOptions(density=DensitySchedule(density=1.0), mask_momentum=False)
    prepared = prepare(model, sgd(model), engine=engine, compression=options)
    train(prepared, rank, ranks, 4, dtype=torch.float32)
    prepared.load_state_dict(copy.deepcopy(prepared.state_dict()))
    return {"error": far(getattr(prepared.model, "module", prepared.model), reference)}


class Awkward(nn.Module):
    """A tied and a frozen layer, tensors of 0 and 1 elements, a vector, and a rarely used layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(6, 3, bias=False)
        self.tied = nn.Linear(6, 3, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.rare, self.empty = nn.Linear(6, 3), nn.Parameter(torch.zeros(0, 3))
        self.one, self.shift = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.zeros(()))
        self.double()

    def forward(self, given, uses_rare):
        out = self.first(given) + self.tied(self.frozen(given)) * self.one + self.shift
        return out + self.empty.sum() + (self.rare(given) if uses_rare else 0)


def case_awkward(rank, ranks, engine):
    """Sparse and dense compression of a model with all that models have, and of accumulation.

    Rank 0 uses a layer in steps 0, 1, 4 ..., and in steps 1, 3, 5 ... rank 1 does: none in step 2.
    """
    steps = 7 if engine == "allreduce" else 0

    def uses(peer, step):
        return step % 4 in (0, 1) if peer == 0 else step % 2 == 1

    def loss_of(model, peer, step, half):
        given, wanted = data(1000 * peer + 2 * step + half, 8)
        return nn.functional.mse_loss(model(given, uses(peer, step)), wanted) / 2

    def sgd_of(model):
        return sgd(nn.ParameterList(p for p in model.parameters() if p.requires_grad))

    reference = Awkward()
    optimizer = sgd_of(reference)
    for step in range(steps):
        optimizer.zero_grad()
        for peer in range(ranks):
            for half in (0, 1):
                (loss_of(reference, peer, step, half) / ranks).backward()
        optimizer.step()
    found = {}
    for density in (1.0, 0.1):
        schedule = DensitySchedule(density=density, steps_per_stage=0)
        options = DGCOptions(density=schedule, mask_momentum=False)
        model = Awkward()
        wrapped, optimizer = prepare(model, sgd_of(model), engine=engine, compression=options)
        for step in range(steps):
            optimizer.zero_grad()
            with wrapped.no_sync():
                loss_of(wrapped, rank, step, 0).backward()
            loss_of(wrapped, rank, step, 1).backward()
            optimizer.step()
        values = torch.cat([p.detach().flatten() for p in model.parameters()])
        every = [torch.empty_like(values) for _ in range(ranks)]
        dist.all_gather(every, values)
        equal = all(torch.equal(every[0], other) for other in every)
        found[density] = {"error": far(model, reference), "equal": equal}
    return {"all": found[1.0], "few": found[0.1]}


def case_uneven(rank, ranks, engine):
    """Ranks with other numbers of samples and batches: every sample of a step counts alike."""
    sizes = [[8, 8, 8, 3], [8, 5], [2, 8, 1]]
    model, reference = net(), net()
    optimizer = sgd(reference)
    for step in range(4):
        parts = [data(100 * r + step, sizes[r][step]) for r in range(ranks) if step < len(sizes[r])]
        given, wanted = (torch.cat([part[k] for part in parts]) for k in (0, 1))
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(given), wanted).backward()
        optimizer.step()
    prepared = prepare(model, sgd(model), engine=engine)
    loader = [data(100 * rank + step, size) for step, size in enumerate(sizes[rank])]
    for given, wanted in prepared.batches(loader):
        prepared.optimizer.zero_grad()
        nn.functional.mse_loss(prepared.model(given), wanted).backward()
        prepared.optimizer.step()
    try:
        list(prepared.batches([] if rank == 1 else loader))
    except PacelineError as problem:
        empty = problem.what
    model = getattr(prepared.model, "module", prepared.model)
    return {"error": far(model, reference), "empty": empty}


def case_trainer(rank, ranks, engine):
    """Two epochs at once, and one after the other from a state, with unequal numbers of batches."""

    def make():
        model = net()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        loss_fn = nn.functional.mse_loss
        return Trainer(model, optimizer, loss_fn, lr_scheduler=scheduler, engine=engine)

    loader = [data(100 * rank + step, 4 + rank) for step in range(3 - rank)]
    whole, first, second = make(), make(), make()
    epochs = [epoch.number for epoch in whole.fit(loader, epochs=2)]
    last = list(first.fit(loader, epochs=1))[-1]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    list(second.fit(loader, epochs=2))
    pairs = zip(
        whole.prepared.model.state_dict().values(),
        second.prepared.model.state_dict().values(),
        strict=True,
    )
    return {
        "epochs": epochs,
        "samples": last.samples,
        "text": str(last),
        "same": all(torch.equal(full(a), full(b)) for a, b in pairs),
    }


def case_state(rank, ranks, engine):
    """One process goes on from the state of all ranks, and all ranks from its state."""

    def adam(model):
        return torch.optim.Adam(model.parameters(), 0.01)

    prepared = prepare(model := net(), adam(model), engine=engine)
    train(prepared, rank, ranks, 3)
    state = copy.deepcopy(prepared.state_dict())
    train(prepared, rank, ranks, 3)
    fresh = prepare(model := net(), adam(model), engine=engine)
    fresh.load_state_dict(state)
    train(fresh, rank, ranks, 3)
    found = {"same": far(fresh.model, prepared.model), "names": sorted(state["optimizer"]["state"])}
    if engine != "fsdp2":  # whose state is DTensors
        parameters = dict((reference := net()).named_parameters())
        reference.load_state_dict(state["model"])
        optimizer = adam(reference)
        saved = state["optimizer"]["state"]
        numbered = {n: saved[name] for n, name in enumerate(parameters)}
        plain = {**optimizer.state_dict(), "state": copy.deepcopy(numbered)}
        optimizer.load_state_dict(plain)
        alone(reference, optimizer, 3, ranks)
        found["alone"] = far(fresh.model, reference)
    return found


def case_scaling(rank, ranks, engine):
    """Strong scaling is one process on the same batches; weak scaling has other rates."""
    batches = [data(step, 8 * ranks + 1) for step in range(3)]
    model, reference = net(), net()
    optimizer = sgd(reference)
    for given, wanted in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(reference(given), wanted).backward()
        optimizer.step()
    prepared = prepare(model, sgd(model), engine=engine, scaling="strong")
    found = {}
    try:
        prepared.model(batches[0][0])
    except PacelineError as problem:
        found["whole"] = problem.what
    for given, wanted in prepared.batches(batches):
        found["rows"] = len(given)
        prepared.optimizer.zero_grad()
        nn.functional.mse_loss(prepared.model(given), wanted).backward()
        prepared.optimizer.step()
    found["error"] = far(prepared.model, reference)
    try:
        list(prepared.batches([data(rank, 8)]))
    except PacelineError as problem:
        found["other"] = problem.what
    rates = []
    for make in (sgd, lambda model: torch.optim.Adam(model.parameters(), 0.05)):
        optimizer = make(model := net())
        prepare(model, optimizer, engine=engine, scaling="weak")
        rates.append(optimizer.param_groups[0]["lr"])
    found["rates"] = rates
    optimizer = sgd(model := net())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    try:
        prepare(model, optimizer, engine=engine, scaling="weak")
    except PacelineError as problem:
        found["schedule"] = problem.what
    return found


def case_diverges(rank, ranks, engine):
    """Inputs that grow from step 60 on: the alarm names a step and a layer."""
    model = net(torch.float32)
    model[0][1] = model[1] = nn.Identity()  # a norm, or a tanh, would hide what grows

    def spoil(step, given):
        return given * (1.0 if step < 60 else 2.0 ** (step - 60))

    prepared = prepare(model, torch.optim.SGD(model.parameters(), 0.0), engine=engine)
    train(prepared, rank, ranks, 75, spoil, torch.float32)
    return {"said": [str(divergence) for divergence in prepared.before_step.divergences]}


def case_differ(rank, ranks, engine):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3 + rank))
    try:
        prepare(model, sgd(model), engine=engine)
    except PacelineError as problem:
        found = {"what": problem.what, "why": problem.why}
    try:
        prepare(model, sgd(model), engine=engine, clip_norm=1.0 + rank)
    except PacelineError as problem:
        found["options"] = problem.what
    try:
        prepare(model, torch.optim.SGD(model.parameters(), 0.1 + rank), engine=engine)
    except PacelineError as problem:
        found["rate"] = f"{problem.what}: {problem.why}"
    return found


def main():
    store, rank, ranks, backend, engine = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:6]
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    found = {name: globals()[f"case_{name}"](rank, ranks, engine) for name in sys.argv[6:]}
    group = weakref.ref(dist.group.WORLD)
    prepared = prepare(model := net(), sgd(model), engine=engine)
    train(prepared, rank, ranks, 2)
    dist.destroy_process_group()
    found["group_ended"] = group() is None
    del prepared  # DistributedDataParallel must not outlive its group
    print(json.dumps(found), flush=True)


main()
