"""An ordinary DDP script: a small CNN on scikit-learn's handwritten digits.

    torchrun --standalone --nproc-per-node 2 examples/ddp_digits.py
    paceline run -n 2 examples/ddp_digits.py

Its last line of output is one JSON object.
"""

import argparse
import hashlib
import json

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load_tensors():
    """Return (train, test) data sets; every fifth image is for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    train, test = load_tensors()
    sampler = DistributedSampler(train, seed=options.seed)
    loader = DataLoader(train, batch_size=options.batch, sampler=sampler)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(images), labels)
            loss.backward()
            optimizer.step()

    model.eval()
    with torch.no_grad():
        images, labels = test.tensors
        accuracy = (model.module(images).argmax(1) == labels).float().mean().item()
    weights = hashlib.sha256()
    for tensor in model.module.state_dict().values():
        weights.update(tensor.numpy().tobytes())
    if dist.get_rank() == 0:
        result = {"weights_sha256": weights.hexdigest(), "test_accuracy": round(accuracy, 4)}
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
