"""Trains small models in every way in which torch compiles; writes what came of each case.

    compile_cases.py OUT BACKEND CASE ...

For each case `OUT-RANK.json` has a digest of the weights, the graphs that Dynamo captured (code),
its counters, and all warnings. A recorded run must write the very same file as an unrecorded one.
"""

import hashlib
import io
import json
import logging
import os
import sys
import warnings
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

STEPS = 3
WIDTH = 16


class Block(nn.Module):
    """A module of the script's own: Dynamo compiles its frames, as it does not torch's own."""

    def __init__(self, recompute=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm = nn.BatchNorm1d(2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.recompute = recompute

    def inner(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))

    def forward(self, x):
        if self.recompute:
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x).to(torch.float64).to(x.dtype)


def own():
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))


def torchs():
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    )


class Graphs:
    """A backend that keeps the code of each graph and has another one compile it."""

    def __init__(self, backend):
        self.backend = torch._dynamo.lookup_backend(backend)
        self.codes = []

    def __call__(self, graph, inputs, **kwargs):
        self.codes.append(graph.code)
        return self.backend(graph, inputs, **kwargs)


def batches():
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    samples = [(torch.randn(WIDTH, generator=generator), torch.ones(1)) for _ in range(8 * STEPS)]
    return DataLoader(samples, batch_size=8)


def train(model, *, call=None, step=None, parameters=None):
    """Train `model`; `call` is what the loop calls in its place, `step` in place of the step."""
    call = model if call is None else call
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = step(optimizer) if step else optimizer.step
    for inputs, target in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(call(inputs), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step()
    return model


# --- cases: each returns a module, or a list of tensors ------------------------------------------


def eager_ddp(backend):
    return train(DistributedDataParallel(own()))


def compiled_ddp_of_torchs_modules(backend):
    model = DistributedDataParallel(torchs())
    return train(model, call=torch.compile(model, backend=backend))


def compiled_ddp_of_own_modules(backend):
    model = DistributedDataParallel(own())
    return train(model, call=torch.compile(model, backend=backend))


def ddp_of_compiled(backend):
    return train(DistributedDataParallel(torch.compile(own(), backend=backend)))


def compiled_fsdp(backend):
    model = own()
    for child in model:
        fully_shard(child)
    fully_shard(model)
    return train(model, call=torch.compile(model, backend=backend))


def compiled_optimizer(backend):
    return train(own(), step=lambda optimizer: torch.compile(optimizer.step, backend=backend))


def compiled_optimizer_in_a_function(backend):
    def make(optimizer):
        @torch.compile(backend=backend)
        def step():
            optimizer.step()

        return step

    return train(own(), step=make)


def full_graph(backend):
    model = own()
    return train(model, call=torch.compile(model, backend=backend, fullgraph=True))


def recomputed(backend):
    model = nn.Sequential(Block(recompute=True), nn.Linear(WIDTH, 1))
    return train(model, call=torch.compile(model, backend=backend))


def recomputed_eagerly(backend):
    """Activation checkpointing by the eager code that compiled blocks are called from."""
    del backend
    model = own()
    first, rest = model[0], model[1:]

    def call(inputs):
        hidden = checkpoint(first, inputs, use_reentrant=False)
        return checkpoint(rest, hidden, use_reentrant=True)

    return train(model, call=call)


def whole_step(backend):
    """One compiled function that has the forward pass, the backward pass and the step in it."""
    model = own()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(backend=backend)
    def step(inputs, target):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    for inputs, target in batches():
        step(inputs, target)
    return model


def refused_calls(backend):
    """A compiled function that calls what Dynamo never traces."""
    model = own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend=backend)
    def epoch():
        for inputs, target in batches():
            model.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), target)
            torch.autograd.backward(loss)
            optimizer.step()
            torch.save(model.state_dict(), io.BytesIO())

    epoch()
    return model


def reset(backend):
    """Dynamo forgets what it compiled, and compiles again."""
    model = own()
    for _ in range(2):
        torch.compiler.reset()
        train(model, call=torch.compile(model, backend=backend, fullgraph=True))
    return model


def on_device(backend):
    """A compiled model on a GPU, as CUDA graphs."""
    model = own().cuda()
    train(model, call=lambda inputs: torch.compile(model, backend=backend)(inputs.cuda()).cpu())
    return model.cpu()


def captured(backend):
    """A step that the script captures as a CUDA graph itself, and replays."""
    del backend
    model = nn.Linear(WIDTH, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(8, WIDTH, device="cuda")

    def step():
        optimizer.zero_grad(set_to_none=True)
        model(inputs).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()
    for _ in range(STEPS):
        graph.replay()
    torch.cuda.synchronize()
    return model.cpu()


def breaking(backend):
    """A model that breaks its graph, saves amid the loop, and moves tensors by every name."""

    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x):
            x = self.block(x)
            print(end="")
            scale = torch.ones(1).copy_(torch.ones(1)).cpu()
            return self.head(x * scale.to(x))

    model = Breaking()
    return train(model, call=torch.compile(model, backend=backend))


def functional(backend):
    """torch.func inside a graph, and around a model in eager mode."""
    model = own().eval()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    buffers = dict(model.named_buffers())
    inputs = next(iter(batches()))[0]

    def loss(parameters, sample):
        out = torch.func.functional_call(model, (parameters, buffers), (sample.unsqueeze(0),))
        return out.square().mean()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))
    eager = per_sample(parameters, inputs)
    compiled = torch.compile(per_sample, backend=backend)(parameters, inputs)
    return [*eager.values(), *compiled.values()]


def functional_collective(backend):
    """Collectives in a graph."""
    from torch.distributed import _functional_collectives as collectives

    @torch.compile(backend=backend, fullgraph=True)
    def reduced(x):
        return collectives.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    return [reduced(torch.full((4,), float(i))) for i in range(3)]


# --- what came of them ---------------------------------------------------------------------------


class Logged(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def outcome(case, backend):
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs, logged = Graphs(backend), Logged()
    for name in ("torch", None):
        logging.getLogger(name).addHandler(logged)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = case(graphs)
    for name in ("torch", None):
        logging.getLogger(name).removeHandler(logged)
    digest = hashlib.sha256()
    for tensor in result if isinstance(result, list) else result.state_dict().values():
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    counters = torch._dynamo.utils.counters
    return {
        "weights": digest.hexdigest(),
        "graphs": graphs.codes,
        "counters": {name: dict(counters[name]) for name in ("frames", "stats")},
        "breaks": sorted(counters["graph_break"].values()),
        "reasons": dict(counters["graph_break"]),
        "warnings": [str(warning.message) for warning in warned] + logged.texts,
    }


def sample_every_step():
    """Have the recorder, if there is one, look closely at all steps instead of a few."""
    name = "paceline.trace.collectors.sampled_steps"
    if name in sys.modules:
        sys.modules[name].SampledSteps.is_sampled = lambda *_: True
        sys.modules[name].SampledSteps.next_step = lambda *_: 0


def main():
    out, backend, *names = sys.argv[1:]
    sample_every_step()
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(1))
    outcomes = {name: outcome(globals()[name], backend) for name in names}
    Path(f"{out}-{dist.get_rank()}.json").write_text(json.dumps(outcomes, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
