"""A residual CNN on scikit-learn's handwritten digits, its layers divided among ranks.

    python examples/pipeline_digits.py                                      one process
    paceline run -n 2 --strategy model examples/pipeline_digits.py          two stages
    paceline run -n 4 --strategy hybrid --partitions 2 examples/pipeline_digits.py

The script is the same for all of them. Its last line of output is one JSON object.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.training import prepare


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(16) for _ in range(4)))
        self.head = nn.Linear(16 * 4, 10)

    def forward(self, x):
        first = self.stem(x)
        features = first + self.blocks(first)  # whatever stages lie between
        return self.head(nn.functional.avg_pool2d(features, 4).flatten(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, of all replicas")
    options = parser.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:1536], labels[:1536])

    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    prepared = prepare(
        model, optimizer, loss_fn=nn.functional.cross_entropy, example_inputs=images[:8]
    )
    sampler = DistributedSampler(train, num_replicas=prepared.replicas, rank=prepared.replica)
    loader = DataLoader(train, batch_size=options.batch // prepared.replicas, sampler=sampler)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = prepared.forward_backward(inputs, target)
            optimizer.step()
    state = prepared.state_dict()  # all ranks call it; rank 0 gets the whole model
    if prepared.ranks.rank == 0:
        whole = Net()
        whole.load_state_dict(state["model"])
        with torch.no_grad():
            right = (whole(images[1536:]).argmax(1) == labels[1536:]).float().mean()
        print(
            json.dumps(
                {
                    "replicas": prepared.replicas,
                    "divided": prepared.is_divided,
                    "loss": round(float(loss), 4),
                    "accuracy": round(float(right), 4),
                }
            )
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
