"""Training loops of many shapes, one after the other; prints when each began and ended."""

import contextlib
import gc
import json
import logging
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

INPUTS = torch.ones(8, 16)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def lbfgs():
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = model(INPUTS).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def accumulation():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(3):
            model(INPUTS).square().mean().backward()
        optimizer.step()


def recomputation():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden = model[0](INPUTS)
    checkpoint(model[1:], hidden, use_reentrant=False).square().mean().backward()
    checkpoint(model[1:], model[0](INPUTS), use_reentrant=True).square().mean().backward()
    optimizer.step()


def step_in_backward():
    model = make_model()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def update(_, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(update)
    for _ in range(3):
        model(INPUTS).square().mean().backward()


class Unlucky(torch.optim.SGD):
    """Has no memory for its first step."""

    lucky = False

    def step(self, closure=None):
        if not self.lucky:
            self.lucky = True
            raise MemoryError
        return super().step(closure)


def step_that_raises():
    model = make_model()
    optimizer = Unlucky(model.parameters(), lr=0.1)
    model(INPUTS).square().mean().backward()
    with contextlib.suppress(MemoryError):
        optimizer.step()
    for _ in range(2):
        model(INPUTS).square().mean().backward()
        optimizer.step()


class Pair(torch.optim.Optimizer):
    """Steps two others inside its own step, and itself once more, as subclasses do."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.parts = [torch.optim.SGD(parameters[:2]), torch.optim.SGD(parameters[2:])]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class Derived(Pair):
    def step(self, closure=None):
        super().step(closure)


def optimizer_of_optimizers():
    model = make_model()
    optimizers = Pair(model.parameters()), Derived(model.parameters())
    for optimizer in optimizers:
        model(INPUTS).square().mean().backward()
        optimizer.step()


def saving():
    torch.save(make_model().state_dict(), "model.pt")
    with Path("stream.pt").open("wb") as stream:
        torch.save({"a": INPUTS}, stream)


def sharded_saving():
    state = {"model": make_model().state_dict()}
    torch.distributed.checkpoint.save(state, checkpoint_id="sharded", no_dist=True)


def copies():
    INPUTS.to("meta")
    INPUTS.to("cpu")
    INPUTS.to(torch.float64)
    torch.empty(4, 4, device="meta").copy_(torch.ones(4, 4))


def evaluation():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(INPUTS).square().mean()
    with torch.no_grad():
        model(INPUTS)
    loss.backward()
    optimizer.step()
    with torch.inference_mode():
        model(INPUTS)


class Computed(Dataset):
    """Samples that a module computes."""

    def __init__(self):
        self.module = nn.Linear(16, 16)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            return self.module(INPUTS[0]) + index


def computed_input():
    for _ in DataLoader(Computed(), batch_size=2):
        pass


def clipping():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters())
    model(INPUTS).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()


def validation():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for inputs in DataLoader(INPUTS, batch_size=4):
            model(inputs).square().mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for inputs in DataLoader(INPUTS, batch_size=2):
                model(inputs)
        model.train()


def host_work():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for _ in range(2):
        loss = model(INPUTS).square().mean()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step(loss.item())
        logging.getLogger("loops").warning("a line")
        gc.collect()


def not_a_number():
    nothing = torch.tensor(float("nan"))
    for read in (nothing.item, nothing.tolist, lambda: float(nothing), lambda: f"{nothing:.3f}"):
        read()
    float(torch.ones(1)), INPUTS.tolist(), torch.ones(()).item()


def main():
    sections = {}
    for name in sys.argv[1:]:
        begin = time.monotonic_ns()
        globals()[name]()
        sections[name] = [begin, time.monotonic_ns()]
    print(json.dumps(sections))


if __name__ == "__main__":
    main()
