"""The built-in training script of `paceline characterize`: an ordinary loop, run like any other.

Run as a program it trains; as a module it offers the steps of its models to the prediction. Each
epoch trains on the same samples, in full batches, whatever the number of ranks: scores of equal
epochs are those of equal work.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

from paceline.store import PackDataset
from paceline.studies.characterize.digits import CHOICES, IMAGES, PACK
from paceline.studies.demo_files import SIDE
from paceline.studies.demo_train import build_model, decode, split
from paceline.training import prepare
from paceline.training.optimizers import LARS, parameter_groups

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES = 10
_WIDTH = 256  # of the perceptron
_EMBEDDING, _HEADS = 64, 4  # of the transformer, which takes a row of pixels as a token
REFERENCE_BATCH = 64  # samples of a step on all ranks, for which the rates are tuned
RATES = {"sgd": 0.05, "lars": 4.0}
WARM_UP_EPOCHS = 4  # in which compression grows to its ratio, as published
MOMENTUM, DECAY = 0.9, 1e-4


class RowTokens(nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """Turns an image into a token for each of its rows, with its place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(SIDE, _EMBEDDING)
        self.places = nn.Parameter(torch.zeros(SIDE, _EMBEDDING))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return tokens, shape (batch, side, embedding), of images (batch, 1, side, side)."""
        tokens: torch.Tensor = self.embed(images.squeeze(1)) + self.places
        return tokens


def make_model(name: str) -> nn.Sequential:
    """Return a model for images of shape (batch, 1, side, side), as a sequence of layers."""
    if name == "cnn":
        return build_model()
    if name == "mlp":
        sizes = (SIDE * SIDE, _WIDTH, _WIDTH, _WIDTH)
        hidden = [
            layer
            for size, following in itertools.pairwise(sizes)
            for layer in (nn.Linear(size, following), nn.ReLU())
        ]
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(_WIDTH, CLASSES))
    blocks = [
        nn.TransformerEncoderLayer(
            _EMBEDDING, _HEADS, dim_feedforward=4 * _EMBEDDING, dropout=0.0, batch_first=True
        )
        for _ in range(2)
    ]
    return nn.Sequential(RowTokens(), *blocks, nn.Flatten(), nn.Linear(SIDE * _EMBEDDING, CLASSES))


def make_optimizer(name: str, model: nn.Module, step_batch: int) -> torch.optim.Optimizer:
    """Return an optimizer whose rate grows with the samples of a step on all ranks."""
    rate = RATES[name] * step_batch / REFERENCE_BATCH
    groups = parameter_groups(model, weight_decay=DECAY)
    if name == "lars":
        return LARS(groups, rate, momentum=MOMENTUM)
    return torch.optim.SGD(groups, rate, momentum=MOMENTUM)


def _step(name: str) -> dict[str, Any]:
    """Return what the prediction of a training step needs."""
    torch.set_num_threads(1)
    return {
        "module": make_model(name),
        "inputs": torch.zeros(32, 1, SIDE, SIDE),
        "target": torch.zeros(32, dtype=torch.long),
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.SGD(
            parameters, RATES["sgd"], momentum=MOMENTUM
        ),
    }


def cnn_step() -> dict[str, Any]:
    """Return the step of the CNN."""
    return _step("cnn")


def mlp_step() -> dict[str, Any]:
    """Return the step of the perceptron."""
    return _step("mlp")


def transformer_step() -> dict[str, Any]:
    """Return the step of the transformer."""
    return _step("transformer")


class Checkpointed(nn.Module):  # type: ignore[misc]
    """Layers whose activations are computed again in the backward pass, in two segments."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the layers' outputs."""
        if not self.training:
            outputs: torch.Tensor = self.layers(images)
            return outputs
        computed: torch.Tensor = checkpoint_sequential(self.layers, 2, images, use_reentrant=False)
        return computed


class FileDataset(Dataset):  # type: ignore[misc]
    """Images as files, in folders by class: a file is opened for each sample."""

    def __init__(self, folder: Path, transform: Callable[[bytes], torch.Tensor]) -> None:
        self.paths = sorted(folder.glob("*/*.png"))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, sample: int) -> tuple[torch.Tensor, int]:
        path = self.paths[sample]
        return self.transform(path.read_bytes()), int(path.parent.name)


def main() -> None:
    """Train, test, and have rank 0 write the scores."""
    options = _options()
    dist.init_process_group("gloo")
    world = dist.group.WORLD
    scores = train_model(options)
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps(scores))
    dist.barrier()  # all ranks end together
    # DistributedDataParallel must not be the last to hold the group: its reducer would then join
    # gloo's threads with the GIL, which such a thread may need to release a tensor (torch 2.10).
    gc.collect()
    dist.destroy_process_group()
    del world


def train_model(options: argparse.Namespace) -> dict[str, float | None]:
    """Train on this rank's part of the data, and return the scores of the model."""
    torch.manual_seed(options.seed)
    data: Any = (
        PackDataset(options.data / PACK, decode)
        if options.storage == "packed"
        else FileDataset(options.data / IMAGES, decode)
    )
    train, test = split(len(data))
    sampler: DistributedSampler[Any] = DistributedSampler(train, seed=options.seed, drop_last=True)
    loader = DataLoader(
        Subset(data, train),
        options.batch,
        sampler=sampler,
        drop_last=True,
        num_workers=options.loader_workers,
        persistent_workers=options.loader_workers > 0,
    )
    layers = make_model(options.model)
    module = Checkpointed(layers) if options.checkpointing == "on" else layers
    optimizer = make_optimizer(options.optimizer, module, options.batch * dist.get_world_size())
    compression: dict[str, Any] = {
        "none": {},
        "dgc": {"compression": "dgc", "compression_warmup": WARM_UP_EPOCHS * len(loader)},
    }
    model, optimizer = prepare(
        module,
        optimizer,
        engine="ddp",
        precision=options.precision,
        **compression[options.compression],
    )
    loss_fn = nn.CrossEntropyLoss()
    losses: list[torch.Tensor] = []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        losses = []  # of the last epoch
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return {
        "accuracy": _accuracy(module, data, test) if dist.get_rank() == 0 else None,
        "loss": round(torch.stack(losses).mean().item(), 4) if losses else None,
    }


def _accuracy(module: nn.Module, data: Any, test: list[int]) -> float:
    """Return the share of the test images, a fifth of all, that are classified rightly."""
    module.eval()
    with torch.no_grad():
        images, labels = next(iter(DataLoader(Subset(data, test), len(test))))
        right: float = (module(images).argmax(1) == labels).float().mean().item()
    return round(right, 4)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices, default=choices[0])
    return parser.parse_args()


if __name__ == "__main__":
    main()
