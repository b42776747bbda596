"""Paced input delivers what plain input does, bit by bit, and never stalls."""

import json
import random

import numpy as np
import pytest
from support.launching import paceline

torch = pytest.importorskip("torch")

from paceline import store  # noqa: E402
from paceline.store.feed import paced_workers  # noqa: E402

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    path = tmp_path_factory.mktemp("paced") / "noise.pack"
    generator = np.random.default_rng(1)
    samples = ((f"{number:03}", generator.bytes(64)) for number in range(96))
    store.pack(store.Samples(samples), path)
    return path


def as_tensor(sample):
    return torch.frombuffer(bytearray(sample), dtype=torch.uint8).float() / 255


def trained(batches, epochs=2, steps=None):
    """Train a model that draws random numbers, too; return its losses and last weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Dropout(0.5), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(epochs):
        for number, (x, _) in enumerate(batches):
            if number == steps:
                break
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model[0].weight.detach()


@pytest.mark.parametrize(("kind", "ahead"), [("thread", 1), ("thread", 4), ("process", 4)])
def test_a_paced_loader_delivers_the_same(pack, kind, ahead):
    def run(pace):
        options = store.LoaderOptions(
            pace=pace, worker_kind=kind, workers=2, batches_ahead=ahead, timeout_s=TIMEOUT_S
        )
        with store.Loader(pack, 8, transform=as_tensor, options=options) as loader:
            return trained(loader)

    (plain, plain_weight), (paced, paced_weight) = run("off"), run("on")
    assert len(plain) == 24
    assert plain == paced
    assert torch.equal(plain_weight, paced_weight)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        # A worker's own random numbers, too.
        return torch.full((64,), number / 64) + torch.rand(64), random.random()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        worker = torch.utils.data.get_worker_info().id
        return ((torch.full((64,), worker + number / 64), number) for number in range(20))


class DrawingSampler(torch.utils.data.Sampler):
    """Draws from the generator of the loop while it goes."""

    def __iter__(self):
        return (int(torch.randint(0, 64, ())) for _ in range(48))

    def __len__(self):
        return 48


def data_loader(kind, *, pace, persistent):
    torch.manual_seed(3)
    given = {"dataset": Stream()} if kind == "stream" else {"dataset": Numbers()}
    if kind == "sampler":
        given["sampler"] = DrawingSampler()
    loader = torch.utils.data.DataLoader(
        **given, batch_size=4, num_workers=2, persistent_workers=persistent, timeout=TIMEOUT_S
    )
    return Paced(loader) if pace else loader


class Paced:
    """A DataLoader whose iterators are paced, as `paceline run` does for all of them."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        batches = iter(self.loader)
        paced_workers.pace(batches)
        return batches


@pytest.mark.parametrize(
    ("kind", "persistent", "steps"),
    [("shuffled", False, None), ("sampler", True, None), ("sampler", True, 3), ("stream", True, 5)],
)
def test_a_paced_data_loader_delivers_the_same(kind, persistent, steps):
    plain, paced = (
        trained(data_loader(kind, pace=pace, persistent=persistent), steps=steps)
        for pace in (False, True)
    )
    assert len(plain[0]) > 5
    assert plain[0] == paced[0]
    assert torch.equal(plain[1], paced[1])


def test_indices_are_held_back_until_the_optimizer_steps():
    loader = data_loader("shuffled", pace=True, persistent=False)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], 0.1)
    batches = iter(loader)
    paced = paced_workers.pacing_of(batches)
    paced._arrived = lambda _iterator: 2  # more than enough, whatever is so
    held = []
    for _ in batches:
        before = len(paced._held)
        optimizer.step()
        held.append((before, len(paced._held)))
    assert len(held) == 16
    assert any(before > after for before, after in held)


def test_a_loop_without_an_optimizer_is_not_paced():
    batches = iter(data_loader("shuffled", pace=True, persistent=False))
    paced = paced_workers.pacing_of(batches)
    for _ in batches:
        assert not paced._held


def test_an_error_of_a_worker_arrives():
    class Broken(Numbers):
        def __getitem__(self, number):
            if number == 30:
                raise ValueError("sample 30 is broken")
            return super().__getitem__(number)

    loader = torch.utils.data.DataLoader(Broken(), batch_size=4, num_workers=2, timeout=TIMEOUT_S)
    with pytest.raises(ValueError, match="sample 30 is broken"):
        trained(Paced(loader))


SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from paceline.store.feed import paced_workers

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
data = DataLoader(TensorDataset(torch.randn(64, 16), torch.randn(64, 2)), batch_size=4,
                  num_workers=1, shuffle=True)
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
losses = []
batches = iter(data)
for x, y in batches:
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
is_paced = paced_workers.pacing_of(batches) is not None
hooks = sum(len(weight._post_accumulate_grad_hooks or ()) for weight in model.parameters())
assert hooks == is_paced, hooks
with open(f"{sys.argv[1]}-{dist.get_rank()}.json", "w") as file:
    json.dump([is_paced, losses], file)
dist.destroy_process_group()
"""


def test_a_run_paces_the_data_loaders_of_a_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    cases = {
        "off": ("--pace", "off", "--record"),
        "on": ("--pace", "on", "--no-record"),
        "default": ("--record",),
    }
    found = {}
    for name, options in cases.items():
        words = ("run", "-n", 2, *options, "--out", tmp_path / f"run-{name}", "train.py", name)
        done = paceline(tmp_path, *words, threads=None)
        assert done.code == 0, done.out + done.err
        found[name] = [
            json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in (0, 1)
        ]
    has_gpu = torch.cuda.is_available()
    for name, expected in (("off", False), ("on", True), ("default", not has_gpu)):
        assert [is_paced for is_paced, _ in found[name]] == [expected] * 2
        assert [losses for _, losses in found[name]] == [losses for _, losses in found["off"]]


def test_a_data_loader_of_another_torch_is_left_alone_and_said(monkeypatch, caplog):
    monkeypatch.setattr(paced_workers, "_NEEDED", (*paced_workers._NEEDED, "_of_a_later_torch"))
    paced_workers._say_unpaced.cache_clear()
    loader = data_loader("shuffled", pace=True, persistent=False)
    for _ in range(2):
        batches = iter(loader)
        assert paced_workers.pacing_of(batches) is None
        assert len(list(batches)) == 16
    (said,) = caplog.messages
    assert "DataLoader has no _of_a_later_torch" in said
